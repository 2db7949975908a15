"""vLLM behind the engine protocol: `LLMServer` starts it, its own ASGI application answers.

Requests enter vLLM's HTTP application in this process, so its protocol, validation and error
mapping are exactly those of its own server. What leaves are raw bytes. The one thing rewritten is
`service_tier`, which vLLM leaves empty.
"""

import asyncio
import contextvars
import importlib
import json
import logging
from collections.abc import AsyncGenerator
from typing import Any

from app.config import PoolSettings
from app.contracts.exchange import PoolRequest, ReplyHead
from app.contracts.pool import EngineFacts, EngineLoad

logger = logging.getLogger(__name__)

# Entries that ray.serve.llm 2.60.0 registers on import; each can be lost to another process once.
REGISTRY_ENTRIES = 4
PRIORITY_HEADER = b"x-vllm-priority"
# How long vLLM may take to act on a disconnect; it takes one step of its event loop.
DISCONNECT_LIMIT_S = 1.0
# Prompt lengths of the request that runs in this context, as handed to the engine.
_prompt_lengths: contextvars.ContextVar[list[int]] = contextvars.ContextVar("prompt_lengths")


def import_ray_llm() -> None:
    """Import `ray.serve.llm`, again if another process of the cluster did it at the same moment.

    On import ray 2.60.0 checks and then fills a registry that the whole cluster shares; of two
    processes that start together one may raise ValueError, and finds it filled on the next try.
    """
    for attempt in range(REGISTRY_ENTRIES + 1):
        try:
            importlib.import_module("ray.serve.llm.deployment")
            return
        except ValueError as error:
            if "already registered" not in str(error) or attempt == REGISTRY_ENTRIES:
                raise
            logger.info("importing ray.serve.llm again: %s", error)


def llm_config(model_id: str, source: str, pool: PoolSettings) -> Any:
    """Ray's configuration of one vLLM engine. Tells nothing of placement: the deployment does."""
    from ray.serve.llm import LLMConfig

    values = pool.vllm.model_dump(exclude={"extra"}, exclude_none=True)
    return LLMConfig(
        model_loading_config={"model_id": model_id, "model_source": source},
        engine_kwargs={**values, **pool.vllm.extra},
        accelerator_type=pool.accelerator_type,
        accelerator_config={"kind": pool.device},
        placement_group_config={"bundle_per_worker": dict(pool.bundle), "strategy": "PACK"},
        runtime_env={"env_vars": dict(pool.env)},
        log_engine_metrics=True,
    )


class VllmEngine:
    """One vLLM engine. `model_id` is the public name; inside, each pool's engine has its own."""

    def __init__(self, model_id: str, pool_name: str, source: str, pool: PoolSettings) -> None:
        self._model_id = model_id
        self._inner_id = f"{model_id}--{pool_name}"
        self._source = source
        self._pool = pool
        self._server: Any = None
        self._app: Any = None
        self._tap = SchedulerTap()

    async def start(self) -> None:
        import_ray_llm()
        from ray.serve.llm.deployment import LLMServer

        config = llm_config(self._inner_id, self._source, self._pool)
        self._server = LLMServer.sync_init(config)
        await self._server.start()
        self._app = await self._server.__serve_build_asgi_app__()
        state = self._app.state
        # Metrics carry the inner name, so that two pools' series stay apart (ray#65892);
        # clients see the public one.
        for path in state.openai_serving_models.base_model_paths:
            path.name = self._model_id
        for serving in (state.openai_serving_chat, state.openai_serving_completion):
            serving.engine_client = _LengthNoting(serving.engine_client)
        state.engine_client.logger_manager.stat_loggers.append(self._tap)

    def facts(self) -> EngineFacts:
        config = self._app.state.engine_client.vllm_config
        cache = config.cache_config
        return EngineFacts(
            slots=config.scheduler_config.max_num_seqs,
            kv_tokens=cache.num_gpu_blocks * cache.block_size,
            kv_bytes=cache.kv_cache_memory_bytes,
            kv_cache_dtype=_kv_cache_dtype(config),
            dtype=_name(config.model_config.dtype),
            max_model_len=config.model_config.max_model_len,
        )

    def load(self) -> EngineLoad:
        return self._tap.last

    async def check_health(self) -> None:
        await self._server.check_health()

    async def respond(self, request: PoolRequest) -> AsyncGenerator[ReplyHead | bytes, None]:
        call = _AsgiCall(self._app, request)
        try:
            status, content_type = await call.head()
            first = await call.chunk()
            if content_type.startswith("text/event-stream") and _is_error_event(first):
                # The engine failed before its first token: the status can still say so.
                problem = _event_data(first)
                status = int(json.loads(problem)["error"]["code"])
                yield ReplyHead(status, "application/json", sum(call.prompt_lengths) or None)
                yield problem
                return
            yield ReplyHead(status, content_type, sum(call.prompt_lengths) or None)
            if status == 200 and request.service_tier is not None:
                first = with_service_tier(first, request.service_tier)
            while first:
                yield first
                first = await call.chunk()
        finally:
            await call.close()


