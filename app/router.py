"""The ingress deployment: classifies each request and relays it to its pool. Loads no model."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp

from app.api.bodies import BodyBounds
from app.api.routes import Api
from app.config import AppSettings
from app.contracts.pool import PoolSnapshot
from app.decision import Classifier
from app.dispatch import Dispatcher
from app.facts import FactsLog
from app.pools.tokens import TokenCounter
from app.relay import PoolClient
from app.routing.policy import Policy
from app.routing.view import PoolView

# A pool replica speaks twice a second; one that has been silent this long is gone.
LEASE_S = 3.0


class InferenceRouter:
    """One router replica. `make_counter` loads the tokenizer here, where it is used."""

    def __init__(
        self,
        settings: AppSettings,
        policy: Policy,
        make_counter: Callable[[], TokenCounter],
        make_name: Callable[[], str],
        handles: dict[str, Any],
    ) -> None:
        counter, name, clock = make_counter(), make_name(), time.monotonic
        self._clients = {
            pool: PoolClient(pool, handle, PoolView(name, LEASE_S, clock), clock)
            for pool, handle in handles.items()
        }
        routing = settings.routing
        classifier = Classifier(
            table=routing.destinations(),
            long_prompt_tokens=routing.long_prompt_tokens,
            counter=counter,
            loan_prompt_tokens=policy.loan_prompt_tokens(),
        )
        self._api = Api(
            decide=classifier.decide,
            dispatcher=Dispatcher(self._clients, policy, name, clock, clock() + LEASE_S),
            bounds=_bounds(settings, counter),
            max_wait_s=routing.max_wait_s,
            facts=FactsLog(routing.facts_file) if routing.facts_file else None,
        )
        self._watches: list[asyncio.Task[None]] = []

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Ray Serve's hook: called once, on the replica's event loop."""
        self._watches = [asyncio.ensure_future(c.watch()) for c in self._clients.values()]
        return self._api.app()

    async def told(self, snapshot: PoolSnapshot) -> None:
        """A pool replica's word on itself."""
        if snapshot.pool in self._clients:
            self._clients[snapshot.pool].told(snapshot)

    def check_health(self) -> None:
        """Without its watches a router would wait for silent replicas for ever."""
        for watch in self._watches:
            if watch.done():
                watch.result()


def _bounds(settings: AppSettings, counter: TokenCounter) -> BodyBounds:
    pools = settings.pools.values()
    max_model_len = min(p.vllm.max_model_len for p in pools)
    return BodyBounds(
        model_id=settings.model.id,
        vocab_size=counter.vocab_size,
        max_model_len=max_model_len,
        prompt_bytes=max_model_len * counter.bounds.longest_token_bytes,
        body_bytes=settings.limits.body_bytes,
        sequences=settings.limits.sequences,
        prompts=settings.limits.prompts,
        calls_tools=all("tool_call_parser" in p.vllm.extra for p in pools),
    )
