"""Bases of a layer: what a run stores of them, and what is left of them once codes are folded in.

Data types alone: `rotor.calibration` computes them, `folding` makes weights of them. A group's *latent* is one number a
channel. A joint group has a latent of the fast planes of each KV head, and one of the rest of its keys and values;
otherwise a group has one of keys and one of values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from ..errors import CheckpointError, NumericsError
from ..numerics import is_finite, one_thread
from .channels import Channels, Latent, Numbers, Parted
from .layout import AttentionShape, KeyForm, LayerForm, LayerLayout, LayerRanks


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
    lengths: [num_groups, columns], of joint groups of codes: weights of the squares of a token's latents in its scale.
    """

    encode: Tensor
    decode: Tensor
    singular_values: Tensor
    shift: Tensor | None = None
    constant: Tensor | None = None
    codes: tuple[ChannelCode, ...] = ()
    lengths: Tensor | None = None

    def stored(self, group: int, rank: int) -> Channels | Numbers:
        """What the cache holds of a group: its channels by bits where they are coded, else the first `rank` numbers."""
        return Channels.of_bits(self.codes[group].bits.tolist()) if self.codes else Numbers(rank)

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
class Parting:
    """What ties the latents of joint groups together, float64.

    The numbers of a group are each head's key and then its value, head by head, n = 2 * group_size * head_dim. Its fast
    ones are the fast planes of each key (`fast_numbers`); the rest are the others. With the fast ones read as f^, off
    by e, the rest r is coded as r + e feedback - f^ prediction, and read with f^ prediction added.

    mean: [num_groups, n], of the numbers; what is coded is what differs from it.
    spread: [num_groups, fast, fast], covariance of the fast numbers; between: [num_groups, fast, others].
    prediction, feedback: [num_groups, fast, others]. The prediction is that from the fast numbers themselves, until
        codes are known (`predicted_from`).
    """

    mean: Tensor
    spread: Tensor
    between: Tensor
    prediction: Tensor
    feedback: Tensor

    def predicted_from(self, fast: BasisPair, distortion: Tensor) -> Parting:
        """The same with the rest predicted from the codes of fast numbers, by least squares.

        A code y^ of a channel y of variance v with distortion d is taken for the mean of its level: E[y^ y] = (1 - d) v
        and E[y^ (y^ - y)] = 0; what it has of other channels is in proportion.

        Args:
            fast: bases of the fast numbers of each KV head. distortion: [num_kv_heads, channels], share of the variance
                that is lost; 1 of a channel that is not stored.
        """
        groups = len(self.mean)
        encode, decode = (blocks_of(basis.unflatten(0, (groups, -1))) for basis in (fast.encode, fast.decode))
        lost = distortion.unflatten(0, (groups, -1)).flatten(1)
        kept = 1 - lost
        spread, between = encode.mT @ self.spread @ encode, encode.mT @ self.between
        own = torch.diag_embed(spread.diagonal(dim1=-2, dim2=-1))
        of_codes = kept.unsqueeze(-1) * ((spread - own) * kept.unsqueeze(-2) + own)
        moved = (spread - own) * lost.unsqueeze(-2) @ decode.mT @ self.feedback
        found = solved(of_codes, kept.unsqueeze(-1) * (between - moved))
        return replace(self, prediction=encode @ found)


def solved(moments: Tensor, right: Tensor) -> Tensor:
    """Solve symmetric systems, damped so that numbers without variance have no part; [..., n, m]."""
    size = moments.diagonal(dim1=-2, dim2=-1).clamp(min=torch.finfo(moments.dtype).tiny).sqrt()
    scaled = moments / (size.unsqueeze(-1) * size.unsqueeze(-2))
    eye = torch.eye(moments.shape[-1], dtype=moments.dtype, device=moments.device)
    with one_thread():
        return torch.linalg.solve(scaled + PREDICTION_DAMPING * eye, right / size.unsqueeze(-1)) / size.unsqueeze(-1)


PREDICTION_DAMPING = 1e-7
"""Share of each variance that is added when the rest is predicted from fast numbers."""


def blocks_of(parts: Tensor) -> Tensor:
    """Place [groups, heads, n, m] on the diagonals of [groups, heads * n, heads * m]."""
    return torch.stack([torch.block_diag(*of_group) for of_group in parts])


