"""From bases and a plan to a layout, and to what is folded into the projections of a layer (`runtime.rewrite`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..calibration.bases.layer import LayerBases
from ..calibration.bases.pair import BasisPair
from ..calibration.codes.fold import fold_code
from ..calibration.codes.layer import CodedBases
from ..calibration.codes.quantiser import ChannelCode
from ..checkpoint.channels import Channels, Latent, Numbers
from ..checkpoint.families import find_family
from ..checkpoint.layout import AttentionShape, GroupLayout, LayerLayout, LayerRanks, ordered_by_class
from ..checkpoint.projections import AttentionWeights, GetTensor, read_attention
from ..checkpoint.rewrite import FoldedBases, FoldedBasis, rewrite
from ..checkpoint.rewritten import RewrittenTensors
from ..models.source import Checkpoint
from ..numerics import one_thread

RIDGE = 1e-6
"""Share of the mean latent energy added in the least-squares refit of W_o."""


def layer_layout(bases: LayerBases, ranks: LayerRanks) -> tuple[LayerLayout, tuple[int, ...]]:
    """Lay out a layer at given ranks.

    Args:
        ranks: (key rank, value rank) of each group in the order of the bases; of coded ones, what their channels count.
    Returns:
        The layout (groups ordered by class), and for each position the index of its group in `bases`.
    """
    size = bases.group_size
    latents: Sequence[tuple[Latent, Latent | None]] = [
        (Numbers(key), None if bases.joint else Numbers(value)) for key, value in ranks
    ]
    if isinstance(bases, CodedBases):
        latents = bases.channels
    groups = [GroupLayout(tuple(range(i * size, (i + 1) * size)), *pair) for i, pair in enumerate(latents)]
    return ordered_by_class(groups, bases.form)


def planned_layouts(
    bases: Sequence[LayerBases], ranks: Sequence[LayerRanks]
) -> list[tuple[LayerLayout, tuple[int, ...]]]:
    """Lay out every layer; see `layer_layout`."""
    return [layer_layout(layer, layer_ranks) for layer, layer_ranks in zip(bases, ranks, strict=True)]


def rewritten_tensors(
    checkpoint: Checkpoint,
    shape: AttentionShape,
    bases: Callable[[int], LayerBases],
    planned: Sequence[tuple[LayerLayout, tuple[int, ...]]],
    read: GetTensor,
) -> RewrittenTensors:
    """What a source becomes by a run's bases, of which one layer's are in memory at a time.

    Args:
        bases: of a layer. planned: from `planned_layouts`.
        read: `checkpoint.tensor`, or for shapes and dtypes alone `checkpoint.meta_tensor`.
    """
    family = find_family(checkpoint.config)
    first = read_attention(family, 0, checkpoint.names, checkpoint.meta_tensor, shape)

    def folded(layer: int) -> FoldedBases:
        return folded_bases(bases(layer), *planned[layer], shape)

    layouts = [layout for layout, _ in planned]
    return RewrittenTensors(family, shape, layouts, first.bias_names, checkpoint.file_of, read, folded)


def rewrite_layer(
    weights: AttentionWeights, bases: LayerBases, layout: LayerLayout, order: tuple[int, ...], shape: AttentionShape
) -> dict[str, Tensor]:
    """Rewrite the projections of one layer by a run's bases; `layout` and `order` are from `layer_layout`.

    Raises:
        NumericsError: see rotor.checkpoint.rewrite.rewrite, fold_code.
    """
    return rewrite(weights, folded_bases(bases, layout, order, shape), layout, shape)


def folded_bases(bases: LayerBases, layout: LayerLayout, order: tuple[int, ...], shape: AttentionShape) -> FoldedBases:
    """What of a run goes into a layer's projections, in the order of the layout: truncated, codes folded, W_o refitted.

    Raises:
        NumericsError: a code cannot be folded.
    """
    codes: Any = (bases.key_codes, bases.value_codes) if isinstance(bases, CodedBases) else ({}, {})
    keys, values = [], []
    for group, i in zip(layout.groups, order, strict=True):
        key = _folded(bases.qk, i, group.key, codes[0][i] if codes[0] else None)
        value = _folded(bases.vo, i, group.values, codes[1][i] if codes[1] else None)
        if bases.outputs is not None:  # one group at a time: they are by far the largest
            outputs = bases.outputs.unflatten(0, (-1, layout.group_size, shape.heads_per_kv))[i]
            value = _refit(value, outputs, layout.group_size)
        keys.append(key)
        values.append(value)
    return FoldedBases(keys, values)


def _folded(pair: BasisPair, group: int, latent: Latent, code: ChannelCode | None) -> FoldedBasis:
    encode, decode = pair.encode[group], pair.decode[group]
    if code is None:
        return FoldedBasis(latent, encode[:, : latent.rank], decode[:, : latent.rank])
    assert isinstance(latent, Channels)
    affine = (None if tensor is None else tensor[group] for tensor in (pair.shift, pair.constant))
    return fold_code(encode, decode, code, latent, *affine)


def _refit(basis: FoldedBasis, outputs: Tensor, group_size: int) -> FoldedBasis:
    """Least squares: what each query head should read its output back with, given the latents that are kept.

    Minimises E |o - reader (encode^T o_group)|^2 for each query head over its own outputs, by a correction to `read`
    with a small ridge; at full rank the correction is zero. The means of what was dropped are in it.

    Args:
        outputs: [g, heads_per_kv, g * head_dim, g * head_dim].
    """
    read = basis.read.unflatten(0, (group_size, -1)).unsqueeze(1)
    latent = outputs @ basis.encode
    gram = basis.encode.mT @ latent
    index = torch.arange(group_size)
    own = latent.unflatten(-2, (group_size, -1))[index, :, index]  # each KV head's own rows, [g, heads_per_kv, ...]
    residual = own - read @ gram
    ridge = RIDGE * gram.diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=torch.finfo(gram.dtype).tiny)
    gram = gram + torch.diag_embed(ridge.unsqueeze(-1).expand(gram.shape[:-1]))
    with one_thread():
        read = read + torch.linalg.solve(gram, residual.mT).mT
    dropped = None if basis.dropped is None else torch.zeros_like(basis.dropped)
    return replace(basis, read=read.transpose(0, 1).flatten(1, 2), dropped=dropped)
