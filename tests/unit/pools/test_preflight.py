from pathlib import Path

import pytest
import torch

from app.errors import ConfigInvalid, ModelInvalid
from app.pools.preflight import check_cache, check_source


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "not a directory"),
        ("", "no readable config.json"),
        ("{", "not valid JSON"),
        ('{"a": 1}', "names no architectures"),
    ],
)
def test_a_model_that_cannot_be_served_is_one_line(
    tmp_path: Path, content: str | None, complaint: str
) -> None:
    source = tmp_path / "model"
    if content is not None:
        source.mkdir()
        if content:
            (source / "config.json").write_text(content)
    with pytest.raises(ModelInvalid, match=complaint) as refusal:
        check_source(source)
    assert "model.source" in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("capable", ["_is_avx512_supported", "_is_amx_tile_supported", None])
def test_fp8_is_refused_by_its_key_on_a_cpu_that_cannot_compute_it(
    monkeypatch: pytest.MonkeyPatch, capable: str | None
) -> None:
    for name in ("_is_avx512_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda answer=name == capable: answer)
    check_cache("pools.p.vllm.kv_cache_dtype", "auto")
    if capable:
        check_cache("pools.p.vllm.kv_cache_dtype", "fp8")
        return
    with pytest.raises(ConfigInvalid, match=r"pools\.p\.vllm\.kv_cache_dtype: fp8_e4m3 needs"):
        check_cache("pools.p.vllm.kv_cache_dtype", "fp8_e4m3")
