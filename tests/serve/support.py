"""What the tests of this tier share besides fixtures."""

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
        if httpx.get(health, timeout=5).status_code == 200:
            return
        time.sleep(0.2)
    raise AssertionError(f"{health} was not healthy within {limit_s} s")
