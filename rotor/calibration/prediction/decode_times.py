"""Predicted times of a decode step, and bytes, of every group size, with and without fast planes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...checkpoint.channels import PLANE, Channels, Latent, Numbers
from ...checkpoint.layout import (
    MOST_ROPE_BLOCK,
    POST_ROPE,
    AttentionShape,
    GroupLayout,
    KeyForm,
    LayerForm,
    LayerLayout,
    kv_bytes_per_token,
    pre_rope,
)
from .cost import DecodeStep, layer_time, uncompressed_layer_time
from .devices import Device

SCENARIOS: tuple[tuple[str, float], ...] = (("0.75", 0.75), ("0.875", 0.875), ("0.94", 0.9375))
"""Name, and share of the bytes of keys and values that is removed."""

FAST_PLANES = 16
"""Fast planes of the candidates that rebuild some."""


@dataclass(frozen=True)
class DecodeTime:
    """One candidate in one of SCENARIOS.

    instructions_per_key: of attention, a key and KV head; 0 where keys are rebuilt in memory. seconds: of attention in
    all layers in a decode step, predicted. share: of the uncompressed model's. chosen: by the recipe.
    """

    candidate: str
    scenario: str
    kv_bytes_per_token: int
    instructions_per_key: float
    seconds: float
    share: float
    chosen: bool = False


def decode_times(
    shape: AttentionShape, device: Device, step: DecodeStep, chosen: Sequence[LayerForm] = ()
) -> list[DecodeTime]:
    """Codes of every group size in each of SCENARIOS, all layers alike: joint latents without fast planes, with
    FAST_PLANES and with all of them, and, of a model with RoPE, latents of their own for keys after it and values.

    Args:
        chosen: forms of a recipe's layers, which are among them in any case.
    """
    block, apart = MOST_ROPE_BLOCK, [(POST_ROPE, False)]
    planes = sorted({0, min(FAST_PLANES, shape.rotary_planes)})
    forms = [*((KeyForm(block, count), True) for count in planes), (pre_rope(shape), True), *apart]
    if not shape.rotary_dim:
        forms = [(POST_ROPE, True), *apart]
    candidates = [LayerForm(keys, size, joint) for keys, joint in forms for size in group_sizes(shape)]
    candidates = [*(form for form in chosen if form not in candidates), *candidates]
    base, found = uncompressed_layer_time(shape, device, step), []
    for candidate in candidates:
        for scenario, removed in SCENARIOS:
            layout = uniform_layout(shape, candidate, 1 - removed, True)
            time = layer_time(layout, shape, device, step)
            found.append(
                DecodeTime(
                    candidate.in_words(shape),
                    scenario,
                    kv_bytes_per_token([layout] * shape.num_layers, step.element_bytes),
                    time.instructions / step.keys / shape.num_kv_heads,
                    shape.num_layers * time.attention_s,
                    time.attention_s / base.attention_s,
                    candidate in chosen,
                )
            )
    return found


def group_sizes(shape: AttentionShape) -> list[int]:
    """KV heads that can share a latent: every divisor of their number, ascending."""
    return [size for size in range(1, shape.num_kv_heads + 1) if shape.num_kv_heads % size == 0]


REMOVED = {True: 0.875, False: 0.5}
"""Share of the bytes removed at which group sizes are compared: of codes, and of numbers."""


def largest_fast_group(shape: AttentionShape, form: LayerForm, coded: bool, device: Device, step: DecodeStep) -> int:
    """Find the most KV heads that can share a latent without making attention slower, as predicted.

    A decode step with REMOVED of the bytes is predicted to take no longer than the uncompressed model's, or than that
    of one KV head a group, where all are slower.

    Args:
        form: of any group size.
    """

    def seconds(size: int) -> float:
        layout = uniform_layout(shape, form._replace(group_size=size), 1 - REMOVED[coded], coded)
        return layer_time(layout, shape, device, step).seconds

    most = max(seconds(1), uncompressed_layer_time(shape, device, step).seconds)
    return max(size for size in group_sizes(shape) if seconds(size) <= most)


def uniform_layout(shape: AttentionShape, form: LayerForm, kept: float, coded: bool) -> LayerLayout:
    """A layer whose groups all keep a share of their bytes, at 16-bit numbers or in channels of four bits.

    A joint latent has as many places as two latents have together.
    """
    keys, size, joint = form
    places = kept * size * shape.head_dim * (2 if joint else 1) * (4 if coded else 1)
    count = max(PLANE, round(places / PLANE) * PLANE)
    latent: Latent = Channels(n4=count) if coded else Numbers(count)
    heads = range(shape.num_kv_heads)
    groups = (GroupLayout(tuple(heads[i : i + size]), latent, None if joint else latent) for i in heads[::size])
    return LayerLayout(tuple(groups), *keys)
