"""Layers of each form with random tensors, and checkpoints of them: for tests that need no calibration."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from rotor.checkpoint.bases import BasisPair, ChannelCode, FoldedBases, FoldedBasis, ScaledCode, levels_of
from rotor.checkpoint.families import attention_shape, family_of
from rotor.checkpoint.folding import fold_code, joint_basis, joint_side, rewrite
from rotor.checkpoint.layout import POST_ROPE, PRE_ROPE, AttentionShape, GroupLayout, KeyForm, LayerLayout
from rotor.checkpoint.projections import AttentionWeights
from rotor.checkpoint.rows import SIGNED, CodedRow, NumberRow, Row, RowScale, scale_of
from rotor.checkpoint.schemas import FORMAT_VERSION
from rotor.checkpoint.section import MARK
from rotor.models.source import Checkpoint

SHAPE = AttentionShape(1, 8, 4, 16, 64, rotary_dim=16)
NORMED = AttentionShape(1, 8, 4, 16, 64, rotary_dim=16, key_norm=True)
PARTIAL = AttentionShape(1, 8, 4, 16, 64, rotary_dim=8)
NO_ROPE = AttentionShape(1, 8, 4, 16, 64)

WIDE, NARROW = CodedRow(1, 0, 2, 5), CodedRow(n8=3, n4=4)
WIDE_BOTH, NARROW_BOTH = replace(WIDE, scaled=True), replace(NARROW, scaled=True)
"""Rows of keys and values together, which have a scale."""


def layout_of(size: int, latents: Sequence[tuple[Row, Row | None]], form: KeyForm = POST_ROPE) -> LayerLayout:
    """Groups of `size` KV heads in reverse order, of these key and value latents."""
    heads = list(reversed(range(size * len(latents))))
    groups = (GroupLayout(tuple(heads[i * size : (i + 1) * size]), *own) for i, own in enumerate(latents))
    return LayerLayout(tuple(groups), *form)


LAYERS: dict[str, tuple[LayerLayout, AttentionShape]] = {
    "joint, T 8": (layout_of(2, [(WIDE_BOTH, None), (NARROW_BOTH, None)], KeyForm(8)), SHAPE),
    "joint, T 64": (layout_of(2, [(WIDE_BOTH, None)] * 2, KeyForm(64)), SHAPE),
    "joint, pre": (layout_of(1, [(WIDE_BOTH, None)] * 2 + [(NARROW_BOTH, None)] * 2, PRE_ROPE), SHAPE),
    "joint, pre, normed": (layout_of(4, [(WIDE_BOTH, None)], PRE_ROPE), NORMED),
    "apart, post": (layout_of(1, [(WIDE, NARROW), (WIDE, NARROW), (NARROW, NARROW), (NARROW, WIDE)]), SHAPE),
    "apart, T 16, partial": (layout_of(2, [(WIDE, NARROW)] * 2, KeyForm(16)), PARTIAL),
    "joint, no RoPE": (layout_of(2, [(WIDE_BOTH, None), (NARROW_BOTH, None)]), NO_ROPE),
    "numbers, post": (
        layout_of(1, [(NumberRow(n), NumberRow(m)) for n, m in ((12, 8), (8, 8), (8, 4), (4, 2))]),
        SHAPE,
    ),
    "numbers, pre": (layout_of(2, [(NumberRow(24), NumberRow(16))] * 2, PRE_ROPE), SHAPE),
    "numbers, no RoPE": (layout_of(4, [(NumberRow(30), NumberRow(20))]), NO_ROPE),
}
"""By name: a layout and the sizes of its model, of every form, both kinds of rows, one to four groups."""


def random_tensors(
    layout: LayerLayout,
    shape: AttentionShape,
    biases: Collection[str] = "",
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Of a layer, without norms: random projections, folded into random bases."""
    generator = torch.Generator().manual_seed(seed)
    heads, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    sizes = {"q": (heads, shape.hidden_size), "k": (kv, shape.hidden_size), "v": (kv, shape.hidden_size)}
    sizes["o"] = shape.hidden_size, heads
    drawn = {f"{p}_weight": 1.5 * torch.randn(size, generator=generator) / size[1] ** 0.5 for p, size in sizes.items()}
    drawn |= {f"{p}_bias": 0.3 * torch.randn(sizes[p][0], generator=generator) for p in biases}
    weights = AttentionWeights(**{name: tensor.to(dtype) for name, tensor in drawn.items()})
    return rewrite(weights, random_bases(layout, shape, generator)[0], layout, shape)


