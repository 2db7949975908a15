"""What `/v1/pools` and `/v1/route` show of a pool and of a decision."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from app.classify.urgency import SERVED_TIER
from app.contracts.placement import Decision
from app.contracts.pool import PoolSnapshot


def pool(name: str, replicas: Sequence[PoolSnapshot], age_s: float | None) -> dict[str, Any]:
    """One pool over its live replicas: capacities, loads and counts add up."""
    row: dict[str, Any] = {"id": name, "object": "pool", "replicas": len(replicas)}
    row["pids"] = [r.pid for r in replicas]
    if not replicas:
        return row
    facts = replicas[0].facts
    kv_tokens = sum(r.facts.kv_tokens for r in replicas)
    kv_used = sum(r.facts.kv_tokens * r.load.kv_used_fraction for r in replicas)
    agreements = [asdict(r.agreement) for r in replicas if r.agreement is not None]
    return row | {
        "slots": sum(r.facts.slots for r in replicas),
        "slots_taken": sum(r.occupancy.slots for r in replicas),
        "headroom_slots": sum(r.headroom_slots for r in replicas),
        "lent_slots": sum(r.occupancy.lent_slots for r in replicas),
        "lendable_slots": sum(r.occupancy.lendable_slots for r in replicas),
        "queued": sum(r.occupancy.queued for r in replicas),
        "running": sum(r.load.running for r in replicas),
        "waiting": sum(r.load.waiting for r in replicas),
        "ttft_s": _worst([r.load.ttft_s for r in replicas]),
        "tpot_s": _worst([r.load.tpot_s for r in replicas]),
        "counts": dict(sum((Counter(r.counts) for r in replicas), Counter())),
        "kv_cache_dtype": facts.kv_cache_dtype,
        "dtype": facts.dtype,
        "kv_tokens": kv_tokens,
        "kv_tokens_used": round(kv_used),
        "kv_bytes": _total([r.facts.kv_bytes for r in replicas]),
        "max_model_len": facts.max_model_len,
        "agreement": min(agreements, key=lambda a: a["tokens_fraction"], default=None),
        "start_s": round(max(r.start_s for r in replicas), 1),
        "snapshot_age_s": None if age_s is None else round(age_s, 2),
    }


def decision(made: Decision) -> dict[str, Any]:
    """A decision and the facts behind it."""
    facts = made.facts
    return {
        "object": "route",
        "pool": made.home.pool,
        "priority": made.home.priority,
        "reason": made.reason,
        "service_tier": SERVED_TIER[made.sla_class.urgency],
        "class": {"urgency": made.sla_class.urgency, "shape": made.sla_class.shape},
        "facts": {
            "endpoint": facts.endpoint,
            "declared_in": facts.declaration.source,
            "prompt_bytes": facts.prompt_bytes,
            "prompt_tokens": facts.prompt_tokens.exact,
            "prompt_tokens_range": [facts.prompt_tokens.low, facts.prompt_tokens.high],
            "counted": facts.prompt_tokens.exact is not None,
            "sequences": facts.sequences,
            "max_output_tokens": facts.max_output_tokens,
        },
    }


def _worst(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(max(known), 4) if known else None


def _total(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
