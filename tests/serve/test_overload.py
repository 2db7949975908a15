"""More work than slots, on a real Ray Serve with simulated engines."""

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import psutil
import pytest
from ray import serve

from app.graph import build
from tests.serve.support import URL, app_args, pool_row, until, wait_for

# One request of 20 tokens at 100 tokens/s holds its slot for 0.2 s.
BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}


def crowded(**changes: Any) -> dict[str, Any]:
    """`simulated.yaml` with two slots a latency replica and four a throughput replica."""
    args = app_args("simulated.yaml")
    latency, throughput = args["pools"]["latency"], args["pools"]["throughput"]
    latency["vllm"] = {**latency["vllm"], "max_num_seqs": 2}
    latency["admission"] = {"headroom": 0.0}
    throughput["vllm"] = {**throughput["vllm"], "max_num_seqs": 4}
    throughput["admission"] = {"max_queued": 8, "aging_s": 10.0}
    for path, value in changes.items():
        pool, _, key = path.partition("__")
        args["pools"][pool][key] = value
    return args


@pytest.fixture
def app(cluster: None, request: pytest.FixtureRequest) -> Iterator[str]:
    serve.run(build(request.param), name="crowded", route_prefix="/crowded")
    wait_for(f"{URL}/crowded/health")
    yield f"{URL}/crowded"
    serve.delete("crowded")


@asynccontextmanager
async def client() -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=400)
    async with httpx.AsyncClient(timeout=60, limits=limits) as made:
        yield made


async def send(made: httpx.AsyncClient, url: str, **fields: Any) -> httpx.Response:
    return await made.post(f"{url}/v1/chat/completions", json={**BODY, **fields})


def burst(url: str, count: int, **fields: Any) -> list[httpx.Response]:
    async def play() -> list[httpx.Response]:
        async with client() as made:
            return await asyncio.gather(*(send(made, url, **fields) for _ in range(count)))

    return asyncio.run(play())


@pytest.mark.parametrize("app", [crowded()], indirect=True, ids=["refuse"])
def test_two_hundred_at_two_slots_are_answered_or_refused_at_once(app: str) -> None:
    """cases.md 36: none hangs, none waits in the engine, the refused know when to come back."""
    begun = time.monotonic()
    answers = burst(app, 200)
    took_s = time.monotonic() - begun
    statuses = Counter(a.status_code for a in answers)
    assert set(statuses) == {200, 429}
    assert statuses[200] >= 2
    refused = [a for a in answers if a.status_code == 429]
    assert all(a.json()["error"]["code"] == "pool_busy" for a in refused)
    assert all(int(a.headers["retry-after"]) >= 1 for a in refused)
    assert took_s < 20
    row = pool_row(app, "latency")
    assert (row["waiting"], row["queued"]) == (0, 0)


