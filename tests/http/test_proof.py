"""A KV cache of a type that computes garbage does not come up, and says why."""

import os
import subprocess
import sys

from tests.http.conftest import OFFLINE, ROOT

SCRIPT = """
import asyncio, ray
from pathlib import Path
from app import config
from app.errors import ProofFailed
from app.pools.proof import Proof
from app.pools.vllm import VllmEngine

settings = config.load(Path("serve_configs/local.yaml"))
pool = settings.pools["latency"]
wrong = pool.vllm.model_copy(
    update={"dtype": "float32", "kv_cache_dtype": "bfloat16", "kv_cache_memory_bytes": 2**28}
)
pool = pool.model_copy(update={"vllm": wrong})
source = str(Path(settings.model.source).absolute())

async def main():
    engine = VllmEngine(settings.model.id, "wrong", source, pool)
    await engine.start()
    assert engine.facts().kv_tokens > 0
    try:
        await Proof(pool.proof.references, pool.proof.min_agreement, 120).run(engine, None)
    except ProofFailed as error:
        print("REFUSED:", error)

ray.init(num_cpus=2, include_dashboard=False, address="local")
asyncio.run(main())
"""


def test_float32_with_a_bfloat16_cache_is_refused_by_name() -> None:
    """It starts, reports the expected capacity and answers nonsense: only its answers tell."""
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        env={**os.environ, **OFFLINE, "VLLM_CPU_OMP_THREADS_BIND": "0"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    line = next((x for x in run.stdout.splitlines() if x.startswith("REFUSED")), "")
    assert "kv_cache_dtype bfloat16 with dtype float32" in line, run.stdout[-2000:] + run.stderr
