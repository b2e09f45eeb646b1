"""The tokenizer of a model folder, and text to ids."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError, DataError

if TYPE_CHECKING:
    from torch import Tensor

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""One of these has every tokenizer."""

TRIAL_TEXT = "naïve Größe, Москва, 日本語, हिन्दी, 😀, \u00a0\u200b\ufeff\u0301\r\n" + "".join(map(chr, range(32, 127)))
"""What every tokenizer must be able to read."""


def load_tokenizer(folder: Path, vocab_size: int) -> Any:
    """The tokenizer of a model folder, or None if it has none; no code in the folder is run.

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
        tokenizer(TRIAL_TEXT)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # many classes with errors of their own; a panic of tokenizers is no Exception
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"{folder}: the tokenizer cannot be loaded: {reason}", "Download the model again."
        ) from error
    largest = _largest_id(tokenizer)
    if largest >= vocab_size:
        raise CheckpointError(
            f"{folder}: the tokenizer has ids up to {largest}, config.json says vocab_size {vocab_size}.",
            "Check that the tokenizer belongs to this model.",
        )
    return tokenizer


def _largest_id(tokenizer: Any) -> int:
    """Of the vocabulary without added tokens: some models have an added one beyond their embeddings."""
    added = tokenizer.get_added_vocab()
    return max((number for word, number in tokenizer.get_vocab().items() if word not in added), default=-1)


def as_chat(tokenizer: Any, prompt: str) -> str:
    """A user's prompt in the model's chat template, which transformers runs in a sandbox, with the answer's beginning.

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
