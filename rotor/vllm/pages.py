"""Write and attend to rows of a layer in pages of bytes, a token's keys and values side by side.

Imports nothing of vLLM. The Triton kernels run where they serve the layer, else plain PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..checkpoint.kernel_config import LayerKernels
from ..checkpoint.layout import ExactTokens
from ..kernels.exact_slots import ExactSlots, SlotBounds
from ..kernels.parameters import AttentionParameters, pack_layer, row_dtype
from ..kernels.passes import Pass
from ..kernels.reference.attention import partial_attention, project_keys
from ..kernels.reference.exact import ExactKeys, RowKeys, attend_to_both, project_rows
from ..kernels.rotary import Rotation, when_read
from .shards import Shard

if TYPE_CHECKING:
    from ..kernels.stock import Varlen


@dataclass
class StepRequests:
    """The requests of a step: first those that decode (few tokens each), then prompts.

    most_decoded: most new tokens of a decoding request. most_keys: most keys of a request.
    starts, query_start_loc: tokens of the step before each request, and all of them, on the host and on the device.
    lengths: upper bounds of the tokens of each sequence, known without asking the device.
    now: what the kernels compute once for all layers.
    """

    num_decodes: int
    most_decoded: int
    most_keys: int
    starts: list[int]
    lengths: list[int]
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    now: Pass = field(default_factory=Pass)
    _requests: dict[Any, dict[str, Any]] = field(default_factory=dict)
    _bounds: dict[tuple[int, int, int], SlotBounds] = field(default_factory=dict)

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

    def bounds(self, first: int, end: int, newest: int, held: int = 0, block_table: Tensor | None = None) -> SlotBounds:
        """The exact tokens of the same requests, made once a step. Requests that decode read the newest with the new
        ones, prompts those before the new ones; both the first.

        Args:
            held: first tokens that are kept, in a sequence's first page. block_table: of exact tokens; None: none are
                kept, and `newest` is 1.
        """
        known = self._bounds.get((first, end, newest))
        if known is None:
            decodes = end == self.num_decodes
            starts, kv_lens = self.query_start_loc[first : end + 1], self.seq_lens[first:end]
            token = torch.arange(self.starts[first], self.starts[end], device=kv_lens.device)
            stop = starts[1:].contiguous()
            sequence = torch.searchsorted(stop, token, right=True).clamp(max=len(stop) - 1)
            position = kv_lens[sequence] - (stop[sequence] - token)
            old = kv_lens - (stop - starts[:-1])
            count = newest - 1 + self.most_decoded if decodes else newest - 1
            index = (kv_lens if decodes else old)[:, None] + torch.arange(-count, 0, device=kv_lens.device)
            until = torch.minimum(position - newest + 1, old[sequence]).clamp(min=0)
            if block_table is None:
                codes = torch.zeros_like(old)
                index = torch.where(index >= old[:, None], index, -1)
            else:
                codes = torch.where(block_table[first:end, 0] > 0, held, 0)  # page 0 is empty
                index = torch.where(index >= codes[:, None], index, -1)
                sink = torch.arange(held, device=kv_lens.device).expand(len(kv_lens), -1)
                there = (sink < codes[:, None]) & (sink < (kv_lens if decodes else old)[:, None])
                index = torch.cat([torch.where(there, sink, -1), index], -1)
            known = SlotBounds(index.int(), codes.int(), until.int())
            self._bounds[first, end, newest] = known
        return known

    def alone(self, first: int, end: int) -> bool:
        """Tell whether nothing lies before the new tokens of these requests."""
        return all(
            self.lengths[request] == self.starts[request + 1] - self.starts[request] for request in range(first, end)
        )


class ExactPages(NamedTuple):
    """Pages of exact tokens, [num_pages, page_size, bytes], and where those of each request of a step are.

    block_table: [requests, pages of a sequence]; entries of tokens before the newest are not read.
    """

    pages: Tensor
    block_table: Tensor


@dataclass
class PagedLayer:
    """A layer's rows in pages [num_pages, page_size, bytes], uint8, and attention over them.

    shard: this rank's part of the layer. dtype: the model's. A row may end with padding bytes.
    parameters: of the rank's KV heads, with what maps keys of whole groups into latents; where tokens are kept exactly,
        values too.
    rotation: RoPE's cos and sin by position, where keys are stored in blocks. window: a query attends to itself and the
        window - 1 keys before it.
    kernels: how the layer is launched; None: plain PyTorch serves it. varlen: the engine's attention for prompts; None:
        PyTorch's.
    """

    shard: Shard
    dtype: torch.dtype
    parameters: AttentionParameters
    rotation: Rotation | None
    window: int | None
    kernels: LayerKernels | None
    varlen: Varlen | None = None

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
        p = self.parameters
        if p.key_basis is not None:
            key = key.unflatten(-1, (-1, shard.shape.head_dim))
        if p.value_basis is not None:
            value = value.unflatten(-1, (-1, shard.shape.head_dim))
        if self.kernels is not None:
            from ..kernels.append import append  # imports Triton

            append(
                key[None], value[None], shard.key_layout, shard.key_shape, key_basis=p.key_basis, key_shift=p.key_shift,
                value_basis=p.value_basis, value_shift=p.value_shift, scale=p.scale, out=self.rows(pages),
                slots=slots,
            )  # fmt: skip
            return
        if p.value_basis is not None:
            whole = replace(p, layout=shard.key_layout, shape=shard.key_shape)
            latents = project_rows(key.transpose(0, 1)[None], value.transpose(0, 1)[None], whole)
            key, value = latents[0][0, 0], latents[1][0, 0]
        elif p.key_basis is not None:
            heads = key.transpose(0, 1)[None]
            key = project_keys(heads, p.key_basis, shard.key_layout, p.key_shift, value[None, None])[0, 0]
        # Asking which tokens are kept would wait for the device; the others go into page 0, which engines leave unused.
        slots, page_size = slots.clamp(min=0).long(), pages.shape[1]
        packed = pack_layer(key, layout, True, p.scale), pack_layer(value, layout, keys=False)
        for rows, new in zip(layout.stored_sides(*self.rows(pages)), packed, strict=False):
            rows[slots // page_size, slots % page_size] = new

    @property
    def exact_bytes(self) -> int:
        """Bytes of a token that is kept exactly, keys and values side by side."""
        return 2 * self.shard.shape.num_kv_heads * self.shard.shape.head_dim * self.dtype.itemsize

    def write_exactly(self, key: Tensor, value: Tensor, pages: Tensor, slots: Tensor) -> None:
        """Write new tokens into pages of exact tokens, [num_pages, page_size, at least exact_bytes].

        Args:
            key, value: [at least tokens, *], heads of whole groups side by side, keys after RoPE.
            slots: as of `write`.
        """
        sides = [self.shard.own_heads(side[: len(slots)]) for side in (key, value)]
        if self.kernels is not None:
            from ..kernels.exact_pages import store_exactly  # imports Triton

            store_exactly(*sides, pages[..., : self.exact_bytes].view(self.dtype), slots)
            return
        places, page_size = slots.clamp(min=0).long(), pages.shape[1]
        pages[places // page_size, places % page_size, : self.exact_bytes] = (
            torch.cat(sides, 1).flatten(1).view(torch.uint8)
        )

    def read_exactly(self, pages: Tensor, block_table: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Read exact keys and values of tokens, [..., num_kv_heads, head_dim] each.

        Args:
            block_table: [..., pages of a sequence]. index: [..., tokens], of tokens whose pages are there.
        """
        index, page_size = index.clamp(min=0).long(), pages.shape[1]
        at = block_table.gather(-1, index // page_size).long(), index % page_size
        key, value = (side[at] for side in self._exact_sides(pages))
        return key, value

    def _exact_sides(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Exact keys and values of all pages, [num_pages, page_size, num_kv_heads, head_dim], views."""
        shape = self.shard.shape
        numbers = pages[..., : self.exact_bytes].view(self.dtype)
        key, value = numbers.unflatten(-1, (2, shape.num_kv_heads, shape.head_dim)).unbind(-3)
        return key, value

    def attend_step(
        self,
        query: Tensor,
        pages: Tensor,
        step: StepRequests,
        output: Tensor,
        exact: ExactPages | None = None,
        new: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Attend for a step's tokens, into `output` [at least tokens, sum over query heads of value width], or in a
        layer with exact tokens of head_dim.

        Args:
            query: [at least tokens, *], rotated heads side by side, or absorbed ones.
            exact, new: in a layer with exact tokens, their pages (None where none are kept but the new ones), and the
                new tokens as of `write_exactly`.
        """
        shape, rows = self.shard.shape, self.rows(pages)
        if self.parameters.query_basis is not None:
            query = query.unflatten(-1, (shape.num_heads, shape.head_dim))
        if self.kernels is None:
            for request, (start, end) in enumerate(pairwise(step.starts)):
                if end > start:
                    table, kv_len = step.block_table[request], int(step.seq_lens[request])
                    if new is None:
                        output[start:end] = self.attend_sequence(query[start:end], rows, table, kv_len)
                    else:
                        kept = None if exact is None else ExactPages(exact.pages, exact.block_table[request])
                        key, value = self._own(new, slice(start, end))
                        output[start:end] = self.attend_exactly(query[start:end], key, value, rows, table, kv_len, kept)
            return
        from ..kernels.attention import attend_pages  # imports Triton

        runs = [(0, step.num_decodes)] if step.num_decodes else []
        for first, end in runs + within(step.lengths, step.num_decodes, self.most_keys):
            part = slice(step.starts[first], step.starts[end])
            around: dict[str, Any] = {}
            if new is not None:
                around["new"] = of_run = self._own(new, part)
                around["exact"] = self._slots(exact, of_run, step, first, end)
            attend_pages(
                query[part], *rows, self.parameters, self.kernels, **step.requests(first, end, self.window),
                rotation=self.rotation, window=self.window, varlen=self.varlen, out=output[part],
                now=step.now, **around,
            )  # fmt: skip

    def _own(self, new: tuple[Tensor, Tensor], part: slice) -> tuple[Tensor, Tensor]:
        """Some of the new tokens, this rank's heads, [tokens, num_kv_heads, head_dim]."""
        return self.shard.own_heads(new[0][part]), self.shard.own_heads(new[1][part])

    def _slots(
        self, exact: ExactPages | None, new: tuple[Tensor, Tensor], step: StepRequests, first: int, end: int
    ) -> ExactSlots | None:
        """Exact tokens that the kernels read before the new ones of prompts, or with those of requests that decode;
        None where nothing lies before.

        Args:
            new: keys and values of the new tokens, [tokens, num_kv_heads, head_dim].
        """
        tokens = self.parameters.layout.exact
        assert tokens is not None
        if end != step.num_decodes and step.alone(first, end):
            return None
        if exact is None:
            bounds = step.bounds(first, end, 1)
            last = step.query_start_loc[first + 1 : end + 1] - step.starts[first]
            count = bounds.places.shape[1]
            place = last[:, None] + torch.arange(-count, 0, device=last.device)
            key, value = (side[place.clamp(min=0)].transpose(1, 2) for side in new)
            return ExactSlots(key, value, *bounds)
        held = min(tokens.first, exact.pages.shape[1])
        bounds = step.bounds(first, end, tokens.within(self.window).newest, held, exact.block_table)
        if end == step.num_decodes:
            key, value = (side.transpose(1, 2) for side in self._exact_sides(exact.pages))
            return ExactSlots(key, value, *bounds, exact.block_table[first:end])
        sides = self.read_exactly(exact.pages, exact.block_table[first:end], bounds.places)
        return ExactSlots(sides[0].transpose(1, 2), sides[1].transpose(1, 2), *bounds)

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

    def attend_exactly(
        self,
        query: Tensor,
        new_key: Tensor,
        new_value: Tensor,
        rows: tuple[Tensor, Tensor],
        block_table: Tensor,
        kv_len: int,
        kept: ExactPages | None,
    ) -> Tensor:
        """The same in a layer with exact tokens: the first and the newest are read from pages of their own.

        Args:
            new_key, new_value: of these tokens, [seq_len, num_kv_heads, head_dim], keys after RoPE.
            kept: exact tokens before these, of this sequence; None: there are none.
        Returns:
            [seq_len, num_heads * head_dim] in query's dtype.
        """
        layout, seq_len = self.parameters.layout, len(query)
        assert layout.exact is not None
        window = kv_len if self.window is None else self.window
        newest, old = 1 if kept is None else min(layout.exact.newest, window), kv_len - seq_len
        position = torch.arange(old, kv_len, device=query.device)[:, None]
        first = 0 if kept is None else self._first_held(kept)
        start = max(0, old - newest + 1)
        index = torch.cat([torch.arange(*of, device=query.device) for of in ((min(first, start),), (start, kv_len))])
        held = ExactTokens(first, newest)
        near = (index >= old) | held.is_exact(position, index)
        seen = (index <= position) & (index > position - window) & near
        sides = new_key, new_value
        if kept is not None:
            before = self.read_exactly(*kept, index[:-seq_len])
            sides = torch.cat([before[0], new_key]), torch.cat([before[1], new_value])
        places = torch.arange(max(0, old - window + 1), old, device=query.device)
        coded = (places > position - window) & ~held.is_exact(position, places)
        of_rows = None
        if len(places):
            page_size = rows[0].shape[1]
            pages = block_table[places // page_size].long()
            key, value = (side[pages, places % page_size][None, None] for side in rows)
            rotation = None
            if self.rotation is not None:
                rotation = when_read(self.rotation, layout.form, places)
            of_rows = RowKeys(query.transpose(0, 1)[None], key, value, rotation, coded[None, None])
        exact = ExactKeys(*(side.transpose(0, 1)[None] for side in sides), seen[None, None])
        return attend_to_both(query.transpose(0, 1)[None], exact, of_rows, self.parameters)[0]

    def _first_held(self, kept: ExactPages) -> int:
        """Number of first tokens that the first page of a sequence holds exactly: none in page 0, which is empty."""
        exact = self.parameters.layout.exact
        assert exact is not None
        return min(exact.first, kept.pages.shape[1]) if int(kept.block_table[0]) else 0

    def decodes(self, tokens: int) -> bool:
        """Tell whether requests of so many new tokens decode without the host, so that a CUDA graph may hold them."""
        if self.kernels is None or self.kernels.materialise:
            return False
        from ..kernels.attention import MOST_ROWS  # imports Triton

        return tokens * self.parameters.heads_per_group <= MOST_ROWS

    def prepare(self, device: torch.device) -> None:
        """Put tables on the device, and allocate for a moment the memory in which prompts are expanded."""
        if self.kernels is None or device.type != "cuda":
            return
        from ..kernels.append import prepare  # imports Triton
        from ..kernels.stock import MOST_BYTES

        prepare(self.shard.key_layout, self.shard.key_shape, self.dtype, device)
        torch.empty(MOST_BYTES, dtype=torch.uint8, device=device)

    @property
    def widest(self) -> int:
        """Width of a head as prompts are expanded."""
        shape, groups = self.shard.shape, self.shard.layout.groups
        values = max(group.values.width for group in groups)
        return max(values, shape.head_dim if shape.rotary_dim else max(group.key.width for group in groups))

    @property
    def most_keys(self) -> int:
        """Keys of prompts that are expanded at once; a single longer prompt may exceed it."""
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
