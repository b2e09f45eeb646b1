"""Layouts of what a compressed model stores: groups of KV heads, their domain, ranks and offsets in the packed rows.

Pure data, no tensors. One LayerLayout per layer is written into `config.json` (the loader builds the attention
modules from it) and into `rotor.json` (the report); what is launched for it is in `kernel_config.json`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, NamedTuple, TypedDict

from ..errors import CheckpointError
from ..typed import Reader
from .columns import Columns

Domain = Literal["post", "pre", "none"]
"""Where keys are compressed: after RoPE, before it (rebuilt and rotated in attention), or neither: in a model without
RoPE, or in whole rotary planes, with which RoPE commutes."""


MOST_ROPE_BLOCK = 64
"""Positions of the largest block that keys may be turned within."""


class Candidate(NamedTuple):
    """What a layer may be compressed to.

    group_size: KV heads that share a latent. joint: values share it too. rope_block: in domain `pre`, positions of a
    block; RoPE turns keys by their place in it before they are compressed, so that attention turns queries, once a
    block, where it would rebuild each key. 1: keys are not turned.
    """

    domain: Domain
    group_size: int
    joint: bool = False
    rope_block: int = 1

    def folds_keys(self, has_key_norm: bool) -> bool:
        """Whether the key basis can be inside W_k: nothing stands between them."""
        return folds_keys(self.domain, has_key_norm, self.rope_block)


LayerRanks = list[tuple[int, int]]
"""(qk_rank, v_rank) of each group of a layer: in the order of the bases offline, of the layout once it is stored."""

MAX_SIZE = 1 << 24
"""No size of any model's attention is near it; larger ones come from damaged files."""


class _GroupDict(TypedDict):
    kv_heads: list[int]
    qk_rank: int
    v_rank: int


class GroupDict(_GroupDict, total=False):
    """A GroupLayout in JSON."""

    planes: list[int]
    qk_columns: dict[str, int]
    v_columns: dict[str, int]
    joint: bool


class _LayoutDict(TypedDict):
    domain: Domain
    folded_keys: bool
    groups: list[GroupDict]


