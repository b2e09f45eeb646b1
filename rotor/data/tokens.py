"""Token sequences to calibrate on: random ones, rows of text and data sets, and text that the model itself writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache

from ..errors import DataError, NumericsError
from ..models.projections import longest_row
from ..models.tokenizer import check_ids
from ..numerics import first_not_finite
from ..progress import Advance, Progress
from ..recipe import Tokens
from .documents import Document, dataset_documents, read_topics
from .rows import CalibrationTokens, separator_token, spread_indices, topic_rows

SAMPLING_TOKENS = 32768
"""Tokens whose keys and values are in memory at once while the model writes; a constant, so that what is drawn does not
depend on a command's flags."""


def calibration_tokens(
    spec: Tokens,
    config: Any,
    tokenizer: Any,
    model: Any = None,
    progress: Progress | None = None,
    select: Callable[[list[Document]], list[Document]] = lambda documents: documents,
) -> CalibrationTokens:
    """Sequences to calibrate on.

    Args:
        spec: what the recipe asks for.
        select: which documents of a text may be taken; held-out ones may not.
        config: the model's transformers config (vocabulary size, longest sequence).
        tokenizer: the model's tokenizer, or None if the folder has none.
        model: the causal model itself; only the source `synthetic` runs it.
    Returns:
        At least spec.count tokens in rows of spec.seq_len, or of the model's longest sequence if that is shorter.
    Raises:
        DataError: the text or data set is missing or too short, or a package that reads it is.
        NumericsError: the model that writes the text overflows.
    """
    seq_len = longest_row(spec.seq_len, config)
    count = -(-spec.count // seq_len)
    progress = progress or Progress()
    if spec.source == "random":
        rows = random_tokens(count, seq_len, config, tokenizer, spec.seed)
    elif spec.source == "synthetic":
        with progress.task("sample", count * seq_len, "tokens") as advance:
            rows = synthetic_tokens(model, count, seq_len, config, tokenizer, spec.seed, advance)
    else:
        if spec.source == "text":
            assert spec.path is not None
            documents, what = read_topics(Path(spec.path)), f"tokens.path {spec.path}"
        else:
            with progress.task("read data set", count * seq_len, "tokens") as advance:
                documents = dataset_documents(spec, tokenizer, count * seq_len, advance)
            what = f"tokens.dataset {spec.dataset}"
        documents = select(documents)
        cut = topic_rows(documents, tokenizer, seq_len)
        check_ids(cut.rows, config.vocab_size)
        chosen = spread_indices(cut.rows, count, what)
        topics, texts = tuple(cut.topics[i] for i in chosen.tolist()), tuple(document.text for document in documents)
        return CalibrationTokens(cut.rows[chosen], topics, texts)
    return CalibrationTokens(rows, (spec.source,) * count)


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
    model: Any,
    rows: int,
    seq_len: int,
    config: Any,
    tokenizer: Any,
    seed: int,
    advance: Advance = lambda done: None,
) -> Tensor:
    """Text sampled from the model at temperature 1: [rows, seq_len], int64.

    Every second row starts with the token that text starts with, where there is one, the others with a random ordinary
    token: what attention does with such a first token, often a sink, must be in the statistics. Other special tokens
    are never drawn, so a row does not end early. transformers' `generate` would draw from the global
    generator; this draws from its own.

    Raises:
        NumericsError: the model's logits are not finite.
    Source: ZACK calibrates on sentences that the model generates from random starts.
    """
    allowed = ordinary_tokens(config, tokenizer)
    starts = random_tokens(rows, 1, config, tokenizer, seed)
    first = separator_token(tokenizer)
    if first is not None:
        starts[::2] = first
    allowed_there = allowed.to(model.device)
    generator = torch.Generator(model.device).manual_seed(seed)
    written = []
    for batch in starts.split(max(1, SAMPLING_TOKENS // seq_len)):
        last = batch.to(model.device)
        steps = [last]
        cache = StaticCache(config=model.config, max_cache_len=seq_len)  # a growing one would be copied at every step
        advance(len(batch))
        for _ in range(seq_len - 1):
            logits = model(last, past_key_values=cache, use_cache=True).logits[:, -1, allowed_there].float()
            if not torch.isfinite(logits).all():
                place = first_not_finite(model, lambda: model(torch.cat(steps, dim=1), use_cache=False))  # noqa: B023
                raise NumericsError(
                    f"the model's logits are not finite while it writes token {len(steps)} of its calibration text"
                    f"{place}.",
                    "Calibrate with --dtype float32, or on other tokens with --set tokens.source=random.",
                )
            last = allowed_there[torch.multinomial(logits.softmax(-1), 1, generator=generator)]
            steps.append(last)
            advance(len(batch))
        written.append(torch.cat(steps, dim=1).cpu())
    return torch.cat(written)
