"""Which requests of one replica run, which wait and which are turned away.

The last word on a replica's slots and KV tokens: routers choose by snapshots, which are old by the
time a request arrives. In: tickets and the moment they end. Out: each ticket's state, told through
its `on_change`. Knows nothing of Ray, asyncio or the engine.

Waiting requests go in order of `priority * aging_s + arrival`: one level of priority is worth
`aging_s` seconds of waiting, so a lower class is served later and never starves.
"""

import bisect
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from app.contracts.placement import Demand, Kind
from app.contracts.pool import Occupancy
from app.pools.drain import DrainMeter
from app.pools.lending import Lending


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """What one replica may hold. `headroom_slots` are never taken by deferrable work."""

    slots: int
    kv_tokens: int
    headroom_slots: int
    max_queued: int
    max_queued_tokens: int
    aging_s: float


class State(Enum):
    """Where a ticket stands."""

    WAITING = auto()
    RUNNING = auto()
    EVICTED = auto()
    DISPLACED = auto()
    DONE = auto()


def _nothing() -> None:
    pass


@dataclass(eq=False, slots=True)
class Ticket:
    """One request's place. `waited_s`: how long it has waited elsewhere before it came here.

    `must_finish`: it was taken back from another pool and may not be turned away.
    """

    demand: Demand
    kind: Kind
    router: str
    priority: int = 0
    is_deferrable: bool = False
    waited_s: float = 0.0
    must_finish: bool = False
    on_change: Callable[[], None] = _nothing
    state: State = State.WAITING
    key: tuple[float, int] = field(default=(0.0, 0), init=False)
    admitted_at: float = field(default=0.0, init=False)

    def move(self, state: State) -> None:
        self.state = state
        self.on_change()


