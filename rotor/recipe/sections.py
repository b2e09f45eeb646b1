"""Sections of a recipe: their fields, with types, ranges, defaults and texts, which are the fields' reference.

Adding a field is one entry here: `rotor recipes --fields`, `--set`, completion and errors derive from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from ..checked import Expect, OneOf
from ..checkpoint.layout import USUAL_ROPE_BLOCK, ExactTokens, FirstTokens, RopeBlock
from ..checkpoint.rows import WIDTHS
from .basis_methods import QK_METHODS, VO_METHODS, BasisMethod
from .metric_registry import METRICS
from .rank_methods import RANK_METHODS, RankMethod

NAMES: dict[str, Mapping[str, BasisMethod | RankMethod]] = {
    "bases.qk": QK_METHODS,
    "bases.vo": VO_METHODS,
    "ranks.method": RANK_METHODS,
}
"""Fields that name something registered."""

MODEL = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)

# The most of a count is far more than anybody needs, and less than what fills a machine's memory.
Count = Annotated[int, Field(ge=1, le=1 << 26)]
RowLength = Annotated[int, Field(ge=2, le=1 << 20)]
Size = Annotated[int, Field(ge=1, le=1 << 16)]
Prompts = Annotated[int, Field(ge=1, le=1 << 14)]
Items = Annotated[int, Field(ge=2, le=1 << 14)]
Seed = Annotated[int, Field(ge=0, le=(1 << 63) - 1)]
Share = Annotated[float, Field(gt=0, lt=1)]
TextPaths = str | tuple[str, ...] | None
Shares = Annotated[tuple[Share, ...], Expect(lambda shares: 0 < len(shares) <= 256, "1 to 256 shares between 0 and 1")]


Metric = Annotated[str, Expect(METRICS.__contains__, f"one of {', '.join(METRICS)}", tuple(METRICS))]


def _paths(path: TextPaths) -> tuple[Path, ...]:
    return tuple(map(Path, (path,) if isinstance(path, str) else path or ()))


def _are_widths(bits: tuple[int, ...]) -> bool:
    return {0} < set(bits) <= {0, *WIDTHS} and len(set(bits)) == len(bits)


@dataclass(frozen=True, config=MODEL)
class Tokens:
    """Calibration tokens."""

    source: Literal["random", "synthetic", "text", "dataset"] = "random"
    """`random` draws uniformly from the vocabulary without its special tokens (FDC section 5.1: at least 8K);
    `synthetic` samples text from the model itself, from random starts (ZACK: at least 16K), and where it has a chat
    template half of the rows as a chat; `text` reads the file or folder `path`; `dataset` reads `column` of a `split`
    of `dataset`."""
    path: TextPaths = None
    """UTF-8 file for `text`, or a folder of them, or a list: each is a kind of text, and has an equal share of the
    rows. `rotor calibrate --text FILE` sets it here and in `evaluation`."""
    dataset: str | None = None
    """Data set for `dataset`: a name on the hub (NAME or NAME:CONFIG), or a local folder."""
    split: str = "train"
    """Split of the data set."""
    column: str = "text"
    """Column of the data set that has the text."""
    count: Count = 8192
    """Tokens in all, before any are pruned."""
    seq_len: RowLength = 512
    """Tokens in a row, or the model's longest sequence if that is shorter."""
    seed: Seed = 0
    """Seed of what is drawn: random tokens, the text that the model writes, the order of a data set."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """`path` as a list."""
        return _paths(self.path)


@dataclass(frozen=True, config=MODEL)
class Prune:
    """Pruning of calibration data, and centroids that stand for the rest (ZDC section 5.1)."""

    share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the sequences dropped, at random (ZDC: 0.5); of text within each topic: the `topic` of a line of
    *.jsonl, otherwise a file."""
    kmeans: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    """Centroids that replace queries, keys and values, of each KV head or group apart; null for the exact moments,
    which are both more accurate and cheaper."""
    seed: Seed = 0
    """Seed of which sequences are dropped, and of the first centroids."""


