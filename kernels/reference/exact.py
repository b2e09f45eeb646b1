"""Attention over keys of two kinds in plain PyTorch: rows of a layer, and keys and values that are kept exactly.

One softmax goes over both. Each kind is attended to by itself, and the two are joined by their log-sum-exp:

    heads = share * (output of rows @ output_basis^T + value_constant) + (1 - share) * output of exact keys

where share is the rows' part of the softmax's sum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..parameters import AttentionParameters, masked, scaled_and_capped
from ..rotary import Rotation
from .attention import BLOCK_ELEMENTS_CPU, BLOCK_ELEMENTS_GPU, partial_attention, project_heads, project_keys


class ExactKeys(NamedTuple):
    """Keys and values that queries attend to exactly, KV heads in the order of the layout.

    key, value: [batch_size, num_kv_heads, n, head_dim], keys rotated as the model does.
    mask: broadcastable to [batch_size, num_heads, seq_len, n], heads in the order of the uncompressed model; bool
        (True: attend) or added to the logits; None: every query sees all.
    """

    key: Tensor
    value: Tensor
    mask: Tensor | None = None


class RowKeys(NamedTuple):
    """Rows that queries attend to.

    query: [batch_size, num_heads, seq_len, head_dim], rotated as rows are read. key, value: see `reference.attention`.
    rotation: in blocks, by which stored keys are read. mask: as of ExactKeys, over all rows.
    keys: rows that some query sees lie within it, from a multiple of the block on; None: it is not known.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    rotation: Rotation | None = None
    mask: Tensor | None = None
    keys: range | None = None


def attend_to_both(query: Tensor, exact: ExactKeys, rows: RowKeys | None, parameters: AttentionParameters) -> Tensor:
    """Attention of all query heads over exact keys and rows, which are disjoint.

    Args:
        query: [batch_size, num_heads, seq_len, head_dim], rotated as the model does, KV heads in the order of the
            layout.
        rows: None where no query sees any.
    Returns:
        [batch_size, seq_len, num_heads * head_dim], dtype of query, KV heads in the order of the layout.
    """
    output, log_sum = exact_attention(query, exact, parameters)
    if rows is not None:
        latents, of_rows = partial_attention(
            rows.query, rows.key, rows.value, parameters, rows.rotation, rows.mask, rows.keys
        )
        output = join_rows(output, log_sum, latents, of_rows, parameters)
    return output.to(query.dtype)


def join_rows(
    exact: Tensor, log_sum: Tensor, latents: Tensor, of_rows: Tensor, parameters: AttentionParameters
) -> Tensor:
    """Join what `exact_attention` and `reference.partial_attention` give of the same queries: heads, as the former."""
    share = torch.sigmoid(of_rows - log_sum).nan_to_num().repeat_interleave(parameters.shape.head_dim, -1)
    return torch.lerp(exact, read_values(latents, parameters), share)


def exact_attention(query: Tensor, exact: ExactKeys, parameters: AttentionParameters) -> tuple[Tensor, Tensor]:
    """Attention over exact keys alone, with the log-sum-exp by which it is joined with that over rows.

    Sinks of the model, whose values are zeros, count among the exact keys.

    Returns:
        [batch_size, seq_len, num_heads * head_dim], zeros where a query sees none of the keys, and the log-sum-exp of
        each query head's logits, [batch_size, seq_len, num_heads], then -inf; float32 or wider.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    key, value, shape = exact.key.to(wide), exact.value.to(wide), parameters.shape
    queries = query.to(wide).unflatten(1, (shape.num_kv_heads, -1))
    mask = parameters.mask(exact.mask, slice(None))
    budget = BLOCK_ELEMENTS_CPU if query.device.type == "cpu" else BLOCK_ELEMENTS_GPU
    block = max(16, budget // max(1, key.shape[2] * shape.num_heads * len(query)))
    outputs, sums = [], []
    for start in range(0, query.shape[2], block):
        block_query = queries[..., start : start + block, :]
        logits = (block_query.flatten(2, 3) @ key.mT).unflatten(2, block_query.shape[2:4])
        logits = scaled_and_capped(logits, parameters.scaling, parameters.softcap)
        whole = mask is None or mask.shape[2] == 1
        logits = masked(logits, mask if whole else mask[:, :, start : start + block])  # type: ignore[index]
        largest = logits.amax(-1, keepdim=True)
        largest = largest.masked_fill(largest == -torch.inf, 0.0)
        weight = torch.exp(logits - largest)
        total = weight.sum(-1, keepdim=True)
        attended = (weight.flatten(2, 3) @ value).unflatten(2, block_query.shape[2:4])
        outputs.append(attended / total.masked_fill(total == 0.0, 1.0))
        sums.append(largest + total.log())
    output, log_sum = (torch.cat(parts, 3) if len(parts) > 1 else parts[0] for parts in (outputs, sums))
    if parameters.sinks is not None:
        sinks = parameters.sinks.to(wide).reshape(shape.num_kv_heads, -1, 1, 1)
        with_sinks = torch.logaddexp(log_sum, sinks.expand_as(log_sum))
        output, log_sum = output * torch.exp(log_sum - with_sinks), with_sinks
    return output.permute(0, 3, 1, 2, 4).flatten(2), log_sum.permute(0, 3, 1, 2, 4).flatten(2)


def read_values(latents: Tensor, parameters: AttentionParameters) -> Tensor:
    """The values of each head that attention over rows puts out, [batch_size, seq_len, num_heads * head_dim].

    Args:
        latents: [batch_size, seq_len, sum over query heads of value width], weights of each head summing to one.
    """
    layout, heads = parameters.layout, parameters.heads_per_group
    parts, column = [], 0
    for cls, basis in zip(layout.classes(), parameters.output_bases(), strict=True):
        size = heads * cls.count * cls.value.width
        class_latents = latents[..., column : column + size]
        class_latents = class_latents.unflatten(
            -1, (cls.count, layout.group_size, parameters.shape.heads_per_kv, cls.value.width)
        )
        parts.append(torch.einsum("bsngpw,ngdw->bsngpd", class_latents, basis.to(class_latents.dtype)).flatten(2, 3))
        column += size
    values = torch.cat(parts, 2) if len(parts) > 1 else parts[0]
    if parameters.value_constant is not None:
        values = values + parameters.value_constant.to(values.dtype).unsqueeze(1)
    return values.flatten(2)


def project_rows(key: Tensor, value: Tensor, parameters: AttentionParameters) -> tuple[Tensor, Tensor]:
    """Project keys, rotated as they are stored, and values into their latents.

    Args:
        key, value: [batch_size, num_kv_heads, seq_len, head_dim], KV heads in the order of the layout.
    Returns:
        [batch_size, 1, seq_len, key rank] and [batch_size, 1, seq_len, value rank]; values of joint latents are in the
        first, and the second is empty.
    """
    layout = parameters.layout
    assert parameters.key_basis is not None
    assert parameters.value_basis is not None
    if layout.joint:
        wide = parameters.key_shift is not None
        part = project_heads(value, parameters.value_basis, layout, keys=True, wide=wide)
        return project_keys(key, parameters.key_basis, layout, parameters.key_shift, part), part[..., :0]
    latents = project_heads(value, parameters.value_basis, layout, keys=False, shift=parameters.value_shift)
    return project_keys(key, parameters.key_basis, layout, parameters.key_shift), latents
