"""Prompts of `lookup` and `copy`: read something from the start of a row across text, which compressed keys lose first.

A look-up row states keys with two-digit values as a dict literal, goes on with held-out text, and ends by asking for
each of them once, in another order, as assertions about the dict. A copying row states a run of random tokens twice,
goes on with held-out text, and repeats it. The answers stand in the row (teacher forcing), so that one forward pass
scores all. The text between has `evaluation.filler_tokens` tokens, as far as rows of `evaluation.seq_len` have room.

The mean probability of the right answers is compared, not the share of right first choices: it is the less noisy of
the two (artifacts/NOTES.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...errors import DataError
from ...models.sequences import prompt_start
from ...models.tokens import ordinary_tokens
from ...recipe.sections import Evaluation

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from ...models.splits import EvaluationData

SHARE = 3
"""A row has this many parts: at most one states, at most one asks, and text between them fills at least one."""

COMMON = 256
"""Number of the text's commonest tokens that runs to copy are drawn from: small models copy rare ones badly."""

STATEMENTS = 2
"""Times that a run is stated before it is to be copied, so that the model can tell that it repeats."""

KEY_TOKENS = 19
"""Tokens that state a key of a look-up and ask for it, about."""

DICT_NAMES = ("table", "config", "index", "codes")


@dataclass(frozen=True)
class EvaluationContext:
    """The text, the settings and the model's tokenizer and config by which accuracy is measured.

    spec: settings. rows: the text of each split, [rows, seq_len]. tokenizer: the model's, or None. config: its
    transformers config. filler: of each split the text that prompts take what stands between question and answer from,
    [tokens]; by default its rows. kinds: of each split the name of the text that each row is of, where there are
    several.
    """

    spec: Evaluation
    rows: dict[str, Tensor]
    tokenizer: PreTrainedTokenizerBase | None
    config: PretrainedConfig
    filler: Mapping[str, Tensor] = field(default_factory=dict)
    kinds: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        spec: Evaluation,
        data: EvaluationData,
        tokenizer: PreTrainedTokenizerBase | None,
        config: PretrainedConfig,
    ) -> EvaluationContext:
        """The context of measurements on held-out text."""
        splits = data.splits
        return cls(
            spec,
            {split: text.sequences for split, text in splits.items()},
            tokenizer,
            config,
            {split: text.filler for split, text in splits.items()},
            {split: text.kinds for split, text in splits.items()},
        )

    def start(self) -> list[int]:
        """Tokens that a row of prompts begins with."""
        return prompt_start(self.tokenizer)

    def ordinary_text(self, split: str) -> Tensor:
        """Text of the split [tokens] without what separates documents: a model may forget what is before it."""
        text = self.filler.get(split, self.rows[split].flatten())
        return text[torch.isin(text, ordinary_tokens(self.config, self.tokenizer))]


@dataclass(frozen=True)
class Prompts:
    """Rows of tokens, [prompts, seq_len] int64.

    answers: the same shape, true at the tokens that are scored. filler_tokens: of other text in between, at least.
    """

    rows: Tensor
    answers: Tensor
    filler_tokens: int


def make_prompts(name: str, context: EvaluationContext, split: str) -> Prompts:
    """The rows of `lookup` or `copy` on a split, drawn with the split's own seed.

    Raises:
        DataError: they cannot be made.
    """
    generator = torch.Generator().manual_seed(2 * context.spec.seed + (split == "report"))
    return PROMPTS[name](context, split, generator)


def prompt_tokens(spec: Evaluation, names: Sequence[str]) -> int:
    """About the tokens of the prompts that metrics of these names need."""
    sizes = {
        "lookup": (spec.lookup_prompts, KEY_TOKENS * spec.lookup_keys),
        "copy": (spec.copy_prompts, (STATEMENTS + 1) * spec.copy_tokens),  # stated, and asked for
    }
    asked = [sizes[name] for name in sizes if name in names]
    return sum(count * min(spec.seq_len, spec.filler_tokens + tokens) for count, tokens in asked)


