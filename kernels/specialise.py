"""Every kernel that a layer needs: what `rotor compile` compiles ahead, and counts."""

from __future__ import annotations

import torch

from rotor.format.kernel_config import LayerKernels
from rotor.format.layout import AttentionShape, LayerLayout

from .ahead import Variant
from .append import append_variant
from .materialise import materialise_variants


def layer_variants(
    layout: LayerLayout,
    shape: AttentionShape,
    kernels: LayerKernels,
    dtype: torch.dtype,
    arch: int,
    *,
    page: int = 0,
    softcap: bool = False,
) -> list[Variant]:
    """The distinct kernels of a layer: of a step those of decoding (or materialising) and append, and a prompt's.

    Args:
        kernels: the launches of the layer, with tiles by architecture. arch: compute capability, 90 is 9.0.
        page: keys of a page of the cache, 0 for a contiguous one. softcap: whether the model caps its logits.
    """
    found = [append_variant(layout, shape, dtype, tokens, page > 0) for tokens in (1, 4096)]
    found += materialise_variants(layout, shape, dtype, page > 0)
    return list({variant.identity: variant for variant in found}.values())
