"""Slow planes interpolated in decoding before RoPE, in Triton's interpreter, against the float64 attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from coded import coded_layer, random_coded_case
from kernel_checks import check_decode
from ragged import layer, random_case

from rotor.format.columns import Columns
from rotor.format.kernel_config import LayerKernels, SlowPlanes
from rotor.format.layout import LayerLayout
from rotor.kernels.decode import launch as decode_launch
from rotor.kernels.decode.launch import decode_attention
from rotor.kernels.defaults import default_layer, with_slow_planes
from rotor.kernels.key_ranges import DecodeKeys
from rotor.kernels.layer_table import layer_parts
from rotor.kernels.slow_planes import TOLERANCE, choices
from rotor.kernels.truth import Sequence

SLOW = {64: SlowPlanes(16, 128, 7), 80: SlowPlanes(32, 128, 7), 128: SlowPlanes(32, 128, 7)}
"""By head_dim, at the base 10000 of the random cases: an error of 1.4e-7, below that of float32."""

KEYS = 201
SEQUENCES = [Sequence(1, 0, KEYS), Sequence(1, 130, 163), Sequence(0, 0, 0)]


def launches(layout: LayerLayout, head_dim: int) -> LayerKernels:
    return with_slow_planes(default_layer(layout, head_dim), SLOW[head_dim])


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize(
    ("size", "heads_per_kv", "head_dim", "ranks"),
    [
        (1, 16, 64, [(24, 16)]),
        (2, 3, 64, [(40, 24), (16, 32)]),
        (2, 2, 80, [(16, 16)]),
        (4, 2, 64, [(40, 24), (16, 16)]),
        (8, 1, 64, [(56, 40)]),
    ],
)
def test_groups_heads_and_odd_lengths(size, heads_per_kv, head_dim, ranks, page_size) -> None:
    """Slices that begin inside a block, blocks without keys before the first, and keys of no sequence poisoned."""
    layout = layer("pre", size, *ranks)
    case = random_case(layout, heads_per_kv, head_dim, 3, 1, KEYS, factor=1.3)
    check_decode(case, SEQUENCES, programs=3, page_size=page_size, kernels=launches(layout, head_dim))


@pytest.mark.parametrize("schedule", ["stream", "none"])
def test_wide_latents_by_pieces(schedule: str) -> None:
    layout = layer("pre", 2, (136, 40))
    case = random_case(layout, 1, 128, 3, 1, KEYS)
    check_decode(case, SEQUENCES, schedule=schedule, kernels=launches(layout, 128))


def test_holes_and_a_soft_cap() -> None:
    layout = layer("pre", 1, (24, 16))
    mask = torch.rand(2, KEYS, generator=torch.Generator().manual_seed(0)) < 0.6
    case = random_case(layout, 2, 64, 2, 1, KEYS)
    check_decode(case, [Sequence(1, 0, KEYS)] * 2, mask=mask, softcap=2.0, kernels=launches(layout, 64))


@pytest.mark.parametrize("columns", [Columns(n16=8, n8=8, n4=16, n2=16), Columns(n8=36, n4=72, n2=144)], ids=str)
def test_codes_and_their_constant_keys(columns: Columns) -> None:
    layout = coded_layer("pre", 2, (columns, Columns(n8=16, n4=8)))
    case = random_coded_case(layout, 2, 64, 3, 1, KEYS)
    assert case.constant_key is not None
    check_decode(case, SEQUENCES, page_size=16, kernels=launches(layout, 64))


@pytest.mark.parametrize(
    ("size", "heads_per_kv", "page_size"),
    [(1, 3, 16), (2, 2, 0), (4, 1, 16), pytest.param(8, 1, 0, marks=pytest.mark.slow)],
)
def test_joint_latents(size: int, heads_per_kv: int, page_size: int) -> None:
    """Values are read from the rows of the keys; two groups of different columns."""
    layout = coded_layer("pre", size, (Columns(n16=8, n8=8, n4=16, n2=16), None), (Columns(n8=8, n4=24), None))
    case = random_coded_case(layout, heads_per_kv, 64, 3, 1, KEYS)
    check_decode(case, SEQUENCES, programs=3, page_size=page_size, kernels=launches(layout, 64))


def test_a_joint_latent_wide_enough_to_be_read_in_pieces() -> None:
    layout = coded_layer("pre", 2, (Columns(n8=36, n4=72, n2=144), None))
    case = random_coded_case(layout, 1, 64, 1, 1, KEYS)
    mask = torch.rand(1, KEYS, generator=torch.Generator().manual_seed(0)) < 0.6
    check_decode(case, [Sequence(1, 0, KEYS)], mask=mask, softcap=2.0, kernels=launches(layout, 64))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_float16_within_twice_the_error_of_pytorch(head_dim: int) -> None:
    """At the tolerance of 16-bit numbers, whose fewest nodes are taken."""
    layout = layer("pre", 2, (40, 24))
    case = random_case(layout, 3, head_dim, 1, 1, 300).to("cpu", torch.float16)
    frequencies = [10000.0 ** (-2 * plane / head_dim) for plane in range(head_dim // 2)]
    for slow in list(choices(frequencies, TOLERANCE[2]))[:2]:
        kernels = with_slow_planes(default_layer(layout, head_dim), slow)
        check_decode(case, [Sequence(1, 0, 300)], programs=2, kernels=kernels)


def launched(
    kernels: LayerKernels, kv_len: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, Any], torch.Tensor]:
    """The constants of the decode kernel, and what it gives, for one group of two heads."""
    layout, seen = layer("pre", 2, (24, 16)), []
    case, own = random_case(layout, 2, 64, 1, 1, kv_len), decode_launch.launch
    assert case.query_basis is not None

    def record(kernel: Any, grid: Any, *arguments: Any, **constants: Any) -> None:
        seen.append(constants)
        own(kernel, grid, *arguments, **constants)

    with monkeypatch.context() as patch:
        patch.setattr(decode_launch, "launch", record)
        output, _ = decode_attention(
            case.query[:, :, 0],
            case.key,
            case.value,
            layer_parts(layout, 2, 64, kernels),
            DecodeKeys.all_of(1, kv_len, case.key.device),
            2,
            case.scaling,
            query_basis=case.query_basis,
            key_rotation=case.key_rotation,
        )
    return seen[0], output


def test_a_configuration_decides_and_short_caches_are_rebuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too few nodes show, so that the blocks are known to be those of the configuration."""
    whole = default_layer(layer("pre", 2, (24, 16)), 64)
    kernels = with_slow_planes(whole, SLOW[64])
    constants, output = launched(kernels, 200, monkeypatch)
    assert (constants["FAST"], constants["BLOCK"], len(constants["NODES"])) == (16, 128, 7)
    rebuilt, expected = launched(whole, 200, monkeypatch)
    assert (rebuilt["FAST"], rebuilt["NODES"]) == (32, ())
    assert (output - expected).norm() <= 4e-6 * expected.norm()
    coarse = replace(kernels, slow_planes=SlowPlanes(16, 128, 1))
    _, coarse_output = launched(coarse, 200, monkeypatch)
    assert (coarse_output - expected).norm() > 1e-2 * expected.norm()
    constants, output = launched(kernels, 127, monkeypatch)
    assert constants["NODES"] == ()
    torch.testing.assert_close(output, launched(whole, 127, monkeypatch)[1])
