"""Where one request goes and why."""

from dataclasses import dataclass
from enum import StrEnum

from app.contracts.request import RequestFacts, SlaClass


class Kind(StrEnum):
    """Why a pool is given a request: it is the class's own, or stands in for one that is."""

    HOME = "home"
    SPILL = "spill"
    BORROW = "borrow"


@dataclass(frozen=True, slots=True)
class Destination:
    """A pool and the priority there; lower is served first, 0 is normal (vLLM's order)."""

    pool: str
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request takes while it runs: slots, and the most KV tokens it may come to hold.

    `prompt_tokens` is at most, over all its `prompts`.
    """

    slots: int
    prompt_tokens: int
    kv_tokens: int
    prompts: int = 1


@dataclass(frozen=True, slots=True)
class Placement:
    """One replica of a pool to try, with a reason that `x-route-reason` shows."""

    destination: Destination
    kind: Kind
    reason: str
    replica: str


@dataclass(frozen=True, slots=True)
class Decision:
    """The facts of a request, the class made of them, and where that class is at home."""

    facts: RequestFacts
    sla_class: SlaClass
    home: Destination
    reason: str