def fast_numbers(form: KeyForm, group_size: int, shape: AttentionShape) -> Tensor:
    """Indices of the fast planes of each KV head among the numbers of a joint group, [group_size, 2 * fast_planes]."""
    plane = torch.arange(form.fast_planes)
    own = torch.cat([plane, plane + shape.rotary_planes])
    return 2 * shape.head_dim * torch.arange(group_size)[:, None] + own


def other_numbers(form: KeyForm, group_size: int, shape: AttentionShape) -> Tensor:
    """Indices of the numbers of a joint group that are not `fast_numbers`."""
    other = torch.ones(2 * group_size * shape.head_dim, dtype=torch.bool)
    other[fast_numbers(form, group_size, shape).flatten()] = False
    return other.nonzero().flatten()


@dataclass(frozen=True)
class LayerBases:
    """Bases of one layer, batched over its groups.

    form: how RoPE stands in the keys that are stored.
    latents: the bases of the keys' and of the values' latent. Of joint groups those of fast planes, batched over KV
        heads (missing where no plane is fast), and those of the rest.
    outputs: [num_heads, n, n], second moments of each query head's attention output over its group's stacked values
        (n = group_size * head_dim), by which each head's slice of W_o is refitted at the rank it gets; None: it is not.
    parting: of joint groups; None of others.
    """

    form: KeyForm
    group_size: int
    latents: tuple[BasisPair, ...]
    outputs: Tensor | None = None
    parting: Parting | None = None

    @property
    def joint(self) -> bool:
        """Whether keys and values are coded together."""
        return self.parting is not None

    @property
    def layer_form(self) -> LayerForm:
        """What the layer is compressed to."""
        return LayerForm(self.form, self.group_size, self.joint)

    @property
    def num_groups(self) -> int:
        return len(self.latents[-1].encode)

    @property
    def full_ranks(self) -> tuple[int, int]:
        """Ranks of keys and of values that remove nothing: all columns."""
        if self.joint:
            *fast, rest = (pair.encode.shape[-1] for pair in self.latents)
            return (self.group_size * sum(fast) + rest,) * 2
        return self.qk.encode.shape[-1], self.vo.encode.shape[-1]

    @property
    def qk(self) -> BasisPair:
        """The key side, of groups that are not joint: encode is applied to keys, decode to queries or key latents."""
        assert self.parting is None
        return self.latents[0]

    @property
    def vo(self) -> BasisPair:
        """The value side, of groups that are not joint: encode is folded into W_v, decode into W_o."""
        assert self.parting is None
        return self.latents[1]

    def stored_latents(self, ranks: LayerRanks) -> list[tuple[Latent, ...]]:
        """What the cache holds of each group, see `BasisPair.stored`; a joint group has one latent of all its parts."""
        if self.parting is not None:
            return [(self._stored_jointly(group, rank),) for group, (rank, _) in enumerate(ranks)]
        return [
            tuple(pair.stored(group, rank) for pair, rank in zip(self.latents, of_group, strict=True))
            for group, of_group in enumerate(ranks)
        ]

    def _stored_jointly(self, group: int, rank: int) -> Latent:
        *fast, rest = self.latents
        own = rest.stored(group, rank)
        if isinstance(own, Numbers):
            return own
        heads = range(group * self.group_size, (group + 1) * self.group_size)
        of_heads = (pair.stored(head, rank) for pair in fast for head in heads)
        return Parted(own, tuple(latent for latent in of_heads if isinstance(latent, Channels)))

    def check(self, shape: AttentionShape, where: str) -> None:
        """Check bases that were computed, or read from a file.

        Args:
            where: names the file or layer in errors.
        Raises:
            CheckpointError: shapes that are not of such a layer. NumericsError: a NaN or Inf; names the tensor.
        """
        groups, width = shape.num_kv_heads // self.group_size, self.group_size * shape.head_dim
        names, sizes = latent_sizes(self.layer_form, shape)
        for name, (count, columns), pair in zip(names, sizes, self.latents, strict=True):
            for part in ("encode", "decode"):
                check_stored(getattr(pair, part), (count, columns, columns), f"{where}: {name}.{part}")
            check_stored(pair.singular_values, (count, columns), f"{where}: {name}.singular_values")
            for part in ("shift", "constant"):
                if getattr(pair, part) is not None:
                    check_stored(getattr(pair, part), (count, columns), f"{where}: {name}.{part}")
        if self.outputs is not None:
            check_stored(self.outputs, (shape.num_heads, width, width), f"{where}: outputs")
        if self.parting is not None:
            fast = self.group_size * 2 * self.form.fast_planes
            between = (groups, fast, 2 * width - fast)
            sizes_of = {"mean": (groups, 2 * width), "spread": (groups, fast, fast)}
            for field in fields(Parting):
                expected = sizes_of.get(field.name, between)
                check_stored(getattr(self.parting, field.name), expected, f"{where}: parting.{field.name}")