def row_scale_of(tensors: dict[str, Tensor]) -> RowScale | None:
    """Scale of the rows of a layer with these tensors; None where they have no scale."""
    return RowScale(tensors["code_shift"], tensors["length_weight"]) if "code_shift" in tensors else None


Rounding = Callable[[Tensor], Tensor]
"""Rows of numbers in place of codes, [..., rank of all groups]."""


def random_bases(
    layout: LayerLayout,
    shape: AttentionShape,
    generator: torch.Generator,
    rounded: bool = False,
    mean: float = 0.1,
) -> tuple[FoldedBases, tuple[Rounding, Rounding] | None]:
    """Bases of a layer's groups with their codes folded in, and for numbers in place of codes what rounds them alike.

    Args:
        rounded: the codes are not folded in, for a layer that stores numbers in their place.
        mean: standard deviation of the means of joint groups; numbers have none.
    """
    keys, values, codes = [], [], []
    rounds: list[list[Rounding]] = [[], []]
    for group in layout.groups:
        if group.key.scaled:
            assert isinstance(group.key, CodedRow)
            key, value, code, rounding = _random_joint(group.key, layout, shape, generator, rounded, mean)
            codes.append(code)
            rounds[0].append(rounding)
        elif group.value is None:
            key, value = _random_basis(group.key, 2 * layout.group_size * shape.head_dim, 2, generator, rounded)[0]
        else:
            width = layout.group_size * shape.head_dim
            (key,), of_key = _random_basis(group.key, width, 1, generator, rounded)
            (value,), of_value = _random_basis(group.value, width, 1, generator, rounded)
            rounds[0].append(of_key)
            rounds[1].append(of_value)
        keys.append(key)
        values.append(value)
    bases = FoldedBases(keys, values, [] if rounded else codes)
    if not layout.coded:
        return bases, None
    sizes = [group.key.rank for group in layout.groups], [group.values.rank for group in layout.groups]
    of_keys, of_values = (_side_by_side(own, ranks) for own, ranks in zip(rounds, sizes, strict=True))
    return bases, (of_keys, of_values)


def _side_by_side(parts: Sequence[Rounding], ranks: Sequence[int]) -> Rounding:
    def rounded(latents: Tensor) -> Tensor:
        own = latents.split(list(ranks), -1)
        return torch.cat([part(latent) for part, latent in zip(parts, own, strict=True)], dim=-1)

    return rounded


def _random_basis(
    latent: Row, width: int, parts: int, generator: torch.Generator, rounded: bool
) -> tuple[list[FoldedBasis], Rounding]:
    """A latent of so many numbers side by side: of keys, of values, or (two parts) of both."""
    square = torch.linalg.qr(torch.randn(width, width, generator=generator).double())[0][:, : latent.rank]
    stretch = 1 + torch.rand(latent.rank, generator=generator).double()
    mean = 0.1 * torch.randn(latent.rank, generator=generator).double()
    pairs = zip((square * stretch).chunk(parts), (square / stretch).chunk(parts), strict=True)
    if not isinstance(latent, CodedRow):
        return [FoldedBasis(latent, *pair) for pair in pairs], lambda latents: latents
    bits = torch.tensor(latent.bits)
    code = ChannelCode(bits, mean, 8.0 / 2.0**bits)
    if rounded:
        return [FoldedBasis(NumberRow(latent.rank), *pair) for pair in pairs], lambda z: code.decode(code.encode(z))
    return [fold_code(*pair, code, latent) for pair in pairs], lambda z: code.decode(code.encode(z))


def _random_joint(
    row: CodedRow,
    layout: LayerLayout,
    shape: AttentionShape,
    generator: torch.Generator,
    rounded: bool,
    mean: float,
) -> tuple[FoldedBasis, FoldedBasis, ScaledCode, Rounding]:
    """The latent of a joint group; all that codes do to numbers is in the rounding."""
    pair = random_joint(row, 2 * layout.group_size * shape.head_dim, generator, mean)
    basis, code = joint_basis(pair, 0, row)
    assert code is not None
    assert basis.offset is not None
    offset, scale = basis.offset - SIGNED * levels_of(row).sum(1), RowScale(code.shift, code.length)

    def rounding(latents: Tensor) -> Tensor:
        codes, nibble = row.codes(latents, scale)
        assert nibble is not None
        return (codes + offset.to(latents)) * scale_of(nibble).to(latents)

    sides = [joint_side(basis, side, layout.group_size) for side in (0, 1)]
    if rounded:
        sides = [FoldedBasis(NumberRow(row.rank), side.encode, side.read) for side in sides]
    return sides[0], sides[1], code, rounding


