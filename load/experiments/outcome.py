"""What an experiment is given and what it says in the end. Plain values, nothing printed."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Cell = str | int | float | None


@dataclass(frozen=True, slots=True)
class Options:
    """Where an experiment writes, and how long it takes.

    `scale` multiplies the length of every measured part: 1 is what is published, less is for a try.
    """

    out: Path
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Table:
    """One table of figures; units stand in the column names. A None is shown as a dash."""

    name: str
    columns: tuple[str, ...]
    rows: list[tuple[Cell, ...]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """A claim that was made before the run, whether it holds, and the figure that says so."""

    claim: str
    holds: bool
    figure: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one experiment. `conditions` are what a reader needs to repeat it."""

    title: str
    conditions: dict[str, str]
    tables: list[Table]
    verdicts: list[Verdict]
    notes: list[str]


Experiment = Callable[[Options], Outcome]
