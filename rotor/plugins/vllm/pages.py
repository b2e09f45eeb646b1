"""Rows of a layer in pages of bytes, a token's keys and values side by side: written, and attended to.

Plain tensors, nothing of vLLM. By the Triton kernels where they serve the layer, else in plain PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...format.kernel_config import LayerKernels
from ...format.layout import AttentionShape, LayerLayout
from ...kernels.paged_reference import paged_attention
from ...kernels.parameters import AttentionParameters
from ...kernels.reference import project_keys
from ...kernels.rotary import Rotation
from ...kernels.rows import pack_layer


@dataclass(frozen=True)
class LayerPages:
    """How the pages of a layer [num_pages, page_size, bytes], uint8, are read and written.

    layout: of what this process keeps. dtype: the model's. Behind keys and values a row may have bytes of no meaning.
    """

    layout: LayerLayout
    dtype: torch.dtype

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of keys and of values."""
        return self.layout.row_bytes(self.dtype.itemsize)

    def rows(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Views of keys and of values, bytes of codes or numbers of the model's dtype; of joint latents twice the same."""
        key_bytes, value_bytes = self.sizes
        keys, values = pages[..., :key_bytes], pages[..., key_bytes : key_bytes + value_bytes]
        if not self.layout.coded:
            keys, values = keys.view(self.dtype), values.view(self.dtype)
        return keys, keys if self.layout.joint else values

    def write(self, latents: Tensor, values: Tensor, pages: Tensor, slots: Tensor) -> None:
        """Put new rows into their slots, in plain PyTorch.

        Args:
            latents: of keys, [tokens, key_rank]. values: [tokens, value_rank]; not read of joint latents.
            slots: [tokens]: page times page_size plus the row in it. Nothing is kept of a token where it is negative:
                without asking the host it goes into page 0, which vLLM gives to nobody.
        """
        page_size = pages.shape[1]
        slots = slots.clamp(min=0).long()
        page, row = slots // page_size, slots % page_size
        of_keys, of_values = self.rows(pages)
        of_keys[page, row] = pack_layer(latents, self.layout, keys=True)
        if not self.layout.joint:
            of_values[page, row] = pack_layer(values, self.layout, keys=False)


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
    _prompts: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)

    @property
    def num_requests(self) -> int:
        return len(self.starts) - 1

    def prompts(self, first: int, end: int) -> dict[str, Any]:
        """Some prompts as `attend_pages` takes them, made once a step; copies, as kernels are compiled for tensors that
        begin where memory does.
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


class KeyProjection(NamedTuple):
    """What lies between stored keys and their latents, where the basis is not folded.

    layout, shape: with all KV heads of the groups, since a latent is a sum over them.
    """

    layout: LayerLayout
    shape: AttentionShape
    basis: Tensor | None
    shift: Tensor | None


@dataclass
class PagedLayer:
    """A layer's attention over its pages.

    rotation: RoPE's cos and sin by position, where keys are stored in blocks. window: a query attends to itself and the
    window - 1 keys before it. kernels: the launches of the layer; None: plain PyTorch serves it. varlen: the engine's own
    attention, of prompts; None: PyTorch's.
    """

    pages: LayerPages
    parameters: AttentionParameters
    projection: KeyProjection
    rotation: Rotation | None
    window: int | None
    kernels: LayerKernels | None
    varlen: Any = None

    @property
    def widest(self) -> int:
        """Numbers of a head of what prompts are materialised to."""
        shape, groups = self.parameters.shape, self.pages.layout.groups
        own = max(max(group.values.width, 0 if shape.rotary_dim else group.key.width) for group in groups)
        return max(own, shape.head_dim if shape.rotary_dim else 0)

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
        from ...kernels.attention import prepare  # imports Triton
        from ...kernels.stock import MOST_BYTES

        layout, shape = self.pages.layout, self.parameters.shape
        prepare(layout, shape, self.kernels, self.pages.dtype, device)
        torch.empty(MOST_BYTES, dtype=torch.uint8, device=device)

    def write(self, key: Tensor, value: Tensor, pages: Tensor, slots: Tensor) -> None:
        """New tokens into their slots; see LayerPages.write.

        Args:
            key: [at least tokens, *], keys as they are stored, or latents where the basis is folded. value: latents of
                values, or their part of joint ones, or nothing.
        """
        tokens = slots.shape[0]
        key, value, projection = key[:tokens], value[:tokens], self.projection
        of_values = value if value.shape[-1] else None
        if self.kernels is not None:
            from ...kernels.append import append  # imports Triton

            bases = {"key_basis": projection.basis, "key_shift": projection.shift}
            if projection.basis is not None:
                key = key.unflatten(-1, (-1, projection.shape.head_dim))
            of_values = None if of_values is None else of_values[None]
            out = self.pages.rows(pages)
            append(key[None], of_values, projection.layout, projection.shape, out=out, slots=slots, **bases)
            return
        if projection.basis is not None:
            heads = key.unflatten(-1, (-1, projection.shape.head_dim)).transpose(0, 1)[None]
            joint = of_values[None, None] if self.pages.layout.joint and of_values is not None else None
            key = project_keys(heads, projection.basis, projection.layout, projection.shift, joint)[0, 0]
        self.pages.write(key, value, pages, slots)

    def attend(self, query: Tensor, pages: Tensor, step: Step, output: Tensor) -> None:
        """Attention of a step's tokens into `output`, [at least tokens, sum over query heads of value width].

        Args:
            query: [at least tokens, *], rotated heads side by side, or absorbed ones.
        """
        shape = self.parameters.shape
        if shape.rotary_dim:
            query = query.unflatten(-1, (shape.num_heads, shape.head_dim))
        serve = self._in_pytorch if self.kernels is None else self._by_kernels
        serve(query, self.pages.rows(pages), step, output)

    def _by_kernels(self, query: Tensor, rows: tuple[Tensor, Tensor], step: Step, output: Tensor) -> None:
        from ...kernels.attention import attend_pages  # imports Triton

        assert self.kernels is not None
        decodes, starts = step.num_decodes, step.starts
        common: dict[str, Any] = {"rotation": self.rotation, "window": self.window}
        if decodes:
            tokens = starts[decodes]
            attend_pages(
                query[:tokens],
                *rows,
                self.parameters,
                self.kernels,
                block_table=step.block_table[:decodes],
                query_start_loc=step.query_start_loc[: decodes + 1],
                kv_lens=step.seq_lens[:decodes],
                max_query_len=step.most_decoded,
                max_kv_len=step.most_keys,
                total_kv_len=sum(step.lengths[:decodes]),
                out=output[:tokens],
                **common,
            )
        for first, end in within(step.lengths, decodes, self.most_keys):
            own, options = slice(starts[first], starts[end]), step.prompts(first, end) | common
            out, varlen = output[own], self.varlen
            attend_pages(query[own], *rows, self.parameters, self.kernels, out=out, varlen=varlen, **options)

    @property
    def most_keys(self) -> int:
        """Keys of prompts that are in memory at once, of all heads, beside one that has more by itself."""
        from ...kernels.stock import MOST_BYTES  # imports Triton

        heads = max(cls.count for cls in self.pages.layout.classes()) * self.pages.layout.group_size
        return MOST_BYTES // (2 * heads * self.widest * self.pages.dtype.itemsize)

    def _in_pytorch(self, query: Tensor, rows: tuple[Tensor, Tensor], step: Step, output: Tensor) -> None:
        """Requests of one token and of similar lengths at once, others one by one."""
        starts = step.starts
        singles = [i for i in range(step.num_requests) if starts[i + 1] - starts[i] == 1]
        for own in alike(singles, step.lengths):
            tokens = torch.tensor([starts[i] for i in own], device=query.device)
            output[tokens] = self._paged(query[tokens].unsqueeze(1), rows, step, own)[:, 0]
        for i in range(step.num_requests):
            if starts[i + 1] - starts[i] > 1:
                tokens = slice(starts[i], starts[i + 1])
                output[tokens] = self._paged(query[None, tokens], rows, step, [i])[0]

    def _paged(self, query: Tensor, rows: tuple[Tensor, Tensor], step: Step, own: list[int]) -> Tensor:
        return paged_attention(
            query.transpose(1, 2) if query.dim() == 4 else query,
            *rows,
            self.parameters,
            step.block_table[own],
            step.seq_lens[own],
            max(step.lengths[i] for i in own),
            rotation=self.rotation,
            window=self.window,
        )


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


def alike(requests: list[int], lengths: list[int]) -> list[list[int]]:
    """Requests in groups, so that the longest of each is at most twice the shortest (or one block)."""
    groups: list[list[int]] = []
    shortest = 0
    for index in sorted(requests, key=lambda i: lengths[i]):
        if not groups or lengths[index] > max(2 * shortest, 64):
            groups.append([])
            shortest = lengths[index]
        groups[-1].append(index)
    return groups
