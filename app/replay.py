"""Sends recorded requests through another configuration's table, and counts where they would go.

In: records of facts and a routing table. Out: counts by class and pool. Generates nothing and
knows nothing of load: spills, loans and refusals depend on the hour, and are counted as recorded.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from app.classify.shape import settled
from app.contracts.request import Shape, SlaClass
from app.facts import FactsRecord
from app.routing.table import RoutingTable, home, shape_matters


@dataclass(slots=True)
class Replay:
    """Counts of requests. `moved` is from the recorded home's pool to the new one."""

    requests: int = 0
    recorded: Counter[str] = field(default_factory=Counter)
    homes: Counter[tuple[str, str]] = field(default_factory=Counter)
    moved: Counter[tuple[str, str]] = field(default_factory=Counter)
    unsettled: int = 0


def replay(
    records: Iterable[FactsRecord],
    before: tuple[RoutingTable, int],
    after: tuple[RoutingTable, int],
) -> Replay:
    """What would have gone where. Each side is a table and its long_prompt_tokens.

    A prompt that was never counted, and whose bounds lie on both sides of a threshold, is
    unsettled: it is counted as that and nowhere else.
    """
    result = Replay()
    for record in records:
        result.requests += 1
        result.recorded[record.outcome] += 1
        old, new = _home(record, *before), _home(record, *after)
        if old is None or new is None:
            result.unsettled += 1
            continue
        result.homes[new] += 1
        if old[1] != new[1]:
            result.moved[old[1], new[1]] += 1
    return result


def _home(record: FactsRecord, table: RoutingTable, threshold: int) -> tuple[str, str] | None:
    urgency = record.facts.declaration.urgency
    shape = settled(record.facts.prompt_tokens, threshold)
    if shape is None:
        if shape_matters(table, urgency):
            return None
        shape = Shape.SHORT
    sla_class = SlaClass(urgency, shape)
    return str(sla_class), home(table, sla_class).pool
