"""The three splits of text that never meet: what may be calibrated on, what chooses the ranks, and what is reported.

The documents of the held-out text are dealt to the three. A calibration that reads the same text takes its own share
alone, and a run keeps the SHA-256 of what it was calibrated on, so that what of it lies in the other two is left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError
from ..recipe import Evaluation
from .documents import read_documents, stdlib_documents
from .projections import LONG_ROW, long_row_count, longest_row
from .sequences import evenly_spaced, text_rows

SPLITS = ("search", "report")
LONG = "long"
"""Name of the report split's long rows, which show errors that grow with the distance."""

FEW, PARTS = 3, 6
"""Of fewer documents than FEW each is cut into PARTS, which are then the documents."""


@dataclass(frozen=True)
class EvaluationData:
    """Held-out rows of tokens. `search` chooses the ranks; only `report` gives the numbers that are reported.

    search, report: [rows, seq_len], from different documents (or different parts of a single one). long: [rows,
    LONG_ROW] of the documents of `report`, or None.
    description: what the text is. excluded: digests of documents left out, as they were calibrated on.
    """

    search: Tensor
    report: Tensor
    description: str
    excluded: tuple[str, ...] = ()
    long: Tensor | None = None

    @property
    def rows(self) -> dict[str, Tensor]:
        """By the name of the split, and LONG."""
        found = {"search": self.search, "report": self.report}
        return found if self.long is None else found | {LONG: self.long}

    @property
    def sha256(self) -> str:
        """Of all rows, and their lengths."""
        return _digest_of_rows(*self.rows.values())

    @property
    def search_sha256(self) -> str:
        """Of the rows of the search split."""
        return _digest_of_rows(self.search)


def _digest_of_rows(*parts: Tensor) -> str:
    found = hashlib.sha256()
    for rows in parts:
        found.update(f"{tuple(rows.shape)}|".encode() + rows.numpy().tobytes())
    return found.hexdigest()


@dataclass(frozen=True)
class Documents:
    """The documents of each split. excluded: digests of those left out, as they were calibrated on."""

    calibration: list[str]
    search: list[str]
    report: list[str]
    description: str
    excluded: tuple[str, ...]


def evaluation_data(spec: Evaluation, config: Any, tokenizer: Any, calibrated: Collection[str] = ()) -> EvaluationData:
    """Read the text that a recipe names and split it.

    Args:
        calibrated: digests of the documents that were calibrated on.
    Raises:
        DataError: no text, or too little of it.
    """
    seq_len = longest_row(spec.seq_len, config)
    found = held_out_documents(spec, calibrated)
    search, report = (
        evenly_spaced(
            text_rows(getattr(found, split), tokenizer, seq_len),
            -(-getattr(spec, f"{split}_tokens") // seq_len),
            f"evaluation, {split} split of {found.description}",
        )
        for split in SPLITS
    )
    long, count = None, long_row_count(spec.report_tokens, spec.seq_len, config)
    if count:
        rows = text_rows(found.report, tokenizer, LONG_ROW)
        count = min(count, len(rows))
        long = evenly_spaced(rows, count, "long rows") if count else None
    return EvaluationData(search, report, found.description, found.excluded, long)


def held_out_documents(spec: Evaluation, calibrated: Collection[str] = ()) -> Documents:
    """The documents of each split that a recipe names.

    Args:
        calibrated: digests of the documents that were calibrated on, which are left out of search and report.
    Raises:
        DataError: there is no text, or all of a split was calibrated on.
    """
    read = stdlib_documents() if spec.source == "stdlib" else read_documents(Path(spec.path or ""))
    description = description_of(spec)
    documents = list(dict.fromkeys(read))  # copies of one document would fall into different splits
    units, known = divided(documents), set(calibrated)
    if len(units) > len(documents):  # neighbours stay together, so that as few sentences as possible are torn
        step = -(-len(units) // 3)
        splits = [units[start : start + step] for start in range(0, 3 * step, step)]
        known |= {digest(part) for d in documents if digest(d) in known for part in divided([d])}
    else:
        ranked = sorted(units, key=digest)  # so that the order given does not matter
        order = torch.randperm(len(ranked), generator=torch.Generator().manual_seed(spec.seed)).tolist()
        splits = [[ranked[i] for i in order[start::3]] for start in range(3)]
    kept = [[unit for unit in split if digest(unit) not in known] for split in splits[1:]]
    excluded = tuple(sorted({digest(unit) for split in splits[1:] for unit in split} & known))
    if not all(kept) and not excluded:
        raise DataError(
            f"evaluation, {description}: too little text for three splits, {sum(map(len, documents))} characters.",
            "Give a longer text.",
        )
    if not all(kept):
        raise DataError(
            f"evaluation, {description}: the {'report' if kept[0] else 'search'} split has no document left that was "
            f"not calibrated on ({len(excluded)} were).",
            "Name other text with --set evaluation.path=FILE, or the standard library's with evaluation.source=stdlib.",
        )
    return Documents(splits[0], kept[0], kept[1], description, excluded)


def calibration_share(documents: list[str], spec: Evaluation) -> list[str]:
    """Those of a calibration text that are in neither of the splits that search and report.

    Args:
        spec: names the held-out text.
    """
    if spec.source != "text":  # a study calibrates on the standard library's splits too, never to measure
        return documents
    held = held_out_documents(spec)
    others = {digest(unit) for unit in (*held.search, *held.report)}
    units = divided(documents)
    if not others & set(map(digest, units)):
        units = documents
    return [unit for unit in units if digest(unit) not in others]


def digests(documents: Sequence[str]) -> list[str]:
    """Digests of documents that are calibrated on, and of the parts that few of them are cut into."""
    return sorted({digest(unit) for unit in (*documents, *divided(documents))})


def divided(documents: Sequence[str]) -> list[str]:
    """The documents; where there are fewer than FEW, each in PARTS of equal length."""
    if len(documents) >= FEW:
        return list(documents)
    steps = (max(1, -(-len(text) // PARTS)) for text in documents)
    return [
        text[start : start + step]
        for text, step in zip(documents, steps, strict=True)
        for start in range(0, len(text), step)
    ]


def digest(document: str) -> str:
    """SHA-256 of a document's text."""
    return hashlib.sha256(document.encode("utf-8", "surrogatepass")).hexdigest()


def description_of(spec: Evaluation) -> str:
    """The held-out text that a recipe names, in words."""
    if spec.source == "stdlib":
        return "source of the Python standard library (modules held out)"
    return f"text {Path(spec.path or '').name}"
