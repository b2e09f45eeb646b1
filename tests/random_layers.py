"""Layers of each form with random tensors, and checkpoints of them: for tests that need no calibration."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from rotor.format.channels import Channels, Latent, Numbers
from rotor.format.layout import POST_ROPE, AttentionShape, GroupLayout, KeyForm, LayerLayout
from rotor.format.section import FORMAT_VERSION, MARK
from rotor.format.tensors import layer_tensors
from rotor.models.checkpoint import Checkpoint
from rotor.runtime.families import FAMILIES, attention_shape

SHAPE = AttentionShape(1, 8, 4, 16, 64, rotary_dim=16)
NORMED = AttentionShape(1, 8, 4, 16, 64, rotary_dim=16, key_norm=True)
PARTIAL = AttentionShape(1, 8, 4, 16, 64, rotary_dim=8)
NO_ROPE = AttentionShape(1, 8, 4, 16, 64)

WIDE, NARROW = Channels(1, 0, 2, 5), Channels(n8=3, n4=4)


def layout_of(size: int, latents: list[tuple[Latent, Latent | None]], form: KeyForm = POST_ROPE) -> LayerLayout:
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
    """Of a layer, without norms: what goes into codes uses their range, what reads them knows a nibble's power."""
    generator = torch.Generator().manual_seed(seed)
    heads = layout.group_size * shape.heads_per_kv
    of_keys, of_values = [g.key for g in layout.groups], [g.values for g in layout.groups]
    tensors = {}
    for name, spec in layer_tensors(layout, shape, biases).items():
        module, rows = name.split(".")[0], spec.shape[0]

        def noise(*sizes: int, per: int = spec.shape[-1]) -> Tensor:
            return torch.randn(sizes, generator=generator, dtype=dtype) * 1.5 / per**0.5

        if module == "query_basis":
            made = torch.cat([read(noise(rows, own.rank, per=own.rank), own) for own in of_keys], -1)
        elif module == "o_proj" and len(spec.shape) == 2:
            made = torch.cat([read(noise(rows, own.rank), own) for own in of_values for _ in range(heads)], -1)
        elif module == "q_proj" and not shape.rotary_dim:
            sizes = [(own, own.rank) for own in of_keys for _ in range(heads)]
            columns = spec.shape[1:]
            made = torch.cat([read(noise(*columns, rank, per=shape.hidden_size), own) for own, rank in sizes], -1)
            made = made.movedim(-1, 0)
        elif module in ("key_basis", "key_shift"):
            made = noise(*spec.shape, per=max(rows, 64)) * torch.cat([steps(own) for own in of_keys])
        elif module == "v_proj" or (module == "k_proj" and layout.folds_keys(shape)):
            joint = module == "k_proj" or layout.joint
            own = torch.cat([steps(latent) for latent in (of_keys if joint else of_values)])
            made = noise(*spec.shape, per=shape.hidden_size) * own.view(-1, *[1] * (len(spec.shape) - 1))
        else:
            made = noise(*spec.shape, per=max(spec.shape[-1], 16))
        tensors[name] = made.to(torch.float32 if spec.float32 else dtype).contiguous()
    return tensors


def steps(latent: Latent) -> Tensor:
    """A third of the codes below zero, by channel; of numbers 1."""
    return torch.tensor([2.0 ** (bits - 1) / 3 for bits in latent.bits] if latent.coded else [1.0] * latent.rank)


def read(columns: Tensor, latent: Latent) -> Tensor:
    """[..., rank] by channel -> [..., width] by nibble, such that a channel counts as much as another."""
    if not latent.coded:
        return columns
    out = columns.new_zeros(*columns.shape[:-1], latent.width)
    for place, nibble in enumerate(latent.nibbles):
        if nibble is not None:
            channel, power = nibble
            out[..., place] = columns[..., channel] * 2.0 * 16**power / 2.0 ** (latent.bits[channel] - 1)
    return out


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
