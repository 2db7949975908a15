from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from app.api.bodies import BodyBounds
from app.api.routes import Api
from app.contracts.exchange import Refusal
from app.contracts.placement import Decision
from app.contracts.pool import EngineLoad, Occupancy
from app.contracts.request import Endpoint, Urgency
from app.dispatch import Dispatcher
from app.errors import StreamBroken
from app.facts import FactsLog, read
from app.routing.policy import Policy
from tests.unit.fakes import LOST, Answer, Clock, FakeClient, decision, reply, snapshot

BOUNDS = BodyBounds("m", 100, 64, 9000, 10_000, 4, 3, calls_tools=False)
SSE, JSON = "text/event-stream", "application/json"
HI = {"messages": [{"role": "user", "content": "hi"}]}


async def to_latency(endpoint: Endpoint, body: Mapping[str, Any], header: str | None) -> Decision:
    return decision(urgency=Urgency.URGENT)


def pool(*answers: Answer) -> FakeClient:
    made = FakeClient("latency", Clock(), *answers)
    made.view.told(snapshot())
    return made


def client(latency: FakeClient, facts: FactsLog | None = None) -> TestClient:
    dispatcher = Dispatcher({"latency": latency}, Policy({}, {}), "me", Clock())
    return TestClient(Api(to_latency, dispatcher, BOUNDS, {Urgency.URGENT: 9.0}, facts).app())


def test_an_answer_carries_where_it_came_from_and_its_bytes_untouched() -> None:
    latency = pool(reply(b'{"a": ', b"1}", prompt_tokens=7))
    answer = client(latency).post("/v1/chat/completions", json=HI)
    assert (answer.status_code, answer.content) == (200, b'{"a": 1}')
    assert answer.headers["x-pool"] == "latency"
    assert answer.headers["x-route-reason"] == "because"
    assert answer.headers["x-prompt-tokens"] == "7"
    assert latency.asked[0].replica == "r1"
    assert latency.asked[0].service_tier == "priority"


def test_a_stream_that_breaks_ends_with_one_error_event_and_done() -> None:
    broken = reply(b"data: 1\n\n", kind=SSE, failure=StreamBroken("broke", "latency", 1))
    text = client(pool(broken)).post("/v1/chat/completions", json=HI).text
    first, error, done, rest = text.split("\n\n")
    assert (first, done, rest) == ("data: 1", "data: [DONE]", "")
    assert error.startswith('data: {"error": {"message": "broke"')


@pytest.mark.parametrize(
    ("answers", "status", "code"),
    [
        ((Refusal("full", 4),), 429, "pool_busy"),
        ((Refusal("late", 4, is_late=True),), 408, "wait_limit_exceeded"),
        ((LOST, LOST), 503, "pool_unavailable"),
    ],
)
def test_a_pool_that_cannot_answer_is_an_honest_status(
    answers: tuple[Answer, ...], status: int, code: str
) -> None:
    answer = client(pool(*answers)).post("/v1/chat/completions", json=HI)
    assert answer.status_code == status
    assert answer.headers["retry-after"] == "4"
    assert answer.headers["x-pool"] == "latency"
    assert answer.json()["error"]["code"] == code


def test_an_engines_refusal_keeps_its_status_and_a_bounded_body() -> None:
    latency = pool(reply(b'{"error": {"message": "', b"x" * 9999, status=400))
    answer = client(latency).post("/v1/chat/completions", json=HI)
    assert answer.status_code == 400
    assert len(answer.content) < 4096


@pytest.mark.parametrize(("header", "limit_s"), [(None, 9.0), ("2.5", 2.5), ("86400", 86400.0)])
def test_a_wait_limit_is_the_headers_or_that_of_the_class(
    header: str | None, limit_s: float
) -> None:
    latency = pool(reply(b"{}"))
    headers = {} if header is None else {"x-max-wait-s": header}
    client(latency).post("/v1/chat/completions", json=HI, headers=headers)
    assert latency.asked[0].max_wait_s == limit_s


@pytest.mark.parametrize("header", ["0", "-1", "nan", "inf", "soon", "86401", ""])
def test_a_wait_limit_that_is_none_is_refused(header: str) -> None:
    answer = client(pool()).post("/v1/chat/completions", json=HI, headers={"x-max-wait-s": header})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-max-wait-s"


def test_facts_are_recorded_without_text(tmp_path: Path) -> None:
    path = tmp_path / "facts.jsonl"
    asked = client(pool(reply(b"{}"), Refusal("full", 4)), FactsLog(str(path)))
    secret = {"messages": [{"role": "user", "content": "my secret"}]}
    for _ in range(2):
        asked.post("/v1/chat/completions", json=secret)
    first, second = read(path)
    assert (first.pool, first.outcome) == ("latency", "home")
    assert (second.pool, second.outcome) == (None, "pool_busy")
    assert first.facts == decision(urgency=Urgency.URGENT).facts
    assert "secret" not in path.read_text()


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
    answer = client(pool()).request(method, path, content=body, headers={"content-type": kind})
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_health_and_pools_follow_the_live_replicas() -> None:
    latency = FakeClient("latency", Clock())
    api = client(latency)
    assert api.get("/health").status_code == 503
    row = {"id": "latency", "object": "pool", "replicas": 0, "pids": []}
    assert api.get("/v1/pools").json()["data"] == [row]
    for name in ("r1", "r2"):
        latency.view.told(
            snapshot(
                replica=name,
                load=EngineLoad(2, 1, 0.25, tpot_s=0.05),
                occupancy=Occupancy(slots=3, queued=4, lent_slots=1),
                counts={"home": 5},
            )
        )
    assert api.get("/health").json()["healthy"] is True
    shown = api.get("/v1/pools").json()["data"][0]
    assert (shown["slots"], shown["running"], shown["waiting"]) == (16, 4, 2)
    assert (shown["slots_taken"], shown["queued"], shown["lent_slots"]) == (6, 8, 2)
    assert (shown["headroom_slots"], shown["tpot_s"]) == (4, 0.05)
    assert (shown["kv_tokens"], shown["kv_tokens_used"], shown["kv_bytes"]) == (2000, 500, 8000)
    assert shown["counts"] == {"home": 10}


def test_a_decision_is_explained_without_generating() -> None:
    latency = pool()
    shown = client(latency).post("/v1/route", json=HI).json()
    assert (shown["pool"], shown["priority"], shown["reason"]) == ("latency", 0, "because")
    assert shown["facts"]["prompt_tokens"] == 5
    assert latency.asked == []
