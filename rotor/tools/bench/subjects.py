"""Layers whose kernels are compiled: those of a checkpoint, and named ones that no checkpoint has."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from ...calibration.prediction.cost import DecodeStep
from ...calibration.prediction.instructions import HEAD_DIM, Specialisation
from ...checkpoint.channels import PLANE, WORD_PLANES, Channels, Latent, Numbers, Parted, whole_planes
from ...checkpoint.kernel_config import LayerKernels, layout_class
from ...checkpoint.layout import AttentionShape, ExactTokens, GroupLayout, LayerLayout
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
    softcap = bool(getattr(checkpoint.config.get_text_config(), "attn_logit_softcapping", None))
    return [
        Subject(layout_class(layout), count, layout, kernels, checkpoint.shape, checkpoint.dtype, 0, softcap)
        for (layout, kernels), count in alike.items()
    ]


SPLIT = 16
"""Cut nibbles a KV head of a row whose last planes of nibbles are read twice, for their crumbs."""


def subject_of(name: str, of: Specialisation, shape: AttentionShape | None = None, layers: int = 1) -> Subject:
    """A layer whose groups are alike, in bfloat16, in pages; codes have 4 bits a channel, or 2 where planes are split.

    Args:
        of: kind, nibbles (or numbers) and KV heads of a row, its fast planes, and the block of positions.
        shape: by default 8 KV heads of HEAD_DIM, or as many as make whole rows.
    """
    if shape is None:
        kv_heads = 8 // of.kv_heads * of.kv_heads
        queries = kv_heads * (of.rows // of.kv_heads)
        shape = AttentionShape(1, queries, kv_heads, HEAD_DIM, 4096, rotary_dim=HEAD_DIM)
    key = row_of(of)
    value, block = (None, of.rope_block) if of.kind == "joint" else (key, None)
    heads = range(0, shape.num_kv_heads, of.kv_heads)
    groups = (GroupLayout(tuple(range(i, i + of.kv_heads)), key, value) for i in heads)
    layout = LayerLayout(tuple(groups), block, of.fast_planes)
    return Subject(name, layers, layout, default_layer(layout), shape, torch.bfloat16, PAGE)


def row_of(of: Specialisation) -> Latent:
    """The latent of a row that is full: in a joint one the fast latents have a nibble for each number, but no more than
    half of the row."""
    if of.kind == "numbers":
        return Numbers(of.width)
    if of.kind == "apart":
        return _channels(of.width, of)
    most = of.width // (2 * of.kv_heads) // PLANE * PLANE
    numbers = min(2 * of.fast_planes, most)
    words = whole_planes(-(-numbers // WORD_PLANES))
    fast = (Channels(n4=numbers, own_words=words),) * of.kv_heads if of.fast_planes else ()
    slots = of.width - WORD_PLANES * sum(latent.words for latent in fast)
    return Parted(_channels(slots - 1, of), fast)


def _channels(nibbles: int, of: Specialisation) -> Channels:
    cut = SPLIT * of.kv_heads if of.split else 0
    return Channels(n4=nibbles - cut, n2=2 * cut, split=of.split)


MODELS = {
    "llama3-8b": (AttentionShape(32, 32, 8, 128, 4096, 128), 16),
    "qwen3-8b": (AttentionShape(36, 32, 8, 128, 4096, 128, key_norm=True), 16),
    "smollm2": (AttentionShape(30, 9, 3, 64, 576, 64), 11),
    "gemma3-270m": (AttentionShape(18, 4, 1, 256, 640, 256, key_norm=True), 32),
}
"""Models' shapes with the fast planes that the recipe `rotor` gives them; Gemma's of the layers without a window."""

ROWS = {
    "llama3-8b": ("64x2", "128x1", "128x2", "128x2-split", "128x4", "256x2"),
    "qwen3-8b": ("128x2",),
    "smollm2": ("64x3", "128x3"),
    "gemma3-270m": ("256x1",),
}
"""Rows of a model: nibbles a KV head, and KV heads a row. `split`: some are cut."""

OTHER_FORMS = {"post-128x1": ("joint", 128), "apart-64x1": ("apart", 64), "numbers-64x1": ("numbers", 64)}
"""Rows of an 8B without fast planes: one for keys and values in blocks, or of a latent of nibbles, or numbers, each."""


def named_subjects() -> dict[str, Subject]:
    """Layers that are counted without a checkpoint, by model and row."""
    return {subject.name: subject for subject in _named_subjects()}


@cache
def _named_subjects() -> tuple[Subject, ...]:
    found = []
    for model, rows in ROWS.items():
        shape, fast = MODELS[model]
        for row in rows:
            size, _, split = row.partition("-")
            nibbles, heads = map(int, size.split("x"))
            rows_of_queries = heads * shape.heads_per_kv
            of = Specialisation("joint", nibbles * heads, rows_of_queries, fast, heads, split=int(bool(split)))
            found.append(subject_of(f"{model}-{row}", of, shape, shape.num_layers))
    for row, (kind, width) in OTHER_FORMS.items():
        shape, _ = MODELS["llama3-8b"]
        of = Specialisation(kind, width, shape.heads_per_kv)
        found.append(subject_of(f"llama3-8b-{row}", of, shape, shape.num_layers))
    return tuple(found)


def model_of(name: str) -> str:
    """The model whose layer a name is of; of a layer of no model its name."""
    return next((model for model in MODELS if name.startswith(model)), name)


EXACT = ("llama3-8b-128x2", "llama3-8b-apart-64x1", "smollm2-64x3")
"""Layers that are also measured with exact tokens, beside those without them."""

NEWEST = ExactTokens(first=4, newest=128)
"""The exact tokens of these: as the recipe `rotor` keeps them."""


def with_exact(subject: Subject) -> Subject:
    """The same layer with exact tokens."""
    layout = replace(subject.layout, exact=NEWEST)
    return replace(subject, name=f"{subject.name}, exact", layout=layout)


def gpu_subjects() -> dict[str, Subject]:
    """What is measured on a GPU: the named layers, some also with exact tokens."""
    found = named_subjects()
    return found | {own.name: own for own in (with_exact(found[name]) for name in EXACT)}
