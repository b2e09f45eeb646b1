"""One query position of each sequence over packed rows or rows of codes, in plain PyTorch on a CPU.

Sequence by sequence and a block of keys at a time, so that what is converted or rebuilt stays in a core's cache. A
block is read once: for its logits and, where keys and values share their latents, for its values. Keys before RoPE are
rebuilt in the dtype that the CPU multiplies fastest, and turned as complex numbers by a table that all layers share.
Keys that no head attends to at either end of a sequence (padding, the empty rest of a static cache, what lies before a
window) are not read.
Of keys that are stored turned within blocks none is rebuilt: queries are turned, once a block (`turned_queries`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rotor.format.columns import Columns
from rotor.format.layout import GroupClass

from .decode_latents import Latents, byte_order_of, in_dtype, wide
from .parameters import AttentionParameters
from .rebuilding import Rebuilding
from .turned_queries import TurnedQueries, begins_a_block

BLOCK_ELEMENTS = 1 << 19
"""Numbers of a block that are converted or rebuilt: a core's cache holds them, and an operation takes longer than its
call."""


def serves(query: Tensor, *others: Tensor | None) -> bool:
    """Whether `decode_class` runs on such tensors: on a CPU, outside of torch.compile and of gradients."""
    if torch.compiler.is_compiling() or query.device.type != "cpu":
        return False
    tensors = (query, *others)
    return not (torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors))


def decode_class(
    queries: Tensor,
    key: Tensor,
    value: Tensor,
    columns: tuple[Columns | None, Columns | None],
    parameters: AttentionParameters,
    cls: GroupClass,
    mask: Tensor | None,
    key_rotation: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Attention of one query position of each sequence, for the groups of a class.

    Args:
        queries: [batch_size, count, heads of a group, 1, width], in the model's dtype, of `parameters.queries`.
        key, value: [batch_size, kv_len, count, rank], or of codes [batch_size, kv_len, count, bytes], uint8.
        columns: of keys and values, of codes.
        mask: of the class: [batch_size or 1, heads of the class or 1, 1, kv_len or 1], bool (True: attend) or added to
            the logits; None for all keys.
        key_rotation: cos and sin [kv_len, rotary_dim], in domain `pre`.
    Returns:
        [batch_size, 1, count * heads of a group * v_rank], in the model's dtype.
    """
    queries, outputs = queries.squeeze(3), []
    if mask is not None:
        mask = mask[..., 0, :].unflatten(1, (1, 1) if mask.shape[1] == 1 else queries.shape[1:3])
    rebuilding: Rebuilding | TurnedQueries | None = None
    if parameters.layout.domain == "pre":
        assert key_rotation is not None
        of_keys = parameters.basis(cls), columns[0], queries.dtype, parameters.constant(cls), key_rotation
        rope_block = parameters.layout.rope_block
        if rope_block > 1 and begins_a_block(key_rotation, rope_block):
            rebuilding = TurnedQueries(*of_keys, rope_block)
        else:
            rebuilding = Rebuilding(*of_keys)
    scaled = queries.to(wide(queries.dtype)) * parameters.scaling
    if rebuilding is None and columns[0] is not None:
        order, factors = byte_order_of(columns[0], queries.dtype.itemsize)
        scaled = scaled[..., order] / factors
    for b, of_sequence in enumerate(scaled):
        keys, values = (Latents(rows[b], side, queries.dtype) for rows, side in zip((key, value), columns, strict=True))
        own = None if mask is None else mask[b if len(mask) > 1 else 0]
        attended = attend_one_position(
            of_sequence, keys, None if parameters.layout.joint else values, rebuilding, own, parameters.softcap
        )
        outputs.append(attended.to(queries.dtype).flatten())
    return torch.stack(outputs).unsqueeze(1)


