"""What the router adds, against `ray.serve.llm`'s ingress before the same simulated engine.

`python -m load.overhead` starts a local Ray with both applications, measures them in pairs in one
run, and prints one JSON object: medians, and ratios of ours to theirs.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import ray
from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app
from ray.serve.llm.deployment import LLMServer

from app.config import SimulationSettings, VllmSettings
from app.contracts.exchange import PoolRequest, ReplyHead
from app.graph import build
from app.pools.simulated import SimulatedEngine

PORT = 8123
MODEL = "smollm2-135m-instruct"
SOURCE = Path(".models/SmolLM2-135M-Instruct")
OURS, THEIRS = "/ours/v1/chat/completions", "/theirs/v1/chat/completions"
LIMITS = {"max_num_seqs": 64, "max_model_len": 4096, "kv_cache_dtype": "auto"}


class SimulatedLlmEngine:
    """`SimulatedEngine` behind the engine interface of `ray.serve.llm`."""

    def __init__(self, llm_config: LLMConfig) -> None:
        speeds = SimulationSettings.model_validate(llm_config.experimental_configs["speeds"])
        self._engine = SimulatedEngine(MODEL, VllmSettings.model_validate(LIMITS), speeds)

    async def start(self) -> None:
        await self._engine.start()

    async def chat(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[str, None]:
        body = request.model_dump_json(exclude_unset=True).encode()
        sent = PoolRequest("/v1/chat/completions", body, request.request_id)
        async for item in self._engine.respond(sent):
            if not isinstance(item, ReplyHead):
                yield item.decode()

    async def check_health(self) -> None:
        await self._engine.check_health()

    async def shutdown(self) -> None:
        """Nothing to release."""

    def routing_stats(self) -> dict[str, Any]:
        return {}


class SimulatedLlmServer(LLMServer):  # type: ignore[misc]
    """`LLMServer` with the simulated engine."""

    _default_engine_cls = SimulatedLlmEngine


@dataclass(frozen=True, slots=True)
class Measured:
    """One stream: seconds to the first content chunk and to the end, and its chunks."""

    first_s: float
    total_s: float
    chunks: int


async def stream(session: aiohttp.ClientSession, path: str, tokens: int) -> Measured:
    """Read one stream. The first event is the role, the second the first content chunk."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": tokens,
        "stream": True,
    }
    begun, first_s, chunks = time.perf_counter(), 0.0, 0
    async with session.post(f"http://127.0.0.1:{PORT}{path}", json=body) as answer:
        answer.raise_for_status()
        async for part in answer.content.iter_any():
            chunks += part.count(b"data: ")
            if not first_s and chunks >= 2:
                first_s = time.perf_counter() - begun
    if chunks != tokens + 2:
        raise RuntimeError(f"{path} gave {chunks} events, {tokens + 2} were due")
    return Measured(first_s, time.perf_counter() - begun, chunks)


async def first_chunk_s(session: aiohttp.ClientSession, path: str) -> float:
    return (await stream(session, path, 8)).first_s


async def chunks_per_s(session: aiohttp.ClientSession, path: str, streams: int) -> float:
    begun = time.perf_counter()
    done = await asyncio.gather(*(stream(session, path, 400) for _ in range(streams)))
    return sum(m.chunks for m in done) / (time.perf_counter() - begun)


async def measure(pairs: int, streams: int) -> dict[str, Any]:
    """Both applications in turn, the order changing from pair to pair; the first pair warms up."""
    first: dict[str, list[float]] = {OURS: [], THEIRS: []}
    rate: dict[str, list[float]] = {OURS: [], THEIRS: []}
    timeout = aiohttp.ClientTimeout(total=120)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        for pair in range(pairs + 1):
            for path in (OURS, THEIRS) if pair % 2 else (THEIRS, OURS):
                first[path].append(await first_chunk_s(session, path))
                first[path].append(await first_chunk_s(session, path))
        for pair in range(pairs // 2 + 1):
            for path in (OURS, THEIRS) if pair % 2 else (THEIRS, OURS):
                rate[path].append(await chunks_per_s(session, path, streams))
    first_s = {path: statistics.median(values[2:]) for path, values in first.items()}
    per_s = {path: statistics.median(values[1:]) for path, values in rate.items()}
    return {
        "first_content_chunk_ms": {p: round(1000 * s, 1) for p, s in first_s.items()},
        "first_content_chunk_ratio": round(first_s[OURS] / first_s[THEIRS], 2),
        "streams": streams,
        "chunks_per_s": {p: round(r) for p, r in per_s.items()},
        "chunks_per_s_ratio": round(per_s[OURS] / per_s[THEIRS], 2),
    }


def ours(speeds: dict[str, Any]) -> dict[str, Any]:
    """Builder arguments: one simulated pool behind the router."""
    cell = {"pool": "only"}
    row = {"short": cell, "long": cell}
    pool = {
        "engine": "simulated", "device": "cpu", "bundle": {"CPU": 0.01}, "vllm": LIMITS,
        "simulation": speeds, "proof": {"references": "none"}, "deployment": {"num_replicas": 1},
    }  # fmt: skip
    table = {"urgent": row, "undeclared": row, "deferrable": row}
    return {
        "model": {"id": MODEL, "source": "none"},
        "routing": {"long_prompt_tokens": 1024, "table": table},
        "pools": {"only": pool},
    }


def theirs(speeds: dict[str, Any]) -> Any:
    config = LLMConfig(
        model_loading_config={"model_id": MODEL, "model_source": str(SOURCE.absolute())},
        accelerator_config={"kind": "cpu"},
        placement_group_config={"bundle_per_worker": {"CPU": 0.01}},
        deployment_config={"num_replicas": 1, "ray_actor_options": {"num_cpus": 0}},
        experimental_configs={"speeds": speeds},
        server_cls=SimulatedLlmServer,
        log_engine_metrics=False,
    )
    ingress = {"num_replicas": 1, "ray_actor_options": {"num_cpus": 0}, "autoscaling_config": None}
    return build_openai_app({"llm_configs": [config], "ingress_deployment_config": ingress})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens-per-s", type=float, default=1000.0, help="of one sequence")
    options = parser.parse_args()
    speeds = {
        "prefill_tokens_per_s": 1e6,
        "decode_tokens_per_s": options.tokens_per_s,
        "kv_tokens": 10**6,
    }
    ray.init(address="local", num_cpus=4, include_dashboard=False, logging_level="ERROR")
    try:
        serve.start(
            http_options={"host": "127.0.0.1", "port": PORT},
            logging_config={"enable_access_log": False},
        )
        serve.run(build(ours(speeds)), name="ours", route_prefix="/ours")
        serve.run(theirs(speeds), name="theirs", route_prefix="/theirs")
        print(json.dumps(asyncio.run(measure(options.pairs, options.streams)), indent=1))  # noqa: T201
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
