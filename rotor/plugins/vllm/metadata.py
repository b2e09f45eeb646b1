"""What a step of vLLM's has for attention, made once: decoding requests first, then prompts, in the kernels' terms."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadata, AttentionMetadataBuilder
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from ...kernels.key_ranges import DecodeKeys, PrefillKeys

CHUNK = 256
"""Tokens of a prompt that are one row of a batch: prompts of any lengths are padded by less than this."""


@dataclass(frozen=True)
class Chunks:
    """The prompts of a step in rows of at most CHUNK tokens, so that they are one batch of nearly equal lengths.

    tokens: [rows, length], where each is in the step (padding repeats one). request: [rows], its sequence.
    query_len, behind: [rows], tokens of the row, and those of its prompt that come behind it in this step.
    back: [tokens of prompts], where each is in the flattened rows.
    """

    tokens: Tensor
    request: Tensor
    query_len: Tensor
    behind: Tensor
    back: Tensor

    @classmethod
    def of(cls, starts: list[int], first_request: int, device: torch.device) -> Chunks:
        """From where each request's tokens begin in the step, and where the last one's end."""
        rows = []
        lengths = [end - start for start, end in pairwise(starts)]
        length = min(CHUNK, max(lengths))
        for index, (start, count) in enumerate(zip(starts[:-1], lengths, strict=True)):
            for begin in range(0, count, length):
                own = min(length, count - begin)
                rows.append((start + begin, first_request + index, own, count - begin - own))
        first, request, query_len, behind = torch.tensor(rows, device=device).unbind(1)
        place = torch.arange(length, device=device)
        tokens = first[:, None] + torch.minimum(place, query_len[:, None] - 1)
        back = torch.tensor(
            [row * length + i for row, (_, _, own, _) in enumerate(rows) for i in range(own)], device=device
        )
        return cls(tokens, request, query_len, behind, back)


@dataclass
class RotorMetadata(AttentionMetadata):
    """A batch with its decoding requests (one token each) first.

    query_start_loc: tokens of the step before each request. lengths: tokens of each sequence, as far as the host knows
        them (no less than there are), for those who are not to ask the device.
    """

    num_decodes: int
    num_actual_tokens: int
    query_start_loc: list[int]
    lengths: list[int]
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    _decode_keys: dict[int | None, DecodeKeys] = field(default_factory=dict)
    _prefill_keys: dict[int | None, PrefillKeys] = field(default_factory=dict)
    _chunks: Chunks | None = None
    _chunk_tables: Tensor | None = None

    def decode_keys(self, window: int | None) -> DecodeKeys:
        """Of the decoding requests, for layers of a sliding window."""
        if window not in self._decode_keys:
            end = self.seq_lens[: self.num_decodes].int()
            first = torch.zeros_like(end) if window is None else (end - window).clamp(min=0)
            self._decode_keys[window] = DecodeKeys(first, end)
        return self._decode_keys[window]

    @property
    def chunks(self) -> Chunks:
        if self._chunks is None:
            self._chunks = Chunks.of(
                self.query_start_loc[self.num_decodes :], self.num_decodes, self.block_table.device
            )
        return self._chunks

    @property
    def chunk_tables(self) -> Tensor:
        """The block table of each chunk's sequence."""
        if self._chunk_tables is None:
            self._chunk_tables = self.block_table[self.chunks.request]
        return self._chunk_tables

    def prefill_keys(self, window: int | None) -> PrefillKeys:
        """Of the chunks of prompts."""
        if window not in self._prefill_keys:
            chunks = self.chunks
            end = self.seq_lens[chunks.request] - chunks.behind
            start = torch.zeros_like(end)
            self._prefill_keys[window] = PrefillKeys.causal(
                chunks.query_len, start, end, chunks.tokens.shape[1], window
            )
        return self._prefill_keys[window]


class RotorMetadataBuilder(AttentionMetadataBuilder[RotorMetadata]):
    """Batches with the requests of one token first; graphs are captured of those that have no others."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    reorder_batch_threshold = 1

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> RotorMetadata:
        """Layers of other widths have builders of their own, but the same batch: made once a step and block table."""
        common: Any = common_attn_metadata
        known = getattr(common, "_rotor_metadata", None)
        if known is None or known.block_table is not common.block_table_tensor:  # a copy, of another group of layers
            host = getattr(common, "seq_lens_cpu_upper_bound", None)
            lengths = common.seq_lens if host is None else host
            known = common._rotor_metadata = RotorMetadata(
                split_decodes_and_prefills(common, decode_threshold=1)[0],
                common.num_actual_tokens,
                common.query_start_loc_cpu.tolist(),
                # A GPU is not asked; without the host's numbers the longest there may be stands for each.
                lengths.tolist() if lengths.device.type == "cpu" else [common.max_seq_len] * common.num_reqs,
                common.seq_lens,
                common.block_table_tensor,
                common.slot_mapping,
            )
        return known


class ReferenceMetadataBuilder(RotorMetadataBuilder):
    """Where plain PyTorch attends, whose sizes are those of a batch: no graph is captured."""

    _cudagraph_support = AttentionCGSupport.NEVER
