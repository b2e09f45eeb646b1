"""Sums over queries of the attention weights that each key of a compressed layer draws, without a matrix of them all.

On a GPU a kernel adds up columns, given the log-sum-exp of each row; elsewhere PyTorch does a block of queries at a
time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..dispatch import kernels_wanted
from ..parameters import AttentionParameters, class_rotation, masked, pressed, seq_len_of
from ..reference import rotate
from ..rows import key_columns, unpack_layer

BLOCK_ELEMENTS_CPU = 1 << 20
BLOCK_ELEMENTS_GPU = 1 << 26
"""Logits of a block of queries."""


@dataclass(frozen=True)
class Softening:
    """What is done to logits before the softmax whose columns are summed: (logit + bias) / temperature.

    bias: of each key, [batch_size, 1 or groups, kv_len], groups in the order of the layout.
    """

    bias: Tensor | None = None
    temperature: float = 1.0

    @property
    def none(self) -> bool:
        """Whether the weights are those of attention itself."""
        return self.bias is None and self.temperature == 1.0


@dataclass(frozen=True)
class ClassProducts:
    """One class of groups, as products of queries and keys see it.

    queries: [batch_size, n, heads, seq_len, width]. keys: [batch_size, n, kv_len, width]. n are the groups; in domain
    `pre`, whose keys are rebuilt, all KV heads of the groups. bias: [batch_size, n, kv_len]. mask: broadcastable to
    [batch_size, n, heads, seq_len, kv_len], bool or added. log_sums: [batch_size, n, heads, seq_len].
    """

    queries: Tensor
    keys: Tensor
    scaling: float
    softcap: float | None
    temperature: float
    bias: Tensor | None
    mask: Tensor | None
    causal: bool
    log_sums: Tensor | None


def column_sums(
    query: Tensor,
    key: Tensor,
    parameters: AttentionParameters,
    key_rotation: tuple[Tensor, Tensor] | None = None,
    attention_mask: Tensor | None = None,
    log_sums: Tensor | None = None,
    softening: Softening | None = None,
    counted: Tensor | None = None,
) -> Tensor:
    """Of each key, the sum over queries of the weights that it draws, the mean over the query heads of its group.

    Args:
        query, key and the rest: as `reference.grouped_attention` or `code_reference.coded_attention` takes them. Rows
            of codes give the weights exactly: what their means add to the logits of a query after RoPE is the same for
            all its keys.
        log_sums: the log-sum-exp of each query head's logits, [batch_size, seq_len, num_heads], groups in the order of
            the layout, as attention itself found it; None: it is found anew, as it is wherever logits are softened.
        counted: [batch_size, seq_len] bool; queries that are not (padding) add nothing.
    Returns:
        [batch_size, groups, kv_len], float32 or wider, groups in the order of the layout.
    Source: H2O (arXiv 2306.14048), algorithm 1.
    """
    softening = softening or Softening()
    if not softening.none:
        log_sums = None
    dtype = torch.promote_types(query.dtype, torch.float32)
    if parameters.layout.coded:
        key = unpack_layer(key, key_columns(parameters.layout), query.dtype)
    seq_len, found = seq_len_of(query), []
    if counted is None:
        counted = torch.ones(query.shape[0], seq_len, dtype=torch.bool, device=query.device)
    additive = attention_mask is not None and attention_mask.dtype != torch.bool
    if kernels_wanted(query.device) and seq_len > 1 and not additive and dtype == torch.float32:
        from .kernel import sums_of_columns as sums
    else:
        sums = sums_in_blocks
    for cls in parameters.layout.classes():
        queries = parameters.queries(query, cls)
        columns = slice(cls.qk_offset, cls.qk_offset + cls.count * cls.qk_rank)
        keys = key[:, 0, :, columns].unflatten(-1, (cls.count, cls.qk_rank)).transpose(1, 2)
        heads, groups = parameters.heads(cls), slice(cls.start, cls.start + cls.count)
        size = 1
        if parameters.layout.domain == "pre":
            assert key_rotation is not None
            size = parameters.layout.group_size
            keys = keys.unsqueeze(2) @ parameters.basis(cls).to(keys.dtype).mT
            if (constant := parameters.constant(cls)) is not None:
                keys = keys + constant.unsqueeze(2)
            keys = rotate(keys, *class_rotation(key_rotation, cls)).to(query.dtype).flatten(1, 2)
            queries = queries.unflatten(2, (size, -1)).flatten(1, 2)
        bias, mask, own = softening.bias, parameters.mask(attention_mask, heads), None
        if bias is not None:
            bias = bias[:, groups] if bias.shape[1] > 1 else bias.expand(-1, cls.count, -1)
            bias = bias.repeat_interleave(size, dim=1)
        if mask is not None:
            mask = mask.unflatten(1, (1, 1) if mask.shape[1] == 1 else queries.shape[1:3])
        if log_sums is not None:
            own = log_sums[..., heads].transpose(1, 2).unflatten(1, queries.shape[1:3])
        products = ClassProducts(
            queries, keys, parameters.scaling, parameters.softcap, softening.temperature, bias, mask,
            mask is None and seq_len > 1, own,
        )  # fmt: skip
        each = sums(products, counted) / queries.shape[2]
        found.append(each.unflatten(1, (-1, size)).mean(2))
    return torch.cat(found, dim=1)


def sums_in_blocks(products: ClassProducts, counted: Tensor) -> Tensor:
    """The sums over queries and heads, [batch_size, n, kv_len], a block of queries at a time."""
    queries, keys = products.queries, products.keys
    dtype = torch.promote_types(queries.dtype, torch.float32)
    batch_size, n, heads, seq_len, _ = queries.shape
    kv_len = keys.shape[2]
    wide = keys.to(dtype).mT.unsqueeze(2)
    total = torch.zeros(batch_size, n, kv_len, dtype=dtype, device=queries.device)
    budget = BLOCK_ELEMENTS_CPU if queries.device.type == "cpu" else BLOCK_ELEMENTS_GPU
    block = max(1, budget // (batch_size * n * heads * kv_len))
    places = torch.arange(kv_len, device=queries.device)
    for start in range(0, seq_len, block):
        rows = slice(start, min(start + block, seq_len))
        end = rows.stop if products.causal else kv_len  # keys behind the block's last query see nothing of it
        logits = pressed(queries[..., rows, :].to(dtype) @ wide[..., :end], products.scaling, products.softcap)
        mask = products.mask
        if products.causal:
            mask = places[:end] <= places[rows, None]
        elif mask is not None:
            mask = mask[..., rows if mask.shape[-2] > 1 else slice(None), :]
        logits = masked(logits, mask)
        if products.bias is not None:
            logits = logits + products.bias[:, :, None, None, :end]
        logits = logits / products.temperature
        if products.log_sums is None:
            weights = logits.softmax(-1).nan_to_num()
        else:
            sums = products.log_sums[..., rows, None]
            weights = (logits - sums).exp().masked_fill(sums == -torch.inf, 0.0)
        total[..., :end] += (weights * counted[:, None, None, rows, None]).sum((2, 3))
    return total
