"""The deployment of one pool: an engine that has proved itself, behind an actor boundary.

In: `PoolRequest`. Out: a `Refusal`, or a `ReplyHead` and chunks of bytes. Tells every router what
it holds, often. Knows nothing of other pools.
"""

import asyncio
import contextlib
import os
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from app.contracts.exchange import Admitted, Item, PoolRequest, Refusal, ReplyHead
from app.contracts.placement import Demand, Kind
from app.contracts.pool import EngineFacts, PoolSnapshot
from app.pools.admission import AdmissionLimits, Gate, State, Ticket, TurnedAway
from app.pools.chunks import joined
from app.pools.engine import Engine, Tally
from app.pools.lending import Lending, LendingRules
from app.pools.proof import Answer, Proof, answer_known

# A snapshot follows a change at once, but not oftener than this, and comes without one as well.
SNAPSHOT_GAP_S = 0.1
HEARTBEAT_S = 0.5
Announce = Callable[[PoolSnapshot], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class PoolTerms:
    """How one replica takes requests and sends answers.

    `headroom_slots` of its slots are never given to deferrable work. `long_output_tokens`: from
    there on an answer to a short request counts as misrouted. `niceness` is added to its own.
    """

    headroom_slots: int
    max_queued: int
    max_queued_tokens: int
    aging_s: float
    chunks_per_s: float
    long_output_tokens: int
    niceness: int
    lending: LendingRules | None

    def gate(self, facts: EngineFacts) -> Gate:
        limits = AdmissionLimits(
            slots=facts.slots,
            kv_tokens=facts.kv_tokens,
            headroom_slots=self.headroom_slots,
            max_queued=self.max_queued,
            max_queued_tokens=self.max_queued_tokens,
            aging_s=self.aging_s,
        )
        clock = time.monotonic
        return Gate(limits, Lending(self.lending, clock) if self.lending else None, clock)


class PoolServer:
    """One replica of a pool. Constructed by Ray Serve; ready when the constructor returns.

    The engine is made here: Serve pickles the arguments again later, and a running engine is not
    to be pickled.
    """

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self,
        pool: str,
        make_engine: Callable[[], Engine],
        proof: Proof,
        terms: PoolTerms,
        make_announcer: Callable[[], tuple[str, Announce]],
        reference: Any,
    ) -> None:
        begun = time.monotonic()
        os.nice(terms.niceness)
        self._pool = pool
        self._terms = terms
        self._engine = make_engine()
        await self._engine.start()
        ask = None if reference is None else reference.known_answers.remote
        self._agreement = await proof.run(self._engine, ask)
        self._gate = terms.gate(self._engine.facts())
        self._streams = 0
        self._counts: Counter[str] = Counter()
        self._number = 0
        self._changed = asyncio.Event()
        self._name, announce = make_announcer()
        self._start_s = time.monotonic() - begun
        self._announcing = asyncio.create_task(self._announce_for_ever(announce))

    async def respond(self, request: PoolRequest) -> AsyncGenerator[Item, None]:
        if not request.demand.slots:
            # Nothing is generated: no slot is needed.
            async with aclosing(self._items(request, Tally())) as parts:
                async for part in parts:
                    yield part
            return
        if request.replica not in (None, self._name):
            # Serve took another replica than the one that was named, and counted on.
            yield Refusal("another replica was meant", 1)
            return
        changed = asyncio.Event()
        ticket = self._ticket(request, changed.set)
        try:
            self._gate.offer(ticket)
        except TurnedAway as refusal:
            # A loan that is not given sends nobody away: the request waits at home.
            yield self._refused(refusal, "not_lent" if ticket.kind is Kind.BORROW else "refused")
            return
        try:
            self._changed.set()
            refusal_item = await self._turn(ticket, request, changed)
            if refusal_item is not None:
                yield refusal_item
                return
            self._counts[ticket.kind] += 1
            if request.may_move:
                yield Admitted()
            async with aclosing(self._served(ticket, request, changed)) as items:
                async for item in items:
                    yield item
        finally:
            self._gate.release(ticket)
            self._changed.set()

    async def snapshot(self) -> PoolSnapshot:
        return self._snapshot()

    async def known_answers(self) -> list[Answer]:
        """This engine's answers to the known prompts, for another pool to be held against."""
        return await answer_known(self._engine)

    async def check_health(self) -> None:
        await self._engine.check_health()
        if self._announcing.done():
            self._announcing.result()

    def _ticket(self, request: PoolRequest, on_change: Callable[[], None]) -> Ticket:
        limits, demand = self._gate.limits, request.demand
        kept = limits.headroom_slots if request.is_deferrable else 0
        return Ticket(
            demand=Demand(
                # One that is wider than the replica takes all of it, one sequence after the other.
                slots=min(demand.slots, limits.slots - kept),
                prompt_tokens=demand.prompt_tokens,
                prompts=demand.prompts,
                kv_tokens=min(demand.kv_tokens, limits.kv_tokens),
            ),
            kind=request.kind,
            router=request.router,
            priority=request.priority,
            is_deferrable=request.is_deferrable,
            waited_s=request.waited_s,
            must_finish=request.must_finish,
            on_change=on_change,
        )

    async def _turn(
        self, ticket: Ticket, request: PoolRequest, changed: asyncio.Event
    ) -> Refusal | None:
        """Wait until the ticket runs; a refusal if it will not."""
        begun = time.monotonic()
        while ticket.state is State.WAITING:
            left_s = None
            if request.max_wait_s is not None:
                left_s = request.max_wait_s - request.waited_s - (time.monotonic() - begun)
            try:
                await asyncio.wait_for(changed.wait(), left_s)
            except TimeoutError:
                if ticket.state is State.WAITING:
                    return self._refused(self._gate.late(ticket), "late")
            changed.clear()
        if ticket.state is State.DISPLACED:
            return self._refused(self._gate.displaced(ticket), "displaced")
        return None

    async def _served(
        self, ticket: Ticket, request: PoolRequest, changed: asyncio.Event
    ) -> AsyncGenerator[Item, None]:
        tally = Tally(
            prompts=request.demand.prompts,
            on_counted=lambda tokens: self._gate.counted(ticket, tokens),
        )
        try:
            if ticket.kind is Kind.BORROW:
                for item in await self._borrowed(ticket, request, tally, changed):
                    yield item
                return
            async with aclosing(self._items(request, tally)) as items:
                async for item in items:
                    yield item
        finally:
            if request.is_short and tally.output_tokens > self._terms.long_output_tokens:
                self._counts["long_output"] += 1

    async def _items(
        self, request: PoolRequest, tally: Tally
    ) -> AsyncGenerator[ReplyHead | bytes, None]:
        self._streams += 1
        source = self._engine.respond(request, tally)
        try:
            async with aclosing(joined(source, self._interval_s)) as items:
                async for item in items:
                    yield item
        finally:
            self._streams -= 1

    async def _borrowed(
        self, ticket: Ticket, request: PoolRequest, tally: Tally, changed: asyncio.Event
    ) -> list[Item]:
        """The whole answer, or an eviction: nothing of it has left before it is complete."""
        work = asyncio.create_task(_collected(self._items(request, tally)))
        taken_back = asyncio.create_task(_evicted(ticket, changed))
        try:
            await asyncio.wait((work, taken_back), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
        finally:
            work.cancel()
            taken_back.cancel()
            await asyncio.gather(work, taken_back, return_exceptions=True)
        self._counts["evicted"] += 1
        return [Refusal("the lent slot is needed", 1, is_eviction=True)]

    def _refused(self, why: TurnedAway, outcome: str) -> Refusal:
        self._counts[outcome] += 1
        return Refusal(why.reason, why.retry_after_s, is_late=outcome == "late")

    def _interval_s(self) -> float:
        """A stream's share of this replica's chunks, as the time from one to the next."""
        return self._streams / self._terms.chunks_per_s

    def _snapshot(self) -> PoolSnapshot:
        self._number += 1
        return PoolSnapshot(
            pool=self._pool,
            replica=self._name,
            number=self._number,
            pid=os.getpid(),
            facts=self._engine.facts(),
            load=self._engine.load(),
            occupancy=self._gate.occupancy(),
            headroom_slots=self._terms.headroom_slots,
            queue_limit=self._terms.max_queued,
            counts=dict(self._counts),
            agreement=self._agreement,
            start_s=self._start_s,
        )

    async def _announce_for_ever(self, announce: Announce) -> None:
        while True:
            self._changed.clear()
            self._gate.observe(self._engine.load().tpot_s)
            await announce(self._snapshot())
            await asyncio.sleep(SNAPSHOT_GAP_S)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), HEARTBEAT_S - SNAPSHOT_GAP_S)


async def _collected(items: AsyncGenerator[ReplyHead | bytes, None]) -> list[Item]:
    async with aclosing(items):
        return [item async for item in items]


async def _evicted(ticket: Ticket, changed: asyncio.Event) -> None:
    while ticket.state is not State.EVICTED:
        await changed.wait()
        changed.clear()
