"""The tokenizer of a model of unknown origin: loaded and tried; text to ids. No code in the folder is run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError, DataError

if TYPE_CHECKING:
    from torch import Tensor

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""One of these has every tokenizer."""

TRIAL_TEXT = "\n".join(
    [
        "The quick brown fox jumps over 13 lazy dogs; 3.14159 is near 22/7, and (a + b) * c != a + b * c.",
        "".join(map(chr, range(32, 127))),
        "def f(x):\n\treturn {'key': [x, None]}  # comment\r\n",
        "Größe, naïve, Ελλάδα, Москва, שלום, مرحبا, 日本語, 한국어, हिन्दी, ไทย, 😀👩‍🔬, ﬁ, ½, \u00a0\u200b\ufeff\u0301",
    ]
)
"""What every tokenizer must be able to read: words, every printable character of ASCII, scripts."""


def load_tokenizer(folder: Path, vocab_size: int) -> Any:
    """The tokenizer of a model folder, or None if it has none.

    Args:
        vocab_size: the model's.
    Raises:
        CheckpointError: it cannot be loaded or used, or gives ids that the model does not have.
    """
    if not any((folder / name).is_file() for name in VOCABULARIES):
        return None
    from transformers import AutoTokenizer  # brings all of transformers, which reading headers does not need

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        tokenizer.decode(encode(tokenizer, TRIAL_TEXT))
        largest = _largest_id(tokenizer)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # many classes, each with errors of its own; a panic is no Exception
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise CheckpointError(
            f"{folder}: the tokenizer cannot be loaded: {reason}", "Download the model again."
        ) from error
    if largest >= vocab_size:
        raise CheckpointError(
            f"{folder}: the tokenizer has ids up to {largest}, config.json says vocab_size {vocab_size}.",
            "Check that the tokenizer belongs to this model.",
        )
    return tokenizer


def _largest_id(tokenizer: Any) -> int:
    """Of the vocabulary without added tokens: some models have an added one beyond their embeddings."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return max(backend.get_vocab(with_added_tokens=False).values(), default=-1)
    added = tokenizer.get_added_vocab()
    return max((number for word, number in tokenizer.get_vocab().items() if word not in added), default=-1)


def as_chat(tokenizer: Any, prompt: str) -> str:
    """A user's prompt in the model's chat template, which jinja's sandbox runs, with the beginning of an answer.

    Raises:
        CheckpointError: the template fails.
    """
    said = [{"role": "user", "content": prompt}]
    try:
        return str(tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False))
    except Exception as error:  # whatever a template raises
        raise CheckpointError(
            f"{tokenizer.name_or_path}: its chat template cannot be applied: {' '.join(str(error).split())[:300]}",
            "Give --raw to continue the prompt as it is.",
        ) from error


def encode(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text, without special tokens around it.

    Raises:
        DataError: the tokenizer cannot read the text.
    """
    try:
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
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
