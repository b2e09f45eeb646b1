"""A rank's part of a compressed layer under tensor parallelism. Imports nothing of vLLM.

The groups of a layer are divided among the ranks, and with more ranks than groups the KV heads of a group too. Ranks
that share a group all keep its latents (as with MLA). `checkpoint.tensors.layer_tensors` says which tensors there are
and how they divide.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..checkpoint.layout import AttentionShape, LayerLayout
from ..checkpoint.tensors import TensorSpec, layer_tensors
from ..errors import UsageError


@dataclass(frozen=True)
class Shard:
    """A rank's part of a layer.

    rank: one of `parts` parts of the groups times `sharing` ranks that share a part.
    groups: indices of the rank's groups in the whole layer.
    layout: these groups, each with the rank's KV heads. shape: sizes of the model as this rank has it.
    key_layout, key_shape: the same with all KV heads of the groups, since a key latent is a sum over them.
    tensors: of the whole layer.
    """

    rank: int
    parts: int
    sharing: int
    groups: tuple[int, ...]
    layout: LayerLayout
    shape: AttentionShape
    key_layout: LayerLayout
    key_shape: AttentionShape
    tensors: dict[str, TensorSpec]

    def part(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's part of a tensor of the checkpoint, by its name under the attention module; norms as they are.

        A tensor without parts is added to the sum of all ranks' outputs, so the first rank alone has it.
        """
        spec = self.tensors.get(name)
        if spec is None:
            return tensor
        if spec.axis is None:
            return tensor if self.rank == 0 else torch.zeros_like(tensor)
        of_groups = tensor.split(spec.parts, spec.axis)
        parts = [of_groups[index] for index in self.groups]
        if spec.head_axis is not None:
            parts = [part.chunk(self.sharing, spec.head_axis)[self.rank % self.sharing] for part in parts]
        return torch.cat(parts, spec.axis)

    def own_heads(self, heads: Tensor) -> Tensor:
        """This rank's KV heads, [tokens, num_kv_heads, head_dim].

        Args:
            heads: [tokens, num_kv_heads of its groups * head_dim].
        """
        groups = heads.unflatten(-1, (len(self.groups), self.key_layout.group_size, -1))
        return groups.chunk(self.sharing, 2)[self.rank % self.sharing].flatten(1, 2)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of this rank's part of each tensor."""
        whole = ((name, torch.empty(spec.shape, device="meta")) for name, spec in self.tensors.items())
        return {name: tuple(self.part(name, tensor).shape) for name, tensor in whole}


def check_size(layouts: Sequence[LayerLayout], shape: AttentionShape, size: int) -> None:
    """Check that every layer can be split into `size` ranks; raises UsageError, which names the sizes that can."""
    for index, layout in enumerate(layouts):
        if _parts(layout, size) is None:
            sizes = [
                n
                for n in range(1, shape.num_kv_heads + 1)
                if all(_parts(of_layer, n) is not None for of_layer in layouts)
            ]
            raise UsageError(
                f"tensor parallel size {size}: layer {index} has {len(layout.groups)} group(s) of {layout.group_size} "
                "KV head(s), which so many ranks cannot share.",
                f"Choose one of {', '.join(map(str, sizes))}.",
            )


def row_bytes(layout: LayerLayout, size: int, element_bytes: int) -> int:
    """Bytes of a token's row, keys and values side by side, on each of `size` ranks: the widest's (vLLM wants equal
    pages), in a model whose dtype takes element_bytes.
    """
    parts = _parts(layout, size)
    assert parts is not None  # check_size
    return max(sum(_of_groups(layout, groups).row_bytes(element_bytes)) for groups in _dealt(layout, parts))


def shard_of(layout: LayerLayout, shape: AttentionShape, biases: Collection[str], rank: int, size: int) -> Shard:
    """Make the part of one rank.

    Args:
        layout, shape, biases: of the whole layer.
    Raises:
        UsageError: so many ranks cannot share the layer.
    """
    check_size([layout], shape, size)
    parts = _parts(layout, size)
    assert parts is not None
    sharing = size // parts
    mine = _dealt(layout, parts)[rank // sharing]
    whole = _of_groups(layout, mine)
    heads = layout.group_size // sharing
    heads_of_rank = slice(rank % sharing * heads, (rank % sharing + 1) * heads)
    local = replace(
        whole, groups=tuple(replace(group, kv_heads=group.kv_heads[heads_of_rank]) for group in whole.groups)
    )
    own_shape, key_shape = (
        replace(shape, num_kv_heads=n * len(mine), num_heads=n * len(mine) * shape.heads_per_kv)
        for n in (heads, layout.group_size)
    )
    tensors = layer_tensors(layout, shape, biases)
    return Shard(rank, parts, sharing, tuple(mine), local, own_shape, whole, key_shape, tensors)


def padded_rows(row_bytes: Sequence[int], kinds: Sequence[str] | None) -> list[int]:
    """Bytes of each layer's row in the cache; in a model with several kinds of layers, those of the widest of its kind.

    vLLM shares memory between kinds of layers (sliding windows and full attention) by blocks, and wastes none only if
    the layers of a kind are alike. In a model with one kind each layer keeps its size.

    Args:
        kinds: `layer_types` of config.json, None where there are none.
    """
    if kinds is None or len(set(kinds)) < 2:
        return list(row_bytes)
    return [max(size for size, other in zip(row_bytes, kinds, strict=True) if other == kind) for kind in kinds]


def _of_groups(layout: LayerLayout, indices: Sequence[int]) -> LayerLayout:
    return replace(layout, groups=tuple(layout.groups[index] for index in indices))


def _parts(layout: LayerLayout, size: int) -> int | None:
    """Most parts of the groups such that the ranks that share a part divide a group's heads; None if there are none."""
    fits = (p for p in range(size, 0, -1) if size % p == 0 and len(layout.groups) % p == 0)
    return next((p for p in fits if layout.group_size % (size // p) == 0), None)


def _dealt(layout: LayerLayout, parts: int) -> list[list[int]]:
    """Deal the groups to the parts, widest first and to and fro, so that parts have similar sizes."""
    order = sorted(
        range(len(layout.groups)), key=lambda i: -sum(latent.row_bytes() for latent in layout.groups[i].latents)
    )
    return [sorted(order[p :: 2 * parts] + order[2 * parts - 1 - p :: 2 * parts]) for p in range(parts)]
