from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.classify.shape import (
    UNBOUNDED,
    TokenizerBounds,
    is_long,
    max_output_tokens,
    prompt_bytes,
    prompt_range,
    sequences,
    settled,
)
from app.contracts.request import Endpoint, Shape, TokenRange

BOUNDS = TokenizerBounds(
    longest_token_bytes=10, bytes_growth=1, template_bytes=100, message_bytes=20
)
CHAT, TEXT = Endpoint.CHAT, Endpoint.COMPLETIONS


def message(content: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": content}


@pytest.mark.parametrize(("tokens", "long"), [(1023, False), (1024, True), (1025, True)])
def test_a_prompt_of_exactly_the_threshold_is_long(tokens: int, long: bool) -> None:
    assert is_long(tokens, 1024) is long


@pytest.mark.parametrize(
    ("low", "high", "shape"),
    [(0, 1023, Shape.SHORT), (1024, 9000, Shape.LONG), (1023, 1024, None), (0, UNBOUNDED, None)],
)
def test_only_bounds_on_one_side_of_the_threshold_settle_it(
    low: int, high: int, shape: Shape | None
) -> None:
    assert settled(TokenRange(low, high), 1024) == shape


def test_a_chat_is_bounded_by_its_bytes_and_the_template() -> None:
    # 50 bytes of content at ten bytes a token; keys and roles count above: role 4, user 4,
    # content 7, 50 of text, 100 of template.
    body = {"messages": [message("x" * 50)]}
    assert prompt_range(CHAT, body, BOUNDS) == TokenRange(5, 165)
    # A second message of 4 + 9 + 7 + 10 bytes and 20 of template; an assistant's text may be
    # dropped by the template, so it does not raise the lower bound.
    body["messages"].append(message("y" * 10, "assistant"))
    assert prompt_range(CHAT, body, BOUNDS) == TokenRange(5, 215)


def test_tools_leave_the_upper_bound_open() -> None:
    body = {"messages": [message("x" * 50)], "tools": [{"type": "function"}]}
    assert prompt_range(CHAT, body, BOUNDS) == TokenRange(5, UNBOUNDED)


def test_calls_leave_the_upper_bound_open() -> None:
    """1e15 in arguments was rendered as sixteen digits: bytes are no bound of what is rewritten."""
    said = message("x" * 50, "assistant") | {"tool_calls": [{"function": {"name": "f"}}]}
    assert prompt_range(CHAT, {"messages": [said]}, BOUNDS) == TokenRange(0, UNBOUNDED)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param([{"type": "text", "text": ""}] * 1000, id="empty_parts"),
        pytest.param([{"type": "text", "text": "", "note": "x" * 9000}], id="other_fields"),
        pytest.param(" " * 9000, id="space_that_a_template_strips"),
    ],
)
def test_only_what_is_rendered_for_certain_raises_the_lower_bound(content: Any) -> None:
    assert prompt_range(CHAT, {"messages": [message(content)]}, BOUNDS).low == 0


@pytest.mark.parametrize("name", ["chat_template", "truncate_prompt_tokens", "documents"])
def test_what_changes_the_rendering_must_be_counted(name: str) -> None:
    body = {"messages": [message("x")], name: "y"}
    assert prompt_range(CHAT, body, BOUNDS) == TokenRange(0, UNBOUNDED)


@pytest.mark.parametrize(
    ("prompt", "low", "high"),
    [
        pytest.param("x" * 50, 5, 52, id="text"),
        pytest.param([1, 2, 3], 3, 3, id="token_ids"),
        pytest.param([[1, 2], [3]], 3, 3, id="several_token_lists"),
        pytest.param(["x" * 50, "x" * 10], 6, 64, id="several_texts_add_up"),
    ],
)
def test_prompts_are_bounded_together(prompt: Any, low: int, high: int) -> None:
    assert prompt_range(TEXT, {"prompt": prompt}, BOUNDS) == TokenRange(low, high)


def test_prompt_bytes_are_those_of_utf8() -> None:
    assert prompt_bytes(TEXT, {"prompt": "é€"}) == 5
    assert prompt_bytes(TEXT, {"prompt": [1, 2]}) == 0


def test_sequences_multiply_over_prompts() -> None:
    assert sequences(CHAT, {"messages": [], "n": 3}) == 3
    assert sequences(TEXT, {"prompt": ["a", "b"], "n": 2, "best_of": 4}) == 8
    assert sequences(TEXT, {"prompt": [1, 2]}) == 1


def test_the_newer_name_of_the_output_bound_wins() -> None:
    assert max_output_tokens({"max_tokens": 5, "max_completion_tokens": 7}) == 7
    assert max_output_tokens({}) is None


@given(st.text())
def test_the_bounds_hold_for_any_tokenizer_within_them(text: str) -> None:
    """A tokenizer that takes at most ten bytes a token and never less than one."""
    if not text or any(0xD800 <= ord(c) <= 0xDFFF for c in text):
        return
    size = len(text.encode())
    found = prompt_range(TEXT, {"prompt": text}, BOUNDS)
    assert found.low <= -(-size // 10)
    assert size <= found.high