@dataclass(frozen=True, config=MODEL)
class Groups:
    """Groups of KV heads, and where RoPE stands in the keys that are compressed."""

    size: Size | Literal["all", "auto"] = 1
    """KV heads of a layer that share a latent, or `all` of them; `auto`: as many as have 256 numbers of keys together
    (four heads of 64, two of 128), at which attention takes least time for the loss."""
    domain: Literal["post", "pre", "block"] = "post"
    """Where keys are compressed: `post` RoPE; rotated within blocks of `rope_block` positions (`block`), where
    attention rotates queries, once a block; or `pre` RoPE, where keys are expanded and rotated when they are read. A
    model without RoPE has none of them."""
    joint: bool = False
    """Keys and values of a group have one latent, as both come from the same hidden state, and each token's row a
    scale; where that can be: codes, in bases by fisher without refit, of keys before RoPE or in blocks. Elsewhere they
    keep a latent each."""
    rope_block: RopeBlock = USUAL_ROPE_BLOCK
    """Positions of a block of domain `block`, a power of two up to 128: fewer take more arithmetic. With exact tokens
    64 takes as few bytes as less, and 128, for a tenth fewer instructions of a step on a GPU, a tenth more of the KL or
    1 to 2 % more bytes; without them (exact.newest=0) near keys are read from codes too, and on SmolLM2 16 has a sixth
    less of the KL, 4 two fifths.
    """


@dataclass(frozen=True, config=MODEL)
class Bases:
    """Methods of the bases."""

    qk: Annotated[str, OneOf(QK_METHODS)] = "svd"
    """Method for queries and keys: a name that `rotor recipes` lists."""
    vo: Annotated[str, OneOf(VO_METHODS)] = "palu"
    """Method for values and what reads them: a name that `rotor recipes` lists."""
    refit: bool = False
    """Least-squares refit of each query head's slice of W_o at the rank that it gets."""

    @property
    def methods(self) -> tuple[BasisMethod, BasisMethod]:
        """The methods registered under `qk` and `vo`."""
        return QK_METHODS[self.qk], VO_METHODS[self.vo]


@dataclass(frozen=True, config=MODEL)
class Ranks:
    """Ranks from singular values."""

    method: Annotated[str, OneOf(RANK_METHODS)] = "removal-rate"
    """Method that turns singular values into ranks: a name that `rotor recipes` lists."""
    multiple_of: Size = 16
    """Stored ranks are multiples of this; 8 keeps 16-byte alignment in bfloat16, tiles are 16 wide."""
    probe_shares: Shares = (0.35, 0.125)
    """Shares of channels kept in the probes of `global`; each layer and side is probed at each."""
    probe_tokens: Count = 4096
    """Tokens of the search split that the probes run on."""
    fisher_tokens: Count = 4096
    """Calibration tokens whose gradients `fisher` sums."""

    @property
    def rule(self) -> RankMethod:
        """The method registered under `method`."""
        return RANK_METHODS[self.method]


@dataclass(frozen=True, config=MODEL)
class Codes:
    """Bits of the channels of a latent, and the gradients that decide them."""

    bits: Annotated[
        tuple[int, ...], Expect(_are_widths, f"0 and at least one of {', '.join(map(str, sorted(WIDTHS)))}, each once")
    ] = (0, 16)
    """Widths that a channel may have; 0 drops it. [0, 16] stores numbers of the model's dtype, and `ranks` says how
    many. With 12, 8, 6, 4 or 2 among them, channels are codes: bits are allocated over all layers and sides by what
    an error in each channel costs the model's own loss, and `ranks` is not used."""
    tokens: Count = 16384
    """Calibration tokens, the first ones, whose gradients decide the bits."""
    repeats: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of their rows in which a span, of the text or of random tokens, is stated again further on: gradients of
    text alone say little of what a model looks far back by."""


@dataclass(frozen=True, config=MODEL)
class Exact:
    """Tokens whose keys and values are kept in the model's dtype beside the compressed rows of all tokens."""

    first: FirstTokens = 0
    """The first tokens of a sequence, behind padding. They may be chosen anew on export, as `newest`; of both,
    calibration takes what errors in codes cost, which only later queries read."""
    newest: Annotated[int, Field(ge=0, le=4096)] = 0
    """The newest tokens; 0 keeps none exactly, and prompts attend to compressed rows. Otherwise prompts attend to the
    keys and values that the model just made."""

    @property
    def tokens(self) -> ExactTokens | None:
        """The same as a checkpoint has it."""
        return ExactTokens(self.first, self.newest) if self.newest else None


