"""What each rank of tensor parallelism has of a compressed layer. Plain tensors, nothing of vLLM.

Ranks share out the groups of a layer, and where there are more ranks than groups the KV heads of a group too; those
that share a group all keep its latents (as with MLA). Which tensors there are, and how they divide, is what
`format.tensors.layer_tensors` says.
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

    rank: of all ranks, which are `parts` parts of the groups times `sharing` ranks that share one.
    groups: indices of its groups in the whole layer.
    layout: these, each with the rank's own KV heads. shape: sizes of the model as this rank has it.
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

        What no group has a part of is added to the sum of all ranks' outputs, so the first rank has it alone.
        """
        spec = self.tensors.get(name)
        if spec is None:
            return tensor
        if spec.axis is None:
            return tensor if self.rank == 0 else torch.zeros_like(tensor)
        of_groups = tensor.split(spec.parts, spec.axis)
        own = [of_groups[index] for index in self.groups]
        if spec.head_axis is not None:
            own = [part.chunk(self.sharing, spec.head_axis)[self.rank % self.sharing] for part in own]
        return torch.cat(own, spec.axis)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of this rank's part of each tensor."""
        whole = ((name, torch.empty(spec.shape, device="meta")) for name, spec in self.tensors.items())
        return {name: tuple(self.part(name, tensor).shape) for name, tensor in whole}


def check_size(layouts: Sequence[LayerLayout], shape: AttentionShape, size: int) -> None:
    """Raises UsageError, naming the sizes that divide, where a layer cannot be split into `size` ranks."""
    for index, layout in enumerate(layouts):
        if _parts(layout, size) is None:
            sizes = [n for n in range(1, shape.num_kv_heads + 1) if all(_parts(own, n) is not None for own in layouts)]
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
    return max(sum(_of_groups(layout, own).row_bytes(element_bytes)) for own in _dealt(layout, parts))


def shard_of(layout: LayerLayout, shape: AttentionShape, biases: Collection[str], rank: int, size: int) -> Shard:
    """The part of one rank.

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
    own = slice(rank % sharing * heads, (rank % sharing + 1) * heads)
    local = replace(whole, groups=tuple(replace(group, kv_heads=group.kv_heads[own]) for group in whole.groups))
    own_shape, key_shape = (
        replace(shape, num_kv_heads=n * len(mine), num_heads=n * len(mine) * shape.heads_per_kv)
        for n in (heads, layout.group_size)
    )
    tensors = layer_tensors(layout, shape, biases)
    return Shard(rank, parts, sharing, tuple(mine), local, own_shape, whole, key_shape, tensors)


def padded_rows(row_bytes: Sequence[int], kinds: Sequence[str] | None) -> list[int]:
    """The row of each layer as the cache has it: where layers are of several kinds, the widest of its kind.

    vLLM shares memory between kinds of layers (sliding windows and full attention) by blocks, and packs those of a kind
    without loss only where they are alike. Layers of one kind keep their own.

    Args:
        kinds: `layer_types` of config.json, None where there are none.
    """
    if kinds is None or len(set(kinds)) < 2:
        return list(row_bytes)
    return [max(size for size, other in zip(row_bytes, kinds, strict=True) if other == kind) for kind in kinds]


def _of_groups(layout: LayerLayout, indices: Sequence[int]) -> LayerLayout:
    return replace(layout, groups=tuple(layout.groups[index] for index in indices))


def _parts(layout: LayerLayout, size: int) -> int | None:
    """Parts of the groups, as many as possible, so that the ranks that share one divide a group's heads."""
    fits = (p for p in range(size, 0, -1) if size % p == 0 and len(layout.groups) % p == 0)
    return next((p for p in fits if layout.group_size % (size // p) == 0), None)


def _dealt(layout: LayerLayout, parts: int) -> list[list[int]]:
    """Groups for each part, as many each: the widest first, to and fro, so that the sums are close."""
    order = sorted(range(len(layout.groups)), key=lambda i: -sum(own.row_bytes() for own in layout.groups[i].latents))
    return [sorted(order[p :: 2 * parts] + order[2 * parts - 1 - p :: 2 * parts]) for p in range(parts)]
