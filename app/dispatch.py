"""Carries one decided request to a pool: asks the policy, tries, and asks again if it must.

Every request ends here in exactly one way: a reply, or one of `PoolBusy`, `WaitedTooLong` and
`PoolUnavailable`. Knows nothing of HTTP or Ray.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from app.contracts.exchange import PoolRequest, Refused, ReplicaLost, Reply
from app.contracts.placement import Decision, Demand, Destination, Kind, Placement
from app.contracts.request import Shape, Urgency
from app.errors import PoolBusy, PoolUnavailable, SplitpoolError, WaitedTooLong
from app.routing.policy import Policy
from app.routing.view import PoolState, PoolView

logger = logging.getLogger(__name__)

# A request that took two replicas down is not given a third.
MOST_LOST = 2
FIRST_WORD_PERIOD_S = 0.1


class PoolPort(Protocol):
    """One pool as the dispatcher reaches it: through Ray Serve, or a fake in unit tests."""

    view: PoolView

    async def open(
        self, request: PoolRequest, on_admitted: Callable[[], None] | None = None
    ) -> Reply:
        """The answer, once its first chunk is there; `Refused` or `ReplicaLost` before it."""

    async def until_lending(self) -> None:
        """Until a replica says that it lends a slot."""

    def unavailable(self) -> PoolUnavailable:
        """What to tell a client while no replica lives."""


@dataclass(slots=True)
class Job:
    """One request on its way. `refused` are the replicas that did not take it."""

    decision: Decision
    request: PoolRequest
    lenders: tuple[str, ...]
    begun_at: float
    refused: set[str] = field(default_factory=set)
    lost: int = 0

    @property
    def home(self) -> Destination:
        return self.decision.home


@dataclass(frozen=True, slots=True)
class Dispatcher:
    """The pools by name, and the rules between them. `router` names this router replica.

    Until `ready_by` on the clock a pool that has not spoken may yet do so.
    """

    clients: Mapping[str, PoolPort]
    policy: Policy
    router: str
    clock: Callable[[], float]
    ready_by: float = 0.0

    def job(
        self, decision: Decision, demand: Demand, request: PoolRequest, max_wait_s: float | None
    ) -> Job:
        """A decided request, ready to be opened."""
        facts, sla_class = decision.facts, decision.sla_class
        is_deferrable = sla_class.urgency is Urgency.DEFERRABLE
        lenders: tuple[str, ...] = ()
        # What streams to a client cannot be taken back.
        if is_deferrable and not facts.is_stream:
            lenders = self.policy.lenders(decision.home, demand, facts.max_output_tokens)
        request = replace(
            request,
            demand=demand,
            router=self.router,
            is_deferrable=is_deferrable,
            is_short=not is_deferrable and sla_class.shape is Shape.SHORT,
            max_wait_s=max_wait_s,
        )
        return Job(decision, request, lenders, self.clock())

    async def open(self, job: Job) -> tuple[Reply, Placement]:
        """The answer once its first chunk is there, and where it comes from."""
        last: Refused | None = None
        has_tried_loan = False
        while True:
            # Only at first: a lender that has just refused would be asked again and again.
            lenders = () if has_tried_loan else job.lenders
            placement = self.policy.place(job.home, job.decision.reason, self._states(job), lenders)
            if placement is None and last is None and self.clock() < self.ready_by:
                # A router that has just begun has not heard of every pool yet.
                await asyncio.sleep(FIRST_WORD_PERIOD_S)
                continue
            if placement is None:
                raise self._refusal(job, last)
            has_tried_loan = has_tried_loan or placement.kind is Kind.BORROW
            try:
                return await self._try(job, placement)
            except Refused as refused:
                # A lender sends nobody away: what counts is what home says.
                last = last if refused.kind is Kind.BORROW else refused
                self._learn(job, refused)
            except ReplicaLost as error:
                job.lost += 1
                logger.warning(
                    "pool %s lost %s before its first byte, %d times now: %s",
                    placement.destination.pool, job.request.request_id, job.lost, error,
                )  # fmt: skip
                if job.lost == MOST_LOST:
                    raise self.clients[placement.destination.pool].unavailable() from error

    def _states(self, job: Job) -> dict[str, PoolState]:
        demand, is_deferrable = job.request.demand, job.request.is_deferrable
        return {
            name: client.view.state(demand, is_deferrable=is_deferrable, without=job.refused)
            for name, client in self.clients.items()
        }

    def _learn(self, job: Job, refused: Refused) -> None:
        if refused.refusal.is_late:
            raise self._refusal(job, refused)
        if refused.refusal.is_eviction:
            # Once is enough: the next time it runs to its end, however long it waits for that.
            job.lenders = ()
            job.request = replace(job.request, must_finish=True, max_wait_s=None)
        elif refused.kind is not Kind.BORROW:
            job.refused.add(refused.replica)

    def _refusal(self, job: Job, last: Refused | None) -> SplitpoolError:
        if last is None:
            return self.clients[job.home.pool].unavailable()
        refusal = last.refusal
        message = f"pool {last.pool} is busy: {refusal.reason}"
        if refusal.is_late:
            return WaitedTooLong(message, last.pool, refusal.retry_after_s)
        return PoolBusy(message, last.pool, refusal.retry_after_s)

    async def _try(self, job: Job, placement: Placement) -> tuple[Reply, Placement]:
        request = self._request(job, placement)
        client = self.clients[placement.destination.pool]
        if placement.kind is not Kind.HOME or not job.lenders:
            return await client.open(request), placement
        return await self._movable(job, placement)

    def _request(self, job: Job, placement: Placement) -> PoolRequest:
        return replace(
            job.request,
            priority=placement.destination.priority,
            kind=placement.kind,
            replica=placement.replica,
            waited_s=self.clock() - job.begun_at,
        )

    async def _movable(self, job: Job, placement: Placement) -> tuple[Reply, Placement]:
        """Wait at home; if a slot is lent before home begins, take that instead."""
        begun = asyncio.Event()
        request = replace(self._request(job, placement), may_move=True)
        home = asyncio.ensure_future(
            self.clients[placement.destination.pool].open(request, begun.set)
        )
        reply: Reply | None = None
        try:
            while True:
                if await self._home_begins(job, home, begun):
                    reply = await home
                    return reply, placement
                loan = self.policy.loan(
                    job.home, job.decision.reason, self._states(job), job.lenders
                )
                if loan is None:
                    continue
                borrowed = await self._borrowed(job, loan, begun)
                if borrowed is not None:
                    await _dropped(home)
                    return await _kept(borrowed), loan
        finally:
            if reply is None:
                await _dropped(home)

    async def _home_begins(
        self, job: Job, home: "asyncio.Future[Reply]", begun: asyncio.Event
    ) -> bool:
        """True once home has begun or refused, false when a pool lends."""
        waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(begun.wait())]
        waits += [asyncio.ensure_future(self.clients[p].until_lending()) for p in job.lenders]
        try:
            everything: list[asyncio.Future[Any]] = [home, *waits]
            await asyncio.wait(everything, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return home.done() or begun.is_set()

    async def _borrowed(
        self, job: Job, loan: Placement, begun: asyncio.Event
    ) -> "asyncio.Future[Reply] | None":
        """The answer to come from a lent slot; None if it was refused, or home was first."""
        admitted = asyncio.Event()
        request = replace(self._request(job, loan), may_move=True)
        answer = asyncio.ensure_future(
            self.clients[loan.destination.pool].open(request, admitted.set)
        )
        waits = [asyncio.ensure_future(event.wait()) for event in (begun, admitted)]
        is_taken = False
        try:
            await asyncio.wait((answer, *waits), return_when=asyncio.FIRST_COMPLETED)
            is_taken = admitted.is_set() and not begun.is_set()
            return answer if is_taken else None
        finally:
            for wait in waits:
                wait.cancel()
            if not is_taken:
                await _dropped(answer)


async def _kept(answer: "asyncio.Future[Reply]") -> Reply:
    """The reply to come; dropped if the client leaves meanwhile."""
    reply: Reply | None = None
    try:
        reply = await answer
        return reply
    finally:
        if reply is None:
            await _dropped(answer)


async def _dropped(answer: "asyncio.Future[Reply]") -> None:
    """Nobody wants it any more, whether it has come or not."""
    answer.cancel()
    (came,) = await asyncio.gather(answer, return_exceptions=True)
    if isinstance(came, Reply):
        came.end()
