"""What is known of a command's text before any long work: whether there is enough of it, and what it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from ..errors import DataError
from ..models.projections import longest_row
from ..recipe import Evaluation, Recipe
from .documents import read_topics, require_datasets, require_tokenizer
from .rows import rows_in
from .splits import SPLITS, calibration_share, description_of, digests, held_out_documents

CHAT_ADVICE = (
    "the model has a chat template, and Python source is hardly what it is for: give text of your own with --text FILE "
    "or --set evaluation.source=text --set evaluation.path=FILE"
)


class _Rows(NamedTuple):
    """Rows that there are of a text, and how many a field of the recipe asks for."""

    what: str
    field: str
    found: int
    needed: int
    seq_len: int


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

    def rows(what: str, field: str, documents: list[str], count: int, seq_len: int) -> _Rows:
        length = longest_row(seq_len, config)
        needed = -(-count // length)
        return _Rows(what, field, rows_in(documents, tokenizer, length, needed), needed, length)

    texts, calibrated = [], []
    if tokens.source == "text":
        read = read_topics(Path(tokens.path or ""))
        if evaluation.source == "text":  # a study calibrates on the standard library's splits too, never to measure
            read = calibration_share(read, evaluation)
            calibrated = digests([document.text for document in read])
        own = [document.text for document in read]
        texts.append(rows("calibration", "tokens.count", own, tokens.count, tokens.seq_len))
    held_out = held_out_documents(evaluation, calibrated)
    for split in SPLITS:
        field, found = f"{split}_tokens", getattr(held_out, split)
        count = getattr(evaluation, field)
        texts.append(rows(f"the {split} split", f"evaluation.{field}", found, count, evaluation.seq_len))
    short = [text for text in texts if text.found < text.needed]
    if not short:
        return
    said = ", ".join(f"{t.what} has {t.found * t.seq_len} of {t.needed * t.seq_len} tokens" for t in short)
    hint = "Give a longer text, or ask for what there is: " + " ".join(
        f"--set {text.field}={text.found * text.seq_len}" for text in short
    )
    if any(text.found == 0 for text in short):
        hint = "Give a longer text: a third of it is calibrated on, a third searches, a third reports."
    raise DataError(f"{_names(recipe)}: too short: {said}.", hint)


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


def _names(recipe: Recipe) -> str:
    texts = [recipe.tokens.path] if recipe.tokens.source == "text" else []
    texts += [recipe.evaluation.path if recipe.evaluation.source == "text" else "the Python standard library's source"]
    return "text " + " and ".join(dict.fromkeys(str(text) for text in texts))
