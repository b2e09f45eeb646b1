"""Text that documents have in common: a document that is given twice, or cut up, is one document.

Runs of words are compared, those that begin at words which a hash chooses, so that a part of a document has the runs
that the document has there. It is what web-scale corpora are deduplicated by.

Source: Broder, On the resemblance and containment of documents (1997), containment of sampled shingles.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

RUN_WORDS = 8
"""Words of a run that is compared."""

ONE_IN = 8
"""One word in so many begins a run."""

LEAST_RUNS = 4
"""Documents with fewer runs are too short to be told apart by them."""

MOST_HOLDERS = 64
"""Texts that a run is compared with, the first that have it: a licence stands in all documents of a folder."""

LEAST_SHARE = 0.5
"""Share of the shorter document's runs that the other has, from which on they are one; a licence is less."""


def runs_of(text: str) -> frozenset[int]:
    """Hashes of the runs of words that a text is compared by."""
    words = text.split()
    begins: dict[str, bool] = {}
    hashes = set()
    for index in range(len(words) - RUN_WORDS + 1):
        word = words[index]
        begin = begins.get(word)
        if begin is None:
            begin = begins[word] = crc32(word.encode("utf-8", "surrogatepass")) % ONE_IN == 0
        if begin:
            hashes.add(crc32(" ".join(words[index : index + RUN_WORDS]).encode("utf-8", "surrogatepass")))
    return frozenset(hashes)


def overlapping(texts: Sequence[str]) -> list[int]:
    """The set that each text belongs to, by the index of its first one: texts with half of their runs in common.

    Which texts are compared is decided by the runs that they share, at most MOST_HOLDERS for each, so that time goes
    by their length.
    """
    runs = [runs_of(text) for text in texts]
    first = list(range(len(texts)))

    def root(index: int) -> int:
        while first[index] != index:
            first[index] = first[first[index]]
            index = first[index]
        return index

    holders: dict[int, list[int]] = {}
    for index, text_runs in enumerate(runs):
        if len(text_runs) < LEAST_RUNS:
            continue
        common: dict[int, int] = {}
        for run in text_runs:
            for other in holders.get(run, ()):
                common[other] = common.get(other, 0) + 1
        for other, count in common.items():
            if count >= LEAST_SHARE * min(len(text_runs), len(runs[other])):
                low, high = sorted((root(index), root(other)))
                first[high] = low
        for run in text_runs:
            of_run = holders.setdefault(run, [])
            if len(of_run) < MOST_HOLDERS:
                of_run.append(index)
    return [root(index) for index in range(len(texts))]
