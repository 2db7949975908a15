"""The HTTP surface: which path answers what. In: requests. Out: answers in OpenAI's shapes."""

import asyncio
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from app.api import bodies, problems, views
from app.api.bodies import BodyBounds
from app.api.stream import RelayResponse
from app.classify.demand import demand
from app.classify.urgency import SERVED_TIER
from app.contracts.exchange import PoolRequest, Refused, ReplicaLost, Reply
from app.contracts.placement import Decision, Demand
from app.contracts.request import Endpoint, Urgency
from app.dispatch import Dispatcher, Job
from app.errors import BodyTooLarge, MalformedRequest, SplitpoolError
from app.facts import FactsLog

# Larger bodies are read and checked in a thread, so that others' chunks keep flowing.
THREAD_FROM_BYTES = 64 * 1024
# A day: longer than any completion window that a client can wait for on one connection.
LONGEST_WAIT_S = 86_400
Decide = Callable[[Endpoint, Mapping[str, Any], str | None], Awaitable[Decision]]


class Api:
    """Every route of one router replica."""

    def __init__(
        self,
        decide: Decide,
        dispatcher: Dispatcher,
        bounds: BodyBounds,
        max_wait_s: Mapping[Urgency, float],
        facts: FactsLog | None = None,
    ) -> None:
        self._decide = decide
        self._dispatcher = dispatcher
        self._bounds = bounds
        self._max_wait_s = max_wait_s
        self._facts = facts
        self._started = int(time.time())

    def app(self) -> Starlette:
        """The ASGI application."""
        return Starlette(
            routes=[
                Route(Endpoint.CHAT, self.chat, methods=["POST"]),
                Route(Endpoint.COMPLETIONS, self.completions, methods=["POST"]),
                Route("/v1/route", self.route, methods=["POST"]),
                Route("/tokenize", self.tokenize, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/v1/models/{model_id:path}", self.model),
                Route("/v1/pools", self.pools),
                Route("/health", self.health),
            ],
            exception_handlers={
                SplitpoolError: _problem_response,
                HTTPException: _http_problem,
                Exception: _fault,
            },
        )

    async def chat(self, request: Request) -> Response:
        return await self._generate(Endpoint.CHAT, request)

    async def completions(self, request: Request) -> Response:
        return await self._generate(Endpoint.COMPLETIONS, request)

    async def route(self, request: Request) -> Response:
        """What would become of this body, and why, without generating."""
        raw, body = await self._read(request)
        endpoint = Endpoint.CHAT if "messages" in body else Endpoint.COMPLETIONS
        decision = await self._decided(endpoint, body, raw, request)
        return JSONResponse(views.decision(decision))

    async def tokenize(self, request: Request) -> Response:
        raw, body = await self._read(request)
        kind = Endpoint.CHAT if "messages" in body else Endpoint.COMPLETIONS
        await self._check(kind, body, raw)
        bodies.check_length(kind, body, self._bounds)
        return RelayResponse(partial(self._tokenized, raw))  # type: ignore[return-value]

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_card()]})

    async def model(self, request: Request) -> Response:
        bodies.check_model({"model": request.path_params["model_id"]}, self._bounds)
        return JSONResponse(self._model_card())

    async def pools(self, request: Request) -> Response:
        """Every pool's live state, in the order of the configuration."""
        clients = self._dispatcher.clients
        rows = [views.pool(name, c.view.live(), c.view.age_s()) for name, c in clients.items()]
        return JSONResponse({"object": "list", "data": rows})

    async def health(self, request: Request) -> Response:
        """200 while every pool has a live replica, 503 otherwise; each pool by name."""
        alive = {name: len(c.view.live()) for name, c in self._dispatcher.clients.items()}
        states = {name: {"healthy": bool(n), "replicas": n} for name, n in alive.items()}
        status = 200 if all(alive.values()) else 503
        return JSONResponse({"healthy": status == 200, "pools": states}, status_code=status)

    async def _generate(self, endpoint: Endpoint, request: Request) -> Response:
        raw, body = await self._read(request)
        decision = await self._decided(endpoint, body, raw, request)
        pool_request = PoolRequest(
            path=endpoint,
            body=bodies.rewritten(raw, body),
            request_id=_fresh_id(),
            service_tier=SERVED_TIER[decision.sla_class.urgency],
        )
        job = self._dispatcher.job(
            decision,
            demand(decision.facts, self._bounds.max_model_len),
            pool_request,
            _max_wait_s(request.headers.get("x-max-wait-s"), decision, self._max_wait_s),
        )
        # Starlette takes any ASGI application for a response.
        return RelayResponse(partial(self._opened, job))  # type: ignore[return-value]

    async def _opened(self, job: Job) -> tuple[Reply, Mapping[str, str]]:
        try:
            reply, placement = await self._dispatcher.open(job)
        except SplitpoolError as error:
            self._record(job, None, problems.code_of(error))
            raise
        self._record(job, placement.destination.pool, placement.kind)
        headers = {"x-pool": placement.destination.pool, "x-route-reason": placement.reason}
        counted = reply.head.prompt_tokens or job.decision.facts.prompt_tokens.exact
        return reply, headers | ({} if counted is None else {"x-prompt-tokens": str(counted)})

    async def _tokenized(self, raw: bytes) -> tuple[Reply, Mapping[str, str]]:
        """Any live pool counts: they all have the same tokenizer. Chat's, the first, is last."""
        clients = list(self._dispatcher.clients.values())
        client = next((c for c in reversed(clients) if c.view.live()), clients[0])
        nothing = Demand(0, 0, 0)
        replica = client.view.state(nothing, is_deferrable=False).any_replica
        try:
            request = PoolRequest("/tokenize", raw, _fresh_id(), demand=nothing, replica=replica)
            return await client.open(request), {}
        except (ReplicaLost, Refused) as error:
            raise client.unavailable() from error

    def _record(self, job: Job, pool: str | None, outcome: str) -> None:
        if self._facts is not None:
            self._facts.record(job.decision, pool, outcome)

    async def _read(self, request: Request) -> tuple[bytes, dict[str, Any]]:
        raw = await _received(request, self._bounds.body_bytes)
        content_type = request.headers.get("content-type")
        if len(raw) < THREAD_FROM_BYTES:
            return raw, bodies.read(raw, content_type, self._bounds)
        return raw, await asyncio.to_thread(bodies.read, raw, content_type, self._bounds)

    async def _decided(
        self, endpoint: Endpoint, body: dict[str, Any], raw: bytes, request: Request
    ) -> Decision:
        await self._check(endpoint, body, raw)
        return await self._decide(endpoint, body, request.headers.get("x-urgency"))

    async def _check(self, endpoint: Endpoint, body: dict[str, Any], raw: bytes) -> None:
        if len(raw) < THREAD_FROM_BYTES:
            bodies.check(endpoint, body, self._bounds)
        else:
            await asyncio.to_thread(bodies.check, endpoint, body, self._bounds)

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self._bounds.model_id,
            "object": "model",
            "created": self._started,
            "owned_by": "splitpool",
            "max_model_len": self._bounds.max_model_len,
        }


