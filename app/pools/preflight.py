"""Says in one line what no engine could start with: a model, an argument, a type of cache."""

import json
from dataclasses import fields
from pathlib import Path

from app.config import AppSettings
from app.errors import ConfigInvalid, ModelInvalid


def check(settings: AppSettings) -> None:
    """`ModelInvalid` if a model, or the answers it is held against, cannot be used."""
    for name, pool in settings.pools.items():
        if pool.engine == "vllm":
            check_source(Path(settings.model.source))
        references = pool.proof.references
        if ":" not in references and references not in ("known", "none"):
            _check_references(f"pools.{name}.proof.references", Path(references))


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


def _check_references(key: str, path: Path) -> None:
    try:
        json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelInvalid(f"{key}: {path} holds no reference answers: {error}") from error


def check_arguments(settings: AppSettings) -> None:
    """`ConfigInvalid` for an argument that vLLM does not know. Importing vLLM takes seconds."""
    extras = {n: p.vllm.extra for n, p in settings.pools.items() if p.engine == "vllm"}
    if not any(extras.values()):
        return
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import FrontendArgs

    known = {f.name for kind in (AsyncEngineArgs, FrontendArgs) for f in fields(kind)}
    for name, extra in extras.items():
        unknown = sorted(set(extra) - known)
        if unknown:
            raise ConfigInvalid(
                f"pools.{name}.vllm.extra.{unknown[0]}: vLLM knows no such argument"
            )


def check_cpu(settings: AppSettings) -> None:
    """`ConfigInvalid` for a KV cache that this machine's CPU cannot compute. Imports torch."""
    for name, pool in settings.pools.items():
        if pool.engine == "vllm" and pool.device == "cpu":
            check_cache(f"pools.{name}.vllm.kv_cache_dtype", pool.vllm.kv_cache_dtype)


def check_cache(key: str, kind: str) -> None:
    """The condition of vLLM 0.29.0's CPU attention, which says so once its engine has died."""
    if kind.startswith("fp8") and not _computes_fp8():
        raise ConfigInvalid(
            f"{key}: {kind} needs a CPU with AVX-512 or AMX and this one has neither; "
            "auto keeps the cache in the type of vllm.dtype, as "
            "serve_configs/local_without_fp8.yaml does"
        )


def _computes_fp8() -> bool:
    import torch

    return torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()
