"""Token sequences for calibration and evaluation: random ones, and text cut into rows of equal length."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import DataError
from .recipe import Tokens

HELD_OUT_MODULES = (
    "argparse.py",
    "asyncio",
    "difflib.py",
    "email",
    "http",
    "json",
    "logging",
    "statistics.py",
    "tarfile.py",
    "typing.py",
    "unittest",
    "zipfile.py",
)
"""Standard-library modules and packages that the bundled model was not trained on."""


def calibration_tokens(spec: Tokens, config: Any, tokenizer: Any) -> Tensor:
    """Sequences to calibrate on.

    Args:
        spec: what the recipe asks for.
        config: the model's transformers config (vocabulary size, longest sequence).
        tokenizer: the model's tokenizer, or None if the folder has none.
    Returns:
        [rows, seq_len], int64; at least spec.count tokens.
    Raises:
        DataError: the text is missing or too short.
    """
    seq_len = longest_row(spec.seq_len, config)
    rows = -(-spec.count // seq_len)
    if spec.source == "random":
        return random_tokens(rows, seq_len, config, tokenizer, spec.seed)
    assert spec.path is not None
    return spread_rows(text_rows(read_documents(Path(spec.path)), tokenizer, seq_len), rows, f"tokens.path {spec.path}")


def random_tokens(rows: int, seq_len: int, config: Any, tokenizer: Any, seed: int) -> Tensor:
    """Uniform draws from the vocabulary without special tokens: [rows, seq_len].

    Source: FDC section 5.1.
    """
    special = {getattr(config, f"{kind}_token_id", None) for kind in ("bos", "eos", "pad")}
    size = config.vocab_size
    if tokenizer is not None:
        special |= set(tokenizer.all_special_ids)
        size = min(size, len(tokenizer))
    flat = {i for item in special for i in (item if isinstance(item, list) else [item])}
    allowed = torch.tensor([i for i in range(size) if i not in flat])
    generator = torch.Generator().manual_seed(seed)
    return allowed[torch.randint(len(allowed), (rows, seq_len), generator=generator)]


def longest_row(seq_len: int, config: Any) -> int:
    """`seq_len`, but not more than the model's positions."""
    return min(seq_len, getattr(config, "max_position_embeddings", None) or seq_len)


def read_documents(path: Path) -> list[str]:
    """The text of a file, or of every UTF-8 file in a folder, sorted by name.

    Raises:
        DataError: nothing to read there.
    """
    if not path.exists():
        raise DataError(f"text {path}: no such file or folder.", "Give the path of a text file or of a folder of them.")
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    documents = []
    for file in files:
        try:
            documents.append(file.read_text("utf-8"))
        except UnicodeDecodeError:
            if path.is_file():
                raise DataError(f"text {path}: not UTF-8.", "Convert it to UTF-8.") from None
        except OSError as error:
            raise DataError(f"text {file}: cannot be read ({error.strerror}).") from error
    documents = [text for text in documents if text.strip()]
    if not documents:
        raise DataError(f"text {path}: no text in it.", "Give a text file, or a folder with UTF-8 files.")
    return documents


def stdlib_documents() -> list[str]:
    """Source of HELD_OUT_MODULES in the running Python's standard library, one document a file."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files: list[Path] = []
    for name in HELD_OUT_MODULES:
        package = root / name.removesuffix(".py")
        files += [root / name] if (root / name).is_file() else sorted(package.rglob("*.py"))
    documents = [file.read_text("utf-8", errors="ignore") for file in files if "test" not in file.parts]
    documents = [text for text in documents if text.strip()]
    if not documents:
        raise DataError(
            f"the standard library at {root} has no source files.",
            "Give a text with --set evaluation.source=text --set evaluation.path=FILE.",
        )
    return documents


def text_rows(documents: list[str], tokenizer: Any, seq_len: int) -> Tensor:
    """Documents joined by the model's separator token and cut into rows: [rows, seq_len], the rest dropped."""
    if tokenizer is None:
        raise DataError("text needs a tokenizer, and the model's folder has none.", "Add tokenizer.json to it.")
    separator = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    ids: list[int] = []
    for text in documents:
        if separator is not None:
            ids.append(separator)
        ids += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    count = len(ids) // seq_len
    return torch.tensor(ids[: count * seq_len], dtype=torch.int64).reshape(count, seq_len)


def spread_rows(rows: Tensor, count: int, what: str) -> Tensor:
    """`count` rows at equal distances.

    Raises:
        DataError: there are fewer; names `what`.
    """
    if rows.shape[0] < count:
        raise DataError(
            f"{what}: {rows.shape[0]} rows of {rows.shape[1]} tokens, expected {count}.",
            "Give a longer text, or ask for fewer or shorter rows with --set.",
        )
    return rows[torch.arange(count) * rows.shape[0] // max(count, 1)]
