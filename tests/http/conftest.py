"""One real application for the tier: `make serve`, as the README has it.

`SPLITPOOL_URL` names a server that runs already, for work on the tests themselves.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
URL = "http://127.0.0.1:8000"
START_LIMIT_S = 400
STOP_LIMIT_S = 60
OFFLINE = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if "SPLITPOOL_URL" in os.environ:
        yield os.environ["SPLITPOOL_URL"]
        return
    log = tmp_path_factory.mktemp("serve") / "serve.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            ["make", "serve"],
            cwd=ROOT,
            env={**os.environ, **OFFLINE},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            wait_until_healthy(process, log)
            yield URL
        finally:
            stop(process)


def wait_until_healthy(process: "subprocess.Popen[bytes]", log: Path) -> None:
    end = time.monotonic() + START_LIMIT_S
    while time.monotonic() < end and process.poll() is None:
        try:
            if httpx.get(f"{URL}/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(1)
    raise AssertionError(f"the server did not come up:\n{log.read_text()[-4000:]}")


def stop(process: "subprocess.Popen[bytes]") -> None:
    """End the application and the Ray that it started."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    subprocess.run([BIN / "ray", "stop"], check=False, capture_output=True, timeout=STOP_LIMIT_S)
