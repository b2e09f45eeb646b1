"""Documents, each with a topic: of files and folders, of data sets, of Python's own standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import DataError, MissingError
from ..installing import pip_install
from ..models.tokenizer import encode
from ..progress import Advance
from ..recipe import Tokens

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

SHUFFLE_BUFFER = 1000
"""Documents that a streamed data set is shuffled among."""


class Document(NamedTuple):
    """A text and the topic that its source gives it."""

    text: str
    topic: str


def read_documents(path: Path) -> list[str]:
    """The text of a file, or of every UTF-8 file in a folder, sorted by name.

    Raises:
        DataError: nothing to read there.
    """
    return [document.text for document in read_topics(path)]


def read_topics(path: Path) -> list[Document]:
    """The text of a file, or of every UTF-8 file in a folder, sorted by name, with topics.

    The topic of a file is the sub-folder of `path` that it lies in, at any depth, or its own name if it lies in none.

    Raises:
        MissingError: there is no such place. DataError: nothing to read there.
    """
    if not path.exists():
        raise MissingError(
            f"text {path}: no such file or folder.", "Give the path of a text file or of a folder of them."
        )
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    documents = []
    for file in files:
        topic = file.name if file == path else file.relative_to(path).parts[0]
        try:
            documents.append(Document(file.read_text("utf-8"), topic))
        except UnicodeDecodeError:
            if path.is_file():
                raise DataError(f"text {path}: not UTF-8.", "Convert it to UTF-8.") from None
        except OSError as error:
            raise DataError(f"text {file}: cannot be read ({error.strerror}).") from error
    documents = [document for document in documents if document.text.strip()]
    if not documents:
        raise DataError(f"text {path}: no text in it.", "Give a text file, or a folder with UTF-8 files.")
    return documents


def dataset_documents(
    spec: Tokens, tokenizer: Any, tokens: int, advance: Advance = lambda done: None
) -> list[Document]:
    """Documents of a data set in a seeded order, as many as make up `tokens` tokens, sorted by topic.

    A folder that `save_to_disk` wrote or that holds data files is read from there; anything else is a name on the hub,
    of which only the beginning is streamed. `NAME:CONFIG` names one configuration of a data set.

    Raises:
        DataError: the `datasets` package is not installed, the data set cannot be read or has no such split or column.
    """
    what = f"tokens.dataset {spec.dataset}"
    require_tokenizer(tokenizer)
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{what}: the package `datasets` is not installed.", f"Install it with: {pip_install('eval')}"
        ) from error
    try:
        examples = _open_dataset(datasets, spec, what)
        documents = _dataset_texts(examples, spec, what, tokenizer, tokens, advance)
    except DataError:
        raise
    except Exception as error:  # errors of file readers, of pyarrow and of the network all come through `datasets`
        raise DataError(
            f"{what}, split {spec.split}: cannot be read: {' '.join(str(error).split())[:300]}",
            "Give the name of a data set on the hub (NAME or NAME:CONFIG), or a folder with one.",
        ) from error
    return sorted(documents, key=lambda document: document.topic)


def _open_dataset(datasets: Any, spec: Tokens, what: str) -> Any:
    """One split of a data set, shuffled by the seed."""
    assert spec.dataset is not None
    folder = Path(spec.dataset)
    if not folder.exists():
        if spec.dataset.startswith((".", "/", "~")):
            raise DataError(f"{what}: no such folder.", "Give a folder, or the name of a data set on the hub.")
        name, _, config = spec.dataset.partition(":")
        streamed = datasets.load_dataset(name, config or None, split=spec.split, streaming=True)
        return streamed.shuffle(seed=spec.seed, buffer_size=SHUFFLE_BUFFER)
    saved = (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()
    loaded = datasets.load_from_disk(str(folder)) if saved else datasets.load_dataset(str(folder))
    if isinstance(loaded, dict):
        if spec.split not in loaded:
            raise DataError(
                f"{what}: no split {spec.split!r}; it has {', '.join(loaded)}.",
                "Name one of them with --set tokens.split=NAME.",
            )
        loaded = loaded[spec.split]
    return loaded.shuffle(seed=spec.seed)


def _dataset_texts(
    examples: Any, spec: Tokens, what: str, tokenizer: Any, tokens: int, advance: Advance
) -> list[Document]:
    """The first documents that make up `tokens` tokens."""
    columns = examples.column_names or list(next(iter(examples), {}))
    for field, name in (("tokens.column", spec.column), ("tokens.topic_column", spec.topic_column)):
        if name is not None and name not in columns:
            raise DataError(
                f"{what}, split {spec.split}: no column {name!r}; it has {', '.join(columns) or 'none'}.",
                f"Name one of them with --set {field}=NAME.",
            )
    documents: list[Document] = []
    found = 0
    for example in examples:
        text = example[spec.column]
        if not isinstance(text, str):
            raise DataError(
                f"{what}: column {spec.column!r} holds {type(text).__name__}, expected text.",
                f"Name a column of text with --set tokens.column=NAME; there are {', '.join(columns)}.",
            )
        if not text.strip():
            continue
        topic = "dataset" if spec.topic_column is None else _topic_name(examples, spec.topic_column, example)
        documents.append(Document(text, topic))
        length = len(encode(tokenizer, text))
        found += length
        advance(length)
        if found >= tokens:
            break
    return documents


def _topic_name(examples: Any, column: str, example: dict[str, Any]) -> str:
    """The label of one example; class labels by their names."""
    feature: Any = (examples.features or {}).get(column)
    value = example[column]
    return feature.int2str(value) if hasattr(feature, "int2str") and isinstance(value, int) else str(value)


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


def require_tokenizer(tokenizer: Any) -> None:
    """Raises DataError if there is no tokenizer to read text with."""
    if tokenizer is None:
        raise DataError(
            "text needs a tokenizer, and the model's folder has none.",
            "Add tokenizer.json to it; without one calibrate on random tokens, and export a --compression.",
        )
