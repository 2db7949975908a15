import json
from dataclasses import replace
from pathlib import Path

import pytest

from app import cli
from app.contracts.placement import Destination
from app.contracts.request import Shape, TokenRange, Urgency
from app.errors import FactsInvalid
from app.facts import FactsLog, FactsRecord, read
from app.replay import replay
from tests.unit.fakes import decision

CONFIG = Path(__file__).parents[2] / "serve_configs/local.yaml"
LATENCY, THROUGHPUT = Destination("latency"), Destination("throughput")
ROW = {Shape.SHORT: LATENCY, Shape.LONG: THROUGHPUT}
TABLE = dict.fromkeys(Urgency, ROW)


def record(low: int, high: int) -> FactsRecord:
    facts = replace(decision().facts, prompt_tokens=TokenRange(low, high))
    return FactsRecord(facts, "latency", "home")


def test_a_higher_threshold_moves_the_prompts_between_the_two() -> None:
    found = replay(
        [record(10, 10), record(2000, 2000), record(5000, 5000)], (TABLE, 1024), (TABLE, 4096)
    )
    assert found.requests == 3
    assert found.moved == {("throughput", "latency"): 1}
    assert found.homes == {
        ("undeclared_short", "latency"): 2,
        ("undeclared_long", "throughput"): 1,
    }


def test_a_prompt_that_was_never_counted_is_not_guessed() -> None:
    found = replay([record(1500, 6000)], (TABLE, 1024), (TABLE, 4096))
    assert (found.unsettled, found.moved) == (1, {})


def test_the_command_prints_what_would_have_gone_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "facts.jsonl"
    log = FactsLog(str(path))
    made = decision()
    for tokens in (10, 2000, 5000):
        exact = TokenRange(tokens, tokens)
        log.record(replace(made, facts=replace(made.facts, prompt_tokens=exact)), "latency", "home")
    command = ["replay", "--facts", str(path), "--config", str(CONFIG)]
    assert cli.main([*command, "--set", "routing.long_prompt_tokens=4096"]) == 0
    shown = capsys.readouterr().out
    assert "3 requests" in shown
    assert "throughput -> latency" in shown


@pytest.mark.parametrize("change", ["routing.long_prompt=4096", "routing", "routing.table.x=1"])
def test_a_setting_that_does_not_exist_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    path = tmp_path / "facts.jsonl"
    path.write_text("")
    command = ["replay", "--facts", str(path), "--config", str(CONFIG), "--set", change]
    assert cli.main(command) == 1
    assert capsys.readouterr().err


@pytest.mark.parametrize("line", ["{", "{}", "[]", json.dumps({"endpoint": "/x"})])
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "facts.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(FactsInvalid, match="line 1"):
        list(read(path))
