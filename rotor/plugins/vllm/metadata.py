"""What a step of vLLM's has for attention, made once: decoding requests first, then prompts, in the kernels' terms."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadata, AttentionMetadataBuilder
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from ...kernels.key_ranges import DecodeKeys, PrefillKeys


@dataclass
class RotorMetadata(AttentionMetadata):
    """A batch with its decoding requests (one token each) first, prompts behind them.

    starts, query_start_loc: tokens of the step before each request, and all, for the host and on the device.
    lengths: tokens of each sequence, as far as the host knows them (no less than there are), for those who are not to
        ask the device.
    """

    num_decodes: int
    num_actual_tokens: int
    starts: list[int]
    lengths: list[int]
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    _decode_keys: dict[int | None, DecodeKeys] = field(default_factory=dict)
    _prefill_keys: dict[int | None, PrefillKeys] = field(default_factory=dict)

    @cached_property
    def prompt_tables(self) -> Tensor:
        """Pages of the prompts; a copy, as kernels are compiled for tensors that begin where memory does."""
        return self.block_table[self.num_decodes :].clone()

    def decode_keys(self, window: int | None) -> DecodeKeys:
        """Of the decoding requests, for layers of a sliding window."""
        if window not in self._decode_keys:
            end = self.seq_lens[: self.num_decodes].int()
            first = torch.zeros_like(end) if window is None else (end - window).clamp(min=0)
            self._decode_keys[window] = DecodeKeys(first, end)
        return self._decode_keys[window]

    def prefill_keys(self, window: int | None) -> PrefillKeys:
        """Of the prompts, whose tokens lie behind each other in the step."""
        if window not in self._prefill_keys:
            starts = self.starts[self.num_decodes :]
            self._prefill_keys[window] = PrefillKeys.packed(
                self.query_start_loc[self.num_decodes :].clone(),
                self.seq_lens[self.num_decodes :],
                self.num_actual_tokens,
                max(end - start for start, end in pairwise(starts)),
                max(self.lengths[self.num_decodes :]),
                window,
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
                common.query_start_loc,
                common.seq_lens,
                common.block_table_tensor,
                common.slot_mapping,
            )
        return known


class ReferenceMetadataBuilder(RotorMetadataBuilder):
    """Where plain PyTorch attends, whose sizes are those of a batch: no graph is captured."""

    _cudagraph_support = AttentionCGSupport.NEVER
