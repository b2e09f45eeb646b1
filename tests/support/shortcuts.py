"""Shortcuts that make a session of tests quicker and changes nothing that they look at."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from rotor.checked import JsonObject
from rotor.models import hardware, sequences
from rotor.models import tokenizer as tokenizers
from rotor.models.tokenizer_trial import largest_id
from rotor.tools.study.plots import STYLE
from support.paths import DEMO_MODEL

FILES = ("tokenizer.json", "tokenizer_config.json")
"""Of the bundled tokenizer, which nearly all models of the tests have."""


def tried(folder: Path) -> JsonObject:
    """Verdict of a trial on a tokenizer that is known to do no harm, without a process of its own."""
    return {"largest": largest_id(AutoTokenizer.from_pretrained(folder, local_files_only=True))}


@contextmanager
def quicker() -> Iterator[None]:
    """A study's plots are drawn but not laid out. Tokens of long texts are kept, since held-out text is the same for
    most measurements. The bundled tokenizer is tried once and in this process; others are tried in one of their own, as
    ever. The rate of matrix products is measured for a moment alone."""
    encode, known = sequences.encode, {}
    trial, verdicts = tokenizers._trial, list[JsonObject]()

    def encoded(tokenizer: Any, text: str) -> list[int]:
        if len(text) < 2000 or not _bundled(Path(getattr(tokenizer, "name_or_path", ""))):
            return encode(tokenizer, text)
        key = len(tokenizer), text
        if key not in known:
            known[key] = array("i", encode(tokenizer, text))
        return known[key].tolist()

    def tried_once(folder: Path) -> JsonObject:
        if not _bundled(folder):
            return trial(folder)
        if not verdicts:
            verdicts.append(tried(folder))
        return dict(verdicts[0])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizers, "_trial", tried_once)
        patch.setattr(hardware, "TIMED_SECONDS", 0.0)
        patch.setitem(STYLE, "figure.constrained_layout.use", False)
        patch.setattr(sequences, "encode", encoded)
        yield


def _bundled(folder: Path) -> bool:
    """Tell whether a folder's tokenizer is the bundled one, byte for byte."""
    return all(_content(folder / name) == _content(DEMO_MODEL / name) for name in FILES)


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None
