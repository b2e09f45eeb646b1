"""Bases of a layer: what a run stores of them, and what is left of them once codes are folded in.

Data types alone: `rotor.calibration` computes them, `folding` makes weights of them. A group's *latent* is one number a
channel; a joint latent has keys and values in it, otherwise a group has one of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from ..errors import CheckpointError, NumericsError
from .channels import Channels, Latent, Numbers
from .layout import AttentionShape, KeyForm, LayerLayout, LayerRanks


@dataclass(frozen=True)
class ChannelCode:
    """The code of each channel of a latent; every field is [channels].

    A number z of a channel of b bits becomes clamp(floor((z - mean) / scale + 2^(b-1)), 0, 2^b - 1) and is read as
    mean + scale (code + 1/2 - 2^(b-1)). A channel of 0 bits is not stored: its mean is read.

    bits: from 0 to 16. mean, scale: float64; the scale of a channel of 0 bits is 1.
    """

    bits: Tensor
    mean: Tensor
    scale: Tensor

    @property
    def levels(self) -> Tensor:
        """Number of codes of each channel, 2^bits, float64."""
        return 2.0 ** self.bits.to(torch.float64)

    def encode(self, latents: Tensor) -> Tensor:
        """[..., channels] -> codes, in the dtype of `latents`; 0 in channels of 0 bits."""
        mean, scale, levels = self._like(latents)
        codes = ((latents - mean) / scale + levels / 2).floor().clamp(min=0)
        return torch.minimum(codes, levels - 1)

    def decode(self, codes: Tensor) -> Tensor:
        """Codes -> latents: the middle of each level; the mean of a channel of 0 bits."""
        mean, scale, levels = self._like(codes)
        return mean + torch.where(levels > 1, scale * (codes + 0.5 - levels / 2), 0.0)

    def _like(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return tuple(n.to(tensor.device, tensor.dtype) for n in (self.mean, self.scale, self.levels))


@dataclass(frozen=True)
class BasisPair:
    """The bases of one latent of a layer, batched over its groups: encode decode^T is nearly the identity at full rank.

    encode: [num_groups, dim, columns]; latent = x @ encode, x the stacked keys or values of a group.
    decode: [num_groups, dim, columns]; x is read as latent @ decode^T, so q . x becomes (q @ decode) . latent.
    singular_values: [num_groups, columns], descending.
    shift: [num_groups, columns], added to the latent, and constant: [num_groups, dim], added to what is read; where
        bases were trained.
    codes: of each group, of its columns in descending order of bits; empty where the latent is stored as numbers.
    """

    encode: Tensor
    decode: Tensor
    singular_values: Tensor
    shift: Tensor | None = None
    constant: Tensor | None = None
    codes: tuple[ChannelCode, ...] = ()

    def ordered(self, order: Tensor) -> BasisPair:
        """The columns of each group in another order, [num_groups, columns]; without codes."""
        index = order.unsqueeze(1).expand_as(self.encode)
        return BasisPair(
            self.encode.gather(-1, index),
            self.decode.gather(-1, index),
            self.singular_values.gather(-1, order),
            None if self.shift is None else self.shift.gather(-1, order),
            self.constant,
        )


@dataclass(frozen=True)
class LayerBases:
    """Bases of one layer, batched over its groups.

    form: how RoPE stands in the keys that are stored.
    latents: the bases of the keys' and of the values' latent; or of one joint latent of both, whose rows are a head's
        key and then its value, head by head.
    outputs: [num_heads, n, n], second moments of each query head's attention output over its group's stacked values
        (n = group_size * head_dim), by which each head's slice of W_o is refitted at the rank it gets; None: it is not.
    """

    form: KeyForm
    group_size: int
    latents: tuple[BasisPair, ...]
    outputs: Tensor | None = None

    @property
    def joint(self) -> bool:
        """Whether keys and values share a latent, of twice as many columns."""
        return len(self.latents) == 1

    @property
    def sides(self) -> tuple[BasisPair, BasisPair]:
        """The bases of keys and of values. A joint latent is the sum of what both encode, plus their shift once."""
        if self.joint:
            return split_pair(self.latents[0], self.group_size)
        return self.latents[0], self.latents[1]

    @property
    def qk(self) -> BasisPair:
        """The key side: encode is applied to keys, decode to queries, or to key latents to rebuild keys."""
        return self.sides[0]

    @property
    def vo(self) -> BasisPair:
        """The value side: encode is folded into W_v, decode into W_o."""
        return self.sides[1]

    def stored_latents(self, ranks: LayerRanks) -> list[tuple[Latent, ...]]:
        """What the cache holds of each group: its channels by bits where they are coded, else the first `ranks`."""
        if not self.latents[0].codes:
            return [tuple(Numbers(rank) for rank in of_group[: len(self.latents)]) for of_group in ranks]
        codes = zip(*(latent.codes for latent in self.latents), strict=True)
        return [tuple(Channels.of_bits(code.bits.tolist()) for code in of_group) for of_group in codes]

    def check(self, shape: AttentionShape, where: str) -> None:
        """Check bases that were computed, or read from a file.

        Args:
            where: names the file or layer in errors.
        Raises:
            CheckpointError: shapes that are not of such a layer. NumericsError: a NaN or Inf; names the tensor.
        """
        groups, width = shape.num_kv_heads // self.group_size, self.group_size * shape.head_dim
        columns = 2 * width if self.joint else width
        for side, pair in zip(("qk", "vo"), self.sides, strict=True):
            for name in ("encode", "decode"):
                check_stored(getattr(pair, name), (groups, width, columns), f"{where}: {side}.{name}")
            check_stored(pair.singular_values, (groups, columns), f"{where}: {side}.singular_values")
            for name, size in (("shift", columns), ("constant", width)):
                if getattr(pair, name) is not None:
                    check_stored(getattr(pair, name), (groups, size), f"{where}: {side}.{name}")
        if self.outputs is not None:
            check_stored(self.outputs, (shape.num_heads, width, width), f"{where}: outputs")


def check_stored(tensor: Tensor, expected: tuple[int, ...], where: str) -> None:
    """Check a tensor of a run folder.

    Raises:
        CheckpointError: not float64 of the expected shape. NumericsError: a NaN or Inf. Both name `where`.
    """
    if tuple(tensor.shape) != expected or tensor.dtype != torch.float64:
        raise CheckpointError(
            f"{where} is {tensor.dtype} of shape {list(tensor.shape)}, expected float64 of {list(expected)}.",
            "Run `rotor calibrate` again.",
        )
    if not torch.isfinite(tensor).all():
        raise NumericsError(f"{where} has elements that are NaN or Inf.", "Run `rotor calibrate` again.")


def split_pair(joint: BasisPair, group_size: int) -> tuple[BasisPair, BasisPair]:
    """Split the bases of joint latents into the rows of keys and those of values; both keep shift and codes."""

    def side(index: int) -> BasisPair:
        def rows(basis: Tensor) -> Tensor:
            return basis.unflatten(1, (group_size, 2, -1))[:, :, index].flatten(1, 2)

        return replace(
            joint,
            encode=rows(joint.encode),
            decode=rows(joint.decode),
            singular_values=joint.singular_values.clone(),  # safetensors writes no memory twice
            shift=None if joint.shift is None else joint.shift.clone(),
            constant=None if joint.constant is None else rows(joint.constant),
        )

    return side(0), side(1)


def stacked_pair(keys: BasisPair, values: BasisPair, group_size: int) -> BasisPair:
    """Stack the two sides of joint latents, the inverse of `split_pair`."""

    def rows(*sides: Tensor) -> Tensor:
        return torch.stack([side.unflatten(1, (group_size, -1)) for side in sides], dim=2).flatten(1, 3)

    constant = None
    if keys.constant is not None and values.constant is not None:
        constant = rows(keys.constant, values.constant)
    encode, decode = rows(keys.encode, values.encode), rows(keys.decode, values.decode)
    return replace(keys, encode=encode, decode=decode, constant=constant)


@dataclass(frozen=True)
class FoldedBasis:
    """How keys or values x of a group, side by side, n numbers, become a latent and are read from it; float64.

    latent: what is stored of it.
    encode: [n, rank]; the projection puts out x @ encode + shift.
    read: [n, rank], or [heads_per_kv, n, rank] where each query head has its own; x is read as
        latent @ decode^T + constant.
    shift: [rank]; None, as the next two, unless the latent is coded.
    offset: [rank], what the signed nibbles of a channel lack of the middle of a level and of the mean, in scales.
    dropped: [n], the mean of the channels that are not stored.
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
        """The same for a projection whose shift is larger by `by`, [rank], than what was asked for."""
        assert self.shift is not None
        assert self.offset is not None
        return replace(self, shift=self.shift + by, offset=self.offset - by)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are not None, by the names of the fields."""
        present = {field.name: getattr(self, field.name) for field in fields(self)[1:]}
        return {name: tensor for name, tensor in present.items() if tensor is not None}

    def on(self, device: torch.device) -> FoldedBasis:
        """A copy on a device, each tensor contiguous."""
        tensors = {name: tensor.to(device).contiguous() for name, tensor in self.tensors().items()}
        return FoldedBasis(self.latent, **tensors)


@dataclass(frozen=True)
class FoldedBases:
    """The folded bases of a layer's groups, in the order of its layout: what a checkpoint without weights stores."""

    keys: Sequence[FoldedBasis]
    values: Sequence[FoldedBasis]

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that `read` takes: `key.encode`, `value.read` and so on, of all groups side by side."""
        return {
            f"{side}.{name}": torch.cat([basis.tensors()[name] for basis in bases], -1)
            for side, bases in (("key", self.keys), ("value", self.values))
            for name in bases[0].tensors()
        }

    @classmethod
    def read(cls, get: Callable[[str], Tensor], layout: LayerLayout, shape: AttentionShape, where: str) -> FoldedBases:
        """Read what `tensors` gave.

        Args:
            get: reads a tensor by its name; raises CheckpointError where there is none.
        Raises:
            CheckpointError: a tensor does not fit the layout; names `where`.
        """
        size = layout.group_size * shape.head_dim
        names = [field.name for field in fields(FoldedBasis)[1:]]
        sides: dict[str, list[FoldedBasis]] = {}
        for side in ("key", "value"):
            latents = [group.key if side == "key" else group.values for group in layout.groups]
            ranks = [latent.rank for latent in latents]
            parts: list[Sequence[Tensor]] = []
            for name in names if layout.coded else names[:2]:
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
            sides[side] = [FoldedBasis(*parts_of_group) for parts_of_group in zip(latents, *parts, strict=True)]
        return cls(sides["key"], sides["value"])


def levels_of(channels: Channels) -> Tensor:
    """How many levels of each channel a unit of each column counts, [rank, width], float64."""
    levels = torch.zeros(channels.rank, channels.width, dtype=torch.float64)
    for place, column in enumerate(channels.columns):
        for channel, count in column.items():
            levels[channel, place] = count
    return levels
