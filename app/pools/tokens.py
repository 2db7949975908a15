"""Counts a prompt's tokens as the engine will: template, tools and special tokens included.

In: a checked body. Out: a count, or the renderer's refusal. Two counters, one for each engine.
"""

import logging
from collections.abc import Mapping
from typing import Any, Protocol

from app.classify.shape import TokenizerBounds, prompts
from app.config import PoolSettings
from app.contracts.request import Endpoint
from app.errors import MalformedRequest
from app.pools.simulated import BYTES_PER_TOKEN, prompt_tokens
from app.pools.vllm import import_ray_llm, llm_config

# A tokenizer without normalization keeps every byte. The others grow a text in UTF-8 at most
# elevenfold (Unicode NFKC; NFC threefold): unicode.org/faq/normalization.
MAX_NORMALIZATION_GROWTH = 11


class TokenCounter(Protocol):
    """What the classifier needs of a tokenizer."""

    bounds: TokenizerBounds
    vocab_size: int

    async def count(self, endpoint: Endpoint, body: Mapping[str, Any]) -> int:
        """Tokens of the body's prompt, all prompts together. Never blocks the event loop."""


class SimulatedCounter:
    """Counts as `SimulatedEngine` does."""

    bounds = TokenizerBounds(
        longest_token_bytes=BYTES_PER_TOKEN * 8,
        bytes_growth=8,
        template_bytes=64,
        message_bytes=64,
    )
    # That of SmolLM2, so that the same bodies are refused.
    vocab_size = 49_152

    async def count(self, endpoint: Endpoint, body: Mapping[str, Any]) -> int:
        return prompt_tokens(body)


class VllmCounter:
    """Renders and tokenizes with vLLM's own code, in its thread pool."""

    def __init__(self, source: str, pool: PoolSettings) -> None:
        import_ray_llm()
        from jinja2 import TemplateError
        from ray.llm._internal.serve.routing_policies.kv_aware.vllm.tokenizer import (
            TokenizeError,
            Tokenizer,
        )
        from transformers import AutoTokenizer

        # It logs whole bodies that it cannot read; the client is told, the log need not be.
        logging.getLogger(Tokenizer.__module__).setLevel(logging.ERROR)
        # What a body can make the renderer and its template raise.
        self._refusals = (
            TokenizeError, TypeError, ValueError, KeyError, AttributeError, TemplateError,
        )  # fmt: skip
        self._tokenizer = Tokenizer(llm_config("tokenizer", source, pool))
        self.bounds = _bounds(AutoTokenizer.from_pretrained(source))
        self.vocab_size = _vocab_size(source)

    async def count(self, endpoint: Endpoint, body: Mapping[str, Any]) -> int:
        if endpoint is Endpoint.CHAT:
            return await self._count_one(body)
        total = 0
        for prompt in prompts(body):
            if isinstance(prompt, str):
                total += await self._count_one({**body, "prompt": prompt})
            else:
                total += len(prompt)
        return total

    async def _count_one(self, body: Mapping[str, Any]) -> int:
        try:
            tokens = await self._tokenizer.tokenize(dict(body))
        except self._refusals as error:
            raise MalformedRequest(f"the prompt cannot be rendered: {error}") from error
        if tokens is None:
            raise MalformedRequest("the prompt cannot be rendered: a field is of the wrong type")
        return len(tokens)


def _vocab_size(source: str) -> int:
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(source).get_text_config().vocab_size)


def _bounds(tokenizer: Any) -> TokenizerBounds:
    one = _rendered_bytes(tokenizer, 1)
    return TokenizerBounds(
        longest_token_bytes=max(_token_bytes(tokenizer)),
        bytes_growth=MAX_NORMALIZATION_GROWTH if _normalizes(tokenizer) else 1,
        template_bytes=one,
        message_bytes=max(0, _rendered_bytes(tokenizer, 2) - one),
    )


def _token_bytes(tokenizer: Any) -> list[int]:
    return [len(tokenizer.decode([index]).encode()) for index in range(len(tokenizer))]


def _normalizes(tokenizer: Any) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return backend is None or backend.normalizer is not None


def _rendered_bytes(tokenizer: Any, messages: int) -> int:
    """What the template adds around empty messages, system prompt and generation mark included."""
    if tokenizer.chat_template is None:
        return 0
    conversation = [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]
    text = tokenizer.apply_chat_template(
        conversation[:messages], tokenize=False, add_generation_prompt=True
    )
    return len(text.encode())
