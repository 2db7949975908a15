"""The README's requests, run as they are printed, give what it prints beside them."""

import re
import subprocess
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text()
CURLS = re.findall(r"^(curl .*?)\n# (.*?)$", README, re.MULTILINE | re.DOTALL)


def test_there_are_requests() -> None:
    assert len(CURLS) == README.count("\ncurl ")
    assert len(CURLS) >= 2


@pytest.mark.parametrize(("command", "shown"), CURLS)
def test_a_request_of_the_readme_answers_as_it_says(url: str, command: str, shown: str) -> None:
    local = command.replace("http://127.0.0.1:8000", url)
    answer = subprocess.run(
        ["bash", "-c", local], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    header, content = re.fullmatch(r"(x-pool: \S+)\s+\"content\": (.*)", shown).groups()  # type: ignore[union-attr]
    assert header in answer
    assert f'"content":{content}' in answer.replace('": "', '":"')
