"""Attention over the rows of a layer by the kernels, for what transformers and serving engines pass to a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from rotor.format.kernel_config import LayerKernels

from .parameters import AttentionParameters
from .rotary import Rotation

MOST_ROWS = 64
"""Query rows of a group (its query heads times new tokens) that decoding serves; more are a prompt."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parameters: AttentionParameters,
    kernels: LayerKernels,
    *,
    rotation: Rotation | None = None,
    first: int = 0,
    attention_mask: Tensor | None = None,
    layer_idx: int | None = None,
) -> Tensor:
    """As `reference.attention`: decoding for up to 64 query rows of a group, else stock attention over what
    `materialise` makes of the rows.

    Args:
        query: [batch_size, num_heads, seq_len, head_dim], rotated, KV heads in the order of the layout; in a model
            without RoPE [batch_size, seq_len, sum over query heads of width].
        key, value: rows, [batch_size, 1, kv_len, bytes] uint8, or of numbers [batch_size, 1, kv_len, width].
        kernels: the launches of the layer (kernel_config.json, or `defaults.default_layer`).
        rotation: of layers in blocks: cos and sin by index, [at least first + kv_len, rotary_dim], float32; row 0 is at
            the beginning of a block. Not `rotary.when_read`: the kernels compose rotations themselves.
        first: places of the block that lie before the first row of the cache (a window let go of them).
        attention_mask: [batch_size or 1, 1, seq_len or 1, kv_len or 1], bool; None is causal: a prefill into an empty
            cache, or one token that attends to all keys.
        layer_idx: of the layer: what its step computes of the mask serves those after it.
    Returns:
        [batch_size, seq_len, sum over query heads of value width], dtype of query, groups in the order of the layout.
    """
    raise NotImplementedError


def partial_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parameters: AttentionParameters,
    kernels: LayerKernels,
    *,
    rotation: Rotation | None = None,
    first: int = 0,
    attention_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `reference.partial_attention`: attention to some of the keys, to be joined with that to the others.

    For up to MOST_ROWS query rows of a group; arguments as in `attend`.

    Returns:
        [batch_size, seq_len, sum over query heads of value width], and the natural log-sum-exp of each query head's
        logits, [batch_size, seq_len, num_heads], float32.
    """
    raise NotImplementedError


def attend_pages(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parameters: AttentionParameters,
    kernels: LayerKernels,
    *,
    block_table: Tensor,
    query_start_loc: Tensor,
    kv_lens: Tensor,
    max_query_len: int,
    max_kv_len: int,
    rotation: Rotation | None = None,
    window: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of packed queries over pages, which hold the new tokens' own rows already.

    Sequences whose group has at most MOST_ROWS query rows (by max_query_len) decode; else all of the call are prompts.
    An engine that mixes both calls once for each part.

    Args:
        query: [tokens, num_heads, head_dim], rotated, or of a model without RoPE [tokens, sum over heads of width].
        key, value: pages, [num_pages, page_size, bytes] uint8, or of numbers [num_pages, page_size, width].
        block_table: [batch_size, pages of a sequence], int32.
        query_start_loc: [batch_size + 1], int32. kv_lens: [batch_size], int32, the new tokens among them.
        max_query_len, max_kv_len: no less than the most of a sequence, known to the host; of a CUDA graph's decoding
            step what it was captured for.
        rotation: of layers in blocks: cos and sin by position, [positions, rotary_dim], float32.
        window: a query attends to itself and the window - 1 keys before it.
        out: [tokens, sum over query heads of value width] to write into.
    Returns:
        [tokens, sum over query heads of value width], dtype of query; tokens of no sequence hold anything.
    """
    raise NotImplementedError
