"""Attention over the packed rows of a layer by the Triton kernels, for what transformers passes to a layer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from rotor.format.kernel_config import LayerKernels, Schedule

from .decode.launch import decode_attention
from .defaults import SCHEDULE
from .key_ranges import DecodeKeys, PrefillKeys
from .layer_table import layer_parts
from .parameters import AttentionParameters, seq_len_of
from .prefill.launch import prefill_attention
from .workspace import Workspace, workspace_on

_ranges: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Mask -> its ranges: all layers of a step share one mask."""


@dataclass
class _Known:
    """Ranges of a mask, and what they hold for.

    shape: batch_size, seq_len, kv_len. version: of the mask; None where it has none to know a change by.
    capturing: whether they were computed into a CUDA graph. layer: the last one that asked.
    """

    shape: tuple[int, int, int]
    version: int | None
    capturing: bool
    layer: int | None
    ranges: DecodeKeys | PrefillKeys

    def serves(self, shape: tuple[int, int, int], version: int | None, capturing: bool, layer: int | None) -> bool:
        """Whether for another call. Without a version, or in a graph whose replays see other masks, only for a later
        layer than the last: a step goes through them in their order, and the mask stays as it is.
        """
        if (shape, version, capturing) != (self.shape, self.version, self.capturing):
            return False
        if version is not None and not capturing:
            return True
        return layer is not None and self.layer is not None and layer > self.layer


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parameters: AttentionParameters,
    head_dim: int,
    key_rotation: tuple[Tensor, Tensor] | None = None,
    attention_mask: Tensor | None = None,
    schedule: Schedule = SCHEDULE,
    kernels: LayerKernels | None = None,
    layer_idx: int | None = None,
) -> Tensor:
    """As `reference.grouped_attention` and `code_reference.coded_attention`; queries of domain `post` come projected.

    Args:
        query: domain `pre`: [batch_size, num_heads, seq_len, head_dim], rotated; else [batch_size, seq_len, sum over
            query heads of qk_rank].
        key, value: [batch_size, 1, kv_len, qk_width] and [batch_size, 1, kv_len, v_width], or rows of codes
            [batch_size, 1, kv_len, bytes], uint8.
        key_rotation: cos and sin, each [kv_len, rotary_dim], in domain `pre`.
        attention_mask: [batch_size or 1, 1, seq_len or 1, kv_len or 1], bool; None is causal.
        schedule: of decoding. kernels: the launches of the layer; by default by rule.
        layer_idx: of the layer: what its step computes of the mask serves those after it.
    Returns:
        [batch_size, seq_len, sum over query heads of v_rank].
    """
    shape = key.shape[0], seq_len_of(query), key.shape[2]
    if attention_mask is None:
        keys = _known_without_mask(shape, key.device)
    else:
        keys = _known_of_mask(attention_mask, shape, layer_idx)
    workspace = workspace_on(key.device)
    return attend(query, key, value, parameters, head_dim, keys, key_rotation, schedule, kernels, workspace)


