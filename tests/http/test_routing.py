"""Where requests go on the real engines, what the answers say of it, and what faults do."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

CHAT = "/v1/chat/completions"
THRESHOLD = 1024


def body(content: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 1, **fields}


def chat(url: str, content: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{url}{CHAT}", json=body(content, **fields), timeout=240)


def pools(url: str) -> dict[str, dict[str, Any]]:
    rows = httpx.get(f"{url}/v1/pools", timeout=10).json()["data"]
    return {row["id"]: row for row in rows}


def running(url: str) -> int:
    return sum(row["running"] for row in pools(url).values())


def until_idle(url: str, limit_s: float) -> bool:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if running(url) == 0:
            return True
        time.sleep(0.1)
    return False


def test_the_same_bytes_hold_tokens_by_the_type_of_the_cache(url: str) -> None:
    """SmolLM2: 46,592 tokens of 16 bits; fp8 holds twice as many, 32 bits half as many."""
    kv_tokens = {"bfloat16": 46592, "fp8": 93184, "float32": 23296}
    rows = pools(url)
    assert rows["latency"]["kv_bytes"] == rows["throughput"]["kv_bytes"] == 2**30
    for row in rows.values():
        assert row["kv_tokens"] == kv_tokens[row["kv_cache_dtype"]]


def test_both_pools_have_proved_themselves(url: str) -> None:
    for row in pools(url).values():
        assert row["agreement"]["prompts"] == 8
        assert row["agreement"]["tokens_fraction"] >= 0.5


def test_a_long_prompt_goes_to_the_throughput_pool_and_the_reason_says_so(url: str) -> None:
    answer = chat(url, "word " * 3000)
    assert answer.status_code == 200
    assert answer.headers["x-pool"] == "throughput"
    assert "long from 1024" in answer.headers["x-route-reason"]
    assert int(answer.headers["x-prompt-tokens"]) >= 3000


@pytest.mark.parametrize(
    ("tokens", "pool"),
    [(THRESHOLD - 1, "latency"), (THRESHOLD, "throughput"), (THRESHOLD + 1, "throughput")],
)
def test_the_threshold_is_met_to_the_token(url: str, tokens: int, pool: str) -> None:
    """The count that decides is the engine's own `usage.prompt_tokens`."""
    empty = chat(url, "").json()["usage"]["prompt_tokens"]
    content = " word" * (tokens - empty)
    answer = chat(url, content)
    assert answer.json()["usage"]["prompt_tokens"] == tokens
    assert answer.headers["x-prompt-tokens"] == str(tokens)
    assert answer.headers["x-pool"] == pool
    explained = httpx.post(f"{url}/v1/route", json=body(content), timeout=30).json()
    assert explained["facts"]["prompt_tokens"] == tokens
    assert explained["pool"] == pool


def test_tools_are_counted_as_the_engine_counts_them(url: str) -> None:
    function = {"name": "f", "description": "d " * 300, "parameters": {"type": "object"}}
    fields = {"tools": [{"type": "function", "function": function}], "tool_choice": "auto"}
    explained = httpx.post(f"{url}/v1/route", json=body("hi", **fields), timeout=30).json()
    used = chat(url, "hi", **fields).json()["usage"]["prompt_tokens"]
    assert explained["facts"]["prompt_tokens"] == used


def test_byte_length_settles_a_short_prompt_without_the_tokenizer(url: str) -> None:
    explained = httpx.post(f"{url}/v1/route", json=body("hi"), timeout=30).json()
    assert explained["facts"]["counted"] is False
    assert explained["facts"]["prompt_tokens_range"][1] < THRESHOLD


@pytest.mark.parametrize("tier", [{}, {"service_tier": "flex"}], ids=["latency", "throughput"])
def test_a_cut_stream_is_aborted_in_the_engine(url: str, tier: dict[str, Any]) -> None:
    """The snapshot is at most a second old, so two and a half are allowed."""
    sent = body("Tell me a long story.", stream=True, max_tokens=2000, ignore_eos=True) | tier
    sent["max_tokens"] = 2000
    with httpx.stream("POST", f"{url}{CHAT}", json=sent, timeout=60) as answer:
        lines = answer.iter_lines()
        for _ in range(6):
            next(lines)
    assert until_idle(url, 2.5)


def test_a_client_that_leaves_while_it_waits_is_noticed(url: str) -> None:
    sent = body("Tell me a long story.", max_tokens=2000, ignore_eos=True)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}{CHAT}", json=sent, timeout=1.5)
    assert until_idle(url, 2.5)


def test_a_megabyte_does_not_stall_others(url: str) -> None:
    with ThreadPoolExecutor() as threads:
        large = threads.submit(chat, url, "word and more " * 75_000)
        slowest = 0.0
        while not large.done():
            begun = time.monotonic()
            assert httpx.get(f"{url}/health", timeout=10).status_code == 200
            slowest = max(slowest, time.monotonic() - begun)
    assert large.result().status_code == 400
    assert len(large.result().content) < 4096
    assert slowest < 1.0


def test_the_clients_request_id_comes_back(url: str) -> None:
    answer = httpx.post(
        f"{url}{CHAT}", json=body("hi"), headers={"x-request-id": "mine-1"}, timeout=60
    )
    assert answer.headers.get_list("x-request-id") == ["mine-1"]


def test_tokenize_counts_as_usage_does(url: str) -> None:
    counted = httpx.post(f"{url}/tokenize", json={"messages": body("hi")["messages"]}, timeout=30)
    assert counted.json()["count"] == chat(url, "hi").json()["usage"]["prompt_tokens"]
