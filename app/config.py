"""Every setting, as strict frozen models; the only reader of YAML and of the environment.

In: the `args` of the application in a Serve config file. Out: one `AppSettings`, or `ConfigInvalid`
with the path of each bad key. Knows nothing of Ray or vLLM, whose own parameters keep their names.
"""

import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from app.contracts.placement import Destination
from app.contracts.request import Shape, Urgency
from app.errors import ConfigInvalid

# vllm/config/cache.py, CacheDType of vLLM 0.29.0; tests/rules compares the two.
KvCacheDtype = Literal[
    "auto",
    "float16",
    "bfloat16",
    "fp8",
    "fp8_e4m3",
    "fp8_e5m2",
    "fp8_inc",
    "fp8_ds_mla",
    "turboquant_k8v4",
    "turboquant_4bit_nc",
    "turboquant_k3v4_nc",
    "turboquant_3bit_nc",
    "int4_per_token_head",
    "int8_per_token_head",
    "fp8_per_token_head",
    "nvfp4",
    "nvfp4_4over6",
]
Dtype = Literal["auto", "bfloat16", "float16", "float32", "half", "float"]


class Settings(BaseModel):
    """Base of every settings model: unknown keys and type coercion are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


SettingsT = TypeVar("SettingsT", bound=Settings)


class ModelSettings(Settings):
    """The one model that every pool serves."""

    id: str = Field(min_length=1, description="Public name, in `model` of requests and answers.")
    source: str = Field(min_length=1, description="Directory of the weights and the tokenizer.")


class DestinationSettings(Settings):
    """Where a class of requests goes."""

    pool: str = Field(description="A key of `pools`.")
    priority: int = Field(
        default=0, ge=-1000, le=1000, description="Engine priority there; lower is served first."
    )


class RoutingSettings(Settings):
    """The classifier's thresholds and its table."""

    long_prompt_tokens: int = Field(ge=1, description="A prompt of this many tokens is long.")
    table: dict[Urgency, dict[Shape, DestinationSettings]] = Field(
        description="Urgency, then shape, to a destination. Every cell is required."
    )

    max_wait_s: dict[Urgency, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict,
        description="Longest wait for a slot by urgency, seconds; unset: no limit. Header "
        "x-max-wait-s overrides it.",
    )
    long_output_tokens: int = Field(
        default=1024, ge=1, description="Output that counts as misrouted in a pool for short work."
    )

    facts_file: str | None = Field(
        default=None, description="Appends each request's facts, without text; unset: none."
    )

    @model_validator(mode="after")
    def _every_cell(self) -> Self:
        for urgency in Urgency:
            missing = set(Shape) - set(self.table.get(urgency, {}))
            if missing:
                raise ValueError(f"table.{urgency} lacks {', '.join(sorted(missing))}")
        return self

    def destinations(self) -> dict[Urgency, dict[Shape, Destination]]:
        """The table as the router uses it."""
        return {
            urgency: {s: Destination(cell.pool, cell.priority) for s, cell in row.items()}
            for urgency, row in self.table.items()
        }


class LendingSettings(Settings):
    """On what terms a pool's idle slots, never its headroom, are lent to deferrable work."""

    share: float = Field(gt=0, le=1, description="Fraction of the slots lent at most.")
    max_prompt_tokens: int = Field(ge=1, description="Longest prompt that may borrow, tokens.")
    max_output_tokens: int = Field(
        ge=1, description="Largest declared max_tokens that may borrow; it must be declared."
    )
    yield_to: Literal["slot", "chat"] = Field(
        default="slot",
        description="What ends a loan: a slot that is needed, or any request of the pool's own.",
    )
    resume_after_s: float = Field(
        default=2.0, ge=0, description="Seconds of quiet before slots are lent again."
    )
    interval_s: float = Field(
        default=0.0, ge=0, description="Seconds from one loan to the next at least."
    )
    max_tpot_increase: float = Field(
        default=1.25, ge=1, description="Loans end while they cost running chats more than this."
    )
    from_busy_fraction: float = Field(
        default=1.0, ge=0, le=1, description="Borrow once this fraction of the home slots is taken."
    )


class AdmissionSettings(Settings):
    """How full a replica gets, and what becomes of a request past that."""

    headroom: float = Field(
        default=0.0, ge=0, lt=1, description="Fraction of the slots never given to deferrable work."
    )
    max_queued: int = Field(default=0, ge=0, description="Requests that may wait in one replica.")
    max_queued_tokens: int = Field(
        default=2**31 - 1, ge=1, description="Prompt tokens that may wait in one replica."
    )
    aging_s: float = Field(
        default=30.0, gt=0, description="Seconds of waiting that one level of priority is worth."
    )
    spill: DestinationSettings | None = Field(
        default=None, description="Where a request goes for which there is no slot; unset: 429."
    )
    lending: LendingSettings | None = Field(
        default=None, description="Terms of loans; unset: none."
    )


