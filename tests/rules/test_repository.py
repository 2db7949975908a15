"""What holds for the repository as a whole."""

import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from app import config

ROOT = Path(__file__).parents[2]
YAMLS = sorted(ROOT.glob("serve_configs/*.yaml"))


def test_there_are_configs() -> None:
    assert [path.name for path in YAMLS] == [
        "local.yaml",
        "local_without_fp8.yaml",
        "one_pool.yaml",
        "prod.yaml",
        "simulated.yaml",
    ]


@pytest.mark.parametrize("path", YAMLS, ids=lambda p: p.name)
def test_every_config_loads(path: Path) -> None:
    assert config.load(path).pools


def test_every_yaml_is_a_serve_config() -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "*.yaml", "*.yml"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    assert sorted(tracked) == [str(path.relative_to(ROOT)) for path in YAMLS]


def test_the_local_config_without_fp8_differs_in_its_types_only() -> None:
    trees = [
        config.load(ROOT / "serve_configs" / name).model_dump()
        for name in ("local.yaml", "local_without_fp8.yaml")
    ]
    for tree in trees:
        for pool in tree["pools"].values():
            pool["vllm"].pop("dtype")
            pool["vllm"].pop("kv_cache_dtype")
    assert trees[0] == trees[1]


def test_both_local_pools_have_the_same_kv_bytes() -> None:
    pools = config.load(ROOT / "serve_configs/local.yaml").pools
    assert {p.vllm.kv_cache_memory_bytes for p in pools.values()} == {2**30}


def test_kv_cache_dtypes_are_those_of_the_pinned_vllm() -> None:
    script = "from vllm.config.cache import CacheDType; import typing; " + (
        "print('\\n'.join(typing.get_args(CacheDType)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    known = [line for line in run.stdout.splitlines() if line and " " not in line]
    assert known == list(get_args(config.KvCacheDtype))


def test_an_argument_that_vllm_does_not_know_is_named(tmp_path: Path) -> None:
    text = (ROOT / "serve_configs/local.yaml").read_text()
    path = tmp_path / "bad.yaml"
    path.write_text(text.replace("enforce_eager: true", "enforce_eagr: true", 1))
    command = [Path(sys.executable).parent / "splitpool", "serve", path]
    run = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert run.returncode == 1
    assert "pools.latency.vllm.extra.enforce_eagr: " in run.stderr


def test_readme_commands_exist() -> None:
    """Each `make X` is a target, each file that a command names is there."""
    readme = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z-]+)", readme))
    assert named
    assert named <= targets
    for path in re.findall(r"serve_configs/[a-z_]+\.yaml", readme):
        assert (ROOT / path).is_file()


def test_the_lock_holds_no_cuda_and_no_address() -> None:
    lock = [
        line
        for line in (ROOT / "requirements/cpu.lock").read_text().splitlines()
        if not line.startswith("#")
    ]
    assert "torch==2.13.0+cpu" in lock
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9_.+!-]+", line) for line in lock)
    unwanted = ("nvidia", "triton", "torchvision", "torchaudio", "torchcodec")
    assert not [line for line in lock if line.lower().startswith(unwanted)]