@dataclass(frozen=True, config=MODEL)
class Evaluation:
    """Held-out text and the metric that accuracy means."""

    source: Literal["stdlib", "text"] = "stdlib"
    """`stdlib`, the default, reads modules of the running Python's standard library: source code, whatever the model is
    for; `text` reads the file or folder `path`. Its documents are dealt to three splits that share none: one for
    calibrations on the same text, one to search, one to report."""
    path: TextPaths = None
    """UTF-8 file for `text`, or a folder of them, or a list: each is a kind of text, and the smallest ratio of the
    kinds counts. `rotor calibrate --text FILE` sets it here and in `tokens`."""
    seq_len: RowLength = 2048
    """Tokens in a row of text, or the model's longest sequence if that is shorter. Rows as long as what is served show
    what is lost with distance; the report has accuracy by position."""
    search_tokens: Count = 16384
    """Tokens of the split that chooses ranks and bits."""
    report_tokens: Count = 24576
    """Tokens of the split that is measured once, for what was chosen."""
    metric: Metric = "default"
    """Meaning of accuracy. `default` is the smallest of the next-token accuracy ratio, the perplexity ratio, and
    look-up over a distance (of keys, and of random tokens to be copied)."""
    seed: Seed = 0
    """Seed of the deal to the splits, and of the prompts that metrics draw."""
    lookup_prompts: Prompts = 64
    """Look-up rows in each split."""
    lookup_keys: Items = 16
    """The most keys in a look-up row."""
    copy_prompts: Prompts = 32
    """Copying rows in each split."""
    copy_tokens: Items = 32
    """The most random tokens in a copying row."""
    filler_tokens: Annotated[int, Field(ge=1, le=1 << 20)] = 200
    """Tokens of held-out text between what is stated and what asks for it, in both, as far as seq_len has room."""
    quick: bool = False
    """Results are marked as a quick look, from few tokens; --quick sets it, and the numbers of tokens."""
    lm_eval_limit: Annotated[int, Field(ge=1, le=1 << 24)] | None = 200
    """Documents of a task of --tasks; null takes them all."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """`path` as a list."""
        return _paths(self.path)


PREDICTED_POINTS = 4
"""Points that a search by predicted losses measures, about."""


@dataclass(frozen=True, config=MODEL)
class Search:
    """Search for the point of an accuracy."""

    resolution: Share = 0.01
    """The search ends when plans that were measured are this much of compression apart, around the target."""
    tries: Annotated[int, Field(ge=0, le=100)] = 3
    """Where plans have no predicted loss: gaps above a plan that reaches the target, or plans beside it, that are tried
    before it is final."""

    def points(self, predicted: bool) -> int:
        """Points that are measured for one target, where plans lie close together and accuracy falls.

        Args:
            predicted: plans have predicted losses, by a curve through which few points are enough.
        """
        return PREDICTED_POINTS if predicted else max(1, math.ceil(math.log2(1 / self.resolution)) + 1 + self.tries)


@dataclass(frozen=True, config=MODEL)
class ObjectiveSettings:
    """The serving load for which decode time is predicted."""

    device: str = "h200"
    """A device that comes with rotor (rotor/calibration/prediction/devices.yaml)."""
    context_tokens: Annotated[int, Field(ge=1, le=1 << 32)] = 32768
    """Tokens in the cache of each sequence."""
    batch_size: Size = 8
    """Sequences decoded together."""