class LayoutDict(_LayoutDict, total=False):
    """A LayerLayout in JSON; keys are turned within blocks where it says so."""

    rope_block: int


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of a model's attention layers before compression.

    rotary_dim: how many of a head's dimensions, the first ones, RoPE turns; None for all of them.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    rotary_dim: int | None = None

    @property
    def turned(self) -> int:
        """Dimensions of a head that RoPE turns, in a model that has RoPE."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    def __post_init__(self) -> None:
        sizes = (self.num_layers, self.num_heads, self.num_kv_heads, self.head_dim, self.hidden_size)
        if not all(isinstance(size, int) and 0 < size <= MAX_SIZE for size in sizes):
            raise CheckpointError(
                f"attention of {sizes} (layers, heads, KV heads, head_dim, hidden_size): expected numbers from 1 to "
                f"{MAX_SIZE}.",
                "The model's config.json or the run's run.json is damaged.",
            )
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"{self.num_heads} query heads are not a multiple of {self.num_kv_heads} KV heads.",
                "The model's config.json or the run's run.json is damaged.",
            )

    @property
    def heads_per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads


def folds_keys(domain: Domain, has_key_norm: bool, rope_block: int = 1) -> bool:
    """Whether the key basis can be inside W_k: not behind RoPE, or a part of it, nor behind a norm of the keys."""
    return domain == "none" or (domain == "pre" and rope_block == 1 and not has_key_norm)


def is_rope_block(positions: int) -> bool:
    """Whether keys may be turned within blocks of so many positions: a power of two, at most MOST_ROPE_BLOCK."""
    return 1 <= positions <= MOST_ROPE_BLOCK and positions & (positions - 1) == 0


@dataclass(frozen=True)
class GroupLayout:
    """KV heads that share one key latent and one value latent, and the ranks of these (numbers stored per token).

    planes: where the key latent is whole rotary planes (domain `none` in a model with RoPE), the rotary frequency of
        each pair of its columns.
    qk_columns, v_columns: the bits of the latents' columns, where the layer keeps rows of codes; `qk_rank` and
        `v_rank` then count the columns of any width.
    joint: keys and values share one latent, kept once, in the key row; `qk_rank` and `v_rank` both count its columns.
    """

    kv_heads: tuple[int, ...]
    qk_rank: int
    v_rank: int
    planes: tuple[int, ...] = ()
    qk_columns: Columns | None = None
    v_columns: Columns | None = None
    joint: bool = False

    @classmethod
    def coded(cls, kv_heads: tuple[int, ...], qk_columns: Columns, v_columns: Columns | None) -> GroupLayout:
        """A group whose latents are kept as rows of codes; without columns of its own the value is in the key's."""
        joint, v_columns = v_columns is None, v_columns or qk_columns
        return cls(kv_heads, qk_columns.rank, v_columns.rank, (), qk_columns, v_columns, joint)

    @property
    def of_class(self) -> tuple[int, int, Columns | None, Columns | None]:
        """What groups of a class have in common."""
        return self.qk_rank, self.v_rank, self.qk_columns, self.v_columns

    @property
    def ranks_in_words(self) -> str:
        """`48+32` of keys and values, or `96 joint`."""
        return f"{self.qk_rank} joint" if self.joint else f"{self.qk_rank}+{self.v_rank}"

    def row_bytes(self, element_bytes: int) -> tuple[int, int]:
        """Bytes that the group takes in a token's key and value row, in a model whose dtype takes element_bytes."""
        qk_bytes, v_bytes = self.read_bytes(element_bytes)
        return qk_bytes, 0 if self.joint else v_bytes

    def read_bytes(self, element_bytes: int) -> tuple[int, int]:
        """Bytes of a token that attention reads keys and values from: the same ones where these are joint."""
        if self.qk_columns is None or self.v_columns is None:
            return self.qk_rank * element_bytes, self.v_rank * element_bytes
        return self.qk_columns.row_bytes(element_bytes), self.v_columns.row_bytes(element_bytes)

    def to_dict(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"kv_heads": list(self.kv_heads), "qk_rank": self.qk_rank, "v_rank": self.v_rank}
        if self.planes:
            fields["planes"] = list(self.planes)
        if self.qk_columns is not None and self.v_columns is not None:
            fields |= {"qk_columns": self.qk_columns.to_dict(), "v_columns": self.v_columns.to_dict()}
        return fields | ({"joint": True} if self.joint else {})

    @classmethod
    def from_dict(cls, data: GroupDict, where: str) -> GroupLayout:
        """Read what `to_dict` wrote.

        Raises:
            CheckpointError: columns by bits of one side alone, or not as many as the rank; a joint latent whose sides
                differ; names `where`.
        """
        names = [name for name in ("qk_columns", "v_columns") if name in data]
        columns = {name: Columns.from_dict(data[name], f"{where}: {name}") for name in names}  # type: ignore[literal-required]
        ranks = {"qk_columns": data["qk_rank"], "v_columns": data["v_rank"]}
        reader = Reader(where, CheckpointError, "The folder was edited or is from another version of rotor.")
        got = {name: c.to_dict() for name, c in columns.items()}
        if columns and {name: c.rank for name, c in columns.items()} != ranks:
            raise reader.fail("groups", got, f"columns of both sides, as many as the ranks {ranks}")
        planes, joint = tuple(data.get("planes", ())), data.get("joint", False)
        if joint and (data["qk_rank"] != data["v_rank"] or columns.get("qk_columns") != columns.get("v_columns")):
            raise reader.fail("groups", dict(data), "the same columns of keys and of values, which are joint")
        return cls(tuple(data["kv_heads"]), data["qk_rank"], data["v_rank"], planes, **columns, joint=joint)


@dataclass(frozen=True)
class GroupClass:
    """Consecutive groups of a layer with equal ranks, and equal columns by bits where these are given: what one batched
    operation or one kernel variant serves. Offsets count columns of the groups before it.
    """

    start: int
    count: int
    qk_rank: int
    v_rank: int
    qk_offset: int
    v_offset: int
    qk_columns: Columns | None = None
    v_columns: Columns | None = None


