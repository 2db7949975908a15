from pathlib import Path
from typing import Any

import jinja2
import pytest

from app import model

# What the template in the GGUF file renders, written out.
SYSTEM = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n"
)
TOOL = {"type": "function", "function": {"name": "f"}}


def rendered(messages: list[dict[str, Any]], **fields: Any) -> str:
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(model.TEMPLATE.read_text().removesuffix("\n"))
    return template.render(messages=messages, **fields)


def test_a_chat_without_tools_is_rendered_as_the_models_own_template_does() -> None:
    assert rendered([{"role": "user", "content": "hi"}], add_generation_prompt=True) == (
        SYSTEM + "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    turns = [{"role": "system", "content": "Be brief"}, {"role": "assistant", "content": " b\n"}]
    assert rendered(turns) == (
        "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>assistant\n b\n<|im_end|>\n"
    )


@pytest.mark.parametrize("content", [None, "", []])
def test_an_assistant_turn_without_text_is_empty(content: Any) -> None:
    text = rendered([{"role": "assistant", "content": content}])
    assert text == SYSTEM + "<|im_start|>assistant\n<|im_end|>\n"


@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": 1}'])
def test_tools_their_calls_and_their_answers_are_rendered(arguments: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    turns = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "ok"},
    ]
    text = rendered(turns, tools=[TOOL])
    assert '"name": "f"' in text.partition("<|im_end|>")[0]
    assert '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in text
    assert "<|im_start|>user\n<tool_response>\nok\n</tool_response><|im_end|>" in text


def finish(target: Path) -> None:
    target.mkdir(parents=True)
    (target / model.REFERENCES).write_text("{}")


def test_a_finished_model_is_not_made_again(tmp_path: Path) -> None:
    out = tmp_path / "m"
    model.prepare(out, finish)
    model.prepare(out, lambda target: pytest.fail("it was made again"))


def test_a_model_that_was_cut_off_is_made_anew(tmp_path: Path) -> None:
    """Neither a half-written directory nor one without references counts as made."""
    out = tmp_path / "m"
    (tmp_path / ".m.unfinished" / "left").mkdir(parents=True)
    (out / "half").mkdir(parents=True)
    model.prepare(out, finish)
    assert [path.name for path in out.iterdir()] == [model.REFERENCES]
    assert not (tmp_path / ".m.unfinished").exists()


def test_a_failure_leaves_no_model(tmp_path: Path) -> None:
    def fail(target: Path) -> None:
        target.mkdir()
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        model.prepare(tmp_path / "m", fail)
    assert not (tmp_path / "m").exists()
