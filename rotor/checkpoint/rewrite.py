"""What the projections of a layer become, given their weights and bases with the codes folded in.

The bases of a layer are all that a checkpoint without weights stores (`tensors_of`, `bases_from`): the rest is the
source's. All products are float64, in one thread, so that they have the same bits wherever they are made; each tensor
is cast exactly once, to the dtype of the tensor that it replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from ..errors import CheckpointError, NumericsError
from ..numerics import one_thread
from .channels import Channels, Latent
from .layout import AttentionShape, LayerLayout
from .projections import AttentionWeights
from .tensors import layer_tensors


def levels_of(channels: Channels) -> Tensor:
    """How many levels of each channel a unit of each column counts, [rank, width], float64."""
    levels = torch.zeros(channels.rank, channels.width, dtype=torch.float64)
    for place, column in enumerate(channels.columns):
        for channel, count in column.items():
            levels[channel, place] = count
    return levels


@dataclass(frozen=True)
class FoldedBasis:
    """How keys or values x of a group, side by side, n numbers, become a latent and are read from it; float64.

    latent: what is stored of it. encode: [n, rank]; the projection puts out x @ encode + shift.
    read: [n, rank], or [heads_per_kv, n, rank] where each query head has its own; x is read as
        latent @ decode^T + constant.
    Of codes: shift: [rank]. offset: [rank], what the signed nibbles of a channel lack of the middle of a level and of
        the mean, in scales. dropped: [n], the mean of the channels that are not stored.
    """

    latent: Latent
    encode: Tensor
    read: Tensor
    shift: Tensor | None = None
    offset: Tensor | None = None
    dropped: Tensor | None = None

    @property
    def decode(self) -> Tensor:
        """`read` with a column for each nibble and crumb that attention reads of a row."""
        return self.read @ levels_of(self.latent).to(self.read) if isinstance(self.latent, Channels) else self.read

    @property
    def constant(self) -> Tensor:
        """What is added to the nibbles' part of x, [..., n]."""
        assert self.offset is not None
        assert self.dropped is not None
        return self.read @ self.offset + self.dropped

    def shifted(self, by: Tensor) -> FoldedBasis:
        """Of a projection whose shift is larger by `by`, [rank], than what was asked for."""
        assert self.shift is not None
        assert self.offset is not None
        return replace(self, shift=self.shift + by, offset=self.offset - by)

    def tensors(self) -> dict[str, Tensor]:
        """By the names of the fields."""
        found = {field.name: getattr(self, field.name) for field in fields(self)[1:]}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def on(self, device: torch.device) -> FoldedBasis:
        """Itself on a device, each tensor contiguous."""
        tensors = {name: tensor.to(device).contiguous() for name, tensor in self.tensors().items()}
        return FoldedBasis(self.latent, **tensors)


@dataclass(frozen=True)
class FoldedBases:
    """Those of a layer's groups, in the order of its layout."""

    keys: Sequence[FoldedBasis]
    values: Sequence[FoldedBasis]

    def tensors(self) -> dict[str, Tensor]:
        """As `bases_from` reads them: `key.encode`, `value.read` and so on, of all groups side by side."""
        return {
            f"{side}.{name}": torch.cat([basis.tensors()[name] for basis in bases], -1)
            for side, bases in (("key", self.keys), ("value", self.values))
            for name in bases[0].tensors()
        }

    @classmethod
    def read(cls, get: Callable[[str], Tensor], layout: LayerLayout, shape: AttentionShape, where: str) -> FoldedBases:
        """What `tensors` gave.

        Args:
            get: reads a tensor by its name; raises CheckpointError where there is none.
        Raises:
            CheckpointError: a tensor does not fit the layout; names `where`.
        """
        size = layout.group_size * shape.head_dim
        found: dict[str, list[FoldedBasis]] = {}
        for side in ("key", "value"):
            latents = [group.key if side == "key" else group.values for group in layout.groups]
            ranks = [latent.rank for latent in latents]
            parts: list[Sequence[Tensor]] = []
            for name in [field.name for field in fields(FoldedBasis)[1:]][: None if layout.coded else 2]:
                tensor, widths = get(f"{side}.{name}"), [size] * len(ranks) if name == "dropped" else ranks
                before = [size] if name in ("encode", "read") else []
                allowed = [before, [shape.heads_per_kv, size]] if (side, name) == ("value", "read") else [before]
                shapes = [[*sizes, sum(widths)] for sizes in allowed]
                if list(tensor.shape) not in shapes or tensor.dtype != torch.float64:
                    raise CheckpointError(
                        f"{where}: {side}.{name} is {tensor.dtype} of {list(tensor.shape)}, expected float64 of "
                        f"{shapes[0]} by config.json.",
                        "Get the checkpoint again.",
                    )
                parts.append(tensor.split(widths, -1))
            found[side] = [FoldedBasis(*fields_) for fields_ in zip(latents, *parts, strict=True)]
        return cls(found["key"], found["value"])