async def _received(request: Request, limit: int) -> bytes:
    """The whole body; refused as soon as it is known to be longer than the limit."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise BodyTooLarge(f"the body has more than {limit} bytes")
        parts.append(part)
    return b"".join(parts)


def _max_wait_s(
    header: str | None, decision: Decision, defaults: Mapping[Urgency, float]
) -> float | None:
    if header is None:
        return defaults.get(decision.sla_class.urgency)
    try:
        value = float(header)
    except ValueError:
        value = math.nan
    if not 0 < value <= LONGEST_WAIT_S:
        raise MalformedRequest(
            f"header x-max-wait-s must be seconds above 0 and at most {LONGEST_WAIT_S}",
            param="x-max-wait-s",
        )
    return value


def _fresh_id() -> str:
    """An id for the engine. The client's own, which Ray Serve echoes, may come twice at once."""
    return uuid.uuid4().hex


def _problem_response(request: Request, error: Exception) -> Response:
    assert isinstance(error, SplitpoolError)
    return Response(
        problems.body_of(error),
        status_code=problems.status_of(error),
        headers=problems.headers_of(error),
        media_type="application/json",
    )


def _http_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    missing = {404: "no such path", 405: "this path does not take that method"}
    message = missing.get(error.status_code, str(error.detail))
    return Response(
        problems.problem(message, "invalid_request_error", error.status_code),
        status_code=error.status_code,
        headers=error.headers,
        media_type="application/json",
    )


def _fault(request: Request, error: Exception) -> Response:
    """A fault of ours. Starlette logs it and raises it on; the client learns no detail."""
    content = problems.problem("internal error", "server_error", 500)
    return Response(content, status_code=500, media_type="application/json")
