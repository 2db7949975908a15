"""One router's view of one pool, folded from what its replicas said and what this router sent.

A snapshot is old when it is read. Of its own requests a router knows better, so it takes from each
snapshot only what the others hold and adds what it holds itself. A replica that has said nothing
for `lease_s` is gone. There are no other marks that could outlive their reason.
"""

import math
from collections.abc import Callable, Container
from dataclasses import dataclass, field

from app.contracts.placement import Demand
from app.contracts.pool import PoolSnapshot


@dataclass(slots=True)
class _Replica:
    snapshot: PoolSnapshot
    seen_at: float
    held: int = 0

    def taken(self, router: str) -> int:
        """Slots taken or waited for, less those lent: these are given back when needed."""
        occupancy = self.snapshot.occupancy
        others = occupancy.slots - occupancy.lent_slots + occupancy.queued_slots
        return others - occupancy.by_router.get(router, 0) + self.held

    def fits(self, kv_tokens: int) -> bool:
        """Whether so many KV tokens are not reserved; what is lent would be given back."""
        occupancy = self.snapshot.occupancy
        total = self.snapshot.facts.kv_tokens
        reserved = occupancy.kv_tokens if not occupancy.lent_slots else 0
        return not occupancy.slots or reserved + min(kv_tokens, total) <= total


@dataclass(frozen=True, slots=True)
class PoolState:
    """What a placement needs to know of one pool, for one request, at one moment.

    `room`, `queue` and `loan` name the replica that would run it at once, let it wait, or lend it a
    slot; `any_replica` one that lives. None where there is none.
    """

    busy_fraction: float = 1.0
    room: str | None = None
    queue: str | None = None
    loan: str | None = None
    any_replica: str | None = None


@dataclass(slots=True)
class PoolView:
    """The live replicas of one pool. `router` is this router replica's own name."""

    router: str
    lease_s: float
    clock: Callable[[], float]
    _replicas: dict[str, _Replica] = field(default_factory=dict)

    def told(self, snapshot: PoolSnapshot) -> None:
        """Fold in what a replica says; an older word than the last is dropped."""
        known = self._replicas.get(snapshot.replica)
        if known is None:
            self._forget()
            self._replicas[snapshot.replica] = _Replica(snapshot, self.clock())
        elif snapshot.number > known.snapshot.number:
            known.snapshot = snapshot
            known.seen_at = self.clock()

    def gone(self, replica: str) -> None:
        """It failed under a request: gone until it speaks again."""
        if replica in self._replicas:
            self._replicas[replica].seen_at = -math.inf

    def hold(self, replica: str, slots: int) -> None:
        """Count slots of a request that was sent, loans apart; negative when it has ended."""
        if replica in self._replicas:
            self._replicas[replica].held += slots

    def live(self) -> list[PoolSnapshot]:
        return [r.snapshot for r in self._live()]

    def is_live(self, replica: str) -> bool:
        return any(r.snapshot.replica == replica for r in self._live())

    def age_s(self) -> float | None:
        """Seconds since the replica heard longest ago spoke; None if none lives."""
        live = self._live()
        return max(self.clock() - r.seen_at for r in live) if live else None

    def state(
        self, demand: Demand, *, is_deferrable: bool, without: Container[str] = ()
    ) -> PoolState:
        """What the pool, less the replicas `without`, can do for a request of such a demand."""
        slots = demand.slots
        live = [r for r in self._live() if r.snapshot.replica not in without]
        if not live:
            return PoolState()
        free = {
            r.snapshot.replica: self._free(r, is_deferrable) if r.fits(demand.kv_tokens) else 0
            for r in live
        }
        # A request wider than a replica takes all of it.
        widest = max(r.snapshot.facts.slots - self._kept(r, is_deferrable) for r in live)
        total = sum(r.snapshot.facts.slots for r in live)
        roomiest = max(free, key=lambda name: free[name])
        queues = {
            r.snapshot.replica: r.snapshot.occupancy.queued / r.snapshot.queue_limit
            for r in live
            if r.snapshot.queue_limit
        }
        loans = {
            r.snapshot.replica: r.snapshot.occupancy.lendable_slots
            for r in live
            if r.fits(demand.kv_tokens)
        } or {roomiest: 0}
        lender = max(loans, key=lambda name: loans[name])
        return PoolState(
            busy_fraction=min(1.0, sum(r.taken(self.router) for r in live) / total),
            room=roomiest if free[roomiest] >= min(slots, widest) else None,
            queue=min(queues, key=lambda name: (queues[name], -free[name])) if queues else None,
            loan=lender if loans[lender] >= slots else None,
            any_replica=roomiest,
        )

    def _free(self, replica: _Replica, is_deferrable: bool) -> int:
        taken = replica.taken(self.router)
        if is_deferrable:
            taken += replica.snapshot.occupancy.lent_slots
        return replica.snapshot.facts.slots - self._kept(replica, is_deferrable) - taken

    def _kept(self, replica: _Replica, is_deferrable: bool) -> int:
        return replica.snapshot.headroom_slots if is_deferrable else 0

    def _forget(self) -> None:
        """Drop replicas that are gone and hold nothing of ours."""
        live = {r.snapshot.replica for r in self._live()}
        for name in [n for n, r in self._replicas.items() if n not in live and not r.held]:
            del self._replicas[name]

    def _live(self) -> list[_Replica]:
        now = self.clock()
        return [r for r in self._replicas.values() if now - r.seen_at <= self.lease_s]