class SchedulerTap:
    """Keeps vLLM's last scheduler report; a member of its list of stat loggers."""

    def __init__(self) -> None:
        self.last = EngineLoad(running=0, waiting=0, kv_used_fraction=0.0)

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is not None:
            self.last = EngineLoad(
                running=scheduler_stats.num_running_reqs,
                waiting=scheduler_stats.num_waiting_reqs,
                kv_used_fraction=scheduler_stats.kv_cache_usage,
            )

    def log(self) -> None:
        """Nothing to print."""

    def log_engine_initialized(self) -> None:
        """Nothing to print."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """Sleep is not used here."""


def with_service_tier(chunk: bytes, tier: str) -> bytes:
    """The first chunk of an answer with the tier that was served. Inside a JSON string a quote is
    escaped, so neither pattern can match generated text."""
    said = b'"service_tier":"' + tier.encode() + b'"'
    if b'"service_tier":null' in chunk:
        return chunk.replace(b'"service_tier":null', said, 1)
    return chunk.replace(b"{", b"{" + said + b",", 1)


class _LengthNoting:
    """An engine client that notes the length of each prompt it is given."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def generate(self, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        _prompt_lengths.get([]).append(len(prompt.get("prompt_token_ids") or ()))
        return self._client.generate(prompt, *args, **kwargs)


class _AsgiCall:
    """One request through an ASGI application in this process."""

    def __init__(self, app: Any, request: PoolRequest) -> None:
        self.prompt_lengths: list[int] = []
        self._body: bytes | None = request.body
        self._sent: asyncio.Queue[Any] = asyncio.Queue()
        self._gone = asyncio.Event()
        context = contextvars.copy_context()
        context.run(_prompt_lengths.set, self.prompt_lengths)
        self._task = asyncio.get_running_loop().create_task(
            self._run(app, _scope(request)), context=context
        )

    async def head(self) -> tuple[int, str]:
        message = await self._next()
        headers = dict(message["headers"])
        return message["status"], headers.get(b"content-type", b"application/json").decode()

    async def chunk(self) -> bytes:
        """The next part of the body; empty at its end."""
        while True:
            message = await self._next()
            if message["body"] or not message.get("more_body"):
                return bytes(message["body"])

    async def close(self) -> None:
        """End the request; vLLM aborts what still runs when it is told of a disconnect.

        Cancelling alone is not enough: the task that vLLM waits for an answer in would live on.
        """
        self._gone.set()
        await asyncio.wait((self._task,), timeout=DISCONNECT_LIMIT_S)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, app: Any, scope: dict[str, Any]) -> None:
        try:
            await app(scope, self._receive, self._sent.put)
        finally:
            self._sent.put_nowait(None)

    async def _next(self) -> Any:
        message = await self._sent.get()
        if message is None:
            self._sent.put_nowait(None)
            if self._task.done() or self._task.cancelling():
                await self._task
            return {"body": b"", "more_body": False}
        return message

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}


def _scope(request: PoolRequest) -> dict[str, Any]:
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(request.body)).encode()),
        (b"x-request-id", request.request_id.encode()),
    ]
    if request.priority:
        headers.append((PRIORITY_HEADER, str(request.priority).encode()))
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": request.path,
        "raw_path": request.path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": None,
    }


def _is_error_event(chunk: bytes) -> bool:
    return chunk.startswith(b'data: {"error"')


def _event_data(chunk: bytes) -> bytes:
    return chunk.partition(b"\n")[0].removeprefix(b"data: ")


def _kv_cache_dtype(config: Any) -> str:
    kind = config.cache_config.cache_dtype
    return _name(config.model_config.dtype) if kind == "auto" else str(kind)


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
