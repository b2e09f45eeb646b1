"""Every kernel that a compressed model needs, by its layouts and its kernel configuration: what to compile ahead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rotor.format.kernel_config import KernelConfig
from rotor.format.layout import AttentionShape, LayerLayout

from .ahead import Variant
from .decode.variants import decode_variants
from .gpu import HOPPER, Gpu
from .layer_table import layer_parts
from .prefill.variants import prefill_variants
from .projection.append import append_variant
from .projection.coded import rotate_and_pack_variants
from .projection.rotation import rotation_variants
from .rows import LayerColumns
from .scores.kernel import score_variants


def model_variants(
    config: KernelConfig,
    layouts: Sequence[LayerLayout],
    shape: AttentionShape,
    dtype: torch.dtype,
    *,
    batch_size: int = 1,
    page: int = 0,
    masks: tuple[bool, ...] = (False, True),
    softcap: bool = False,
    softened: bool | None = None,
    gpu: Gpu = HOPPER,
) -> list[Variant]:
    """The distinct variants of all kernels for a model.

    Args:
        config: of the checkpoint, which fits the layouts.
        shape: of the uncompressed model.
        dtype: of the activations and the cache.
        batch_size: sequences of a decoding step, rounded up to a power of two.
        page: keys of a page of the cache, 0 for a contiguous one.
        masks: with and without a mask (static caches and padding bring one).
        softcap: whether the model caps its logits.
        softened: for a cache policy that adds up the attention that keys draw, whether it changes logits for that; None
            where there is no such policy.
        gpu: what they are to run on; tile sizes go by it.
    """
    heads_per_kv, head_dim = shape.heads_per_kv, shape.head_dim
    variants: list[Variant] = []
    for layout, kernels in dict.fromkeys(zip(layouts, config.layers, strict=True)):
        parts = layer_parts(layout, heads_per_kv, head_dim, kernels, dtype.itemsize)
        for mask in masks:
            settings: dict[str, Any] = {"page": page, "mask": mask, "softcap": softcap, "gpu": gpu}
            variants += decode_variants(
                parts, heads_per_kv, head_dim, dtype, batch_size=batch_size, schedule=config.schedule, **settings
            )
            variants += prefill_variants(layout, heads_per_kv, head_dim, dtype, kernels=kernels, **settings)
            if softened is not None:
                flags = {"softened": softened, "mask": mask, "softcap": softcap}
                variants += score_variants(layout, heads_per_kv, head_dim, dtype, **flags)
        if layout.domain == "post":
            projection = rotate_and_pack_variants if layout.coded else rotation_variants
            variants += projection(layout, heads_per_kv, head_dim, dtype)
        elif layout.coded:
            variants.append(append_variant(LayerColumns.of(layout), dtype))
    distinct = {(v.name, tuple(sorted(v.constants.items(), key=lambda item: item[0]))): v for v in variants}
    return list(distinct.values())