class LimitSettings(Settings):
    """Bounds on what a client may send."""

    body_bytes: int = Field(default=8 * 2**20, ge=1024, description="Longest request body, bytes.")
    sequences: int = Field(default=16, ge=1, description="Largest n and best_of of one request.")
    prompts: int = Field(
        default=64, ge=1, description="Most prompts, and prompts times n, of one request."
    )


class AutoscalingSettings(Settings):
    """Ray Serve's own autoscaling parameters."""

    min_replicas: int = Field(ge=0, description="Replicas kept with no load.")
    max_replicas: int = Field(ge=1, description="Replicas at most.")
    initial_replicas: int | None = Field(default=None, ge=0, description="Replicas at the start.")
    target_ongoing_requests: float = Field(gt=0, description="Requests per replica to aim at.")
    upscale_delay_s: float = Field(default=30.0, ge=0, description="Seconds of need before adding.")
    downscale_delay_s: float = Field(
        default=600.0, ge=0, description="Seconds of idleness before removing."
    )
    look_back_period_s: float = Field(default=30.0, gt=0, description="Averaging window, seconds.")
    metrics_interval_s: float = Field(default=10.0, gt=0, description="Reporting period, seconds.")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max_replicas < self.min_replicas:
            raise ValueError(
                f"max_replicas {self.max_replicas} is below min_replicas {self.min_replicas}"
            )
        return self


class DeploymentSettings(Settings):
    """Ray Serve's deployment options that may be set here."""

    num_replicas: int | None = Field(default=None, ge=1, description="A fixed number of replicas.")
    autoscaling_config: AutoscalingSettings | None = Field(
        default=None, description="Scales between two bounds; instead of num_replicas."
    )
    max_ongoing_requests: int = Field(
        default=256, ge=1, description="Requests one replica takes before it rejects."
    )
    max_queued_requests: int = Field(
        default=256, ge=-1, description="Requests one caller queues for this deployment; -1: any."
    )
    num_cpus: float = Field(default=0.0, ge=0, description="CPUs of the replica actor itself.")
    health_check_period_s: float = Field(default=5.0, gt=0, description="Seconds between checks.")
    health_check_timeout_s: float = Field(default=30.0, gt=0, description="Seconds for one check.")
    graceful_shutdown_timeout_s: float = Field(
        default=20.0, ge=0, description="Seconds a stopping replica may finish its requests."
    )

    @model_validator(mode="after")
    def _one_way_to_size(self) -> Self:
        if self.num_replicas is not None and self.autoscaling_config is not None:
            raise ValueError("num_replicas and autoscaling_config exclude each other")
        return self


class SimulationSettings(Settings):
    """Speeds of the simulated engine."""

    prefill_tokens_per_s: float = Field(gt=0, description="Prompt tokens per second, all together.")
    decode_tokens_per_s: float = Field(gt=0, description="Output tokens per second and sequence.")
    kv_tokens: int = Field(ge=16, description="KV cache capacity, tokens.")
    output_tokens: int = Field(default=16, ge=1, description="Output length without max_tokens.")
    start_s: float = Field(default=0.0, ge=0, description="Seconds until the engine is ready.")


class ProofSettings(Settings):
    """How a replica proves itself before it takes traffic."""

    references: str = Field(
        description="File of reference answers, `pool:NAME` to ask that pool, `known` for a few "
        "prompts with an answer everybody knows, or `none`."
    )
    min_agreement: float = Field(
        default=0.5, ge=0, le=1, description="Share of reference tokens it must reproduce."
    )
    timeout_s: float = Field(default=120.0, gt=0, description="Seconds for all answers.")


