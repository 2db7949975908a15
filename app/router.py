"""The ingress deployment: classifies each request and relays it to its pool. Loads no model."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp

from app.api.bodies import BodyBounds
from app.api.routes import Api
from app.config import AppSettings
from app.decision import Classifier
from app.pools.tokens import TokenCounter
from app.relay import PoolClient


class InferenceRouter:
    """One router replica. `make_counter` loads the tokenizer here, where it is used."""

    def __init__(
        self,
        settings: AppSettings,
        make_counter: Callable[[], TokenCounter],
        handles: dict[str, Any],
    ) -> None:
        counter = make_counter()
        self._clients = {
            name: PoolClient(name, handle, time.monotonic) for name, handle in handles.items()
        }
        routing = settings.routing
        classifier = Classifier(routing.destinations(), routing.long_prompt_tokens, counter)
        self._api = Api(classifier.decide, self._clients, _bounds(settings, counter))
        self._watches: list[asyncio.Task[None]] = []

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Ray Serve's hook: called once, on the replica's event loop."""
        self._watches = [asyncio.ensure_future(c.watch()) for c in self._clients.values()]
        return self._api.app()

    def check_health(self) -> None:
        """Without its watches a router would take every pool for gone."""
        for watch in self._watches:
            if watch.done():
                watch.result()


def _bounds(settings: AppSettings, counter: TokenCounter) -> BodyBounds:
    pools = settings.pools.values()
    return BodyBounds(
        model_id=settings.model.id,
        vocab_size=counter.vocab_size,
        max_model_len=min(p.vllm.max_model_len for p in pools),
        body_bytes=settings.limits.body_bytes,
        sequences=settings.limits.sequences,
        prompts=settings.limits.prompts,
        calls_tools=all("tool_call_parser" in p.vllm.extra for p in pools),
    )