def latent_sizes(form: LayerForm, shape: AttentionShape) -> tuple[tuple[str, ...], list[tuple[int, int]]]:
    """Names of a layer's latents, and how many of each there are with how many numbers."""
    groups, columns, fast = shape.num_kv_heads // form.group_size, form.columns(shape.head_dim), form.fast_columns
    each = (groups, columns - form.group_size * fast)
    names = form.latent_names
    return names, [(shape.num_kv_heads, fast) if name == "fast" else each for name in names]


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
    """How keys or values x of a group, side by side, n numbers, become a latent and are read from it; float64.

    latent: what is stored of it.
    encode: [n, rank]; the projection puts out x @ encode + shift.
    read: [n, rank], or [heads_per_kv, n, rank] where each query head has its own; x is read as
        latent @ decode^T + constant.
    shift: [rank]; None, as the next two, unless the latent is coded.
    offset: [rank], what the signed nibbles of a channel lack of the middle of a level and of the mean, in scales.
    dropped: [n], the mean of the channels that are not stored.
    mean: [n], of joint groups of codes: what their scale does not multiply.
    """

    latent: Latent
    encode: Tensor
    read: Tensor
    shift: Tensor | None = None
    offset: Tensor | None = None
    dropped: Tensor | None = None
    mean: Tensor | None = None

    @property
    def decode(self) -> Tensor:
        """`read` with a column for each nibble and crumb that attention reads of a row, and one for its scale."""
        if isinstance(self.latent, Numbers):
            return self.read
        decode = self.read @ levels_of(self.latent).to(self.read)
        if isinstance(self.latent, Parted):
            decode[..., self.latent.scale_word] = self._of_codes
        return decode

    @property
    def constant(self) -> Tensor:
        """What is added to what a row is read as, [..., n]."""
        return self._of_codes if self.mean is None else self.mean

    @property
    def _of_codes(self) -> Tensor:
        """What is added to the nibbles' part of x, [..., n]; a scale multiplies both."""
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
    """How the latents of a joint group of codes are scaled and coded, float64; `tensors.layer_tensors` has the formula.

    shift, length: [rank]. errors: [fast rank, rank of the rest]; None where no plane is fast.
    """

    shift: Tensor
    length: Tensor
    errors: Tensor | None = None


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
        """The parts of `codes`, of all groups one after another, flat."""
        parts = {name: [getattr(code, name) for code in self.codes] for name in ("shift", "length", "errors")}
        return {
            name: torch.cat([x.flatten() for x in own]) for name, own in parts.items() if own and own[0] is not None
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
        every = [field.name for field in fields(FoldedBasis)[1:]]
        names = {Numbers: every[:2], Channels: every[:-1], Parted: every}[type(layout.groups[0].key)]

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
        parted = [group.key for group in layout.groups if isinstance(group.key, Parted)]
        ranks = [latent.rank for latent in parted]
        products = [latent.fast_rank * latent.rest.rank for latent in parted]
        codes = []
        if parted:
            shifts, lengths = (checked(f"code.{name}", [[sum(ranks)]]).split(ranks) for name in ("shift", "length"))
            errors: list[Tensor | None] = [None] * len(parted)
            if layout.fast_planes:
                flat = checked("code.errors", [[sum(products)]]).split(products)
                errors = [part.view(latent.fast_rank, -1) for part, latent in zip(flat, parted, strict=True)]
            codes = [ScaledCode(*own) for own in zip(shifts, lengths, errors, strict=True)]
        return cls(sides["key"], sides["value"], codes)


def levels_of(channels: Channels | Parted) -> Tensor:
    """How many levels of each channel a unit of each column counts, [rank, width], float64."""
    levels = torch.zeros(channels.rank, channels.width, dtype=torch.float64)
    for place, column in enumerate(channels.columns):
        for channel, count in column.items():
            levels[channel, place] = count
    return levels