class VllmSettings(Settings):
    """vLLM's engine arguments, under their own names."""

    max_num_seqs: int = Field(ge=1, description="Sequences that run at once: the pool's slots.")
    max_model_len: int = Field(ge=16, description="Longest prompt plus output, tokens.")
    kv_cache_dtype: KvCacheDtype = Field(description="Type of the KV cache.")
    dtype: Dtype = Field(default="auto", description="Type of weights and activations.")
    gpu_memory_utilization: float | None = Field(
        default=None, gt=0, le=1, description="Share of the GPU's memory that vLLM may take."
    )
    kv_cache_memory_bytes: int | None = Field(
        default=None, ge=2**20, description="Bytes for the KV cache, instead of a share."
    )
    max_num_batched_tokens: int | None = Field(
        default=None, ge=1, description="Tokens computed in one step; bounds a prefill chunk."
    )
    tensor_parallel_size: int = Field(default=1, ge=1, description="GPUs a layer is split over.")
    pipeline_parallel_size: int = Field(default=1, ge=1, description="Stages of layers.")
    scheduling_policy: Literal["fcfs", "priority"] = Field(
        default="fcfs", description="Order of the engine's queue."
    )
    max_num_queued_reqs: int | None = Field(
        default=None, ge=1, description="Sequences that the engine itself refuses to exceed."
    )
    max_num_queued_tokens: int | None = Field(
        default=None, ge=1, description="Prompt tokens that the engine itself lets wait."
    )
    long_prefill_token_threshold: int | None = Field(
        default=None, ge=1, description="Tokens of one prompt computed in one step at most."
    )
    extra: dict[str, Any] = Field(
        default_factory=dict, description="Any other argument of vLLM's engine or frontend."
    )

    @model_validator(mode="after")
    def _said_once(self) -> Self:
        twice = sorted(set(self.extra) & set(type(self).model_fields))
        if twice:
            raise ValueError(f"extra repeats {', '.join(twice)}")
        return self


