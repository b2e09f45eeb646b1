"""Launch decoding: absorb, decode, and join, or in layers with exact tokens finish. Nothing waits for the host.

Tables and constants of a layer are made once (`DecodeLayer`), RoPE by blocks once for all layers (`block_starts`),
and the keys that queries see once a step (`ranges.KeyRanges`).
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import triton
from torch import Tensor

from rotor.checkpoint.kernel_config import Tile
from rotor.checkpoint.layout import LayerLayout
from rotor.checkpoint.rows import SCALE_SLOT
from rotor.errors import UsageError

from .absorb_launch import ABSORBED_PART, Absorbing, absorbed_at_a_time, pad, pad_rows, sequences_at_once
from .decode import MOVES, decode_kernel, sixteenth
from .dispatch import decode_tile, slices_per_sm
from .exact_slots import ExactSlots
from .finish import finish_kernel
from .join import join_kernel
from .launch import capability_of, device_guard, device_table, kept_memory, padded, precision, shared_bytes, sm_count
from .parameters import AttentionParameters, as_loaded
from .ranges import KeyRanges

TILES_OF_A_PROGRAM = 8
"""Tiles that a program has at least, where that leaves one for every SM: more slices take longer to join than they
save."""

MOST_ROWS = 64
"""Most query rows of a group that one tile takes."""

OTHER_BYTES = 10 << 10
"""Bytes of shared memory that decoding takes beside absorbed queries and copies of rows."""


def product_dtype(layout: LayerLayout, dtype: torch.dtype) -> torch.dtype:
    """The dtype that a layer's rows are multiplied in, in a model of a dtype: codes take float16 for bfloat16 too."""
    return torch.float16 if layout.coded and dtype.itemsize == 2 else dtype


def part_of(columns: int) -> int:
    """Columns that are loaded at a time, a power of two of which there are whole ones."""
    return math.gcd(columns, MOST_PART)


LEAST_PART = 16
"""Fewest columns of keys or values that a product takes."""

MOST_PART = 32
"""Most columns of keys or values that are loaded at a time: with 64 a product holds registers that wide rows spill."""


