"""Layers whose kernels are compiled: those of a checkpoint, and named ones that no checkpoint has."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ...calibration.prediction.cost import DecodeStep
from ...calibration.prediction.instructions import HEAD_DIM, Specialisation
from ...checkpoint.channels import Channels, Numbers
from ...checkpoint.kernel_config import LayerKernels, layout_class
from ...checkpoint.layout import AttentionShape, ExactTokens, GroupLayout, KeyForm, LayerLayout
from ...kernels.defaults import default_layer
from ...models.compressed import CompressedCheckpoint

STEP = DecodeStep(context_tokens=32768, batch_size=8)
"""Whose instructions are counted, a key, and whose time is predicted."""

PAGE = 64
"""Keys of a page, in layers that no checkpoint has."""


@dataclass(frozen=True)
class Subject:
    """A layer to be compiled: its name, how many are alike, its kernels' configuration, and the model's sizes."""

    name: str
    layers: int
    layout: LayerLayout
    kernels: LayerKernels
    shape: AttentionShape
    dtype: torch.dtype
    page: int = 0
    softcap: bool = False


def subjects_of(folder: Path) -> list[Subject]:
    """The distinct layers of a compressed checkpoint, by its kernel_config.json.

    Raises:
        CheckpointError: not a compressed checkpoint; no kernel configuration, or nonsense in it.
    """
    checkpoint = CompressedCheckpoint(folder)
    alike = Counter(zip(checkpoint.layouts, checkpoint.kernel_config.layers, strict=True))
    softcap = bool(getattr(checkpoint.config, "attn_logit_softcapping", None))
    return [
        Subject(layout_class(layout), count, layout, kernels, checkpoint.shape, checkpoint.dtype, 0, softcap)
        for (layout, kernels), count in alike.items()
    ]


NAMED = {
    "joint-64-fast": Specialisation("joint", 64, 4, 16),
    "joint-64-fast-split": Specialisation("joint", 64, 4, 16, split=1),
    "joint-128-fast": Specialisation("joint", 128, 4, 16),
    "joint-128x2-fast": Specialisation("joint", 128, 8, 16, 2),
    "joint-256x4-fast": Specialisation("joint", 256, 16, 16, 4),
    "joint-64": Specialisation("joint", 64, 4),
    "joint-128": Specialisation("joint", 128, 4),
    "apart-64": Specialisation("apart", 64, 4),
    "numbers-64": Specialisation("numbers", 64, 4),
}
"""Layers that are counted without a checkpoint: 4 query heads a KV head."""


def subject_of(name: str, of: Specialisation) -> Subject:
    """A layer of 8 KV heads of HEAD_DIM: joint latents in blocks, or those apart after RoPE; bfloat16, in pages."""
    latent = Numbers(of.width) if of.kind == "numbers" else Channels(n4=of.width, split=of.split)
    values, block = (None, of.rope_block) if of.kind == "joint" else (latent, None)
    groups = (GroupLayout(tuple(range(i, i + of.kv_heads)), latent, values) for i in range(0, 8, of.kv_heads))
    layout = LayerLayout(tuple(groups), block, of.fast_planes)
    shape = AttentionShape(1, len(layout.groups) * of.rows, 8, HEAD_DIM, 4096, rotary_dim=HEAD_DIM)
    return Subject(name, 1, layout, default_layer(layout), shape, torch.bfloat16, PAGE)


def named_subjects() -> dict[str, Subject]:
    return {name: subject_of(name, of) for name, of in NAMED.items()}


MODELS = {
    "llama3-8b": (AttentionShape(32, 32, 8, 128, 4096, 128), 19, 2),
    "qwen3-8b": (AttentionShape(36, 32, 8, 128, 4096, 128, key_norm=True), 18, 2),
    "smollm2-135m": (AttentionShape(30, 9, 3, 64, 576, 64), 11, 3),
}
"""Models' shapes with the fast planes and the KV heads a latent that the recipe `rotor` gives them; all of SmolLM2's
heads share one, as in README's export."""

BLOCK = 64


def model_subject(name: str) -> Subject:
    """A layer of one of MODELS, with a joint latent whose channels have 8, 4 and 2 bits and 1 / 8 of the bytes of an
    8B's keys and values, 1 / 4 of those of heads of 64."""
    shape, fast, size = MODELS[name]
    latent = Channels(n8=16 * size, n4=64 * size, n2=64 * size)
    groups = (GroupLayout(tuple(range(i, i + size)), latent, None) for i in range(0, shape.num_kv_heads, size))
    layout = LayerLayout(tuple(groups), *KeyForm(BLOCK, fast))
    return Subject(name, shape.num_layers, layout, default_layer(layout), shape, torch.bfloat16, PAGE)


EXACT = ("joint-64-fast", "apart-64", "llama3-8b")
"""Layers that are also measured with exact tokens, beside those without them."""

NEWEST = ExactTokens(first=4, newest=128)
"""The exact tokens of these: as the recipe `rotor` keeps them."""


def with_exact(subject: Subject) -> Subject:
    """The same layer with exact tokens."""
    layout = replace(subject.layout, exact=NEWEST)
    return replace(subject, name=f"{subject.name}, exact", layout=layout)


def gpu_subjects() -> dict[str, Subject]:
    """What is measured on a GPU: layers of models, and the named ones; some also with exact tokens."""
    found = {**{name: model_subject(name) for name in MODELS}, **named_subjects()}
    return found | {own.name: own for own in (with_exact(found[name]) for name in EXACT)}
