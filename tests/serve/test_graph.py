"""The router in front of two simulated pools, on a real Ray Serve."""

import json
import os
import signal
from typing import Any

import httpx
import pytest

from tests.serve.support import pool_row, until, wait_for

HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
LONG = {"messages": [{"role": "user", "content": "word " * 3000}], "max_tokens": 2}


def chat(url: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/chat/completions", json={**HI, **fields}, timeout=30)


@pytest.mark.parametrize(
    ("fields", "pool"),
    [
        pytest.param({}, "latency", id="undeclared_short"),
        pytest.param({"service_tier": "priority"}, "latency", id="urgent_short"),
        pytest.param({"service_tier": "flex"}, "throughput", id="deferrable_short"),
        pytest.param(LONG, "throughput", id="undeclared_long"),
        pytest.param({**LONG, "service_tier": "priority"}, "throughput", id="urgent_long"),
    ],
)
def test_a_class_goes_to_its_pool(simulated: str, fields: dict[str, Any], pool: str) -> None:
    answer = chat(simulated, **fields)
    assert answer.status_code == 200
    assert answer.headers["x-pool"] == pool
    assert answer.headers["x-route-reason"]
    assert answer.headers["x-request-id"]
    assert int(answer.headers["x-prompt-tokens"]) == answer.json()["usage"]["prompt_tokens"]


def test_the_header_declares_for_clients_that_cannot_set_the_body(simulated: str) -> None:
    answer = httpx.post(
        f"{simulated}/v1/chat/completions", json=HI, headers={"x-urgency": "deferrable"}, timeout=30
    )
    assert answer.headers["x-pool"] == "throughput"


def test_a_stream_ends_with_done_and_names_the_served_tier(simulated: str) -> None:
    answer = chat(simulated, stream=True, service_tier="flex")
    events = [e.removeprefix("data: ") for e in answer.text.split("\n\n") if e]
    assert events[-1] == "[DONE]"
    assert json.loads(events[0])["service_tier"] == "flex"
    assert len(events) == 1 + 4 + 1


def test_the_slots_of_a_cut_stream_are_free_within_seconds(simulated: str) -> None:
    """The snapshot is a second old at most, so two are allowed for it and the abort."""
    body = {**HI, "stream": True, "max_tokens": 3000}
    with httpx.stream("POST", f"{simulated}/v1/chat/completions", json=body, timeout=30) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        assert until(lambda: pool_row(simulated, "latency")["running"] == 1, 3)
    assert until(lambda: pool_row(simulated, "latency")["running"] == 0, 3)


def test_a_client_that_leaves_before_the_first_byte_is_noticed(simulated: str) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{simulated}/v1/chat/completions", json={**HI, "max_tokens": 3000}, timeout=1.5)
    assert until(lambda: pool_row(simulated, "latency")["running"] == 0, 3)


def test_a_killed_replica_ends_its_stream_with_an_error_and_spares_the_other(
    simulated: str,
) -> None:
    """cases.md 31 and 45: never a silent end, never the other pool, and it comes back."""
    body = {**HI, "stream": True, "max_tokens": 3000, "service_tier": "flex"}
    path = f"{simulated}/v1/chat/completions"
    with httpx.stream("POST", path, json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        for _ in range(6):
            next(lines)
        pid = replica_pid(simulated, "throughput")
        os.kill(pid, signal.SIGKILL)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "stream_broken"
    assert chat(simulated).status_code == 200
    refused = chat(simulated, service_tier="flex")
    assert refused.status_code in (200, 503)
    if refused.status_code == 503:
        assert int(refused.headers["retry-after"]) >= 1
    wait_for(f"{simulated}/health")
    assert chat(simulated, service_tier="flex").status_code == 200


def replica_pid(url: str, pool: str) -> int:
    pids = pool_row(url, pool)["pids"]
    assert len(pids) == 1
    return int(pids[0])
