"""`prod.yaml` on logical GPUs with the simulated engine: what is asked of the cluster."""

from typing import Any

import httpx
from ray import serve
from ray.util import placement_group_table

from app.graph import build
from tests.serve.support import URL, app_args, wait_for

SPEEDS = {"prefill_tokens_per_s": 1e5, "decode_tokens_per_s": 1e3, "kv_tokens": 400_000}


def simulated_prod() -> dict[str, Any]:
    args = app_args("prod.yaml")
    for pool in args["pools"].values():
        # A simulated engine knows nothing, so it has nothing to prove.
        pool |= {"engine": "simulated", "simulation": SPEEDS, "proof": {"references": "none"}}
    return args


def test_prod_asks_for_its_gpu_types_slots_and_kv_dtypes(cluster: None) -> None:
    serve.run(build(simulated_prod()), name="prod", route_prefix="/prod")
    try:
        wait_for(f"{URL}/prod/health")
        rows = httpx.get(f"{URL}/prod/v1/pools", timeout=10).json()["data"]
        groups = placement_group_table().values()
        bundles = [b for g in groups if g["state"] == "CREATED" for b in g["bundles"].values()]
    finally:
        serve.delete("prod")
    shown = [(r["id"], r["slots"], r["kv_cache_dtype"]) for r in rows]
    assert shown == [("latency", 32, "auto"), ("throughput", 256, "fp8")]
    gpus = [b for b in bundles if b.get("GPU")]
    assert {"GPU": 1.0, "CPU": 4.0, "accelerator_type:H100": 0.001} in gpus
    assert {"GPU": 1.0, "CPU": 4.0, "accelerator_type:L40S": 0.001} in gpus
    assert len(gpus) == 2
