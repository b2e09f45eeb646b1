"""Attention over the rows of a layer, written for reading: in float64 what every fast path is tested against.

Nothing is batched, absorbed or joined: one loop over sequences, groups and heads, so that each line is the formula.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rotor.kernels.exact_slots import ExactSlots
from rotor.kernels.parameters import AttentionParameters, read_class
from rotor.kernels.rotary import Rotation, rotate, when_read


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parameters: AttentionParameters,
    allowed: Tensor,
    rotation: Rotation | None = None,
    first: int = 0,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Attention of all query heads of a layer, and its log-sum-exp.

    Args:
        query: [batch_size, num_heads, seq_len, head_dim], rotated; in a model without RoPE [batch_size, seq_len, sum
            over query heads of width].
        key, value: rows, [batch_size, kv_len, bytes] uint8, or of numbers [batch_size, kv_len, width].
        allowed: [batch_size, seq_len, kv_len], bool: what each query attends to.
        rotation: of layers in blocks, by index; row 0 is at the beginning of a block.
        first: places of the block before the first key.
        dtype: of all that is computed.
    Returns:
        [batch_size, seq_len, sum over query heads of value width], and [batch_size, seq_len, num_heads]. Queries that
        attend to nothing give zeros and minus infinity.
    """
    layout, shape = parameters.layout, parameters.shape
    heads, of_kv = parameters.heads_per_group, shape.heads_per_kv
    kv_len = key.shape[1]
    value = parameters.value_rows(key, value)
    outputs, sums = [], []
    for cls in layout.classes(8 if key.dtype == torch.float64 else key.element_size()):
        latents = read_class(key, cls.key, cls.key_byte, cls.key_stride, cls.count, dtype).to(dtype)
        values = read_class(value, cls.value, cls.value_byte, cls.value_stride, cls.count, dtype).to(dtype)
        for group in range(cls.count):
            for row in range(heads):
                of_group = query
                if query.dim() == 3:
                    start = heads * (cls.key_column + group * cls.key.width) + row * cls.key.width
                    of_group, keys = query[..., start : start + cls.key.width].to(dtype), latents[:, :, group]
                else:
                    of_group = query[:, (cls.start + group) * heads + row].to(dtype)
                    basis = parameters.basis(cls)[group, row // of_kv].to(dtype)
                    keys = latents[:, :, group] @ basis.T
                    constant = parameters.constant(cls)
                    if constant is not None:
                        keys = (keys + constant[group, row // of_kv].to(torch.promote_types(dtype, torch.float32))).to(
                            dtype
                        )
                    if layout.rope_block is not None:
                        assert rotation is not None
                        table = when_read((rotation[0].double(), rotation[1].double()), layout.form)
                        keys = rotate(keys, *(of[first : first + kv_len].to(dtype) for of in table))
                logits = of_group @ keys.mT * parameters.scaling
                if parameters.softcap is not None:
                    logits = parameters.softcap * torch.tanh(logits / parameters.softcap)
                logits = logits.masked_fill(~allowed, -torch.inf)
                outputs.append(torch.softmax(logits, -1).nan_to_num() @ values[:, :, group])
                sums.append(torch.logsumexp(logits, -1))
    return torch.cat(outputs, -1), torch.stack(sums, -1)


def with_exact(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parameters: AttentionParameters,
    allowed: Tensor,
    exact: ExactSlots,
    rotation: Rotation | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Attention of all query heads of a layer with exact tokens, [batch_size, seq_len, num_heads * head_dim].

    Each key that a query may attend to is read from its slot, or, if it is one that codes serve, from its row. Other
    arguments as in `attention`.
    """
    layout, shape = parameters.layout, parameters.shape
    assert parameters.output_basis is not None
    row = torch.arange(key.shape[1])
    coded = allowed & (row >= exact.first[:, None, None]) & (row < exact.until[:, :, None])
    latents, log_sums = attention(query, key, value, parameters, coded, rotation, dtype=dtype)
    widths = [group.values.width for group in layout.groups for _ in range(parameters.heads_per_group)]
    outputs = []
    for head, of_head in enumerate(latents.split(widths, -1)):
        kv_head = head // shape.heads_per_kv
        group, place = divmod(kv_head, layout.group_size)
        start = sum(other.values.width for other in layout.groups[:group])
        basis = parameters.output_basis[place * shape.head_dim : (place + 1) * shape.head_dim]
        of_codes = of_head @ basis[:, start : start + of_head.shape[-1]].to(dtype).T
        if parameters.value_constant is not None:
            of_codes = of_codes + parameters.value_constant[kv_head].to(dtype)
        logits = query[:, head].to(dtype) @ exact.key[:, kv_head].nan_to_num().to(dtype).mT * parameters.scaling
        if parameters.softcap is not None:
            logits = parameters.softcap * torch.tanh(logits / parameters.softcap)
        places = exact.index.long().clamp(min=0)[:, None].expand(-1, allowed.shape[1], -1)
        seen = (allowed & ~coded).gather(2, places) & (exact.index >= 0)[:, None]
        logits = logits.masked_fill(~seen, -torch.inf)
        log_sum = torch.logsumexp(logits, -1)
        of_exact = torch.softmax(logits, -1).nan_to_num() @ exact.value[:, kv_head].nan_to_num().to(dtype)
        share = torch.softmax(torch.stack([log_sums[..., head].to(dtype), log_sum], -1), -1).nan_to_num()
        outputs.append(share[..., :1] * of_codes + share[..., 1:] * of_exact)
    return torch.cat(outputs, -1)
