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
import statistics
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from app.config import PoolSettings
from app.contracts.exchange import PoolRequest, ReplyHead
from app.contracts.pool import EngineFacts, EngineLoad
from app.pools.engine import Tally
from app.pools.preflight import check_cache

logger = logging.getLogger(__name__)

# Entries that ray.serve.llm 2.60.0 registers on import; each can be lost to another process once.
REGISTRY_ENTRIES = 4
FAULT = 500
# Not implemented, and full.
HONEST = (501, 503)
UNPROCESSABLE = json.dumps(
    {
        "error": {
            "message": "the engine cannot process this request: a field has a value it fails on",
            "type": "invalid_request_error",
            "param": None,
            "code": "unprocessable_request",
        }
    }
).encode()
JSON = "application/json"
DONE = b"data: [DONE]"
ROLE = b'"delta":{"role":"assistant"'
PRIORITY_HEADER = b"x-vllm-priority"
# How long vLLM may take to act on a disconnect; it takes one step of its event loop.
DISCONNECT_LIMIT_S = 1.0
# The count of the request that runs in this context.
_tally: contextvars.ContextVar[Tally] = contextvars.ContextVar("tally")
# Tokens whose times make up the medians of a load report.
RECENT = 32


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
        if self._pool.device == "cpu":
            # Asked again where the replica is: the node that was deployed from may be another kind.
            check_cache("kv_cache_dtype", self._pool.vllm.kv_cache_dtype)
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
            serving.engine_client = _Counting(serving.engine_client)
        state.engine_client.logger_manager.stat_loggers.append(self._tap)

    def _headers(self, request: PoolRequest) -> list[tuple[bytes, bytes]]:
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(request.body)).encode()),
            (b"x-request-id", request.request_id.encode()),
        ]
        # An engine that is first come, first served refuses any priority but 0.
        if request.priority and self._pool.vllm.scheduling_policy == "priority":
            headers.append((PRIORITY_HEADER, str(request.priority).encode()))
        return headers

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
        return self._tap.load()

    async def check_health(self) -> None:
        await self._server.check_health()

    async def respond(
        self, request: PoolRequest, tally: Tally
    ) -> AsyncGenerator[ReplyHead | bytes, None]:
        headers = self._headers(request)
        call = _AsgiCall(self._app, request, headers, tally)
        try:
            status, content_type = await call.head()
            chunks = [await call.chunk()]
            if content_type.startswith("text/event-stream"):
                if ROLE in chunks[0]:
                    # It comes with the first token: an engine that fails on it fails right after.
                    chunks.append(await call.chunk())
                problem = next((_event_data(c) for c in chunks if _is_error_event(c)), None)
                if chunks[-1].startswith(DONE):
                    # It ended without a token and without saying why.
                    status = FAULT
                elif problem is not None:
                    # The engine failed before its first token: the status can still say so.
                    status, content_type = int(json.loads(problem)["error"]["code"]), JSON
                    chunks = [problem]
            if status >= FAULT and status not in HONEST:
                chunks = [await self._at_fault(status, chunks[0])]
                status, content_type = 400, JSON
            yield ReplyHead(status, content_type, tally.prompt_tokens or None)
            if status == 200 and request.service_tier is not None:
                chunks[0] = with_service_tier(chunks[0], request.service_tier)
            for chunk in chunks:
                yield chunk
            while status == 200 and (chunk := await call.chunk()):
                yield chunk
        finally:
            await call.close()

    async def _at_fault(self, status: int, answer: bytes) -> bytes:
        """What to answer instead of an engine's 500.

        An engine that is dead raises here, and the replica counts as lost. One that is well was
        given something that it does not expect: the request is at fault.
        """
        await self.check_health()
        logger.warning("engine answered %d: %s", status, answer[:500].decode(errors="replace"))
        return UNPROCESSABLE


class SchedulerTap:
    """Keeps vLLM's last scheduler report; a member of its list of stat loggers."""

    def __init__(self) -> None:
        self._last = (0, 0, 0.0)
        self._ttft_s: deque[float] = deque(maxlen=RECENT)
        self._tpot_s: deque[float] = deque(maxlen=RECENT)

    def load(self) -> EngineLoad:
        running, waiting, kv_used_fraction = self._last
        return EngineLoad(
            running, waiting, kv_used_fraction, _median(self._ttft_s), _median(self._tpot_s)
        )

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is not None:
            self._last = (
                scheduler_stats.num_running_reqs,
                scheduler_stats.num_waiting_reqs,
                scheduler_stats.kv_cache_usage,
            )
        if iteration_stats is not None:
            self._ttft_s.extend(iteration_stats.time_to_first_tokens_iter)
            self._tpot_s.extend(iteration_stats.inter_token_latencies_iter)

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


class _Counting:
    """An engine client that counts the tokens of each request on its context's tally."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def generate(self, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = self._client.generate(prompt, sampling_params, *args, **kwargs)
        tally = _tally.get(None)
        if tally is None:
            return outputs
        tally.prompted(len(prompt.get("prompt_token_ids") or ()))
        return _counted(outputs, tally, is_delta=sampling_params.output_kind.name == "DELTA")


async def _counted(outputs: Any, tally: Tally, *, is_delta: bool) -> AsyncGenerator[Any, None]:
    seen = 0
    async with aclosing(outputs):
        async for output in outputs:
            tokens = sum(len(part.token_ids) for part in output.outputs)
            tally.output_tokens += tokens if is_delta else tokens - seen
            seen = tokens
            yield output


class _AsgiCall:
    """One request through an ASGI application in this process."""

    def __init__(
        self, app: Any, request: PoolRequest, headers: list[tuple[bytes, bytes]], tally: Tally
    ) -> None:
        self._body: bytes | None = request.body
        self._sent: asyncio.Queue[Any] = asyncio.Queue()
        self._gone = asyncio.Event()
        context = contextvars.copy_context()
        context.run(_tally.set, tally)
        self._task = asyncio.get_running_loop().create_task(
            self._run(app, _scope(request.path, headers)), context=context
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


def _scope(path: str, headers: list[tuple[bytes, bytes]]) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": None,
    }


def _median(values: deque[float]) -> float | None:
    return statistics.median(values) if values else None


def _is_error_event(chunk: bytes) -> bool:
    return chunk.startswith(b'data: {"error"')


def _event_data(chunk: bytes) -> bytes:
    return chunk.partition(b"\n")[0].removeprefix(b"data: ")


def _kv_cache_dtype(config: Any) -> str:
    kind = config.cache_config.cache_dtype
    return _name(config.model_config.dtype) if kind == "auto" else str(kind)


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
