"""Load the tokenizer of a model of unknown origin, after a trial in a child process with limits; convert text to ids.

A tokenizer is a program: its file can ask for any amount of memory or time, or crash the process that reads it.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checked import JsonObject
from ..errors import CheckpointError, DataError
from . import tokenizer_trial

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""Files of which every tokenizer has at least one."""

SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json")
FILES = (*VOCABULARIES, "merges.txt", "vocab.txt", *SETTINGS)
MEMORY_BYTES = 4 << 30
"""Limit of a trial's data in memory."""

CPU_S = 60
"""Limit of a trial's processor time."""

TIMEOUT_S = 120.0
"""Limit of a trial's wall-clock time."""

CHAT_CPU_S = 20
"""Limit of a chat template's processor time, most of which is the start of the process."""

CHAT_CHARACTERS_A_SECOND = 200_000
"""Characters of chats for each of which a second is added to CPU_S."""

TRIAL_TEXT = "\n".join(
    [
        "The quick brown fox jumps over 13 lazy dogs; 3.14159 is near 22/7, and (a + b) * c != a + b * c.",
        "".join(map(chr, range(32, 127))),
        "def f(x):\n\treturn {'key': [x, None]}  # comment\r\n",
        "Größe, naïve, Ελλάδα, Москва, שלום, مرحبا, 日本語, 한국어, हिन्दी, ไทย, 😀👩‍🔬, ﬁ, ½, \u00a0\u200b\ufeff\u0301",
    ]
)
"""Text that every tokenizer must be able to read: words, all printable ASCII, many scripts."""

PROBE_TEXT = "a"
"""Text that is tokenized with and without special tokens, to see which tokens the tokenizer puts before it."""

CHAT_PROBE = "what a user says"
"""User message whose position in a rendered chat template shows where the template's opening ends."""

_verdicts: dict[str, JsonObject] = {}
"""Results of the trials in this process, by the SHA-256 of the tokenizer's files."""


def load_tokenizer(folder: Path, vocab_size: int) -> Any:
    """Load the tokenizer of a model folder, or return None if it has none; no code in the folder is run.

    Args:
        vocab_size: vocabulary size of the model.
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
    from transformers import AutoTokenizer  # loads all of transformers, which reading headers does not need

    try:
        if error is None:
            return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as caught:  # tokenizer classes raise errors of many kinds
        error = " ".join(str(caught).split())[:300]
    raise CheckpointError(f"{folder}: the tokenizer cannot be loaded: {error}", "Download the model again.")


def _tried(folder: Path) -> JsonObject:
    """Result of the trial, which runs once for each content of the files."""
    digest = hashlib.sha256()
    for path in (folder / name for name in FILES if (folder / name).is_file()):
        digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    key = digest.hexdigest()
    if key not in _verdicts:
        _verdicts[key] = _trial(folder)
    return _verdicts[key]


def as_chat(folder: Path, prompt: str) -> str:
    """Render a user's prompt with the model's chat template, up to the beginning of the answer.

    A template is a program from the folder, so it runs in the same child process as a tokenizer's trial.

    Raises:
        CheckpointError: the template fails or exceeds the limits above.
    """
    verdict = _in_child("chat", folder, prompt, CHAT_CPU_S)
    if "error" in verdict:
        raise CheckpointError(
            f"{folder}: its chat template cannot be applied: {verdict['error']}",
            "Give --raw to continue the prompt as it is.",
        )
    return str(verdict["text"])


def as_chats(folder: Path, chats: str) -> JsonObject:
    """Render chats with the model's chat template, in the same child process.

    Args:
        chats: JSON of a list of {"messages": [...], "tools": [...] or null}.
    Returns:
        `texts`, of each chat its text or null where the template fails, and then `first_error`; or `error` alone.
    """
    return _in_child("chats", folder, chats, CPU_S + len(chats) // CHAT_CHARACTERS_A_SECOND)


def chat_opening(folder: Path, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens of the chat template before the user's message; empty without a template or if it fails."""
    if not getattr(tokenizer, "chat_template", None):
        return []
    text = str(_in_child("chat", folder, CHAT_PROBE, CHAT_CPU_S).get("text", ""))
    return encode(tokenizer, text.partition(CHAT_PROBE)[0]) if CHAT_PROBE in text else []


def _trial(folder: Path) -> JsonObject:
    return _in_child("text", folder, TRIAL_TEXT, CPU_S)


def _in_child(task: str, folder: Path, text: str, cpu_s: int) -> JsonObject:
    """Run rotor.models.tokenizer_trial in a child process."""
    timeout = TIMEOUT_S + 2 * max(0, cpu_s - CPU_S)
    command = [sys.executable, tokenizer_trial.__file__, task, str(folder.absolute()), str(MEMORY_BYTES), str(cpu_s)]
    try:
        done = subprocess.run(
            command,
            input=text.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=timeout,
            env={**os.environ, "PYTHONWARNINGS": "ignore"},
        )
        verdict: JsonObject = json.loads(done.stdout.rstrip().rpartition(b"\n")[2])
        return verdict
    except subprocess.TimeoutExpired:
        return {"error": f"it was not done within {timeout:g} s"}
    except OSError as error:
        return {"error": f"the process that tries it cannot be started ({error.strerror})"}
    except ValueError:  # the child died before it printed a verdict
        return {"error": f"the process that tried it ended with code {done.returncode} (a signal, if negative)"}


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Convert a text to ids, without special tokens around it.

    Raises:
        DataError: the tokenizer cannot read the text.
    """
    return _ids(tokenizer, text, add_special_tokens=False)


def text_start(tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    """Tokens that a tokenizer puts before a text by default: BOS in Gemma, Llama 3 and Mistral, nothing in many others.

    Models are served with these tokens, and a model trained with a BOS behaves differently without it.

    Raises:
        DataError: the tokenizer cannot read a text.
    """
    if tokenizer is None:
        return []
    text = encode(tokenizer, PROBE_TEXT)
    whole = _ids(tokenizer, PROBE_TEXT, add_special_tokens=True)
    starts = (start for start in range(len(whole)) if whole[start : start + len(text)] == text)
    return whole[: next(starts, 0)]


def _ids(tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool) -> list[int]:
    """Convert a text to ids; raises like `encode`."""
    try:
        ids: list[int] = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic of the tokenizers library is not an Exception
        raise DataError(
            f"the tokenizer cannot read the text: {type(error).__name__}: {' '.join(str(error).split())[:200]}",
            "Check that the tokenizer belongs to this model, or give another text.",
        ) from error
    return ids


def check_ids(ids: Tensor, vocab_size: int) -> None:
    """Raise DataError if an id has no embedding in the model, which happens with some added tokens."""
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise DataError(
            f"the tokenizer gives the id {int(ids.max())}, config.json says vocab_size {vocab_size}.",
            "Check that the tokenizer belongs to this model, and that the text names no special tokens.",
        )
