"""An engine with set speeds and made-up text, for tests and for measuring the router.

Deterministic: the same prompt gives the same tokens at the same pace. Prompts are computed one
after the other at the prefill rate; each running sequence then decodes at its own rate. Beyond
`max_num_seqs` sequences or the KV capacity, requests wait in order of priority, then arrival.
"""

import asyncio
import hashlib
import heapq
import itertools
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from app.config import SimulationSettings, VllmSettings
from app.contracts.exchange import PoolRequest, ReplyHead
from app.contracts.pool import EngineFacts, EngineLoad
from app.contracts.request import Endpoint
from app.pools.engine import Tally

WORDS = ("north", "river", "seven", "amber", "stone", "quiet", "paper", "cloud")
JSON = "application/json"
SSE = "text/event-stream; charset=utf-8"
# What one token stands for here; English text averages about four bytes a token.
BYTES_PER_TOKEN = 4
CONTEXT_CODE = "context_length_exceeded"


def count_tokens(text: str) -> int:
    """Tokens of a text as this engine counts them."""
    return -(-len(text.encode()) // BYTES_PER_TOKEN)


@dataclass(slots=True)
class _Job:
    """One request as the engine runs it: `sequences` outputs of `output_tokens` each."""

    request: PoolRequest
    body: dict[str, Any]
    prompt_tokens: int
    output_tokens: int
    sequences: int
    ticket: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    @property
    def is_chat(self) -> bool:
        return self.request.path == Endpoint.CHAT

    @property
    def kv_tokens(self) -> int:
        return self.prompt_tokens + self.sequences * self.output_tokens

    def words(self) -> list[str]:
        digest = hashlib.sha256(self.request.body).digest()
        return [WORDS[digest[i % 32] % len(WORDS)] + " " for i in range(self.output_tokens)]

    def usage(self) -> dict[str, int]:
        produced = self.sequences * self.output_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": produced,
            "total_tokens": self.prompt_tokens + produced,
        }


