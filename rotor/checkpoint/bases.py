"""Bases of a layer: what a run stores of them, and what is left of them once codes are folded in.

Data types alone: `rotor.calibration` computes them, `folding` makes weights of them. A group's *latent* is one number a
channel. A joint group has one latent of its keys and values, otherwise a group has one of keys and one of values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from ..errors import CheckpointError, NumericsError
from ..numerics import is_finite
from .layout import AttentionShape, KeyForm, LayerForm, LayerLayout, LayerRanks
from .rows import SCALE_SLOT, CodedRow, NumberRow, Row


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

    encode: [num_groups, dim, columns]; latent = x @ encode, x the stacked keys or values of a group, or each head's key
        and value.
    decode: [num_groups, dim, columns]; x is read as latent @ decode^T, so q . x becomes (q @ decode) . latent.
    singular_values: [num_groups, columns], descending.
    codes: of each group, of its columns in descending order of bits; empty where the latent is stored as numbers.
    mean: [num_groups, dim], of joint groups: what is coded is what x differs from it.
    lengths: [num_groups, columns], of joint groups of codes: weights of the squares of a token's latents in its scale.
    """

    encode: Tensor
    decode: Tensor
    singular_values: Tensor
    codes: tuple[ChannelCode, ...] = ()
    mean: Tensor | None = None
    lengths: Tensor | None = None

    def stored(self, group: int, rank: int) -> Row:
        """Row of a group in the cache: its channels by bits where they are coded, else the first `rank` numbers."""
        if not self.codes:
            return NumberRow(rank)
        return CodedRow.of_bits(self.codes[group].bits.tolist(), scaled=self.mean is not None)

    def ordered(self, order: Tensor) -> BasisPair:
        """The columns of each group in another order, [num_groups, columns]; without codes."""
        index = order.unsqueeze(1).expand_as(self.encode)
        return replace(
            self,
            encode=self.encode.gather(-1, index),
            decode=self.decode.gather(-1, index),
            singular_values=self.singular_values.gather(-1, order),
            codes=(),
        )


@dataclass(frozen=True)
class LayerBases:
    """Bases of one layer, batched over its groups.

    form: how RoPE stands in the keys that are stored.
    latents: the bases of the joint latent, or of the keys' and of the values' latent.
    outputs: [num_heads, n, n], second moments of each query head's attention output over its group's stacked values
        (n = group_size * head_dim), by which each head's slice of W_o is refitted at the rank it gets; None: it is not.
    """

    form: KeyForm
    group_size: int
    latents: tuple[BasisPair, ...]
    outputs: Tensor | None = None

    @property
    def joint(self) -> bool:
        """Tell whether keys and values are coded together."""
        return len(self.latents) == 1

    @property
    def layer_form(self) -> LayerForm:
        """Form that the layer is compressed to."""
        return LayerForm(self.form, self.group_size, self.joint)

    @property
    def num_groups(self) -> int:
        return len(self.latents[0].encode)

    @property
    def full_ranks(self) -> tuple[int, int]:
        """Ranks of keys and of values that remove nothing: all columns."""
        return self.latents[0].encode.shape[-1], self.latents[-1].encode.shape[-1]

    @property
    def qk(self) -> BasisPair:
        """The key side: encode is applied to keys, decode to queries or key latents; of both in joint groups."""
        return self.latents[0]

    @property
    def vo(self) -> BasisPair:
        """The value side, of groups that are not joint: encode is folded into W_v, decode into W_o."""
        assert not self.joint
        return self.latents[1]

    def stored_latents(self, ranks: LayerRanks) -> list[tuple[Row, ...]]:
        """Row that the cache holds of each group, see `BasisPair.stored`."""
        pairs = self.latents
        return [
            tuple(pair.stored(group, rank) for pair, rank in zip(pairs, of_group[: len(pairs)], strict=True))
            for group, of_group in enumerate(ranks)
        ]

    def check(self, shape: AttentionShape, where: str) -> None:
        """Check bases that were computed, or read from a file.

        Args:
            where: names the file or layer in errors.
        Raises:
            CheckpointError: shapes that are not of such a layer. NumericsError: a NaN or Inf; names the tensor.
        """
        width = self.group_size * shape.head_dim
        count, columns = latent_size(self.layer_form, shape)
        for name, pair in zip(self.layer_form.latent_names, self.latents, strict=True):
            for part in ("encode", "decode"):
                check_stored(getattr(pair, part), (count, columns, columns), f"{where}: {name}.{part}")
            check_stored(pair.singular_values, (count, columns), f"{where}: {name}.singular_values")
            if pair.mean is not None:
                check_stored(pair.mean, (count, columns), f"{where}: {name}.mean")
        if self.outputs is not None:
            check_stored(self.outputs, (shape.num_heads, width, width), f"{where}: outputs")


def latent_size(form: LayerForm, shape: AttentionShape) -> tuple[int, int]:
    """Count of each latent in a layer, and numbers of each."""
    return shape.num_kv_heads // form.group_size, form.columns(shape.head_dim)


def bases_bytes(form: LayerForm, shape: AttentionShape) -> int:
    """Bytes of a layer's bases: encode and decode of each latent, float64."""
    count, columns = latent_size(form, shape)
    return 8 * len(form.latent_names) * 2 * count * columns**2


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
    if not is_finite(tensor):
        raise NumericsError(f"{where} has elements that are NaN or Inf.", "Run `rotor calibrate` again.")


