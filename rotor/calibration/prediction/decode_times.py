"""Predict the time of a decode step, and the bytes, for every group size; and choose the size by rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...checkpoint.layout import (
    POST_ROPE,
    USUAL_ROPE_BLOCK,
    AttentionShape,
    GroupLayout,
    KeyForm,
    LayerForm,
    LayerLayout,
)
from ...checkpoint.rows import UNIT_NIBBLES, CodedRow, NumberRow, Row
from ...checkpoint.sizes import kv_bytes_per_token
from ..form import group_sizes
from .cost import DecodeStep, layer_time, uncompressed_layer_time
from .devices import Device

SCENARIOS: tuple[tuple[str, float], ...] = (("0.75", 0.75), ("0.875", 0.875), ("0.94", 0.9375))
"""Name and compression of each scenario."""

FEWER_ARE_FASTER = 0.1
"""Share of the time that rows of fewer heads must spare to be worth naming."""

COMPARED_COMPRESSION = 0.75
"""Compression at which the recipe's form is compared with no compression."""


@dataclass(frozen=True)
class DecodeTime:
    """Prediction for one candidate in one of SCENARIOS.

    instructions_per_key: warp instructions of attention per key and KV head; 0 if keys are rebuilt in memory.
    seconds: predicted time of attention in all layers in a decode step.
    share: that time relative to the uncompressed model's.
    chosen: whether the recipe gives this form. settings: fields of a recipe that give it. heads: that share a row.
    """

    candidate: str
    scenario: str
    kv_bytes_per_token: int
    instructions_per_key: float
    seconds: float
    share: float
    chosen: bool = False
    settings: str = ""
    heads: int = 1


def decode_times(
    shape: AttentionShape, device: Device, step: DecodeStep, chosen: Sequence[LayerForm] = ()
) -> list[DecodeTime]:
    """Predict every group size in each of SCENARIOS, with coded latents and the same form of all layers.

    Candidates are joint groups with keys in blocks, and separate latents of values and of keys after RoPE.

    Args:
        chosen: forms of a recipe's layers, which are added to the candidates with all group sizes.
    """
    blocks = KeyForm(USUAL_ROPE_BLOCK) if shape.rotates else POST_ROPE
    forms = list(dict.fromkeys([*((form.keys, form.joint) for form in chosen), (blocks, True), (POST_ROPE, False)]))
    candidates = [LayerForm(keys, size, joint) for keys, joint in forms for size in group_sizes(shape)]
    most = max(shape.sizes, key=lambda sizes: sizes.rotary_planes)
    base = sum(count * uncompressed_layer_time(sizes, device, step).attention_s for sizes, count in shape.sizes.items())
    heads = sum(count * sizes.num_kv_heads for sizes, count in shape.sizes.items())
    times = []
    for candidate in candidates:
        for scenario, removed in SCENARIOS:
            layouts = _layouts(shape, candidate, 1 - removed, True)
            parts = [(count, layer_time(layout, sizes, device, step)) for sizes, count, layout in layouts]
            seconds = sum(count * time.attention_s for count, time in parts)
            times.append(
                DecodeTime(
                    candidate.in_words(most),
                    scenario,
                    sum(count * kv_bytes_per_token([layout], step.element_bytes) for _, count, layout in layouts),
                    sum(count * time.instructions for count, time in parts) / step.keys / heads,
                    seconds,
                    seconds / base,
                    candidate in chosen,
                    _settings(candidate, most),
                    candidate.group_size,
                )
            )
    return times


def _layouts(
    shape: AttentionShape, form: LayerForm, kept: float, coded: bool
) -> list[tuple[AttentionShape, int, LayerLayout]]:
    """Lay out a layer with heads of each size: its sizes, how many such layers there are, and a layout of the form.

    See `uniform_layout`.
    """
    return [(sizes, count, uniform_layout(sizes, form, kept, coded)) for sizes, count in shape.sizes.items()]


def _settings(form: LayerForm, shape: AttentionShape) -> str:
    """Fields of a recipe that give a form, as --set takes them."""
    size = f"groups.size={form.group_size}"
    if not shape.rotary_dim:
        return size
    if form.keys.rope_block is None:
        return f"groups.domain=post {size}"
    return f"groups.domain=block groups.rope_block={form.keys.rope_block} {size}"


def slower(times: Sequence[DecodeTime], scenario: str) -> tuple[DecodeTime, DecodeTime | None] | None:
    """The recipe's form, if it is predicted to be slower than the uncompressed model in a scenario, and what is not.

    Returns:
        None if it is no slower. Otherwise with it the form of the most KV heads a latent that is no slower, one of the
        same key form where there is one; None without any.
    """
    there = [time for time in times if time.scenario == scenario]
    slowest = max((time for time in there if time.chosen), key=lambda time: time.share, default=None)
    if slowest is None or slowest.share <= 1:
        return None
    fast = [time for time in there if time.share <= 1]
    same = [time for time in fast if _but_heads(time) == _but_heads(slowest)]
    return slowest, min(same, key=lambda time: time.share, default=min(fast, key=lambda time: time.share, default=None))


def too_wide(times: Sequence[DecodeTime]) -> dict[str, list[str]]:
    """Forms whose rows have more KV heads than is worth their time, and the scenarios where that is so: rows of fewer
    heads, of the same key form and as many bytes, are predicted to take at least FEWER_ARE_FASTER less."""
    scenarios: dict[str, list[str]] = {}
    for time in times:
        fewer = [
            other.share
            for other in times
            if (other.scenario, _but_heads(other)) == (time.scenario, _but_heads(time)) and other.heads < time.heads
        ]
        if time.instructions_per_key and min(fewer, default=time.share) < (1 - FEWER_ARE_FASTER) * time.share:
            scenarios.setdefault(time.candidate, []).append(time.scenario)
    return scenarios


def _but_heads(time: DecodeTime) -> str:
    return time.candidate.rpartition(",")[0]


def uniform_layout(shape: AttentionShape, form: LayerForm, kept: float, coded: bool) -> LayerLayout:
    """Make a layer whose groups all keep a share of their bytes, as 16-bit numbers or in channels of four bits.

    A joint row is as wide as two separate latents together.
    """
    keys, size, joint = form
    units = max(1, round(kept * form.columns(shape.head_dim) * (4 if coded else 1) / UNIT_NIBBLES))
    row: Row = CodedRow(n4=units * UNIT_NIBBLES - joint, scaled=joint) if coded else NumberRow(units * UNIT_NIBBLES)
    heads = range(shape.num_kv_heads)
    groups = (GroupLayout(tuple(heads[i : i + size]), row, None if joint else row) for i in heads[::size])
    return LayerLayout(tuple(groups), *keys)
