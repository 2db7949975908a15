"""From request bytes to a checked body, or the refusal that names the field at fault.

Checks what vLLM itself answers with a 500, an unbounded error or silence. Everything it does not
name passes through unchanged, so whatever vLLM supports works.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from app.classify.shape import prompt_bytes, prompts, sequences
from app.contracts.request import Endpoint
from app.errors import BodyTooLarge, MalformedRequest, UnknownModel, UnsupportedMedia

# Deeper nesting has no use in this API; Python's own JSON reader gives up at about a thousand.
MAX_DEPTH = 64
# OpenAI's documented range of logit_bias values.
MAX_LOGIT_BIAS = 100.0
# The engine keeps token counts in 32-bit integers.
MAX_INT = 2**31 - 1
RESPONSE_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
TOOL_CHOICES = ("none", "auto", "required")
ROLES_WITH_TEXT = ("system", "developer", "user", "tool", "function")


@dataclass(frozen=True, slots=True)
class BodyBounds:
    """What a body may ask for, from the configuration and the model.

    `prompt_bytes`: no longer text fits into the context.
    """

    model_id: str
    vocab_size: int
    max_model_len: int
    prompt_bytes: int
    body_bytes: int
    sequences: int
    prompts: int
    calls_tools: bool


def read(raw: bytes, content_type: str | None, bounds: BodyBounds) -> dict[str, Any]:
    """A JSON object without text that cannot be encoded; anything else is refused."""
    media = (content_type or "").partition(";")[0].strip().lower()
    if media != "application/json":
        raise UnsupportedMedia(
            f"Content-Type must be application/json, not {media[:80] or 'absent'}"
        )
    if len(raw) > bounds.body_bytes:
        raise BodyTooLarge(f"the body has {len(raw)} bytes, at most {bounds.body_bytes} are taken")
    try:
        body = json.loads(raw, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise MalformedRequest(f"the body is nested deeper than {MAX_DEPTH}") from error
    except ValueError as error:
        raise MalformedRequest(f"the body is not valid JSON: {str(error)[:120]}") from error
    if not isinstance(body, dict):
        raise MalformedRequest(f"the body must be a JSON object, not {_kind(body)}")
    _walk(body, "", 0)
    return body


def check(endpoint: Endpoint, body: Mapping[str, Any], bounds: BodyBounds) -> None:
    """Refuse a body that the engine would answer wrongly; each refusal names its field."""
    check_model(body, bounds)
    for name, rule in _RULES.items():
        value = body.get(name)
        if value is not None:
            rule(value, name, bounds)
    _check_sequences(body, bounds)
    _check_stream_options(body)
    if endpoint is Endpoint.CHAT:
        _check_messages(body.get("messages"))
        _check_tools(body, bounds)
    else:
        _check_prompt(body.get("prompt"), bounds)
        _check_echo(body)
        _check_total(body, bounds)


def check_length(endpoint: Endpoint, body: Mapping[str, Any], bounds: BodyBounds) -> None:
    """Refuse a prompt whose bytes alone say that it is longer than the context."""
    size = prompt_bytes(endpoint, body)
    if size > bounds.prompt_bytes:
        raise MalformedRequest(
            f"the prompt has {size} bytes; none of more than {bounds.prompt_bytes} fits into the "
            f"context of {bounds.max_model_len} tokens"
        )


def rewritten(raw: bytes, body: Mapping[str, Any]) -> bytes:
    """The client's bytes, unless they hold an empty form that the engine would not take as absent.

    `tools: []` and `tool_choice` without tools mean the same as neither (LiteLLM sends them).
    """
    if body.get("tools") or not ("tools" in body or "tool_choice" in body):
        return raw
    kept = {key: value for key, value in body.items() if key not in ("tools", "tool_choice")}
    return json.dumps(kept).encode()


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _kind(value: object) -> str:
    names = {list: "an array", str: "a string", type(None): "null", bool: "a boolean"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else "an object")


def _walk(value: object, path: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise MalformedRequest(f"{path[:200]} is nested deeper than {MAX_DEPTH}", param=path[:200])
    if isinstance(value, str):
        _check_text(value, path)
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_text(key, path)
            _walk(item, f"{path}.{key[:80]}" if path else key[:80], depth + 1)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            if isinstance(item, str | list | dict):
                _walk(item, f"{path}[{index}]", depth + 1)


def _check_text(text: str, path: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise MalformedRequest(
            f"{path[:200]} holds a lone surrogate at character {error.start}", param=path[:200]
        ) from error


def check_model(body: Mapping[str, Any], bounds: BodyBounds) -> None:
    """Refuse any model but the served one; no model at all means that one."""
    model = body.get("model")
    if model is None:
        return
    if not isinstance(model, str):
        raise MalformedRequest("model must be a string", param="model")
    if model != bounds.model_id:
        raise UnknownModel(
            f"the model {model[:80]!r} does not exist; this address serves {bounds.model_id!r}",
            param="model",
        )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _whole(low: int, high: int | None = None) -> Callable[[Any, str, BodyBounds], None]:
    def rule(value: Any, name: str, bounds: BodyBounds) -> None:
        top = bounds.sequences if high is None else high
        if not _is_int(value) or not low <= value <= top:
            raise MalformedRequest(f"{name} must be a whole number from {low} to {top}", param=name)

    return rule


def _text(value: Any, name: str, bounds: BodyBounds) -> None:
    if not isinstance(value, str):
        raise MalformedRequest(f"{name} must be a string, not {_kind(value)}", param=name)


def _flag(value: Any, name: str, bounds: BodyBounds) -> None:
    if not isinstance(value, bool):
        raise MalformedRequest(f"{name} must be true or false", param=name)


def _priority(value: Any, name: str, bounds: BodyBounds) -> None:
    if not _is_int(value) or value != 0:
        raise MalformedRequest(
            "priority is set by the router; declare urgency with service_tier or x-urgency",
            param=name,
        )


def _logit_bias(value: Any, name: str, bounds: BodyBounds) -> None:
    if not isinstance(value, dict):
        raise MalformedRequest("logit_bias must be an object of token id to bias", param=name)
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < bounds.vocab_size):
            raise MalformedRequest(
                f"logit_bias: {key[:40]!r} is out of vocabulary (0 to {bounds.vocab_size - 1})",
                param=name,
            )
        is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not is_number or not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
            raise MalformedRequest(
                f"logit_bias of {key} must be a number from -100 to 100", param=name
            )


def _stop(value: Any, name: str, bounds: BodyBounds) -> None:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise MalformedRequest("stop must be a string or an array of strings", param=name)
    if any(not text for text in texts):
        raise MalformedRequest("stop must not hold an empty string", param=name)


def _response_format(value: Any, name: str, bounds: BodyBounds) -> None:
    if not isinstance(value, dict) or value.get("type") not in RESPONSE_FORMATS:
        raise MalformedRequest(
            f"response_format.type must be one of {', '.join(RESPONSE_FORMATS)}",
            param="response_format.type",
        )
    if value["type"] != "json_schema":
        return
    inner = value.get("json_schema")
    if not isinstance(inner, dict) or not isinstance(inner.get("schema"), dict):
        raise MalformedRequest(
            "response_format.json_schema must be an object that holds the schema under 'schema'",
            param="response_format.json_schema",
        )


_RULES: dict[str, Callable[[Any, str, BodyBounds], None]] = {
    "n": _whole(1),
    "best_of": _whole(1),
    "max_tokens": _whole(1, MAX_INT),
    "max_completion_tokens": _whole(1, MAX_INT),
    "min_tokens": _whole(0, MAX_INT),
    "top_logprobs": _whole(0, 20),
    "stream": _flag,
    "user": _text,
    "priority": _priority,
    "logit_bias": _logit_bias,
    "stop": _stop,
    "response_format": _response_format,
}


def _check_sequences(body: Mapping[str, Any], bounds: BodyBounds) -> None:
    count, best_of = body.get("n") or 1, body.get("best_of")
    if best_of is not None and best_of < count:
        raise MalformedRequest(f"best_of must be at least n ({count})", param="best_of")


def _check_total(body: Mapping[str, Any], bounds: BodyBounds) -> None:
    total = sequences(Endpoint.COMPLETIONS, body)
    if total > bounds.prompts:
        raise MalformedRequest(
            f"prompt and n make {total} sequences, at most {bounds.prompts} are taken", "n"
        )


def _check_stream_options(body: Mapping[str, Any]) -> None:
    options = body.get("stream_options")
    if options is None:
        return
    if not isinstance(options, dict):
        raise MalformedRequest("stream_options must be an object", param="stream_options")
    if not body.get("stream"):
        raise MalformedRequest("stream_options needs stream: true", param="stream_options")
    for name, value in options.items():
        if value is not None and not isinstance(value, bool):
            raise MalformedRequest(
                f"stream_options.{name[:40]} must be true or false", param="stream_options"
            )


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise MalformedRequest("messages must be an array with at least one message", "messages")
    for index, message in enumerate(messages):
        _check_message(message, f"messages[{index}]")


def _check_message(message: Any, path: str) -> None:
    if not isinstance(message, dict):
        raise MalformedRequest(f"{path} must be an object, not {_kind(message)}", param=path)
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise MalformedRequest(f"{path}.role must be a string", param=f"{path}.role")
    content = message.get("content")
    if isinstance(content, list):
        for index, part in enumerate(content):
            _check_part(part, f"{path}.content[{index}]")
    elif content is None:
        if message["role"] in ROLES_WITH_TEXT:
            raise MalformedRequest(f"{path}.content is missing", param=f"{path}.content")
    elif not isinstance(content, str):
        raise MalformedRequest(
            f"{path}.content must be a string or an array of parts, not {_kind(content)}",
            param=f"{path}.content",
        )
    _check_tool_calls(message.get("tool_calls"), f"{path}.tool_calls")


def _check_part(part: Any, path: str) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "refusal"):
        shown = f"{str(kind)[:40]!r}" if kind is not None else "absent"
        raise MalformedRequest(
            f"{path}.type must be 'text', this model reads no other; it is {shown}",
            param=f"{path}.type",
        )
    if not isinstance(part.get(kind), str):
        raise MalformedRequest(f"{path}.{kind} must be a string", param=f"{path}.{kind}")


def _check_tool_calls(calls: Any, path: str) -> None:
    if calls is None:
        return
    if not isinstance(calls, list):
        raise MalformedRequest(f"{path} must be an array", param=path)
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise MalformedRequest(
                f"{path}[{index}].function.name must be a string", param=f"{path}[{index}]"
            )
        _check_arguments(function.get("arguments"), f"{path}[{index}].function.arguments")


def _check_arguments(arguments: Any, path: str) -> None:
    if arguments is None or isinstance(arguments, dict):
        return
    try:
        is_object = not arguments or isinstance(json.loads(arguments), dict)
    except (TypeError, ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise MalformedRequest(f"{path} must be a JSON object written as a string", param=path)


def _check_tools(body: Mapping[str, Any], bounds: BodyBounds) -> None:
    tools, choice = body.get("tools"), body.get("tool_choice")
    if tools is not None and not isinstance(tools, list):
        raise MalformedRequest("tools must be an array", param="tools")
    for index, tool in enumerate(tools or []):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise MalformedRequest(
                f"tools[{index}].function.name must be a string", param=f"tools[{index}]"
            )
    if isinstance(choice, str) and choice not in TOOL_CHOICES:
        raise MalformedRequest(
            f"tool_choice must be one of {', '.join(TOOL_CHOICES)} or name a function",
            param="tool_choice",
        )
    if isinstance(choice, dict) or choice == "required":
        _check_forced_tool(tools, choice, bounds)
    elif choice is not None and not isinstance(choice, str):
        raise MalformedRequest("tool_choice must be a string or an object", param="tool_choice")


def _check_forced_tool(tools: Any, choice: Any, bounds: BodyBounds) -> None:
    if not tools:
        raise MalformedRequest("this tool_choice needs tools", param="tool_choice")
    if choice == "required":
        if not bounds.calls_tools:
            raise MalformedRequest(
                "tool_choice 'required' is not supported by this model", param="tool_choice"
            )
        return
    function = choice.get("function")
    named = function.get("name") if isinstance(function, dict) else None
    if named not in [tool["function"]["name"] for tool in tools]:
        raise MalformedRequest("tool_choice names a function that is not in tools", "tool_choice")


def _check_prompt(prompt: Any, bounds: BodyBounds) -> None:
    if isinstance(prompt, str):
        prompts: list[Any] = [prompt]
    elif isinstance(prompt, list) and prompt:
        prompts = [prompt] if _is_number(prompt[0]) else prompt
    else:
        raise MalformedRequest("prompt must be a text or an array that is not empty", "prompt")
    if len(prompts) > bounds.prompts:
        raise MalformedRequest(
            f"prompt holds {len(prompts)} prompts, at most {bounds.prompts} are taken", "prompt"
        )
    for index, item in enumerate(prompts):
        path = f"prompt[{index}]" if prompts is prompt else "prompt"
        if isinstance(item, str):
            if not item:
                raise MalformedRequest(f"{path} is empty", param=path)
        elif isinstance(item, list) and isinstance(prompts[0], list):
            _check_token_ids(item, path, bounds)
        else:
            raise MalformedRequest(
                f"{path} must be a text or token ids, the same kind in every prompt", param=path
            )
        if isinstance(item, str) is not isinstance(prompts[0], str):
            raise MalformedRequest(f"{path} is not of the kind of the first prompt", param=path)


def _check_echo(body: Mapping[str, Any]) -> None:
    # vLLM 0.29.0 breaks such a stream off in its middle (KeyError in its completion server).
    many = (body.get("n") or 1) > 1 or len(prompts(body)) > 1
    if body.get("echo") and body.get("stream") and body.get("logprobs") is not None and many:
        raise MalformedRequest(
            "echo with logprobs streams one prompt and one sequence at a time", param="echo"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _check_token_ids(ids: list[Any], path: str, bounds: BodyBounds) -> None:
    if not ids:
        raise MalformedRequest(f"{path} is empty", param=path)
    for index, token in enumerate(ids):
        if not _is_int(token):
            raise MalformedRequest(f"{path}[{index}] must be a whole number", param=path)
        if not 0 <= token < bounds.vocab_size:
            raise MalformedRequest(
                f"{path}[{index}] is out of vocabulary (0 to {bounds.vocab_size - 1})", param=path
            )
