"""What the router adds, in pairs in one run; prints one JSON object of medians and ratios.

`python -m load.overhead` starts a local Ray with this router and `ray.serve.llm`'s ingress, each
before the same simulated engine. `python -m load.overhead --urls A B` compares two servers that
run already, such as `make serve` and vLLM's own server, by their first content chunk alone.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
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
from app.pools.engine import Tally
from app.pools.simulated import SimulatedEngine

PORT = 8123
MODEL = "smollm2-135m-instruct"
SOURCE = Path(".models/SmolLM2-135M-Instruct")
OURS, THEIRS = f"http://127.0.0.1:{PORT}/ours", f"http://127.0.0.1:{PORT}/theirs"
# Long enough that the start of a stream weighs little in its rate.
LONG_TOKENS = 3000
# A tenth of a second at the default rate: a stream that is over at once would be one chunk.
SHORT_TOKENS = 500
FEW_TOKENS = 16
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
        async for item in self._engine.respond(sent, Tally()):
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


async def stream(session: aiohttp.ClientSession, url: str, tokens: int) -> Measured:
    """Read one stream. The first event is the role, the second the first content chunk."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
    }
    begun, first_s, chunks = time.perf_counter(), 0.0, 0
    async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        async for part in answer.content.iter_any():
            chunks += part.count(b"data: ")
            if not first_s and chunks >= 2:
                first_s = time.perf_counter() - begun
    # A real engine holds back bytes that are no character yet; the simulated one is exact.
    if chunks < 3 or (url in (OURS, THEIRS) and chunks != tokens + 2):
        raise RuntimeError(f"{url} gave {chunks} events, {tokens + 2} were due")
    return Measured(first_s, time.perf_counter() - begun, chunks)


async def medians(
    urls: list[str], pairs: int, once: Callable[[str], Awaitable[float]]
) -> dict[str, float]:
    """Of `once` at each address, the order changing from pair to pair; the first pair warms up."""
    taken: dict[str, list[float]] = {url: [] for url in urls}
    for pair in range(pairs + 1):
        for url in urls if pair % 2 else reversed(urls):
            taken[url].append(await once(url))
    return {url: statistics.median(values[1:]) for url, values in taken.items()}


async def first_chunk_ms(session: aiohttp.ClientSession, tokens: int, url: str) -> float:
    return 1000 * (await stream(session, url, tokens)).first_s


async def chunks_per_s(session: aiohttp.ClientSession, streams: int, url: str) -> float:
    begun = time.perf_counter()
    done = await asyncio.gather(*(stream(session, url, LONG_TOKENS) for _ in range(streams)))
    return sum(m.chunks for m in done) / (time.perf_counter() - begun)


async def measure(urls: list[str], pairs: int, tokens: int, streams: int) -> dict[str, Any]:
    """First content chunk, and with `streams` the rate at that many; ratios of first to second."""
    timeout = aiohttp.ClientTimeout(total=120)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        first = await medians(urls, pairs, partial(first_chunk_ms, session, tokens))
        report = row("first_content_chunk_ms", first, 1)
        if streams:
            rate = await medians(urls, pairs // 2, partial(chunks_per_s, session, streams))
            report |= {"streams": streams, **row("chunks_per_s", rate, 0)}
    return report


def row(name: str, values: dict[str, float], digits: int) -> dict[str, Any]:
    first, second = values.values()
    shown = {url: round(value, digits) for url, value in values.items()}
    return {name: shown, f"{name}_ratio": round(first / second, 2)}


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


def simulated(options: argparse.Namespace) -> dict[str, Any]:
    """Both applications in a Ray of this run."""
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
        return asyncio.run(measure([OURS, THEIRS], options.pairs, SHORT_TOKENS, options.streams))
    finally:
        serve.shutdown()
        ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument(
        "--tokens-per-s", type=float, default=5000.0, help="of one sequence; 5000 saturates"
    )
    parser.add_argument("--urls", nargs=2, metavar="URL", help="two servers that run already")
    options = parser.parse_args()
    if options.urls:
        report = asyncio.run(measure(options.urls, options.pairs, FEW_TOKENS, streams=0))
    else:
        report = simulated(options)
    print(json.dumps(report, indent=1))  # noqa: T201


if __name__ == "__main__":
    main()
