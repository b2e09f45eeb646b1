"""Every kernel that a compressed model needs, from its kernel_config.json: what to compile ahead of time."""

from __future__ import annotations

from typing import Any

import torch

from rotor.layout import GroupLayout, LayerLayout

from .ahead import Variant
from .decode import decode_variants
from .layer_table import layer_parts
from .prefill import prefill_variants
from .rotation import rotation_variants
from .shapes import HOPPER, Gpu


def config_layouts(config: dict[str, Any]) -> list[LayerLayout]:
    """The layouts of the layers in a kernel configuration; whether keys are folded is nothing to the kernels."""
    return [
        LayerLayout(
            layer["domain"],
            layer["domain"] == "none",
            tuple(GroupLayout.from_dict(group, "kernel_config.json") for group in layer["groups"]),
        )
        for layer in config["layers"]
    ]


def model_variants(
    config: dict[str, Any],
    dtype: torch.dtype,
    *,
    batch_size: int = 1,
    page: int = 0,
    masks: tuple[bool, ...] = (False, True),
    softcap: bool = False,
    gpu: Gpu = HOPPER,
) -> list[Variant]:
    """The distinct variants of all kernels for a model.

    Args:
        config: the contents of kernel_config.json.
        dtype: of the activations and the cache.
        batch_size: sequences of a decoding step, rounded up to a power of two.
        page: keys of a page of the cache, 0 for a contiguous one.
        masks: with and without a mask (static caches and padding bring one).
        softcap: whether the model caps its logits.
        gpu: what they are to run on; tile sizes go by it.
    """
    heads_per_kv, head_dim = config["num_heads"] // config["num_kv_heads"], config["head_dim"]
    variants: list[Variant] = []
    for layout in dict.fromkeys(config_layouts(config)):
        parts = layer_parts(layout, heads_per_kv, head_dim)
        for mask in masks:
            settings: dict[str, Any] = {"page": page, "mask": mask, "softcap": softcap, "gpu": gpu}
            variants += decode_variants(
                parts, heads_per_kv, head_dim, dtype, batch_size=batch_size, schedule=config["schedule"], **settings
            )
            variants += prefill_variants(layout, heads_per_kv, head_dim, dtype, **settings)
        if layout.domain == "post":
            variants += rotation_variants(layout, heads_per_kv, head_dim, dtype)
    distinct = {(v.name, tuple(sorted(v.constants.items(), key=lambda item: item[0]))): v for v in variants}
    return list(distinct.values())
