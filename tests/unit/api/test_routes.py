from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import pytest
from starlette.testclient import TestClient

from app.api.bodies import BodyBounds
from app.api.routes import Api
from app.contracts.exchange import PoolRequest, Reply, ReplyHead
from app.contracts.placement import Decision, Destination, Placement
from app.contracts.pool import EngineFacts, EngineLoad, PoolSnapshot
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
from app.errors import PoolBusy, PoolUnavailable, SplitpoolError, StreamBroken

BOUNDS = BodyBounds("m", 100, 64, 10_000, 4, 3, calls_tools=False)
SSE, JSON = "text/event-stream", "application/json"
HI = {"messages": [{"role": "user", "content": "hi"}]}
FACTS = EngineFacts(8, 100, 1000, "fp8", "float32", 64)


class FakePool:
    """A pool that gives set chunks, or fails before or after its first."""

    pool = "latency"

    def __init__(
        self, head: ReplyHead, chunks: list[bytes], failure: SplitpoolError | None = None
    ) -> None:
        self.head, self.chunks, self.failure = head, chunks, failure
        self.asked: list[PoolRequest] = []
        self.replicas: list[PoolSnapshot] = []

    async def open(self, request: PoolRequest) -> Reply:
        self.asked.append(request)
        if self.failure is not None and not self.chunks:
            raise self.failure
        return Reply(self.head, self._given())

    async def _given(self) -> AsyncGenerator[bytes, None]:
        for chunk in self.chunks:
            yield chunk
        if self.failure is not None:
            raise self.failure

    def snapshots(self) -> Sequence[PoolSnapshot]:
        return self.replicas


async def to_latency(endpoint: Endpoint, body: Mapping[str, Any], header: str | None) -> Decision:
    facts = RequestFacts(
        endpoint, Declaration(Urgency.URGENT, Source.BODY), 2, TokenRange(5, 5), 1, None
    )
    placement = Placement(Destination("latency", -3), "because")
    return Decision(facts, SlaClass(Urgency.URGENT, Shape.SHORT), placement)


def client(pool: FakePool) -> TestClient:
    return TestClient(Api(to_latency, {"latency": pool}, BOUNDS).app())


def test_an_answer_carries_where_it_came_from_and_its_bytes_untouched() -> None:
    pool = FakePool(ReplyHead(200, JSON, 7), [b'{"a": ', b"1}"])
    answer = client(pool).post("/v1/chat/completions", json=HI)
    assert (answer.status_code, answer.content) == (200, b'{"a": 1}')
    assert answer.headers["x-pool"] == "latency"
    assert answer.headers["x-route-reason"] == "because"
    assert answer.headers["x-prompt-tokens"] == "7"
    assert pool.asked[0].priority == -3
    assert pool.asked[0].service_tier == "priority"


def test_a_stream_that_breaks_ends_with_one_error_event_and_done() -> None:
    pool = FakePool(ReplyHead(200, SSE), [b"data: 1\n\n"], StreamBroken("broke", "latency", 1))
    text = client(pool).post("/v1/chat/completions", json=HI).text
    first, error, done, rest = text.split("\n\n")
    assert (first, done, rest) == ("data: 1", "data: [DONE]", "")
    assert error.startswith('data: {"error": {"message": "broke"')


@pytest.mark.parametrize(
    ("failure", "status"),
    [(PoolBusy("b", "latency", 4), 429), (PoolUnavailable("u", "latency", 4), 503)],
)
def test_a_pool_that_cannot_answer_is_an_honest_status(
    failure: SplitpoolError, status: int
) -> None:
    answer = client(FakePool(ReplyHead(200, JSON), [], failure)).post("/v1/completions", json=HI)
    assert answer.status_code == 400
    answer = client(FakePool(ReplyHead(200, JSON), [], failure)).post(
        "/v1/chat/completions", json=HI
    )
    assert answer.status_code == status
    assert answer.headers["retry-after"] == "4"
    assert answer.json()["error"]["type"]


def test_an_engines_refusal_keeps_its_status_and_a_bounded_body() -> None:
    pool = FakePool(ReplyHead(400, JSON), [b'{"error": {"message": "', b"x" * 9999])
    answer = client(pool).post("/v1/chat/completions", json=HI)
    assert answer.status_code == 400
    assert len(answer.content) < 4096


@pytest.mark.parametrize(
    ("method", "path", "kind", "body", "status"),
    [
        ("POST", "/v1/chat/completions", "text/plain", b"{}", 415),
        ("POST", "/v1/chat/completions", JSON, b"[]", 400),
        ("POST", "/v1/chat/completions", JSON, b" " * 10_001, 413),
        ("GET", "/v1/chat/completions", JSON, b"", 405),
        ("GET", "/v1/nothing", JSON, b"", 404),
        ("GET", "/v1/models/other", JSON, b"", 404),
    ],
)
def test_refusals_are_openai_error_objects(
    method: str, path: str, kind: str, body: bytes, status: int
) -> None:
    api = client(FakePool(ReplyHead(200, JSON), [b"{}"]))
    answer = api.request(method, path, content=body, headers={"content-type": kind})
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_health_and_pools_follow_the_live_replicas() -> None:
    pool = FakePool(ReplyHead(200, JSON), [b"{}"])
    api = client(pool)
    assert api.get("/health").status_code == 503
    row = {"id": "latency", "object": "pool", "replicas": 0, "pids": []}
    assert api.get("/v1/pools").json()["data"] == [row]
    pool.replicas = [
        PoolSnapshot("latency", pid, FACTS, EngineLoad(2, 1, 0.25), None, 3.0) for pid in (1, 2)
    ]
    assert api.get("/health").json()["healthy"] is True
    shown = api.get("/v1/pools").json()["data"][0]
    assert (shown["slots"], shown["running"], shown["waiting"]) == (16, 4, 2)
    assert (shown["kv_tokens"], shown["kv_tokens_used"], shown["kv_bytes"]) == (200, 50, 2000)


def test_a_decision_is_explained_without_generating() -> None:
    pool = FakePool(ReplyHead(200, JSON), [b"{}"])
    shown = client(pool).post("/v1/route", json=HI).json()
    assert (shown["pool"], shown["priority"], shown["reason"]) == ("latency", -3, "because")
    assert shown["facts"]["prompt_tokens"] == 5
    assert pool.asked == []
