"""Layout of what a compressed model stores: groups of KV heads, their latents, and where RoPE stands in their keys.

Pure data, no tensors. One LayerLayout a layer is written into `config.json` (the loader builds the attention modules
from it) and into `rotor.json` (the report); what is launched for it is in `kernel_config.json`.

RoPE rotates each plane of a key at position m of the cache by m w. With T = `rope_block` and b = m - m mod T, a key is
stored as it is rotated by m mod T. Attention rotates a query back by b and absorbs it into the latent, once a block.
One block for all positions is post-RoPE; blocks of one position are pre-RoPE, and keys are expanded when they are read.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Annotated, Any, NamedTuple, TypeVar

from ..checked import Expect, JsonObject, Reader
from ..errors import CheckpointError
from .rows import EDITED, MAX_RANK, Row, StoredRow, read_alike

MOST_ROPE_BLOCK = 128
"""Positions of the largest block."""

USUAL_ROPE_BLOCK = 64
"""Positions of a block unless a recipe says otherwise."""

SLOTS_AT_A_TIME = 16
"""Slots that the ring of a short sequence grows by: each time what it holds is copied."""

FirstTokens = Annotated[int, Expect(range(65).__contains__, "a number of tokens from 0 to 64")]
NewestTokens = Annotated[int, Expect(range(1, 4097).__contains__, "a number of tokens from 1 to 4096")]
RopeBlock = Annotated[int, Expect({1, 2, 4, 8, 16, 32, 64, 128}.__contains__, "a power of two from 1 to 128")]

Side = TypeVar("Side")
"""Pair of something for keys and for values: rows, tensors, sizes."""

LayerRanks = list[tuple[int, int]]
"""(key rank, value rank) of each group of a layer: in the order of the bases offline, then of the layout."""


class HeadSizes(NamedTuple):
    """Sizes of a layer's heads, see AttentionShape."""

    num_kv_heads: int
    head_dim: int
    rotary_dim: int


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of a model's attention layers before compression; `layer` gives those of one.

    heads: of each layer, in a model whose layers have heads of several sizes; num_kv_heads, head_dim and rotary_dim are
        then those of the first layer, and mean nothing for the others. Empty where all layers are alike.
    rotary_dim: how many of a head's dimensions, the first ones, RoPE rotates; 0 in a model without RoPE.
    key_norm: a norm stands between k_proj and RoPE.
    wide_norms: norms of queries and keys are of all heads together, with a weight for each dimension of each head.
    windows: tokens that each layer attends to, and so holds, at most; None of a layer that holds all. Empty where all
        layers do.
    gated: what attention puts out is multiplied by a gate of the hidden states before o_proj, so that nothing folds
        into that.
    sinks: each query head has a learned number among its logits, which takes attention and has no value.
    without_rope: layers whose queries and keys are not rotated, in a model that rotates those of others.
    mrope: RoPE's positions have three axes, and do not follow from a token's place in the cache.
    weighted_behind_rope: queries and keys are multiplied by weights of their dimensions behind RoPE.
    value_norm: values are normed, each head alone and without a weight, before they are kept.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    rotary_dim: int = 0
    key_norm: bool = False
    windows: tuple[int | None, ...] = ()
    wide_norms: bool = False
    gated: bool = False
    sinks: bool = False
    without_rope: tuple[int, ...] = ()
    mrope: bool = False
    weighted_behind_rope: bool = False
    value_norm: bool = False
    heads: tuple[HeadSizes, ...] = ()

    def __post_init__(self) -> None:
        for name in ("windows", "without_rope"):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # JSON has lists
        object.__setattr__(self, "heads", tuple(HeadSizes(*heads) for heads in self.heads))
        sizes = (self.num_layers, self.num_heads, self.num_kv_heads, self.head_dim, self.hidden_size)
        problem = ""
        if not all(isinstance(size, int) and 0 < size <= MAX_RANK for size in sizes):
            names = "layers, heads, KV heads, head_dim, hidden_size"
            problem = f"attention of {sizes} ({names}): expected numbers from 1 to {MAX_RANK}."
        elif not isinstance(self.rotary_dim, int) or self.rotary_dim not in range(0, self.head_dim + 1, 2):
            problem = f"RoPE rotates {self.rotary_dim} dimensions: expected an even number up to {self.head_dim}."
        elif self.num_heads % self.num_kv_heads:
            problem = f"{self.num_heads} query heads are not a multiple of {self.num_kv_heads} KV heads."
        elif self.windows and len(self.windows) != self.num_layers:
            problem = f"{len(self.windows)} windows of {self.num_layers} layers: expected one a layer, or none."
        elif not all(window is None or (isinstance(window, int) and window > 0) for window in self.windows):
            problem = f"windows of {list(self.windows)} tokens: expected positive numbers."
        elif not set(self.without_rope) <= set(range(self.num_layers)):
            problem = f"layers {list(self.without_rope)} without RoPE: expected some of 0 to {self.num_layers - 1}."
        elif self.heads and len(self.heads) != self.num_layers:
            problem = f"{len(self.heads)} sizes of heads of {self.num_layers} layers: expected one a layer, or none."
        elif self.heads and self.heads[0] != (self.num_kv_heads, self.head_dim, self.rotary_dim):
            problem = f"heads of the first layer are {list(self.heads[0])}: expected the sizes of the model."
        if problem:
            raise CheckpointError(problem, "The model's config.json or the run's run.json is damaged.")
        for heads in set(self.heads):  # each is checked as the only one
            replace(self, heads=(), without_rope=(), windows=(), **heads._asdict())

    @cached_property
    def heads_per_kv(self) -> int:
        """Query heads of a KV head; of one layer, as all properties below whose docstrings say a layer."""
        return self.num_heads // self.num_kv_heads

    @property
    def query_width(self) -> int:
        """Numbers that a layer's queries have of a token."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Numbers that a layer's keys have of a token; its values have as many."""
        return self.num_kv_heads * self.head_dim

    @property
    def projection_elements(self) -> int:
        """Weights of a layer's four projections."""
        return 2 * (self.query_width + self.kv_width) * self.hidden_size

    @property
    def needs_exact(self) -> str:
        """Parts of the model that are only served beside exact tokens, in words; empty where nothing is."""
        gate = "its attention is gated, and values cannot be folded into what a gate stands before"
        sinks = "its softmax has learned sinks, which join with exact tokens"
        norm = "its values are normed, and v_proj cannot be folded into what a norm stands before"
        return gate if self.gated else sinks if self.sinks else norm if self.value_norm else ""

    @property
    def rotates_as_told(self) -> str:
        """Why logits depend on more than distances in the cache, in words; empty where they do not. Keys in blocks are
        then rotated as the model says in each pass."""
        if self.mrope:
            return "positions of images have three axes in this model"
        weights = "norms behind RoPE have weights in this model, so that logits depend on more than distances"
        return weights if self.weighted_behind_rope else ""

    @property
    def rotary_planes(self) -> int:
        """Planes of a head that RoPE rotates, the fastest first; plane p is dimensions p and p + rotary_dim / 2."""
        return self.rotary_dim // 2

    def layer(self, index: int) -> AttentionShape:
        """The sizes as they are in one layer: those of its heads, without RoPE where that does not rotate."""
        layer_shape = replace(self, heads=(), **self.heads[index]._asdict()) if self.heads else self
        return replace(layer_shape, rotary_dim=0, without_rope=()) if index in self.without_rope else layer_shape

    @property
    def layers(self) -> tuple[AttentionShape, ...]:
        """The sizes of every layer."""
        return tuple(self.layer(index) for index in range(self.num_layers))

    @property
    def sizes(self) -> dict[AttentionShape, int]:
        """The sizes of layers with heads of each size, and how many have them; RoPE or not makes no difference."""
        if not self.heads:
            return {self: self.num_layers}
        return {replace(self, heads=(), **heads._asdict()): n for heads, n in Counter(self.heads).items()}

    @property
    def rotates(self) -> bool:
        """Tell whether RoPE rotates the keys of any layer."""
        return any(heads.rotary_dim for heads in self.heads) if self.heads else self.rotary_dim > 0

    @property
    def shared_kv_heads(self) -> int:
        """The most KV heads that can share a latent in every layer: the greatest common divisor of their numbers."""
        return math.gcd(self.num_kv_heads, *(heads.num_kv_heads for heads in self.heads))

    @property
    def heads_in_words(self) -> str:
        """`8 KV heads of 64`; where layers differ, `8 KV heads of 64 (5 layers) or 2 KV heads of 128 (1 layer)`."""
        words = {
            sizes: f"{sizes.num_kv_heads} KV head{'s' * (sizes.num_kv_heads > 1)} of {sizes.head_dim}"
            for sizes in self.sizes
        }
        if len(words) == 1:
            return words[self]
        return " or ".join(f"{words[sizes]} ({n} layer{'s' * (n > 1)})" for sizes, n in self.sizes.items())

    def held_tokens(self, tokens: int) -> tuple[int, ...]:
        """Tokens that the cache of each layer holds of a sequence of so many."""
        return tuple(min(tokens, window or tokens) for window in self.windows or [None] * self.num_layers)


