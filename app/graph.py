"""Composition root: from settings to a Ray Serve application. Knows everyone, decides nothing."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.util.accelerators import accelerators

from app.config import AppSettings, DeploymentSettings, PoolSettings, effective, parse
from app.contracts.placement import Destination
from app.errors import ConfigInvalid
from app.pools import preflight
from app.pools.announce import announcer
from app.pools.engine import Engine
from app.pools.lending import LendingRules
from app.pools.proof import Proof
from app.pools.server import PoolServer, PoolTerms
from app.pools.simulated import SimulatedEngine
from app.pools.tokens import SimulatedCounter, TokenCounter, VllmCounter
from app.pools.vllm import VllmEngine
from app.replicas import NamedReplicaRouter
from app.router import InferenceRouter
from app.routing.policy import LoanTerms, Policy

logger = logging.getLogger(__name__)

# Each worker asks for a thousandth of its accelerator's type, as Ray Serve LLM does: enough to be
# placed on a node that has one, too little to use it up.
ACCELERATOR_SHARE = 0.001
ROUTER = "InferenceRouter"
START_ATTEMPTS = 3


def build(args: dict[str, Any]) -> Application:
    """The application of a Serve config file's `args`; `ConfigInvalid` names each bad key."""
    settings = parse(args)
    logger.info("effective configuration:\n%s", effective(settings))
    preflight.check(settings)
    handles: dict[str, Application] = {}
    for name in _dependency_order(settings):
        handles[name] = _pool(name, settings, handles)
    handles = {name: handles[name] for name in settings.pools}
    options = _options(settings.router)
    options["ray_actor_options"] = {"num_cpus": settings.router.num_cpus}
    router = serve.deployment(serve.ingress()(InferenceRouter), name=ROUTER, **options)
    return router.bind(settings, _policy(settings), _counter(settings), _replica_name, handles)


def _simulated(name: str, settings: AppSettings) -> Engine:
    pool = settings.pools[name]
    assert pool.simulation is not None, "the settings require speeds of a simulated engine"
    return SimulatedEngine(settings.model.id, pool.vllm, pool.simulation)


def _vllm(name: str, settings: AppSettings) -> Engine:
    return VllmEngine(settings.model.id, name, _source(settings), settings.pools[name])


ENGINES: dict[str, Callable[[str, AppSettings], Engine]] = {
    "simulated": _simulated,
    "vllm": _vllm,
}


def _counter(settings: AppSettings) -> Callable[[], TokenCounter]:
    """The tokenizer of the model; every pool serves the same one."""
    real = [pool for pool in settings.pools.values() if pool.engine == "vllm"]
    return partial(VllmCounter, _source(settings), real[0]) if real else SimulatedCounter


def _source(settings: AppSettings) -> str:
    """Absolute, since a replica does not run in the directory that the file was read in."""
    return str(Path(settings.model.source).absolute())


def _replica_name() -> str:
    return str(serve.get_replica_context().replica_id.unique_id)


def _policy(settings: AppSettings) -> Policy:
    spills, loans = {}, {}
    for name, pool in settings.pools.items():
        spill, lending = pool.admission.spill, pool.admission.lending
        if spill is not None:
            spills[name] = Destination(spill.pool, spill.priority)
        if lending is not None:
            loans[name] = LoanTerms(
                lending.max_prompt_tokens, lending.max_output_tokens, lending.from_busy_fraction
            )
    return Policy(spills, loans)


def _terms(settings: AppSettings, pool: PoolSettings) -> PoolTerms:
    admission, lending = pool.admission, pool.admission.lending
    rules = None
    if lending is not None:
        rules = LendingRules(
            max_slots=max(1, int(lending.share * pool.vllm.max_num_seqs)),
            yield_to=lending.yield_to,
            resume_after_s=lending.resume_after_s,
            max_tpot_increase=lending.max_tpot_increase,
            interval_s=lending.interval_s,
        )
    return PoolTerms(
        headroom_slots=pool.headroom_slots,
        max_queued=admission.max_queued,
        max_queued_tokens=admission.max_queued_tokens,
        aging_s=admission.aging_s,
        chunks_per_s=pool.chunks_per_s,
        long_output_tokens=settings.routing.long_output_tokens,
        niceness=pool.niceness,
        lending=rules,
    )


def _pool(name: str, settings: AppSettings, handles: dict[str, Application]) -> Application:
    pool = settings.pools[name]
    kind, _, other = pool.proof.references.partition(":")
    references = pool.proof.references
    if kind not in ("pool", "known", "none"):
        references = str(Path(references).absolute())
    proof = Proof(references, pool.proof.min_agreement, pool.proof.timeout_s)
    deployment = serve.deployment(
        PoolServer,
        name=f"pool-{name}",
        placement_group_bundles=bundles(pool),
        placement_group_strategy="PACK",
        ray_actor_options={
            "num_cpus": pool.deployment.num_cpus,
            "runtime_env": {"env_vars": dict(pool.env)},
        },
        # A pool that cannot come up says so, instead of trying for ever.
        max_constructor_retry_count=START_ATTEMPTS,
        request_router_config=RequestRouterConfig(request_router_class=NamedReplicaRouter),
        **_options(pool.deployment),
    )
    return deployment.bind(
        name,
        partial(ENGINES[pool.engine], name, settings),
        proof,
        _terms(settings, pool),
        partial(announcer, ROUTER),
        handles[other] if kind == "pool" else None,
    )


def bundles(pool: PoolSettings) -> list[dict[str, float]]:
    """One bundle a worker; the replica actor itself rides in the first."""
    share: dict[str, float] = {}
    if pool.accelerator_type is not None:
        share = {f"accelerator_type:{_accelerator(pool.accelerator_type)}": ACCELERATOR_SHARE}
    workers = pool.vllm.tensor_parallel_size * pool.vllm.pipeline_parallel_size
    rows = [{**pool.bundle, **share} for _ in range(workers)]
    rows[0]["CPU"] = rows[0].get("CPU", 0.0) + pool.deployment.num_cpus
    return rows


def _accelerator(kind: str) -> str:
    known = {v for k, v in vars(accelerators).items() if not k.startswith("_")}
    if kind not in known:
        raise ConfigInvalid(f"pools.*.accelerator_type: Ray knows no accelerator {kind!r}")
    return kind


def _options(deployment: DeploymentSettings) -> dict[str, Any]:
    options = deployment.model_dump(exclude={"num_cpus"}, exclude_none=True)
    if "autoscaling_config" not in options:
        options.setdefault("num_replicas", 1)
    return options


def _dependency_order(settings: AppSettings) -> list[str]:
    """Pools that are held against no other pool come first."""
    return sorted(
        settings.pools, key=lambda n: settings.pools[n].proof.references.startswith("pool:")
    )
