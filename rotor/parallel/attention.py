"""Attention over a sequence that lies on several processes, in its three forms.

A prompt: its tokens are spread, and instead of them groups of KV heads for the time of a layer's attention (Ulysses);
or every process gets all rows, where these weigh less. Later tokens: all processes have them, and each attends to the
rows that it keeps; what they find is joined by its log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ..format.channels import aligned
from ..format.layout import AttentionShape, LayerLayout
from ..kernels.logits import absorbed_queries
from ..kernels.parameters import AttentionParameters, seq_len_of
from ..kernels.reference import attention, join, partial_attention
from ..kernels.rotary import Rotation
from ..runtime.rope import rows_of
from ..runtime.steps import Step
from .cache import Rows
from .plan import LayerPlan, Part, token_runs
from .wire import Kind, Shape, Wire


def visible(
    queries: Tensor, keys: Tensor, attended: Tensor | None, window: int | None, causal: bool = True
) -> Tensor | None:
    """Which keys are visible to each query.

    Args:
        queries, keys: indices in the whole sequence, [seq_len] and [kv_len].
        attended: of every index whether it is no padding, [batch_size, length]; None: all are not.
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


def attend_by_heads(step: Step, plan: LayerPlan, wire: Wire, owned: list[Tensor], mask: Tensor | None) -> Tensor:
    """Attention of a whole prompt whose tokens are spread: queries and rows go to where their heads are, outputs back.

    Args:
        step: queries and rows of this process's tokens; rotations in blocks of all tokens.
        owned: indices of each process's tokens.
        mask: over the whole prompt, as `visible` gives it; None is causal.
    Returns:
        [batch_size, own tokens, sum over query heads of value width], groups in the order of the layout.
    Source: ZDC section 5.3, figure 18.
    """
    parameters, query, key, value = step.parameters, step.query, step.key, step.value
    layer, layout, batch_size = f"layer {step.layer_idx}", parameters.layout, key.shape[0]
    hpk, dtype = parameters.shape.heads_per_kv, query.dtype
    queries = _by_group(parameters, query, plan)
    rows = [(key[:, 0, :, keys], value[:, 0, :, values]) for keys, values in _row_slices(layout, dtype.itemsize)]
    mine, groups, processes = plan.parts[wire.rank], plan.groups(wire.rank), range(wire.count)
    lengths, order = [len(indices) for indices in owned], torch.argsort(torch.cat(owned))
    own = lengths[wire.rank]

    def whole(
        kind: Kind, outgoing: list[list[Tensor]], shapes: Sequence[Sequence[Shape]], dtype: torch.dtype
    ) -> list[Tensor]:
        """Tensors over all tokens, in their order, from those that the processes send over theirs."""
        found = wire.exchange(f"{kind} of {layer}", kind, outgoing, shapes, dtype)
        return [torch.cat(parts, dim=1)[:, order] for parts in zip(*found, strict=True)]

    sent = [[queries[part.group][:, :, part.heads(hpk)] for part in plan.parts[process]] for process in processes]
    shapes = [[(batch_size, n, part.num_heads, plan.query_width(part.group)) for part in mine] for n in lengths]
    queries_of = dict(zip(mine, whole("queries", sent, shapes, dtype), strict=True))
    sent = [[side for group in plan.groups(process) for side in rows[group]] for process in processes]
    sizes = [[(batch_size, n, side.shape[-1]) for group in groups for side in rows[group]] for n in lengths]
    found = iter(whole("rows", sent, sizes, key.dtype))
    rows_by_group = dict(zip(groups, zip(found, found, strict=True), strict=True))
    outputs: dict[Part, Tensor] = {}
    for call, shape, parts in plan.calls(wire.rank):
        outputs |= _call(parameters, call, shape, parts, queries_of, rows_by_group, step.rotations.read, mask)
    widths = [group.values.width for group in layout.groups]
    returned = wire.exchange(
        f"outputs of {layer}",
        "outputs",
        [[outputs[part][:, indices] for part in mine] for indices in owned],
        [[(batch_size, own, part.num_heads, widths[part.group]) for part in parts] for parts in plan.parts],
        dtype,
    )
    result = [query.new_empty(batch_size, own, layout.group_size * hpk, width) for width in widths]
    for parts_of_process, outputs_of_process in zip(plan.parts, returned, strict=True):
        for part, output in zip(parts_of_process, outputs_of_process, strict=True):
            result[part.group][:, :, part.heads(hpk)] = output
    return torch.cat([output.flatten(2) for output in result], dim=-1)


def attend_by_rows(step: Step, wire: Wire, owned: list[Tensor], mask_of: Callable[[range], Tensor | None]) -> Tensor:
    """Attention of a whole prompt whose tokens are spread: rows go to all processes, queries stay where they are.

    Args:
        step, owned: as in `attend_by_heads`.
        mask_of: of a run of tokens, over all tokens up to its last; as `visible` gives it.
    Returns:
        As `attend_by_heads`.
    """
    query, key, value, key_rotation = step.query, step.key, step.value, step.rotations.read
    order = torch.argsort(torch.cat(owned))
    found = wire.exchange(
        f"rows of layer {step.layer_idx}",
        "rows",
        [[key, value]] * wire.count,
        [[(key.shape[0], 1, len(indices), rows.shape[-1]) for rows in (key, value)] for indices in owned],
        key.dtype,
    )
    keys, values = (torch.cat(parts, dim=2)[:, :, order] for parts in zip(*found, strict=True))
    dim = 1 if query.dim() == 3 else 2
    outputs, begin = [], 0
    for run in token_runs(len(order), wire.count)[wire.rank]:
        rotation = None if key_rotation is None else rows_of(key_rotation, slice(run.stop))
        own, seen = query.narrow(dim, begin, len(run)), (keys[:, :, : run.stop], values[:, :, : run.stop])
        outputs.append(attention(own, *seen, step.parameters, rotation, mask_of(run)))
        begin += len(run)
    return torch.cat(outputs, dim=1)


