"""Which calls the kernels serve, and what plain PyTorch does for the rest."""

from __future__ import annotations

import pytest
import torch
from support.kernel_cases import FORMS, CodedRow, layer, shape_of

from rotor.errors import UsageError
from rotor.kernels import dispatch
from rotor.kernels.dispatch import call_served, kernels_wanted, layer_served
from rotor.vllm.shards import shard_of

LAYOUT, SHAPE = layer(FORMS["block"], 1, CodedRow(n4=64)), shape_of(1, 4, 128, 128)


def serve(layout=LAYOUT, shape=SHAPE, mask=None, dtype=torch.float32, size=(1, 1)) -> bool:
    with torch.no_grad():
        states = torch.zeros(*size, 4, dtype=dtype)
        return layer_served(layout, shape, dtype, states.device) and call_served(states, mask)


@pytest.fixture
def capability(monkeypatch):
    """capability(major, minor): as if the GPUs of this machine had it."""

    def have(*version: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: version)
        dispatch.gpu_serves.cache_clear()

    yield have
    dispatch.gpu_serves.cache_clear()


@pytest.fixture
def no_triton(monkeypatch) -> None:
    monkeypatch.setattr(dispatch, "triton_installed", lambda: False)


def test_a_cpu_has_plain_pytorch(monkeypatch, capability) -> None:
    pytest.importorskip("triton")
    capability(8, 0)
    monkeypatch.delenv("ROTOR_ATTENTION", raising=False)
    assert not kernels_wanted(torch.device("cpu"))
    assert kernels_wanted(torch.device("cuda"))
    monkeypatch.setenv("ROTOR_ATTENTION", "reference")
    assert not kernels_wanted(torch.device("cuda"))
    monkeypatch.setenv("ROTOR_ATTENTION", "triton")
    assert kernels_wanted(torch.device("cpu"))


def test_without_triton_there_is_plain_pytorch(monkeypatch, capability, no_triton) -> None:
    capability(8, 0)
    monkeypatch.delenv("ROTOR_ATTENTION", raising=False)
    assert not kernels_wanted(torch.device("cuda"))
    monkeypatch.setenv("ROTOR_ATTENTION", "triton")
    with pytest.raises(UsageError, match="Triton is not installed"):
        kernels_wanted(torch.device("cpu"))


def test_old_gpus_and_those_of_amd_have_plain_pytorch(monkeypatch, caplog, capability) -> None:
    capability(7, 5)
    for _ in range(2):
        assert not dispatch.gpu_serves(torch.device("cuda"))
    assert [record.message.endswith("its compute capability is below 8.0") for record in caplog.records] == [True]
    dispatch.gpu_serves.cache_clear()
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert not dispatch.gpu_serves(torch.device("cuda"))
    assert "built for AMD's (ROCm 6.2)" in caplog.text


def test_another_choice_is_refused(monkeypatch) -> None:
    monkeypatch.setenv("ROTOR_ATTENTION", "fast")
    with pytest.raises(UsageError, match="ROTOR_ATTENTION=fast: expected one of auto, triton, reference"):
        kernels_wanted(torch.device("cpu"))


def test_what_the_kernels_do_not_express_is_left_to_pytorch(monkeypatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("ROTOR_ATTENTION", "triton")
    assert serve()
    assert serve(mask=torch.ones(1, 1, 3, 9, dtype=torch.bool), size=(2, 3))
    assert not serve(mask=torch.zeros(2, 1, 3, 3), size=(2, 3))  # added to the logits
    assert not serve(mask=torch.ones(2, 4, 3, 3, dtype=torch.bool), size=(2, 3))
    assert not serve(mask=torch.ones(2, 1, 2, 3, dtype=torch.bool), size=(2, 3))
    assert not serve(dtype=torch.float64)
    assert not serve(size=(0, 1))
    assert serve(layer(FORMS["block"], 1, CodedRow(n4=1007)))
    assert not serve(layer(FORMS["block"], 1, CodedRow(n4=1040)))
    assert not serve(shape=shape_of(1, 4, 512, 128))
    assert not call_served(torch.zeros(1, 1, 4), None)  # gradients are wanted


@pytest.mark.parametrize("groups", [1, 2])
def test_ranks_of_a_tensor_parallel_model_are_served(monkeypatch, groups: int) -> None:
    """Those that share a group too."""
    pytest.importorskip("triton")
    monkeypatch.setenv("ROTOR_ATTENTION", "triton")
    layout, shape = layer(FORMS["block"], 2, *[CodedRow(n4=64)] * groups), shape_of(2 * groups, 4, 16, 16)
    for rank in range(2):
        shard = shard_of(layout, shape, "", rank, 2)
        assert (shard.layout.group_size, len(shard.layout.groups)) == ((1, 1) if groups == 1 else (2, 1))
        assert serve(shard.layout, shard.shape)


def test_float32_on_a_gpu_is_left_to_pytorch(monkeypatch, capability) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("ROTOR_ATTENTION", "triton")
    capability(9, 0)
    served = {
        (dtype, device): layer_served(LAYOUT, SHAPE, dtype, torch.device(device))
        for dtype in (torch.float16, torch.bfloat16, torch.float32)
        for device in ("cpu", "cuda")
    }
    assert [case for case, is_served in served.items() if not is_served] == [(torch.float32, "cuda")]
