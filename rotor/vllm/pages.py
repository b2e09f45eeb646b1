"""Write and attend to rows of a layer in pages of bytes, a token's keys and values side by side.

Imports nothing of vLLM. The Triton kernels run where they serve the layer, else plain PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import LayerKernels
from ..kernels.parameters import AttentionParameters
from ..kernels.reference import partial_attention, project_keys
from ..kernels.rotary import Rotation, when_read
from ..kernels.rows import pack_layer, row_dtype
from .shards import Shard


@dataclass
class StepRequests:
    """The requests of a step: first those that decode (few tokens each), then prompts.

    most_decoded: most new tokens of a decoding request. most_keys: most keys of a request.
    starts, query_start_loc: tokens of the step before each request, and all of them, on the host and on the device.
    lengths: upper bounds of the tokens of each sequence, known without asking the device.
    """

    num_decodes: int
    most_decoded: int
    most_keys: int
    starts: list[int]
    lengths: list[int]
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    _requests: dict[Any, dict[str, Any]] = field(default_factory=dict)

    def requests(self, first: int, end: int, window: int | None) -> dict[str, Any]:
        """Arguments of `attend_pages` for requests that all decode, or are all prompts; made once a step.

        Decoding requests are views, which a CUDA graph goes on reading. Prompts are copies, as kernels are compiled for
        aligned tensors.
        """
        decodes = end == self.num_decodes
        known = self._requests.setdefault((first, end, window if decodes else None), {})
        if not known:
            starts, lengths = self.starts[first : end + 1], self.lengths[first:end]
            locations, kv_lens = self.query_start_loc[first : end + 1], self.seq_lens[first:end]
            known |= {"block_table": self.block_table[first:end], "total_kv_len": sum(lengths)}
            if decodes:
                from ..kernels.attention import ranges_of_pages  # imports Triton

                known |= {"max_query_len": self.most_decoded, "max_kv_len": self.most_keys}
                known["keys"] = ranges_of_pages(locations, kv_lens, starts[-1], self.most_decoded, window)
            else:
                longest = max(after - before for before, after in pairwise(starts))
                known |= {"max_query_len": longest, "max_kv_len": max(lengths)}
                known["block_table"], locations, kv_lens = (
                    known["block_table"].clone(),
                    locations - starts[0],
                    kv_lens.clone(),
                )
            known |= {"query_start_loc": locations, "kv_lens": kv_lens}
        return known


@dataclass
class PagedLayer:
    """A layer's rows in pages [num_pages, page_size, bytes], uint8, and attention over them.

    shard: this rank's part of the layer. dtype: the model's. A row may end with padding bytes.
    key_basis, key_shift: map keys into their latents, where the basis is not folded.
    rotation: RoPE's cos and sin by position, where keys are stored in blocks. window: a query attends to itself and the
        window - 1 keys before it.
    kernels: how the layer is launched; None: plain PyTorch serves it. varlen: the engine's attention for prompts; None:
        PyTorch's.
    """

    shard: Shard
    dtype: torch.dtype
    parameters: AttentionParameters
    key_basis: Tensor | None
    key_shift: Tensor | None
    rotation: Rotation | None
    window: int | None
    kernels: LayerKernels | None
    varlen: Any = None

    def rows(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the rows that keys and values are read from, as bytes or as numbers of the model's dtype."""
        layout = self.shard.layout
        key_bytes, value_bytes = layout.row_bytes(self.dtype.itemsize)
        sides = pages[..., :key_bytes], pages[..., key_bytes : key_bytes + value_bytes]
        keys, values = (side.view(row_dtype(layout, self.dtype)) for side in sides)
        return keys, layout.values_from(keys, values)

    def write(self, key: Tensor, value: Tensor, pages: Tensor, slots: Tensor) -> None:
        """Write new tokens into their slots.

        Args:
            key: [at least tokens, *], keys as they are stored, or latents where the basis is folded. value: latents of
                values, their part of joint latents, or nothing.
            slots: [tokens]: page times page_size plus the row in it; negative: the token is not kept.
        """
        key, value, shard, layout = key[: len(slots)], value[: len(slots)], self.shard, self.shard.layout
        if self.key_basis is not None:
            key = key.unflatten(-1, (-1, shard.shape.head_dim))
        if self.kernels is not None:
            from ..kernels.append import append  # imports Triton

            bases = {"key_basis": self.key_basis, "key_shift": self.key_shift, "scales": self.parameters.scales}
            to = {"out": self.rows(pages), "slots": slots}
            append(key[None], value[None], shard.key_layout, shard.key_shape, **bases, **to)
            return
        if self.key_basis is not None:
            heads = key.transpose(0, 1)[None]
            key = project_keys(heads, self.key_basis, shard.key_layout, self.key_shift, value[None, None])[0, 0]
        # Asking which tokens are kept would wait for the device; the others go into page 0, which engines leave unused.
        slots, page_size = slots.clamp(min=0).long(), pages.shape[1]
        packed = pack_layer(key, layout, True, self.parameters.scales), pack_layer(value, layout, keys=False)
        for rows, new in zip(layout.stored_sides(*self.rows(pages)), packed, strict=False):
            rows[slots // page_size, slots % page_size] = new

    def attend_step(self, query: Tensor, pages: Tensor, step: StepRequests, output: Tensor) -> None:
        """Attend for a step's tokens, into `output` [at least tokens, sum over query heads of value width].

        Args:
            query: [at least tokens, *], rotated heads side by side, or absorbed ones.
        """
        shape, rows = self.shard.shape, self.rows(pages)
        if shape.rotary_dim:
            query = query.unflatten(-1, (shape.num_heads, shape.head_dim))
        if self.kernels is None:
            for request, (start, end) in enumerate(pairwise(step.starts)):
                if end > start:
                    table, kv_len = step.block_table[request], int(step.seq_lens[request])
                    output[start:end] = self.attend_sequence(query[start:end], rows, table, kv_len)
            return
        from ..kernels.attention import attend_pages  # imports Triton

        runs = [(0, step.num_decodes)] if step.num_decodes else []
        for first, end in runs + within(step.lengths, step.num_decodes, self.most_keys):
            part = slice(step.starts[first], step.starts[end])
            attend_pages(
                query[part], *rows, self.parameters, self.kernels, **step.requests(first, end, self.window),
                rotation=self.rotation, window=self.window, varlen=self.varlen, out=output[part],
            )  # fmt: skip

    def attend_sequence(self, query: Tensor, rows: tuple[Tensor, Tensor], block_table: Tensor, kv_len: int) -> Tensor:
        """Causal attention of the last tokens of a sequence over its pages, in plain PyTorch.

        Args:
            query: [seq_len, num_heads, head_dim], rotated, or absorbed [seq_len, sum over query heads of width].
            rows: pages, which hold the rows of these tokens already. block_table: [pages of the sequence].
            kv_len: tokens of the sequence, with the new ones.
        Returns:
            [seq_len, sum over query heads of value width] in query's dtype.
        """
        seq_len, window = len(query), self.window
        first = 0 if window is None else max(0, kv_len - seq_len - window + 1)
        places = torch.arange(first, kv_len, device=query.device)
        position = places[-seq_len:, None]
        visible = places <= position
        if window is not None:
            visible &= places > position - window
        page_size = rows[0].shape[1]
        pages = block_table[places // page_size].long()
        key, value = (side[pages, places % page_size][None, None] for side in rows)
        key_rotation = None
        if self.rotation is not None:
            key_rotation = when_read(self.rotation, self.parameters.layout.form, places)
        heads = query.transpose(0, 1) if query.dim() == 3 else query
        output, _ = partial_attention(heads[None], key, value, self.parameters, key_rotation, visible[None, None])
        return output[0].to(query.dtype)

    def decodes(self, tokens: int) -> bool:
        """Whether requests of so many new tokens decode without the host, so that a CUDA graph may hold them."""
        if self.kernels is None or self.kernels.materialise:
            return False
        from ..kernels.attention import MOST_ROWS  # imports Triton

        return tokens * self.parameters.heads_per_group <= MOST_ROWS

    def prepare(self, device: torch.device) -> None:
        """Put tables on the device, and allocate for a moment the memory in which prompts are materialised."""
        if self.kernels is None or device.type != "cuda":
            return
        from ..kernels.append import prepare  # imports Triton
        from ..kernels.stock import MOST_BYTES

        prepare(self.shard.key_layout, self.shard.key_shape, self.dtype, device)
        torch.empty(MOST_BYTES, dtype=torch.uint8, device=device)

    @property
    def widest(self) -> int:
        """Width of a head as prompts are materialised."""
        shape, groups = self.shard.shape, self.shard.layout.groups
        values = max(group.values.width for group in groups)
        return max(values, shape.head_dim if shape.rotary_dim else max(group.key.width for group in groups))

    @property
    def most_keys(self) -> int:
        """Keys of prompts that are materialised at once; a single longer prompt may exceed it."""
        from ..kernels.stock import MOST_BYTES  # imports Triton

        return MOST_BYTES // (2 * self.shard.shape.num_kv_heads * self.widest * self.dtype.itemsize)


def within(lengths: list[int], first: int, most: int) -> list[tuple[int, int]]:
    """Split the requests from `first` on into runs of neighbours, each of at most `most` tokens or of one request."""
    runs: list[tuple[int, int]] = []
    total = 0
    for index in range(first, len(lengths)):
        total += lengths[index]
        if runs and total <= most:
            runs[-1] = runs[-1][0], index + 1
        else:
            runs.append((index, index + 1))
            total = lengths[index]
    return runs
