"""When a request that is turned away should come back, from what was measured.

Each class drains at its own measured rate. Every answer given is a promise of one place: the next
one turned away is sent behind it, so that clients which obey do not all return at once.
"""

import math
from collections import deque
from collections.abc import Callable, Hashable

# Departures older than this say little of the rate now.
WINDOW_S = 60.0
# Nobody plans by a longer figure; the rate will have changed by then.
LONGEST_S = 600


class DrainMeter:
    """Departures of each class of one replica, and the places promised to those turned away."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._left: dict[Hashable, deque[float]] = {}
        self._promised: dict[Hashable, deque[float]] = {}

    def departed(self, kind: Hashable) -> None:
        """A request of this class has left and its place is free."""
        left = self._left.setdefault(kind, deque())
        left.append(self._clock())
        self._trim(left)

    def retry_after_s(self, kind: Hashable, oldest_running_s: float, at_once: int) -> int:
        """Whole seconds until a place of this class is due, and books it.

        While nothing has left yet, `oldest_running_s`, the time the oldest request has been
        running, is the least that a place takes. Clients come back on the second, together: no
        more are sent to one second than `at_once`, the places that there are at one moment.
        """
        now = self._clock()
        promised = self._promised.setdefault(kind, deque())
        while promised and promised[0] <= now:
            promised.popleft()
        per_place_s = max(self._per_place_s(kind, oldest_running_s), 1 / at_once)
        due = now + per_place_s * (len(promised) + 1)
        wait_s = min(LONGEST_S, max(1, math.ceil(due - now)))
        promised.append(now + wait_s)
        return wait_s

    def _per_place_s(self, kind: Hashable, oldest_running_s: float) -> float:
        now = self._clock()
        left = self._left.get(kind, deque())
        self._trim(left)
        if not left:
            return max(1.0, oldest_running_s)
        # One departure says no rate; the time since it bounds it.
        return max(now - left[0], 1e-3) / len(left)

    def _trim(self, left: deque[float]) -> None:
        while left and self._clock() - left[0] > WINDOW_S:
            left.popleft()
