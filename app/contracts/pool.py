"""What a pool replica says of itself."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What does not change while an engine runs. `kv_bytes` is what `kv_tokens` take, if known."""

    slots: int
    kv_tokens: int
    kv_bytes: int | None
    kv_cache_dtype: str
    dtype: str
    max_model_len: int


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What the engine's scheduler reported last: sequences running and waiting, KV share in use."""

    running: int
    waiting: int
    kv_used_fraction: float


@dataclass(frozen=True, slots=True)
class Agreement:
    """How an engine's greedy answers compare with the reference answers of its model.

    `tokens_fraction` is the share of reference tokens matched before the first difference.
    """

    prompts: int
    tokens_fraction: float
    reference: str


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """One replica's state at the moment it was asked. `start_s`: from construction to ready."""

    pool: str
    pid: int
    facts: EngineFacts
    load: EngineLoad
    agreement: Agreement | None
    start_s: float