class KeyForm(NamedTuple):
    """Form of RoPE in the keys that a layer stores; see LayerLayout, whose field this is."""

    rope_block: int | None = None

    def in_words(self, shape: AttentionShape) -> str:
        """`pre-RoPE`, `post-RoPE`, `blocks of 64`, or `no RoPE` in a model without it."""
        if not shape.rotary_dim:
            return "no RoPE"
        if self.rope_block is None:
            return "post-RoPE"
        return "pre-RoPE" if self == PRE_ROPE else f"blocks of {self.rope_block}"


POST_ROPE = KeyForm()
PRE_ROPE = KeyForm(1)


def pre_rope(shape: AttentionShape) -> KeyForm:
    """The form of keys before RoPE; the only one of a model without RoPE."""
    return PRE_ROPE if shape.rotary_dim else POST_ROPE


class LayerForm(NamedTuple):
    """Form that a layer is compressed to.

    keys: how keys are stored. group_size: KV heads that share a latent. joint: values share it too.
    """

    keys: KeyForm
    group_size: int
    joint: bool = False

    @property
    def latents_per_group(self) -> int:
        """Rows that a group stores of a token: one of both, or one of keys and one of values."""
        return 1 if self.joint else 2

    @property
    def latent_names(self) -> tuple[str, ...]:
        """Names of a layer's bases and codes, in the order of `LayerBases.latents`."""
        return ("joint",) if self.joint else ("qk", "vo")

    def columns(self, head_dim: int) -> int:
        """Numbers of a token that a row of a group is made of: each head's key and value, shared among its rows."""
        return 2 * self.group_size * head_dim // self.latents_per_group

    def in_words(self, shape: AttentionShape) -> str:
        """`joint, pre-RoPE, 2 heads`; `apart` where keys and values have a latent each."""
        heads = f"{self.group_size} head{'s' if self.group_size > 1 else ''}"
        return f"{'joint' if self.joint else 'apart'}, {self.keys.in_words(shape)}, {heads}"


