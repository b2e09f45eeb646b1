"""Strides of more than 2^31 elements, in Triton's interpreter: tensors that lie in a sparse file of many gigabytes.

Strides of 2^32 elements: an offset of 32 bits would come out as 0, and the first sequence's rows be read for others.
"""

from __future__ import annotations

import numpy
import pytest
import torch
from kernel_checks import relative_error
from ragged import RaggedCase, layer, random_case
from torch import Tensor

from rotor.kernels.attention import packed_attention
from rotor.kernels.key_ranges import PrefillKeys
from rotor.kernels.prefill.launch import prefill_attention
from rotor.kernels.projection.rotation import rotate_and_project

STRIDE = 1 << 32


@pytest.fixture
def far_apart(tmp_path):
    """far_apart(x, dim): a view equal to x, of two entries along `dim`, STRIDE elements apart."""
    counter = iter(range(100))

    def move(x: Tensor, dim: int) -> Tensor:
        assert x.shape[dim] == 2
        length = STRIDE + x[0].numel() * x.shape[0]
        path = tmp_path / str(next(counter))
        room = torch.from_numpy(numpy.memmap(path, dtype=numpy.float32, mode="w+", shape=(length,)))
        strides = list(x.contiguous().stride())
        strides[dim] = STRIDE
        view = room.as_strided(x.shape, strides)
        view.copy_(x)
        return view

    return move


def attend(case: RaggedCase, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return packed_attention(
        query, key.unsqueeze(1), value.unsqueeze(1), case.parameters(), case.head_dim, case.key_rotation
    )


@pytest.mark.parametrize("domain", ["none", "pre"])
@pytest.mark.parametrize("seq_len", [1, 5])
def test_sequences_of_a_large_cache(domain, seq_len, far_apart) -> None:
    case = random_case(layer(domain, 1, (16, 16)), 1, 16, 2, seq_len, 8)
    expected = attend(case, case.query, case.key, case.value)
    got = attend(case, far_apart(case.query, 0), far_apart(case.key, 0), far_apart(case.value, 0))
    assert torch.equal(got, expected)


@pytest.mark.parametrize("rebuilt", [False, True])
def test_rows_and_heads_of_a_large_cache(rebuilt, far_apart) -> None:
    case = random_case(layer("pre", 1, (16, 16), (16, 16)), 1, 16, 1, 2, 2)
    keys = PrefillKeys.causal(torch.tensor([2]), torch.tensor([0]), torch.tensor([2]), 2)

    def prefill(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return prefill_attention(
            query, key, value, case.layout, keys, 1, case.scaling, query_basis=case.query_basis,
            key_rotation=case.key_rotation, rebuilt=rebuilt,
        )[0]  # fmt: skip

    expected = prefill(case.query, case.key, case.value)
    for query in (far_apart(case.query, 1), far_apart(case.query, 2)):
        assert torch.equal(prefill(query, far_apart(case.key, 1), far_apart(case.value, 1)), expected)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_new_queries_and_keys(dim, far_apart) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, 2, 2, 16, generator=generator) for _ in range(2))
    cos, sin = (torch.randn(2, 2, 16, generator=generator) for _ in range(2))
    basis = torch.randn(16, 32, generator=generator)
    layout = layer("post", 1, (16, 16), (16, 16))
    expected = rotate_and_project(query, key, cos, sin, layout, 1, basis, basis)
    got = rotate_and_project(far_apart(query, dim), far_apart(key, dim), cos, sin, layout, 1, basis, basis)
    for a, b in zip(got, expected, strict=True):
        assert relative_error(a, b.double()) == 0.0
