"""A prefill launched: what `prefill_attention` passes to the kernels, class by class, in which units."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from rotor.format.columns import WORD_BYTES
from rotor.format.kernel_config import LayerKernels
from rotor.format.layout import LayerLayout

from ..gpu import gpu_of, sm_count
from ..key_ranges import PrefillKeys
from ..launch import launch
from ..schedule import last_round
from ..strides import alignment_of, as_words, check_page
from ..workspace import Workspace
from .few_launch import few_attention, few_queries
from .kernel import prefill_kernel
from .rebuild import rebuild_keys
from .tasks import row_blocks, task_count
from .tile_sizes import can_be_cut, pieces_of, prefill_constants, prefill_workers, rebuilding_pays


def prefill_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: LayerLayout,
    keys: PrefillKeys,
    heads_per_kv: int,
    scaling: float,
    *,
    query_basis: Tensor | None = None,
    key_rotation: tuple[Tensor, Tensor] | None = None,
    constant_key: Tensor | None = None,
    block_table: Tensor | None = None,
    softcap: float | None = None,
    rebuilt: bool | None = None,
    kernels: LayerKernels | None = None,
    programs: int | None = None,
    output: Tensor | None = None,
    workspace: Workspace | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of several query positions of each sequence over a layer's packed rows; nothing waits for the host.

    Args:
        query: domain `pre`: [batch_size, num_heads, seq_len, head_dim], rotated; else [batch_size, seq_len, width],
            projected, the rows of a group beside each other. Packed (`PrefillKeys.packed`), of sequences of any
            lengths: [tokens, num_heads, head_dim], or [tokens, width]. The innermost stride is 1.
        key, value: packed rows, [batch_size, kv_len, qk_width] and [batch_size, kv_len, v_width], or rows of codes
            [batch_size, kv_len, bytes], uint8; with a block table [num_pages, page_size, .]. They hold the new keys.
        keys: which keys each query attends to.
        query_basis, key_rotation: domain `pre`: [group_size * head_dim, qk_width], and cos and sin by index in the
            cache, [at least kv_len, head_dim].
        constant_key, block_table, softcap: as in `decode_attention`.
        rebuilt: domain `pre`: whether keys are rebuilt in memory first; by default where that pays, and
            of pages only where `keys` knows the most keys of a sequence.
        kernels: the classes, one launch each, and their blocks; by default by rule.
        programs: how many share the keys of a layer, where its row blocks are so few that keys are split
            (`schedule.keys_are_split`), in one launch for all classes; by default as `kernels` says.
        output: of packed queries, where to write, [tokens, at least the output's width]; by default a new tensor.
        workspace: memory of what programs that share keys find, and then of the log-sum-exp, which holds until the
            workspace is used again; by default they are allocated.
    Returns:
        [batch_size, seq_len, sum over query heads of v_rank] in query's dtype, and the natural log-sum-exp of the
        logits [batch_size, num_heads, seq_len], float32. Queries without keys give zeros and minus infinity. Packed:
        [tokens, .] and [num_heads, tokens]; tokens of no sequence are left as they are.
    """
    pre, head_dim = layout.domain == "pre", query.shape[-1]
    batch_size, seq_len, packed = keys.batch_size, keys.seq_len, keys.query_start_loc is not None
    if rebuilt is None:
        tokens = batch_size * (key.shape[1] if block_table is None else keys.longest_kv)
        rebuilt = tokens > 0 and rebuilding_pays(layout, heads_per_kv, head_dim, seq_len, tokens, query.element_size())
    page = check_page(key, block_table)
    if layout.coded:
        key, value = as_words(key), as_words(value)
    if rebuilt:
        assert query_basis is not None
        assert key_rotation is not None
        first, end = keys.union
        key = rebuild_keys(
            key, layout, query_basis, key_rotation, first, end, constant_key, block_table, keys.longest_kv
        )
    group_rows = layout.group_size * heads_per_kv
    num_heads = group_rows * len(layout.groups)
    queries = keys.first.numel()
    if output is None:
        output = torch.empty(queries, group_rows * layout.v_width, dtype=query.dtype, device=query.device)
    cos, sin = key_rotation if key_rotation is not None else (query, query)
    basis = query if query_basis is None else query_basis
    gpu, element_bytes = gpu_of(query.device), query.element_size()
    few = few_queries(
        layout, keys, heads_per_kv, element_bytes, head_dim if pre else 0, rebuilt, query.device, kernels, programs
    )
    if few is not None:
        lse = few_attention(
            query, key, value, keys, few, output, scaling, basis=basis, cos=cos, sin=sin, constant_key=constant_key,
            block_table=block_table, page=page, softcap=softcap, workspace=workspace,
        )  # fmt: skip
        return _shaped(output, lse, keys)
    lse = torch.empty(num_heads, queries, dtype=torch.float32, device=query.device)
    constant = lse if constant_key is None else constant_key
    empty = keys.first
    for cls, constants in prefill_constants(layout, heads_per_kv, element_bytes, head_dim, rebuilt, gpu, kernels):
        units, pack = cls.count * constants["HEADS"], constants["PACK"]
        # From one sequence to the next, or from one packed query to the next, from head to head and in a sequence.
        if pre:
            strides = [cls.start * group_rows * query.stride(1), query.stride(0), query.stride(1), query.stride(-2)]
        else:
            strides = [group_rows * cls.qk_offset, query.stride(0), cls.qk_rank, query.stride(-2)]
        if packed:
            strides[3] = query.stride(0)
        strides += [group_rows * cls.v_offset, output.stride(0)]
        strides += [cos.stride(0), basis.stride(0), cls.qk_offset] if constants["PRE"] else [0, 0, 0]
        places = row_places(layout, cls.start, element_bytes, head_dim if rebuilt else 0)
        key_strides, value_strides = [places[0], *key.stride()[:2]], [places[1], *value.stride()[:2]]
        align, key_align, value_align = prefill_alignment(constants, strides, key_strides, value_strides)
        rows, first_head = constants["ROWS"], cls.start * group_rows
        arguments: list[Any] = [
            query, key, value, output, lse, keys.first, keys.end, empty if keys.holes is None else keys.holes,
            empty if block_table is None else block_table, lse if keys.mask is None else keys.mask, cos, sin, basis,
            constant, *row_blocks(keys, rows, pack), batch_size, units, triton.cdiv(seq_len * pack, rows), seq_len,
            *(stride // align for stride in strides[:4]), *(stride // key_align for stride in key_strides),
            *(stride // value_align for stride in value_strides), *(stride // align for stride in strides[4:6]),
            first_head, lse.stride(0), 0 if block_table is None else block_table.stride(0),
            0 if keys.mask is None else keys.mask.stride(1), *(stride // align for stride in strides[6:]),
            cls.start * layout.group_size,
        ]  # fmt: skip
        real = scaling, 1.0 if softcap is None else softcap
        flags = {"PAGE": page, "KEY_PAGE": 0 if rebuilt else page, "MASK": keys.mask is not None}
        flags |= {"SOFT_CAP": softcap is not None, "ALIGN": align, "KEY_ALIGN": key_align, "VALUE_ALIGN": value_align}
        flags["PACKED"] = packed
        flags["CONSTANT"] = constants["PRE"] and constant_key is not None
        tasks, workers = task_count(keys, rows, pack) * units, prefill_workers(constants, sm_count(query.device))
        whole, cut = tasks, False
        if can_be_cut(constants) and not packed:  # lengths are the device's
            whole, cut = last_round(seq_len, keys.past, rows, pack, units * batch_size, workers)
        if whole:
            launch(prefill_kernel, (whole,), *arguments, 0, *real, **constants, **flags)
        if cut:
            pieces = pieces_of(constants)
            grid = ((tasks - whole) * pieces["SPLIT"],)
            launch(prefill_kernel, grid, *arguments, whole, *real, **pieces, **flags)
    return _shaped(output, lse, keys)


def _shaped(output: Tensor, lse: Tensor, keys: PrefillKeys) -> tuple[Tensor, Tensor]:
    """What `prefill_attention` returns, of [queries, .] and [num_heads, queries]."""
    if keys.query_start_loc is not None:
        return output, lse
    sequences = keys.batch_size, keys.seq_len
    return output.view(*sequences, -1), lse.view(-1, *sequences).transpose(0, 1)


def row_elements(layout: LayerLayout, element_bytes: int) -> tuple[int, int]:
    """Elements of the key and value rows of a layer: numbers, or words of codes."""
    if not layout.coded:
        return layout.qk_width, layout.v_width
    qk_bytes, v_bytes = layout.read_bytes(element_bytes)
    return qk_bytes // WORD_BYTES, v_bytes // WORD_BYTES


def row_places(layout: LayerLayout, group: int, element_bytes: int, rebuilt_dim: int = 0) -> tuple[int, int]:
    """Elements before a group in the key and value rows; of keys that were rebuilt, heads of rebuilt_dim numbers."""
    if layout.coded:
        qk_byte, v_byte = layout.byte_offsets(element_bytes)[group]
        place = qk_byte // WORD_BYTES, v_byte // WORD_BYTES
    else:
        place = layout.offsets()[group]
    return (group * layout.group_size * rebuilt_dim, place[1]) if rebuilt_dim else place


def prefill_alignment(
    constants: dict[str, Any], strides: list[int], key_strides: list[int], value_strides: list[int]
) -> tuple[int, int, int]:
    """ALIGN, KEY_ALIGN and VALUE_ALIGN: what divides widths and strides of queries, bases and outputs, and those of the
    rows. In rows of the model's dtype all are one, so that fewer kernels are compiled.
    """
    counts = [piece[3] for name in ("KEYS", "VALUES") for piece in constants[name]]
    keys = alignment_of(*key_strides, constants["QK_ROW"], *(piece[5] for piece in constants["KEYS"]))
    values = alignment_of(*value_strides, constants["V_ROW"], *(piece[5] for piece in constants["VALUES"]))
    both = alignment_of(*strides, constants["QK"], constants["V"])
    if constants["VALUES"][0][0] == 0:
        return (math.gcd(both, keys, values),) * 3
    return math.gcd(both, *counts), keys, min(values, 4)
