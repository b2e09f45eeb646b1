"""Bases and heads of a checkpoint: which group's basis a group gets, and in which order heads are written."""

from __future__ import annotations

from dataclasses import replace

import torch
from support.random_layers import SHAPE, layout_of

from rotor.checkpoint.bases import BasisPair, LayerBases
from rotor.checkpoint.folding import _sum, fold_bases, fold_layer, layer_layout
from rotor.checkpoint.layout import POST_ROPE
from rotor.checkpoint.projections import AttentionWeights
from rotor.checkpoint.rows import NumberRow

RANK = 6
APART = layout_of(2, [(NumberRow(RANK), NumberRow(RANK - 2))] * 2)
"""Two groups of two of SHAPE's four KV heads, the last heads first."""


def numbered(rank: int) -> BasisPair:
    """Bases of two groups that say of which group they are: its number plus 1 everywhere."""
    side = torch.arange(1.0, 3.0, dtype=torch.float64)[:, None, None].expand(2, 32, rank).clone()
    return BasisPair(side, side, torch.ones(2, rank))


def test_each_group_gets_the_basis_of_its_heads() -> None:
    folded = fold_bases(LayerBases(POST_ROPE, 2, (numbered(RANK), numbered(RANK))), APART, SHAPE)
    assert [group.kv_heads for group in APART.groups] == [(3, 2), (1, 0)]
    for side, rank in ((folded.keys, RANK), (folded.values, RANK - 2)):
        assert [float(basis.encode.mean()) for basis in side] == [2.0, 1.0]
        assert [basis.read.shape[1] for basis in side] == [rank] * 2


def test_a_sum_leaves_out_what_there_is_not() -> None:
    one, two = torch.ones(2), 2 * torch.ones(2)
    assert _sum(None, None) is None
    assert _sum(None, two) is two
    assert _sum(one, None) is one
    assert torch.equal(_sum(one, two), 3 * one)


def test_sinks_follow_their_heads() -> None:
    """Learned logits of query heads, in the order in which the layout has their KV heads."""
    sizes = {"q": (128, 64), "k": (64, 64), "v": (64, 64), "o": (64, 128)}
    generator = torch.Generator().manual_seed(0)
    weights = {f"{name}_weight": torch.randn(size, generator=generator) for name, size in sizes.items()}
    identity = torch.eye(16, dtype=torch.float64).expand(4, 16, 16)
    pair = BasisPair(identity, identity, torch.ones(4, 16))
    bases = LayerBases(POST_ROPE, 1, (pair, pair))
    ranks = [(4, 4), (8, 4), (12, 4), (16, 4)]
    layout = layer_layout(bases, ranks)
    shape = replace(SHAPE, sinks=True)
    tensors = fold_layer(AttentionWeights(**weights, sinks=torch.arange(8.0)), bases, layout, shape)
    assert layout.kv_head_order == (3, 2, 1, 0)
    assert tensors["sinks"].tolist() == [6, 7, 4, 5, 2, 3, 0, 1]