@pytest.mark.parametrize("app", [crowded()], indirect=True, ids=["refuse"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_429_streaming_or_not(app: str, stream: bool) -> None:
    """cases.md 37: an OpenAI error object, never a 500."""
    answers = burst(app, 40, stream=stream, service_tier="flex")
    statuses = Counter(a.status_code for a in answers)
    assert set(statuses) == {200, 429}
    # Four run and eight wait at first; as they end, others of the forty may come in.
    assert statuses[200] >= 12


@pytest.mark.parametrize("app", [crowded()], indirect=True, ids=["refuse"])
def test_clients_that_obey_retry_after_mostly_succeed_the_second_time(app: str) -> None:
    async def obey(made: httpx.AsyncClient) -> tuple[int, int]:
        first = await send(made, app)
        if first.status_code == 200:
            return 200, 200
        await asyncio.sleep(int(first.headers["retry-after"]))
        return first.status_code, (await send(made, app)).status_code

    async def play() -> list[tuple[int, int]]:
        async with client() as made:
            for _ in range(5):
                # The pool has to have a drain that can be measured.
                await send(made, app)
            return await asyncio.gather(*(obey(made) for _ in range(30)))

    tries = asyncio.run(play())
    again = [second for first, second in tries if first == 429]
    assert len(again) >= 20
    assert again.count(200) >= 0.8 * len(again)


SPILLING = crowded(
    latency__admission={"headroom": 0.0, "spill": {"pool": "throughput", "priority": -20}}
)


@pytest.mark.parametrize("app", [SPILLING], indirect=True, ids=["spill"])
def test_one_more_than_the_slots_spills_and_says_so(app: str) -> None:
    pools = Counter(a.headers["x-pool"] for a in burst(app, 3))
    assert pools == {"latency": 2, "throughput": 1}
    assert pool_row(app, "throughput")["counts"]["spill"] == 1
    assert pool_row(app, "latency")["waiting"] == 0


@pytest.mark.parametrize("app", [crowded()], indirect=True, ids=["refuse"])
def test_a_wait_limit_ends_the_wait(app: str) -> None:
    async def play() -> list[httpx.Response]:
        async with client() as made:
            headers = {"x-max-wait-s": "0.3", "x-urgency": "deferrable"}
            path = f"{app}/v1/chat/completions"
            long = {**BODY, "max_tokens": 300}
            holders = [asyncio.create_task(send(made, app, max_tokens=300, service_tier="flex"))
                       for _ in range(4)]  # fmt: skip
            await asyncio.sleep(0.5)
            late = await made.post(path, json=long, headers=headers)
            return [late, *await asyncio.gather(*holders)]

    late, *held = asyncio.run(play())
    assert late.status_code == 408
    assert late.json()["error"]["code"] == "wait_limit_exceeded"
    assert int(late.headers["retry-after"]) >= 1
    assert [a.status_code for a in held] == [200] * 4


TWO_REPLICAS = crowded(latency__deployment={"num_replicas": 2, "max_ongoing_requests": 512})


@pytest.mark.parametrize("app", [TWO_REPLICAS], indirect=True, ids=["two_replicas"])
def test_a_silent_replica_blocks_nobody_else(app: str) -> None:
    """Half of the pool hangs: it is gone within its lease, and the other half goes on."""
    silent = pool_row(app, "latency")["pids"][0]
    os.kill(silent, signal.SIGSTOP)
    try:
        assert until(lambda: pool_row(app, "latency")["replicas"] == 1, 10)
        for _ in range(6):
            begun = time.monotonic()
            assert burst(app, 1)[0].status_code == 200
            assert time.monotonic() - begun < 3
    finally:
        os.kill(silent, signal.SIGCONT)
    assert until(lambda: pool_row(app, "latency")["replicas"] == 2, 20)


@pytest.mark.parametrize("app", [TWO_REPLICAS], indirect=True, ids=["two_replicas"])
def test_a_stream_of_a_replica_that_falls_silent_ends_with_an_error(app: str) -> None:
    body = {**BODY, "stream": True, "max_tokens": 2000}
    path = f"{app}/v1/chat/completions"
    with httpx.stream("POST", path, json=body, timeout=30) as answer:
        lines = answer.iter_lines()
        for _ in range(6):
            next(lines)
        pids = pool_row(app, "latency")["pids"]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            rest = [line for line in lines if line]
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
    assert rest[-1] == "data: [DONE]"
    assert "stream_broken" in rest[-2]


MANY = crowded(
    latency__deployment={"num_replicas": 2, "max_ongoing_requests": 512},
    latency__admission={"headroom": 0.25, "spill": {"pool": "throughput", "priority": -20}},
)
MANY["pools"]["latency"]["vllm"]["max_num_seqs"] = 8
MANY["router"] = {"num_replicas": 3, "max_ongoing_requests": 10_000}


@pytest.mark.parametrize("app", [MANY], indirect=True, ids=["three_routers"])
def test_three_routers_never_overfill_two_replicas(app: str) -> None:
    """2,000 requests at 1.3 times what the pools can do: every one has exactly one outcome."""
    seen: list[dict[str, Any]] = []

    async def watch(made: httpx.AsyncClient) -> None:
        while True:
            seen.append((await made.get(f"{app}/v1/pools")).json())
            await asyncio.sleep(0.1)

    async def play() -> list[httpx.Response]:
        # 20 slots, 0.8 s a request: 25 a second at most, and 32.5 are sent.
        async with client() as made:
            watcher = asyncio.create_task(watch(made))
            tasks = []
            begun = time.monotonic()
            for number in range(2000):
                await asyncio.sleep(begun + number / 32.5 - time.monotonic())
                tasks.append(asyncio.create_task(send(made, app, max_tokens=80)))
            answers = await asyncio.gather(*tasks)
            watcher.cancel()
            return answers

    answers = asyncio.run(play())
    statuses = Counter(a.status_code for a in answers)
    assert sum(statuses.values()) == 2000
    assert set(statuses) <= {200, 429}
    assert statuses[200] >= 1000
    assert len(seen) >= 200
    for row in (row for page in seen for row in page["data"]):
        assert row["running"] <= row["slots"]
        assert row["slots_taken"] <= row["slots"]
        assert row["waiting"] == 0
    ids = [a.headers["x-request-id"] for a in answers]
    assert len(set(ids)) == 2000


def serving(name: str) -> list[psutil.Process]:
    """The processes of a deployment's replicas."""
    title = f"ray::ServeReplica:crowded:{name}"
    return [p for p in psutil.process_iter() if " ".join(p.cmdline()).startswith(title)]


@pytest.mark.parametrize("app", [crowded()], indirect=True, ids=["refuse"])
def test_the_slots_of_a_killed_router_are_free_again(app: str) -> None:
    """Ray lets its calls run on: a slot is free at the latest when its output has ended."""
    body = {**BODY, "stream": True, "max_tokens": 800}
    with httpx.stream("POST", f"{app}/v1/chat/completions", json=body, timeout=5) as answer:
        lines = answer.iter_lines()
        next(lines)
        (router,) = serving("InferenceRouter")
        router.kill()
        # Serve's proxy (2.60.0) does not always end such an answer; the client's own limit does.
        with pytest.raises(httpx.HTTPError):
            list(lines)
    wait_for(f"{app}/health")
    assert until(lambda: pool_row(app, "latency")["slots_taken"] == 0, 20)
    assert burst(app, 1)[0].status_code == 200


LONG_QUEUE = crowded(throughput__admission={"max_queued": 400, "aging_s": 10.0})


@pytest.mark.parametrize("app", [LONG_QUEUE], indirect=True, ids=["long_queue"])
def test_a_backlog_does_not_cut_the_router_off(app: str) -> None:
    """Three hundred wait for half a minute: the pools still speak to it, and chat is served."""

    async def play() -> None:
        async with client() as made:
            backlog = [
                asyncio.create_task(send(made, app, max_tokens=800, service_tier="flex"))
                for _ in range(300)
            ]
            await asyncio.sleep(6)
            for _ in range(5):
                assert (await send(made, app, max_tokens=2)).status_code == 200
            rows = (await made.get(f"{app}/v1/pools")).json()["data"]
            assert [row["replicas"] for row in rows] == [1, 1]
            for task in backlog:
                task.cancel()
            await asyncio.gather(*backlog, return_exceptions=True)

    asyncio.run(play())
    assert until(lambda: pool_row(app, "throughput")["queued"] == 0, 20)
