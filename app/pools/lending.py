"""When idle slots of a pool may be lent to deferrable work, and when that must stop.

In: what runs, what arrives, the engine's time per output token. Out: how many slots may be lent
now. Never lends the headroom. Knows nothing of tickets, asyncio or the engine.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

# Weight of a new observation in the running means; about ten heartbeats to follow a change.
SMOOTHING = 0.2


@dataclass(frozen=True, slots=True)
class LendingRules:
    """The terms of a loan. `yield_to`: what ends it, a slot that is needed or any chat at all.

    `max_slots`: most slots lent at once. `resume_after_s`: quiet needed before the next loan.
    `interval_s`: least time from one loan to the next, so that their prompts are not computed in
    one step, which a returning chat would wait for.
    `max_tpot_increase`: loans end while the time per output token beside them is more than this
    times the time without them.
    """

    max_slots: int
    yield_to: Literal["slot", "chat"]
    resume_after_s: float
    max_tpot_increase: float
    interval_s: float = 0.0


class Lending:
    """The state of lending on one replica."""

    def __init__(self, rules: LendingRules, clock: Callable[[], float]) -> None:
        self.rules = rules
        self._clock = clock
        self._quiet_since = clock() - rules.resume_after_s
        self._lent_at = clock() - rules.interval_s
        self._tpot_alone_s: float | None = None
        self._tpot_shared_s: float | None = None

    def pressed(self) -> None:
        """Chat needs its slots: nothing is lent until it has been quiet for a while."""
        self._quiet_since = self._clock()

    def lent(self) -> None:
        """A slot was lent."""
        self._lent_at = self._clock()

    def lendable(self, lent: int, free: int, headroom: int) -> int:
        """Slots that may be lent now, of `free` ones."""
        now = self._clock()
        if now - self._quiet_since < self.rules.resume_after_s:
            return 0
        if now - self._lent_at < self.rules.interval_s:
            return 0
        return max(0, min(self.rules.max_slots - lent, free - headroom))

    def observe(self, tpot_s: float, *, is_shared: bool) -> bool:
        """Note the time per output token of running chats; true when loans cost them too much."""
        if is_shared:
            self._tpot_shared_s = _mean(self._tpot_shared_s, tpot_s)
        else:
            self._tpot_alone_s = _mean(self._tpot_alone_s, tpot_s)
        if self._tpot_alone_s is None or self._tpot_shared_s is None:
            return False
        if self._tpot_shared_s <= self._tpot_alone_s * self.rules.max_tpot_increase:
            return False
        # Judged afresh after the pause; the figure that ended the loan would end the next at once.
        self._tpot_shared_s = None
        return is_shared


def _mean(old: float | None, new: float) -> float:
    return new if old is None else (1 - SMOOTHING) * old + SMOOTHING * new
