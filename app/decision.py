"""From a checked body to a decision: counts tokens only when the count can change the pool.

The one place where classification waits for something: the tokenizer, off the event loop.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.classify.shape import (
    is_long,
    max_output_tokens,
    prompt_bytes,
    prompt_range,
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
)
from app.pools.tokens import TokenCounter
from app.routing import RoutingTable, place, shape_matters


@dataclass(frozen=True, slots=True)
class Classifier:
    """Decides where one request goes."""

    table: RoutingTable
    long_prompt_tokens: int
    counter: TokenCounter

    async def decide(
        self, endpoint: Endpoint, body: Mapping[str, Any], urgency_header: str | None
    ) -> Decision:
        """The decision for a checked body; `MalformedRequest` for an unknown declaration."""
        declaration = declared(body.get("service_tier"), urgency_header)
        tokens = prompt_range(endpoint, body, self.counter.bounds)
        shape = settled(tokens, self.long_prompt_tokens)
        if shape is None and shape_matters(self.table, declaration.urgency):
            count = await self.counter.count(endpoint, body)
            tokens = TokenRange(count, count)
            shape = Shape.LONG if is_long(count, self.long_prompt_tokens) else Shape.SHORT
        facts = RequestFacts(
            endpoint=endpoint,
            declaration=declaration,
            prompt_bytes=prompt_bytes(endpoint, body),
            prompt_tokens=tokens,
            sequences=sequences(endpoint, body),
            max_output_tokens=max_output_tokens(body),
        )
        # Where the shape changes nothing an unsettled prompt takes the short column.
        sla_class = SlaClass(declaration.urgency, shape or Shape.SHORT)
        placement = place(self.table, sla_class, facts, self.long_prompt_tokens)
        return Decision(facts, sla_class, placement)
