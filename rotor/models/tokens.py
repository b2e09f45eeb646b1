"""Token sequences to calibrate on: random ones, rows of text and data sets, and text that the model itself writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache

from ..errors import DataError, NumericsError
from ..numerics import first_not_finite
from ..progress import Advance, Progress
from ..recipe import Evaluation, Tokens
from .documents import dataset_documents, read_documents
from .memory import SAMPLING_TOKENS
from .projections import longest_row
from .sequences import evenly_spaced, prompt_start, text_rows
from .splits import calibration_share
from .tokenizer import check_ids, text_start
from .weights import Weights

SPAN, TIMES = 32, 2
"""Tokens that are stated again in some rows, and how often."""


FREE = -1
"""In rows that the model writes: a token that it draws."""


@dataclass(frozen=True)
class CalibrationTokens:
    """Rows of tokens to calibrate on, [num_rows, seq_len], and the texts that they come from."""

    rows: Tensor
    documents: tuple[str, ...] = ()


def calibration_tokens(
    spec: Tokens,
    config: Any,
    tokenizer: Any,
    weights: Weights | None = None,
    progress: Progress | None = None,
    held_out: Evaluation | None = None,
    opening: Sequence[int] = (),
) -> CalibrationTokens:
    """Sequences to calibrate on.

    Args:
        spec: what the recipe asks for.
        config: the model's transformers config (vocabulary size, longest sequence).
        tokenizer: the model's tokenizer, or None if the folder has none.
        weights: of the model; only the source `synthetic` runs it.
        held_out: names the text whose documents may not be taken.
        opening: of a chat, see `synthetic_tokens`.
    Returns:
        At least spec.count tokens in rows of spec.seq_len, or of the model's longest sequence if that is shorter. Each
        begins with what the tokenizer puts before a text, if that is anything.
    Raises:
        DataError: the text or data set is missing or too short.
        NumericsError: the model that writes the text overflows.
    """
    seq_len = longest_row(spec.seq_len, config)
    count = -(-spec.count // seq_len)
    progress = progress or Progress()
    if spec.source == "random":
        rows, start = random_tokens(count, seq_len, config, tokenizer, spec.seed), text_start(tokenizer)[: seq_len - 1]
        rows[:, : len(start)] = torch.tensor(start, dtype=torch.int64)
        return CalibrationTokens(rows)
    if spec.source == "synthetic":
        assert weights is not None
        with progress.task("sample", count * seq_len, "tokens") as advance:
            rows = synthetic_tokens(weights, count, seq_len, config, tokenizer, spec.seed, advance, opening)
        return CalibrationTokens(rows)
    if spec.source == "text":
        documents, what = read_documents(Path(spec.path or "")), f"tokens.path {spec.path}"
    else:
        with progress.task("read data set", None, ""):
            documents, what = dataset_documents(spec, tokenizer, count * seq_len), f"tokens.dataset {spec.dataset}"
    if held_out is not None:
        documents = calibration_share(documents, held_out)
    rows = text_rows(documents, tokenizer, seq_len)
    check_ids(rows, config.vocab_size)
    return CalibrationTokens(evenly_spaced(rows, count, what), tuple(documents))


def ordinary_tokens(config: Any, tokenizer: Any) -> Tensor:
    """Ids of the vocabulary without special tokens, and without those beyond the tokenizer's: [n], int64, ascending."""
    special = {getattr(config, f"{kind}_token_id", None) for kind in ("bos", "eos", "pad")}
    size = config.vocab_size
    if tokenizer is not None:
        special |= set(tokenizer.all_special_ids)
        size = min(size, len(tokenizer))
    flat = {i for item in special for i in (item if isinstance(item, list) else [item])}
    return torch.tensor([i for i in range(size) if i not in flat])


def random_tokens(rows: int, seq_len: int, config: Any, tokenizer: Any, seed: int) -> Tensor:
    """Uniform draws from the vocabulary without special tokens: [rows, seq_len]; raises DataError if it has no others.

    Source: FDC section 5.1.
    """
    allowed = ordinary_tokens(config, tokenizer)
    if len(allowed) == 0:
        raise DataError(
            f"all {config.vocab_size} tokens of the vocabulary are special: there are none to draw from.",
            "Check that the tokenizer belongs to this model.",
        )
    generator = torch.Generator().manual_seed(seed)
    return allowed[torch.randint(len(allowed), (rows, seq_len), generator=generator)]