class ModelForm(NamedTuple):
    """Form that the layers of a model are compressed to.

    keys: of each layer, how they are stored. group_size, joint: of all layers, see LayerForm.
    """

    keys: tuple[KeyForm, ...]
    group_size: int
    joint: bool = False

    def layer(self, index: int) -> LayerForm:
        return LayerForm(self.keys[index], self.group_size, self.joint)

    @property
    def distinct(self) -> list[LayerForm]:
        """The forms that there are, in the order of the layers."""
        return list(dict.fromkeys(map(self.layer, range(len(self.keys)))))

    def in_words(self, shape: AttentionShape) -> str:
        """Describe the keys as LayerForm does; where layers differ, with how many have each form."""
        counts = Counter(self.layer(index).in_words(shape.layer(index)) for index in range(len(self.keys)))
        if len(counts) == 1:
            return next(iter(counts))
        return "; ".join(f"{n} layer{'s' if n > 1 else ''}: {words}" for words, n in counts.items())


@dataclass(frozen=True)
class GroupLayout:
    """KV heads that share a key latent and a value latent, or one of both.

    key: of both in a joint group, with a scale where it is coded. value: None in a joint group.
    """

    kv_heads: tuple[int, ...]
    key: StoredRow
    value: StoredRow | None = None

    @property
    def joint(self) -> bool:
        return self.value is None

    @cached_property
    def latents(self) -> tuple[Row, ...]:
        """The rows that the cache holds, one a latent."""
        return (self.key,) if self.value is None else (self.key, self.value)

    @cached_property
    def values(self) -> Row:
        """The latent that values are read from."""
        return self.latents[-1]

    def columns(self, head_dim: int) -> int:
        """Numbers of a token that a latent of the group is made of: each head's key and value, shared among latents."""
        return 2 * len(self.kv_heads) * head_dim // len(self.latents)

    @property
    def ranks_in_words(self) -> str:
        """Ranks of keys and values as `48+32`, of both together as `96`."""
        return "+".join(str(latent.rank) for latent in self.latents)

    def to_dict(self) -> JsonObject:
        value = {} if self.value is None else {"value": self.value.to_dict()}
        return {"kv_heads": list(self.kv_heads), "key": self.key.to_dict()} | value