@dataclass(frozen=True)
class LayerLayout:
    """The groups of one layer, in the order in which the packed rows hold them (by class, widest first).

    All groups of a layer have the same number of KV heads and the same domain. `folded_keys` says that the key basis
    is inside `k_proj` (so that it puts out the latent); otherwise a `key_basis` is applied at run time.

    rope_block: in domain `pre`, positions of a block: a key at position m is stored turned by RoPE to m mod rope_block,
        a power of two, and turned to the beginning of its block, m - m mod rope_block, when it is read; 1: stored
        before RoPE.
    """

    domain: Domain
    folded_keys: bool
    groups: tuple[GroupLayout, ...]
    rope_block: int = 1

    @cached_property
    def _hash(self) -> int:
        return hash((self.domain, self.folded_keys, self.groups, self.rope_block))

    def __hash__(self) -> int:
        """Computed once: every launch looks the layer up in caches."""
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: texts have other hashes in other processes."""
        return {name: value for name, value in vars(self).items() if name != "_hash"}

    @property
    def group_size(self) -> int:
        return len(self.groups[0].kv_heads)

    @property
    def qk_width(self) -> int:
        return sum(group.qk_rank for group in self.groups)

    @property
    def v_width(self) -> int:
        return sum(group.v_rank for group in self.groups)

    @property
    def joint(self) -> bool:
        """Whether keys and values share their latents: attention then reads both from the key rows."""
        return self.groups[0].joint

    @property
    def turned_in_blocks(self) -> bool:
        """Whether keys are stored as RoPE turns them within a block of positions."""
        return self.rope_block > 1

    @property
    def coded(self) -> bool:
        """Whether the layer keeps rows of bytes (see `columns`) rather than rows of the model's dtype."""
        return self.groups[0].qk_columns is not None

    def row_bytes(self, element_bytes: int) -> tuple[int, int]:
        """Bytes of a token's key and value row in a model whose dtype takes element_bytes."""
        rows = [group.row_bytes(element_bytes) for group in self.groups]
        return sum(qk for qk, _ in rows), sum(v for _, v in rows)

    def read_bytes(self, element_bytes: int) -> tuple[int, int]:
        """Bytes of the rows that attention reads a token's keys and values from."""
        rows = [group.read_bytes(element_bytes) for group in self.groups]
        return sum(qk for qk, _ in rows), sum(v for _, v in rows)

    @property
    def planes(self) -> tuple[tuple[int, ...], ...]:
        """The rotary planes that each group's key latent consists of; empty ones where it is no such latent."""
        return tuple(group.planes for group in self.groups)

    @property
    def kv_head_order(self) -> tuple[int, ...]:
        """Original indices of the KV heads in the order of the packed rows; the compressed projections use it too."""
        return tuple(head for group in self.groups for head in group.kv_heads)

    def classes(self) -> Iterator[GroupClass]:
        """Runs of groups with equal ranks, with their offsets (in elements) in the packed key and value rows.

        A plain loop: torch.compile traces no groupby.
        """
        start = qk_offset = v_offset = 0
        for end, group in enumerate(self.groups, 1):
            if end < len(self.groups) and self.groups[end].of_class == group.of_class:
                continue
            count = end - start
            yield GroupClass(start, count, *group.of_class[:2], qk_offset, v_offset, *group.of_class[2:])
            start, qk_offset, v_offset = end, qk_offset + count * group.qk_rank, v_offset + count * group.v_rank

    def offsets(self) -> list[tuple[int, int]]:
        """List (qk_offset, v_offset): the columns before each group, in rows of the model's dtype its place."""
        qk = accumulate((g.qk_rank for g in self.groups), initial=0)
        v = accumulate((g.v_rank for g in self.groups), initial=0)
        return list(zip(qk, v, strict=True))[:-1]

    def byte_offsets(self, element_bytes: int) -> list[tuple[int, int]]:
        """Bytes before each group in the rows that attention reads a token's keys and values from."""
        rows = [group.read_bytes(element_bytes) for group in self.groups]
        qk = accumulate((qk for qk, _ in rows), initial=0)
        v = accumulate((v for _, v in rows), initial=0)
        return list(zip(qk, v, strict=True))[:-1]

    def to_dict(self) -> dict[str, Any]:
        return {
            "domain": self.domain,
            "folded_keys": self.folded_keys,
            "groups": [group.to_dict() for group in self.groups],
        } | ({} if self.rope_block == 1 else {"rope_block": self.rope_block})

    @classmethod
    def from_dict(cls, data: dict[str, Any], where: str) -> LayerLayout:
        """Read what `to_dict` wrote.

        Raises:
            CheckpointError: a field is missing or has the wrong type; names `where`.
        """
        reader = Reader(where, CheckpointError, "The folder was edited or is from another version of rotor.")
        fields: LayoutDict = reader.read(LayoutDict, data)
        groups = tuple(GroupLayout.from_dict(group, where) for group in fields["groups"])
        layout = cls(fields["domain"], fields["folded_keys"], groups, fields.get("rope_block", 1))
        if not is_rope_block(layout.rope_block) or (layout.turned_in_blocks and layout.domain != "pre"):
            expected = f"1, or in domain `pre` without folded keys a power of two up to {MOST_ROPE_BLOCK}"
            raise reader.fail("rope_block", layout.rope_block, expected)
        if layout.turned_in_blocks and layout.folded_keys:
            raise reader.fail("folded_keys", True, "false, as keys are turned between k_proj and their basis")
        sizes = {len(group.kv_heads) for group in groups}
        if len(sizes) != 1 or 0 in sizes:
            raise reader.fail("groups", sorted(sizes), "groups of one size, at least one KV head each")
        if len({group.qk_columns is None for group in groups}) != 1:
            raise reader.fail("groups", fields["groups"], "columns by bits in all groups of a layer, or in none")
        if len({group.joint for group in groups}) != 1 or (layout.joint and layout.domain == "post"):
            raise reader.fail("groups", fields["groups"], "joint latents in all groups or in none, and none after RoPE")
        ranks = [rank for group in groups for rank in (group.qk_rank, group.v_rank)]
        if not all(0 < rank <= MAX_SIZE for rank in ranks):
            raise reader.fail("groups", ranks, f"ranks from 1 to {MAX_SIZE}")
        planes = [plane for group in groups for plane in group.planes]
        if not all(0 <= plane < MAX_SIZE for plane in planes):
            raise reader.fail("groups", planes, f"rotary planes from 0 to {MAX_SIZE}")
        if planes and layout.coded:
            raise reader.fail("groups", planes, "no rotary planes beside columns by bits")
        if planes and not all(2 * len(group.planes) == group.qk_rank for group in groups):
            raise reader.fail("groups", planes, "two columns of each key latent for each of its rotary planes")
        return layout