@torch.inference_mode()
def synthetic_tokens(
    weights: Weights,
    rows: int,
    seq_len: int,
    config: Any,
    tokenizer: Any,
    seed: int,
    advance: Advance = lambda done: None,
    opening: Sequence[int] = (),
) -> Tensor:
    """Text sampled from the model at temperature 1: [rows, seq_len], int64; the same wherever its weights are.

    Every row starts with what the tokenizer puts before a text. Where that is nothing, every second one starts with the
    separator token, if there is one: what attention does with such a first token, often a sink, must be in the
    statistics. The other rows go on with a random ordinary token. Other special tokens are never drawn, so a row does
    not end early. A model that chats writes both sides of a chat in every second row, with its special tokens, from
    what its template has before a user speaks. transformers' `generate` would draw from the global generator; this
    draws from its own.

    Args:
        opening: the tokens that such a chat begins with; none of a model that does not chat.
    Raises:
        NumericsError: the model's logits are not finite.
    Source: ZACK calibrates on sentences that the model generates from random starts; Magpie (Xu et al., arXiv
        2406.08464) has a chat model write what users ask.
    """
    model, device = weights.model, weights.device
    allowed = ordinary_tokens(config, tokenizer)
    given = torch.full((rows, seq_len), FREE)
    begin, start = [list(part)[: seq_len - 1] for part in (opening or prompt_start(tokenizer), text_start(tokenizer))]
    given[:, : len(start)] = torch.tensor(start, dtype=torch.int64)
    given[:, len(start)] = random_tokens(rows, 1, config, tokenizer, seed)[:, 0]
    if begin:
        given[::2] = FREE
        given[::2, : len(begin)] = torch.tensor(begin)
    drawn_from = torch.arange(min(config.vocab_size, len(tokenizer))) if opening else allowed
    barred = ~torch.isin(drawn_from, allowed).to(device)  # in rows that are no chat
    allowed_there, given = drawn_from.to(device), given.to(device)
    even = torch.arange(rows, device=device) % 2 == 0
    generator = torch.Generator(device).manual_seed(seed)
    written = []
    with weights.whole():
        size = max(1, SAMPLING_TOKENS // seq_len)
        for batch, chats in zip(given.split(size), even.split(size), strict=True):
            steps = [batch[:, :1]]
            cache = StaticCache(config=model.config, max_cache_len=seq_len)  # a growing one would be copied each step
            advance(len(batch))
            for index in range(1, seq_len):
                logits = model(steps[-1], past_key_values=cache, use_cache=True).logits[:, -1, allowed_there].float()
                if not torch.isfinite(logits).all():
                    place = first_not_finite(model, lambda: model(torch.cat(steps, dim=1), use_cache=False))  # noqa: B023
                    raise NumericsError(
                        f"the model's logits are not finite while it writes token {len(steps)} of its calibration text"
                        f"{place}.",
                        "Calibrate with --dtype float32, or on other tokens with --set tokens.source=random.",
                    )
                logits.masked_fill_(barred & ~chats[:, None], -torch.inf)
                drawn = allowed_there[torch.multinomial(logits.softmax(-1), 1, generator=generator)]
                steps.append(torch.where(batch[:, index : index + 1] == FREE, drawn, batch[:, index : index + 1]))
                advance(len(batch))
            written.append(torch.cat(steps, dim=1).cpu())
    return torch.cat(written)


def with_repeats(rows: Tensor, share: float, seed: int, vocabulary: Tensor, fixed: int = 0) -> Tensor:
    """State a span early in a row, and again further on, in a share of the rows, the last ones.

    Text seldom asks for what stands far back, so that its gradients say little of the channels by which a model finds
    it: those look cheap, and go first. A span that is repeated is predicted by looking back for it. Every second span
    is of the text; the others are tokens drawn at random, as what is looked up is often rare.

    Args:
        rows: [n, seq_len]. Spans of text come from places drawn in all rows; one is written over the first quarter of
            a row and, TIMES times, over equal parts of the rest, at drawn places. First tokens of rows stay. Rows that
            are too short for it stay as they are.
        vocabulary: [m], the tokens to draw from; with none all spans are of the text.
        fixed: tokens that every row begins with (see `text_start`); they stay, and are in no span.
    Returns:
        [n, seq_len], new.
    """
    count, seq_len = rows.shape
    generator = torch.Generator().manual_seed(seed)

    def drawn(below: int) -> int:
        return int(torch.randint(below, (1,), generator=generator))

    found, early, part = rows.clone(), seq_len // 4, (seq_len - seq_len // 4) // TIMES
    begin = max(1, fixed)
    span = min(SPAN, early - begin)
    if span < 2 or part < span:
        return found
    for row in range(count - round(share * count), count):
        source, start = drawn(count), fixed + drawn(seq_len - fixed - span + 1)
        text = rows[source, start : start + span]
        if row % 2 and len(vocabulary):
            text = vocabulary[torch.randint(len(vocabulary), (span,), generator=generator)]
        places = [begin + drawn(early - begin - span + 1)]
        places += [early + time * part + drawn(part - span + 1) for time in range(TIMES)]
        for place in places:
            found[row, place : place + span] = text
    return found
