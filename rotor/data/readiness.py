"""What is known of a command's text before any long work: whether there is enough of it, and what it is."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..errors import DataError
from ..installing import pip_install
from ..models.projections import longest_row
from ..recipe import Evaluation, Recipe
from .documents import Document, read_topics, require_tokenizer
from .rows import rows_in
from .splits import SPLITS, calibration_share, description_of, digests, held_out_documents

CHAT_ADVICE = (
    "the model has a chat template, and Python source is hardly what it is for: give text of your own with --text FILE "
    "or --set evaluation.source=text --set evaluation.path=FILE"
)
WRITERS = {"random": "random tokens", "synthetic": "text that the model writes"}


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
        _check_dataset(str(tokens.dataset))
    if tokenizer is None:
        return
    found: list[tuple[str, str, int, int, int]] = []  # what, field, documents' rows, needed rows, row length
    calibrated: list[str] = []
    if tokens.source == "text":
        documents = _calibration_documents(recipe)
        if evaluation.source == "text":  # a study calibrates on the standard library's splits too, never to measure
            calibrated = digests([document.text for document in documents])
        length = longest_row(tokens.seq_len, config)
        needed = -(-tokens.count // length)
        texts = [document.text for document in documents]
        found.append(("calibration", "tokens.count", rows_in(texts, tokenizer, length, needed), needed, length))
    held_out = held_out_documents(evaluation, calibrated)
    length = longest_row(evaluation.seq_len, config)
    for split in SPLITS:
        field = f"{split}_tokens"
        needed = -(-getattr(evaluation, field) // length)
        rows = rows_in(getattr(held_out, split), tokenizer, length, needed)
        found.append((f"the {split} split", f"evaluation.{field}", rows, needed, length))
    short = [entry for entry in found if entry[2] < entry[3]]
    if not short:
        return
    said = ", ".join(
        f"{what} has {rows * length} of {needed * length} tokens" for what, _, rows, needed, length in short
    )
    raise DataError(f"{_names(recipe)}: too short: {said}.", _how_to_fit(short))


def told(recipe: Recipe, tokenizer: Any) -> str:
    """One line: the text that is calibrated on and the text that accuracy is judged on; a warning for a chat model."""
    tokens = recipe.tokens
    named = {"text": f"text {Path(tokens.path or '').name}", "dataset": f"data set {tokens.dataset}"}
    source = WRITERS.get(tokens.source) or named[tokens.source]
    return f"text: calibrates on {tokens.count} tokens of {source}; {judged_on(recipe.evaluation, tokenizer)}"


def judged_on(spec: Evaluation, tokenizer: Any) -> str:
    """What accuracy is judged on; a warning where a chat model would be judged on source code."""
    if tokenizer is None:
        return "accuracy cannot be judged, as the model has no tokenizer to read text with"
    line = f"accuracy is judged on {description_of(spec)}"
    if spec.source == "stdlib" and getattr(tokenizer, "chat_template", None):
        return f"{line}; {CHAT_ADVICE}"
    return line


def _calibration_documents(recipe: Recipe) -> list[Document]:
    assert recipe.tokens.path is not None
    documents = read_topics(Path(recipe.tokens.path))
    return documents if recipe.evaluation.source != "text" else calibration_share(documents, recipe.evaluation)


def _check_dataset(name: str) -> None:
    if importlib.util.find_spec("datasets") is None:
        raise DataError(
            f"tokens.dataset {name}: the package `datasets` is not installed.",
            f"Install it with: {pip_install('eval')}",
        )
    if name.startswith((".", "/", "~")) and not Path(name).exists():
        raise DataError(
            f"tokens.dataset {name}: no such folder.", "Give a folder, or the name of a data set on the hub."
        )


def _names(recipe: Recipe) -> str:
    texts = [recipe.tokens.path] if recipe.tokens.source == "text" else []
    texts += [recipe.evaluation.path if recipe.evaluation.source == "text" else "the Python standard library's source"]
    return "text " + " and ".join(dict.fromkeys(str(text) for text in texts))


def _how_to_fit(short: Iterable[tuple[str, str, int, int, int]]) -> str:
    """Settings that fit the text, where each split has at least a row."""
    entries = list(short)
    if any(rows == 0 for _, _, rows, _, _ in entries):
        return "Give a longer text: a third of it is calibrated on, a third searches, a third reports."
    return "Give a longer text, or ask for what there is: " + " ".join(
        f"--set {field}={rows * length}" for _, field, rows, _, length in entries
    )
