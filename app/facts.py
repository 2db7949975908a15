"""Records what each request was and where it went, one JSON object a line. Holds no prompt text.

`splitpool replay` reads such a file again against other thresholds.
"""

import json
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from app.contracts.placement import Decision
from app.contracts.request import (
    Declaration,
    Endpoint,
    RequestFacts,
    Source,
    TokenRange,
    Urgency,
)
from app.errors import FactsInvalid

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FactsRecord:
    """One request. `outcome`: home, spill, borrow, or the code of the error it was answered with.

    `pool` is where it ran, None if nowhere.
    """

    facts: RequestFacts
    pool: str | None
    outcome: str


class FactsLog:
    """Appends records to a file that several router replicas may share."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def record(self, decision: Decision, pool: str | None, outcome: str) -> None:
        line = {"time": round(time.time(), 3), "pool": pool, "outcome": outcome}
        line |= asdict(decision.facts)
        try:
            # One write of one short line: lines of several writers do not mix.
            os.write(self._file, json.dumps(line).encode() + b"\n")
        except OSError as error:
            # A full disk costs the record, not the answer.
            logger.warning("facts of a request were not recorded: %s", error)


def read(path: Path) -> Iterator[FactsRecord]:
    """The records of a file; `FactsInvalid` names the first line that is none."""
    with path.open() as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield _record(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                raise FactsInvalid(f"{path}, line {number}: {error!r}") from error


def _record(line: dict[str, Any]) -> FactsRecord:
    kept = {name: line[name] for name in RequestFacts.__dataclass_fields__}
    declaration, tokens = kept["declaration"], kept["prompt_tokens"]
    kept["endpoint"] = Endpoint(kept["endpoint"])
    kept["declaration"] = Declaration(
        Urgency(declaration["urgency"]), Source(declaration["source"])
    )
    kept["prompt_tokens"] = TokenRange(tokens["low"], tokens["high"])
    return FactsRecord(RequestFacts(**kept), line["pool"], str(line["outcome"]))
