"""Says in one line what is wrong with a model directory, before an engine dies of it."""

import json
from pathlib import Path

from app.config import AppSettings
from app.errors import ModelInvalid


def check(settings: AppSettings) -> None:
    """`ModelInvalid` if a real engine is to serve a model that cannot be served."""
    if any(pool.engine == "vllm" for pool in settings.pools.values()):
        check_source(Path(settings.model.source))


def check_source(source: Path) -> None:
    """`ModelInvalid` unless `source` is a directory with a usable `config.json`."""
    if not source.is_dir():
        raise ModelInvalid(
            f"model.source: {source} is not a directory; nothing is downloaded at the start, "
            "so put the model there first (`splitpool model` makes the local one)"
        )
    path = source / "config.json"
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise ModelInvalid(f"model.source: {source} holds no readable config.json") from error
    except ValueError as error:
        raise ModelInvalid(f"model.source: {path} is not valid JSON: {error}") from error
    if not isinstance(config, dict) or not config.get("architectures"):
        raise ModelInvalid(f"model.source: {path} names no architectures")
