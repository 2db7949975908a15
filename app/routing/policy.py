"""Chooses the next pool to try for one request: home, borrow, spill, or nothing.

In: the request's home, what the pools can do for it now, and the terms of loans and spills. Out: a
placement, or None when it is to be refused. Borrowing runs one way: deferrable work may use idle
slots of a pool that lends. Knows nothing of Ray, HTTP or time.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from app.contracts.placement import Demand, Destination, Kind, Placement
from app.routing.view import PoolState


@dataclass(frozen=True, slots=True)
class LoanTerms:
    """Who may borrow from a pool, and from which occupation of its home on."""

    max_prompt_tokens: int
    max_output_tokens: int
    from_busy_fraction: float


@dataclass(frozen=True, slots=True)
class Policy:
    """Terms by pool: where it spills to, and what it lends."""

    spills: Mapping[str, Destination]
    loans: Mapping[str, LoanTerms]

    def lenders(
        self, home: Destination, demand: Demand, max_output_tokens: int | None
    ) -> tuple[str, ...]:
        """The pools that lend to a deferrable request of this size."""
        return tuple(
            pool
            for pool, terms in self.loans.items()
            if pool != home.pool
            and demand.prompt_tokens <= terms.max_prompt_tokens
            and max_output_tokens is not None
            and max_output_tokens <= terms.max_output_tokens
        )

    def loan_prompt_tokens(self) -> int | None:
        """The longest prompt that may borrow anywhere, None if nothing is lent."""
        return max((terms.max_prompt_tokens for terms in self.loans.values()), default=None)

    def place(
        self,
        home: Destination,
        reason: str,
        states: Mapping[str, PoolState],
        lenders: tuple[str, ...] = (),
    ) -> Placement | None:
        """The best placement, given what each pool can do now."""
        at_home = states[home.pool]
        loan = self.loan(home, reason, states, lenders)
        if loan is not None:
            return loan
        if at_home.room is not None:
            return Placement(home, Kind.HOME, reason, at_home.room)
        if at_home.queue is not None:
            return Placement(home, Kind.HOME, f"{reason}; waiting for a slot", at_home.queue)
        spill = self.spills.get(home.pool)
        if spill is not None:
            state = states[spill.pool]
            replica = state.room or state.queue
            if replica is not None:
                lacks = "live replica" if at_home.any_replica is None else "free slot"
                why = f"{reason}; spilled, {home.pool} has no {lacks}"
                return Placement(spill, Kind.SPILL, why, replica)
        if at_home.any_replica is not None:
            # Seen as full, which may be over by now; its own refusal says when to come back.
            return Placement(home, Kind.HOME, reason, at_home.any_replica)
        return None

    def loan(
        self,
        home: Destination,
        reason: str,
        states: Mapping[str, PoolState],
        lenders: tuple[str, ...],
    ) -> Placement | None:
        """A slot to borrow, if one is lent and home is busy enough."""
        busy = states[home.pool].busy_fraction
        for pool in lenders:
            replica = states[pool].loan
            if replica is not None and busy >= self.loans[pool].from_busy_fraction:
                why = f"{reason}; borrowed, {home.pool} is {busy:.0%} taken"
                return Placement(Destination(pool, home.priority), Kind.BORROW, why, replica)
        return None