def rewrite(
    weights: AttentionWeights, bases: FoldedBases, layout: LayerLayout, shape: AttentionShape
) -> dict[str, Tensor]:
    """Rewrite the projections of one layer: the tensors that `format.tensors.layer_tensors` lists.

    Of codes, all that puts out a channel is divided by its scale and shifted by its mean, all that reads one has a
    column for each nibble. What keys lack then is `key_constant`; what values lack is in o_proj's bias.

    Raises:
        NumericsError: a result overflows the dtype or is not finite; names it.
    Source: FDC section 5.1 for queries and keys, ZACK section 5.1 for the folding of W_v and W_o; docs/design.md.
    """
    with one_thread():
        return _rewritten(weights, bases, layout, shape)


def _rewritten(
    weights: AttentionWeights, bases: FoldedBases, layout: LayerLayout, shape: AttentionShape
) -> dict[str, Tensor]:
    keys, values = ([basis.on(weights.v_weight.device) for basis in side] for side in (bases.keys, bases.values))
    key_encode, value_encode = [basis.encode for basis in keys], [basis.encode for basis in values]
    key_decode = [basis.decode for basis in keys]
    folded, rotary = layout.folds_keys(shape), bool(shape.rotary_dim)
    heads = torch.tensor(layout.kv_head_order)
    tensors: dict[str, Tensor | None] = {}
    for kind in ("weight", "bias"):
        q, k, v = (_by_kv_head(getattr(weights, f"{p}_{kind}"), heads, shape) for p in "qkv")
        tensors[f"q_proj.{kind}"] = _flatten_kv(q) if rotary or q is None else _absorbed(q, key_decode, layout)
        of_keys = _fold(k, key_encode, layout) if folded else _flatten_kv(k)
        of_values = _fold(v, value_encode, layout)
        if layout.joint and folded:
            of_keys, of_values = _sum(of_keys, of_values), None
        tensors[f"k_proj.{kind}"], tensors[f"v_proj.{kind}"] = of_keys, of_values

    columns = _by_kv_head(weights.o_weight.T, heads, shape)
    assert columns is not None
    blocks = _per_group(columns, layout)
    tensors["o_proj.weight"] = torch.cat(
        [
            (_by_query_head(basis.decode, layout, 2).mT @ block.to(torch.float64)).flatten(0, 2)
            for basis, block in zip(values, blocks, strict=True)
        ]
    ).T
    tensors["o_proj.bias"] = weights.o_bias
    if not folded:
        tensors["key_basis"] = torch.cat(key_encode, dim=-1)
    if rotary:
        tensors["query_basis"] = torch.cat(key_decode, dim=-1)
    if layout.coded:
        before = tensors["k_proj.bias"]
        if folded:
            tensors["k_proj.bias"], keys = _shifted(before, keys, weights.k_weight.dtype)
        else:
            tensors["key_shift"] = torch.cat([basis.shift for basis in keys if basis.shift is not None])
        if layout.joint and folded:
            _, values = _shifted(before, values, weights.k_weight.dtype)
        elif not layout.joint:
            tensors["v_proj.bias"], values = _shifted(tensors["v_proj.bias"], values, weights.v_weight.dtype)
        if rotary:
            tensors["key_constant"] = torch.cat([basis.constant for basis in keys]).unflatten(0, (-1, shape.head_dim))
        constants = [_by_query_head(basis.constant, layout, 1) for basis in values]
        tensors["o_proj.bias"] = _with_constants(weights.o_bias, columns, constants, layout)
    specs = layer_tensors(layout, shape, weights.bias_names)
    found = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {n: s.shape for n, s in specs.items()}
    return {
        name: _cast(found[name], torch.float32 if spec.float32 else _dtype_of(name, weights), weights.prefix + name)
        for name, spec in specs.items()
    }