class SimulatedEngine:
    """Answers `Endpoint` paths and `/tokenize` at the speeds of its settings."""

    def __init__(self, model_id: str, limits: VllmSettings, speeds: SimulationSettings) -> None:
        self._model_id = model_id
        self._limits = limits
        self._speeds = speeds
        self._order = itertools.count()
        self._waiting: list[tuple[int, int, _Job]] = []
        self._running = 0
        self._kv_used = 0
        self._prefill_free_at = 0.0

    async def start(self) -> None:
        await asyncio.sleep(self._speeds.start_s)

    async def check_health(self) -> None:
        """The simulated engine has nothing that can die."""

    def facts(self) -> EngineFacts:
        return EngineFacts(
            slots=self._limits.max_num_seqs,
            kv_tokens=self._speeds.kv_tokens,
            kv_bytes=None,
            kv_cache_dtype=self._limits.kv_cache_dtype,
            dtype=self._limits.dtype,
            max_model_len=self._limits.max_model_len,
        )

    def load(self) -> EngineLoad:
        waiting = sum(job.sequences for _, _, job in self._waiting)
        return EngineLoad(
            running=self._running,
            waiting=waiting,
            kv_used_fraction=self._kv_used / self._speeds.kv_tokens,
            tpot_s=1 / self._speeds.decode_tokens_per_s,
        )

    async def respond(
        self, request: PoolRequest, tally: Tally
    ) -> AsyncGenerator[ReplyHead | bytes, None]:
        body = json.loads(request.body)
        if request.path == "/tokenize":
            yield ReplyHead(200, JSON)
            yield json.dumps({"count": prompt_tokens(body), "tokens": []}).encode()
            return
        job = self._job(request, body)
        if job.prompt_tokens + job.output_tokens > self._limits.max_model_len:
            yield ReplyHead(400, JSON)
            yield self._too_long(job)
            return
        tally.prompted(job.prompt_tokens)
        await self._admit(job)
        try:
            await self._prefill(job)
            if body.get("stream"):
                yield ReplyHead(200, SSE, job.prompt_tokens)
                async for chunk in self._stream(job, tally):
                    yield chunk
            else:
                await asyncio.sleep(job.output_tokens / self._speeds.decode_tokens_per_s)
                tally.output_tokens = job.sequences * job.output_tokens
                yield ReplyHead(200, JSON, job.prompt_tokens)
                yield json.dumps(self._answer(job)).encode()
        finally:
            self._release(job)

    def _job(self, request: PoolRequest, body: dict[str, Any]) -> _Job:
        wanted = body.get("max_completion_tokens") or body.get("max_tokens")
        return _Job(
            request=request,
            body=body,
            prompt_tokens=prompt_tokens(body),
            output_tokens=wanted or self._speeds.output_tokens,
            sequences=body.get("n") or 1,
        )

    async def _admit(self, job: _Job) -> None:
        entry = (job.request.priority, next(self._order), job)
        heapq.heappush(self._waiting, entry)
        self._fill()
        try:
            await job.ticket
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._waiting.remove(entry)
                heapq.heapify(self._waiting)
            else:
                self._release(job)
            raise

    def _fill(self) -> None:
        while self._waiting and self._fits(self._waiting[0][2]):
            _, _, job = heapq.heappop(self._waiting)
            self._running += job.sequences
            self._kv_used += job.kv_tokens
            job.ticket.set_result(None)

    def _fits(self, job: _Job) -> bool:
        # A request wider than the engine runs alone, as its sequences would one after the other.
        free = self._limits.max_num_seqs - self._running
        has_room = self._kv_used + job.kv_tokens <= self._speeds.kv_tokens
        return (job.sequences <= free and has_room) or self._running == 0

    def _release(self, job: _Job) -> None:
        self._running -= job.sequences
        self._kv_used -= job.kv_tokens
        self._fill()

    async def _prefill(self, job: _Job) -> None:
        start = max(time.monotonic(), self._prefill_free_at)
        self._prefill_free_at = start + job.prompt_tokens / self._speeds.prefill_tokens_per_s
        await asyncio.sleep(self._prefill_free_at - time.monotonic())

    async def _stream(self, job: _Job, tally: Tally) -> AsyncIterator[bytes]:
        step_s = 1 / self._speeds.decode_tokens_per_s
        begun = time.monotonic()
        if job.is_chat:
            for index in range(job.sequences):
                yield self._chunk(job, _delta(job, index, "", None, role="assistant"))
        words = job.words()
        # Written once: this engine must not be what a measurement of the router measures.
        events = {
            (index, word): self._chunk(job, _delta(job, index, word, None))
            for index in range(job.sequences)
            for word in set(words)
        }
        for number, word in enumerate(words, start=1):
            await asyncio.sleep(begun + number * step_s - time.monotonic())
            tally.output_tokens += job.sequences
            for index in range(job.sequences):
                if number < len(words):
                    yield events[index, word]
                else:
                    yield self._chunk(job, _delta(job, index, word, "length"))
        if (job.body.get("stream_options") or {}).get("include_usage"):
            yield self._event({**self._frame(job, chunk=True), "choices": [], "usage": job.usage()})
        yield b"data: [DONE]\n\n"

    def _chunk(self, job: _Job, choice: dict[str, Any]) -> bytes:
        return self._event({**self._frame(job, chunk=True), "choices": [choice]})

    def _event(self, content: dict[str, Any]) -> bytes:
        return b"data: " + json.dumps(content).encode() + b"\n\n"

    def _frame(self, job: _Job, *, chunk: bool) -> dict[str, Any]:
        kind = "text_completion"
        if job.is_chat:
            kind = "chat.completion.chunk" if chunk else "chat.completion"
        return {
            "id": job.request.request_id,
            "object": kind,
            "created": int(time.time()),
            "model": self._model_id,
            "service_tier": job.request.service_tier,
        }

    def _answer(self, job: _Job) -> dict[str, Any]:
        text = "".join(job.words())
        choices = []
        for index in range(job.sequences):
            said = {"message": {"role": "assistant", "content": text}}
            content: dict[str, Any] = said if job.is_chat else {"text": text}
            choices.append({"index": index, **content, "finish_reason": "length"})
        return {**self._frame(job, chunk=False), "choices": choices, "usage": job.usage()}

    def _too_long(self, job: _Job) -> bytes:
        message = (
            f"This model's maximum context length is {self._limits.max_model_len} tokens; the "
            f"prompt has {job.prompt_tokens} and {job.output_tokens} were requested"
        )
        error = {"message": message, "type": "invalid_request_error", "param": None}
        return json.dumps({"error": {**error, "code": CONTEXT_CODE}}).encode()


def _delta(
    job: _Job, index: int, text: str, finish: str | None, role: str | None = None
) -> dict[str, Any]:
    if not job.is_chat:
        return {"index": index, "text": text, "finish_reason": finish}
    delta = {"content": text} if role is None else {"role": role, "content": text}
    return {"index": index, "delta": delta, "finish_reason": finish}


def prompt_tokens(body: Mapping[str, Any]) -> int:
    """Tokens of all prompts of a body."""
    if "messages" in body:
        return count_tokens(json.dumps(body["messages"]) + json.dumps(body.get("tools") or ""))
    prompt = body["prompt"]
    prompts = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    return sum(len(p) if isinstance(p, list) else count_tokens(p) for p in prompts)