def check_layouts(layouts: list[LayerLayout], shape: AttentionShape, where: str) -> None:
    """Raises CheckpointError, naming the layer, where layouts are not of a model of that shape."""
    for index, layout in enumerate(layouts):
        reader = Reader(f"{where}, layer {index}", CheckpointError, "The folder was edited; export it again.")
        if sorted(layout.kv_head_order) != list(range(shape.num_kv_heads)):
            raise reader.fail("KV heads", layout.kv_head_order, f"each of 0 to {shape.num_kv_heads - 1} once")
        columns = layout.group_size * shape.head_dim * (2 if layout.joint else 1)
        for group in layout.groups:
            if max(group.qk_rank, group.v_rank) > columns:
                raise reader.fail("ranks", (group.qk_rank, group.v_rank), f"at most {columns}")


def ordered_by_class(
    domain: Domain, folded_keys: bool, groups: list[GroupLayout], rope_block: int = 1
) -> tuple[LayerLayout, tuple[int, ...]]:
    """Order the groups of a layer by class, widest first, ties by their KV heads.

    Returns:
        The layout, and for each position in it the index of the group in `groups`.
    """

    def key(index: int) -> tuple[Any, ...]:
        group = groups[index]
        bits = [columns.counts for columns in (group.qk_columns, group.v_columns) if columns is not None]
        return -group.qk_rank, -group.v_rank, bits, group.kv_heads

    order = sorted(range(len(groups)), key=key)
    return LayerLayout(domain, folded_keys, tuple(groups[i] for i in order), rope_block), tuple(order)


def compression(ranks: list[list[tuple[int, int]]], shape: AttentionShape) -> float:
    """Share of the KV cache removed (the papers' p) by (qk_rank, v_rank) of every group of every layer.

    Source: FDC section 4.1; 1 - sum (qk_rank + v_rank) / sum over KV heads of 2 head_dim.
    """
    kept = sum(qk_rank + v_rank for layer in ranks for qk_rank, v_rank in layer)
    return 1.0 - kept / (shape.num_layers * shape.num_kv_heads * 2 * shape.head_dim)


def kv_bytes_per_token(layouts: list[LayerLayout], element_bytes: int) -> int:
    """Bytes of cache that one token takes over all layers, rows only (there is no other metadata)."""
    return sum(sum(layout.row_bytes(element_bytes)) for layout in layouts)


def uncompressed_kv_bytes_per_token(shape: AttentionShape, element_bytes: int) -> int:
    return element_bytes * shape.num_layers * shape.num_kv_heads * 2 * shape.head_dim


def profile_name(accuracy: float) -> str:
    """The name of an accuracy's rank profile in an elastic checkpoint; equal numbers have one name."""
    return str(float(accuracy))
