"""Who computes what: tokens to processes, and inside of attention groups of KV heads; and the bytes that this sends.

Outside of attention a process has some tokens and all heads, inside (Ulysses) all tokens and some heads. A *part* is
what one process computes of a group: all of its query heads where there are groups for every process, else some of
them. The rows of a group that is cut into parts go to each process that has one (one latent a layer goes to all).

Where rows are so small that all of them, sent to all, weigh less than queries, rows and outputs on their way, queries
stay where they are, and only rows travel. Tokens are cut into two runs a process, one from either end, so that the
causal mask leaves all processes as much to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from ..format.layout import AttentionShape, GroupLayout, LayerLayout


@dataclass(frozen=True)
class Part:
    """Some of a group's query heads: of each KV head in `kv_heads` (indices within the group), those in `query_heads`
    (indices among the query heads of one KV head).
    """

    group: int
    kv_heads: range
    query_heads: range

    @property
    def num_heads(self) -> int:
        return len(self.kv_heads) * len(self.query_heads)

    def heads(self, heads_per_kv: int) -> list[int]:
        """Indices among the query heads of the group."""
        return [kv * heads_per_kv + q for kv in self.kv_heads for q in self.query_heads]


@dataclass(frozen=True)
class Traffic:
    """Bytes that are sent, by what they are: queries, rows (keys and values) and outputs.

    busiest_bytes: what the process sends or receives, whichever is more, that sends or receives most: links carry both
    at once.
    """

    queries: int = 0
    rows: int = 0
    outputs: int = 0
    busiest_bytes: int = 0

    @property
    def total(self) -> int:
        return self.queries + self.rows + self.outputs

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*map(sum, zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class LayerPlan:
    """The parts of a layer by process.

    shape: sizes of the uncompressed model. element_bytes: of its dtype. absorbs: queries travel in the latents of their
    keys, compressed. parts: of each process, in the order of the layout's groups.
    """

    layout: LayerLayout
    shape: AttentionShape
    element_bytes: int
    absorbs: bool
    parts: tuple[tuple[Part, ...], ...]

    def groups(self, process: int) -> list[int]:
        """The groups of which a process needs the rows, in order."""
        return sorted({part.group for part in self.parts[process]})

    def query_width(self, group: int) -> int:
        """Numbers that a query head sends: absorbed, or the query itself."""
        return self.layout.groups[group].key.width if self.absorbs else self.shape.head_dim

    @property
    def rows_alone(self) -> bool:
        """Whether fewer bytes travel if every process gets all rows, and queries and outputs stay where they are."""
        count = len(self.parts)
        by_heads = sum(self.sizes(process).total for process in range(count))
        return count > 1 and count * sum(self.layout.row_bytes(self.element_bytes)) < by_heads

    def sizes(self, process: int) -> Traffic:
        """What a process receives and sends back for each token, where heads are spread."""
        parts, groups, element_bytes = self.parts[process], self.layout.groups, self.element_bytes
        return Traffic(
            element_bytes * sum(part.num_heads * self.query_width(part.group) for part in parts),
            sum(_row_bytes(groups[i], element_bytes) for i in self.groups(process)),
            element_bytes * sum(part.num_heads * groups[part.group].values.width for part in parts),
        )

    def calls(self, process: int) -> Iterator[tuple[LayerLayout, AttentionShape, list[Part]]]:
        """The attention calls of a process: a layout of its parts, the sizes of their heads alone, and the parts.

        Absorbed queries come as in a model without RoPE, where all query heads of a part share the keys. Parts of other
        numbers of heads are calls of their own.
        """
        by_shape: dict[tuple[int, int], list[Part]] = {}
        for part in self.parts[process]:
            by_shape.setdefault((len(part.kv_heads), len(part.query_heads)), []).append(part)
        for (num_kv, num_q), parts in by_shape.items():
            size, heads = (1, num_kv * num_q) if self.absorbs else (num_kv, num_q)
            groups = []
            for i, part in enumerate(parts):
                kv_heads = tuple(range(i * size, (i + 1) * size))
                groups.append(replace(self.layout.groups[part.group], kv_heads=kv_heads))
            count = size * len(parts)
            rotary_dim = 0 if self.absorbs else self.shape.rotary_dim
            shape = replace(self.shape, num_heads=count * heads, num_kv_heads=count, rotary_dim=rotary_dim)
            yield replace(self.layout, groups=tuple(groups)), shape, parts


@lru_cache(maxsize=4096)
def plan_layer(
    layout: LayerLayout, shape: AttentionShape, element_bytes: int, processes: int, softcap: bool = False
) -> LayerPlan:
    """Share a layer's attention out: parts by their bytes, longest first, each to the process with the fewest so far.

    Args:
        shape: sizes of the uncompressed model. element_bytes: of its dtype.
        softcap: logits are bounded, and so see what the constants of codes add to all logits of a query.
    Returns:
        A plan in which a process has nothing to compute only if there are fewer query heads than processes.
    Source: ZDC section 5.3, for heads of one rank; here groups of any.
    """
    absorbs = not layout.in_blocks and not (softcap and layout.coded and shape.rotary_dim)
    heads_per_kv = shape.heads_per_kv
    groups = layout.groups
    heads = layout.group_size * heads_per_kv
    weights = []
    for group in groups:
        width = group.key.width if absorbs else shape.head_dim
        weights.append(_row_bytes(group, element_bytes) + element_bytes * heads * (width + group.values.width))
    cuts, most = [1] * len(groups), heads
    while sum(cuts) < processes:
        left = [i for i, count in enumerate(cuts) if count < most]
        if not left:
            break
        cuts[max(left, key=lambda i: (weights[i] / cuts[i], -i))] += 1
    parts = [
        (weights[i] * part.num_heads / most, part)
        for i, count in enumerate(cuts)
        for part in _cut(i, count, layout.group_size, heads_per_kv)
    ]
    loads, owned = [0.0] * processes, [[] for _ in range(processes)]  # type: tuple[list[float], list[list[Part]]]
    for weight, part in sorted(parts, key=lambda item: -item[0]):
        process = min(range(processes), key=lambda p: loads[p])
        loads[process] += weight
        owned[process].append(part)
    ordered = (tuple(sorted(mine, key=lambda p: (p.group, p.kv_heads.start, p.query_heads.start))) for mine in owned)
    return LayerPlan(layout, shape, element_bytes, absorbs, tuple(ordered))


def bounds(tokens: int, count: int) -> list[int]:
    """Where each of several runs begins, and the end of the last one: as even as can be."""
    return [tokens * i // count for i in range(count + 1)]


def token_runs(tokens: int, processes: int) -> list[list[range]]:
    """The tokens of each process: one piece from the beginning and one from the end, as even as can be.

    Args:
        tokens: at least two a process.
    """
    edges = bounds(tokens, 2 * processes)
    runs = [range(start, end) for start, end in pairwise(edges)]
    return [[runs[process], runs[-1 - process]] for process in range(processes)]


def own_indices(tokens: int, processes: int, device: torch.device) -> list[Tensor]:
    """Indices of each process's tokens of a prompt: all of them, in every process, where they are fewer than two a
    process.
    """
    if tokens < 2 * processes:
        return [torch.arange(tokens, device=device)] * processes
    return [torch.tensor([*head, *tail], device=device) for head, tail in token_runs(tokens, processes)]


def _row_bytes(group: GroupLayout, element_bytes: int) -> int:
    """Of a group's rows, without what lies between groups."""
    return sum(latent.row_bytes(element_bytes) for latent in group.latents)


def _cut(group: int, count: int, size: int, heads_per_kv: int) -> list[Part]:
    """At least `count` parts of a group: by KV heads, and where these do not suffice each by its query heads."""
    if count <= size:
        edges = bounds(size, count)
        return [Part(group, range(edges[i], edges[i + 1]), range(heads_per_kv)) for i in range(count)]
    edges = bounds(heads_per_kv, -(-count // size))
    return [Part(group, range(kv, kv + 1), range(first, end)) for kv in range(size) for first, end in pairwise(edges)]
