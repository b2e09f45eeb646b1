"""The three splits of text that never meet: what is calibrated on, what chooses the ranks, and what is reported.

A run keeps the SHA-256 of the documents that it was calibrated on, and held-out text is what is left without them.
Where a recipe names one text for both, calibration takes a third of its documents, and the other two splits a third each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import DataError
from .families import longest_row
from .recipe import Evaluation
from .tokens import Document, read_documents, spread_rows, stdlib_documents, text_rows

SPLITS = ("search", "report")
PIECES = 6
"""A text of one document is cut into so many pieces, which are then its documents."""


@dataclass(frozen=True)
class EvaluationData:
    """Held-out rows of tokens. `search` chooses the ranks; only `report` gives the numbers that are reported.

    search, report: [rows, seq_len], from different documents (or different pieces of a single one).
    description: what the text is. excluded: digests of documents left out, as they were calibrated on.
    """

    search: Tensor
    report: Tensor
    description: str
    excluded: tuple[str, ...] = ()

    @property
    def rows(self) -> dict[str, Tensor]:
        """By the name of the split."""
        return {"search": self.search, "report": self.report}

    @property
    def sha256(self) -> str:
        """Of all rows of both."""
        return hashlib.sha256(self.search.numpy().tobytes() + b"|" + self.report.numpy().tobytes()).hexdigest()


@dataclass(frozen=True)
class Documents:
    """The documents of each split. calibration: empty unless they were asked for."""

    search: list[str]
    report: list[str]
    calibration: list[str]
    description: str
    excluded: tuple[str, ...]


def evaluation_data(
    spec: Evaluation, config: Any, tokenizer: Any, calibrated: Collection[str] = (), reserve: bool = False
) -> EvaluationData:
    """Read the text that a recipe names and split it.

    Args:
        calibrated: digests of the documents that were calibrated on. reserve: as for held_out_documents.
    Raises:
        DataError: no text, or too little of it.
    """
    seq_len = longest_row(spec.seq_len, config)
    found = held_out_documents(spec, calibrated, reserve)
    counts = -(-spec.search_tokens // seq_len), -(-spec.report_tokens // seq_len)
    search, report = (
        spread_rows(text_rows(part, tokenizer, seq_len), count, f"evaluation, {name} split of {found.description}")
        for part, count, name in zip((found.search, found.report), counts, SPLITS, strict=True)
    )
    return EvaluationData(search, report, found.description, found.excluded)


def held_out_documents(spec: Evaluation, calibrated: Collection[str] = (), reserve: bool = False) -> Documents:
    """The documents of each split that a recipe names.

    Args:
        calibrated: digests of the documents that were calibrated on, which are left out.
        reserve: keep a third of them for calibration.
    Raises:
        DataError: there is no text, or all of it was calibrated on.
    """
    documents, description = _read(spec)
    units, excluded = [], []
    for unit in divided(documents):
        name = digest(unit)
        if name in calibrated or (len(documents) == 1 and digest(documents[0]) in calibrated):
            excluded.append(name)
        else:
            units.append(unit)
    if len(units) < (3 if reserve else 2):
        raise DataError(
            f"evaluation, {description}: {len(units)} document(s) that were not calibrated on ({len(excluded)} were), "
            "too few to search on some and report on others.",
            "Name other text with --set evaluation.path=FILE, or the standard library's with evaluation.source=stdlib.",
        )
    if len(documents) > 1:
        units = in_order(units, spec.seed)
    parts = _interleaved(units, 3 if reserve else 2) if len(documents) > 1 else _consecutive(units, 3 if reserve else 2)
    return Documents(parts[-2], parts[-1], parts[0] if reserve else [], description, tuple(sorted(excluded)))


def calibration_share(documents: list[Document], spec: Evaluation) -> list[Document]:
    """Those of a calibration text to calibrate on: all, but of those that are held-out text too a third.

    Args:
        spec: names the held-out text.
    """
    held = {digest(unit) for unit in divided(_read(spec)[0])}
    if len(documents) == 1:
        pieces = [Document(piece, documents[0].topic) for piece in divided([documents[0].text])]
        whole = not any(digest(piece.text) in held for piece in pieces)
        documents = documents if whole else pieces
    shared = sorted({digest(document.text) for document in documents} & held)
    order = torch.randperm(len(shared), generator=torch.Generator().manual_seed(spec.seed)).tolist()
    kept = {shared[i] for i in order[: max(1, len(shared) // 3)]}
    return [document for document in documents if digest(document.text) in kept or digest(document.text) not in held]


def divided(documents: Sequence[str]) -> list[str]:
    """The documents; a single one in PIECES of equal length."""
    if len(documents) != 1:
        return list(documents)
    text, step = documents[0], -(-len(documents[0]) // PIECES)
    return [text[start : start + step] for start in range(0, len(text), step)]


def in_order(documents: Sequence[str], seed: int) -> list[str]:
    """In a seeded order that does not depend on the order given."""
    ranked = sorted(documents, key=digest)
    return [ranked[i] for i in torch.randperm(len(ranked), generator=torch.Generator().manual_seed(seed)).tolist()]


def digest(document: str) -> str:
    """SHA-256 of a document's text."""
    return hashlib.sha256(document.encode("utf-8", "surrogatepass")).hexdigest()


def _read(spec: Evaluation) -> tuple[list[str], str]:
    if spec.source == "stdlib":
        return stdlib_documents(), "source of the Python standard library (modules held out)"
    assert spec.path is not None
    return read_documents(Path(spec.path)), f"text {Path(spec.path).name}"


def _interleaved(units: list[str], count: int) -> list[list[str]]:
    return [units[start::count] for start in range(count)]


def _consecutive(units: list[str], count: int) -> list[list[str]]:
    step = -(-len(units) // count)
    return [units[start : start + step] for start in range(0, step * count, step)]
