"""Rows of a layer in pages of bytes, a token's keys and values side by side: written, and attended to.

Plain tensors, nothing of vLLM. By the Triton kernels where they serve the layer, else in plain PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ...format.kernel_config import LayerKernels
from ...kernels.parameters import AttentionParameters
from ...kernels.reference import project_keys
from ...kernels.rotary import Rotation
from . import reference
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
    _decodes: dict[int | None, dict[str, Any]] = field(default_factory=dict)
    _prompts: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)

    def decodes(self, window: int | None) -> dict[str, Any]:
        """Requests that decode, as the kernels take them in layers of a window, made once a step: views, which a CUDA
        graph goes on reading.
        """
        if window not in self._decodes:
            from ...kernels.attention import ranges_of_pages  # imports Triton

            count, most = self.num_decodes, self.most_decoded
            starts, lengths = self.query_start_loc[: count + 1], self.seq_lens[:count]
            self._decodes[window] = {
                "block_table": self.block_table[:count],
                "query_start_loc": starts,
                "kv_lens": lengths,
                "max_query_len": most,
                "max_kv_len": self.most_keys,
                "total_kv_len": sum(self.lengths[:count]),
                "keys": ranges_of_pages(starts, lengths, self.starts[count], most, window),
            }
        return self._decodes[window]

    def prompts(self, first: int, end: int) -> dict[str, Any]:
        """Some prompts, likewise, made once a step; copies, as kernels are compiled for tensors that begin where memory
        does.
        """
        if (first, end) not in self._prompts:
            starts, lengths = self.starts[first : end + 1], self.lengths[first:end]
            self._prompts[first, end] = {
                "block_table": self.block_table[first:end].clone(),
                "query_start_loc": self.query_start_loc[first : end + 1] - starts[0],
                "kv_lens": self.seq_lens[first:end].clone(),
                "max_query_len": max(after - before for before, after in pairwise(starts)),
                "max_kv_len": max(lengths),
                "total_kv_len": sum(lengths),
            }
        return self._prompts[first, end]


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
        key, value, shard = key[: len(slots)], value[: len(slots)], self.shard
        if self.key_basis is not None:
            key = key.unflatten(-1, (-1, shard.shape.head_dim))
        if self.kernels is not None:
            from ...kernels.append import append  # imports Triton

            bases = {"key_basis": self.key_basis, "key_shift": self.key_shift}
            to = {"out": self.rows(pages), "slots": slots}
            append(key[None], value[None], shard.key_layout, shard.key_shape, **bases, **to)
            return
        if self.key_basis is not None:
            heads, of_values = key.transpose(0, 1)[None], value[None, None] if shard.layout.joint else None
            key = project_keys(heads, self.key_basis, shard.key_layout, self.key_shift, of_values)[0, 0]
        reference.write_rows(key, value, shard.layout, self.rows(pages), slots)

    def attend(self, query: Tensor, pages: Tensor, step: Step, output: Tensor) -> None:
        """Attention of a step's tokens into `output`, [at least tokens, sum over query heads of value width].

        Args:
            query: [at least tokens, *], rotated heads side by side, or absorbed ones.
        """
        shape, rows, parameters = self.shard.shape, self.rows(pages), self.parameters
        common: dict[str, Any] = {"rotation": self.rotation, "window": self.window}
        if shape.rotary_dim:
            query = query.unflatten(-1, (shape.num_heads, shape.head_dim))
        if self.kernels is None:
            host: dict[str, Any] = {"starts": step.starts, "lengths": step.lengths, "kv_lens": step.seq_lens}
            key, value = rows
            reference.attend_pages(
                query, key, value, parameters, block_table=step.block_table, out=output, **host, **common
            )
            return
        from ...kernels.attention import attend_pages  # imports Triton

        runs = [(0, step.num_decodes)] if step.num_decodes else []
        for first, end in runs + within(step.lengths, step.num_decodes, self.most_keys):
            own = slice(step.starts[first], step.starts[end])
            requests = step.decodes(self.window) if end == step.num_decodes else step.prompts(first, end)
            options = requests | common | {"varlen": self.varlen, "out": output[own]}
            attend_pages(query[own], *rows, parameters, self.kernels, **options)

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