class DecodeLayer:
    """Tables and constants of a layer's launches, on one device and in one dtype."""

    def __init__(self, parameters: AttentionParameters, dtype: torch.dtype, device: torch.device) -> None:
        layout, shape = parameters.layout, parameters.shape
        self.layout, self.shape, self.device = layout, shape, device
        self.shared_bytes = shared_bytes(capability_of(device))
        self.dtype = product_dtype(layout, dtype)
        self.scaling, self.softcap = parameters.scaling, parameters.softcap
        self.operands = layout.operands  # of a word; 1 of numbers
        self.joint, self.scaled = layout.joint, layout.scaled
        self.word_operands = layout.word_operands
        self.heads, self.per_head = layout.group_size, shape.heads_per_kv
        self.group_rows = self.heads * self.per_head
        self.folded = parameters.query_basis is None
        self.block = layout.rope_block or 0
        self.planes = shape.rotary_planes if self.block else 0
        rest = 0 if self.folded else shape.head_dim - 2 * self.planes
        self.chunk = absorbed_at_a_time(self.planes)
        self.rotary_chunks, self.rest_chunks = -(-2 * self.planes // self.chunk), -(-rest // self.chunk)
        widths = [group.key.width // self.operands for group in layout.groups]
        value_widths = [group.values.width // self.operands for group in layout.groups]
        self.columns, self.value_columns = (-(-max(side) // LEAST_PART) * LEAST_PART for side in (widths, value_widths))
        self.part = part_of(self.columns)
        self.full = set(widths) == {self.columns}
        self.value_full = set(value_widths) == {self.value_columns}
        self.row_size = layout.word_bytes(dtype.itemsize)
        offsets = [[byte // self.row_size for byte in both] for both in layout.byte_offsets(dtype.itemsize)]
        self.key_align, self.value_align = (math.gcd(16, *(pair[side] for pair in offsets)) for side in (0, 1))
        places, rows = [0, 0], []
        starts = []
        for group in layout.groups:
            starts.append(tuple(places))
            places = [places[0] + group.key.width, places[1] + group.values.width]
        # Aliases, so that a parameter for which this is remembered does not live as long as this.
        self.basis = basis = None if parameters.query_basis is None else parameters.query_basis.detach()
        of_output = parameters.output_basis
        self.output_basis = None if of_output is None else of_output.detach().to(dtype)
        of_values = parameters.value_constant
        self.value_constant = None if of_values is None else of_values.detach()
        stride = 0 if self.output_basis is None else self.output_basis.stride(0)
        self.output_align = math.gcd(16, *(value for _, value in starts), stride)
        for i, (key_first, value_first) in enumerate(starts):
            at = (offsets[i][0], offsets[i][1])
            rows.append([
                widths[i], at[0], value_widths[i], at[1], self.group_rows * key_first, 0,
                self.group_rows * value_first, value_first // self.output_align,
            ])  # fmt: skip
        self.rows, self.output_width = rows, self.group_rows * places[1]
        if self.output_basis is not None:
            self.output_width = shape.num_heads * shape.head_dim
        self._tables: dict[tuple[int, int], Tensor] = {}
        self.constant = None if parameters.key_constant is None else parameters.key_constant.detach()
        self.scaled_constant = None if basis is None or not self.scaled else self._scaled_constant()
        self.absorb_basis = None if basis is None or self.folded else self._absorb_basis()
        self.table(self.key_align, self.value_align)

    def table(self, key_align: int, value_align: int) -> Tensor:
        """The table [groups, 8] of `decode_kernel`, with offsets in rows in units of key_align and value_align."""
        if (key_align, value_align) not in self._tables:
            rows = [[r[0], r[1] // key_align, r[2], r[3] // value_align, *r[4:]] for r in self.rows]
            self._tables[key_align, value_align] = device_table(rows, self.device)
        return self._tables[key_align, value_align]

    def _columns(self, group: int, first: int) -> Tensor:
        """The query basis of a group as decoding reads its latent, [heads, head_dim, operands, columns], float32.

        Args:
            first: columns of the groups before.
        """
        assert self.basis is not None
        width = self.layout.groups[group].key.width
        basis = self.basis[:, first : first + width].float().unflatten(0, (self.heads, self.shape.head_dim))
        columns = pad(basis.unflatten(-1, (self.operands, -1)), self.columns).clone()
        if self.scaled:
            columns[:, :, 0, SCALE_SLOT] = 0  # in place of the scale is read what stands for 1
        for j in range(self.operands if self.word_operands else 0):
            if sixteenth(j):
                columns[:, :, j] /= 16
                if j < 4:
                    columns[:, :, j - 1] -= columns[:, :, j]
        return columns

    def _scaled_constant(self) -> Tensor:
        """The constant keys that scales multiply, [num_kv_heads, head_dim], float32."""
        assert self.basis is not None
        constants, first = [], SCALE_SLOT
        for group in self.layout.groups:
            constants.append(self.basis[:, first].float().unflatten(0, (self.heads, -1)))
            first += group.key.width
        return torch.cat(constants)

    def _absorb_basis(self) -> tuple[Tensor, Tensor]:
        """The basis and the constants that `absorb` multiplies with, see `absorb_kernel`."""
        bases, first = [], 0
        for g, group in enumerate(self.layout.groups):
            bases.append(self._in_chunks(self._columns(g, first)))
            first += group.key.width
        keys = [self.constant, self.scaled_constant]
        columns = torch.zeros(self.shape.num_kv_heads, self.shape.head_dim, 8, device=self.device)
        for column, key in zip((0, 2), keys, strict=True):
            if key is not None:
                columns[..., column] = key.to(self.dtype)
                columns[..., column + 1] = key.float() - columns[..., column]
        basis, constants = torch.stack(bases), self._in_chunks(columns)
        return basis.to(self.dtype).contiguous(), constants.to(self.dtype).contiguous()

    def _in_chunks(self, rows: Tensor) -> Tensor:
        """Rows of rotary planes and of dimensions without RoPE, [heads, head_dim, ...], as `absorb` takes them: [heads,
        chunks, chunk, ...]. Both halves of a plane are neighbours."""
        planes, half = self.planes, self.chunk // 2
        rotary = pad_rows(rows[:, : 2 * planes].unflatten(1, (2, planes)), 2, self.rotary_chunks * half)
        rotary = rotary.unflatten(2, (-1, half)).transpose(1, 2).transpose(2, 3).flatten(2, 3)
        rest = pad_rows(rows[:, 2 * planes :], 1, self.rest_chunks * self.chunk).unflatten(1, (-1, self.chunk))
        return torch.cat([rotary, rest], dim=1)

    @property
    def has_constant(self) -> bool:
        """Tell whether a logit is added to all keys of a block."""
        return self.word_operands > 0 and not (self.folded and self.scaled)

    def tiles(self, tokens: int = 1, wanted: Tile | None = None) -> Tile:
        """The tile that is wanted, or the one by rule, for so many new tokens; its rows are loaded when they are
        needed where shared memory does not hold those of the next ones beside the absorbed queries.
        """
        rows = max(8, triton.next_power_of_2(tokens * self.group_rows))
        tile = wanted or decode_tile(self.layout, tokens * self.group_rows)
        queries = rows * self.operands * self.columns * self.dtype.itemsize
        columns = self.columns if self.joint else self.columns + self.value_columns
        copies = tile.stages * tile.keys * columns * self.row_size
        return tile if queries + copies + OTHER_BYTES <= self.shared_bytes else replace(tile, stages=1)

    def step(self, tiles: Tile) -> int:
        """Keys from one tile to the next."""
        return min(tiles.keys, self.block) if self.block else tiles.keys

    def constants(self, tokens: int, tiles: Tile, page: int, mask: bool, softcap: bool) -> dict[str, object]:
        """Constants of the decode kernel, except the alignment of a cache's strides."""
        keys = max(16, tiles.keys if not self.block else self.step(tiles))
        return {
            "DTYPE": getattr(triton.language, str(self.dtype).removeprefix("torch.")), "CODED": self.word_operands,
            "JOINT": self.joint, "SCALED": self.scaled, "FOLDED": self.folded,
            "CONSTANT": self.has_constant, "BLOCK": self.block,
            "HEADS": self.heads, "PER_HEAD": self.per_head, "TOKENS": tokens,
            "ROWS": max(8, triton.next_power_of_2(tokens * self.group_rows)), "COLUMNS": self.columns,
            "PART": self.part, "VALUE_COLUMNS": self.value_columns,
            "VALUE_PART": max(part_of(self.value_columns), min(MOST_PART, LEAST_PART * tiles.warps)),
            "FULL": self.full, "VALUE_FULL": self.value_full, "PAGE": page, "MASK": mask, "SOFTCAP": softcap,
            "KEYS": keys, "STAGES": tiles.stages, "SPREAD": min(keys, 16 * tiles.warps),
            "MOVE": MOVES,
            "PRECISION": precision(self.dtype), "ASM": assembled(),
        }  # fmt: skip

    def absorb_shape(self, many: bool) -> tuple[int, int, int]:
        """Blocks that a program of `absorb` takes at a time, its warps and stages: the fastest on an H100, or what
        leaves room for the basis in shared memory.

        Args:
            many: there are as many queries as SMs.
        """
        if not self.block or self.dtype.itemsize != 2:
            return (32 if self.block else 16), 2, 2
        if many and self.shape.head_dim > 64:
            return 64, 4, 1
        if self.columns <= 32:
            return 32, 2, 2
        return (128, 8, 1) if self._holds_basis(128, 1) or not self._holds_basis(64, 1) else (64, 4, 1)

    def absorb_shape_of_append(self) -> int:
        """Blocks that a program takes at a time which absorbs in the launch of `append`, with that one's warps."""
        return 64 if self.dtype.itemsize == 2 and self.columns > 32 else 32

    def _holds_basis(self, blocks: int, stages: int) -> bool:
        """Tell whether a program of `absorb` has the shared memory to load the basis once for all its blocks."""
        dims, columns = (self.rotary_chunks + self.rest_chunks) * self.chunk, self.operands * self.columns
        size = self.dtype.itemsize
        basis, constants = dims * columns * size, 8 * (dims + columns) * size
        products = blocks * ABSORBED_PART * size  # queries or products on their way between layouts
        copies = 0 if stages == 1 else stages * blocks * self.rotary_chunks * self.chunk * 4
        return basis + constants + products + copies <= self.shared_bytes

    def absorb_constants(self, blocks: int, stages: int) -> dict[str, object]:
        """Constants of the absorbing kernel, for so many blocks at a time and stages of copies."""
        return {
            "GROUPS": len(self.layout.groups), "CODED": self.word_operands, "SCALED": self.scaled,
            "PLANES": self.planes, "ROTARY": self.rotary_chunks, "HEAD_DIM": self.shape.head_dim,
            "REST": self.rest_chunks, "BLOCK": self.block, "HEADS": self.heads, "PER_HEAD": self.per_head,
            "COLUMNS": self.columns, "PART": math.gcd(self.operands * self.columns, ABSORBED_PART),
            "CHUNK": self.chunk, "COUNT": blocks, "STAGES": stages, "HELD": self._holds_basis(blocks, stages),
            "PRECISION": precision(self.dtype), "ASM": assembled() and self.dtype.itemsize == 2,
        }  # fmt: skip


def assembled() -> bool:
    """Tell whether kernels are compiled for a GPU of NVIDIA's, whose assembly they may use."""
    return not triton.knobs.runtime.interpret and torch.version.hip is None


def blocks_of(layer: DecodeLayer, kv_len: int) -> int:
    """Most blocks in which so many keys lie."""
    return -(-kv_len // layer.block) + 1 if layer.block else 1


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer: DecodeLayer,
    ranges: KeyRanges,
    starts_of_blocks: Tensor | None = None,
    *,
    block_table: Tensor | None = None,
    tiles: Tile | None = None,
    programs: int | None = None,
    most_programs: int | None = None,
    max_kv_len: int | None = None,
    out: Tensor | None = None,
    exact: ExactSlots | None = None,
    attended: KeyRanges | None = None,
    absorbing: Absorbing | None = None,
) -> Tensor:
    """Attention of one or a few new tokens of each sequence over the rows of a layer.

    Args:
        query: [tokens, num_heads, head_dim], rotated, KV heads in the order of the layout; in a model without RoPE
            absorbed ones, [tokens, sum over query heads of width]. The innermost stride is 1.
        key, value: rows, [batch_size, kv_len, bytes or numbers], with a block table [pages, page_size, .]. Values of
            joint latents are read from `key`.
        layer, ranges, starts_of_blocks: made for the layer, for the step, and, where keys are in blocks, for the model.
        block_table: [batch_size, pages of a sequence], int32; entries behind the last key's are not read.
        tiles, programs: override what the layer and the device suggest.
        most_programs: the most that start; fewer do where each would have too few tiles.
        max_kv_len: upper bound of a sequence's keys; by default what cache or block table hold.
        out: [tokens, sum over query heads of value width] to write into.
        exact, attended: in a layer with exact tokens, these, and the ranges of all keys, exact or not; `ranges` are
            then those of codes (`ranges.ranges_of_codes`).
        absorbing: what has absorbed the queries of all sequences; None: they are absorbed here.
    Returns:
        [tokens, sum over query heads of value width], dtype of query, groups in the order of the layout; in a layer
        with exact tokens [tokens, num_heads * head_dim]. Zeros of tokens that attend to nothing.
    Raises:
        UsageError: more query rows than a tile takes; a page that is no multiple of 16 keys.
    """
    tokens, rows = ranges.longest, ranges.longest * layer.group_rows
    page = 0 if block_table is None else key.shape[1]
    if rows > MOST_ROWS:
        raise UsageError(f"{rows} query rows of a group: decoding takes up to {MOST_ROWS}.", "Split the new tokens.")
    if page % 16:
        raise UsageError(f"pages of {page} keys: expected a multiple of 16.", "Choose another page size.")
    key, value = (as_loaded(rows, layer.layout) for rows in (key, layer.layout.values_from(key, value)))
    capacity = key.shape[1] if block_table is None else block_table.shape[1] * page
    capacity = capacity if max_kv_len is None else min(capacity, max_kv_len)
    batch_size, groups = ranges.batch_size, len(layer.layout.groups)
    softcap, log2 = layer.softcap, math.log2(math.e) * layer.scaling
    tiles = layer.tiles(tokens, tiles)
    most_programs = most_programs or sm_count(key.device) * slices_per_sm(layer.layout, tiles)
    max_blocks = blocks_of(layer, capacity)
    output = query.new_empty(query.shape[0], layer.output_width) if out is None else out
    if ranges.query_start is not None:
        output.zero_()  # tokens of no sequence
    most = sequences_at_once(layer, batch_size, max_blocks, tokens) if absorbing is None else batch_size
    asked_programs = programs
    for start in range(0, batch_size, most):
        part = slice(start, min(start + most, batch_size))
        work = (part.stop - start) * groups * -(-capacity // layer.step(tiles))
        programs = asked_programs or min(most_programs, max(sm_count(key.device), work // TILES_OF_A_PROGRAM))
        begin, until = ranges.begin[part], ranges.until[part]
        first, end, mask, holes, starts = ranges.first, ranges.end, ranges.mask, ranges.holes, ranges.query_start
        queries, outputs, keys, values, pages = query, output, key, value, block_table
        if starts is not None:
            starts = starts[part.start : part.stop + 1]
        else:  # a token a sequence
            queries, outputs = query[part], output[part]
            mask, holes = (None, None) if mask is None or holes is None else (mask[part], holes[part])
        if pages is None:
            keys, values = key[part], value[part]
        else:
            pages = pages[part]
        sequences = part.stop - part.start
        (keys, key_start), (values, value_start) = _aligned(keys), _aligned(values)
        key_align = math.gcd(layer.key_align, key_start, keys.stride(0), keys.stride(1))
        value_align = math.gcd(layer.value_align, value_start, values.stride(0), values.stride(1))
        table = layer.table(key_align, value_align)

        # What a kernel leaves to the next: a result and its log-sum-exp for each slice of the work.
        slots = (programs + sequences * groups) * rows
        sizes = slots * layer.operands * layer.value_columns, slots
        partial, partial_lse = kept_memory("partial results", sizes, key.device)
        none = begin  # stands for a tensor that a kernel does not read
        with device_guard(key.device):
            absorbed = constant = none
            if not layer.folded:
                now = absorbing or Absorbing.of(layer, ranges, part, max_blocks, starts_of_blocks)
                if absorbing is None:
                    now.launch(queries)
                assert now.max_blocks == max_blocks
                absorbed, constant = now.absorbed, now.constant
            decode_kernel[(programs,)](
                queries if layer.folded else absorbed, constant, keys, values, partial, partial_lse, table,
                begin, until, first, end, none if starts is None else starts,
                none if pages is None else pages, none if mask is None else mask, none if holes is None else holes,
                sequences, groups, max_blocks, queries.stride(0), key_start // key_align, keys.stride(0) // key_align,
                value_start // value_align, values.stride(0) // value_align,
                0 if pages is None else pages.stride(0), 0 if mask is None else mask.stride(0), log2,
                1.0 if softcap is None else softcap * math.log2(math.e), KEY_ALIGN=key_align, VALUE_ALIGN=value_align,
                KEY_ROW=keys.stride(1), VALUE_ROW=values.stride(1),
                num_warps=tiles.warps, num_stages=tiles.stages, enable_fp_fusion=True,
                **layer.constants(tokens, tiles, page, mask is not None, softcap is not None),
            )  # fmt: skip
            if exact is not None and attended is not None:
                sequence_ends = exact.until.flatten() if starts is not None else exact.until.flatten()[part]
                _finish(
                    layer, queries, outputs, partial, partial_lse, table, begin, until, starts, attended, mask, holes,
                    exact.part(part, sequence_ends),
                    part, programs, tokens, tiles,
                )  # fmt: skip
                continue
            join_kernel[groups * layer.group_rows, sequences * tokens](
                partial, partial_lse, outputs, table, begin, until, none if starts is None else starts, sequences,
                groups, programs, outputs.stride(0), **join_constants(layer, tokens, tiles),
            )  # fmt: skip
    return output


def _aligned(rows: Tensor) -> tuple[Tensor, int]:
    """The memory of rows from a multiple of 16 bytes on, and how many elements of it lie before them.

    Triton compiles another kernel for addresses that are none. A view of a cache may begin anywhere, and first do so
    while a CUDA graph is captured, where nothing can be compiled.
    """
    before = rows.data_ptr() % 16 // rows.element_size()
    if not before or before > rows.storage_offset():
        return rows, 0
    return rows.as_strided(rows.shape, rows.stride(), rows.storage_offset() - before), before


def join_constants(layer: DecodeLayer, tokens: int, tiles: Tile) -> dict[str, object]:
    return {
        "CODED": layer.word_operands, "GROUP_ROWS": layer.group_rows, "TOKENS": tokens,
        "VALUE_COLUMNS": layer.value_columns, "STEP": layer.step(tiles), "SLICES": 16,
        "PADDED": triton.next_power_of_2(layer.operands * layer.value_columns), "num_warps": 4,
    }  # fmt: skip


EXACT_KEYS = 64
"""Exact keys of a tile of `finish_kernel`; half as many of heads wider than 128."""

JOINED = 4096
"""Most numbers of partial results that `finish_kernel` holds at once."""


def _finish(
    layer: DecodeLayer,
    queries: Tensor,
    outputs: Tensor,
    partial: Tensor,
    partial_lse: Tensor,
    table: Tensor,
    begin: Tensor,
    until: Tensor,
    starts: Tensor | None,
    attended: KeyRanges,
    mask: Tensor | None,
    holes: Tensor | None,
    exact: ExactSlots,
    part: slice,
    programs: int,
    tokens: int,
    tiles: Tile,
) -> None:
    """Launch `finish_kernel` for a part of a batch."""
    first, end = (of if starts is not None else of[part] for of in (attended.first, attended.end))
    key, value, none = exact.key, exact.value, begin
    align = math.gcd(16, *(side.stride(place) for side in (key, value) for place in range(3)))
    sequences, slots = exact.index.shape
    heads, pages = layer.shape.num_heads, exact.block_table
    # One query head a program where that is needed to fill the GPU; else all heads of a KV head, which share its keys.
    share = layer.per_head if sequences * layer.shape.num_kv_heads >= sm_count(key.device) else 1
    assert layer.output_basis is not None
    finish_kernel[heads // share, sequences](
        queries, partial, partial_lse, layer.output_basis,
        partial if layer.value_constant is None else layer.value_constant, key, value, exact.index, outputs, table,
        begin, until, none if starts is None else starts, first, end, exact.first, exact.until,
        none if mask is None else mask, none if holes is None else holes, none if pages is None else pages,
        sequences, len(layer.layout.groups), programs, slots, outputs.stride(0), queries.stride(0),
        queries.stride(1), layer.output_basis.stride(0) // layer.output_align,
        *(side.stride(place) // align for side in (key, value) for place in range(3)), exact.index.stride(0),
        0 if pages is None else pages.stride(0), 0 if mask is None else mask.stride(0),
        math.log2(math.e) * layer.scaling, 1.0 if layer.softcap is None else layer.softcap * math.log2(math.e),
        ALIGN=align, PAGE=0 if pages is None else key.shape[2], enable_fp_fusion=True,
        **finish_constants(layer, tokens, tiles, share, mask is not None),
    )  # fmt: skip


def finish_constants(layer: DecodeLayer, tokens: int, tiles: Tile, share: int, mask: bool) -> dict[str, object]:
    """Constants of the finish kernel, except the alignment of the exact tokens' strides."""
    apart = triton.next_power_of_2(share * tokens)
    dim = padded(layer.shape.head_dim)
    columns = min(128 if apart == 1 else 64, padded(layer.operands * layer.value_columns))
    return {
        "CODED": layer.word_operands, "HEADS": layer.heads, "PER_HEAD": layer.per_head, "SHARE": share,
        "TOKENS": tokens, "APART": apart, "ROWS": max(8, apart), "HEAD_DIM": layer.shape.head_dim, "DIM": dim,
        "BASIS_ALIGN": layer.output_align, "VALUE_COLUMNS": layer.value_columns, "VALUE_FULL": layer.value_full,
        "COLUMNS": columns, "STEP": layer.step(tiles), "SLICES": max(2, min(32, JOINED // (columns * apart))),
        "KEYS": EXACT_KEYS if dim <= 128 else EXACT_KEYS // 2, "STAGES": 2,
        "CONSTANT": layer.value_constant is not None, "MASK": mask, "SOFTCAP": layer.softcap is not None,
        "PRECISION": precision(layer.dtype), "num_warps": 4 if dim * apart <= 4096 else 8, "num_stages": 2,
    }  # fmt: skip
