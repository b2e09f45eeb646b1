"""Check and describe a command's text before any long work starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import DataError
from ..recipe.recipe import Recipe
from ..recipe.sections import Evaluation
from .documents import require_datasets, require_tokenizer
from .sequences import bounded_seq_len, text_sequences
from .splits import (
    SPLITS,
    calibration_share,
    description_of,
    digests,
    held_out_documents,
    kinds_of,
    read_kinds,
    sequences_of_a_kind,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

CHARACTERS_A_TOKEN = 4
"""Characters of a token, about, where there is no text to count them in."""

CHAT_ADVICE = (
    "the model has a chat template, and Python source is hardly what it is for: give text of your own with --text FILE "
    "or --set evaluation.source=text --set evaluation.path=FILE"
)


def check_text(recipe: Recipe, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Check that there is enough text to calibrate and to measure accuracy afterwards.

    A model without a tokenizer can be measured on no text, so only a text that the recipe names is required then.

    Args:
        config: the model's transformers config.
        tokenizer: the model's tokenizer, or None.
    Raises:
        DataError: a path, the tokenizer or a package is missing, or there are too few tokens. The message lists for
            each split how many there are and how many are needed.
    """
    tokens, evaluation = recipe.tokens, recipe.evaluation
    if tokens.source in ("text", "dataset") or evaluation.source == "text":
        require_tokenizer(tokenizer)
    if tokens.source == "dataset":
        require_datasets(tokens)
    if tokenizer is None:
        return

    short: dict[str, int] = {}  # available tokens, by the setting that asks for more
    shortages = []
    enough = 0  # characters of a text whose thirds are long enough

    def need(what: str, field: str, documents: list[str], count: int, seq_len: int, kinds: int) -> None:
        length = bounded_seq_len(seq_len, config)
        needed = sequences_of_a_kind(count, length, kinds)
        available = len(text_sequences(documents, tokenizer, length, needed))
        if available < needed:
            nonlocal enough
            characters = sum(map(len, documents)) / max(1, len(text_sequences(documents, tokenizer, 2)) * 2)
            enough = max(enough, round(3 * needed * length * (characters or CHARACTERS_A_TOKEN)))
            short[field] = min(short.get(field, count), available * length * kinds)
            shortages.append(f"{what} has {available * length} of {needed * length} tokens")

    calibrated = list[str]()
    if tokens.source == "text":
        shares = calibration_share(read_kinds(tokens.paths, tokenizer), evaluation, tokenizer)
        for kind, units in shares.items():
            documents = [unit.text for unit in units]
            calibrated += digests(documents) if evaluation.source == "text" else []
            what = f"calibration on {kind}" if len(shares) > 1 else "calibration"
            need(what, "tokens.count", documents, tokens.count, tokens.seq_len, len(shares))
    held_out = held_out_documents(evaluation, calibrated, tokenizer)
    for split in SPLITS:
        field = f"{split}_tokens"
        for kind in held_out.kinds:
            what = f"the {split} split{f' of {kind}' if len(held_out.kinds) > 1 else ''}"
            documents, count = held_out.texts(split, kind), getattr(evaluation, field)
            need(what, f"evaluation.{field}", documents, count, evaluation.seq_len, len(held_out.kinds))
    if short:
        fitting = " ".join(f"--set {field}={available}" for field, available in short.items())
        hint = f"Give a longer text, about {enough:,} characters, or ask for what there is: {fitting}"
        if 0 in short.values():
            hint = (
                f"Give a longer text, about {enough:,} characters: a third of it is calibrated on, a third searches, a "
                "third reports."
            )
        texts = [str(path) for path in tokens.paths] if tokens.source == "text" else []
        python = ["the Python standard library's source"]
        texts += [str(path) for path in evaluation.paths] if evaluation.source == "text" else python
        names = " and ".join(dict.fromkeys(texts))
        raise DataError(f"text {names}: too short: {', '.join(shortages)}.", hint)


def describe_text(recipe: Recipe, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Describe in one line the text that is calibrated on and the text that accuracy is measured on."""
    tokens = recipe.tokens
    source = {
        "random": "random tokens",
        "synthetic": "text that the model writes",
        "text": f"your text in {' and '.join(kinds_of(tokens.paths))}",
        "dataset": f"data set {tokens.dataset}",
    }[tokens.source]
    measured = describe_evaluation(recipe.evaluation, tokenizer)
    return f"text: calibrates on {tokens.count} tokens of {source}; {measured}"


def describe_evaluation(spec: Evaluation, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Describe the text that accuracy is measured on, with a warning if a chat model is measured on source code."""
    if tokenizer is None:
        return (
            "accuracy cannot be measured, as the model has no tokenizer to read text with: add tokenizer.json first, "
            "or export the run with --compression"
        )
    line = f"accuracy is measured on {description_of(spec)}"
    if spec.source == "stdlib" and getattr(tokenizer, "chat_template", None):
        return f"{line}; {CHAT_ADVICE}"
    return line
