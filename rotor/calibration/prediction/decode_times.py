"""Predict the time of a decode step, and the bytes, for every group size, with and without fast planes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...checkpoint.channels import PLANE, Channels, Latent, Numbers, Parted
from ...checkpoint.layout import (
    MOST_ROPE_BLOCK,
    POST_ROPE,
    AttentionShape,
    GroupLayout,
    KeyForm,
    LayerForm,
    LayerLayout,
    pre_rope,
)
from ...checkpoint.sizes import kv_bytes_per_token
from .cost import DecodeStep, layer_time, uncompressed_decode_seconds, uncompressed_layer_time
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
    chosen: whether the recipe gives this form. settings: fields of a recipe that give it.
    """

    candidate: str
    scenario: str
    kv_bytes_per_token: int
    instructions_per_key: float
    seconds: float
    share: float
    chosen: bool = False
    settings: str = ""


def decode_times(
    shape: AttentionShape, device: Device, step: DecodeStep, chosen: Sequence[LayerForm] = ()
) -> list[DecodeTime]:
    """Predict every group size in each of SCENARIOS, with coded latents and the same form of all layers.

    Candidates are joint groups with no, FAST_PLANES and all fast planes; and separate latents of values and of keys
    after RoPE.

    Args:
        chosen: forms of a recipe's layers, which are added to the candidates with all group sizes.
    """
    block, apart = MOST_ROPE_BLOCK, [(POST_ROPE, False)]
    most = max(shape.sizes, key=lambda own: own.rotary_planes)
    planes = sorted({0, min(FAST_PLANES, most.rotary_planes)})
    forms = [*((KeyForm(block, count), True) for count in planes), (pre_rope(most), True), *apart]
    if not shape.rotates:
        forms = [(POST_ROPE, True), *apart]
    forms = list(dict.fromkeys([*((form.keys, form.joint) for form in chosen), *forms]))
    candidates = [LayerForm(keys, size, joint) for keys, joint in forms for size in group_sizes(shape)]
    base = sum(count * uncompressed_layer_time(own, device, step).attention_s for own, count in shape.sizes.items())
    heads = sum(count * own.num_kv_heads for own, count in shape.sizes.items())
    times = []
    for candidate in candidates:
        for scenario, removed in SCENARIOS:
            layouts = _layouts(shape, candidate, 1 - removed, True)
            parts = [(count, layer_time(layout, own, device, step)) for own, count, layout in layouts]
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
                )
            )
    return times


def _layouts(
    shape: AttentionShape, form: LayerForm, kept: float, coded: bool
) -> list[tuple[AttentionShape, int, LayerLayout]]:
    """Lay out a layer with heads of each size: its sizes, how many such layers there are, and a layout of the form.

    Layers with fewer planes than the form has fast ones store all before RoPE. See `uniform_layout`.
    """
    found = []
    for own, count in shape.sizes.items():
        keys = form.keys
        if keys.rope_block is not None and keys.fast_planes >= own.rotary_planes:
            keys = pre_rope(own)
        found.append((own, count, uniform_layout(own, form._replace(keys=keys), kept, coded)))
    return found


def _settings(form: LayerForm, shape: AttentionShape) -> str:
    """Fields of a recipe that give a form, as --set takes them."""
    size = f"groups.size={form.group_size}"
    if not shape.rotary_dim:
        return size
    if form.keys.rope_block is None:
        return f"groups.domain=post {size}"
    if form.keys == pre_rope(shape):
        return f"groups.domain=pre {size}"
    return f"groups.fast_planes={form.keys.fast_planes} {size}"


def slower(times: Sequence[DecodeTime], scenario: str) -> tuple[DecodeTime, DecodeTime | None] | None:
    """The recipe's form, if it is predicted to be slower than the uncompressed model in a scenario, and what is not.

    Returns:
        None if it is no slower. Otherwise with it the form of the most KV heads a latent that is no slower, one of the
        same key form where there is one; None without any.
    """
    there = [time for time in times if time.scenario == scenario]
    own = max((time for time in there if time.chosen), key=lambda time: time.share, default=None)
    if own is None or own.share <= 1:
        return None
    fast = [time for time in there if time.share <= 1]
    same = [time for time in fast if _but_heads(time) == _but_heads(own)]
    return own, min(same, key=lambda time: time.share, default=min(fast, key=lambda time: time.share, default=None))


def _but_heads(time: DecodeTime) -> str:
    return time.candidate.rpartition(",")[0]


def group_sizes(shape: AttentionShape) -> list[int]:
    """KV heads that can share a latent in all layers: every divisor of their number, ascending."""
    return [size for size in range(1, shape.shared_kv_heads + 1) if shape.shared_kv_heads % size == 0]


COMPARED_COMPRESSION = {True: 0.75, False: 0.5}
"""Compression at which group sizes are compared, with codes (True) and without. Real models lose a hundredth at 0.76
to 0.77 with codes."""


SHARED_LOSS = 0.6
"""An estimate: KL divergence at equal bytes falls with this power of the KV heads that share a latent. It is taken from
two points of one model, SmolLM2, where three heads that share have half the KL of one each."""


def best_group_size(shape: AttentionShape, form: LayerForm, coded: bool, device: Device, step: DecodeStep) -> int:
    """Find how many KV heads should share a latent: predicted time of a decode step times loss is the least.

    At COMPARED_COMPRESSION a decode step must take no longer than the uncompressed model's, or, if all are slower, than
    with one KV head per group.

    Args:
        form: form of the layers that are slowest to decode; its group size is ignored.
    """

    def seconds(size: int) -> float:
        layouts = _layouts(shape, form._replace(group_size=size), 1 - COMPARED_COMPRESSION[coded], coded)
        return sum(count * layer_time(layout, own, device, step).seconds for own, count, layout in layouts)

    most = max(seconds(1), uncompressed_decode_seconds(shape, device, step))
    fast = [size for size in group_sizes(shape) if seconds(size) <= most]
    return min(fast, key=lambda size: seconds(size) * size**-SHARED_LOSS)


def uniform_layout(shape: AttentionShape, form: LayerForm, kept: float, coded: bool) -> LayerLayout:
    """Make a layer whose groups all keep a share of their bytes, as 16-bit numbers or in channels of four bits.

    A joint row is as wide as two separate latents together. Fast latents have a nibble for each number, but no more
    than half of the row.
    """
    keys, size, joint = form
    planes = max(1, round(kept * form.columns(shape.head_dim) * (4 if coded else 1) / PLANE))
    latent: Latent = Channels(n4=planes * PLANE) if coded else Numbers(planes * PLANE)
    if joint:
        fast = max(1, min(-(-2 * keys.fast_planes // PLANE), planes // (2 * size))) if keys.fast_planes else 0
        rest = max(1, planes - size * fast)
        heads_of_group = range(size if fast else 0)
        latent = Parted(Channels(n4=rest * PLANE - 1), tuple(Channels(n4=fast * PLANE) for _ in heads_of_group))
    heads = range(shape.num_kv_heads)
    groups = (GroupLayout(tuple(heads[i : i + size]), latent, None if joint else latent) for i in heads[::size])
    return LayerLayout(tuple(groups), *keys)
