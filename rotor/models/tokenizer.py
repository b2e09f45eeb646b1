"""The tokenizer of a model of unknown origin: tried in a child process with limits, then loaded; text to ids.

A tokenizer is a program: its file can ask for any amount of memory or time, or end the process that reads it.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError, DataError
from . import tokenizer_trial

if TYPE_CHECKING:
    from torch import Tensor

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""One of these has every tokenizer."""

SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json")
FILES = (*VOCABULARIES, "merges.txt", "vocab.txt", *SETTINGS)
MEMORY_BYTES, CPU_S, TIMEOUT_S = 4 << 30, 60, 120.0
"""What a trial may take: data in memory, seconds of processor time, and seconds in all."""

CHAT_CPU_S = 20
"""Seconds of processor time that a chat template may take, most of which is the start of the process."""

TRIAL_TEXT = "\n".join(
    [
        "The quick brown fox jumps over 13 lazy dogs; 3.14159 is near 22/7, and (a + b) * c != a + b * c.",
        "".join(map(chr, range(32, 127))),
        "def f(x):\n\treturn {'key': [x, None]}  # comment\r\n",
        "Größe, naïve, Ελλάδα, Москва, שלום, مرحبا, 日本語, 한국어, हिन्दी, ไทย, 😀👩‍🔬, ﬁ, ½, \u00a0\u200b\ufeff\u0301",
    ]
)
"""What every tokenizer must be able to read: words, every printable character of ASCII, scripts."""

TEXT = "a"
"""A text of which a tokenizer shows what it puts before one."""

SAID = "what a user says"
"""In a chat template, to find where that is."""

_verdicts: dict[str, dict[str, Any]] = {}
"""Of the trials in this process, by the SHA-256 of the files."""


def load_tokenizer(folder: Path, vocab_size: int) -> Any:
    """The tokenizer of a model folder, or None if it has none; no code in the folder is run.

    Args:
        vocab_size: the model's.
    Raises:
        CheckpointError: it cannot be loaded or used within the limits above, or gives ids that the model does not have.
    """
    if not any((folder / name).is_file() for name in VOCABULARIES):
        return None
    verdict = _tried(folder)
    error = verdict.get("error")
    if error is None and verdict["largest"] >= vocab_size:
        raise CheckpointError(
            f"{folder}: the tokenizer has ids up to {verdict['largest']}, config.json says vocab_size {vocab_size}.",
            "Check that the tokenizer belongs to this model.",
        )
    from transformers import AutoTokenizer  # brings all of transformers, which reading headers does not need

    try:
        if error is None:
            return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as caught:  # many classes, each with errors of its own
        error = " ".join(str(caught).split())[:300]
    raise CheckpointError(f"{folder}: the tokenizer cannot be loaded: {error}", "Download the model again.")


def _tried(folder: Path) -> dict[str, Any]:
    """What the trial said, once for each content of the files."""
    digest = hashlib.sha256()
    for path in (folder / name for name in FILES if (folder / name).is_file()):
        digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    key = digest.hexdigest()
    if key not in _verdicts:
        _verdicts[key] = _trial(folder)
    return _verdicts[key]


def as_chat(folder: Path, prompt: str) -> str:
    """A user's prompt in the model's chat template, with the beginning of an answer.

    A template is a program of the folder's: it is run where a tokenizer is tried.

    Raises:
        CheckpointError: it fails, or not within the limits above.
    """
    verdict = _in_child("chat", folder, prompt, CHAT_CPU_S)
    if "error" in verdict:
        raise CheckpointError(
            f"{folder}: its chat template cannot be applied: {verdict['error']}",
            "Give --raw to continue the prompt as it is.",
        )
    return str(verdict["text"])


def chat_opening(folder: Path, tokenizer: Any) -> list[int]:
    """Tokens of a model's chat template before what a user says; none where it has no template, or one that fails."""
    if not getattr(tokenizer, "chat_template", None):
        return []
    text = str(_in_child("chat", folder, SAID, CHAT_CPU_S).get("text", ""))
    return encode(tokenizer, text.partition(SAID)[0]) if SAID in text else []


def _trial(folder: Path) -> dict[str, Any]:
    return _in_child("text", folder, TRIAL_TEXT, CPU_S)


def _in_child(task: str, folder: Path, text: str, cpu_s: int) -> dict[str, Any]:
    """Run rotor.models.tokenizer_trial in a process of its own."""
    command = [sys.executable, tokenizer_trial.__file__, task, str(folder.absolute()), str(MEMORY_BYTES), str(cpu_s)]
    try:
        done = subprocess.run(
            command,
            input=text.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=TIMEOUT_S,
            env={**os.environ, "PYTHONWARNINGS": "ignore"},
        )
        verdict: dict[str, Any] = json.loads(done.stdout.rstrip().rpartition(b"\n")[2])
        return verdict
    except subprocess.TimeoutExpired:
        return {"error": f"it was not done within {TIMEOUT_S:g} s"}
    except OSError as error:
        return {"error": f"the process that tries it cannot be started ({error.strerror})"}
    except ValueError:  # it did not live to say anything
        return {"error": f"the process that tried it ended with code {done.returncode} (a signal, if negative)"}


def encode(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text, without special tokens around it.

    Raises:
        DataError: the tokenizer cannot read the text.
    """
    return _ids(tokenizer, text, add_special_tokens=False)


def text_start(tokenizer: Any) -> list[int]:
    """Tokens that a tokenizer puts before a text by itself: BOS in Gemma, Llama 3 and Mistral, nothing in many others.

    A text is served behind them, and a model that was trained with a BOS is another one without it.

    Raises:
        DataError: the tokenizer cannot read a text.
    """
    if tokenizer is None:
        return []
    text, whole = encode(tokenizer, TEXT), _ids(tokenizer, TEXT, add_special_tokens=True)
    starts = (start for start in range(len(whole)) if whole[start : start + len(text)] == text)
    return whole[: next(starts, 0)]


def _ids(tokenizer: Any, text: str, *, add_special_tokens: bool) -> list[int]:
    """Ids of a text; raises as `encode`."""
    try:
        ids: list[int] = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic of the tokenizers library is no Exception
        raise DataError(
            f"the tokenizer cannot read the text: {type(error).__name__}: {' '.join(str(error).split())[:200]}",
            "Check that the tokenizer belongs to this model, or give another text.",
        ) from error
    return ids


def check_ids(ids: Tensor, vocab_size: int) -> None:
    """Raises DataError if a text has an id that the model has no embedding for, as some added tokens are."""
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise DataError(
            f"the tokenizer gives the id {int(ids.max())}, config.json says vocab_size {vocab_size}.",
            "Check that the tokenizer belongs to this model, and that the text names no special tokens.",
        )
