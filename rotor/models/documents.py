"""Documents: read from files and folders, from data sets, or from Python's standard library."""

from __future__ import annotations

import json
import shlex
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

from ..checked import JsonObject
from ..errors import DataError, MissingError
from ..logs import log
from ..recipe.sections import Tokens
from ..versions import pip_install
from .chats import read_chat, render
from .tokenizer import encode

if TYPE_CHECKING:
    from types import ModuleType

    from transformers import PreTrainedTokenizerBase

JSON_LINES = (
    'Give in each line an object with a text ({"text": "..."}) or a chat ({"messages": [{"role": "user", "content": '
    '"..."}]}, or ShareGPT\'s `conversations`), or plain text in a file of another name.'
)

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


def read_documents(path: Path, tokenizer: PreTrainedTokenizerBase | None = None) -> list[tuple[str, str]]:
    """The text of a file, or of every UTF-8 file in a folder, sorted by name; of *.jsonl a document a line.

    Args:
        tokenizer: the model's, whose chat template renders chats; without one their messages are joined.
    Returns:
        Documents, each with its topic: the `topic` of a line of *.jsonl, otherwise the name of its file.
    Raises:
        MissingError: no such file or folder.
        DataError: it holds no text, or a line of *.jsonl is not a document.
    """
    if not path.exists():
        raise MissingError(
            f"text {path}: no such file or folder.", "Give the path of a text file or of a folder of them."
        )
    documents: list[tuple[str | JsonObject, str]] = []
    skipped = []
    for file in [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file()):
        name = file.name if path.is_file() else file.relative_to(path).as_posix()
        try:
            text = _decoded(file)
            documents += _of_lines(file, text, name) if file.suffix == ".jsonl" else [(text, name)]
        except _NotText as error:
            if path.is_file():
                raise DataError(f"text {path}: {error}.", error.hint) from None
            skipped.append(f"{name} ({error})")
    chats = iter(render([chat for chat, _ in documents if isinstance(chat, dict)], tokenizer))
    texts = [(text if isinstance(text, str) else next(chats), topic) for text, topic in documents]
    texts = [(text, topic) for text, topic in texts if text.strip()]
    left_out = f" {len(skipped)} file{'s' * (len(skipped) > 1)} skipped: {', '.join(skipped)}"[:200] + "."
    if not texts:
        raise DataError(
            f"text {path}: no text in it.{left_out if skipped else ''}",
            "Give a text file, or a folder with UTF-8 files.",
        )
    if skipped:
        log.warning("text %s:%s", path, left_out)
    return texts


class _NotText(Exception):
    """A file that is not UTF-8 text. hint: what to do."""

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(what)
        self.hint = hint


def _decoded(file: Path) -> str:
    """The text of a file; raises _NotText."""
    data = file.read_bytes()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        if b"\0" in data:
            raise _NotText("not text but a binary file", "Give a text file (UTF-8).") from None
        raise _NotText(
            f"not UTF-8 (byte {error.start} is 0x{data[error.start]:02x})",
            f"Convert it: iconv -f latin1 -t utf-8 {shlex.quote(str(file))} > {shlex.quote(f'{file}.utf8')}",
        ) from None
    if "\0" in text:
        raise _NotText("not text but a binary file", "Give a text file (UTF-8).")
    return text.replace("\r\n", "\n").replace("\r", "\n")  # as Python reads text files


def _of_lines(file: Path, text: str, name: str) -> list[tuple[str | JsonObject, str]]:
    """The documents of JSON lines: of each its `text`, or its chat as `chats.read_chat` gives it; and its `topic`, or
    the name of the file."""
    documents: list[tuple[str | JsonObject, str]] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"text {file}, line {number}"
        try:
            data = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: not JSON: {error}"[:300], JSON_LINES) from None
        topic = data.get("topic") if isinstance(data, dict) else None
        topic = topic if isinstance(topic, str) else name
        if isinstance(data, dict) and isinstance(data.get("text"), str):
            documents.append((str(data["text"]), topic))
        elif isinstance(data, dict) and ("messages" in data or "conversations" in data):
            chat = read_chat(data)
            if isinstance(chat, str):
                raise DataError(f"{where}: {chat}.", JSON_LINES)
            documents.append((chat, topic))
        else:
            got = f"the keys {', '.join(map(str, data))}" if isinstance(data, dict) else type(data).__name__
            raise DataError(
                f"{where}: got {got}"[:200] + ", expected `text`, `messages` or `conversations`.", JSON_LINES
            )
    return documents


def require_datasets(spec: Tokens) -> ModuleType:
    """Import the package that reads data sets; raises DataError if it is not installed."""
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"tokens.dataset {spec.dataset}: the package `datasets` is not installed.",
            f"Install it with: {pip_install('eval')}",
        ) from None
    return datasets


def dataset_documents(spec: Tokens, tokenizer: PreTrainedTokenizerBase, tokens: int) -> list[str]:
    """Read documents of a data set in a seeded order until they make up `tokens` tokens.

    A data set on the hub is streamed, so that only its beginning is fetched.

    Raises:
        DataError: the package is missing, or the data set cannot be read or has no such split or column.
    """
    datasets = require_datasets(spec)
    what = f"tokens.dataset {spec.dataset}, split {spec.split}"
    require_tokenizer(tokenizer)
    folder = Path(str(spec.dataset))
    name, _, config = (str(folder), "", "") if folder.exists() else str(spec.dataset).partition(":")
    saved = folder / spec.split if (folder / "dataset_dict.json").is_file() else folder
    documents: list[str] = []
    try:
        if (saved / "state.json").is_file():
            examples = datasets.load_from_disk(str(saved))
        else:
            examples = datasets.load_dataset(name, config or None, split=spec.split, streaming=True)
        for example in examples.shuffle(seed=spec.seed):
            if spec.column not in example:
                raise DataError(f"{what}: no column {spec.column!r}.", f"There are {', '.join(example)}.")
            text = example[spec.column]
            if not isinstance(text, str):
                raise DataError(f"{what}: column {spec.column!r} holds {type(text).__name__}, expected text.")
            if text.strip():
                documents.append(text)
                tokens -= len(encode(tokenizer, text))
            if tokens <= 0:
                break
    except DataError:
        raise
    except Exception as error:  # errors of file readers, of pyarrow and of the network all come through `datasets`
        raise DataError(
            f"{what}: cannot be read: {' '.join(str(error).split())[:300]}",
            "Give the name of a data set on the hub (NAME or NAME:CONFIG), or a folder with one.",
        ) from error
    return documents


def stdlib_documents() -> list[str]:
    """Source files of HELD_OUT_MODULES in the running Python's standard library, one document a file."""
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


def require_tokenizer(tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Raise DataError if there is no tokenizer to read text with."""
    if tokenizer is None:
        raise DataError(
            "text needs a tokenizer, and the model's folder has none.",
            "Add tokenizer.json to it; without one calibrate on random tokens, and export a --compression.",
        )
