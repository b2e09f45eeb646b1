"""What is known of a command's text before any long work: whether there is enough of it, and what it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import DataError
from ..recipe import Evaluation, Recipe
from .documents import read_documents, require_datasets, require_tokenizer
from .projections import longest_row
from .sequences import text_rows
from .splits import SPLITS, calibration_share, description_of, digests, held_out_documents

CHAT_ADVICE = (
    "the model has a chat template, and Python source is hardly what it is for: give text of your own with --text FILE "
    "or --set evaluation.source=text --set evaluation.path=FILE"
)


def check_text(recipe: Recipe, config: Any, tokenizer: Any) -> None:
    """Read the text that a calibration and what is measured of it afterwards need, as far as there is enough of it.

    Where the model has no tokenizer, only a text that the recipe names is asked for: nothing is measured then.

    Args:
        config: the model's transformers config. tokenizer: the model's, or None.
    Raises:
        DataError: a path, the tokenizer or a package is missing, or there are too few tokens; says of each split how
            many there are and how many are needed.
    """
    tokens, evaluation = recipe.tokens, recipe.evaluation
    if tokens.source in ("text", "dataset") or evaluation.source == "text":
        require_tokenizer(tokenizer)
    if tokens.source == "dataset":
        require_datasets(tokens)
    if tokenizer is None:
        return

    short: dict[str, int] = {}  # settings, and the tokens that there are
    said = []

    def need(what: str, field: str, documents: list[str], count: int, seq_len: int) -> None:
        length = longest_row(seq_len, config)
        needed = -(-count // length)
        found = len(text_rows(documents, tokenizer, length, needed))
        if found < needed:
            short[field] = found * length
            said.append(f"{what} has {found * length} of {needed * length} tokens")

    calibrated = list[str]()
    if tokens.source == "text":
        own = calibration_share(read_documents(Path(tokens.path or "")), evaluation)
        calibrated = digests(own) if evaluation.source == "text" else []
        need("calibration", "tokens.count", own, tokens.count, tokens.seq_len)
    held_out = held_out_documents(evaluation, calibrated)
    for split in SPLITS:
        field = f"{split}_tokens"
        documents, count = getattr(held_out, split), getattr(evaluation, field)
        need(f"the {split} split", f"evaluation.{field}", documents, count, evaluation.seq_len)
    if short:
        fitting = " ".join(f"--set {field}={found}" for field, found in short.items())
        hint = f"Give a longer text, or ask for what there is: {fitting}"
        if 0 in short.values():
            hint = "Give a longer text: a third of it is calibrated on, a third searches, a third reports."
        texts = [tokens.path] if tokens.source == "text" else []
        texts += [evaluation.path if evaluation.source == "text" else "the Python standard library's source"]
        names = " and ".join(dict.fromkeys(map(str, texts)))
        raise DataError(f"text {names}: too short: {', '.join(said)}.", hint)


def describe_text(recipe: Recipe, tokenizer: Any) -> str:
    """One line: the text that is calibrated on and the text that accuracy is measured on."""
    tokens = recipe.tokens
    source = {
        "random": "random tokens",
        "synthetic": "text that the model writes",
        "text": f"text {Path(tokens.path or '').name}",
        "dataset": f"data set {tokens.dataset}",
    }[tokens.source]
    measured = describe_evaluation(recipe.evaluation, tokenizer)
    return f"text: calibrates on {tokens.count} tokens of {source}; {measured}"


def describe_evaluation(spec: Evaluation, tokenizer: Any) -> str:
    """What accuracy is measured on; a warning where that of a chat model would be measured on source code."""
    if tokenizer is None:
        return "accuracy cannot be measured, as the model has no tokenizer to read text with"
    line = f"accuracy is measured on {description_of(spec)}"
    if spec.source == "stdlib" and getattr(tokenizer, "chat_template", None):
        return f"{line}; {CHAT_ADVICE}"
    return line
