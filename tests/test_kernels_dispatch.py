"""Which calls the kernels serve, and what plain PyTorch does for the rest."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from ragged import layer, random_case

from rotor.errors import UsageError
from rotor.format.layout import GroupLayout, LayerLayout
from rotor.kernels import dispatch
from rotor.kernels.dispatch import kernels_serve, kernels_wanted
from rotor.kernels.gpu import Gpu
from rotor.kernels.reference import grouped_attention
from rotor.runtime.attention import _check_mask

POST, PRE = layer("post", 1, (64, 64)), layer("pre", 8, (256, 256))


def serve(
    layout: LayerLayout = POST,
    mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float32,
    fits: bool = True,
    size: tuple[int, int] = (1, 1),
) -> bool:
    with torch.no_grad():
        return kernels_serve(torch.zeros(*size, 4, dtype=dtype), layout, 4, 128, mask, dropout, fits)


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
    assert not serve(mask=torch.zeros(2, 1, 3, 3), size=(2, 3))
    assert not serve(dropout=0.1)
    assert not serve(dtype=torch.float64)
    assert not serve(fits=False)
    assert not serve(layer("post", 8, (528, 64)))
    assert serve(layer("pre", 8, (520, 512)))
    assert not serve(layer("pre", 8, (1032, 64)))
    assert not serve(layer("pre", 8, (64, 520)))
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


@pytest.mark.parametrize(
    ("shape", "served"),
    [
        ((3, 1, 5, 7), True),
        ((1, 1, 5, 7), True),
        ((3, 1, 1, 7), True),
        ((1, 1, 1, 1), True),
        ((3, 8, 5, 7), False),
        ((1, 8, 5, 7), False),
        ((3, 8, 1, 7), False),
        ((2, 1, 5, 7), False),
        ((3, 1, 4, 7), False),
        ((3, 1, 5, 0), False),
        ((3, 5, 7), False),
    ],
    ids=str,
)
def test_masks_by_shape(shape, served, monkeypatch) -> None:
    monkeypatch.setattr(dispatch, "triton_installed", lambda: True)
    monkeypatch.setenv("ROTOR_ATTENTION", "triton")
    assert serve(mask=torch.ones(shape, dtype=torch.bool), size=(3, 5)) == served
    assert not serve(mask=torch.zeros(shape), size=(3, 5))
    assert not serve(size=(0, 5))


@pytest.mark.parametrize("choice", ["auto", "triton"])
def test_gpus_of_amd_have_plain_pytorch(choice, monkeypatch, caplog) -> None:
    monkeypatch.setattr(dispatch, "triton_installed", lambda: True)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setenv("ROTOR_ATTENTION", choice)
    dispatch._warn_of_amd.cache_clear()
    for _ in range(2):
        assert not kernels_wanted(torch.device("cuda", 1))
    (record,) = caplog.records
    assert "built for AMD's (ROCm 6.4)" in record.getMessage()


@pytest.mark.parametrize("domain", ["post", "pre", "none"])
@pytest.mark.parametrize("seq_len", [1, 4])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("additive", [False, True])
def test_masks_that_differ_between_heads(domain, seq_len, softcap, additive) -> None:
    """Each head of the plain path as under a mask of its own; classes differ, and the KV heads are reordered."""
    groups = tuple(GroupLayout((head,), *ranks) for head, ranks in [(2, (8, 8)), (0, (8, 4)), (1, (4, 4))])
    layout, heads_per_kv, kv_len = LayerLayout(domain, domain == "none", groups), 2, 6
    case = random_case(layout, heads_per_kv, 8, 2, seq_len, kv_len)
    allowed = torch.rand(2, 6, seq_len, kv_len, generator=torch.Generator().manual_seed(1)) < 0.7
    allowed[..., 0] = True
    mask = torch.where(allowed, 0.0, -torch.inf) if additive else allowed

    def attend(mask: torch.Tensor) -> torch.Tensor:
        return grouped_attention(
            case.query, case.key[:, None], case.value[:, None], case.parameters(softcap), case.key_rotation, mask
        )

    got, column = attend(mask), 0
    for group in groups:
        for head in range(2 * group.kv_heads[0], 2 * group.kv_heads[0] + 2):
            columns = slice(column, column + group.v_rank)
            torch.testing.assert_close(got[..., columns], attend(mask[:, head : head + 1])[..., columns])
            column += group.v_rank
    assert column == got.shape[-1]
    torch.testing.assert_close(attend(mask[:1]), attend(mask[:1].expand(2, -1, -1, -1)))


def test_a_mask_that_does_not_fit_is_named() -> None:
    """The kernels do not look: what is no mask of the cached keys must not come to them."""
    module = SimpleNamespace(layer_idx=3, layout=POST, heads_per_kv=4)
    for shape in ((2, 1, 5, 9), (2, 1, 4, 7), (3, 1, 5, 7), (2, 2, 5, 7), (2, 1, 5, 0)):
        with pytest.raises(UsageError, match=rf"layer 3: an attention mask of {re.escape(str(list(shape)))}, expected"):
            _check_mask(torch.ones(shape), module, 2, 5, 7)  # type: ignore[arg-type]
    _check_mask(torch.ones(1, 4, 1, 7), module, 2, 5, 7)  # type: ignore[arg-type]
