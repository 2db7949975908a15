import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api import bodies
from app.contracts.request import Endpoint
from app.errors import MalformedRequest, RequestRefused, UnsupportedMedia

BOUNDS = bodies.BodyBounds(
    model_id="m",
    vocab_size=100,
    max_model_len=64,
    prompt_bytes=9000,
    body_bytes=10_000,
    sequences=4,
    prompts=3,
    calls_tools=False,
)
HI = [{"role": "user", "content": "hi"}]


def refusal(endpoint: Endpoint, body: dict[str, Any]) -> RequestRefused:
    with pytest.raises(RequestRefused) as found:
        bodies.check(endpoint, body, BOUNDS)
    return found.value


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 5}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"priority": -5}, "priority"),
        ({"logit_bias": {"100": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"stop": [""]}, "stop"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"stream_options": {}}, "stream_options"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]},
         "messages[0].content[0].type"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{"function": {"name": "f"}}], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"function": {"name": "f"}}}, "tool_choice"),
        ({"model": 5}, "model"),
        ({"model": "other"}, "model"),
    ],
)  # fmt: skip
def test_a_bad_field_is_named(fields: dict[str, Any], param: str) -> None:
    assert refusal(Endpoint.CHAT, {"messages": HI, **fields}).param == param


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (None, "prompt"),
        ([], "prompt"),
        ("", "prompt"),
        (["a", ""], "prompt[1]"),
        ([[1], []], "prompt[1]"),
        ([[1], "a"], "prompt[1]"),
        (["a", [1]], "prompt[1]"),
        ([1, -1], "prompt"),
        ([1, 100], "prompt"),
        ([1.5], "prompt"),
        (["a"] * 4, "prompt"),
    ],
)
def test_a_bad_prompt_is_named(prompt: Any, param: str) -> None:
    assert refusal(Endpoint.COMPLETIONS, {"prompt": prompt}).param == param


@pytest.mark.parametrize(
    "assistant",
    [
        {"content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
        {"content": "", "tool_calls": []},
        {"content": [], "tool_calls": None},
        {"content": "x"},
    ],
)
def test_assistant_turns_as_clients_send_them_pass(assistant: dict[str, Any]) -> None:
    turns = [*HI, {"role": "assistant", **assistant}]
    bodies.check(Endpoint.CHAT, {"messages": turns, "stop": None, "n": None}, BOUNDS)


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ({"tools": []}, {}),
        ({"tools": None, "tool_choice": "auto"}, {}),
        ({"tool_choice": "none"}, {}),
    ],
)
def test_empty_tools_mean_none(sent: dict[str, Any], kept: dict[str, Any]) -> None:
    raw = json.dumps({"a": 1, **sent}).encode()
    assert json.loads(bodies.rewritten(raw, json.loads(raw))) == {"a": 1, **kept}


def test_any_other_body_passes_untouched() -> None:
    raw = b' {"a" : 1}\n'
    assert bodies.rewritten(raw, json.loads(raw)) is raw


@pytest.mark.parametrize("kind", [None, "", "text/plain", "application/jsonx"])
def test_only_json_is_read(kind: str | None) -> None:
    with pytest.raises(UnsupportedMedia):
        bodies.read(b"{}", kind, BOUNDS)


def test_deep_nesting_is_refused_and_not_walked() -> None:
    for depth in (100, 4_000):
        with pytest.raises(MalformedRequest, match="nested"):
            bodies.read(b'{"a":' + b"[" * depth + b"[]" + b"]" * depth + b"}",
                        "application/json", BOUNDS)  # fmt: skip


@given(
    st.dictionaries(
        st.sampled_from(["messages", "prompt", "n", "tools", "stop", "tool_choice", "logit_bias",
                         "response_format", "stream_options", "best_of", "max_tokens"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
            lambda inner: st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["role", "content", "type", "function"]), inner),
            max_leaves=6,
        ),
    )
)  # fmt: skip
def test_any_json_is_taken_or_refused_but_never_a_fault(body: dict[str, Any]) -> None:
    for endpoint in Endpoint:
        try:
            bodies.check(endpoint, body, BOUNDS)
        except RequestRefused as error:
            assert error.message  # noqa: PT017 - a body may also be taken
