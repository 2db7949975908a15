"""One Ray for the tier, with logical GPUs, and one simulated application on it."""

from collections.abc import Iterator

import pytest
import ray
from ray import serve

from app.graph import build
from tests.serve.support import PORT, URL, app_args, wait_for


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    ray.init(
        address="local",
        num_cpus=32,
        num_gpus=4,
        resources={"accelerator_type:H100": 1, "accelerator_type:L40S": 1},
        include_dashboard=False,
        logging_level="ERROR",
    )
    serve.start(
        http_options={"host": "127.0.0.1", "port": PORT},
        logging_config={"enable_access_log": False},
    )
    yield
    serve.shutdown()
    ray.shutdown()


@pytest.fixture(scope="session")
def simulated(cluster: None) -> str:
    """The address of `simulated.yaml`'s application."""
    serve.run(build(app_args("simulated.yaml")), name="splitpool", route_prefix="/sim")
    wait_for(f"{URL}/sim/health")
    return f"{URL}/sim"
