"""Reads what the caller declares. The body wins over the header; anything unknown is refused."""

from app.contracts.request import Declaration, Source, Urgency
from app.errors import MalformedRequest

TIERS = {
    "priority": Urgency.URGENT,
    "flex": Urgency.DEFERRABLE,
    "default": Urgency.UNDECLARED,
    "auto": Urgency.UNDECLARED,
}
HEADER_VALUES = {"urgent": Urgency.URGENT, "deferrable": Urgency.DEFERRABLE}
SERVED_TIER = {
    Urgency.URGENT: "priority",
    Urgency.UNDECLARED: "default",
    Urgency.DEFERRABLE: "flex",
}


def declared(service_tier: object, header: str | None) -> Declaration:
    """Urgency of a request. `auto` in the body, or nothing, leaves it to the header."""
    from_header = _header_urgency(header)
    if service_tier not in (None, "auto"):
        return Declaration(_body_urgency(service_tier), Source.BODY)
    if from_header is not None:
        return Declaration(from_header, Source.HEADER)
    return Declaration(Urgency.UNDECLARED, Source.NONE)


def _body_urgency(service_tier: object) -> Urgency:
    if not isinstance(service_tier, str) or service_tier not in TIERS:
        raise MalformedRequest(
            f"service_tier must be one of {', '.join(sorted(TIERS))}", param="service_tier"
        )
    return TIERS[service_tier]


def _header_urgency(header: str | None) -> Urgency | None:
    if header is None or not header.strip():
        return None
    urgency = HEADER_VALUES.get(header.strip().lower())
    if urgency is None:
        raise MalformedRequest(
            f"header x-urgency must be one of {', '.join(HEADER_VALUES)}", param="x-urgency"
        )
    return urgency
