"""The SLA on the real engines: bursts, long prompts and backlogs beside a chat.

Bounds on time are wide here; `python -m load.sla` measures.
"""

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import httpx

CHAT = "/v1/chat/completions"
# Nobody of a burst is done before the last one has come.
LONG = {"max_tokens": 64, "ignore_eos": True}


def body(content: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 4, **fields}


def row(url: str, pool: str) -> dict[str, Any]:
    rows = httpx.get(f"{url}/v1/pools", timeout=10).json()["data"]
    found: dict[str, Any] = next(r for r in rows if r["id"] == pool)
    return found


def arrivals(url: str, **fields: Any) -> Iterator[float]:
    """Times of a stream's content chunks."""
    sent = body("Count to one hundred.", stream=True, ignore_eos=True, **fields)
    with httpx.stream("POST", f"{url}{CHAT}", json=sent, timeout=120) as answer:
        assert answer.status_code == 200
        assert answer.headers["x-pool"] == "latency"
        for line in answer.iter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                yield time.monotonic()


@contextmanager
def most_waiting(url: str, pool: str) -> Iterator[list[int]]:
    """Samples of the engine's own count of waiting sequences."""
    seen: list[int] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.append(row(url, pool)["waiting"])
            time.sleep(0.05)

    with ThreadPoolExecutor(1) as pool_of_one:
        watching = pool_of_one.submit(watch)
        try:
            yield seen
        finally:
            done.set()
            watching.result()


def together(url: str, bodies: list[dict[str, Any]]) -> list[httpx.Response]:
    limits = httpx.Limits(max_connections=len(bodies))
    with (
        ThreadPoolExecutor(len(bodies)) as threads,
        httpx.Client(timeout=300, limits=limits) as client,
    ):
        return list(threads.map(lambda b: client.post(f"{url}{CHAT}", json=b), bodies))


def test_a_burst_of_exactly_the_slots_waits_nowhere_and_one_more_spills(url: str) -> None:
    slots = row(url, "latency")["slots"]
    with most_waiting(url, "latency") as waiting:
        exact = together(url, [body(f"{n} hi", **LONG) for n in range(slots)])
        one_more = together(url, [body(f"{n} ho", **LONG) for n in range(slots + 1)])
    assert {a.headers["x-pool"] for a in exact} == {"latency"}
    pools = Counter(a.headers["x-pool"] for a in one_more)
    assert pools == {"latency": slots, "throughput": 1}
    assert len(waiting) >= 5
    assert max(waiting) == 0


def test_more_than_every_queue_holds_is_answered_or_refused_and_nothing_hangs(url: str) -> None:
    """cases.md 36, at 8 slots, 64 behind them and a queue of 256."""
    with most_waiting(url, "latency") as waiting:
        answers = together(url, [body(f"{n} hi", max_tokens=1) for n in range(400)])
    statuses = Counter(a.status_code for a in answers)
    assert set(statuses) <= {200, 429}
    assert statuses[200] >= 300
    for refused in (a for a in answers if a.status_code == 429):
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "pool_busy"
    assert max(waiting) == 0
    assert httpx.post(f"{url}{CHAT}", json=body("hi"), timeout=60).status_code == 200


def test_an_urgent_chat_is_served_at_once_beside_thirty_background_requests(url: str) -> None:
    """cases.md 33: priority that only reorders a queue made it wait for a slot."""
    with ThreadPoolExecutor(30) as threads:
        document = body("word " * 600, max_tokens=32, service_tier="flex", ignore_eos=True)
        behind: list[Future[httpx.Response]] = [
            threads.submit(httpx.post, f"{url}{CHAT}", json=document, timeout=300)
            for _ in range(30)
        ]
        time.sleep(3)
        begun = time.monotonic()
        first = next(arrivals(url, max_tokens=4, service_tier="priority"))
        assert not all(f.done() for f in behind)
        assert {f.result().status_code for f in behind} == {200}
    assert first - begun < 5


def test_the_longest_urgent_prompt_does_not_stall_a_running_chat(url: str) -> None:
    """cases.md 35: it goes to the other pool, and the stream beside it flows on."""
    with ThreadPoolExecutor(1) as threads:
        times = arrivals(url, max_tokens=60)
        next(times)
        longest = body("word " * 4000, max_tokens=1, service_tier="priority")
        sent = threads.submit(httpx.post, f"{url}{CHAT}", json=longest, timeout=300)
        seen = list(times)
        answer = sent.result()
    assert (answer.status_code, answer.headers["x-pool"]) == (200, "throughput")
    assert len(seen) >= 40
    assert max(b - a for a, b in pairwise(seen)) < 3


def test_idle_slots_are_lent_to_a_backlog_and_chat_gets_them_back(url: str) -> None:
    """One client for all lines: a hundred clients take a minute to make, and home keeps up."""
    end = time.monotonic() + 30
    # The quiet that a chat before this test has asked for.
    while row(url, "latency")["lendable_slots"] < 4 and time.monotonic() < end:
        time.sleep(0.1)
    line = body("Write a line.", max_tokens=64, service_tier="flex", ignore_eos=True)
    with (
        httpx.Client(base_url=url, timeout=300, limits=httpx.Limits(max_connections=100)) as client,
        ThreadPoolExecutor(100) as threads,
    ):
        lines = [threads.submit(client.post, CHAT, json=line) for _ in range(100)]
        end = time.monotonic() + 40
        # One loan every half second, and each runs for seconds.
        while (lent := row(url, "latency")["lent_slots"]) < 4 and time.monotonic() < end:
            time.sleep(0.1)
        assert lent == 4
        chat = httpx.post(f"{url}{CHAT}", json=body("hi"), timeout=60)
        assert (chat.status_code, chat.headers["x-pool"]) == (200, "latency")
        answers = [f.result() for f in lines]
    assert Counter(a.status_code for a in answers) == {200: 100}
    assert len({a.json()["id"] for a in answers}) == 100
    assert {a.headers["x-pool"] for a in answers} == {"latency", "throughput"}
    assert row(url, "latency")["counts"]["evicted"] >= 1
