"""Which calls the kernels serve, and what plain PyTorch does for the rest."""

from __future__ import annotations

import pytest
import torch
from ragged import layer

from rotor.errors import UsageError
from rotor.kernels import dispatch
from rotor.kernels.dispatch import kernels_serve, kernels_wanted
from rotor.kernels.shapes import Gpu
from rotor.layout import LayerLayout

POST, PRE = layer("post", 1, (64, 64)), layer("pre", 8, (256, 256))


def serve(
    layout: LayerLayout = POST,
    mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float32,
    fits: bool = True,
) -> bool:
    with torch.no_grad():
        return kernels_serve(torch.zeros(1, 1, 4, dtype=dtype), layout, 4, 128, mask, dropout, fits)


def test_a_cpu_and_a_missing_triton_have_plain_pytorch(monkeypatch) -> None:
    monkeypatch.delenv("ROTOR_ATTENTION", raising=False)
    monkeypatch.setattr(dispatch, "triton_installed", lambda: True)
    assert not kernels_wanted(torch.device("cpu"))
    assert kernels_wanted(torch.device("cuda"))
    monkeypatch.setattr(dispatch, "triton_installed", lambda: False)
    assert not kernels_wanted(torch.device("cuda"))


def test_the_environment_chooses(monkeypatch) -> None:
    monkeypatch.setattr(dispatch, "triton_installed", lambda: True)
    monkeypatch.setenv("ROTOR_ATTENTION", "reference")
    assert not kernels_wanted(torch.device("cuda"))
    monkeypatch.setenv("ROTOR_ATTENTION", "triton")
    assert kernels_wanted(torch.device("cpu"))
    monkeypatch.setattr(dispatch, "triton_installed", lambda: False)
    with pytest.raises(UsageError, match="Triton is not installed"):
        kernels_wanted(torch.device("cpu"))
    monkeypatch.setenv("ROTOR_ATTENTION", "fast")
    with pytest.raises(UsageError, match="ROTOR_ATTENTION=fast: expected one of auto, triton, reference"):
        kernels_wanted(torch.device("cpu"))


def test_what_the_kernels_do_not_express_is_left_to_pytorch(monkeypatch) -> None:
    monkeypatch.setattr(dispatch, "triton_installed", lambda: True)
    monkeypatch.setenv("ROTOR_ATTENTION", "triton")
    assert serve()
    assert serve(PRE)
    assert serve(mask=torch.ones(2, 1, 3, 3, dtype=torch.bool))
    assert not serve(mask=torch.zeros(2, 1, 3, 3))
    assert not serve(mask=torch.ones(2, 8, 3, 3, dtype=torch.bool))
    assert not serve(dropout=0.1)
    assert not serve(dtype=torch.float64)
    assert not serve(fits=False)
    assert not serve(layer("post", 8, (528, 64)))
    assert not serve(layer("pre", 8, (264, 64)))
    assert not kernels_serve(torch.zeros(1, 1, 4), POST, 4, 128, None, 0.0, True)  # gradients are wanted


def test_a_gpu_of_little_shared_memory_leaves_wide_tiles_to_pytorch(monkeypatch, caplog) -> None:
    monkeypatch.setattr(dispatch, "triton_installed", lambda: True)
    monkeypatch.setenv("ROTOR_ATTENTION", "triton")
    monkeypatch.setattr(dispatch, "gpu_of", lambda device: Gpu.of_capability(86))
    assert serve(layer("post", 8, (504, 512)), dtype=torch.bfloat16)
    assert not caplog.records
    for _ in range(2):
        assert not serve(layer("post", 8, (504, 512)))
    (record,) = caplog.records
    assert "ranks up to 504 + 512 in torch.float32" in record.getMessage()
    assert "99 KB of shared memory" in record.getMessage()
