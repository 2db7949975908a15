"""One pool replica without Ray: what it admits, turns away, takes back and tells."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from app.config import SimulationSettings, VllmSettings
from app.contracts.exchange import Admitted, Item, PoolRequest, Refusal, ReplyHead
from app.contracts.placement import Demand, Kind
from app.contracts.pool import PoolSnapshot
from app.pools.lending import LendingRules
from app.pools.proof import Proof
from app.pools.server import PoolServer, PoolTerms
from app.pools.simulated import SimulatedEngine

BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
TERMS = PoolTerms(
    headroom_slots=1,
    max_queued=0,
    max_queued_tokens=10_000,
    aging_s=10.0,
    chunks_per_s=1000.0,
    long_output_tokens=4,
    niceness=0,
    lending=LendingRules(2, "slot", resume_after_s=0.0, max_tpot_increase=1.25),
)


class Told:
    """The snapshots that the routers were told."""

    def __init__(self) -> None:
        self.snapshots: list[PoolSnapshot] = []

    def make(self) -> tuple[str, Callable[[PoolSnapshot], Awaitable[None]]]:
        async def tell(snapshot: PoolSnapshot) -> None:
            self.snapshots.append(snapshot)

        return "r1", tell


def request(**fields: Any) -> PoolRequest:
    made = PoolRequest("/v1/chat/completions", json.dumps(BODY).encode(), "id", router="me")
    return replace(made, **{"demand": Demand(1, 10, 40), **fields})


def play(
    scene: Callable[[PoolServer, Told], Awaitable[None]],
    terms: PoolTerms = TERMS,
    tokens_per_s: float = 1e4,
) -> None:
    async def run() -> None:
        limits = VllmSettings(max_num_seqs=2, max_model_len=64, kv_cache_dtype="fp8")
        speeds = SimulationSettings(
            prefill_tokens_per_s=1e9, decode_tokens_per_s=tokens_per_s, kv_tokens=1000
        )
        told = Told()
        server = PoolServer.__new__(PoolServer)
        await PoolServer.__init__(  # type: ignore[misc]  # Ray Serve awaits it, too
            server,
            "latency",
            lambda: SimulatedEngine("m", limits, speeds),
            Proof("none", 0.0, 1.0),
            terms,
            told.make,
            None,
        )
        await scene(server, told)

    asyncio.run(run())


async def collected(server: PoolServer, sent: PoolRequest) -> list[Item]:
    async with aclosing(server.respond(sent)) as items:
        return [item async for item in items]


def held(server: PoolServer, **fields: Any) -> "asyncio.Task[list[Item]]":
    return asyncio.create_task(collected(server, request(**fields)))


async def cancelled(*tasks: "asyncio.Task[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_an_answer_is_a_head_and_bytes_and_frees_its_slot() -> None:
    async def scene(server: PoolServer, told: Told) -> None:
        head, body = await collected(server, request())
        assert isinstance(head, ReplyHead)
        assert head.status == 200
        assert isinstance(body, bytes)
        after = await server.snapshot()
        assert (after.occupancy.slots, after.counts) == (0, {"home": 1})

    play(scene)


def test_past_the_last_slot_the_answer_is_a_refusal_at_once() -> None:
    async def scene(server: PoolServer, told: Told) -> None:
        tasks = [held(server) for _ in range(2)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        (refusal,) = await collected(server, request())
        assert isinstance(refusal, Refusal)
        assert refusal.retry_after_s >= 1
        now = await server.snapshot()
        assert (now.load.running, now.load.waiting, now.counts["refused"]) == (2, 0, 1)
        assert now.occupancy.by_router == {"me": 2}
        await cancelled(*tasks)

    play(scene, tokens_per_s=1.0)


def test_what_needs_no_slot_is_answered_even_when_all_are_taken() -> None:
    async def scene(server: PoolServer, told: Told) -> None:
        tasks = [held(server) for _ in range(2)]
        await asyncio.sleep(0)
        head, _ = await collected(server, request(path="/tokenize", demand=Demand(0, 0, 0)))
        assert isinstance(head, ReplyHead)
        await cancelled(*tasks)

    play(scene, tokens_per_s=1.0)


def test_a_request_that_waits_says_when_it_begins_and_ends_at_its_limit() -> None:
    async def scene(server: PoolServer, told: Told) -> None:
        tasks = [held(server) for _ in range(2)]
        await asyncio.sleep(0)
        (late,) = await collected(server, request(max_wait_s=0.01))
        assert isinstance(late, Refusal)
        assert late.is_late
        moves = held(server, may_move=True)
        await asyncio.sleep(0)
        await cancelled(tasks[0])
        begun, head, _ = await asyncio.wait_for(moves, 10)
        assert isinstance(begun, Admitted)
        assert isinstance(head, ReplyHead)
        await cancelled(*tasks)

    play(scene, replace(TERMS, max_queued=4), tokens_per_s=20.0)


def test_a_request_that_leaves_the_queue_leaves_no_trace() -> None:
    async def scene(server: PoolServer, told: Told) -> None:
        tasks = [held(server) for _ in range(3)]
        await asyncio.sleep(0)
        assert (await server.snapshot()).occupancy.queued == 1
        await cancelled(*tasks)
        after = (await server.snapshot()).occupancy
        assert (after.slots, after.queued, after.by_router) == (0, 0, {})

    play(scene, replace(TERMS, max_queued=4), tokens_per_s=1.0)


def test_a_lent_slot_is_given_back_with_an_eviction_and_nothing_of_the_answer() -> None:
    async def scene(server: PoolServer, told: Told) -> None:
        lent = held(server, kind=Kind.BORROW, is_deferrable=True)
        first = held(server)
        await asyncio.sleep(0.01)
        assert (await server.snapshot()).occupancy.lent_slots == 1
        second = held(server)
        (eviction,) = await asyncio.wait_for(lent, 10)
        assert isinstance(eviction, Refusal)
        assert eviction.is_eviction
        await asyncio.sleep(0.01)
        now = await server.snapshot()
        assert (now.occupancy.slots, now.occupancy.lent_slots, now.load.running) == (2, 0, 2)
        assert now.counts["evicted"] == 1
        await cancelled(first, second)

    play(scene, tokens_per_s=1.0)


def test_an_answer_longer_than_expected_counts_as_misrouted() -> None:
    async def scene(server: PoolServer, told: Told) -> None:
        await collected(server, request(is_short=True))
        await collected(server, request(is_short=False))
        assert (await server.snapshot()).counts["long_output"] == 1

    play(scene)


def test_routers_are_told_of_a_change_soon_and_of_none_twice_a_second() -> None:
    async def scene(server: PoolServer, told: Told) -> None:
        await asyncio.sleep(1.2)
        quiet = len(told.snapshots)
        assert quiet >= 3
        task = held(server)
        await asyncio.sleep(0.2)
        assert told.snapshots[-1].occupancy.slots == 1
        numbers = [s.number for s in told.snapshots]
        assert numbers == sorted(set(numbers))
        await cancelled(task)

    play(scene, tokens_per_s=1.0)
