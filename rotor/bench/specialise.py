"""Every kernel that a layer needs: what `rotor compile` compiles ahead, and counts."""

from __future__ import annotations

from typing import Any

import torch

from rotor.format.kernel_config import LayerKernels
from rotor.format.layout import AttentionShape, LayerLayout

from ..kernels.absorb import absorb_kernel
from ..kernels.append import append_kernel, rows_of, tables_of, warps_of
from ..kernels.decode import decode_kernel
from ..kernels.decoding import DecodeLayer, join_constants
from ..kernels.join import join_kernel
from ..kernels.materialise import constants_of, materialise_kernel
from ..kernels.parameters import AttentionParameters
from .ahead import Variant
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
    floats = "constant", "key_constant", "fast_constant", "partial", "partial_lse"
    shared |= dict.fromkeys(floats, torch.float32)
    shared |= {"mask": torch.int32, "key": row, "value": row}
    names = "query", "basis", "slow_starts", "fast_starts", "absorbed", "fast_query", "fast_basis", "rotations"
    shared |= dict.fromkeys((*names, "output"), dtype)

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
    constants = join_constants(layer, 1, tiles)
    warps = constants.pop("num_warps")
    of_join = {"loops": (Loop(1),) * 3, "keys": LENGTH / layer.group_rows, "groups": groups}
    found.append(variant(join_kernel, "join", constants, warps, 3, **of_join))
    return found


def append_variant(
    layout: LayerLayout, shape: AttentionShape, dtype: torch.dtype, tokens: int = 1, pages: bool = False
) -> Variant:
    """What `append` compiles for so many tokens of a layer, with queries and an index in a model with RoPE."""
    folded, rotary = layout.folds_keys(shape), bool(shape.rotary_dim)
    tables = tables_of(layout, shape, dtype, rotary, False, rotary, torch.device("cpu"))
    names = ("query", "key", "value", "key_basis", "query_out")
    pointers = dict.fromkeys(names, dtype) | dict.fromkeys(("places", "jobs"), torch.int32)
    pointers |= dict.fromkeys(("key_rows", "value_rows"), torch.int16 if layout.coded else dtype)
    shift = layout.coded and not folded
    pointers |= dict.fromkeys(("cos", "sin"), torch.float32 if rotary else dtype)
    pointers |= {
        "key_shift": torch.float32 if shift else dtype,
        "index": torch.int64 if rotary else torch.int32,
        "slots": torch.int64 if pages else torch.int32,
    }
    constants = tables.constants | {
        "PART": layout.joint and not folded, "SHIFT": shift, "QUERY": rotary, "INDEX": rotary, "SLOTS": pages,
        "ROWS": rows_of(tokens),
    }  # fmt: skip
    return Variant(f"append, {tokens} tokens", append_kernel, pointers, constants, (), {"num_warps": warps_of(tokens)})


def materialise_variants(
    layout: LayerLayout, shape: AttentionShape, dtype: torch.dtype, pages: bool = False
) -> list[Variant]:
    """What `materialise` compiles for the classes of a layer."""
    rotary, blocks = bool(shape.rotary_dim), layout.in_blocks
    pointers = dict.fromkeys(("key", "value"), torch.int16 if layout.coded else dtype)
    pointers |= dict.fromkeys(("basis", "keys", "values"), dtype)
    pointers |= {"constant": torch.float32 if layout.coded and rotary else dtype}
    pointers |= dict.fromkeys(("cos", "sin"), torch.float32 if blocks else dtype)
    pointers |= dict.fromkeys(("block_table", "kv_lens", "kv_start"), torch.int32 if pages else dtype)
    variants = []
    for cls in layout.classes(dtype.itemsize):
        constants = constants_of(layout, shape, cls, dtype, pages)
        options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
        name = f"materialise {cls.key.width}+{cls.value.width}x{constants['SIZE']}"
        variants.append(Variant(name, materialise_kernel, pointers, constants, (), options))
    return variants
