"""Attention of a split prompt by heads: queries, keys and values travel compressed, each to the process of its group.

Every process attends over the whole prompt with some of the groups, and outputs travel back to the processes of their
tokens. It is Ulysses' all-to-all (ZDC section 5.3), for rows of numbers after RoPE or without it, whose latents of a
group meet its absorbed queries and nothing else. Where it would send more than rows that go to all processes, these
go: a few query heads a KV head make queries and outputs wider than keys and values, and a latent that all heads share
has one process. Codes go by rows, as their queries have no code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..checkpoint.layout import AttentionShape, LayerLayout
from ..kernels.reference.attention import dense_attention
from ..kernels.reference.logits import ClassRows, absorbed_queries
from ..runtime.steps import AttentionCall
from .wire import Wire


@dataclass(frozen=True)
class Travel:
    """Cost of a token of a prompt in a layer, of all processes together: bytes by rows, and by heads (None where
    heads do not travel)."""

    rows: int
    heads: float | None

    @property
    def by_heads(self) -> bool:
        return self.heads is not None and self.heads < self.rows

    @property
    def bytes_per_token(self) -> float:
        return self.heads if self.heads is not None and self.by_heads else self.rows


def travel(layout: LayerLayout, shape: AttentionShape, processes: int, element_bytes: int) -> Travel:
    """Bytes of both ways in a layer of a model whose dtype takes element_bytes."""
    rows = (processes - 1) * sum(layout.row_bytes(element_bytes))
    if layout.coded or layout.in_blocks or layout.exact is not None:
        return Travel(rows, None)
    each = layout.group_size * shape.heads_per_kv
    # A query and an output of each head, a key latent and a value latent; a process keeps those of its own tokens.
    queries = sum(each * (group.key.width + group.values.width) for group in layout.groups)
    sent = queries + sum(latent.width for group in layout.groups for latent in group.latents)
    return Travel(rows, element_bytes * sent * (processes - 1) / processes)


def group_parts(groups: int, processes: int) -> list[range]:
    """The groups of each process: neighbours, as many as can be alike."""
    edges = [groups * process // processes for process in range(processes + 1)]
    return [range(edges[process], edges[process + 1]) for process in range(processes)]


def attend_by_heads(call: AttentionCall, wire: Wire, owned: Sequence[Tensor], mask: Tensor | None) -> Tensor:
    """Attention of a whole prompt whose tokens are split, by heads.

    Args:
        call: queries and rows of this process's tokens.
        owned: indices of each process's tokens. mask: of all tokens over all tokens, see `attention.visible`.
    Returns:
        [batch_size, own tokens, sum over query heads of value width], groups in the order of the layout.
    """
    parameters, query = call.parameters, call.query
    layout, heads, batch_size = parameters.layout, parameters.heads_per_group, len(call.key)
    classes = list(layout.classes(query.element_size()))
    parts = group_parts(len(layout.groups), wire.count)
    held = [[_within(cls.start, cls.count, part) for cls in classes] for part in parts]
    sides = []
    for cls in classes:
        of = ClassRows.of(parameters, cls, call.key, call.value, query.dtype)
        latents = layout.stored_sides(of.latents(slice(None)), of.values(slice(None)))
        sides.append((absorbed_queries(query, parameters, cls), *latents))

    def shapes_of(tokens: int, process: int) -> Iterator[tuple[int, ...]]:
        for cls, groups in zip(classes, held[process], strict=True):
            yield batch_size, len(groups), heads, tokens, cls.key.width
            for width in layout.stored_sides(cls.key.width, cls.value.width):
                yield batch_size, len(groups), tokens, width

    sent = [
        [side[:, groups.start : groups.stop] for of, groups in zip(sides, mine, strict=True) for side in of]
        for mine in held
    ]
    coming = [list(shapes_of(len(indices), wire.rank)) for indices in owned]
    received = wire.exchange(f"heads of layer {call.layer_idx}", "heads", sent, coming)
    order = torch.argsort(torch.cat(list(owned)))
    whole = iter([torch.cat(of, dim=-2)[..., order, :] for of in zip(*received, strict=True)])
    outputs = []
    for groups in held[wire.rank]:
        queries, keys, *values = (next(whole) for _ in range(1 + layout.latents_per_group))
        if not len(groups):
            outputs.append(queries.new_empty(batch_size, len(order), 0))
            continue
        options = parameters.scaling, mask, parameters.softcap
        outputs.append(dense_attention(queries.flatten(1, 2), keys, *(values or [keys]), *options))
    back = [[output[:, indices] for output in outputs] for indices in owned]
    widths = [
        [own_width(cls.value.width, groups, heads) for cls, groups in zip(classes, mine, strict=True)] for mine in held
    ]
    tokens = len(owned[wire.rank])
    returning = [[(batch_size, tokens, width) for width in mine] for mine in widths]
    attended = wire.exchange(f"attention of layer {call.layer_idx}", "heads", back, returning)
    return torch.cat([part for parts in zip(*attended, strict=True) for part in parts], dim=-1)


def own_width(value_width: int, groups: range, heads: int) -> int:
    """Numbers that a token's attention puts out for some groups of a class."""
    return len(groups) * heads * value_width


def _within(start: int, count: int, part: range) -> range:
    """The groups of a class that a part has, counted within the class."""
    first, last = max(start, part.start), min(start + count, part.stop)
    return range(first - start, max(first, last) - start) if last > first else range(0)
