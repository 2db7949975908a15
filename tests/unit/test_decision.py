import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from app.classify.shape import TokenizerBounds
from app.contracts.placement import Decision, Destination
from app.contracts.request import Endpoint, Shape, Urgency
from app.decision import Classifier

LATENCY, THROUGHPUT = Destination("latency"), Destination("throughput")
FIRST, LAST = Destination("throughput", -10), Destination("throughput", 10)
TABLE = {
    Urgency.URGENT: {Shape.SHORT: LATENCY, Shape.LONG: FIRST},
    Urgency.UNDECLARED: {Shape.SHORT: LATENCY, Shape.LONG: THROUGHPUT},
    Urgency.DEFERRABLE: {Shape.SHORT: LAST, Shape.LONG: LAST},
}


class FakeCounter:
    """A tokenizer that gives a set count and remembers how often it was asked."""

    bounds = TokenizerBounds(10, 1, 0, 0)
    vocab_size = 100

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.asked = 0

    async def count(self, endpoint: Endpoint, body: Mapping[str, Any]) -> int:
        self.asked += 1
        return self.tokens


def decide(counter: FakeCounter, size: int, tier: str | None = None) -> Decision:
    body = {"prompt": "x" * size, "service_tier": tier}
    classifier = Classifier(TABLE, 100, counter)
    return asyncio.run(classifier.decide(Endpoint.COMPLETIONS, body, None))


@pytest.mark.parametrize(
    ("size", "tier", "tokens", "destination", "asked"),
    [
        pytest.param(90, None, 0, LATENCY, 0, id="short_by_its_bytes"),
        pytest.param(1000, None, 0, THROUGHPUT, 0, id="long_by_its_bytes"),
        pytest.param(500, None, 99, LATENCY, 1, id="counted_just_short"),
        pytest.param(500, None, 100, THROUGHPUT, 1, id="counted_at_the_threshold"),
        pytest.param(500, "priority", 101, FIRST, 1, id="urgent_and_long"),
        pytest.param(500, "flex", 0, LAST, 0, id="deferrable_is_never_counted"),
    ],
)
def test_tokens_are_counted_only_when_the_count_can_change_the_pool(
    size: int, tier: str | None, tokens: int, destination: Destination, asked: int
) -> None:
    counter = FakeCounter(tokens)
    assert decide(counter, size, tier).home == destination
    assert counter.asked == asked


@pytest.mark.parametrize(
    ("size", "tier", "reason"),
    [
        (90, None, "undeclared_short; prompt of at most 92 tokens, long from 100"),
        (500, None, "undeclared_long; prompt of 120 tokens, long from 100"),
        (2000, "priority", "urgent_long; prompt of at least 200 tokens, long from 100"),
        (90, "flex", "deferrable; prompts of every length go here"),
    ],
)
def test_the_reason_names_what_decided(size: int, tier: str | None, reason: str) -> None:
    assert decide(FakeCounter(120), size, tier).reason == reason


@pytest.mark.parametrize(("size", "asked"), [(90, 0), (500, 1), (2000, 0)])
def test_deferrable_work_is_counted_where_that_decides_whether_it_may_borrow(
    size: int, asked: int
) -> None:
    counter = FakeCounter(100)
    classifier = Classifier(TABLE, 1000, counter, loan_prompt_tokens=100)
    body = {"prompt": "x" * size, "service_tier": "flex"}
    asyncio.run(classifier.decide(Endpoint.COMPLETIONS, body, None))
    assert counter.asked == asked
