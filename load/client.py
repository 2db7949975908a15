"""Sends one request over HTTP and stamps what comes back. Speaks OpenAI's API, nothing else."""

import json
import random
import secrets
import time
from dataclasses import dataclass
from typing import Any

import aiohttp

CHAT_PATH = "/v1/chat/completions"
TIMEOUT_S = 600
WORDS = ["river", "stone", "copper", "winter", "garden", "letter", "engine", "market", "silver"]


@dataclass(frozen=True, slots=True)
class Record:
    """One request: times in seconds since the run began; `first_s` is the first content chunk.

    `first_s` is None when nothing came, or for an answer that was not streamed.
    """

    kind: str
    sent_s: float
    first_s: float | None
    done_s: float
    status: int
    pool: str | None
    output_tokens: int
    route: str | None = None

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        if self.first_s is None or self.output_tokens < 2:
            return None
        return (self.done_s - self.first_s) / (self.output_tokens - 1)


def text(tokens: int, seed: random.Random) -> str:
    """About so many tokens of words, begun as no prompt ever was: no cache has its prefix."""
    return " ".join([secrets.token_hex(4), *seed.choices(WORDS, k=max(1, tokens - 8))])


@dataclass(frozen=True, slots=True)
class Work:
    """A kind of request: its length in and out, and the tier it declares."""

    kind: str
    prompt_tokens: int
    output_tokens: int
    tier: str = "auto"
    stream: bool = True

    def body(self, seed: random.Random) -> dict[str, Any]:
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": text(self.prompt_tokens, seed)}],
            "max_tokens": self.output_tokens,
            "ignore_eos": True,
            "stream": self.stream,
        }
        if self.stream:
            body["stream_options"] = {"include_usage": True}
        return body | ({} if self.tier == "auto" else {"service_tier": self.tier})


class Sender:
    """Sends work to one server; times count from its construction."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url = url
        self._session = session
        self._begun = time.perf_counter()

    def now_s(self) -> float:
        return time.perf_counter() - self._begun

    async def send(self, work: Work, seed: random.Random) -> Record:
        sent_s = self.now_s()
        try:
            async with self._session.post(
                f"{self._url}{CHAT_PATH}", json=work.body(seed)
            ) as answer:
                first_s, tokens = await self._read(answer, work)
                status, headers = answer.status, answer.headers
        except (aiohttp.ClientError, TimeoutError):
            return Record(work.kind, sent_s, None, self.now_s(), 0, None, 0)
        return Record(
            work.kind, sent_s, first_s, self.now_s(), status, headers.get("x-pool"), tokens,
            headers.get("x-route-reason"),
        )  # fmt: skip

    async def pools(self) -> dict[str, dict[str, Any]]:
        """The rows of `/v1/pools` by id."""
        async with self._session.get(f"{self._url}/v1/pools") as answer:
            return {row["id"]: row for row in (await answer.json())["data"]}

    async def _read(self, answer: aiohttp.ClientResponse, work: Work) -> tuple[float | None, int]:
        if not work.stream or answer.status != 200:
            content = await answer.json()
            return None, content.get("usage", {}).get("completion_tokens", 0)
        first_s, tokens = None, 0
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if first_s is None and _has_content(event):
                first_s = self.now_s()
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        return first_s, tokens


def _has_content(event: dict[str, Any]) -> bool:
    return any(c["delta"].get("content") for c in event.get("choices", ()))
