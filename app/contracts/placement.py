"""Where one request goes and why."""

from dataclasses import dataclass

from app.contracts.request import RequestFacts, SlaClass


@dataclass(frozen=True, slots=True)
class Destination:
    """A pool and the engine priority there; lower is served first, 0 is normal (vLLM's order)."""

    pool: str
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """A destination with the reason that `x-route-reason` shows."""

    destination: Destination
    reason: str


@dataclass(frozen=True, slots=True)
class Decision:
    """The facts of a request, the class made of them, and where that class goes."""

    facts: RequestFacts
    sla_class: SlaClass
    placement: Placement