@dataclass(frozen=True)
class GroupClass:
    """Consecutive groups of a layer with equal latents: what one batched operation serves.

    key_rank, value_rank: channels of the groups before, in what projections put out. key_column: columns of the groups
    before, in the bases that read keys. key_byte, value_byte: where the first group begins in the rows that keys and
    values are read from. key_stride, value_stride: bytes there from one group to the next.
    """

    start: int
    count: int
    key: Row
    value: Row
    key_rank: int
    value_rank: int
    key_column: int
    key_byte: int
    value_byte: int
    key_stride: int
    value_stride: int


@dataclass(frozen=True)
class ExactTokens:
    """Tokens whose keys and values a layer keeps in the model's dtype too, and attends to instead of their rows.

    A query at cache index i sees key j exactly if i - j < newest, if j is among the `first` tokens of its sequence
    behind padding, or if j is new in the same pass: prompts are exact.
    """

    first: FirstTokens
    newest: NewestTokens

    def is_newest(self, query: Any, key: Any, until: Any = 0) -> Any:
        """Tell which keys are among the newest of a query: indices in the cache, numbers or tensors of them.

        Args:
            until: index of the first token that the ring still has.
        """
        return (query - key < self.newest) & (key >= until)

    def is_exact(self, query: Any, key: Any, begin: Any = 0, until: Any = 0) -> Any:
        """Tell which keys a query sees exactly: the rule of this class, but for what is new in the same pass.

        Args:
            begin: index of the first token of the sequence, behind padding. until: see `is_newest`.
        """
        return self.is_newest(query, key, until) | (key - begin < self.first)

    def within(self, window: int | None) -> ExactTokens:
        """The same in a layer with a sliding window, which sees no more tokens than that."""
        return self if window is None else ExactTokens(self.first, min(self.newest, window))

    @property
    def slots(self) -> int:
        """Tokens that a sequence keeps exactly."""
        return self.first + self.newest

    def slots_of(self, tokens: int) -> int:
        """Slots that a cache which grows has for a sequence of so many tokens, padding among them."""
        return self.first + min(self.newest, -(-tokens // SLOTS_AT_A_TIME) * SLOTS_AT_A_TIME)


@dataclass(frozen=True)
class LayerLayout:
    """The groups of one layer, in the order in which its rows hold them (by class, widest first).

    All groups of a layer have the same number of KV heads and of split lanes (see `CodedRow`); either all are coded or
    none, and either all are joint or none. Rows of coded joint groups are scaled. One kernel reads them all.

    What follows from the fields is computed once: every step of decoding asks for it in every layer.

    rope_block: T, a power of two up to MOST_ROPE_BLOCK, 1 is pre-RoPE; None: all positions, post-RoPE.
    exact: tokens that are kept exactly too; None: none, and then weights have the bases folded in.
    """

    groups: tuple[GroupLayout, ...]
    rope_block: RopeBlock | None = None
    exact: ExactTokens | None = None

    def __post_init__(self) -> None:
        alike = iter(read_alike([latent for group in self.groups for latent in group.latents]))
        groups = [GroupLayout(g.kv_heads, next(alike), g.value and next(alike)) for g in self.groups]
        object.__setattr__(self, "groups", tuple(groups))

    @cached_property
    def _hash(self) -> int:
        return hash((self.groups, self.rope_block, self.exact))

    def __hash__(self) -> int:
        """Computed once: every launch looks the layer up in caches."""
        return self._hash

    def __getstate__(self) -> dict[str, object]:
        """The fields alone: other processes compute another hash, and what else is computed once."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @cached_property
    def form(self) -> KeyForm:
        return KeyForm(self.rope_block)

    @cached_property
    def group_size(self) -> int:
        return len(self.groups[0].kv_heads)

    @cached_property
    def joint(self) -> bool:
        """Tell whether keys and values are coded together: attention then reads both from the key rows."""
        return self.groups[0].joint

    @cached_property
    def scaled(self) -> bool:
        """Tell whether rows have a scale, as those of joint groups of codes."""
        return self.groups[0].key.scaled

    @cached_property
    def coded(self) -> bool:
        """Tell whether the layer keeps rows of bytes (see `rows`) rather than rows of the model's dtype."""
        return self.groups[0].key.coded

    @property
    def kind(self) -> str:
        """The kind of kernels that serve the layer: `joint` or `apart`, rows of codes, or `numbers`."""
        return ("joint" if self.joint else "apart") if self.coded else "numbers"

    @cached_property
    def in_blocks(self) -> bool:
        """Tell whether RoPE stands between stored keys and queries, block by block; pre-RoPE, position by position."""
        return self.rope_block is not None

    @cached_property
    def pre_rope(self) -> bool:
        """Tell whether keys are stored before RoPE, and expanded and rotated when they are read."""
        return self.form == PRE_ROPE

    def folds_keys(self, shape: AttentionShape) -> bool:
        """Tell whether the key basis is inside W_k: nothing stands between them, and no key is kept exactly."""
        return self.exact is None and (self.pre_rope or not shape.rotary_dim) and not shape.key_norm

    def folds_queries(self, shape: AttentionShape) -> bool:
        """Tell whether q_proj puts out absorbed queries: without RoPE, norms and exact keys nothing stands between."""
        return self.exact is None and not shape.rotary_dim and not shape.key_norm

    def meets_latents(self, key: Row, shape: AttentionShape) -> bool:
        """Tell whether prompts attend to a latent of keys as it is stored, and no key is expanded.

        Always in a model without RoPE, whose queries come absorbed. After RoPE it is for numbers (codes have constants
        too, which full keys take in) that are no wider than a head: attention's work grows with the width.

        Source: FDC section 5.1; ZACK section 5.1.
        """
        numbers = not self.coded and not self.in_blocks
        return self.folds_queries(shape) or (numbers and key.width <= shape.head_dim)

    @property
    def folds_values(self) -> bool:
        """Tell whether the value basis is inside W_v, and what reads values inside W_o: no value is kept exactly."""
        return self.exact is None

    @cached_property
    def latents_per_group(self) -> int:
        """Rows that a group stores of a token: one of both, or one of keys and one of values."""
        return len(self.groups[0].latents)

    def stored_sides(self, key: Side, value: Side) -> tuple[Side, ...]:
        """The sides that have a row."""
        return (key, value)[: self.latents_per_group]

    def values_from(self, key: Side, value: Side) -> Side:
        """Side that values are read from: the value side, or the key side where a latent has both in it."""
        return self.stored_sides(key, value)[-1]

    def part_of_keys(self, value: Side) -> Side | None:
        """Output of v_proj, where it is a part of the latents in the key row; None where it has its own row."""
        return value if self.joint else None

    def columns(self, head_dim: int) -> int:
        """Numbers of a token that a latent of a group is made of."""
        return self.groups[0].columns(head_dim)

    def has_value_projection(self, shape: AttentionShape) -> bool:
        """Tell whether there is a v_proj; otherwise k_proj puts out latents of both."""
        return not (self.joint and self.folds_keys(shape))

    @property
    def has_value_shift(self) -> bool:
        """Tell whether values have a row of codes whose means are not in W_v, whose output is kept exactly."""
        return self.coded and not self.joint and not self.folds_values

    def shifted_projections(self, shape: AttentionShape) -> frozenset[str]:
        """Names (k, v, o) of the projections whose bias codes add to: means of channels, and what rows lack of them."""
        if not self.coded or self.exact is not None:
            return frozenset()
        keys = "k" if self.folds_keys(shape) else ""
        values = "" if self.joint else "v"
        return frozenset(keys + values + "o")

    @cached_property
    def key_rank(self) -> int:
        """Channels of all key latents."""
        return sum(group.key.rank for group in self.groups)

    @cached_property
    def value_rank(self) -> int:
        """Channels of all latents that values are read from."""
        return sum(group.values.rank for group in self.groups)

    @cached_property
    def key_width(self) -> int:
        """Columns of the bases that read all key latents."""
        return sum(group.key.width for group in self.groups)

    @cached_property
    def value_width(self) -> int:
        """Columns of the weights that read all latents of values."""
        return sum(group.values.width for group in self.groups)

    @cached_property
    def stored_value_rank(self) -> int:
        """Channels of all latents that have a value row."""
        return sum(group.value.rank for group in self.groups if group.value is not None)

    @cached_property
    def operands(self) -> int:
        """Numbers that attention reads of a word of every latent, see `CodedRow`; 1 of numbers."""
        return self.groups[0].key.operands

    @cached_property
    def word_operands(self) -> int:
        """The same, and 0 of numbers: how kernels tell them apart."""
        return self.groups[0].key.word_operands

    @cached_property
    def word_nibbles(self) -> int:
        """Nibbles of a word; 1 of numbers."""
        return self.groups[0].key.word_nibbles

    def element_bytes(self, model_bytes: int) -> int:
        """Bytes of an element of a row as tensors hold it, in a model whose dtype takes model_bytes."""
        return self.groups[0].key.element_bytes(model_bytes)

    def word_bytes(self, model_bytes: int) -> int:
        """Bytes of what kernels load as one element of a row."""
        return self.groups[0].key.word_bytes(model_bytes)

    def row_elements(self, model_bytes: int) -> tuple[int, int]:
        """Elements of a token's key and value row; see `element_bytes`."""
        unit = self.element_bytes(model_bytes)
        key, value = self.row_bytes(model_bytes)
        return key // unit, value // unit

    def _stride(self, latent: Row, model_bytes: int) -> int:
        return latent.stride(len(self.groups), model_bytes)

    def row_bytes(self, model_bytes: int) -> tuple[int, int]:
        """Bytes of a token's key and value row in a model whose dtype takes model_bytes."""
        key = sum(self._stride(group.key, model_bytes) for group in self.groups)
        return key, sum(self._stride(group.value, model_bytes) for group in self.groups if group.value is not None)

    def read_bytes(self, model_bytes: int) -> tuple[int, int]:
        """Bytes of the rows that attention reads a token's keys and values from."""
        key, value = self.row_bytes(model_bytes)
        return key, self.values_from(key, value)

    def byte_offsets(self, model_bytes: int) -> list[tuple[int, int]]:
        """Bytes before each group in the rows that attention reads a token's keys and values from."""
        sides = ([g.key for g in self.groups], [g.values for g in self.groups])
        key, value = (accumulate((self._stride(x, model_bytes) for x in side), initial=0) for side in sides)
        return list(zip(key, value, strict=True))[:-1]

    @cached_property
    def kv_head_order(self) -> tuple[int, ...]:
        """Original indices of the KV heads in the order of the rows and of the compressed projections."""
        return tuple(head for group in self.groups for head in group.kv_heads)

    def classes(self, model_bytes: int = 2) -> tuple[GroupClass, ...]:
        """Runs of groups with equal latents, with the sizes of all groups before them."""
        if model_bytes not in self._classes:
            self._classes[model_bytes] = tuple(self._runs(model_bytes))
        return self._classes[model_bytes]

    @cached_property
    def _classes(self) -> dict[int, tuple[GroupClass, ...]]:
        return {}

    def _runs(self, model_bytes: int) -> Iterator[GroupClass]:
        start = key_rank = value_rank = key_column = key_byte = value_byte = 0
        for end, group in enumerate(self.groups, 1):
            if end < len(self.groups) and self.groups[end].latents == group.latents:
                continue
            count, key, value = end - start, group.key, group.values
            strides = self._stride(key, model_bytes), self._stride(value, model_bytes)
            before = key_rank, value_rank, key_column, key_byte, value_byte
            yield GroupClass(start, count, key, value, *before, *strides)
            start, key_rank, value_rank = end, key_rank + count * key.rank, value_rank + count * value.rank
            key_column += count * key.width
            key_byte, value_byte = key_byte + count * strides[0], value_byte + count * strides[1]

    def to_dict(self) -> JsonObject:
        block = {} if self.rope_block is None else {"rope_block": self.rope_block}
        exact = {} if self.exact is None else {"exact": asdict(self.exact)}
        return {"groups": [group.to_dict() for group in self.groups]} | block | exact

    @classmethod
    def from_dict(cls, data: JsonObject, where: str) -> LayerLayout:
        """Read what `to_dict` wrote.

        Raises:
            CheckpointError: a field is missing, unknown or does not fit; names `where`.
        """
        reader = Reader(where, CheckpointError, EDITED)
        layout: LayerLayout = reader.read(cls, data)
        sizes = {len(group.kv_heads) for group in layout.groups}
        if len(sizes) != 1 or 0 in sizes:
            raise reader.fail("groups", sorted(sizes), "groups of one size, at least one KV head each")
        if len({(latent.coded, group.joint) for group in layout.groups for latent in group.latents}) != 1:
            raise reader.fail("groups", data["groups"], "groups that are all coded or not, and all joint or not")
        for group in layout.groups:
            scaled = [latent.scaled for latent in group.latents]
            if scaled != [layout.coded and group.joint] * len(scaled):
                raise reader.fail("groups", group.to_dict(), "a scale in coded rows of keys and values together, alone")
        return layout


def check_layouts(layouts: Sequence[LayerLayout], shape: AttentionShape) -> None:
    """Check that layouts are of a model of that shape; raises CheckpointError, which names the layer."""
    for index, layout in enumerate(layouts):
        reader = Reader(f"config.json, layer {index}", CheckpointError, "The folder was edited; export it again.")
        layer_shape = shape.layer(index)
        if sorted(layout.kv_head_order) != list(range(layer_shape.num_kv_heads)):
            raise reader.fail("KV heads", layout.kv_head_order, f"each of 0 to {layer_shape.num_kv_heads - 1} once")
        if layout.rope_block is not None and not layer_shape.rotary_dim:
            raise reader.fail("rope_block", layout.rope_block, "none in a layer without RoPE")
        if shape.needs_exact and layout.exact is None:
            raise reader.fail("exact", None, f"tokens that are kept exactly: {shape.needs_exact}")
        columns = layout.columns(layer_shape.head_dim)
        for group in layout.groups:
            if max(latent.rank for latent in group.latents) > columns:
                raise reader.fail("ranks", group.ranks_in_words, f"at most {columns}")


def ordered_by_class(groups: Iterable[GroupLayout], form: KeyForm) -> LayerLayout:
    """Lay out a layer whose groups are ordered by class, widest first, ties by their KV heads."""

    def key(group: GroupLayout) -> tuple[list[tuple[int, int, str]], tuple[int, ...]]:
        return [(-x.width, -x.rank, repr(x)) for x in group.latents], group.kv_heads

    return LayerLayout(tuple(sorted(groups, key=key)), *form)
