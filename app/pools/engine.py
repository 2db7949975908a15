"""What a pool needs of an engine. Two implementations: vLLM and the simulated one."""

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Protocol

from app.contracts.exchange import PoolRequest, ReplyHead
from app.contracts.pool import EngineFacts, EngineLoad


def _unheard(prompt_tokens: int) -> None:
    pass


@dataclass(slots=True)
class Tally:
    """The engine's own count of one request's tokens, kept while it runs.

    `on_counted` is told the tokens of all its `prompts`, as soon as all are known.
    """

    prompts: int = 1
    on_counted: Callable[[int], None] = _unheard
    prompt_tokens: int = 0
    output_tokens: int = 0

    def prompted(self, tokens: int) -> None:
        """One more prompt was counted."""
        self.prompt_tokens += tokens
        self.prompts -= 1
        if not self.prompts:
            self.on_counted(self.prompt_tokens)


class Engine(Protocol):
    """One model on one set of workers, behind OpenAI's HTTP shapes."""

    async def start(self) -> None:
        """Load the model; returns when requests can be answered."""

    def respond(
        self, request: PoolRequest, tally: Tally
    ) -> AsyncGenerator[ReplyHead | bytes, None]:
        """Yield a head, then the body as it comes. Closing the iterator aborts the request."""

    def facts(self) -> EngineFacts: ...

    def load(self) -> EngineLoad: ...

    async def check_health(self) -> None:
        """Raise when the engine is dead and the replica must be replaced."""
