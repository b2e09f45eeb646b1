"""Predict the time of a decode step, and the bytes, for every group size, with and without fast planes."""

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
"""Name and compression of each scenario."""

FAST_PLANES = 16
"""Fast planes of the candidates that rebuild some planes but not all."""


@dataclass(frozen=True)
class DecodeTime:
    """Prediction for one candidate in one of SCENARIOS.

    instructions_per_key: warp instructions of attention per key and KV head; 0 if keys are rebuilt in memory.
    seconds: predicted time of attention in all layers in a decode step.
    share: that time relative to the uncompressed model's.
    chosen: whether the recipe gives this form.
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
    """Predict every group size in each of SCENARIOS, with coded latents and all layers alike.

    Candidates are joint latents with no, FAST_PLANES and all fast planes; and separate latents of values and of keys
    after RoPE.

    Args:
        chosen: forms of a recipe's layers, which are added to the candidates.
    """
    block, apart = MOST_ROPE_BLOCK, [(POST_ROPE, False)]
    planes = sorted({0, min(FAST_PLANES, shape.rotary_planes)})
    forms = [*((KeyForm(block, count), True) for count in planes), (pre_rope(shape), True), *apart]
    if not shape.rotary_dim:
        forms = [(POST_ROPE, True), *apart]
    candidates = [LayerForm(keys, size, joint) for keys, joint in forms for size in group_sizes(shape)]
    candidates = [*(form for form in chosen if form not in candidates), *candidates]
    base = uncompressed_layer_time(shape, device, step)
    times = []
    for candidate in candidates:
        for scenario, removed in SCENARIOS:
            layout = uniform_layout(shape, candidate, 1 - removed, True)
            time = layer_time(layout, shape, device, step)
            times.append(
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
    return times


def group_sizes(shape: AttentionShape) -> list[int]:
    """KV heads that can share a latent: every divisor of their number, ascending."""
    return [size for size in range(1, shape.num_kv_heads + 1) if shape.num_kv_heads % size == 0]


COMPARED_COMPRESSION = {True: 0.875, False: 0.5}
"""Compression at which group sizes are compared, with codes (True) and without."""


def largest_fast_group(shape: AttentionShape, form: LayerForm, coded: bool, device: Device, step: DecodeStep) -> int:
    """Find the most KV heads that can share a latent without making attention slower, as predicted.

    At COMPARED_COMPRESSION a decode step must take no longer than the uncompressed model's, or, if all are slower, than
    with one KV head per group.

    Args:
        form: form of a layer; its group size is ignored.
    """

    def seconds(size: int) -> float:
        layout = uniform_layout(shape, form._replace(group_size=size), 1 - COMPARED_COMPRESSION[coded], coded)
        return layer_time(layout, shape, device, step).seconds

    most = max(seconds(1), uncompressed_layer_time(shape, device, step).seconds)
    return max(size for size in group_sizes(shape) if seconds(size) <= most)


def uniform_layout(shape: AttentionShape, form: LayerForm, kept: float, coded: bool) -> LayerLayout:
    """Make a layer whose groups all keep a share of their bytes, as 16-bit numbers or in channels of four bits.

    A joint latent is as wide as two separate latents together.
    """
    keys, size, joint = form
    width = kept * size * shape.head_dim * (2 if joint else 1) * (4 if coded else 1)
    count = max(PLANE, round(width / PLANE) * PLANE)
    latent: Latent = Channels(n4=count) if coded else Numbers(count)
    heads = range(shape.num_kv_heads)
    groups = (GroupLayout(tuple(heads[i : i + size]), latent, None if joint else latent) for i in heads[::size])
    return LayerLayout(tuple(groups), *keys)
