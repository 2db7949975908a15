"""An engine process that dies under a stream: what its client sees, and what the others do not."""

import json
import time
from typing import Any

import httpx
import psutil

CHAT = "/v1/chat/completions"
# An engine beside another takes about 140 s to start on two slow cores.
RECOVERY_LIMIT_S = 260
GONE_LIMIT_S = 15


def sent(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, **fields}


def test_a_killed_engine_ends_its_stream_with_an_error_and_comes_back(url: str) -> None:
    """cases.md 31 and 45: an error event and [DONE]; afterwards 200 or an honest 503."""
    rest = rest_after_a_kill(url, "flex", engine(replica(url, "throughput")))
    assert rest[-1] == "data: [DONE]"
    assert "error" in json.loads(rest[-2].removeprefix("data: "))
    recovers(url, dead="flex", alive="default")


def test_a_killed_replica_takes_its_engine_with_it(url: str) -> None:
    """An engine left behind would hold the memory that the next replica needs."""
    victim = replica(url, "latency")
    left = [victim, *victim.children(recursive=True)]
    rest = rest_after_a_kill(url, "default", victim)
    assert rest[-1] == "data: [DONE]"
    _, alive = psutil.wait_procs(left, timeout=GONE_LIMIT_S)
    assert not alive
    recovers(url, dead="default", alive="flex")


def rest_after_a_kill(url: str, tier: str, victim: psutil.Process) -> list[str]:
    """Start a stream, kill, and give the lines that came after."""
    body = sent(stream=True, max_tokens=2000, ignore_eos=True, service_tier=tier)
    with httpx.stream("POST", f"{url}{CHAT}", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        for _ in range(6):
            next(lines)
        victim.kill()
        return [line for line in lines if line]


def replica(url: str, pool: str) -> psutil.Process:
    rows = httpx.get(f"{url}/v1/pools", timeout=10).json()["data"]
    return psutil.Process(next(row for row in rows if row["id"] == pool)["pids"][0])


def engine(owner: psutil.Process) -> psutil.Process:
    """The process that computes: the replica's child that holds the most memory."""
    return max(owner.children(recursive=True), key=lambda p: p.memory_info().rss)


def recovers(url: str, dead: str, alive: str) -> None:
    """Ask both pools until the killed one answers and all is healthy."""
    seen: set[int] = set()
    end = time.monotonic() + RECOVERY_LIMIT_S
    while time.monotonic() < end:
        other = httpx.post(f"{url}{CHAT}", json=sent(service_tier=alive), timeout=60)
        assert other.status_code == 200
        answer = httpx.post(f"{url}{CHAT}", json=sent(service_tier=dead), timeout=60)
        seen.add(answer.status_code)
        assert answer.status_code in {200, 503}
        if answer.status_code == 503:
            assert int(answer.headers["retry-after"]) >= 1
            time.sleep(1)
        elif httpx.get(f"{url}/health", timeout=10).status_code == 200:
            return
    raise AssertionError(f"the pool did not come back within {RECOVERY_LIMIT_S} s: {seen}")
