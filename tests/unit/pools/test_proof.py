import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from app.contracts.exchange import PoolRequest, ReplyHead
from app.contracts.pool import EngineFacts, EngineLoad
from app.errors import ProofFailed
from app.pools.engine import Tally
from app.pools.proof import Proof, agreement


class FakeEngine:
    """Answers every prompt with the same token ids."""

    def __init__(self, tokens: list[int], text: str = "") -> None:
        self.tokens, self.text = tokens, text

    async def start(self) -> None: ...

    async def check_health(self) -> None: ...

    def facts(self) -> EngineFacts:
        return EngineFacts(8, 100, None, "bfloat16", "float32", 64)

    def load(self) -> EngineLoad:
        return EngineLoad(0, 0, 0.0)

    async def respond(
        self, request: PoolRequest, tally: Tally
    ) -> AsyncGenerator[ReplyHead | bytes, None]:
        yield ReplyHead(200, "application/json")
        choice = {"token_ids": self.tokens, "message": {"content": self.text}}
        yield json.dumps({"choices": [choice]}).encode()


@pytest.fixture
def references(tmp_path: Path) -> str:
    entry = {"messages": [{"role": "user", "content": "x"}], "token_ids": [1, 2, 3, 4], "text": ""}
    path = tmp_path / "references.json"
    path.write_text(json.dumps({"prompts": [entry, entry]}))
    return str(path)


def test_agreement_counts_tokens_before_the_first_difference() -> None:
    assert agreement([[1, 2, 3, 4], [5, 6]], [[1, 2, 9, 4], [5, 6]]) == pytest.approx(4 / 6)
    assert agreement([[1, 2]], [[]]) == 0.0


def test_an_engine_that_agrees_may_serve(references: str) -> None:
    found = asyncio.run(Proof(references, 0.5, 1.0).run(FakeEngine([1, 2, 3, 9]), None))
    assert found is not None
    assert (found.prompts, found.tokens_fraction, found.reference) == (2, 0.75, "references.json")


def test_an_engine_that_computes_garbage_is_refused_by_the_name_of_its_types(
    references: str,
) -> None:
    with pytest.raises(ProofFailed, match=r"bfloat16 with dtype float32 .* 0\.25"):
        asyncio.run(Proof(references, 0.5, 1.0).run(FakeEngine([1, 9, 9, 9]), None))


def test_known_answers_need_their_word() -> None:
    with pytest.raises(ProofFailed, match=r"agreement 0\.20 over 5"):
        asyncio.run(Proof("known", 0.5, 1.0).run(FakeEngine([1], "Paris!"), None))


def test_references_that_cannot_be_read_stop_the_start(tmp_path: Path) -> None:
    with pytest.raises(ProofFailed, match=r"proof\.references"):
        asyncio.run(Proof(str(tmp_path / "none.json"), 0.5, 1.0).run(FakeEngine([1]), None))
