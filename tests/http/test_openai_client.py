"""The unmodified `openai` client against the real engines."""

import json
from typing import Any

import pytest
from openai import OpenAI

MODEL = "smollm2-135m-instruct"
CAPITAL: Any = [{"role": "user", "content": "What is the capital of Japan?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@pytest.fixture(params=["default", "flex"], ids=["latency", "throughput"])
def tier(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def client(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)


def test_chat_is_answered_rightly_by_both_pools(client: OpenAI, tier: Any) -> None:
    """Read the text before the numbers: a wrong KV dtype answers at full speed."""
    answer = client.chat.completions.create(
        model=MODEL, messages=CAPITAL, max_tokens=12, temperature=0, service_tier=tier
    )
    assert answer.choices[0].message.content == "The capital of Japan is Tokyo."
    assert answer.service_tier == tier
    assert answer.model == MODEL


def test_a_stream_with_usage_is_the_whole_answer_in_parts(client: OpenAI, tier: Any) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=CAPITAL,
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        service_tier=tier,
    )
    chunks = list(stream)
    parts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    usages = [c.usage for c in chunks if c.usage is not None]
    assert "".join(parts) == "The capital of Japan is Tokyo."
    assert len(usages) == 1
    assert chunks[0].service_tier == tier
    assert {c.model for c in chunks} == {MODEL}


def test_a_tools_round_trip_with_calls_in_the_history(client: OpenAI, tier: Any) -> None:
    first = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        max_tokens=40,
        temperature=0,
        service_tier=tier,
    )
    message = first.choices[0].message
    assert message.tool_calls is not None
    assert message.tool_calls[0].function.name == "weather"  # type: ignore[union-attr]
    history: Any = [
        {"role": "user", "content": "What is the weather in Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function",
             "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]  # fmt: skip
    second = client.chat.completions.create(
        model=MODEL, messages=history, tools=[WEATHER], max_tokens=8, service_tier=tier
    )
    assert second.choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_json_schema_output_is_json_of_the_schema(client: OpenAI, tier: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "The capital of France as JSON."}],
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema}},
        max_tokens=60,
        temperature=0,
        service_tier=tier,
    )
    content = answer.choices[0].message.content
    assert content is not None
    assert list(json.loads(content)) == ["city"]


def test_completions_take_token_ids_logprobs_n_and_stop(client: OpenAI, tier: Any) -> None:
    answer = client.completions.create(
        model=MODEL,
        prompt=[504, 3575, 282, 4649, 314],
        max_tokens=4,
        temperature=0,
        logprobs=2,
        stop=["."],
        extra_body={"service_tier": tier},
    )
    choice = answer.choices[0]
    assert choice.text.strip() == "Paris"
    assert choice.logprobs is not None
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 5


def test_n_choices_are_given(client: OpenAI, tier: Any) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=CAPITAL, n=2, max_tokens=2, service_tier=tier
    )
    assert [choice.index for choice in answer.choices] == [0, 1]


def test_models_are_listed_by_their_public_name(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
