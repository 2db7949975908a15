"""What crosses the actor boundary: one request as bytes, then a head and raw chunks."""

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from app.contracts.placement import Demand, Kind

ONE_SLOT = Demand(1, 0, 0)


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """One request for an engine. `body` is the client's JSON, untouched.

    `replica` is where it is meant to go, None for any. `router` is the router replica that sent
    it. `waited_s` counts towards its age and its wait limit; `max_wait_s` is None without limit.
    `may_move`: the pool says when it begins, and until then it may go elsewhere. `must_finish`: a
    pool took it back and no other may refuse it. `is_short`: it was taken for short work.
    """

    path: str
    body: bytes
    request_id: str
    priority: int = 0
    service_tier: str | None = None
    demand: Demand = ONE_SLOT
    kind: Kind = Kind.HOME
    is_deferrable: bool = False
    router: str = ""
    replica: str | None = None
    waited_s: float = 0.0
    max_wait_s: float | None = None
    may_move: bool = False
    must_finish: bool = False
    is_short: bool = False


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """Begins every answer. `prompt_tokens` is the engine's own count, if it got that far."""

    status: int
    content_type: str
    prompt_tokens: int | None = None

    @property
    def is_stream(self) -> bool:
        return self.content_type.startswith("text/event-stream")


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that may move has begun, and may no longer."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The pool does not take a request, or gives it back before its first byte.

    `is_eviction`: it had begun, and its slot is needed. `is_late`: its wait limit has passed.
    """

    reason: str
    retry_after_s: int
    is_eviction: bool = False
    is_late: bool = False


Item = ReplyHead | bytes | Admitted | Refusal


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer whose head and first chunk are there. `end` it, read or not."""

    head: ReplyHead
    chunks: AsyncGenerator[bytes, None]
    end: Callable[[], None]


class Refused(Exception):
    """A pool does not take a request, or gave it back before its first byte."""

    def __init__(self, pool: str, request: PoolRequest, refusal: Refusal) -> None:
        super().__init__(refusal.reason)
        self.pool = pool
        self.replica = request.replica or ""
        self.kind = request.kind
        self.refusal = refusal


class ReplicaLost(Exception):
    """A replica failed or fell silent before the first byte of an answer."""
