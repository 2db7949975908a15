"""What the tests of this tier share besides fixtures."""

import contextlib
import time
from pathlib import Path
from typing import Any

import httpx
import yaml

CONFIGS = Path(__file__).parents[2] / "serve_configs"
PORT = 8765
URL = f"http://127.0.0.1:{PORT}"


def app_args(name: str) -> dict[str, Any]:
    """The builder's arguments in one of the shipped files."""
    args: dict[str, Any] = yaml.safe_load((CONFIGS / name).read_text())["applications"][0]["args"]
    return args


def wait_for(health: str, limit_s: float = 60.0) -> None:
    """Until the application says that every pool is there."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        # The proxy keeps a request waiting while there is no router.
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(health, timeout=5).status_code == 200:
                return
        time.sleep(0.2)
    raise AssertionError(f"{health} was not healthy within {limit_s} s")


def pool_row(url: str, name: str) -> dict[str, Any]:
    rows = httpx.get(f"{url}/v1/pools", timeout=10).json()["data"]
    found: dict[str, Any] = next(row for row in rows if row["id"] == name)
    return found


def until(condition: Any, limit_s: float) -> bool:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.1)
    return False
