import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from app import config
from app.errors import ConfigInvalid

LOCAL = Path(__file__).parents[2] / "serve_configs" / "local.yaml"
ARGS: dict[str, Any] = yaml.safe_load(LOCAL.read_text())["applications"][0]["args"]


def set_path(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(args: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        for name in parents:
            args = args.setdefault(name, {})
        args[last] = value

    return change


SCALING = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 4}
DEPLOYMENT = "pools.latency.deployment"


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("pools.latency.vllm.kv_cache_dtype", "fp9", "pools.latency.vllm.kv_cache_dtype"),
        ("pools.latency.vllm.max_num_seqs", -1, "pools.latency.vllm.max_num_seqs"),
        ("pools.latency.vllm.max_num_seqs", "8", "pools.latency.vllm.max_num_seqs"),
        ("pools.latency.vllm.max_nun_seqs", 8, "pools.latency.vllm.max_nun_seqs"),
        ("pools.latency.vllm.extra.dtype", "half", "extra repeats dtype"),
        (f"{DEPLOYMENT}.min_replica", 1, f"{DEPLOYMENT}.min_replica"),
        (
            DEPLOYMENT,
            {"autoscaling_config": {**SCALING, "max_ongoing_requests": 5}},
            f"{DEPLOYMENT}.autoscaling_config.max_ongoing_requests",
        ),
        (
            DEPLOYMENT,
            {"autoscaling_config": {**SCALING, "min_replicas": 3}},
            f"{DEPLOYMENT}.autoscaling_config: max_replicas 2 is below min_replicas 3",
        ),
        (
            DEPLOYMENT,
            {"autoscaling_config": {**SCALING, "target_ongoing_requests": 0}},
            f"{DEPLOYMENT}.autoscaling_config.target_ongoing_requests",
        ),
        (f"{DEPLOYMENT}.autoscaling_config", SCALING, "exclude each other"),
        ("pools.latency.device", "gpu", "bundle has no GPU"),
        ("pools.latency.accelerator_type", "H100", "accelerator_type needs device gpu"),
        ("pools.latency.engine", "simulated", "simulation is not set"),
        ("pools.latency.proof.references", "pool:nowhere", "pools.latency.proof.references"),
        ("routing.table.urgent.short.pool", "nowhere", "routing.table.urgent.short.pool"),
        ("pools.latency.admission.headroom", 1.0, "pools.latency.admission.headroom"),
        ("pools.latency.admission.lending.share", 0, "pools.latency.admission.lending.share"),
        ("pools.latency.admission.spill.pool", "nowhere", "pools.latency.admission.spill.pool"),
        ("pools.latency.admission.spill", {"pool": "latency"}, "a pool cannot be its own"),
        ("pools.throughput.admission.max_queued", 449, "must be at least twice vllm.max_num_seqs"),
        ("router", {"max_ongoing_requests": 600}, "router.max_ongoing_requests 600 must be"),
        ("pools.latency.vllm.max_num_queued_reqs", 24, "max_num_queued_reqs 24 must be at least"),
        ("routing.max_wait_s", {"urgent": 0.0}, "routing.max_wait_s.urgent"),
        ("routing.max_wait_s", {"soon": 1.0}, "routing.max_wait_s.soon"),
        ("routing.table.urgent.short.priority", -5, "scheduling_policy: priority"),
        ("routing.table.urgent", {"long": {"pool": "latency"}}, "table.urgent lacks short"),
        ("routing.long_prompt_tokens", 0, "routing.long_prompt_tokens"),
        ("speed", "fast", "speed"),
    ],
)
def test_a_bad_value_is_refused_with_its_path(path: str, value: Any, named: str) -> None:
    args = copy.deepcopy(ARGS)
    set_path(path, value)(args)
    with pytest.raises(ConfigInvalid) as refusal:
        config.parse(args)
    assert named in str(refusal.value)


def test_a_misplaced_key_of_the_file_itself_is_refused(tmp_path: Path) -> None:
    content = yaml.safe_load(LOCAL.read_text())
    content["http_option"] = {"port": 1}
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigInvalid, match="http_option"):
        config.load(path)


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match=r"none\.yaml"):
        config.load(tmp_path / "none.yaml")


def test_the_effective_configuration_is_a_configuration() -> None:
    settings = config.parse(ARGS)
    assert config.parse(yaml.safe_load(config.effective(settings))) == settings
    assert "graceful_shutdown_timeout_s: 20.0" in config.effective(settings)


@pytest.mark.parametrize("name", ["local", "one_pool", "simulated", "prod"])
def test_the_effective_configuration_is_the_configuration(name: str) -> None:
    """parse(render(x)) = x: what is printed can be served again."""
    settings = config.load(LOCAL.with_name(f"{name}.yaml"))
    assert config.parse(yaml.safe_load(config.effective(settings))) == settings


@pytest.mark.parametrize(
    ("headroom", "slots"), [(0.0, 0), (0.01, 1), (0.25, 2), (0.26, 3), (0.99, 8)]
)
def test_headroom_is_rounded_up_to_whole_slots(headroom: float, slots: int) -> None:
    args = copy.deepcopy(ARGS)
    set_path("pools.latency.admission.headroom", headroom)(args)
    assert config.parse(args).pools["latency"].headroom_slots == slots
