"""Sections of a recipe: what each decides, with its fields and their defaults.

The docstrings are the reference of a recipe's fields (`rotor recipes --fields`): one entry a field, under its name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..allocation.registry import RANK_METHODS, RankMethod
from ..bases.registry import QK_METHODS, VO_METHODS, BasisMethod
from ..format.layout import MOST_ROPE_BLOCK


@dataclass(frozen=True)
class Tokens:
    """Calibration tokens.

    source: `random` draws uniformly from the vocabulary without its special tokens (FDC section 5.1: at least 8K);
        `synthetic` samples text from the model itself, from random starts (ZACK: at least 16K);
        `text` reads the file or folder `path`;
        `dataset` reads `column` of a `split` of `dataset`.
    path: of `text`: a UTF-8 file, or a folder of them; `rotor calibrate --text FILE` sets it here and in `evaluation`.
    dataset: of `dataset`: a name on the hub (NAME or NAME:CONFIG), or a local folder.
    split: of the data set.
    column: of the data set, with the text.
    count: tokens in all.
    seq_len: tokens in a row, or the model's longest sequence if that is shorter.
    seed: of what is drawn: random tokens, the text that the model writes, the order of a data set.
    """

    source: Literal["random", "synthetic", "text", "dataset"] = "random"
    path: str | None = None
    dataset: str | None = None
    split: str = "train"
    column: str = "text"
    count: int = 8192
    seq_len: int = 512
    seed: int = 0


@dataclass(frozen=True)
class Groups:
    """Groups of KV heads, and where RoPE stands in the keys that are compressed.

    size: KV heads of a layer that share a latent, or `all` of them; `auto` takes as many as make attention no slower
        than the uncompressed model's, as predicted for `objective`; `any` leaves it to the ranks' method `global`, or
        to bits of codes, to choose for each layer among all divisors.
    domain: where keys are compressed: `post` RoPE, where nothing is rebuilt, or `pre`, where attention rebuilds them;
        `any` leaves it to the ranks likewise; `block`: the slow rotary planes rotated within blocks of `rope_block`
        positions, where attention rotates queries, once a block, and `fast_planes` before RoPE, which attention
        rebuilds. A model without RoPE has none of them.
    joint: keys and values share one latent, kept once, as both come from the same hidden state; where that can be:
        codes, in bases by fisher without refit, of keys before RoPE or in blocks. Elsewhere they keep two latents.
    rope_block: positions of a block of domain `block`, a power of two from 2 to 64: fewer take fewer bytes at equal
        accuracy, more take less arithmetic.
    fast_planes: rotary planes of a head, the fastest, that domain `block` stores before RoPE: more take fewer bytes at
        equal accuracy, fewer less arithmetic. `quarter`: those that turn by a quarter turn or more within a block;
        `all`: as domain `pre`; `auto` leaves it to bits of codes, or to the ranks' method `global`, to choose for each
        layer among 0, 8, 16 and so on: by bytes alone that is `all`, so that it wants an objective of latency.
    """

    size: int | Literal["all", "auto", "any"] = 1
    domain: Literal["post", "pre", "block", "any"] = "post"
    joint: bool = False
    rope_block: int = MOST_ROPE_BLOCK
    fast_planes: int | Literal["quarter", "all", "auto"] = "quarter"

    @property
    def left_open(self) -> bool:
        """Whether the ranks choose among several candidates of a layer."""
        in_blocks = self.domain == "block" and self.fast_planes == "auto"
        return "any" in (self.size, self.domain) or in_blocks


@dataclass(frozen=True)
class Bases:
    """Methods of the bases.

    qk: of queries and keys: a name in rotor.bases (`rotor recipes` lists them).
    vo: of values and what reads them, likewise.
    refit: least-squares refit of each query head's slice of W_o at the rank that it gets.
    """

    qk: str = "svd"
    vo: str = "palu"
    refit: bool = False

    @property
    def methods(self) -> tuple[BasisMethod, BasisMethod]:
        """The methods registered under `qk` and `vo`."""
        return QK_METHODS[self.qk], VO_METHODS[self.vo]


@dataclass(frozen=True)
class Ranks:
    """Ranks from singular values.

    method: a name in rotor.allocation (`rotor recipes` lists them).
    spectrum: whether the removal rate is a share of the sum of singular values (the papers) or of their squares.
    multiple_of: stored ranks are multiples of this; 8 keeps 16-byte alignment in bfloat16, tiles are 16 wide.
    rows: `ragged` gives each layer as many bytes a token as pay there; `uniform` gives all layers as many, at the least
        loss, for engines that pad rows to the widest (see docs/serving.md). Bits of codes heed it too.
    probe_shares: shares of columns kept in the probes of `global`; each layer and side is probed at each.
    probe_tokens: tokens of the search split that the probes run on.
    fisher_tokens: calibration tokens whose gradients `fisher` sums.
    """

    method: str = "removal-rate"
    spectrum: Literal["values", "squares"] = "values"
    multiple_of: int = 16
    rows: Literal["ragged", "uniform"] = "ragged"
    probe_shares: tuple[float, ...] = (0.35, 0.125)
    probe_tokens: int = 4096
    fisher_tokens: int = 4096

    @property
    def uniform_rows(self) -> bool:
        """Whether all layers store rows of one width."""
        return self.rows == "uniform"

    @property
    def rule(self) -> RankMethod:
        """The method registered under `method`."""
        return RANK_METHODS[self.method]


@dataclass(frozen=True)
class Codes:
    """Bits of the channels of a latent, and what they are allocated by.

    bits: widths that a channel may have; 0 drops it. [0, 16] stores numbers of the model's dtype, and `ranks` says how
        many. With 12, 8 or 4 among them, channels are codes: bits are allocated over all layers, sides and candidates
        by what an error in each channel costs the model's own loss, and of `ranks` only `rows` is used.
    tokens: calibration tokens, the first ones, whose gradients say that.
    repeats: share of their rows in which a span, of the text or of random tokens, is stated again further on:
        gradients of text alone say little of what a model looks far back by.
    """

    bits: tuple[int, ...] = (0, 16)
    tokens: int = 16384
    repeats: float = 0.5


@dataclass(frozen=True)
class Evaluation:
    """Held-out text and the metric that accuracy means.

    source: `stdlib`, the default, reads modules of the running Python's standard library: source code, whatever the
        model is for; `text` reads the file or folder `path`. Its documents are dealt to three splits that share none:
        one for calibrations on the same text, one to search, one to report.
    path: of `text`: a UTF-8 file, or a folder of them; `rotor calibrate --text FILE` sets it here and in `tokens`.
    seq_len: tokens in a row.
    search_tokens: of the split that chooses ranks.
    report_tokens: of the split that is measured once, for what was chosen.
    metric: what accuracy means, `lm-eval:TASK` for a task of the lm-eval package. `default` is the smallest of the
        next-token accuracy ratio, the perplexity ratio, and look-up over a distance (of keys, and of random tokens to
        be copied).
    seed: of the deal to the splits, and of the prompts that metrics draw.
    lookup_prompts: look-up rows in each split.
    lookup_keys: the most keys in a look-up row.
    copy_prompts: copying rows in each split.
    copy_tokens: the most random tokens in a copying row.
    filler_tokens: held-out text between what is stated and what asks for it, in both, as far as seq_len has room.
    lm_eval_limit: documents of the task in each split; null takes half of them all.
    """

    source: Literal["stdlib", "text"] = "stdlib"
    path: str | None = None
    seq_len: int = 512
    search_tokens: int = 16384
    report_tokens: int = 24576
    metric: str = "default"
    seed: int = 0
    lookup_prompts: int = 64
    lookup_keys: int = 16
    copy_prompts: int = 32
    copy_tokens: int = 32
    filler_tokens: int = 200
    lm_eval_limit: int | None = 200


@dataclass(frozen=True)
class Search:
    """How the point of an accuracy is searched.

    resolution: bisection ends when what reaches the target and what does not are this much of compression apart.
    """

    resolution: float = 0.01


@dataclass(frozen=True)
class CacheSettings:
    """Ratios per token, chosen by measurement on export (ZDC section 5.2). They become the checkpoint's cache policy.

    tiers: the largest loss of quality that they may cost, (perplexity' - perplexity) / perplexity on the search split,
        against the same checkpoint without them (ZDC: 0.1); null for none.
    tiers_repeats: a layer goes by an earlier layer's important tokens where more than this share of these, and of the
        unimportant ones, are its own as well (ZDC: 0.95).
    tiers_tokens: tokens of the search split that they are measured on.
    """

    tiers: float | None = None
    tiers_repeats: float = 0.95
    tiers_tokens: int = 4096


@dataclass(frozen=True)
class ObjectiveSettings:
    """Cost of a rank when ranks are chosen, and the serving load for which decode time is predicted.

    kind: `memory` (bytes of cache), `latency` (predicted attention time of a decode step), or a number between 0
        (memory) and 1 (latency) that weighs the two.
    device: a device that comes with rotor (rotor/prediction/devices.yaml), or one of `device_file`.
    device_file: a YAML file of further devices.
    context_tokens: tokens in the cache of each sequence.
    batch_size: sequences decoded together.
    """

    kind: Literal["memory", "latency"] | float = "memory"
    device: str = "h200"
    device_file: str | None = None
    context_tokens: int = 32768
    batch_size: int = 8

    @property
    def weight(self) -> float:
        """`kind` as a number."""
        return {"memory": 0.0, "latency": 1.0}[self.kind] if isinstance(self.kind, str) else self.kind