class TurnedAway(Exception):
    """This replica takes no more of this kind now; a place is due in `retry_after_s`."""

    def __init__(self, reason: str, retry_after_s: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry_after_s = retry_after_s


class Gate:
    """The tickets of one replica. Every method returns at once."""

    def __init__(
        self, limits: AdmissionLimits, lending: Lending | None, clock: Callable[[], float]
    ) -> None:
        self.limits = limits
        self._lending = lending
        self._clock = clock
        self._drain = DrainMeter(clock)
        self._order = itertools.count()
        self._waiting: list[Ticket] = []
        self._running: list[Ticket] = []

    def offer(self, ticket: Ticket) -> None:
        """Take a ticket: it runs or waits on return. `TurnedAway` if it can do neither."""
        ticket.key = (
            ticket.priority * self.limits.aging_s + self._clock() - ticket.waited_s,
            next(self._order),
        )
        if ticket.kind is Kind.BORROW:
            self._lend(ticket)
            return
        self._press(ticket)
        bisect.insort(self._waiting, ticket, key=lambda t: t.key)
        self.fill()
        if ticket.state is State.WAITING and not self._evict_for(ticket):
            self._bound(ticket)

    def release(self, ticket: Ticket) -> None:
        """A ticket has ended, in whatever state it was."""
        if ticket in self._running:
            self._running.remove(ticket)
            self._drain.departed(_class(ticket))
            if ticket.kind is not Kind.BORROW:
                self._press(ticket)
        elif ticket in self._waiting:
            self._waiting.remove(ticket)
        ticket.state = State.DONE
        self.fill()

    def counted(self, ticket: Ticket, prompt_tokens: int) -> None:
        """The engine has counted the prompt: give back what was reserved beyond it."""
        known = max(0, ticket.demand.prompt_tokens - prompt_tokens)
        kv_tokens = max(0, ticket.demand.kv_tokens - known)
        ticket.demand = replace(ticket.demand, prompt_tokens=prompt_tokens, kv_tokens=kv_tokens)
        self.fill()

    def fill(self) -> None:
        """Start waiting tickets in order, as far as there is room."""
        only_urgent = False
        for ticket in tuple(self._waiting):
            if only_urgent and ticket.is_deferrable:
                continue
            if not self._has_room(ticket):
                break
            if self._is_kept_free(ticket):
                only_urgent = True
                continue
            self._waiting.remove(ticket)
            self._start(ticket)

    def late(self, ticket: Ticket) -> TurnedAway:
        """A waiting ticket's time is up; the caller releases it."""
        return self._turned_away(ticket, "its wait limit has passed")

    def displaced(self, ticket: Ticket) -> TurnedAway:
        return self._turned_away(ticket, "the queue is full and more urgent work came")

    def evict_lent(self) -> None:
        """Ask for every lent slot back."""
        if self._lending is not None:
            self._lending.pressed()
        for ticket in self._lent():
            ticket.move(State.EVICTED)

    def occupancy(self) -> Occupancy:
        by_router: dict[str, int] = {}
        for ticket in (*self._running, *self._waiting):
            if ticket.kind is Kind.BORROW:
                continue
            by_router[ticket.router] = by_router.get(ticket.router, 0) + ticket.demand.slots
        return Occupancy(
            slots=self._slots(),
            kv_tokens=self._kv_tokens(),
            queued=len(self._waiting),
            queued_slots=sum(t.demand.slots for t in self._waiting),
            lent_slots=self._lent_slots(),
            lendable_slots=self._lendable(),
            by_router=by_router,
        )

    def observe(self, tpot_s: float | None) -> None:
        """A heartbeat with the engine's time per output token; ends loans that cost too much."""
        home = [t for t in self._running if t.kind is not Kind.BORROW]
        if self._lending is None or tpot_s is None or not home:
            return
        if self._lending.observe(tpot_s, is_shared=len(home) < len(self._running)):
            self.evict_lent()

    def _lend(self, ticket: Ticket) -> None:
        if self._waiting or self._lendable() < ticket.demand.slots or not self._has_room(ticket):
            raise TurnedAway("no slot may be lent now", 1)
        assert self._lending is not None, "without it nothing is lendable"
        self._lending.lent()
        self._start(ticket)

    def _lendable(self) -> int:
        if self._lending is None or (self._lending.rules.yield_to == "chat" and self._has_own()):
            return 0
        lent = self._lent_slots()
        free = self.limits.slots - self._slots()
        return self._lending.lendable(lent, free, self.limits.headroom_slots)

    def _press(self, ticket: Ticket) -> None:
        """A request of the pool's own comes or goes: lending stops, or waits, by its rules."""
        if self._lending is None:
            return
        free = self.limits.slots - self._slots() - ticket.demand.slots
        if self._lending.rules.yield_to == "chat":
            self.evict_lent()
        elif free < self.limits.headroom_slots:
            self._lending.pressed()

    def _evict_for(self, ticket: Ticket) -> bool:
        """Ask back lent slots, latest first, until there is room for the ticket and all before it.

        It then waits for them beyond the bound of the queue. False, and nothing is asked back, if
        all of them are not enough.
        """
        if ticket.is_deferrable:
            return False
        ahead = [t.demand for t in self._waiting if t.key <= ticket.key]
        slots = self._slots() + sum(d.slots for d in ahead) - self.limits.slots
        kv_tokens = self._kv_tokens() + sum(d.kv_tokens for d in ahead) - self.limits.kv_tokens
        coming = [t for t in self._running if t.state is State.EVICTED]
        victims: list[Ticket] = []
        lent = self._lent()
        while not _covers(coming + victims, slots, kv_tokens):
            if not lent:
                return False
            victims.append(lent.pop())
        for victim in victims:
            victim.move(State.EVICTED)
        ticket.must_finish = True
        return True

    def _bound(self, ticket: Ticket) -> None:
        """Turn away whoever is last, while more wait than may."""
        while (reason := self._overflow()) is not None:
            last = [t for t in self._waiting if not t.must_finish][-1]
            self._waiting.remove(last)
            if last is ticket:
                raise self._turned_away(ticket, reason)
            last.move(State.DISPLACED)

    def _overflow(self) -> str | None:
        """Which bound of the queue is passed."""
        waiting = [t.demand.prompt_tokens for t in self._waiting if not t.must_finish]
        if len(waiting) > self.limits.max_queued:
            if not self.limits.max_queued:
                return f"all {self.limits.slots} slots, or the KV tokens behind them, are taken"
            return f"{self.limits.max_queued} requests wait already"
        if sum(waiting) > self.limits.max_queued_tokens:
            return f"prompts of {self.limits.max_queued_tokens} tokens wait already"
        return None

    def _turned_away(self, ticket: Ticket, reason: str) -> TurnedAway:
        oldest = min((t.admitted_at for t in self._running), default=self._clock())
        after_s = self._drain.retry_after_s(
            _class(ticket),
            self._clock() - oldest,
            at_once=self.limits.slots + self.limits.max_queued,
        )
        return TurnedAway(reason, after_s)

    def _start(self, ticket: Ticket) -> None:
        ticket.admitted_at = self._clock()
        self._running.append(ticket)
        ticket.move(State.RUNNING)

    def _has_room(self, ticket: Ticket) -> bool:
        # A request wider than the replica runs alone, its sequences one after the other.
        if not self._running:
            return True
        return (
            self._slots() + ticket.demand.slots <= self.limits.slots
            and self._kv_tokens() + ticket.demand.kv_tokens <= self.limits.kv_tokens
        )

    def _is_kept_free(self, ticket: Ticket) -> bool:
        free = self.limits.slots - self._slots() - ticket.demand.slots
        return ticket.is_deferrable and bool(self._running) and free < self.limits.headroom_slots

    def _lent(self) -> list[Ticket]:
        return [t for t in self._running if t.kind is Kind.BORROW and t.state is State.RUNNING]

    def _lent_slots(self) -> int:
        return sum(t.demand.slots for t in self._running if t.kind is Kind.BORROW)

    def _has_own(self) -> bool:
        return any(t.kind is not Kind.BORROW for t in self._running)

    def _slots(self) -> int:
        return sum(t.demand.slots for t in self._running)

    def _kv_tokens(self) -> int:
        return sum(t.demand.kv_tokens for t in self._running)


def _covers(leaving: list[Ticket], slots: int, kv_tokens: int) -> bool:
    """Whether these give back so much."""
    return (
        sum(t.demand.slots for t in leaving) >= slots
        and sum(t.demand.kv_tokens for t in leaving) >= kv_tokens
    )


def _class(ticket: Ticket) -> tuple[int, Kind]:
    return (ticket.priority, ticket.kind)
