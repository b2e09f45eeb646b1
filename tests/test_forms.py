"""Forms of keys through rewriting and plain attention, in float64: what equals what, and full rank the source."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support.compare import relative_error
from support.random_layers import row_scale_of
from torch import Tensor

from rotor.calibration.codes.quantiser import measure_channels
from rotor.checkpoint.bases import BasisPair, ChannelCode, LayerBases, latent_size
from rotor.checkpoint.folding import fold_layer, layer_layout
from rotor.checkpoint.layout import POST_ROPE, PRE_ROPE, AttentionShape, KeyForm, LayerForm
from rotor.checkpoint.projections import AttentionWeights
from rotor.checkpoint.rows import NumberRow
from rotor.checkpoint.tensors import layer_tensors
from rotor.kernels.parameters import AttentionParameters, pack_layer
from rotor.kernels.reference.attention import attention, project_keys
from rotor.kernels.rotary import rotate, when_read, within_blocks

SHAPE = AttentionShape(1, num_heads=6, num_kv_heads=2, head_dim=16, hidden_size=40, rotary_dim=12)
"""Partial rotary: 6 planes, and 4 dimensions that RoPE does not rotate."""

SEQ_LEN = 40
BLOCKS = KeyForm(8)


def normal(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rotation(shape: AttentionShape, length: int = SEQ_LEN) -> tuple[Tensor, Tensor]:
    frequencies = 100.0 ** -(torch.arange(shape.rotary_planes, dtype=torch.float64) / max(1, shape.rotary_planes))
    angles = (torch.arange(length)[:, None] * frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def weights_of(shape: AttentionShape) -> AttentionWeights:
    heads, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    sizes = {"q": (heads, shape.hidden_size), "k": (kv, shape.hidden_size), "v": (kv, shape.hidden_size)}
    found = {f"{p}_weight": 0.3 * normal(*size, seed=i) for i, (p, size) in enumerate(sizes.items())}
    found |= {f"{p}_bias": 0.3 * normal(size[0], seed=9 + i) for i, (p, size) in enumerate(sizes.items())}
    return AttentionWeights(**found, o_weight=0.3 * normal(shape.hidden_size, heads, seed=5))


def pair_of(count: int, width: int, seed: int) -> BasisPair:
    """encode, decode, [count, width, width], with encode decode^T = I."""
    vectors = torch.linalg.qr(normal(count, width, width, seed=seed))[0]
    scales = (0.3 * normal(width, seed=seed + 1)).exp()
    return BasisPair(vectors / scales, vectors * scales, torch.ones(count, width))


def bases_of(form: KeyForm, shape: AttentionShape, joint: bool, coded: bool) -> LayerBases:
    """All columns of one group of all heads, coded at 16 bits or as numbers."""
    size = shape.num_kv_heads
    count, columns = latent_size(LayerForm(form, size, joint), shape)
    latents = []
    for index in range(1 if joint else 2):
        pair = pair_of(count, columns, seed=30 + 2 * index)
        if joint:
            pair = dataclasses.replace(pair, mean=normal(1, columns, seed=53))
        if coded:
            fit = measure_channels((2 if joint else 8) * normal(600, columns, seed=40), None, (16,))
            code = ChannelCode(torch.full((columns,), 16), fit.mean[0], fit.scale[0])
            lengths = torch.ones_like(pair.singular_values) if joint else None
            pair = dataclasses.replace(pair, codes=(code,) * count, lengths=lengths)
        latents.append(pair)
    return LayerBases(form, size, tuple(latents))


def source(hidden: Tensor, weights: AttentionWeights, shape: AttentionShape) -> Tensor:
    """The uncompressed layer, causal."""

    def heads(name: str) -> Tensor:
        projected = hidden @ getattr(weights, f"{name}_weight").T + getattr(weights, f"{name}_bias")
        return projected.unflatten(-1, (-1, shape.head_dim)).transpose(1, 2)

    query, key, value = (heads(name) for name in "qkv")
    if shape.rotary_dim:
        query, key = rotate(query, *rotation(shape)), rotate(key, *rotation(shape))
    found = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return found.transpose(1, 2).flatten(2) @ weights.o_weight.T


def compressed(hidden: Tensor, weights: AttentionWeights, bases: LayerBases, shape: AttentionShape) -> Tensor:
    """The rewritten layer by its own tensors and plain attention."""
    layout = layer_layout(bases, [bases.full_ranks])
    t = fold_layer(weights, bases, layout, shape)
    assert list(t) == list(layer_tensors(layout, shape, weights.bias_names))

    def project(name: str) -> Tensor:
        return hidden @ t[f"{name}_proj.weight"].T + t.get(f"{name}_proj.bias", 0)

    folded, blocks, form = layout.folds_keys(shape), layout.in_blocks, layout.form
    value = project("v").unsqueeze(1) if "v_proj.weight" in t else None
    query, key = project("q"), project("k").unsqueeze(1)
    read = None
    if shape.rotary_dim:
        cos, sin = rotation(shape)
        query = rotate(query.unflatten(-1, (-1, shape.head_dim)).transpose(1, 2), cos, sin)
        read = when_read((cos, sin), form) if blocks else None
    if not folded:
        key = key[:, 0].unflatten(-1, (-1, shape.head_dim)).transpose(1, 2)
        stored = within_blocks((cos, sin), torch.arange(SEQ_LEN), form) if blocks else (cos, sin)
        shift = t.get("key_shift")
        key = project_keys(rotate(key, *stored), t["key_basis"], layout, shift, value if layout.joint else None)
    key_rows = pack_layer(key, layout, True, row_scale_of(t))
    value_rows = key_rows[..., :0] if layout.joint else pack_layer(value, layout, keys=False)
    parameters = AttentionParameters(layout, shape, shape.head_dim**-0.5, t.get("query_basis"), t.get("key_constant"))
    return attention(query, key_rows, value_rows, parameters, read) @ t["o_proj.weight"].T + t.get("o_proj.bias", 0)


HIDDEN = normal(2, SEQ_LEN, SHAPE.hidden_size, seed=77)
NO_ROPE = dataclasses.replace(SHAPE, rotary_dim=0)


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("form", [POST_ROPE, BLOCKS, KeyForm(64), PRE_ROPE])
def test_full_rank_is_the_source(form: KeyForm, coded: bool, joint: bool) -> None:
    """Numbers exactly; codes of 16 bits to their steps, floored in float32."""
    weights = weights_of(SHAPE)
    got = compressed(HIDDEN, weights, bases_of(form, SHAPE, joint, coded), SHAPE)
    assert relative_error(got, source(HIDDEN, weights, SHAPE)) < (2e-3 if coded else 1e-10)


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("coded", [False, True])
def test_full_rank_is_the_source_without_rope(coded: bool, joint: bool) -> None:
    weights = weights_of(NO_ROPE)
    got = compressed(HIDDEN, weights, bases_of(POST_ROPE, NO_ROPE, joint, coded), NO_ROPE)
    assert relative_error(got, source(HIDDEN, weights, NO_ROPE)) < (2e-3 if coded else 1e-10)


def truncated(bases: LayerBases, rank: int) -> LayerBases:
    """Its first columns."""
    latents = (
        dataclasses.replace(
            pair,
            encode=pair.encode[..., :rank],
            decode=pair.decode[..., :rank],
            singular_values=pair.singular_values[:, :rank],
        )
        for pair in bases.latents
    )
    return dataclasses.replace(bases, latents=tuple(latents))


@pytest.mark.parametrize("joint", [False, True])
def test_one_block_of_all_positions_is_after_rope(joint: bool) -> None:
    """At any rank."""
    weights = weights_of(SHAPE)
    bases = [truncated(bases_of(form, SHAPE, joint, False), 20) for form in (KeyForm(64), POST_ROPE)]
    first, second = (compressed(HIDDEN, weights, of_form, SHAPE) for of_form in bases)
    assert relative_error(first, second) < 1e-10
    assert relative_error(first, source(HIDDEN, weights, SHAPE)) > 1e-2


def test_before_rope_the_basis_folds_unless_a_norm_stands_between() -> None:
    weights, normed = weights_of(SHAPE), dataclasses.replace(SHAPE, key_norm=True)
    bases = truncated(bases_of(PRE_ROPE, SHAPE, True, False), 20)
    first, second = compressed(HIDDEN, weights, bases, SHAPE), compressed(HIDDEN, weights, bases, normed)
    assert relative_error(first, second) < 1e-10
    assert "key_basis" in rewritten(weights, bases, normed)
    assert "key_basis" not in rewritten(weights, bases, SHAPE)


def rewritten(weights: AttentionWeights, bases: LayerBases, shape: AttentionShape) -> dict[str, Tensor]:
    layout = layer_layout(bases, [bases.full_ranks])
    assert isinstance(layout.groups[0].key, NumberRow)
    return fold_layer(weights, bases, layout, shape)
