"""Token sequences to calibrate on: random tokens, text, data sets, or text that the model itself writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import StaticCache

from ..checkpoint.layout import AttentionShape
from ..checkpoint.sizes import uncompressed_kv_bytes_per_token
from ..errors import DataError, NumericsError
from ..numerics import first_not_finite, is_finite
from ..progress import Advance, Progress
from ..recipe.sections import Evaluation, Tokens
from .documents import dataset_documents
from .hardware import fast_products
from .memory import LOGIT_COPIES
from .sequences import bounded_seq_len, even_places, evenly_spaced, prompt_start, sequences_by_document
from .splits import Unit, calibration_share, read_kinds, sequences_of_a_kind
from .tokenizer import check_ids, text_start

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from .weights import Weights

MAX_SPAN_TOKENS = 32
"""Most tokens of a span that is repeated later in a sequence."""

SPAN_REPEATS = 2
"""Number of times that a span is repeated."""

SAMPLING_TOKENS = 32768
"""Tokens in the cache at once while the model writes text. It is a constant so that the text depends on no option."""

MODEL_WRITES = -1
"""Placeholder for a token that the model samples."""


@dataclass(frozen=True)
class CalibrationTokens:
    """Sequences to calibrate on, [num_sequences, seq_len], and the documents they come from.

    topics: of each sequence the topic that it begins in; empty: they have none.
    """

    sequences: Tensor
    documents: tuple[Unit, ...] = ()
    topics: tuple[str, ...] = ()


@dataclass(frozen=True)
class WrittenText:
    """Text that a model was stopped at writing, and where what it writes is kept.

    rows: sequences that are written, [n, seq_len]; None: none. generator: state of the random generator behind them.
    keep: gets both whenever sequences are finished.
    """

    rows: Tensor | None = None
    generator: Tensor | None = None
    keep: Callable[[Tensor, Tensor], None] = lambda rows, generator: None


def calibration_tokens(
    spec: Tokens,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    weights: Weights | None = None,
    progress: Progress | None = None,
    held_out: Evaluation | None = None,
    opening: Sequence[int] = (),
    begun: WrittenText | None = None,
) -> CalibrationTokens:
    """Make the sequences that a recipe calibrates on.

    Args:
        spec: tokens section of the recipe.
        config: the model's transformers config (vocabulary size, longest sequence).
        tokenizer: the model's tokenizer, or None if the folder has none.
        weights: the model's weights; only the source `synthetic` runs the model.
        held_out: names the evaluation text, whose documents are left out.
        opening, begun: first tokens of a chat, and text that is written already; see `synthetic_tokens`.
    Returns:
        At least spec.count tokens, in sequences of spec.seq_len or of the model's longest sequence if that is shorter.
        Each begins with the tokens that the tokenizer puts before a text.
    Raises:
        DataError: the text or data set is missing or too short.
        NumericsError: the model that writes the text overflows.
    """
    seq_len = bounded_seq_len(spec.seq_len, config)
    count = -(-spec.count // seq_len)
    progress = progress or Progress()
    if spec.source == "random":
        sequences, start = (
            random_tokens(count, seq_len, config, tokenizer, spec.seed),
            text_start(tokenizer)[: seq_len - 1],
        )
        sequences[:, : len(start)] = torch.tensor(start, dtype=torch.int64)
        return CalibrationTokens(sequences)
    if spec.source == "synthetic":
        assert weights is not None
        with progress.task("sample", count * seq_len, "tokens") as advance:
            sequences = synthetic_tokens(
                weights, count, seq_len, config, tokenizer, spec.seed, advance, opening, begun or WrittenText()
            )
        return CalibrationTokens(sequences)
    if spec.source == "text":
        texts = read_kinds(spec.paths, tokenizer)
        what = "tokens.path"
    else:
        with progress.task("read data set", None, ""):
            texts = {str(spec.dataset): [(text, "") for text in dataset_documents(spec, tokenizer, count * seq_len)]}
            what = "tokens.dataset"
    if held_out is not None:
        shares = calibration_share(texts, held_out, tokenizer)
    else:
        shares = {kind: [Unit(text, name, kind) for text, name in documents] for kind, documents in texts.items()}
    chosen, topics = list[Tensor](), list[str]()
    for kind, units in shares.items():
        of_kind = sequences_of_a_kind(count * seq_len, seq_len, len(shares))
        sequences, begun_in = sequences_by_document([unit.text for unit in units], tokenizer, seq_len)
        check_ids(sequences, config.get_text_config().vocab_size)
        chosen.append(evenly_spaced(sequences, of_kind, f"{what} {kind}"))
        topics += [units[begun_in[place]].name for place in even_places(len(sequences), of_kind).tolist()]
    order = torch.arange(sum(map(len, chosen))).reshape(len(chosen), -1).T.flatten()  # one of each kind in turn
    documents = tuple(unit for units in shares.values() for unit in units)
    of_sequences = tuple(topics[place] for place in order.tolist()) if spec.source == "text" else ()
    return CalibrationTokens(torch.cat(chosen)[order], documents, of_sequences)


def ordinary_tokens(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None) -> Tensor:
    """Ids of the vocabulary without special tokens and ids unknown to the tokenizer: [n], int64, ascending."""
    config = config.get_text_config()
    special = {getattr(config, f"{kind}_token_id", None) for kind in ("bos", "eos", "pad")}
    size = config.vocab_size
    if tokenizer is not None:
        special |= set(tokenizer.all_special_ids)
        size = min(size, len(tokenizer))
    flat = {i for item in special for i in (item if isinstance(item, list) else [item])}
    return torch.tensor([i for i in range(size) if i not in flat])


def random_tokens(
    count: int, seq_len: int, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None, seed: int
) -> Tensor:
    """Draw tokens uniformly from the vocabulary without special tokens: [count, seq_len].

    Raises:
        DataError: all tokens of the vocabulary are special.
    Source: FDC section 5.1.
    """
    allowed, config = ordinary_tokens(config, tokenizer), config.get_text_config()
    if len(allowed) == 0:
        raise DataError(
            f"all {config.vocab_size} tokens of the vocabulary are special: there are none to draw from.",
            "Check that the tokenizer belongs to this model.",
        )
    generator = torch.Generator().manual_seed(seed)
    return allowed[torch.randint(len(allowed), (count, seq_len), generator=generator)]


@torch.inference_mode()
def synthetic_tokens(
    weights: Weights,
    count: int,
    seq_len: int,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    advance: Advance = lambda done: None,
    opening: Sequence[int] = (),
    begun: WrittenText = WrittenText(),
) -> Tensor:
    """Sample text from the model at temperature 1: [count, seq_len], int64; independent of where its weights are.

    Every sequence starts with the tokens that the tokenizer puts before a text. If there are none, every second one
    starts with the separator token (if the model has one), because such a first token is often an attention sink and
    must be in the statistics. The other sequences continue with a random ordinary token. Special tokens are never
    drawn there, so no sequence ends early. A chat model writes both sides of a chat in every second sequence, special
    tokens included, starting from its template's text before the user's turn. transformers' `generate` would use the
    global random generator; this function has its own.

    Args:
        opening: first tokens of a chat; empty for a model without a chat template.
        begun: what the same call wrote before it was stopped; the text is then the same as without the stop.
    Raises:
        NumericsError: the model's logits are not finite.
    Source: in place of ZACK's coherent articles, which a chat model wrote (section 4.3: 57K tokens); Magpie (Xu et al.,
        arXiv 2406.08464) has a chat model write what users ask.
    """
    model, device = weights.model, weights.device
    allowed = ordinary_tokens(config, tokenizer)
    given = torch.full((count, seq_len), MODEL_WRITES)
    begin = list(opening or prompt_start(tokenizer))[: seq_len - 1]
    start = text_start(tokenizer)[: seq_len - 1]
    given[:, : len(start)] = torch.tensor(start, dtype=torch.int64)
    given[:, len(start)] = random_tokens(count, 1, config, tokenizer, seed)[:, 0]
    if begin:
        given[::2] = MODEL_WRITES
        given[::2, : len(begin)] = torch.tensor(begin)
    drawn_from = torch.arange(min(config.get_text_config().vocab_size, len(tokenizer))) if opening else allowed
    barred = ~torch.isin(drawn_from, allowed).to(device)  # special tokens, outside chats
    allowed_there = drawn_from.to(device)
    given = given.to(device)
    even = torch.arange(count, device=device) % 2 == 0
    generator = torch.Generator(device).manual_seed(seed)
    size = max(1, SAMPLING_TOKENS // seq_len)
    written = []
    if begun.rows is not None and begun.generator is not None:
        written = list(begun.rows.split(size))
        generator.set_state(begun.generator)
        advance(begun.rows.numel())
    with weights.whole(), fast_products(device):
        for batch, chats in list(zip(given.split(size), even.split(size), strict=True))[len(written) :]:
            tokens = [batch[:, :1]]
            cache = StaticCache(config=model.config, max_cache_len=seq_len)  # a growing cache is copied at each token
            advance(len(batch))
            for index in range(1, seq_len):
                logits = model(tokens[-1], past_key_values=cache, use_cache=True).logits[:, -1, allowed_there].float()
                if not is_finite(logits):
                    where = first_not_finite(model, lambda: model(torch.cat(tokens, dim=1), use_cache=False))  # noqa: B023
                    raise NumericsError(
                        f"the model's logits are not finite while it writes token {len(tokens)} of its calibration text"
                        f"{where}.",
                        "Calibrate with --dtype float32, or on other tokens with --set tokens.source=random.",
                    )
                logits.masked_fill_(barred & ~chats[:, None], -torch.inf)
                drawn = allowed_there[torch.multinomial(logits.softmax(-1), 1, generator=generator)]
                given_here = batch[:, index : index + 1]
                tokens.append(torch.where(given_here == MODEL_WRITES, drawn, given_here))
                advance(len(batch))
            written.append(torch.cat(tokens, dim=1).cpu())
            begun.keep(torch.cat(written), generator.get_state())
    return torch.cat(written)


def writing_bytes(shape: AttentionShape, vocab_size: int, count: int, seq_len: int, element_bytes: int) -> int:
    """Memory of `synthetic_tokens`: cache and logits of the sequences that are written together."""
    sequence = uncompressed_kv_bytes_per_token(shape, element_bytes) * seq_len + 4 * LOGIT_COPIES * vocab_size
    return min(count, max(1, SAMPLING_TOKENS // seq_len)) * sequence


def with_repeats(sequences: Tensor, share: float, seed: int, vocabulary: Tensor, fixed: int = 0) -> Tensor:
    """Write a span of tokens early in a sequence and again further on, in a share of the sequences (the last ones).

    Text rarely depends on tokens far back, so its gradients say little about the channels that a model looks them up
    by. These channels would look cheap and be removed first. A repeated span can only be predicted by looking back for
    it. Every second span is copied from the text; the others are random tokens, because looked-up tokens are often
    rare.

    Args:
        sequences: [n, seq_len]. Spans of text are copied from random positions in all of them. A span is written once
            into the first quarter of a sequence and SPAN_REPEATS times into equal parts of the rest, at random
            positions. First tokens stay. Sequences that are too short for this stay as they are.
        vocabulary: [m], the tokens to draw from; if empty, all spans are copied from the text.
        fixed: number of tokens that every sequence begins with (see `text_start`); they stay, and are in no span.
    Returns:
        [n, seq_len], a new tensor.
    """
    count, seq_len = sequences.shape
    generator = torch.Generator().manual_seed(seed)

    def drawn(below: int) -> int:
        return int(torch.randint(below, (1,), generator=generator))

    repeated = sequences.clone()
    early = seq_len // 4
    part = (seq_len - early) // SPAN_REPEATS
    begin = max(1, fixed)
    span = min(MAX_SPAN_TOKENS, early - begin)
    if span < 2 or part < span:
        return repeated
    for index in range(count - round(share * count), count):
        source = drawn(count)
        start = fixed + drawn(seq_len - fixed - span + 1)
        text = sequences[source, start : start + span]
        if index % 2 and len(vocabulary):
            text = vocabulary[torch.randint(len(vocabulary), (span,), generator=generator)]
        positions = [begin + drawn(early - begin - span + 1)]
        positions += [early + time * part + drawn(part - span + 1) for time in range(SPAN_REPEATS)]
        for position in positions:
            repeated[index, position : position + span] = text
    return repeated