def packed_partial_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parameters: AttentionParameters,
    head_dim: int,
    attention_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `code_reference.partial_attention`: attention to some of the keys, to be joined with that to the others.

    Args:
        As in `packed_attention`, in domains `post` and `none`.
    Returns:
        [batch_size, seq_len, sum over query heads of v_rank] in query's dtype, and the natural log-sum-exp of each
        query head's logits, [batch_size, seq_len, num_heads], float32.
    """
    keys = ranges_of(attention_mask, (key.shape[0], seq_len_of(query), key.shape[2]), key.device)
    output, log_sums = _launched(query, key, value, parameters, head_dim, keys, None, SCHEDULE, None)
    return output, log_sums.unsqueeze(1) if isinstance(keys, DecodeKeys) else log_sums.transpose(1, 2)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parameters: AttentionParameters,
    head_dim: int,
    keys: DecodeKeys | PrefillKeys,
    key_rotation: tuple[Tensor, Tensor] | None = None,
    schedule: Schedule = SCHEDULE,
    kernels: LayerKernels | None = None,
    workspace: Workspace | None = None,
) -> Tensor:
    """As `packed_attention`, with the ranges of keys that queries attend to: DecodeKeys where there is one query.

    workspace: memory of partial results, of a decoding step or of few queries; by default it is allocated.
    """
    return _launched(query, key, value, parameters, head_dim, keys, key_rotation, schedule, kernels, workspace)[0]


def _launched(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parameters: AttentionParameters,
    head_dim: int,
    keys: DecodeKeys | PrefillKeys,
    key_rotation: tuple[Tensor, Tensor] | None,
    schedule: Schedule,
    kernels: LayerKernels | None,
    workspace: Workspace | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs [batch_size, seq_len, .], and what the launches give as log-sum-exp."""
    layout, value = parameters.layout, parameters.value_rows(key, value)
    pre = layout.domain == "pre"
    common: dict[str, Any] = {"softcap": parameters.softcap}
    if pre:
        common |= {
            "query_basis": parameters.query_basis,
            "key_rotation": key_rotation,
            "constant_key": parameters.constant_key,
        }
    if isinstance(keys, DecodeKeys):
        output, log_sums = decode_attention(
            query,
            key,
            value,
            layer_parts(layout, parameters.heads_per_kv, head_dim, kernels, query.element_size()),
            keys,
            parameters.heads_per_kv,
            parameters.scaling,
            schedule=schedule,
            workspace=workspace,
            **common,
        )
        return output.unsqueeze(1), log_sums
    return prefill_attention(
        query,
        key[:, 0],
        value[:, 0],
        layout,
        keys,
        parameters.heads_per_kv,
        parameters.scaling,
        kernels=kernels,
        workspace=workspace,
        **common,
    )


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _known_of_mask(mask: Tensor, shape: tuple[int, int, int], layer: int | None) -> DecodeKeys | PrefillKeys:
    """The ranges of a mask, computed once a step; in a CUDA graph as part of it.

    Args:
        mask: broadcastable to [batch_size, 1, seq_len, kv_len].
        shape: batch_size, seq_len, kv_len.
        layer: index of the layer that asks; None if it has none.
    """
    version = None if mask.is_inference() else mask._version
    capturing = _capturing(mask.device)
    known = _ranges.get(mask)
    if known is None or not known.serves(shape, version, capturing, layer):
        known = _ranges[mask] = _Known(shape, version, capturing, layer, ranges_of(mask, shape, mask.device))
    known.layer = layer
    return known.ranges


def ranges_of(mask: Tensor | None, shape: tuple[int, int, int], device: torch.device) -> DecodeKeys | PrefillKeys:
    """The keys that queries attend to, by a mask or, without one, causally; nothing is remembered.

    Args:
        mask: broadcastable to [batch_size, 1, seq_len, kv_len], bool.
        shape: batch_size, seq_len, kv_len.
    """
    batch_size, seq_len, kv_len = shape
    if mask is not None:
        rows = mask[:, 0].expand(shape)
        return DecodeKeys.from_mask(rows[:, 0]) if seq_len == 1 else PrefillKeys.from_mask(rows)
    if seq_len == 1:
        return DecodeKeys.all_of(batch_size, kv_len, device)
    # Nothing lies before the new keys then: a static cache holds only its empty rest behind them.
    lengths = torch.full((batch_size,), seq_len, device=device)
    return PrefillKeys.causal(lengths, torch.zeros_like(lengths), lengths, seq_len)


def _known_without_mask(shape: tuple[int, int, int], device: torch.device) -> DecodeKeys | PrefillKeys:
    """Of what does not depend on kv_len, one for all; in a CUDA graph as part of it."""
    if _capturing(device):
        return ranges_of(None, shape, device)
    batch_size, seq_len, kv_len = shape
    return _ranges_cached(None, (batch_size, seq_len, kv_len if seq_len == 1 else 0), device)


_ranges_cached = lru_cache(maxsize=16)(ranges_of)
