"""Bounds a prompt's token count from its byte length, and says long or short where that settles it.

Takes the parsed body and what the tokenizer guarantees; gives a range. Never tokenizes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from app.contracts.request import Endpoint, Shape, TokenRange

# Fields that let a request change how its prompt is rendered: only the engine's renderer knows
# what becomes of them, so byte length proves nothing.
RENDERING_FIELDS = (
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "truncate_prompt_tokens",
    "prompt_embeds",
    "mm_processor_kwargs",
)
UNBOUNDED = 2**63


@dataclass(frozen=True, slots=True)
class TokenizerBounds:
    """What holds for every text. Bytes are UTF-8.

    `longest_token_bytes`: no token stands for more. `bytes_growth`: normalization makes a text at
    most this many times longer. `template_bytes` and `message_bytes`: what the chat template adds
    once, and for each message after the first.
    """

    longest_token_bytes: int
    bytes_growth: int
    template_bytes: int
    message_bytes: int


def is_long(tokens: int, long_prompt_tokens: int) -> bool:
    """A prompt of exactly the threshold is long."""
    return tokens >= long_prompt_tokens


def settled(tokens: TokenRange, long_prompt_tokens: int) -> Shape | None:
    """The shape if both bounds agree, None if the prompt must be counted."""
    low, high = (is_long(bound, long_prompt_tokens) for bound in (tokens.low, tokens.high))
    if low != high:
        return None
    return Shape.LONG if low else Shape.SHORT


def prompt_range(
    endpoint: Endpoint, body: Mapping[str, Any], tokenizer: TokenizerBounds
) -> TokenRange:
    """Bounds of a well-formed body's prompt tokens, all its prompts together."""
    if any(body.get(name) is not None for name in RENDERING_FIELDS):
        return TokenRange(0, UNBOUNDED)
    if endpoint is Endpoint.CHAT:
        return _chat_range(body, tokenizer)
    ranges = [_prompt_range(prompt, tokenizer) for prompt in prompts(body)]
    return TokenRange(sum(r.low for r in ranges), sum(r.high for r in ranges))


def prompt_bytes(endpoint: Endpoint, body: Mapping[str, Any]) -> int:
    """Bytes of text in the prompt; token-id prompts count none."""
    if endpoint is Endpoint.CHAT:
        return _utf8(_texts(body["messages"]))
    return sum(len(p.encode()) for p in prompts(body) if isinstance(p, str))


def sequences(endpoint: Endpoint, body: Mapping[str, Any]) -> int:
    """Sequences the engine will run for this body."""
    count = max(body.get("n") or 1, body.get("best_of") or 1)
    return count if endpoint is Endpoint.CHAT else count * len(prompts(body))


def max_output_tokens(body: Mapping[str, Any]) -> int | None:
    """The output bound the client asked for, None if it asked for none."""
    value = body.get("max_completion_tokens")
    return value if value is not None else body.get("max_tokens")


def _chat_range(body: Mapping[str, Any], tokenizer: TokenizerBounds) -> TokenRange:
    messages = body["messages"]
    # A template may drop what an assistant said earlier (its reasoning) and the space around what
    # others did, nothing more.
    said = [t for m in messages if m.get("role") != "assistant" for t in _spoken(m.get("content"))]
    low = sum(len(text.strip().encode()) for text in said) // tokenizer.longest_token_bytes
    # Tools and calls are written out anew, by rules of the template.
    if body.get("tools") or any(m.get("tool_calls") for m in messages):
        return TokenRange(low, UNBOUNDED)
    template = tokenizer.template_bytes + tokenizer.message_bytes * (len(messages) - 1)
    return TokenRange(low, _utf8(_texts(messages)) * tokenizer.bytes_growth + template)


def _prompt_range(prompt: str | list[int], tokenizer: TokenizerBounds) -> TokenRange:
    if not isinstance(prompt, str):
        return TokenRange(len(prompt), len(prompt))
    size = len(prompt.encode())
    # Two more for the marks of beginning and end that a tokenizer may add.
    return TokenRange(size // tokenizer.longest_token_bytes, size * tokenizer.bytes_growth + 2)


def prompts(body: Mapping[str, Any]) -> list[str | list[int]]:
    """The prompts of a completion body: one text, one token list, or a list of either."""
    prompt = body["prompt"]
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


def _spoken(content: Any) -> list[str]:
    """The texts of a message that are rendered for certain."""
    if isinstance(content, str):
        return [content]
    return [part[part["type"]] for part in content or ()]


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif value is not None:
        yield repr(value)


def _utf8(texts: Iterator[str]) -> int:
    return sum(len(text.encode()) for text in texts)
