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

from rotor.checkpoint.bases import ChannelCode, FoldedBases, FoldedBasis
from rotor.checkpoint.channels import Channels, Latent, Numbers
from rotor.checkpoint.families import FAMILIES, attention_shape
from rotor.checkpoint.folding import fold_code, rewrite
from rotor.checkpoint.layout import POST_ROPE, AttentionShape, GroupLayout, KeyForm, LayerLayout
from rotor.checkpoint.projections import AttentionWeights
from rotor.checkpoint.section import FORMAT_VERSION, MARK
from rotor.models.source import Checkpoint

SHAPE = AttentionShape(1, 8, 4, 16, 64, rotary_dim=16)
NORMED = AttentionShape(1, 8, 4, 16, 64, rotary_dim=16, key_norm=True)
PARTIAL = AttentionShape(1, 8, 4, 16, 64, rotary_dim=8)
NO_ROPE = AttentionShape(1, 8, 4, 16, 64)

WIDE, NARROW = Channels(1, 0, 2, 5), Channels(n8=3, n4=4)


def layout_of(size: int, latents: Sequence[tuple[Latent, Latent | None]], form: KeyForm = POST_ROPE) -> LayerLayout:
    """Groups of `size` KV heads in reverse order, of these key and value latents."""
    heads = list(reversed(range(size * len(latents))))
    groups = (GroupLayout(tuple(heads[i * size : (i + 1) * size]), *own) for i, own in enumerate(latents))
    return LayerLayout(tuple(groups), *form)


LAYERS: dict[str, tuple[LayerLayout, AttentionShape]] = {
    "joint, T 8, F 3": (layout_of(2, [(WIDE, None), (NARROW, None)], KeyForm(8, 3)), SHAPE),
    "joint, T 64, F 0": (layout_of(2, [(WIDE, None)] * 2, KeyForm(64, 0)), SHAPE),
    "joint, pre": (layout_of(1, [(WIDE, None)] * 2 + [(NARROW, None)] * 2, KeyForm(64, 8)), SHAPE),
    "joint, pre, normed": (layout_of(4, [(WIDE, None)], KeyForm(64, 8)), NORMED),
    "apart, post": (layout_of(1, [(WIDE, NARROW), (WIDE, NARROW), (NARROW, NARROW), (NARROW, WIDE)]), SHAPE),
    "apart, T 16, F 2, partial": (layout_of(2, [(WIDE, NARROW)] * 2, KeyForm(16, 2)), PARTIAL),
    "joint, no RoPE": (layout_of(2, [(WIDE, None), (NARROW, None)]), NO_ROPE),
    "numbers, post": (layout_of(1, [(Numbers(n), Numbers(m)) for n, m in ((12, 8), (8, 8), (8, 4), (4, 2))]), SHAPE),
    "numbers, pre": (layout_of(2, [(Numbers(24), Numbers(16))] * 2, KeyForm(64, 8)), SHAPE),
    "numbers, no RoPE": (layout_of(4, [(Numbers(30), Numbers(20))]), NO_ROPE),
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


def random_bases(
    layout: LayerLayout, shape: AttentionShape, generator: torch.Generator, rounded: bool = False
) -> tuple[FoldedBases, list[ChannelCode] | None]:
    """Bases of a layer's groups with their codes folded in, and these codes, of keys and of values, for all groups.

    Args:
        rounded: the codes are not folded in, for a layer that stores numbers in their place.
    """

    def draw(latent: Latent, width: int, parts: int) -> tuple[list[FoldedBasis], ChannelCode | None]:
        """Of a latent of so many numbers side by side: keys, values, or (two parts) both."""
        square = torch.linalg.qr(torch.randn(width, width, generator=generator).double())[0][:, : latent.rank]
        stretch = 1 + torch.rand(latent.rank, generator=generator).double()
        mean = 0.1 * torch.randn(latent.rank, generator=generator).double()
        pairs = zip((square * stretch).chunk(parts), (square / stretch).chunk(parts), strict=True)
        if not isinstance(latent, Channels):
            return [FoldedBasis(latent, *pair) for pair in pairs], None
        bits = torch.tensor(latent.bits)
        code = ChannelCode(bits, mean, 8.0 / 2.0**bits)
        if rounded:
            return [FoldedBasis(Numbers(latent.rank), *pair) for pair in pairs], code
        return [fold_code(*pair, code, latent) for pair in pairs], code

    found: list[list[FoldedBasis]] = []
    codes: list[list[ChannelCode | None]] = []
    width = layout.group_size * shape.head_dim
    for group in layout.groups:
        if group.value is None:
            bases, code = draw(group.key, 2 * width, 2)
            own = [code, code]
        else:
            ((key,), key_code), ((value,), value_code) = (draw(latent, width, 1) for latent in (group.key, group.value))
            bases, own = [key, value], [key_code, value_code]
        found.append(bases)
        codes.append(own)
    keys, values = zip(*found, strict=True)
    if codes[0][0] is None:
        return FoldedBases(keys, values), None
    return FoldedBases(keys, values), [
        ChannelCode(*(torch.cat([getattr(code, name) for code in side]) for name in ("bits", "mean", "scale")))
        for side in zip(*codes, strict=True)
    ]


def of_numbers(layout: LayerLayout) -> LayerLayout:
    """With a number in place of each code."""
    groups = (
        replace(g, key=Numbers(g.key.rank), value=None if g.value is None else Numbers(g.value.rank))
        for g in layout.groups
    )
    return replace(layout, groups=tuple(groups))


LayoutOf = Callable[[AttentionShape], LayerLayout]
Form = KeyForm | Callable[[AttentionShape], KeyForm]


def groups_of(size: int, form: Form, *latents: tuple[Latent, Latent | None]) -> LayoutOf:
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
    family, shape = FAMILIES[checkpoint.config.model_type], attention_shape(checkpoint.config)
    makers = layout_of if isinstance(layout_of, Sequence) else [layout_of] * shape.num_layers
    layouts = [make(shape) for make in makers]
    tensors = {name: checkpoint.tensor(name).clone() for name in checkpoint.names}
    for layer, layout in enumerate(layouts):
        prefix = family.stored_prefix(layer, checkpoint.names)
        for name in family.consumed:
            tensors.pop(prefix + name, None)
        made = random_tensors(layout, shape, biases, torch.float32, seed=layer)
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
