"""What a pool needs of an engine. Two implementations: vLLM and the simulated one."""

from collections.abc import AsyncGenerator
from typing import Protocol

from app.contracts.exchange import PoolRequest, ReplyHead
from app.contracts.pool import EngineFacts, EngineLoad


class Engine(Protocol):
    """One model on one set of workers, behind OpenAI's HTTP shapes."""

    async def start(self) -> None:
        """Load the model; returns when requests can be answered."""

    def respond(self, request: PoolRequest) -> AsyncGenerator[ReplyHead | bytes, None]:
        """Yield a head, then the body as it comes. Closing the iterator aborts the request."""

    def facts(self) -> EngineFacts: ...

    def load(self) -> EngineLoad: ...

    async def check_health(self) -> None:
        """Raise when the engine is dead and the replica must be replaced."""
