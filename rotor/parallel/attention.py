"""Attention over a sequence that lies on several processes.

The tokens of a prompt are split; while a layer attends, every process gets all rows, which are small, or all tokens of
some heads (`heads`). All processes have later tokens, and each attends to the rows that it keeps; their results are
joined by log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..kernels.parameters import seq_len_of
from ..kernels.reference.attention import attention, join, partial_attention
from ..kernels.rotary import Rotation
from ..runtime.rope import rows_of
from ..runtime.steps import AttentionCall
from .cache import Rows
from .launch import token_runs
from .wire import Wire


def visible(
    queries: Tensor, keys: Tensor, attended: Tensor | None, window: int | None, causal: bool = True
) -> Tensor | None:
    """The mask of keys that each query sees.

    Args:
        queries, keys: indices in the whole sequence, [seq_len] and [kv_len].
        attended: whether each index holds a token rather than padding, [batch_size, length]; None: all do.
        window: of a layer with a sliding window.
        causal: False where no key comes after any of the queries.
    Returns:
        [batch_size or 1, 1, seq_len, kv_len], bool; None where all are visible.
    """
    if not causal and attended is None and window is None:
        return None
    distance = queries[:, None] - keys
    mask = distance >= 0
    if window is not None:
        mask &= distance < window
    return mask[None, None] if attended is None else mask & attended[:, None, None, keys]


def attend_by_rows(
    call: AttentionCall, wire: Wire, owned: list[Tensor], mask_of: Callable[[range], Tensor | None]
) -> Tensor:
    """Attention of a whole prompt whose tokens are split: rows go to all processes, queries stay where they are.

    Args:
        call: queries and rows of this process's tokens; rotations in blocks of all tokens.
        owned: indices of each process's tokens.
        mask_of: gives the mask of a run of tokens over all tokens up to its last, see `visible`.
    Returns:
        [batch_size, own tokens, sum over query heads of value width], groups in the order of the layout.
    """
    query, key, value, key_rotation = call.query, call.key, call.value, call.rotations.read
    order = torch.argsort(torch.cat(owned))
    shapes = [[(key.shape[0], 1, len(indices), rows.shape[-1]) for rows in (key, value)] for indices in owned]
    gathered = wire.gather(f"rows of layer {call.layer_idx}", "rows", [key, value], shapes)
    keys, values = (torch.cat(parts, dim=2)[:, :, order] for parts in zip(*gathered, strict=True))
    dim = 1 if query.dim() == 3 else 2
    outputs, begin = [], 0
    for run in token_runs(len(order), wire.count)[wire.rank]:
        rotation = None if key_rotation is None else rows_of(key_rotation, slice(run.stop))
        queries, rows = query.narrow(dim, begin, len(run)), (keys[:, :, : run.stop], values[:, :, : run.stop])
        outputs.append(attention(queries, *rows, call.parameters, rotation, mask_of(run)))
        begin += len(run)
    return torch.cat(outputs, dim=1)


def attend_to_sharded_rows(
    call: AttentionCall, rows: Rows, key_rotation: Rotation | None, wire: Wire, mask: Tensor | None
) -> Tensor:
    """Attention of tokens that all processes have over rows that are split among them.

    Args:
        call: queries of the new tokens. rows: those that this process keeps.
        key_rotation: in blocks, of these rows. mask: over these rows; None: all are visible.
    Returns:
        [batch_size, new tokens, sum over query heads of value width], the same numbers in every process.
    """
    parameters, query, seq_len = call.parameters, call.query, seq_len_of(call.query)
    widths = [group.values.width for group in parameters.layout.groups for _ in range(parameters.heads_per_group)]
    batch_size, wide = query.shape[0], torch.promote_types(query.dtype, torch.float32)
    if len(rows.indices):
        output, log_sum = partial_attention(query, rows.key, rows.value, parameters, key_rotation, mask)
    else:
        output = query.new_zeros(batch_size, seq_len, sum(widths), dtype=wide)
        log_sum = query.new_full((batch_size, seq_len, len(widths)), -torch.inf, dtype=wide)
    both = torch.cat([output, log_sum], dim=-1)
    shapes = [[tuple(both.shape)]] * wire.count
    gathered = wire.gather(f"attention of layer {call.layer_idx}", "partial", [both], shapes)
    outputs, log_sums = zip(*(part.split([sum(widths), len(widths)], dim=-1) for (part,) in gathered), strict=True)
    return join(list(outputs), list(log_sums), widths)[0].to(query.dtype)
