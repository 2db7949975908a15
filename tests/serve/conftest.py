"""One Ray for the tier, with logical GPUs, and one simulated application on it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
import yaml
from ray import serve

from app.graph import build

CONFIGS = Path(__file__).parents[2] / "serve_configs"
PORT = 8765
URL = f"http://127.0.0.1:{PORT}"


def app_args(name: str) -> dict[str, Any]:
    """The builder's arguments in one of the shipped files."""
    args: dict[str, Any] = yaml.safe_load((CONFIGS / name).read_text())["applications"][0]["args"]
    return args


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    ray.init(
        num_cpus=32,
        num_gpus=4,
        resources={"accelerator_type:H100": 1, "accelerator_type:L40S": 1},
        include_dashboard=False,
        logging_level="ERROR",
    )
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    yield
    serve.shutdown()
    ray.shutdown()


@pytest.fixture(scope="session")
def simulated(cluster: None) -> str:
    """The address of `simulated.yaml`'s application."""
    serve.run(build(app_args("simulated.yaml")), name="splitpool", route_prefix="/sim")
    wait_for(f"{URL}/sim/health")
    return f"{URL}/sim"


def wait_for(health: str, limit_s: float = 60.0) -> None:
    """Until the application says that every pool is there."""
    import time

    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if httpx.get(health, timeout=5).status_code == 200:
            return
        time.sleep(0.2)
    raise AssertionError(f"{health} was not healthy within {limit_s} s")