def attend_to_spread_rows(
    step: Step, rows: Rows, key_rotation: Rotation | None, wire: Wire, mask: Tensor | None
) -> Tensor:
    """Attention of tokens that all processes have, to rows that are spread over them.

    Args:
        step: queries of the new tokens. rows: those that this process keeps.
        key_rotation: in blocks, of these rows. mask: over these rows; None: all are visible.
    Returns:
        [batch_size, new tokens, sum over query heads of value width], the same numbers in every process.
    """
    parameters, query, seq_len = step.parameters, step.query, seq_len_of(step.query)
    widths = [group.values.width for group in parameters.layout.groups for _ in range(parameters.heads_per_group)]
    batch_size, wide = query.shape[0], torch.promote_types(query.dtype, torch.float32)
    if len(rows.indices):
        output, log_sum = partial_attention(query, rows.key, rows.value, parameters, key_rotation, mask)
    else:
        output = query.new_zeros(batch_size, seq_len, sum(widths), dtype=wide)
        log_sum = query.new_full((batch_size, seq_len, len(widths)), -torch.inf, dtype=wide)
    both = torch.cat([output, log_sum], dim=-1)
    found = wire.gather(f"attention of layer {step.layer_idx}", "partial", both, [tuple(both.shape)] * wire.count)
    outputs, log_sums = zip(*(part.split([sum(widths), len(widths)], dim=-1) for part in found), strict=True)
    return join(list(outputs), list(log_sums), widths)[0].to(query.dtype)


def _by_group(parameters: AttentionParameters, query: Tensor, plan: LayerPlan) -> list[Tensor]:
    """What travels of the queries of each group, [batch_size, seq_len, heads, width]."""
    groups = len(parameters.layout.groups)
    if not plan.absorbs:
        return list(query.unflatten(1, (groups, -1)).transpose(2, 3).unbind(1))
    of_classes = [absorbed_queries(query, parameters, cls).transpose(2, 3) for cls in parameters.layout.classes()]
    return [queries for of_class in of_classes for queries in of_class.unbind(1)]


def _row_slices(layout: LayerLayout, element_bytes: int) -> list[tuple[slice, slice]]:
    """Of each group, its part of the key and of the value row: bytes, or numbers where the layout is not coded."""
    unit, found = 1 if layout.coded else element_bytes, []
    for group, starts in zip(layout.groups, layout.byte_offsets(element_bytes), strict=True):
        sizes = group.key.row_bytes(element_bytes), 0 if group.value is None else group.value.row_bytes(element_bytes)
        key, value = (slice(start // unit, (start + size) // unit) for start, size in zip(starts, sizes, strict=True))
        found.append((key, value))
    return found


def _call(
    whole: AttentionParameters,
    layout: LayerLayout,
    shape: AttentionShape,
    parts: list[Part],
    queries: dict[Part, Tensor],
    rows: dict[int, tuple[Tensor, Tensor]],
    key_rotation: Rotation | None,
    mask: Tensor | None,
) -> dict[Part, Tensor]:
    """Attention of some parts over all tokens, [batch_size, length, heads, value width] of each."""
    own = [queries[part] for part in parts]
    basis = constant = None
    if shape.rotary_dim:
        query = torch.cat(own, dim=2).transpose(1, 2)
        basis, constant = _bases(whole, parts)
    else:
        query = torch.cat([one.flatten(2) for one in own], dim=-1)

    def row(part: Part, side: int) -> Tensor:
        """Of a group, as far from the next as the rows of this call have it."""
        found = rows[part.group][side]
        rest = aligned(2 * found.shape[-1], len(parts)) - found.shape[-1] if layout.coded else 0
        return functional.pad(found, (0, rest))

    key, value = (torch.cat([row(part, side) for part in parts], dim=-1).unsqueeze(1) for side in (0, 1))
    parameters = AttentionParameters(layout, shape, whole.scaling, basis, constant, whole.softcap)
    output = attention(query, key, value, parameters, key_rotation, mask)
    widths = [part.num_heads * group.values.width for part, group in zip(parts, layout.groups, strict=True)]
    outputs = output.split(widths, dim=-1)
    return {part: own.unflatten(-1, (part.num_heads, -1)) for part, own in zip(parts, outputs, strict=True)}


def _bases(whole: AttentionParameters, parts: list[Part]) -> tuple[Tensor, Tensor | None]:
    """What absorbs the queries of some parts: of their KV heads and groups; and constant keys."""
    size, head_dim = whole.layout.group_size, whole.shape.head_dim
    assert whole.query_basis is not None
    of_groups = whole.query_basis.split([group.key.width for group in whole.layout.groups], dim=1)
    bases = [of_groups[part.group][part.kv_heads.start * head_dim : part.kv_heads.stop * head_dim] for part in parts]
    if whole.key_constant is None:
        return torch.cat(bases, dim=-1), None
    constants = [whole.key_constant[part.group * size :][part.kv_heads.start : part.kv_heads.stop] for part in parts]
    return torch.cat(bases, dim=-1), torch.cat(constants)
