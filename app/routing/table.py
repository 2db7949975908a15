"""The home of each SLA class. Knows nothing of Ray, HTTP, load or time."""

from collections.abc import Mapping

from app.contracts.placement import Destination
from app.contracts.request import RequestFacts, Shape, SlaClass, Urgency

RoutingTable = Mapping[Urgency, Mapping[Shape, Destination]]


def shape_matters(table: RoutingTable, urgency: Urgency) -> bool:
    """Whether short and long prompts of this urgency go to different places."""
    row = table[urgency]
    return row[Shape.SHORT] != row[Shape.LONG]


def home(table: RoutingTable, sla_class: SlaClass) -> Destination:
    return table[sla_class.urgency][sla_class.shape]


def reason(table: RoutingTable, sla_class: SlaClass, facts: RequestFacts, threshold: int) -> str:
    """What decided, with its figures."""
    if not shape_matters(table, sla_class.urgency):
        return f"{sla_class.urgency}; prompts of every length go here"
    tokens = facts.prompt_tokens
    if tokens.exact is not None:
        size = f"prompt of {tokens.exact} tokens"
    elif sla_class.shape is Shape.LONG:
        size = f"prompt of at least {tokens.low} tokens"
    else:
        size = f"prompt of at most {tokens.high} tokens"
    return f"{sla_class}; {size}, long from {threshold}"
