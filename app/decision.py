"""From a checked body to a decision: counts tokens only when the count can change the pool.

The one place where classification waits for something: the tokenizer, off the event loop.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.classify.shape import (
    max_output_tokens,
    prompt_bytes,
    prompt_range,
    prompts,
    sequences,
    settled,
)
from app.classify.urgency import declared
from app.contracts.placement import Decision
from app.contracts.request import (
    Endpoint,
    RequestFacts,
    Shape,
    SlaClass,
    TokenRange,
    Urgency,
)
from app.pools.tokens import TokenCounter
from app.routing.table import RoutingTable, home, reason, shape_matters


@dataclass(frozen=True, slots=True)
class Classifier:
    """Decides where one request is at home. `loan_prompt_tokens`: longest prompt that borrows."""

    table: RoutingTable
    long_prompt_tokens: int
    counter: TokenCounter
    loan_prompt_tokens: int | None = None

    async def decide(
        self, endpoint: Endpoint, body: Mapping[str, Any], urgency_header: str | None
    ) -> Decision:
        """The decision for a checked body; `MalformedRequest` for an unknown declaration."""
        declaration = declared(body.get("service_tier"), urgency_header)
        tokens = prompt_range(endpoint, body, self.counter.bounds)
        if self._count_matters(declaration.urgency, tokens):
            count = await self.counter.count(endpoint, body)
            tokens = TokenRange(count, count)
        # Where the shape changes nothing an unsettled prompt takes the short column.
        shape = settled(tokens, self.long_prompt_tokens) or Shape.SHORT
        facts = RequestFacts(
            endpoint=endpoint,
            declaration=declaration,
            prompt_bytes=prompt_bytes(endpoint, body),
            prompt_tokens=tokens,
            prompts=1 if endpoint is Endpoint.CHAT else len(prompts(body)),
            sequences=sequences(endpoint, body),
            max_output_tokens=max_output_tokens(body),
            is_stream=bool(body.get("stream")),
        )
        sla_class = SlaClass(declaration.urgency, shape)
        why = reason(self.table, sla_class, facts, self.long_prompt_tokens)
        return Decision(facts, sla_class, home(self.table, sla_class), why)

    def _count_matters(self, urgency: Urgency, tokens: TokenRange) -> bool:
        """Whether the exact count could change where this request may go."""
        if settled(tokens, self.long_prompt_tokens) is None and shape_matters(self.table, urgency):
            return True
        return (
            urgency is Urgency.DEFERRABLE
            and self.loan_prompt_tokens is not None
            and settled(tokens, self.loan_prompt_tokens + 1) is None
        )