def attend_one_position(
    queries: Tensor,
    keys: Latents,
    values: Latents | None,
    rebuilding: Rebuilding | TurnedQueries | None,
    mask: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """Attention of one query position of one sequence, for the groups of a class.

    Args:
        queries: [count, heads of a group, width], scaled, float32 or wider: rotated where keys are rebuilt, else
            projected, for what `Latents.block` gives.
        values: None where they are the latents of the keys.
        mask: [count or 1, heads of a group or 1, kv_len or 1], bool (True: attend) or added to the logits; None for all
            keys.
        rebuilding: of keys before RoPE, or in blocks.
    Returns:
        [count, heads of a group, v_rank], float32 or wider; zeros where nothing is attended.
    """
    count, heads = queries.shape[:2]
    step = 1 if rebuilding is None else rebuilding.step
    first, end = 0, keys.rows.shape[0]
    if mask is not None and mask.shape[-1] != 1:
        first, end = _attended(mask)
        first -= first % step
        if mask.dtype == torch.bool and bool(mask[..., first:end].all()):
            mask = None  # padding, or the rest of a static cache
    read = keys if values is None else values
    if first == end:
        return queries.new_zeros(count, heads, read.rank)
    per_key = count * max(keys.rank, read.rank)
    if rebuilding is not None:
        per_key, queries = max(per_key, rebuilding.rows), rebuilding.queries(queries)
    attended = []
    for start, until in _blocks(first, end, per_key, step):
        latents = keys.block(start, until)
        if rebuilding is None:
            logits = torch.bmm(queries, in_dtype(latents, queries.dtype, "factor").mT)
        else:
            logits = rebuilding.logits(queries, latents, start)
        if softcap is not None:
            logits = logits.div_(softcap).tanh_().mul_(softcap)
        if mask is not None:
            part = mask if mask.shape[-1] == 1 else mask[..., start:until]
            logits = logits.masked_fill_(~part, -torch.inf) if part.dtype == torch.bool else logits + part
        weights = torch.softmax(logits, dim=-1)
        if mask is not None:
            weights.nan_to_num_()  # a query that may attend to nothing
        numbers = latents if values is None else values.block(start, until)
        output = torch.bmm(weights, in_dtype(numbers, weights.dtype, "factor"))
        attended.append((output, logits.amax(-1), weights.amax(-1)))
    return read.of_columns(_joined(*map(torch.stack, zip(*attended, strict=True))))


def _joined(outputs: Tensor, logits: Tensor, weights: Tensor) -> Tensor:
    """Attention over all keys from that over each block of them.

    The largest weight of a block is one over the sum of the exponentials of its logits less the largest: what the block
    is worth, without the rounding of a logarithm.

    Args:
        outputs: [blocks, ..., v_rank]. logits, weights: the largest of each block, [blocks, ...]; of keys that nothing
            attends to -inf and 0.
    """
    if len(outputs) == 1:
        return outputs[0]
    worth = (torch.exp(logits - logits.amax(0)) / weights).masked_fill_(weights == 0.0, 0.0)
    total = worth.sum(0)
    shares = worth / total.masked_fill_(total == 0.0, 1.0)
    return (outputs * shares.unsqueeze(-1)).sum(0)


def _attended(mask: Tensor) -> tuple[int, int]:
    """The first key that some head of the last dimension's sequence attends to, and the one behind the last."""
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    marks = seen.flatten(0, -2).any(0).to(torch.uint8)
    if not bool(marks.any()):
        return (0, 0) if mask.dtype == torch.bool else (0, len(marks))
    return int(marks.argmax()), len(marks) - int(marks.flip(0).argmax())


def _blocks(first: int, end: int, per_key: int, step: int) -> list[tuple[int, int]]:
    """The blocks of the keys first ... end - 1, per_key numbers a key: as few as there can be, of one size, which is a
    multiple of `step`.
    """
    count = -(-(end - first) // max(1, BLOCK_ELEMENTS // per_key))
    block = -(-(end - first) // (count * step)) * step
    return [(start, min(start + block, end)) for start in range(first, end, block)]