class PoolSettings(Settings):
    """One pool: an engine, its resources and how it is deployed."""

    engine: Literal["vllm", "simulated"] = Field(description="Which engine answers.")
    vllm: VllmSettings = Field(description="Engine arguments.")
    simulation: SimulationSettings | None = Field(
        default=None, description="Speeds; required by the simulated engine."
    )
    proof: ProofSettings = Field(description="What a replica must answer before it takes traffic.")
    admission: AdmissionSettings = Field(
        default=AdmissionSettings(), description="How full a replica gets."
    )
    niceness: int = Field(
        default=0, ge=0, le=19, description="Added to the niceness of the replica's processes."
    )
    device: Literal["cpu", "gpu"] = Field(description="What the engine runs on.")
    accelerator_type: str | None = Field(
        default=None, description="Ray's name of the GPU type, such as H100."
    )
    bundle: dict[str, float] = Field(
        description="Ray resources of one worker; one bundle a worker, packed."
    )
    deployment: DeploymentSettings = Field(description="Ray Serve's deployment options.")
    env: dict[str, str] = Field(default_factory=dict, description="Environment of the replica.")
    chunks_per_s: float = Field(
        default=600.0,
        gt=0,
        description="Chunks a replica sends per second, all streams together; tokens that come "
        "faster are joined. The default was measured with load/overhead.py.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.engine == "simulated" and self.simulation is None:
            raise ValueError("engine is simulated and simulation is not set")
        if self.device == "cpu" and self.accelerator_type is not None:
            raise ValueError("accelerator_type needs device gpu")
        if self.device == "gpu" and not self.bundle.get("GPU"):
            raise ValueError("device is gpu and bundle has no GPU")
        if any(amount < 0 for amount in self.bundle.values()):
            raise ValueError("bundle has a negative amount")
        if self.deployment.max_ongoing_requests < 2 * self.most_requests:
            # Beyond it Serve holds requests back where nobody sees or orders them; what comes
            # back from another pool is taken beyond the bound of the queue.
            raise ValueError(
                f"deployment.max_ongoing_requests {self.deployment.max_ongoing_requests} must be "
                "at least twice vllm.max_num_seqs and admission.max_queued together, "
                f"{2 * self.most_requests}"
            )
        return self

    @property
    def most_requests(self) -> int:
        """Requests that one replica runs and lets wait."""
        return self.vllm.max_num_seqs + self.admission.max_queued

    @property
    def headroom_slots(self) -> int:
        """Slots of one replica that deferrable work never takes."""
        return math.ceil(self.admission.headroom * self.vllm.max_num_seqs)


class AppSettings(Settings):
    """The whole application: the argument of `app.graph:build`."""

    model: ModelSettings
    routing: RoutingSettings
    limits: LimitSettings = LimitSettings()
    router: DeploymentSettings = DeploymentSettings(max_ongoing_requests=10_000)
    pools: Annotated[dict[str, PoolSettings], Field(min_length=1)]

    @model_validator(mode="after")
    def _destinations_exist(self) -> Self:
        for urgency, row in self.routing.table.items():
            for shape, cell in row.items():
                self._check_destination(f"routing.table.{urgency}.{shape}", cell)
        for name, pool in self.pools.items():
            spill = pool.admission.spill
            if spill is not None:
                self._check_destination(f"pools.{name}.admission.spill", spill)
                if spill.pool == name:
                    raise ValueError(f"pools.{name}.admission.spill.pool: a pool cannot be its own")
        return self

    def _check_destination(self, where: str, cell: DestinationSettings) -> None:
        if cell.pool not in self.pools:
            raise ValueError(f"{where}.pool: no pool is named {cell.pool!r}")
        if cell.priority and self.pools[cell.pool].vllm.scheduling_policy != "priority":
            raise ValueError(
                f"{where}.priority needs pools.{cell.pool}.vllm.scheduling_policy: priority"
            )

    @model_validator(mode="after")
    def _router_holds_what_the_pools_hold(self) -> Self:
        # A full router hears no pool and takes no chat.
        least = 2 * sum(pool.most_requests for pool in self.pools.values())
        if self.router.max_ongoing_requests < least:
            raise ValueError(
                f"router.max_ongoing_requests {self.router.max_ongoing_requests} must be at least "
                f"{least}, twice what one replica of each pool runs and lets wait"
            )
        return self

    @model_validator(mode="after")
    def _widest_request_fits_the_engines_bound(self) -> Self:
        for name, pool in self.pools.items():
            bound, least = pool.vllm.max_num_queued_reqs, self.limits.prompts
            if bound is not None and bound < pool.vllm.max_num_seqs + least:
                raise ValueError(
                    f"pools.{name}.vllm.max_num_queued_reqs {bound} must be at least max_num_seqs "
                    f"and limits.prompts together, {pool.vllm.max_num_seqs + least}"
                )
        return self

    @model_validator(mode="after")
    def _references_exist(self) -> Self:
        for name, pool in self.pools.items():
            kind, _, other = pool.proof.references.partition(":")
            if kind == "pool" and (other not in self.pools or other == name):
                raise ValueError(f"pools.{name}.proof.references: no other pool is {other!r}")
            if kind == "pool" and self.pools[other].proof.references.startswith("pool:"):
                raise ValueError(f"pools.{name}.proof.references: {other} is held against a pool")
        return self


class ApplicationSettings(Settings):
    """One application of a Serve config file."""

    name: str
    import_path: str
    route_prefix: str = "/"
    args: dict[str, Any]
    runtime_env: dict[str, Any] = Field(default_factory=dict)


class HttpSettings(Settings):
    """Ray Serve's own HTTP options."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)
    request_timeout_s: float | None = Field(default=None, gt=0)
    keep_alive_timeout_s: int | None = Field(default=None, ge=1)


class ServeFile(Settings):
    """A Serve config file, held stricter than Serve holds it."""

    proxy_location: Literal["EveryNode", "HeadOnly", "Disabled"] = "EveryNode"
    http_options: HttpSettings = HttpSettings()
    logging_config: dict[str, Any] = Field(default_factory=dict)
    applications: Annotated[list[ApplicationSettings], Field(min_length=1)]


def parse(args: dict[str, Any]) -> AppSettings:
    """Settings from the builder's arguments; `ConfigInvalid` names every bad key's path."""
    return _validated(AppSettings, args)


def load(path: Path) -> AppSettings:
    """Settings of the first application of a Serve config file."""
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigInvalid(f"{path}: {error}") from error
    return parse(_validated(ServeFile, content).applications[0].args)


def changed(settings: AppSettings, changes: list[str]) -> AppSettings:
    """Settings with some values replaced, each given as `path.to.key=value` in YAML's notation."""
    content = settings.model_dump(mode="json", exclude_unset=True)
    for change in changes:
        path, is_given, value = change.partition("=")
        *parents, key = path.split(".")
        place = content
        try:
            for parent in parents:
                place = place[parent]
            place[key] = yaml.safe_load(value)
        except (KeyError, TypeError, yaml.YAMLError) as error:
            raise ConfigInvalid(f"{path}: there is no such setting") from error
        if not is_given:
            raise ConfigInvalid(f"{path}: a change is written KEY=VALUE")
    return parse(content)


def effective(settings: AppSettings) -> str:
    """The settings with every default filled in, as YAML."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False)


def _validated(model: type[SettingsT], content: object) -> SettingsT:
    # Strictness by way of JSON: there enum members and tuples may be written as YAML writes them.
    try:
        return model.model_validate_json(json.dumps(content))
    except ValidationError as error:
        raise ConfigInvalid("\n".join(_line(e) for e in error.errors())) from error
    except (TypeError, ValueError) as error:
        raise ConfigInvalid(f"the configuration is not plain data: {error}") from error


def _line(error: Any) -> str:
    path = ".".join(str(part) for part in error["loc"]) or "configuration"
    message = error["msg"].removeprefix("Value error, ")
    shown = "" if isinstance(error["input"], dict | list) else f" (got {error['input']!r})"
    return f"{path}: {message}{shown}"
