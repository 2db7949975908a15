"""What a pool replica says of itself."""

from collections.abc import Mapping
from dataclasses import dataclass, field


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
    """What the engine's scheduler reported last: sequences running and waiting, KV share in use.

    `ttft_s` and `tpot_s` are medians over the engine's latest tokens, None before there were any.
    """

    running: int
    waiting: int
    kv_used_fraction: float
    ttft_s: float | None = None
    tpot_s: float | None = None


@dataclass(frozen=True, slots=True)
class Occupancy:
    """What a replica's admission counts. Slots and KV tokens are those reserved, not those in use.

    `queued_slots` wait for a place. `lent_slots` are the part of `slots` that borrowed work holds;
    `lendable_slots` may be lent besides. `by_router` is what each router replica holds or waits
    for, loans apart, in slots: what a router knows better of itself than an older snapshot does.
    """

    slots: int = 0
    kv_tokens: int = 0
    queued: int = 0
    queued_slots: int = 0
    lent_slots: int = 0
    lendable_slots: int = 0
    by_router: Mapping[str, int] = field(default_factory=dict)


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
    """One replica's state. `number` grows with each; `start_s`: from construction to ready.

    `headroom_slots` are kept free of deferrable work; `queue_limit` requests may wait.
    `counts` are events since the start: requests by what became of them.
    """

    pool: str
    replica: str
    number: int
    pid: int
    facts: EngineFacts
    load: EngineLoad
    occupancy: Occupancy
    headroom_slots: int
    queue_limit: int
    counts: Mapping[str, int]
    agreement: Agreement | None
    start_s: float
