"""What a replica answers before it takes traffic: known prompts, greedily.

A KV cache of a wrong type computes garbage at full speed, in silence (float32 compute with a
bfloat16 cache did so on vLLM 0.29's CPU build). In: an engine and the reference answers of its
model. Out: the agreement, or `ProofFailed`.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.contracts.exchange import PoolRequest, ReplyHead
from app.contracts.pool import Agreement
from app.contracts.request import Endpoint
from app.errors import ProofFailed
from app.pools.engine import Engine, Tally

# Prompts for models that come without reference answers, each with a word that a right answer has.
KNOWN_ANSWERS = (
    ("What is the capital of France?", "Paris"),
    ("What is 2 + 2? Answer with digits.", "4"),
    ("Which planet do humans live on?", "Earth"),
    ("What colour is the sky on a clear day?", "blue"),
    ("Which day comes after Tuesday?", "Wednesday"),
)
KNOWN_ANSWER_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt and its greedy answer, as token ids and as text."""

    messages: tuple[dict[str, str], ...]
    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Proof:
    """The bar for an engine. `references` is a file, `pool:NAME`, `known` or `none`."""

    references: str
    min_agreement: float
    timeout_s: float

    async def run(
        self, engine: Engine, ask_pool: Callable[[], Awaitable[list[Answer]]] | None
    ) -> Agreement | None:
        """The agreement of an engine with its references, None if none are asked for."""
        if self.references == "none":
            return None
        try:
            async with asyncio.timeout(self.timeout_s):
                found = await self._agreement(engine, ask_pool)
        except TimeoutError as error:
            raise ProofFailed(f"no answers to the proof within {self.timeout_s} s") from error
        if found.tokens_fraction < self.min_agreement:
            raise ProofFailed(self._complaint(engine, found))
        return found

    async def _agreement(
        self, engine: Engine, ask_pool: Callable[[], Awaitable[list[Answer]]] | None
    ) -> Agreement:
        if self.references == "known":
            answers = await answer_known(engine)
            right = [word in a.text for a, (_, word) in zip(answers, KNOWN_ANSWERS, strict=True)]
            return Agreement(len(right), sum(right) / len(right), self.references)
        expected = read_references(Path(self.references)) if ask_pool is None else await ask_pool()
        given = await asyncio.gather(
            *(_answer(engine, e.messages, len(e.token_ids), n) for n, e in enumerate(expected))
        )
        if not any(e.token_ids for e in expected):
            raise ProofFailed(f"the reference answers of {self.references} are empty")
        fraction = agreement([e.token_ids for e in expected], [a.token_ids for a in given])
        return Agreement(len(expected), fraction, Path(self.references).name)

    def _complaint(self, engine: Engine, found: Agreement) -> str:
        facts = engine.facts()
        return (
            f"kv_cache_dtype {facts.kv_cache_dtype} with dtype {facts.dtype} answers known prompts "
            f"wrongly on this build: agreement {found.tokens_fraction:.2f} over {found.prompts} "
            f"prompts with {found.reference}, at least {self.min_agreement:.2f} is needed"
        )


def agreement(expected: Sequence[Sequence[int]], given: Sequence[Sequence[int]]) -> float:
    """Share of the expected tokens that were given before the first difference in each answer."""
    total = sum(len(tokens) for tokens in expected)
    return sum(_prefix(e, g) for e, g in zip(expected, given, strict=True)) / total


def read_references(path: Path) -> list[Answer]:
    """Reference answers that `splitpool model` keeps beside a model."""
    try:
        entries = json.loads(path.read_text())["prompts"]
        return [Answer(tuple(e["messages"]), tuple(e["token_ids"]), e["text"]) for e in entries]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ProofFailed(
            f"proof.references: {path} holds no reference answers: {error}"
        ) from error


async def answer_known(engine: Engine) -> list[Answer]:
    """An engine's greedy answers to the known prompts."""
    return await asyncio.gather(
        *(
            _answer(engine, ({"role": "user", "content": prompt},), KNOWN_ANSWER_TOKENS, number)
            for number, (prompt, _) in enumerate(KNOWN_ANSWERS)
        )
    )


def _prefix(expected: Sequence[int], given: Sequence[int]) -> int:
    for index, token in enumerate(expected):
        if index >= len(given) or given[index] != token:
            return index
    return len(expected)


async def _answer(
    engine: Engine, messages: tuple[dict[str, str], ...], tokens: int, number: int
) -> Answer:
    body = {
        "messages": list(messages),
        "max_tokens": tokens,
        "temperature": 0,
        "return_token_ids": True,
    }
    request = PoolRequest(Endpoint.CHAT, json.dumps(body).encode(), f"proof-{number}")
    status, content = await _collected(engine, request)
    if status != 200:
        raise ProofFailed(f"a known prompt was answered with {status}: {content}")
    choice = content["choices"][0]
    return Answer(messages, tuple(choice["token_ids"]), choice["message"]["content"] or "")


async def _collected(engine: Engine, request: PoolRequest) -> tuple[int, Any]:
    status, parts = 0, []
    async with aclosing(engine.respond(request, Tally())) as items:
        async for item in items:
            if isinstance(item, ReplyHead):
                status = item.status
            else:
                parts.append(item)
    return status, json.loads(b"".join(parts))
