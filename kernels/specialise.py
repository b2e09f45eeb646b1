"""Every kernel that a layer needs: what `rotor compile` compiles ahead, and counts."""

from __future__ import annotations

from typing import Any

import torch

from rotor.format.kernel_config import LayerKernels
from rotor.format.layout import AttentionShape, LayerLayout

from .absorb import absorb_kernel
from .ahead import Variant
from .append import append_variant
from .decode import decode_kernel
from .decoding import DecodeLayer, join_constants
from .join import join_kernel
from .materialise import materialise_variants
from .parameters import AttentionParameters
from .sass import Loop

SEQUENCES, LENGTH, SMS = 8, 32768, 132
"""The step for which loops' rounds are stated, and the GPU."""


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
    if not kernels.materialise:
        found += decode_variants(layout, shape, kernels, dtype, arch, page=page, softcap=softcap)
    return list({variant.identity: variant for variant in found}.values())


def decode_variants(
    layout: LayerLayout,
    shape: AttentionShape,
    kernels: LayerKernels,
    dtype: torch.dtype,
    arch: int,
    *,
    page: int = 0,
    softcap: bool = False,
) -> list[Variant]:
    """Absorb, decode and join of a step of one token a sequence, with the rounds of their loops at the stated step."""
    basis = constant = None
    if not layout.folds_queries(shape):
        basis = torch.zeros(layout.group_size * shape.head_dim, layout.key_width, dtype=dtype)
        if layout.coded:
            constant = torch.zeros(shape.num_kv_heads, shape.head_dim)
    layer = DecodeLayer(AttentionParameters(layout, shape, 1.0, basis, constant), dtype, torch.device("cpu"))
    tiles, groups = kernels.tile(arch), len(layout.groups)
    step, row = layer.step(tiles), torch.int16 if layout.coded else dtype
    widths = f"{layer.pieces * layer.columns}+{layer.pieces * layer.value_columns}"
    name = f"{widths}x{layer.heads}, T {layer.block}, F {layer.fast}"
    shared = dict.fromkeys(
        ("table", "begin", "until", "first", "end", "query_start", "block_table", "holes"), torch.int32
    )
    shared |= dict.fromkeys(("constant", "partial", "partial_lse", "lse"), torch.float32)
    shared |= {"key_constant": torch.float32, "mask": torch.int32}
    shared |= {"fast_constant": torch.float32, "key": row, "value": row}
    names = "query", "basis", "slow_turns", "fast_turns", "absorbed", "fast_query", "fast_basis", "turns", "output"
    shared |= dict.fromkeys(names, dtype)

    def variant(kernel: Any, title: str, constants: dict[str, Any], warps: int, stages: int, **work: Any) -> Variant:
        pointers = {name: shared[name] for name in kernel.arg_names if name in shared}
        options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
        return Variant(f"{title} {name}", kernel, pointers, constants, ("scale", "softcap", "factor"), options, **work)

    found = []
    if not layer.folded:
        constants = layer.absorb_constants(1) | {"ALIGN": 16}
        chunks = -(-(LENGTH // layer.block if layer.block else 1) // constants["COUNT"])
        programs = min(chunks, max(1, 4 * SMS // (shape.num_heads * SEQUENCES)))
        keys = LENGTH / programs / layer.group_rows
        of_absorb = {"loops": (Loop(chunks / programs),), "keys": keys, "groups": groups}
        found.append(variant(absorb_kernel, "absorb", constants, *layer.absorb_options().values(), **of_absorb))
    constants = layer.constants(1, tiles, page, mask=False, softcap=softcap)
    constants |= {"KEY_ALIGN": layer.key_align, "VALUE_ALIGN": layer.value_align}
    slice_tiles = SEQUENCES * groups * LENGTH / step / (SMS * kernels.slices_per_sm)
    pieces = 1 + slice_tiles * step / LENGTH
    loops = Loop(1), Loop(pieces, (Loop(1), Loop(slice_tiles / pieces)))
    of_decode = {"loops": loops, "keys": slice_tiles * step, "groups": groups}
    found.append(variant(decode_kernel, "decode", constants, tiles.warps, tiles.stages, **of_decode))
    constants = join_constants(layer, 1, tiles, want_lse=False)
    warps = constants.pop("num_warps")
    of_join = {"loops": (Loop(1),) * 3, "keys": LENGTH / layer.group_rows, "groups": groups}
    found.append(variant(join_kernel, "join", constants, warps, 3, **of_join))
    return found
