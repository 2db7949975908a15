"""What crosses the actor boundary: one request as bytes, then a head and raw chunks."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from app.contracts.pool import PoolSnapshot


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """One request for an engine. `body` is the client's JSON, untouched."""

    path: str
    body: bytes
    request_id: str
    priority: int = 0
    service_tier: str | None = None


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """First item of every answer. `prompt_tokens` is the engine's own count, if it got that far."""

    status: int
    content_type: str
    prompt_tokens: int | None = None

    @property
    def is_stream(self) -> bool:
        return self.content_type.startswith("text/event-stream")


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer whose head and first chunk are there."""

    head: ReplyHead
    chunks: AsyncGenerator[bytes, None]


class PoolPort(Protocol):
    """One pool as the API sees it: Ray Serve's handle in production, a fake in unit tests."""

    pool: str

    async def open(self, request: PoolRequest) -> Reply:
        """The answer, once its first chunk is there; `PoolBusy` or `PoolUnavailable` before it."""

    def snapshots(self) -> Sequence[PoolSnapshot]:
        """The live replicas' states, none if no replica is known to live."""
