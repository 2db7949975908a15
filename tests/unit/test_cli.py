from pathlib import Path

import pytest

from app import cli

CONFIGS = Path(__file__).parents[2] / "serve_configs"


def test_config_prints_every_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", str(CONFIGS / "local.yaml")]) == 0
    assert "health_check_period_s: 5.0" in capsys.readouterr().out


def test_a_refusal_is_one_line_and_not_zero(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("applications: []\n")
    assert cli.main(["config", str(path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("applications: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("was", "now", "complaint"),
    [
        ("max_num_seqs: 8", "max_num_sequences: 8", "pools.latency.vllm.max_num_sequences: "),
        ("source: .models/SmolLM2-135M-Instruct", "source: .models/none", "model.source: "),
        (
            "references: .models/SmolLM2-135M-Instruct/references.json",
            "references: none.json",
            "pools.latency.proof.references: none.json",
        ),
    ],
)
def test_serve_refuses_before_it_starts_anything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], was: str, now: str, complaint: str
) -> None:
    """cases.md 71 and 72: the field and a status, not a deployment that never comes up."""
    text = (CONFIGS / "local.yaml").read_text()
    assert was in text
    path = tmp_path / "bad.yaml"
    path.write_text(text.replace(was, now))
    assert cli.main(["serve", str(path)]) == 1
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("command", ["model", "config", "serve"])
def test_help_shows_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    assert f"example: splitpool {command} " in capsys.readouterr().out
