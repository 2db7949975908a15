"""Idle latency slots lent to a backlog, and given back, on a real Ray Serve."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from ray import serve

from app.graph import build
from tests.serve.support import URL, app_args, pool_row, until, wait_for

# At 100 tokens/s a line holds its slot for half a second.
LINE = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 50, "service_tier": "flex"}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 50}


@pytest.fixture(scope="module")
def app(cluster: None) -> Iterator[str]:
    """Eight latency slots, two of them headroom, four to lend; four throughput slots."""
    args = app_args("simulated.yaml")
    throughput = args["pools"]["throughput"]
    throughput["vllm"] = {**throughput["vllm"], "max_num_seqs": 4}
    throughput["admission"] = {"max_queued": 200, "aging_s": 10.0}
    serve.run(build(args), name="lending", route_prefix="/lending")
    wait_for(f"{URL}/lending/health")
    yield f"{URL}/lending"
    serve.delete("lending")


async def post(client: httpx.AsyncClient, app: str, body: dict[str, Any]) -> httpx.Response:
    return await client.post(f"{app}/v1/chat/completions", json=body)


def test_a_backlog_borrows_and_chat_takes_back_and_every_line_ends_once(app: str) -> None:
    lent: list[int] = []

    async def watch(client: httpx.AsyncClient) -> None:
        while True:
            rows = (await client.get(f"{app}/v1/pools")).json()["data"]
            lent.append(next(row["lent_slots"] for row in rows if row["id"] == "latency"))
            await asyncio.sleep(0.1)

    async def play() -> tuple[list[httpx.Response], list[httpx.Response]]:
        limits = httpx.Limits(max_connections=400)
        async with httpx.AsyncClient(timeout=60, limits=limits) as client:
            watching = asyncio.create_task(watch(client))
            lines = [asyncio.create_task(post(client, app, LINE)) for _ in range(60)]
            await asyncio.sleep(2.5)
            assert max(lent) == 4
            chats = await asyncio.gather(*(post(client, app, CHAT) for _ in range(8)))
            answers = list(await asyncio.gather(*lines))
            watching.cancel()
            return answers, chats

    lines, chats = asyncio.run(play())
    assert Counter(a.status_code for a in lines) == {200: 60}
    assert len({a.json()["id"] for a in lines}) == 60
    assert [(a.status_code, a.headers["x-pool"]) for a in chats] == [(200, "latency")] * 8
    assert max(lent) <= 4
    counts = pool_row(app, "latency")["counts"]
    assert counts["evicted"] >= 1
    borrowed = sum(a.headers["x-pool"] == "latency" for a in lines)
    # A loan that home overtook was begun, and ended unread.
    assert 1 <= borrowed <= counts["borrow"] - counts["evicted"]
    assert "borrowed" in next(
        a.headers["x-route-reason"] for a in lines if a.headers["x-pool"] == "latency"
    )


def test_slots_are_lent_again_after_a_quiet_while(app: str) -> None:
    assert until(lambda: pool_row(app, "latency")["lendable_slots"] == 4, 10)
