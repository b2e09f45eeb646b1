"""Masks that are broadcast, in Triton's interpreter: one for all sequences, one row for all queries, and empty ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ragged import RaggedCase, layer, random_case
from torch import Tensor

from rotor.kernels import attention
from rotor.kernels.attention import packed_attention

BATCH, KV_LEN = 3, 40


def attend(case: RaggedCase, mask: Tensor, layer_idx: int | None = None) -> Tensor:
    return packed_attention(
        case.query,
        case.key.unsqueeze(1),
        case.value.unsqueeze(1),
        case.parameters(),
        case.head_dim,
        case.key_rotation,
        mask,
        layer_idx=layer_idx,
    )


@pytest.mark.parametrize("domain", ["none", "pre"])
@pytest.mark.parametrize("seq_len", [1, 5])
def test_a_broadcast_mask_is_as_the_expanded_one(domain, seq_len) -> None:
    case = random_case(layer(domain, 1, (16, 24), (16, 8)), 2, 16, BATCH, seq_len, KV_LEN)
    generator = torch.Generator().manual_seed(0)
    for shape in ((1, 1, seq_len, KV_LEN), (BATCH, 1, 1, KV_LEN), (1, 1, 1, KV_LEN), (BATCH, 1, seq_len, 1)):
        mask = torch.rand(shape, generator=generator) < 0.5
        whole = mask.expand(BATCH, 1, seq_len, KV_LEN).contiguous()
        assert torch.equal(attend(case, mask), attend(case, whole))


@pytest.mark.parametrize("seq_len", [1, 5])
def test_one_mask_for_batches_of_two_sizes(seq_len) -> None:
    """What is remembered of a mask must not serve another batch."""
    mask = torch.rand(1, 1, seq_len, KV_LEN, generator=torch.Generator().manual_seed(0)) < 0.5
    for batch_size in (1, BATCH, 2):
        case = random_case(layer("none", 1, (16, 24)), 2, 16, batch_size, seq_len, KV_LEN)
        assert torch.equal(attend(case, mask), attend(case, mask.repeat(batch_size, 1, 1, 1)))


@pytest.mark.parametrize("seq_len", [1, 5])
def test_a_mask_that_hides_everything_gives_zeros(seq_len) -> None:
    case = random_case(layer("none", 1, (16, 24)), 2, 16, BATCH, seq_len, KV_LEN)
    assert not attend(case, torch.zeros(1, 1, seq_len, KV_LEN, dtype=torch.bool)).any()


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The shapes for which ranges were computed."""
    shapes: list[Any] = []
    new = attention.ranges_of
    monkeypatch.setattr(
        attention, "ranges_of", lambda mask, shape, device: shapes.append(shape) or new(mask, shape, device)
    )
    return shapes


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("seq_len", [1, 5])
def test_a_mask_is_looked_at_once_a_step(seq_len, graph, computed, monkeypatch) -> None:
    """In inference mode, and in a CUDA graph, a later layer of the same step takes what an earlier one computed; the
    next step begins anew, and sees a mask that was written over.
    """
    monkeypatch.setattr(attention, "_capturing", lambda device: graph)
    case = random_case(layer("none", 1, (16, 24)), 2, 16, BATCH, seq_len, KV_LEN)
    with torch.inference_mode(not graph):
        mask = torch.rand(BATCH, 1, seq_len, KV_LEN, generator=torch.Generator().manual_seed(0)) < 0.5
        steps = [[attend(case, mask, layer_idx) for layer_idx in (0, 1, 3)]]
        assert len(computed) == 1
        mask.logical_not_()
        steps.append([attend(case, mask, layer_idx) for layer_idx in (0, 1, 3)])
        assert len(computed) == 2
        steps.append([attend(case, mask.clone()) for _ in range(2)])
        assert all(torch.equal(outputs[0], output) for outputs in steps for output in outputs)
        assert not torch.equal(steps[0][0], steps[1][0])
        assert torch.equal(steps[1][0], steps[2][0])
    before = len(computed)
    attend(case, mask)
    attend(case, mask)
    assert len(computed) == before + 2  # who gives no layer, gets no ranges of another


def test_with_versions_a_mask_is_looked_at_once(computed) -> None:
    case = random_case(layer("none", 1, (16, 24)), 2, 16, BATCH, 1, KV_LEN)
    mask = torch.ones(BATCH, 1, 1, KV_LEN, dtype=torch.bool)
    for layer_idx in (1, 0, 0):
        attend(case, mask, layer_idx)
    assert len(computed) == 1
    mask[:, :, :, :3] = False
    attend(case, mask, 2)
    assert len(computed) == 2


def test_a_model_gives_its_layers_indices(monkeypatch) -> None:
    from rotor.runtime import attention as runtime

    seen = []
    monkeypatch.setattr(attention, "packed_attention", lambda *args, **kwargs: seen.append(kwargs["layer_idx"]))
    module = runtime.RotorAttention.__new__(runtime.RotorAttention)
    torch.nn.Module.__init__(module)
    module.layout, module.layer_idx, module.heads_per_kv, module.head_dim = layer("none", 1, (16, 24)), 7, 2, 16
    module.softcap, module.scaling, module.query_basis, module.key_constant = None, 1.0, None, None
    module.schedule, module.kernels = "stream", None
    runtime.rotor_attention_forward(module, *torch.zeros(3, 1, 1, 4, 16), None, use_kernels=True)
    assert seen == [7]
