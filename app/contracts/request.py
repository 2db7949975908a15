"""What is known of a request before generation: facts, and the SLA class made of them."""

from dataclasses import dataclass
from enum import StrEnum


class Endpoint(StrEnum):
    """The two generating endpoints, by their path."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


class Urgency(StrEnum):
    """How soon the caller needs the answer, as declared."""

    URGENT = "urgent"
    UNDECLARED = "undeclared"
    DEFERRABLE = "deferrable"


class Shape(StrEnum):
    """Whether the prompt is long enough to stall a running chat."""

    SHORT = "short"
    LONG = "long"


class Source(StrEnum):
    """Where the urgency was declared, in order of authority."""

    BODY = "service_tier"
    HEADER = "x-urgency"
    NONE = "undeclared"


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Bounds of a prompt's token count; equal bounds mean that it was counted exactly."""

    low: int
    high: int

    @property
    def exact(self) -> int | None:
        return self.low if self.low == self.high else None


@dataclass(frozen=True, slots=True)
class Declaration:
    """The urgency a caller declared and where."""

    urgency: Urgency
    source: Source


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What the classifier may look at. Holds no prompt text."""

    endpoint: Endpoint
    declaration: Declaration
    prompt_bytes: int
    prompt_tokens: TokenRange
    prompts: int
    sequences: int
    max_output_tokens: int | None
    is_stream: bool = False


@dataclass(frozen=True, slots=True)
class SlaClass:
    """Urgency and shape: the row and the column of the routing table."""

    urgency: Urgency
    shape: Shape

    def __str__(self) -> str:
        return f"{self.urgency}_{self.shape}"
