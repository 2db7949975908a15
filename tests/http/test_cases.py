"""Inputs that broke other systems, on the real engines: each from both pools, streamed and not.

The numbers are those of the public reports that each case was reduced from.
"""

import json
from typing import Any

import httpx
import pytest

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
LIMIT_BYTES = 4096
POOLS = {"latency": {}, "throughput": {"service_tier": "flex"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BAD_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "\ud800"}}


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": HI, "max_tokens": 2, **fields}


def said(content: Any, **fields: Any) -> tuple[str, dict[str, Any]]:
    return chat(messages=[{"role": "user", "content": content}], **fields)


def text(prompt: Any, **fields: Any) -> tuple[str, dict[str, Any]]:
    return TEXT, {"prompt": prompt, "max_tokens": 2, **fields}


def schema(**fields: Any) -> tuple[str, dict[str, Any]]:
    return chat(response_format={"type": "json_schema", **fields})


def history(**assistant: Any) -> tuple[str, dict[str, Any]]:
    turns = [
        {"role": "user", "content": "what?"},
        {"role": "assistant", **assistant},
        {"role": "tool", "tool_call_id": "c1", "content": "ok"},
        {"role": "user", "content": "and?"},
    ]
    return chat(messages=turns)


REFUSED = {
    "wrong_typed_contents": chat(messages=[{"role": "user", "content": {"a": 1}}] * 3000),
    "empty_prompt": text(""),
    "empty_prompt_in_list": text([""]),
    "one_empty_among_two": text(["hi", ""]),
    "no_prompt": text([]),
    "empty_token_list": text([[]]),
    "no_messages": chat(messages=[]),
    "negative_token_nested": text([[-1]]),
    "negative_token": text([-1]),
    "token_out_of_vocabulary": text([999999999]),
    "token_beyond_64_bits": text([5279552648203111001]),
    "token_of_two_kinds": text([1, "a"]),
    "fractional_token": text([1.5]),
    "boolean_token": text([True]),
    "prompts_of_two_kinds": text([[1, 2], "text"]),
    "logit_bias_out_of_vocabulary": chat(logit_bias={"191222": -100}),
    "logit_bias_key": chat(logit_bias={"abc": 1}),
    "logit_bias_value": chat(logit_bias={"5": 1e9}),
    "surrogate_content": said("\ud800"),
    "surrogate_part": said([{"type": "text", "text": "a\ud800"}]),
    "surrogate_arguments": history(content=None, tool_calls=[BAD_CALL]),
    "surrogate_user": chat(user="\ud800"),
    "surrogate_stop": chat(stop=["\ud800"]),
    "n_zero": chat(n=0),
    "n_negative": chat(n=-1),
    "n_fractional": chat(n=1.5),
    "n_text": chat(n="2"),
    "n_thousand": chat(n=1000),
    "n_billion": chat(n=10**9),
    "best_of_below_n": text("hi", n=3, best_of=2),
    "max_tokens_negative": chat(max_tokens=-1),
    "max_tokens_zero": chat(max_tokens=0),
    "max_tokens_beyond_63_bits": chat(max_tokens=2**63),
    "max_tokens_text": chat(max_tokens="16"),
    "prompt_beyond_context": said("word " * 11_000, max_tokens=None),
    "output_beyond_context": chat(max_tokens=4095),
    "tool_choice_required_without_tools": chat(tool_choice="required"),
    "tool_choice_unknown": chat(tools=[TOOL], tool_choice="maybe"),
    "tool_choice_of_no_tool": chat(
        tools=[TOOL], tool_choice={"type": "function", "function": {"name": "g"}}
    ),
    "schema_beside_its_place": schema(schema={"type": "object"}),
    "schema_missing": schema(json_schema={"name": "x"}),
    "format_xml": chat(response_format={"type": "xml"}),
    "schema_of_no_type": schema(json_schema={"name": "x", "schema": {"type": "objekt"}}),
    "image": said(
        [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    ),
    "image_as_text": said([{"type": "image_url", "image_url": "http://127.0.0.1:9/x.png"}]),
    "unknown_part": said([{"type": "video"}]),
    "part_without_type": said([{"text": "hi"}]),
    "priority_text": chat(priority="high"),
    "priority_negative": chat(priority=-5),
    "priority_huge": chat(priority=1e12),
    "stream_options_not_an_object": chat(stream=True, stream_options=True),
    "temperature_text": chat(temperature="warm"),
    "role_missing": chat(messages=[{"content": "hi"}]),
    "message_not_an_object": chat(messages=["hi"]),
    "stop_number": chat(stop=5),
    # What the engine itself fails on with a 500: the request is at fault, not the pool.
    "top_k_beyond_64_bits": chat(top_k=2**70),
    "structured_outputs_text": chat(structured_outputs="x"),
    "structured_outputs_of_escapes": chat(structured_outputs={"choice": ['"', "\\", "\n"]}),
    "grammar_without_end": chat(structured_outputs={"grammar": 'root ::= root "a"'}),
    "schema_of_itself": schema(json_schema={"name": "x", "schema": {"$ref": "#"}}),
    "schema_of_huge_bounds": schema(
        json_schema={
            "name": "x",
            "schema": {"type": "integer", "minimum": 10**30, "maximum": 10**40},
        }
    ),
    "schema_of_broken_pattern": schema(
        json_schema={
            "name": "x",
            "schema": {"type": "object", "patternProperties": {"(((": {}}},
        }
    ),
    "template_argument_twice": chat(chat_template_kwargs={"conversation": []}),
    "echo_of_many": text([[1, 2], [3]], echo=True, logprobs=1, n=2, stream=True),
    "top_logprobs_huge": chat(logprobs=True, top_logprobs=10**6),
}  # fmt: skip

ANSWERED = {
    "max_tokens_null": chat(max_tokens=None, max_completion_tokens=2),
    "old_and_unknown_fields": chat(
        functions=[], foo=1, metadata={"a": "b"}, store=True, parallel_tool_calls=False,
        reasoning_effort="low", safety_identifier="u",
    ),
    "tool_calls_in_history": history(content=None, tool_calls=[CALL]),
    "no_tool_calls_in_history": history(content="x", tool_calls=[]),
    "text_and_tool_calls": history(content="x", tool_calls=[CALL]),
    "empty_parts_with_tool_calls": history(content=[], tool_calls=[CALL]),
    "empty_text_with_tool_calls": history(content="", tool_calls=[CALL]),
    "parts_in_every_turn": chat(
        messages=[{"role": r, "content": [{"type": "text", "text": "a"}]}
                  for r in ("user", "assistant", "user")]
    ),
    "tool_choice_none_without_tools": chat(tool_choice="none"),
    "tool_choice_none_with_tools": chat(tools=[TOOL], tool_choice="none"),
    "tool_choice_auto_and_null_tools": chat(tools=None, tool_choice="auto"),
    "empty_tools": chat(tools=[], tool_choice="auto"),
    "tools_and_auto": chat(tools=[TOOL], tool_choice="auto"),
    "token_ids": text([1, 2, 3]),
    "token_id_prompts": text([[1, 2], [3]]),
    "two_prompts": text(["hi", "ho"]),
    "nulls": chat(stop=None, n=None, temperature=None, tools=None, response_format=None),
    "guidellm_probe": text(
        "Test connection", max_tokens=1, max_completion_tokens=1, stop=None, ignore_eos=True
    ),
}  # fmt: skip


def post(url: str, path: str, body: Any, **headers: str) -> httpx.Response:
    # json.dumps writes a lone surrogate as an escape, as the clients of the reports did.
    content = json.dumps(body).encode()
    sent = {"content-type": "application/json", **headers}
    return httpx.post(f"{url}{path}", content=content, headers=sent, timeout=120)


def assert_still_serving(url: str, tier: dict[str, Any]) -> None:
    answer = post(url, CHAT, {"messages": HI, "max_tokens": 1, **tier})
    assert answer.status_code == 200, answer.text


def assert_problem(answer: httpx.Response, status: int) -> None:
    assert answer.status_code == status, answer.text[:500]
    assert len(answer.content) < LIMIT_BYTES
    assert set(answer.json()["error"]) >= {"message", "type", "param", "code"}
    assert "Traceback" not in answer.text


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_and_harms_nobody(
    url: str, case: str, stream: bool, pool: str
) -> None:
    path, body = REFUSED[case]
    answer = post(url, path, {"stream": stream, **body, **POOLS[pool]})
    assert_problem(answer, 400)
    assert_still_serving(url, POOLS[pool])


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("case", ANSWERED)
def test_odd_input_that_clients_send_is_answered(
    url: str, case: str, stream: bool, pool: str
) -> None:
    path, body = ANSWERED[case]
    answer = post(url, path, {"stream": stream, **body, **POOLS[pool]})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-pool"] == pool
    assert answer.headers["x-prompt-tokens"].isdigit()
    assert '"error"' not in answer.text
    if stream:
        assert answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("body", [b"[1,2]", b'"x"', b"null", b"{", b"", b"[" * 5000, b'{"a":NaN}'])
def test_a_body_that_is_no_json_object_is_refused(url: str, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{url}{CHAT}", content=body, headers=headers, timeout=30)
    assert_problem(answer, 400)


@pytest.mark.parametrize("kind", ["text/plain", "multipart/form-data", None])
def test_a_body_of_another_type_is_refused(url: str, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    body = json.dumps({"messages": HI}).encode()
    assert_problem(httpx.post(f"{url}{CHAT}", content=body, headers=headers, timeout=30), 415)


def test_a_body_beyond_the_limit_is_refused(url: str) -> None:
    assert_problem(post(url, *said("x" * (9 * 2**20))), 413)


def test_a_text_to_tokenize_is_bounded(url: str) -> None:
    """A long one would keep every chat of its pool waiting."""
    assert_problem(post(url, "/tokenize", {"prompt": "word " * 1_500_000}), 400)
    assert post(url, "/tokenize", {"prompt": "word " * 1000}).json()["count"] >= 1000


PADDED = [{"type": "text", "text": "hi", "cache_control": {"note": "x" * 200_000}}]
EMPTY_PARTS = [{"type": "text", "text": ""}] * 5000


@pytest.mark.parametrize("content", [PADDED, EMPTY_PARTS], ids=["padded", "empty_parts"])
def test_what_is_not_rendered_does_not_make_a_prompt_long(url: str, content: Any) -> None:
    answer = post(url, *said(content))
    assert answer.headers["x-pool"] == "latency"
    assert int(answer.headers["x-prompt-tokens"]) < 100


def test_what_is_rendered_anew_is_counted(url: str) -> None:
    arguments = json.dumps({"numbers": [1e15] * 130}).replace("1000000000000000.0", "1e15")
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    path, body = history(content=None, tool_calls=[call])
    answer = post(url, path, body)
    long = int(answer.headers["x-prompt-tokens"]) >= 1024
    assert answer.headers["x-pool"] == ("throughput" if long else "latency")


def test_an_unknown_model_is_404(url: str) -> None:
    assert_problem(post(url, *chat(model="gpt-4")), 404)
    assert_problem(httpx.get(f"{url}/v1/models/nope", timeout=30), 404)


@pytest.mark.parametrize("tier", ["bogus", 5, "", ["flex"]])
def test_an_unknown_tier_is_refused(url: str, tier: Any) -> None:
    assert_problem(post(url, *chat(service_tier=tier)), 400)


def test_the_context_message_names_the_limit_and_what_was_asked(url: str) -> None:
    """vllm#33418: it once named a limit of 3 where the model's is 2,048."""
    message = post(url, *chat(max_tokens=4095)).json()["error"]["message"]
    assert "4096" in message
    assert "-" not in message.replace("max-", "")


def test_a_bad_schema_does_not_poison_its_neighbours(url: str) -> None:
    """vllm#4070."""
    for _ in range(5):
        assert_problem(post(url, *REFUSED["schema_of_no_type"]), 400)
        assert_still_serving(url, {})


def events(answer: httpx.Response) -> list[Any]:
    lines = [e.removeprefix("data: ") for e in answer.text.split("\n\n") if e]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
def test_usage_is_not_streamed_unless_asked_for(url: str, options: Any) -> None:
    body = {"messages": HI, "max_tokens": 2, "stream": True}
    if options is not None:
        body["stream_options"] = options
    assert not [e for e in events(post(url, CHAT, body)) if e.get("usage")]


def test_usage_comes_once_when_asked_for(url: str) -> None:
    body = {"stream": True, "stream_options": {"include_usage": True}}
    found = events(post(url, *chat(**body)))
    assert [e["choices"] for e in found if e.get("usage")] == [[]]
    assert found[-1]["usage"]["completion_tokens"] == 2


def test_stream_options_without_a_stream_are_refused(url: str) -> None:
    assert_problem(post(url, *chat(stream_options={"include_usage": True})), 400)


def test_each_of_n_streamed_choices_finishes(url: str) -> None:
    found = events(post(url, *chat(n=3, stream=True)))
    ends = [c["index"] for e in found for c in e["choices"] if c["finish_reason"]]
    assert sorted(ends) == [0, 1, 2]