def lookup_prompts(context: EvaluationContext, split: str, generator: torch.Generator) -> Prompts:
    """Raises DataError: no tokenizer that tells which characters a token is, or rows too short for two keys."""
    spec, tokenizer = context.spec, context.tokenizer
    if tokenizer is None or not tokenizer.is_fast:
        missing = "the model's folder has none" if tokenizer is None else "the model's is of the slow kind"
        raise DataError(
            f"lookup needs a tokenizer with character offsets, and {missing}.",
            "Add tokenizer.json to the model's folder, or choose --set evaluation.metric=text.",
        )
    words = key_words(tokenizer, spec.lookup_keys)
    text = context.ordinary_text(split)
    room, start = context.rows[split].shape[1], context.start()
    parts = [_parts(context, words, room // SHARE, generator) for _ in range(spec.lookup_prompts)]
    longest = max(len(start) + len(stated) + len(asked) for stated, asked, _ in parts)
    length = min(room, longest + spec.filler_tokens)
    rows = []
    answers = []
    for index, (stated, asked, inside) in enumerate(parts):
        begin = start + stated
        middle = _filler(text, index / len(parts), length - len(begin) - len(asked))
        rows.append(begin + middle + asked)
        answers.append([False] * (length - len(asked)) + inside)
    return Prompts(torch.tensor(rows), torch.tensor(answers), length - longest)


def _parts(
    context: EvaluationContext, words: list[str], budget: int, generator: torch.Generator
) -> tuple[list[int], list[int], list[bool]]:
    """Tokens that state as many keys as fit, tokens that ask for them, and which of the latter are answers."""

    assert context.tokenizer is not None
    tokenizer = context.tokenizer

    def encode(text: str) -> Any:
        return tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)

    keys = lookup_keys(words, context.spec.lookup_keys, generator)
    name = DICT_NAMES[int(torch.randint(len(DICT_NAMES), (1,), generator=generator))]
    order = torch.randperm(len(keys), generator=generator).tolist()
    for count in range(len(keys), 1, -1):
        text, question, spans = lookup_text(keys[:count], [i for i in order if i < count], name)
        stated, asked = encode(text)["input_ids"], encode(question)
        if max(len(stated) + 1, len(asked["input_ids"])) <= budget:
            inside = [any(a < end and begin < b for begin, end in spans) for a, b in asked["offset_mapping"]]
            return stated, asked["input_ids"], inside
    raise DataError(
        f"lookup: rows of {SHARE * budget} tokens are too short to state two keys and ask for them.",
        "Raise evaluation.seq_len, or choose --set evaluation.metric=text.",
    )


def copy_prompts(context: EvaluationContext, split: str, generator: torch.Generator) -> Prompts:
    """Random tokens repeated, drawn from the commonest of the text.

    The first token of the repetition is not scored: nothing before it says what comes.

    Raises:
        DataError: rows too short for a run of two tokens.
    """
    spec, room = context.spec, context.rows[split].shape[1]
    start, text = context.start(), context.ordinary_text(split)
    counts = torch.bincount(text)
    common = counts.argsort(descending=True, stable=True)[: min(COMMON, int(counts.count_nonzero()))]
    count = min(spec.copy_tokens, (room // SHARE - len(start)) // STATEMENTS, len(common))
    if count < 2:
        raise DataError(f"copy: rows of {room} tokens are too short.", "Raise evaluation.seq_len.")
    filler_tokens = min(spec.filler_tokens, room - len(start) - (STATEMENTS + 1) * count)
    rows = []
    for index in range(spec.copy_prompts):
        run = common[torch.randperm(len(common), generator=generator)[:count]].tolist()
        middle = _filler(text, index / spec.copy_prompts, filler_tokens)
        rows.append(start + STATEMENTS * run + middle + run)
    answers = torch.zeros(len(rows), len(rows[0]), dtype=torch.bool)
    answers[:, 1 - count :] = True
    return Prompts(torch.tensor(rows), answers, filler_tokens)


PROMPTS: dict[str, Callable[[EvaluationContext, str, torch.Generator], Prompts]] = {
    "lookup": lookup_prompts,
    "copy": copy_prompts,
}


def _filler(text: Tensor, place: float, length: int) -> list[int]:
    """Tokens of the text from a place on, a share of its length: prompts at even distances have other documents."""
    if not len(text):
        return []
    places = torch.arange(length) + int(place * len(text))
    return text[places % len(text)].tolist()


def lookup_keys(words: list[str], count: int, generator: torch.Generator) -> list[tuple[str, str]]:
    """Distinct keys with two-digit values."""
    chosen = torch.randperm(len(words), generator=generator)[:count].tolist()
    values = torch.randint(10, 100, (count,), generator=generator).tolist()
    return [(words[i], str(value)) for i, value in zip(chosen, values, strict=False)]


def lookup_text(keys: list[tuple[str, str]], order: list[int], name: str) -> tuple[str, str, list[tuple[int, int]]]:
    """Text that states the keys of a dict, text that asks for them in this order, and where its answers are."""
    lines = "".join(f'    "{key}": {value},\n' for key, value in keys)
    text = "\n"
    spans = []
    for index in order:
        key, value = keys[index]
        text += f'assert {name}["{key}"] == '
        spans.append((len(text), len(text) + len(value)))
        text += value + "\n"
    return f"{name} = {{\n{lines}}}\n", text, spans


def key_words(tokenizer: PreTrainedTokenizerBase, count: int) -> list[str]:
    """Lower-case words of 3 to 9 letters that are single tokens; at least `count` of them."""
    words = sorted(w for w in tokenizer.get_vocab() if w.isascii() and w.isalpha() and w.islower() and 3 <= len(w) <= 9)
    if len(words) < count:
        raise DataError(
            f"lookup: {count} keys asked for, {len(words)} words to be had.", "Set a smaller evaluation.lookup_keys."
        )
    return words