def random_joint(row: CodedRow, width: int, generator: torch.Generator, mean: float = 0.1) -> BasisPair:
    """A random basis of one joint group, coded: numbers of a standard deviation of 1 have latents of about 1.

    Args:
        width: numbers of the group. mean: standard deviation of the means of numbers and of channels that are not
            stored.
    """

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(shape, generator=generator, dtype=torch.float64)

    square = torch.linalg.qr(normal(1, width, width))[0]
    stretch = 1 + torch.rand(1, 1, width, generator=generator, dtype=torch.float64)
    bits = torch.tensor(row.bits + (0,) * (width - row.rank))
    means = normal(width, scale=0.1) * torch.where(bits > 0, 1.0, 10 * mean)
    code = ChannelCode(bits, means, torch.where(bits > 0, 8.0 / 2.0**bits, 1.0))
    both = square * stretch, square / stretch
    numbers = normal(1, width, scale=mean)
    return BasisPair(*both, torch.ones(1, width), codes=(code,), mean=numbers, lengths=stretch[:, 0] ** -2)


def of_numbers(layout: LayerLayout) -> LayerLayout:
    """With a number in place of each code."""
    groups = (
        replace(g, key=NumberRow(g.key.rank), value=None if g.value is None else NumberRow(g.value.rank))
        for g in layout.groups
    )
    return replace(layout, groups=tuple(groups))


LayoutOf = Callable[[AttentionShape], LayerLayout]
Form = KeyForm | Callable[[AttentionShape], KeyForm]


def groups_of(size: int, form: Form, *latents: tuple[Row, Row | None]) -> LayoutOf:
    """Groups of `size` KV heads (0: all of them), with these latents in turn."""

    def made(shape: AttentionShape) -> LayerLayout:
        count = shape.num_kv_heads // (size or shape.num_kv_heads)
        own = sorted((latents * count)[:count], key=lambda pair: -pair[0].width)
        return layout_of(size or shape.num_kv_heads, own, form(shape) if callable(form) else form)

    return made


def write_random(source: Path, out: Path, layout_of: LayoutOf | Sequence[LayoutOf], biases: str = "") -> Path:
    """A compressed checkpoint with a tiny model's config and the rest of its weights, and random attention layers.

    Args:
        layout_of: of all layers, or of each.
    """
    checkpoint = Checkpoint(source)
    family, shape = family_of(checkpoint.config), attention_shape(checkpoint.config)
    makers = layout_of if isinstance(layout_of, Sequence) else [layout_of] * shape.num_layers
    layouts = [make(own) for make, own in zip(makers, shape.layers, strict=True)]
    tensors = {name: checkpoint.tensor(name).clone() for name in checkpoint.names}
    for layer, layout in enumerate(layouts):
        prefix = family.stored_prefix(layer, checkpoint.names)
        for name in family.consumed:
            tensors.pop(prefix + name, None)
        made = random_tensors(layout, shape.layer(layer), biases, torch.float32, seed=layer)
        tensors |= {prefix + name: tensor for name, tensor in made.items()}
    return write_checkpoint(source, out, tensors, layouts, biases)


def write_checkpoint(
    source: Path, out: Path, tensors: dict[str, Tensor], layouts: Sequence[LayerLayout], biases: Collection[str]
) -> Path:
    """A compressed checkpoint of these tensors, which goes by the other files of `source`."""
    shutil.copytree(source, out)
    for file in out.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["attn_implementation"] = MARK
    config["quantization_config"] = {
        "quant_method": MARK,
        "format_version": FORMAT_VERSION,
        "biases": sorted(biases),
        "layers": {str(i): layout.to_dict() for i, layout in enumerate(layouts)},
    }
    (out / "config.json").write_text(json.dumps(config))
    return out


def rotation_table(length: int, rotary_dim: int, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """cos and sin [length, rotary_dim], float64, times the attention factor of some scaled RoPEs."""
    frequency = 100.0 ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / max(rotary_dim, 1))
    angle = torch.arange(length, dtype=torch.float64)[:, None] * torch.cat([frequency, frequency])
    return factor * angle.cos(), factor * angle.sin()
