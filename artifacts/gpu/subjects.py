"""Named layers, of models that people run, whose kernels are counted, compiled and timed without a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

from rotor.calibration.prediction.cost import DecodeStep
from rotor.checkpoint.layout import USUAL_ROPE_BLOCK, AttentionShape, ExactTokens, GroupLayout, LayerLayout
from rotor.checkpoint.rows import CodedRow, NumberRow, Row
from rotor.kernels.dispatch import default_layer
from rotor.tools.bench.precompile import Subject

STEP = DecodeStep(context_tokens=32768, batch_size=8)
"""Whose instructions are counted, a key, and whose time is predicted."""

PAGE = 64
"""Keys of a page, in layers that no checkpoint has."""


SPLIT = 16
"""Cut nibbles a KV head of a row whose last lanes of nibbles are read twice, for their crumbs."""


def subject_of(
    name: str,
    kind: str,
    nibbles: int,
    heads: int,
    shape: AttentionShape,
    layers: int = 1,
    split: bool = False,
    rope_block: int = USUAL_ROPE_BLOCK,
) -> Subject:
    """A layer whose groups are alike, in bfloat16, in pages; codes have 4 bits a channel, or 2 where lanes are split.

    Args:
        kind: `joint`, or a latent each of keys and of values: `apart` of codes, or `numbers`.
        nibbles: or numbers, of a row. heads: KV heads of a row. rope_block: of joint latents.
    """
    key: Row = NumberRow(nibbles)
    if kind != "numbers":
        scaled, cut = kind == "joint", SPLIT * heads if split else 0
        key = CodedRow(n4=nibbles - cut - scaled, n2=2 * cut, split=int(split), scaled=scaled)
    value, block = (None, rope_block) if kind == "joint" else (key, None)
    groups = (GroupLayout(tuple(range(i, i + heads)), key, value) for i in range(0, shape.num_kv_heads, heads))
    layout = LayerLayout(tuple(groups), block)
    return Subject(name, layers, layout, default_layer(layout), shape, torch.bfloat16, PAGE)


MODELS = {
    "llama3-8b": AttentionShape(32, 32, 8, 128, 4096, 128),
    "qwen3-8b": AttentionShape(36, 32, 8, 128, 4096, 128, key_norm=True),
    "smollm2": AttentionShape(30, 9, 3, 64, 576, 64),
    "gemma3-270m": AttentionShape(18, 4, 1, 256, 640, 256, key_norm=True),
}
"""Models' shapes; Gemma's of the layers without a window."""

ROWS = {
    "llama3-8b": ("64x2", "128x1", "128x2", "128x2-split", "128x2-blocks128", "128x4", "128x4-blocks128", "256x2"),
    "qwen3-8b": ("128x2",),
    "smollm2": ("64x3", "128x3"),
    "gemma3-270m": ("256x1",),
}
"""Rows of a model: nibbles a KV head, and KV heads a row. `split`: some are cut. `blocks128`: in blocks of so many
positions."""

LONG = "blocks"

OTHER_FORMS = {"apart-64x1": ("apart", 64), "numbers-64x1": ("numbers", 64)}
"""Rows of an 8B with a latent of so many nibbles, or numbers, of keys after RoPE, and one of values."""


def named_subjects() -> dict[str, Subject]:
    """Layers that are counted without a checkpoint, by model and row."""
    return {subject.name: subject for subject in _named_subjects()}


@cache
def _named_subjects() -> tuple[Subject, ...]:
    found = []
    for model, rows in ROWS.items():
        shape = MODELS[model]
        for row in rows:
            size, _, other = row.partition("-")
            nibbles, heads = map(int, size.split("x"))
            block = int(other.removeprefix(LONG)) if other.startswith(LONG) else USUAL_ROPE_BLOCK
            of = (f"{model}-{row}", "joint", nibbles * heads, heads)
            found.append(subject_of(*of, shape, shape.num_layers, other == "split", block))
    shape = MODELS["llama3-8b"]
    for row, (kind, width) in OTHER_FORMS.items():
        found.append(subject_of(f"llama3-8b-{row}", kind, width, 1, shape, shape.num_layers))
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
    """Layers that are measured on a GPU: the named layers, some also with exact tokens."""
    found = named_subjects()
    return found | {own.name: own for own in (with_exact(found[name]) for name in EXACT)}