def _absorbed(query: Tensor, decode: list[Tensor], layout: LayerLayout) -> Tensor:
    """Queries [num_kv_heads, heads_per_kv, head_dim, ...] in the latents of their keys, without RoPE."""
    blocks = _per_group(query.to(torch.float64), layout)
    return torch.cat(
        [
            torch.einsum("gdr,gpd...->gpr...", own.unflatten(0, (layout.group_size, -1)), block).flatten(0, 2)
            for own, block in zip(decode, blocks, strict=True)
        ]
    )


def _with_constants(bias: Tensor | None, columns: Tensor, constants: list[Tensor], layout: LayerLayout) -> Tensor:
    """The bias of o_proj with what it makes of the constant values.

    Args:
        columns: of W_o, [num_kv_heads, heads_per_kv, head_dim, hidden_size]. constants: of each group, [group_size,
            heads_per_kv or 1, head_dim].
    """
    total = columns.new_zeros(columns.shape[-1], dtype=torch.float64) if bias is None else bias.to(torch.float64)
    for constant, block in zip(constants, _per_group(columns, layout), strict=True):
        total = total + (constant.unsqueeze(-1) * block.to(torch.float64)).sum((0, 1, 2))
    return total


def _shifted(bias: Tensor | None, bases: list[FoldedBasis], dtype: torch.dtype) -> tuple[Tensor, list[FoldedBasis]]:
    """The bias of a projection into codes, as it is in its dtype, and the bases with what that rounding moved.

    Means are many scales large: a bias of 16 bits may be off by a good part of one, the same for every token. What
    reads the codes takes it into account.
    """
    shifts = [basis.shift for basis in bases if basis.shift is not None]
    exact = torch.cat(shifts)
    exact = exact if bias is None else exact + bias
    rounded = exact.to(dtype).to(exact.dtype)
    moved = (rounded - exact).split([len(shift) for shift in shifts])
    return rounded, [basis.shifted(part) for basis, part in zip(bases, moved, strict=True)]


def _by_kv_head(tensor: Tensor | None, heads: Tensor, shape: AttentionShape) -> Tensor | None:
    """[n * head_dim, ...] -> [num_kv_heads, n / num_kv_heads, head_dim, ...], KV heads in the order of the layout."""
    if tensor is None:
        return None
    return tensor.reshape(shape.num_kv_heads, -1, shape.head_dim, *tensor.shape[1:])[heads]


def _per_group(tensor: Tensor, layout: LayerLayout) -> tuple[Tensor, ...]:
    return tensor.split(layout.group_size)


def _by_query_head(tensor: Tensor, layout: LayerLayout, dims: int) -> Tensor:
    """[(heads_per_kv,) g * head_dim, ...] of `dims` dimensions behind that of query heads -> [g, heads_per_kv or 1,
    head_dim, ...]."""
    of_heads = tensor if tensor.dim() > dims else tensor.unsqueeze(0)
    return of_heads.unflatten(1, (layout.group_size, -1)).transpose(0, 1)


def _flatten_kv(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.flatten(0, 2)


def _sum(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Of those that there are."""
    if first is None or second is None:
        return second if first is None else first
    return first + second


def _fold(tensor: Tensor | None, encode: list[Tensor], layout: LayerLayout) -> Tensor | None:
    """Projections [num_kv_heads, 1, head_dim, ...] into latents: encode^T W, group by group."""
    if tensor is None:
        return None
    blocks = (block.flatten(0, 2).to(torch.float64) for block in _per_group(tensor, layout))
    return torch.cat([basis.T @ block for basis, block in zip(encode, blocks, strict=True)])


def _dtype_of(name: str, weights: AttentionWeights) -> torch.dtype:
    """That of the tensor which a new one replaces; without one that of its projection, or of the values."""
    if "_proj." not in name:
        return weights.v_weight.dtype
    side, kind = name[0], name.rpartition(".")[2]
    replaced: Tensor | None = getattr(weights, f"{side}_{kind}")
    return (getattr(weights, f"{side}_weight") if replaced is None else replaced).dtype


def _cast(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    result = tensor.to(dtype).contiguous()
    if not result.is_meta and not torch.isfinite(result).all():
        raise NumericsError(
            f"{name}: not finite after the cast to {dtype} (largest magnitude {tensor.abs().max().item():.3g}).",
            "Convert the source checkpoint to bfloat16 or float32 and export again.",
        )
    return result
