"""Stand-ins that implement the real protocols, and values with the parts a test does not name."""

from collections.abc import AsyncGenerator, Callable
from typing import Any

from app.contracts.exchange import PoolRequest, Refusal, Refused, ReplicaLost, Reply, ReplyHead
from app.contracts.placement import Decision, Destination
from app.contracts.pool import EngineFacts, EngineLoad, Occupancy, PoolSnapshot
from app.contracts.request import (
    Declaration,
    Endpoint,
    RequestFacts,
    Shape,
    SlaClass,
    Source,
    TokenRange,
    Urgency,
)
from app.errors import PoolUnavailable
from app.routing.view import PoolView

FACTS = EngineFacts(8, 1000, 4000, "fp8", "float32", 64)


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def snapshot(
    pool: str = "latency", replica: str = "r1", number: int = 1, **fields: Any
) -> PoolSnapshot:
    values: dict[str, Any] = {
        "pid": 1,
        "facts": FACTS,
        "load": EngineLoad(0, 0, 0.0),
        "occupancy": Occupancy(),
        "headroom_slots": 2,
        "queue_limit": 0,
        "counts": {},
        "agreement": None,
        "start_s": 3.0,
    }
    return PoolSnapshot(pool=pool, replica=replica, number=number, **{**values, **fields})


LATENCY = Destination("latency")


def decision(
    home: Destination = LATENCY,
    urgency: Urgency = Urgency.UNDECLARED,
    shape: Shape = Shape.SHORT,
    max_output_tokens: int | None = 16,
    *,
    is_stream: bool = False,
) -> Decision:
    facts = RequestFacts(
        Endpoint.CHAT, Declaration(urgency, Source.BODY), 2, TokenRange(5, 5), 1, 1,
        max_output_tokens, is_stream,
    )  # fmt: skip
    return Decision(facts, SlaClass(urgency, shape), home, "because")


Answer = Reply | Refusal | Exception


class FakeClient:
    """One pool that gives its answers in turn; an answer may be a refusal or a failure.

    Each takes `takes_s` on the clock.
    """

    def __init__(self, pool: str, clock: "Clock", *answers: Answer) -> None:
        self.pool = pool
        self.view = PoolView("me", 5.0, clock)
        self.answers = list(answers)
        self.asked: list[PoolRequest] = []
        self.clock = clock
        self.takes_s = 0.0

    async def open(
        self, request: PoolRequest, on_admitted: Callable[[], None] | None = None
    ) -> Reply:
        self.asked.append(request)
        self.clock.now += self.takes_s
        answer = self.answers.pop(0)
        if isinstance(answer, Refusal):
            raise Refused(self.pool, request, answer)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def until_lending(self) -> None:
        raise AssertionError("nobody waits in these tests")

    def unavailable(self) -> PoolUnavailable:
        return PoolUnavailable(f"pool {self.pool} has no live replica", self.pool, 4)


LOST = ReplicaLost("killed")


def reply(
    *chunks: bytes,
    status: int = 200,
    kind: str = "application/json",
    prompt_tokens: int | None = None,
    failure: Exception | None = None,
    ended: Callable[[], None] | None = None,
) -> Reply:
    async def given() -> AsyncGenerator[bytes, None]:
        for chunk in chunks:
            yield chunk
        if failure is not None:
            raise failure

    return Reply(ReplyHead(status, kind, prompt_tokens), given(), ended or _nothing)


def _nothing() -> None:
    pass