@dataclass(frozen=True)
class FoldedBasis:
    """Maps of the keys or values x of a group, side by side, n numbers, to a latent and back; float64.

    latent: what is stored of it.
    encode: [n, rank]; the projection puts out x @ encode + shift.
    read: [n, rank], or [heads_per_kv, n, rank] where each query head has its own; x is read as
        latent @ decode^T + constant.
    shift: [rank]; None, as the next two, unless the latent is coded.
    offset: [rank], what the signed nibbles of a channel lack of the middle of a level and of the mean, in scales.
    dropped: [n], the mean of the channels that are not stored.
    mean: [n], of joint groups of codes: what their scale does not multiply.
    """

    latent: Row
    encode: Tensor
    read: Tensor
    shift: Tensor | None = None
    offset: Tensor | None = None
    dropped: Tensor | None = None
    mean: Tensor | None = None

    @property
    def decode(self) -> Tensor:
        """`read` with a column for each nibble and crumb that attention reads of a row, and one for its scale."""
        if isinstance(self.latent, NumberRow):
            return self.read
        decode = self.read @ levels_of(self.latent).to(self.read)
        if self.latent.scaled:
            decode[..., SCALE_SLOT] = self._of_codes
        return decode

    @property
    def constant(self) -> Tensor:
        """Constant part of what a row is read as, [..., n]."""
        return self._of_codes if self.mean is None else self.mean

    @property
    def _of_codes(self) -> Tensor:
        """Constant part of the decoded vector, before the row's scale, [..., n]."""
        assert self.offset is not None
        assert self.dropped is not None
        return self.read @ self.offset + self.dropped

    def shifted(self, by: Tensor) -> FoldedBasis:
        """The same for a projection whose shift is larger by `by`, [rank], than what was asked for."""
        assert self.shift is not None
        assert self.offset is not None
        if self.mean is not None:
            return replace(self, shift=self.shift + by, mean=self.mean - self.read @ by)
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
class ScaledCode:
    """Scale and code of the latent of a joint group, float64; `tensors.layer_tensors` has the formula.

    shift, length: [rank].
    """

    shift: Tensor
    length: Tensor


@dataclass(frozen=True)
class FoldedBases:
    """The folded bases of a layer's groups, in the order of its layout: what a checkpoint without weights stores.

    codes: of joint groups of codes.
    """

    keys: Sequence[FoldedBasis]
    values: Sequence[FoldedBasis]
    codes: Sequence[ScaledCode] = ()

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that `read` takes: `key.encode`, `value.read` and so on, of all groups side by side."""
        sides = {
            f"{side}.{name}": torch.cat([basis.tensors()[name] for basis in bases], -1)
            for side, bases in (("key", self.keys), ("value", self.values))
            for name in bases[0].tensors()
        }
        return sides | {f"code.{name}": tensor for name, tensor in self.code_tensors().items()}

    def code_tensors(self) -> dict[str, Tensor]:
        """The parts of `codes`, of all groups one after another."""
        if not self.codes:
            return {}
        return {name: torch.cat([getattr(code, name) for code in self.codes]) for name in ("shift", "length")}

    @classmethod
    def read(cls, get: Callable[[str], Tensor], layout: LayerLayout, shape: AttentionShape, where: str) -> FoldedBases:
        """Read what `tensors` gave.

        Args:
            get: reads a tensor by its name; raises CheckpointError where there is none.
        Raises:
            CheckpointError: a tensor does not fit the layout; names `where`.
        """
        size = layout.group_size * shape.head_dim
        every = [field.name for field in fields(FoldedBasis)[1:]]
        names = every if layout.scaled else every[:-1] if layout.coded else every[:2]

        def checked(name: str, shapes: list[list[int]]) -> Tensor:
            tensor = get(name)
            if list(tensor.shape) not in shapes or tensor.dtype != torch.float64:
                raise CheckpointError(
                    f"{where}: {name} is {tensor.dtype} of {list(tensor.shape)}, expected float64 of {shapes[0]} by "
                    "config.json.",
                    "Get the checkpoint again.",
                )
            return tensor

        sides: dict[str, list[FoldedBasis]] = {}
        for side in ("key", "value"):
            latents = [group.key if side == "key" else group.values for group in layout.groups]
            ranks = [latent.rank for latent in latents]
            parts: list[Sequence[Tensor]] = []
            for name in names:
                widths = [size] * len(ranks) if name in ("dropped", "mean") else ranks
                before = [size] if name in ("encode", "read") else []
                allowed = [before, [shape.heads_per_kv, size]] if (side, name) == ("value", "read") else [before]
                tensor = checked(f"{side}.{name}", [[*sizes, sum(widths)] for sizes in allowed])
                parts.append(tensor.split(widths, -1))
            sides[side] = [FoldedBasis(*parts_of_group) for parts_of_group in zip(latents, *parts, strict=True)]
        codes = []
        if layout.scaled:
            ranks = [group.key.rank for group in layout.groups]
            parts_of_codes = (checked(f"code.{name}", [[sum(ranks)]]).split(ranks) for name in ("shift", "length"))
            codes = [ScaledCode(*code_parts) for code_parts in zip(*parts_of_codes, strict=True)]
        return cls(sides["key"], sides["value"], codes)


def levels_of(channels: CodedRow) -> Tensor:
    """Levels of each channel for a unit of each column, [rank, width], float64."""
    levels = torch.zeros(channels.rank, channels.width, dtype=torch.float64)
    for place, column in enumerate(channels.columns):
        for channel, count in column.items():
            levels[channel, place] = count
    return levels
