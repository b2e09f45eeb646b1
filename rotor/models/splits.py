"""Three disjoint splits of text: one to calibrate on, one to choose ranks by (search), one to report accuracy on.

The documents of the held-out text are dealt to the three. A calibration that reads the same text takes the calibration
split alone. A run keeps the SHA-256 of each document it was calibrated on, so that search and report leave these out.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import DataError
from ..recipe.sections import Evaluation
from .documents import read_documents, stdlib_documents
from .overlap import overlapping
from .sequences import bounded_seq_len, evenly_spaced, text_sequences

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

CALIBRATION = "calibration"
SPLITS = ("search", "report")
MIN_DOCUMENTS = 3
"""Fewer documents than this are cut into parts, which are then dealt to the splits."""

PARTS_PER_DOCUMENT = 6
"""Parts that each document is then cut into."""


@dataclass(frozen=True)
class SplitText:
    """Sequences and prompts that one split measures on.

    sequences: [num_sequences, seq_len]; the splits' are from different documents (or parts of a single one).
    filler: [tokens], all of the split's text, from which prompts take what stands between question and answer.
    kinds: of each sequence the name of its text, where several were given; else empty.
    """

    sequences: Tensor
    filler: Tensor
    kinds: tuple[str, ...] = ()


@dataclass(frozen=True)
class EvaluationData:
    """Held-out text in tokens. `search` chooses the ranks; only `report` gives the numbers that are reported.

    splits: both, by name. description: the text in words.
    excluded: digests of documents that were left out because they were calibrated on.
    documents: of each split the number of its documents, or of parts of them, by the names of their files.
    """

    splits: dict[str, SplitText]
    description: str
    excluded: tuple[str, ...] = ()
    documents: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def search(self) -> Tensor:
        """Sequences of the search split, [num_sequences, seq_len]."""
        return self.splits["search"].sequences

    @property
    def report(self) -> Tensor:
        """Sequences of the report split, [num_sequences, seq_len]."""
        return self.splits["report"].sequences

    @property
    def sha256(self) -> str:
        """SHA-256 of everything that both splits measure on."""
        return _digest_of(*self.splits.values())

    @property
    def search_sha256(self) -> str:
        """SHA-256 of what the search split measures on."""
        return _digest_of(self.splits["search"])


def _digest_of(*splits: SplitText) -> str:
    sha256 = hashlib.sha256()
    for tensor in (tensor for split in splits for tensor in (split.sequences, split.filler)):
        sha256.update(f"{tuple(tensor.shape)}|".encode() + tensor.numpy().tobytes())
    return sha256.hexdigest()


@dataclass(frozen=True)
class Unit:
    """A document, or a part of one where documents are few. name: of its file. kind: name of the text it is from."""

    text: str
    name: str
    kind: str


@dataclass(frozen=True)
class Documents:
    """The documents of each split, the text in words, and the digests of those left out as they were calibrated on."""

    splits: dict[str, list[Unit]]
    description: str
    excluded: tuple[str, ...] = ()

    def texts(self, split: str, kind: str | None = None) -> list[str]:
        """The documents of a split, of one kind or all."""
        return [unit.text for unit in self.splits[split] if kind in (None, unit.kind)]

    @property
    def kinds(self) -> list[str]:
        """Names of the texts."""
        return list(dict.fromkeys(unit.kind for units in self.splits.values() for unit in units))

    @property
    def names(self) -> dict[str, dict[str, int]]:
        """Sources of each split: the number of documents, or parts of them, by the names of their files."""
        named = {split: Counter(f"{unit.kind}/{unit.name}" for unit in self.splits[split]) for split in self.splits}
        return {split: dict(counts) for split, counts in named.items()}


def evaluation_data(
    spec: Evaluation, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, calibrated: Collection[str] = ()
) -> EvaluationData:
    """Read the text that a recipe names and split it; of several texts each has an equal share of the sequences.

    Args:
        calibrated: digests of the documents that were calibrated on.
    Raises:
        DataError: there is no text, or too little.
    """
    seq_len = bounded_seq_len(spec.seq_len, config)
    held_out = held_out_documents(spec, calibrated, tokenizer)
    kinds = held_out.kinds
    splits = {}
    for split in SPLITS:
        count = sequences_of_a_kind(getattr(spec, f"{split}_tokens"), seq_len, len(kinds))
        measured, filler = list[Tensor](), list[Tensor]()
        for kind in kinds:
            what = f"evaluation, {split} split of {held_out.description}{f', {kind}' if len(kinds) > 1 else ''}"
            sequences = text_sequences(held_out.texts(split, kind), tokenizer, seq_len)
            measured.append(evenly_spaced(sequences, count, what))
            filler.append(sequences.flatten())
        names = tuple(kind for kind in kinds for _ in range(count)) if len(kinds) > 1 else ()
        splits[split] = SplitText(torch.cat(measured), torch.cat(filler), names)
    documents = {split: held_out.names[split] for split in SPLITS}
    return EvaluationData(splits, held_out.description, held_out.excluded, documents)


def sequences_of_a_kind(tokens: int, seq_len: int, kinds: int) -> int:
    """Sequences that a split of so many tokens takes of each of several texts."""
    return -(-tokens // (seq_len * kinds))


def held_out_documents(
    spec: Evaluation, calibrated: Collection[str] = (), tokenizer: PreTrainedTokenizerBase | None = None
) -> Documents:
    """Deal the documents that a recipe names to the splits: each text's by itself, so that every split has all kinds.

    A document that is given twice or cut up (see `overlap`) goes to one split whole.

    Args:
        calibrated: digests of the documents that were calibrated on, which are left out of search and report.
        tokenizer: the model's, which renders chats.
    Raises:
        DataError: there is no text, or all of a split was calibrated on.
    """
    description = description_of(spec)
    if spec.source == "stdlib":
        texts = {"stdlib": [(text, "modules") for text in dict.fromkeys(stdlib_documents())]}
    else:
        texts = read_kinds(spec.paths, tokenizer)
    known = set(calibrated)
    for documents in texts.values():
        parts = divided([text for text, _ in documents])
        if len(parts) > len(documents):
            known |= {digest(part) for text, _ in documents if digest(text) in known for part in divided([text])}
    splits: dict[str, list[Unit]] = {split: [] for split in (CALIBRATION, *SPLITS)}
    dealt = [(unit, split) for kind, documents in texts.items() for unit, split in _dealt(kind, documents, spec.seed)]
    taken: dict[int, str] = {}
    for (unit, split), one in zip(dealt, overlapping([unit.text for unit, _ in dealt]), strict=True):
        splits[taken.setdefault(one, split)].append(unit)
    held = [unit for split in SPLITS for unit in splits[split]]
    excluded = tuple(sorted({digest(unit.text) for unit in held} & known))
    splits |= {split: [unit for unit in splits[split] if digest(unit.text) not in known] for split in SPLITS}
    for kind, documents in texts.items():
        empty = [split for split in SPLITS if not any(unit.kind == kind for unit in splits[split])]
        of_several = f" ({kind})" if len(texts) > 1 else ""
        if empty and not excluded:
            raise DataError(
                f"evaluation, {description}{of_several}: too little text for three splits, "
                f"{sum(len(text) for text, _ in documents)} characters in {len(documents)} document(s).",
                "Give a longer text; documents that are given twice or cut up count as one.",
            )
        if empty:
            raise DataError(
                f"evaluation, {description}{of_several}: the {empty[-1]} split has no document left that was "
                f"not calibrated on ({len(excluded)} were).",
                "Name other text with --set evaluation.path=FILE, or the standard library's with "
                "evaluation.source=stdlib.",
            )
    return Documents(splits, description, excluded)


def read_kinds(paths: Sequence[Path], tokenizer: PreTrainedTokenizerBase | None) -> dict[str, list[tuple[str, str]]]:
    """The documents of each of several texts by its name, with the names of their files; no document twice."""
    seen, texts = set[str](), dict[str, list[tuple[str, str]]]()
    for kind, path in kinds_of(paths).items():
        documents = {text: (text, name) for text, name in reversed(read_documents(path, tokenizer))}
        texts[kind] = [pair for text, pair in reversed(documents.items()) if text not in seen]
        seen |= documents.keys()
    return texts


def kinds_of(paths: Sequence[Path]) -> dict[str, Path]:
    """Names of several texts: those of their files, or of so much of their paths as tells them apart."""
    names = [path.name for path in paths]
    return {name if names.count(name) == 1 else str(path): path for name, path in zip(names, paths, strict=True)}


def _dealt(kind: str, documents: list[tuple[str, str]], seed: int) -> list[tuple[Unit, str]]:
    """The documents of one text, or their parts, each with the split that it is dealt to."""
    order = (CALIBRATION, *SPLITS)
    units = _units(kind, documents)
    if len(units) > len(documents):  # neighbouring parts stay in one split, to cut as few sentences as possible
        share = -(-len(units) // 3)
        return [(unit, order[index // share]) for index, unit in enumerate(units)]
    ranked = sorted(units, key=lambda unit: digest(unit.text))  # the order of the input does not matter
    drawn = torch.randperm(len(ranked), generator=torch.Generator().manual_seed(seed)).tolist()
    return [(ranked[place], order[index % 3]) for index, place in enumerate(drawn)]


def _units(kind: str, documents: Sequence[tuple[str, str]]) -> list[Unit]:
    """The documents of one text, or their parts where they are few."""
    return [Unit(part, name, kind) for text, name in documents for part in divided([text], len(documents))]


def calibration_share(
    texts: Mapping[str, Sequence[tuple[str, str]]], spec: Evaluation, tokenizer: PreTrainedTokenizerBase | None = None
) -> dict[str, list[Unit]]:
    """Documents of calibration texts that have nothing in common with the search split and the report split.

    Args:
        texts: documents and the names of their files, by the name of their text. spec: names the held-out text.
        tokenizer: the model's, which renders chats.
    """
    whole = {kind: [Unit(text, name, kind) for text, name in documents] for kind, documents in texts.items()}
    if spec.source != "text":  # a study may calibrate on the standard library too, but never measures such a run on it
        return whole
    dealt = held_out_documents(spec, tokenizer=tokenizer)
    calibrated = set(dealt.texts(CALIBRATION))
    held = [text for split in SPLITS for text in dealt.texts(split)]
    share = {}
    for kind, documents in texts.items():
        parts = _units(kind, documents)
        share[kind] = parts if {*held, *calibrated} & {part.text for part in parts} else whole[kind]
    others = list({unit.text for units in share.values() for unit in units} - {*calibrated, *held})
    sets = overlapping([*held, *others])
    taken = {*sets[: len(held)]}
    shared = {text for text, one in zip(others, sets[len(held) :], strict=True) if one in taken} | set(held)
    return {kind: [unit for unit in units if unit.text not in shared] for kind, units in share.items()}


def digests(documents: Sequence[str]) -> list[str]:
    """Digests of documents, and of the parts that they are cut into where they are few."""
    return sorted({digest(unit) for unit in (*documents, *divided(documents))})


def divided(documents: Sequence[str], of: int | None = None) -> list[str]:
    """The documents; fewer than MIN_DOCUMENTS are each cut into PARTS_PER_DOCUMENT parts of equal length.

    Args:
        of: number of documents that they are some of.
    """
    if (len(documents) if of is None else of) >= MIN_DOCUMENTS:
        return list(documents)
    lengths = (max(1, -(-len(text) // PARTS_PER_DOCUMENT)) for text in documents)
    return [
        text[start : start + length]
        for text, length in zip(documents, lengths, strict=True)
        for start in range(0, len(text), length)
    ]


def digest(document: str) -> str:
    """SHA-256 of a document's text."""
    return hashlib.sha256(document.encode("utf-8", "surrogatepass")).hexdigest()


def description_of(spec: Evaluation) -> str:
    """Describe the held-out text that a recipe names."""
    text = f"your text in {' and '.join(kinds_of(spec.paths))}"
    if spec.source == "stdlib":
        text = "source of the Python standard library (modules held out)"
    return f"{text}, a quick look at few tokens" if spec.quick else text
