import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from app.config import SimulationSettings, VllmSettings
from app.contracts.exchange import PoolRequest, ReplyHead
from app.pools.chunks import joined
from app.pools.engine import Tally
from app.pools.simulated import SimulatedEngine
from app.pools.vllm import with_service_tier

CHAT = "/v1/chat/completions"
FAST = SimulationSettings(
    prefill_tokens_per_s=1e9, decode_tokens_per_s=1e6, kv_tokens=1000, output_tokens=3
)


def engine(slots: int = 2) -> SimulatedEngine:
    limits = VllmSettings(max_num_seqs=slots, max_model_len=64, kv_cache_dtype="fp8")
    return SimulatedEngine("m", limits, FAST)


def request(priority: int = 0, **fields: Any) -> PoolRequest:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    return PoolRequest(CHAT, json.dumps(body).encode(), "r", priority, "flex")


async def collected(source: AsyncGenerator[ReplyHead | bytes, None]) -> list[Any]:
    return [item async for item in source]


def test_a_simulated_stream_has_one_chunk_a_token_then_usage_then_done() -> None:
    sent = request(stream=True, stream_options={"include_usage": True})
    head, *chunks = asyncio.run(collected(engine().respond(sent, Tally())))
    assert head.status == 200
    assert len(chunks) == 1 + 3 + 1 + 1
    usage = json.loads(chunks[-2].removeprefix(b"data: "))["usage"]
    assert usage["prompt_tokens"] == head.prompt_tokens
    assert usage["completion_tokens"] == 3


def test_a_prompt_beyond_the_context_is_refused() -> None:
    head, _ = asyncio.run(collected(engine().respond(request(max_tokens=64), Tally())))
    assert head.status == 400


def test_slots_are_given_by_priority_and_freed_by_closing() -> None:
    """Two run, three wait; the one with the lowest number comes first when a slot is free."""

    async def scene() -> None:
        two = engine(slots=2)
        firsts = [two.respond(request(stream=True, max_tokens=40), Tally()) for _ in range(2)]
        for stream in firsts:
            await anext(stream)
        order: list[int] = []

        async def waiter(priority: int) -> None:
            await collected(two.respond(request(priority), Tally()))
            order.append(priority)

        tasks = [asyncio.create_task(waiter(p)) for p in (10, 0, -10)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert (two.load().running, two.load().waiting) == (2, 3)
        await firsts[0].aclose()
        await asyncio.gather(*tasks)
        assert order == [-10, 0, 10]
        await firsts[1].aclose()
        assert (two.load().running, two.load().waiting, two.load().kv_used_fraction) == (0, 0, 0.0)

    asyncio.run(scene())


def test_chunks_that_pile_up_are_joined_and_none_is_lost() -> None:
    async def source() -> AsyncGenerator[ReplyHead | bytes, None]:
        yield ReplyHead(200, "text/event-stream")
        for number in range(10):
            yield bytes([number])

    items = asyncio.run(collected(joined(source(), lambda: 0.001)))
    assert b"".join(items[1:]) == bytes(range(10))
    assert len(items) < 11


def test_a_failure_comes_after_the_chunks_before_it() -> None:
    async def source() -> AsyncGenerator[ReplyHead | bytes, None]:
        yield ReplyHead(200, "text/event-stream")
        yield b"a"
        raise RuntimeError("engine died")

    seen: list[Any] = []

    async def scene() -> None:
        async for item in joined(source(), lambda: 0.0):
            seen.append(item)  # noqa: PERF401 - what came before the failure is wanted

    with pytest.raises(RuntimeError, match="engine died"):
        asyncio.run(scene())
    assert seen[1:] == [b"a"]


@pytest.mark.parametrize(
    ("chunk", "told"),
    [
        (b'data: {"id":1}\n\n', b'data: {"service_tier":"flex","id":1}\n\n'),
        (b'{"a":{},"service_tier":null}', b'{"a":{},"service_tier":"flex"}'),
    ],
)
def test_the_served_tier_is_written_into_the_first_chunk(chunk: bytes, told: bytes) -> None:
    assert with_service_tier(chunk, "flex") == told
