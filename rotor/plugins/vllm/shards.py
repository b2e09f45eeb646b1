"""What each rank of tensor parallelism has of a compressed layer. Plain tensors, nothing of vLLM.

Ranks share out the groups of a layer, and where there are more ranks than groups the KV heads of a group too; those
that share a group all keep its latents (as with MLA).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...errors import CheckpointError, UsageError
from ...format.layout import AttentionShape, LayerLayout


@dataclass(frozen=True)
class Shard:
    """A rank's part of a layer.

    rank: of `size`, which is `parts` parts of the groups times ranks that share one.
    layout: its groups, each with its own KV heads. key_layout: the same with all KV heads of the groups, since a key
        latent is a sum over them.
    """

    rank: int
    size: int
    parts: int
    layout: LayerLayout
    key_layout: LayerLayout
    _index: dict[str, Tensor]

    def part(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's part of a tensor of the checkpoint, by its name under the attention module; others as they are.

        The bias of o_proj is the first rank's alone: outputs of all ranks are summed.
        """
        index = self._index
        module = name.split(".")[0]
        if module in ("q_proj", "k_proj", "v_proj"):
            return tensor[index[module]]
        if name == "o_proj.weight":
            return tensor[:, index["o_proj"]]
        if name == "o_proj.bias":
            return tensor if self.rank == 0 else torch.zeros_like(tensor)
        if name == "key_basis":
            return tensor[:, index["key_columns"]]
        if name == "query_basis":
            return tensor[index["basis_rows"]][:, index["key_columns"]]
        if name == "key_shift":
            return tensor[index["key_columns"]]
        if name == "key_constant":
            return tensor[index["kv_heads"]]
        return tensor

    def width(self, module: str) -> int:
        """Rows of q_proj, k_proj and v_proj, columns of o_proj, and columns of the bases (`key_columns`)."""
        return len(self._index[module])


def dividing_sizes(layouts: Sequence[LayerLayout], most: int) -> list[int]:
    """Sizes of tensor parallelism up to `most` that every layer can be split into."""
    return [size for size in range(1, most + 1) if all(_parts(layout, size) is not None for layout in layouts)]


def check_size(layouts: Sequence[LayerLayout], shape: AttentionShape, size: int) -> None:
    """Raises UsageError, naming the sizes that divide, where a layer cannot be split into `size` ranks."""
    for index, layout in enumerate(layouts):
        if _parts(layout, size) is None:
            sizes = dividing_sizes(layouts, shape.num_kv_heads)
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
    return max(sum(sum(layout.groups[i].row_bytes(element_bytes)) for i in part) for part in _dealt(layout, parts))


def shard_of(layout: LayerLayout, shape: AttentionShape, rank: int, size: int) -> Shard:
    """The part of one rank.

    Args:
        layout: of the whole layer, as loaded.
    Raises:
        UsageError: so many ranks cannot share the layer.
    """
    check_size([layout], shape, size)
    parts = _parts(layout, size)
    assert parts is not None
    sharing = size // parts
    dealt = _dealt(layout, parts)
    mine = dealt[rank // sharing]
    heads = layout.group_size // sharing
    own = range(rank % sharing * heads, (rank % sharing + 1) * heads)
    groups, offsets, per_kv, d = layout.groups, layout.offsets(), shape.heads_per_kv, shape.head_dim
    local = [replace(groups[i], kv_heads=tuple(groups[i].kv_heads[h] for h in own)) for i in mine]

    kv_heads = [i * layout.group_size + h for i in mine for h in own]
    key_heads = [i * layout.group_size + h for i in mine for h in range(layout.group_size)]
    query_heads = [head * per_kv + p for head in kv_heads for p in range(per_kv)]
    columns = [
        [offsets[i][s] + c for i in mine for c in range((groups[i].qk_rank, groups[i].v_rank)[s])] for s in (0, 1)
    ]
    of_rows: list[list[int]] = [[], []]  # of the packed queries and outputs, by side
    for i in mine:
        for side, rank_of in enumerate((groups[i].qk_rank, groups[i].v_rank)):
            before = layout.group_size * per_kv * offsets[i][side]
            rows = [h * per_kv + p for h in own for p in range(per_kv)]
            of_rows[side] += [before + row * rank_of + c for row in rows for c in range(rank_of)]
    index = {
        "q_proj": torch.tensor(of_rows[0]) if layout.domain == "none" else _expanded(query_heads, d),
        "k_proj": torch.tensor(columns[0]) if layout.folded_keys else _expanded(key_heads, d),
        "v_proj": torch.tensor(columns[1]),
        "o_proj": torch.tensor(of_rows[1]),
        "key_columns": torch.tensor(columns[0]),
        "basis_rows": _expanded(list(own), d),
        "kv_heads": torch.tensor(kv_heads),
    }
    return Shard(
        rank,
        size,
        parts,
        replace(layout, groups=tuple(local)),
        replace(layout, groups=tuple(groups[i] for i in mine)),
        index,
    )


def check_tensor(name: str, layer: int, got: Tensor, expected: Tensor) -> None:
    """Raises CheckpointError where a part of a checkpoint's tensor has another shape than the module's."""
    if got.shape != expected.shape:
        raise CheckpointError(
            f"layer {layer}, {name}: {list(got.shape)} in the checkpoint, expected {list(expected.shape)}.",
            "Run `rotor validate`; export it again.",
        )


def padded_rows(row_bytes: Sequence[int], kinds: Sequence[str] | None) -> list[int]:
    """The row of each layer as the cache has it: where layers are of several kinds, the widest of its kind.

    vLLM shares memory between kinds of layers (sliding windows and full attention) by blocks, and packs those of a kind
    without loss only where they are alike. Layers of one kind keep their own.

    Args:
        kinds: `layer_types` of config.json, None where there are none.
    """
    if kinds is None or len(set(kinds)) < 2:
        return list(row_bytes)
    widest: dict[str, int] = {}
    for kind, size in zip(kinds, row_bytes, strict=True):
        widest[kind] = max(widest.get(kind, 0), size)
    return [widest[kind] for kind in kinds]


def _parts(layout: LayerLayout, size: int) -> int | None:
    """Parts of the groups, as many as possible, so that the ranks that share one divide a group's heads."""
    fits = (p for p in range(size, 0, -1) if size % p == 0 and len(layout.groups) % p == 0)
    return next((p for p in fits if layout.group_size % (size // p) == 0), None)


def _dealt(layout: LayerLayout, parts: int) -> list[list[int]]:
    """Groups for each part, as many each: the widest first, to and fro, so that the sums are close."""
    widths = [sum(group.row_bytes(2)) for group in layout.groups]
    order = sorted(range(len(widths)), key=lambda i: (-widths[i], i))
    dealt: list[list[int]] = [[] for _ in range(parts)]
    for turn, start in enumerate(range(0, len(order), parts)):
        some = order[start : start + parts]
        for part, group in zip(dealt, some if turn % 2 == 0 else reversed(some), strict=True):
            part.append(group)
    return [sorted(part) for part in dealt]


def _expanded(heads: list[int], width: int) -> Tensor:
    """Rows of heads that are `width` wide."""
    return (torch.tensor(heads)[:, None] * width + torch.arange(width)).flatten()
