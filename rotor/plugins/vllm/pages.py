"""Rows of a layer in pages of bytes, a token's keys and values side by side: written, and attended to.

Plain tensors, nothing of vLLM. By the Triton kernels where they serve the layer, else in plain PyTorch.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ...format.kernel_config import LayerKernels
from ...kernels.parameters import AttentionParameters
from ...kernels.reference import partial_attention, project_keys
from ...kernels.rotary import Rotation, when_read
from ...kernels.rows import pack_layer
from .shards import Shard


@dataclass
class Step:
    """The requests of a step, those that decode (few tokens each) first, prompts behind them.

    most_decoded: tokens of a decoding request, at most. most_keys: of a request.
    starts, query_start_loc: tokens of the step before each request, and all, for the host and on the device.
    lengths: tokens of each sequence, as far as the host knows them (no less than there are), for those who are not to
        ask the device.
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
        """Requests that all decode, or are all prompts, as the kernels take them; made once a step.

        Decoding requests are views, which a CUDA graph goes on reading. Prompts are copies: kernels are compiled for
        tensors that begin where memory does.
        """
        decodes = end == self.num_decodes
        known = self._requests.setdefault((first, end, window if decodes else None), {})
        if not known:
            starts, lengths = self.starts[first : end + 1], self.lengths[first:end]
            locations, kv_lens = self.query_start_loc[first : end + 1], self.seq_lens[first:end]
            known |= {"block_table": self.block_table[first:end], "total_kv_len": sum(lengths)}
            if decodes:
                from ...kernels.attention import ranges_of_pages  # imports Triton

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

    shard: what this rank has of the layer. dtype: the model's. A row may end with bytes of no meaning.
    key_basis, key_shift: what lies between stored keys and their latents, where the basis is not folded.
    rotation: RoPE's cos and sin by position, where keys are stored in blocks. window: a query attends to itself and the
        window - 1 keys before it.
    kernels: the launches of the layer; None: plain PyTorch serves it. varlen: the engine's own attention, of prompts;
        None: PyTorch's.
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
        """Views of keys and of values, bytes or numbers of the model's dtype; of joint latents twice the same."""
        layout = self.shard.layout
        key_bytes, value_bytes = layout.row_bytes(self.dtype.itemsize)
        keys, values = pages[..., :key_bytes], pages[..., key_bytes : key_bytes + value_bytes]
        if not layout.coded:
            keys, values = keys.view(self.dtype), values.view(self.dtype)
        return keys, keys if layout.joint else values

    def write(self, key: Tensor, value: Tensor, pages: Tensor, slots: Tensor) -> None:
        """New tokens into their slots.

        Args:
            key: [at least tokens, *], keys as they are stored, or latents where the basis is folded. value: latents of
                values, or their part of joint ones, or nothing.
            slots: [tokens]: page times page_size plus the row in it; negative: the token is not kept.
        """
        key, value, shard, layout = key[: len(slots)], value[: len(slots)], self.shard, self.shard.layout
        if self.key_basis is not None:
            key = key.unflatten(-1, (-1, shard.shape.head_dim))
        if self.kernels is not None:
            from ...kernels.append import append  # imports Triton

            bases = {"key_basis": self.key_basis, "key_shift": self.key_shift}
            to = {"out": self.rows(pages), "slots": slots}
            append(key[None], value[None], shard.key_layout, shard.key_shape, **bases, **to)
            return
        if self.key_basis is not None:
            heads, of_values = key.transpose(0, 1)[None], value[None, None] if layout.joint else None
            key = project_keys(heads, self.key_basis, shard.key_layout, self.key_shift, of_values)[0, 0]
        # Without asking the host what is not kept goes into page 0, which engines give to nobody.
        slots, page_size = slots.clamp(min=0).long(), pages.shape[1]
        key_rows, value_rows = self.rows(pages)
        key_rows[slots // page_size, slots % page_size] = pack_layer(key, layout, keys=True)
        if not layout.joint:
            value_rows[slots // page_size, slots % page_size] = pack_layer(value, layout, keys=False)

    def attend(self, query: Tensor, pages: Tensor, step: Step, output: Tensor) -> None:
        """Attention of a step's tokens into `output`, [at least tokens, sum over query heads of value width].

        Args:
            query: [at least tokens, *], rotated heads side by side, or absorbed ones.
        """
        shape, rows = self.shard.shape, self.rows(pages)
        if shape.rotary_dim:
            query = query.unflatten(-1, (shape.num_heads, shape.head_dim))
        if self.kernels is None:
            for requests, tokens in step_batches(step.starts, step.lengths):
                index = torch.tensor(tokens, device=query.device)
                longest = max(step.lengths[i] for i in requests)
                output[index] = self.attend_alike(
                    query[index], rows, step.block_table[requests], step.seq_lens[requests], longest
                )
            return
        from ...kernels.attention import attend_pages  # imports Triton

        runs = [(0, step.num_decodes)] if step.num_decodes else []
        for first, end in runs + within(step.lengths, step.num_decodes, self.most_keys):
            own = slice(step.starts[first], step.starts[end])
            attend_pages(
                query[own], *rows, self.parameters, self.kernels, **step.requests(first, end, self.window),
                rotation=self.rotation, window=self.window, varlen=self.varlen, out=output[own],
            )  # fmt: skip

    def attend_alike(
        self, query: Tensor, rows: tuple[Tensor, Tensor], block_table: Tensor, kv_lens: Tensor, longest: int
    ) -> Tensor:
        """In plain PyTorch: causal attention of the last tokens of each sequence, as many of each, over its pages.

        Args:
            query: [batch_size, seq_len, num_heads, head_dim], rotated, or absorbed [batch_size, seq_len, sum over query
                heads of width].
            rows: of pages, which hold these tokens' own rows already.
            block_table: [batch_size, pages of a sequence]. kv_lens: [batch_size], the new tokens among them.
            longest: at least the largest of these, known to the host.
        Returns:
            [batch_size, seq_len, sum over query heads of value width] in query's dtype.
        """
        page_size, seq_len, window, kv_lens = rows[0].shape[1], query.shape[1], self.window, kv_lens.long()
        position = kv_lens[:, None] - seq_len + torch.arange(seq_len, device=query.device)  # of the queries
        span, first_page = longest, torch.zeros_like(kv_lens)
        if window is not None:
            first_page = (position[:, 0] - window + 1).clamp(min=0) // page_size
            span = min(longest, window + seq_len + page_size)
        places = first_page[:, None] * page_size + torch.arange(span, device=query.device)  # of the keys
        pages = block_table.gather(1, (places // page_size).clamp(max=block_table.shape[1] - 1)).long()
        stored = places < kv_lens[:, None]

        def gathered(pages_of: Tensor) -> Tensor:
            """[batch_size, 1, span, bytes]; zeros where pages hold anything, NaN too."""
            return pages_of[pages, places % page_size].masked_fill_(~stored[..., None], 0).unsqueeze(1)

        key = gathered(rows[0])
        value = key if self.shard.layout.joint else gathered(rows[1])
        visible = places[:, None] <= position[..., None]
        if window is not None:
            visible &= places[:, None] > position[..., None] - window
        key_rotation = None
        if self.rotation is not None:
            own = places.clamp(max=len(self.rotation[0]) - 1)
            own = own[0] if window is None else own.unsqueeze(1)
            key_rotation = when_read(self.rotation, self.parameters.layout.form, own)
        query_heads = query.transpose(1, 2) if query.dim() == 4 else query
        found = partial_attention(query_heads, key, value, self.parameters, key_rotation, visible.unsqueeze(1))
        return found[0].to(query.dtype)

    def decodes(self, tokens: int) -> bool:
        """Whether a CUDA graph may be captured of requests of so many tokens each: they are decoded by one kernel."""
        if self.kernels is None or self.kernels.materialise:
            return False
        from ...kernels.attention import MOST_ROWS  # imports Triton

        return tokens * self.parameters.heads_per_group <= MOST_ROWS

    def prepare(self, device: torch.device) -> None:
        """Take, for a moment, the memory that prompts are materialised in, and put tables on the device for good."""
        if self.kernels is None or device.type != "cuda":
            return
        from ...kernels.append import prepare  # imports Triton
        from ...kernels.stock import MOST_BYTES

        prepare(self.shard.key_layout, self.shard.key_shape, self.dtype, device)
        torch.empty(MOST_BYTES, dtype=torch.uint8, device=device)

    @property
    def widest(self) -> int:
        """Numbers of a head of what prompts are materialised to."""
        shape, groups = self.shard.shape, self.shard.layout.groups
        own = max(group.values.width for group in groups)
        return max(own, shape.head_dim if shape.rotary_dim else max(group.key.width for group in groups))

    @property
    def most_keys(self) -> int:
        """Keys of prompts that are in memory at once, of all heads, beside one that has more by itself."""
        from ...kernels.stock import MOST_BYTES  # imports Triton

        return MOST_BYTES // (2 * self.shard.shape.num_kv_heads * self.widest * self.dtype.itemsize)


def step_batches(starts: list[int], lengths: list[int]) -> list[tuple[list[int], list[list[int]]]]:
    """Requests that are attended to at once, and their tokens: those of one token whose lengths are within twice each
    other (or one block), others one by one.
    """
    batches: dict[tuple[int, int], list[int]] = defaultdict(list)
    for i, length in enumerate(lengths):
        count = starts[i + 1] - starts[i]
        if count:
            batches[count, i if count > 1 else max(length, 63).bit_length()].append(i)
    return [(own, [list(range(starts[i], starts[i + 1])) for i in own]) for own in batches.values()]


def within(lengths: list[int], first: int, most: int) -> list[tuple[int, int]]:
    """Requests from `first` on in runs of neighbours, each of at most so many tokens, or of one request."""
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
