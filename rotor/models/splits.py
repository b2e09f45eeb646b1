"""Three disjoint splits of text: one to calibrate on, one to choose ranks by (search), one to report accuracy on.

The documents of the held-out text are dealt to the three. A calibration that reads the same text takes the calibration
split alone. A run keeps the SHA-256 of each document it was calibrated on, so that search and report leave these out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import DataError
from ..recipe import Evaluation
from .documents import read_documents, stdlib_documents
from .lengths import LONG_SEQ_LEN, bounded_seq_len, long_sequence_count
from .sequences import evenly_spaced, text_sequences

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

SPLITS = ("search", "report")
LONG_SPLIT = "long"
"""Name of the report split's long sequences, which show errors that grow with the distance between tokens."""

MIN_DOCUMENTS = 3
"""Fewer documents than this are cut into parts, which are then dealt to the splits."""

PARTS_PER_DOCUMENT = 6
"""Parts that each document is then cut into."""


@dataclass(frozen=True)
class EvaluationData:
    """Held-out sequences of tokens. `search` chooses the ranks; only `report` gives the numbers that are reported.

    search, report: [num_sequences, seq_len], from different documents (or different parts of a single one).
    long: [num_sequences, LONG_SEQ_LEN] from the documents of `report`, or None.
    description: the text in words.
    excluded: digests of documents that were left out because they were calibrated on.
    """

    search: Tensor
    report: Tensor
    description: str
    excluded: tuple[str, ...] = ()
    long: Tensor | None = None

    @property
    def sequences(self) -> dict[str, Tensor]:
        """The sequences of each split by its name, LONG_SPLIT included if there are long ones."""
        splits = {"search": self.search, "report": self.report}
        return splits if self.long is None else splits | {LONG_SPLIT: self.long}

    @property
    def sha256(self) -> str:
        """SHA-256 of all sequences and their lengths."""
        return _digest_of_sequences(*self.sequences.values())

    @property
    def search_sha256(self) -> str:
        """SHA-256 of the search split's sequences."""
        return _digest_of_sequences(self.search)


def _digest_of_sequences(*parts: Tensor) -> str:
    sha256 = hashlib.sha256()
    for sequences in parts:
        sha256.update(f"{tuple(sequences.shape)}|".encode() + sequences.numpy().tobytes())
    return sha256.hexdigest()


@dataclass(frozen=True)
class Documents:
    """The documents of each split, and the digests of those left out because they were calibrated on."""

    calibration: list[str]
    search: list[str]
    report: list[str]
    description: str
    excluded: tuple[str, ...]


def evaluation_data(
    spec: Evaluation, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, calibrated: Collection[str] = ()
) -> EvaluationData:
    """Read the text that a recipe names and split it.

    Args:
        calibrated: digests of the documents that were calibrated on.
    Raises:
        DataError: there is no text, or too little.
    """
    seq_len = bounded_seq_len(spec.seq_len, config)
    held_out = held_out_documents(spec, calibrated, tokenizer)
    search, report = (
        evenly_spaced(
            text_sequences(getattr(held_out, split), tokenizer, seq_len),
            -(-getattr(spec, f"{split}_tokens") // seq_len),
            f"evaluation, {split} split of {held_out.description}",
        )
        for split in SPLITS
    )
    long = None
    count = long_sequence_count(spec.report_tokens, spec.seq_len, config)
    if count:
        sequences = text_sequences(held_out.report, tokenizer, LONG_SEQ_LEN)
        count = min(count, len(sequences))
        long = evenly_spaced(sequences, count, "long sequences") if count else None
    return EvaluationData(search, report, held_out.description, held_out.excluded, long)


def held_out_documents(
    spec: Evaluation, calibrated: Collection[str] = (), tokenizer: PreTrainedTokenizerBase | None = None
) -> Documents:
    """Deal the documents that a recipe names to the splits.

    Args:
        calibrated: digests of the documents that were calibrated on, which are left out of search and report.
        tokenizer: the model's, which renders chats.
    Raises:
        DataError: there is no text, or all of a split was calibrated on.
    """
    read = stdlib_documents() if spec.source == "stdlib" else read_documents(Path(spec.path or ""), tokenizer)
    description = description_of(spec)
    documents = list(dict.fromkeys(read))  # copies of one document would fall into different splits
    units, known = divided(documents), set(calibrated)
    if len(units) > len(documents):  # neighbouring parts stay in one split, to cut as few sentences as possible
        share = -(-len(units) // 3)
        splits = [units[start : start + share] for start in range(0, 3 * share, share)]
        known |= {digest(part) for d in documents if digest(d) in known for part in divided([d])}
    else:
        ranked = sorted(units, key=digest)  # the order of the input does not matter
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


def calibration_share(
    documents: list[str], spec: Evaluation, tokenizer: PreTrainedTokenizerBase | None = None
) -> list[str]:
    """Documents of a calibration text that are in neither the search split nor the report split.

    Args:
        spec: names the held-out text. tokenizer: the model's, which renders chats.
    """
    if spec.source != "text":  # a study may calibrate on the standard library too, but never measures such a run on it
        return documents
    held = held_out_documents(spec, tokenizer=tokenizer)
    others = {digest(unit) for unit in (*held.search, *held.report)}
    units = divided(documents)
    if not others & set(map(digest, units)):
        units = documents
    return [unit for unit in units if digest(unit) not in others]


def digests(documents: Sequence[str]) -> list[str]:
    """Digests of documents, and of the parts that they are cut into where they are few."""
    return sorted({digest(unit) for unit in (*documents, *divided(documents))})


def divided(documents: Sequence[str]) -> list[str]:
    """The documents; fewer than MIN_DOCUMENTS are each cut into PARTS_PER_DOCUMENT parts of equal length."""
    if len(documents) >= MIN_DOCUMENTS:
        return list(documents)
    lengths = (max(1, -(-len(text) // PARTS_PER_DOCUMENT)) for text in documents)
    return [
        text[start : start + length]
        for text, length in zip(documents, lengths, strict=True)
        for start in range(0, len(text), length)
    ]


def topics_of_units(documents: Sequence[tuple[str, str]]) -> dict[str, str]:
    """The topic of each document, and of each part where documents are few (see `divided`), by its text.

    Args:
        documents: texts with their topics.
    """
    few = len(documents) < MIN_DOCUMENTS
    return {unit: topic for text, topic in documents for unit in (text, *(divided([text]) if few else ()))}


def digest(document: str) -> str:
    """SHA-256 of a document's text."""
    return hashlib.sha256(document.encode("utf-8", "surrogatepass")).hexdigest()


def description_of(spec: Evaluation) -> str:
    """Describe the held-out text that a recipe names."""
    text = f"text {Path(spec.path or '').name}"
    if spec.source == "stdlib":
        text = "source of the Python standard library (modules held out)"
    return f"{text}, a quick look at few tokens" if spec.quick else text
