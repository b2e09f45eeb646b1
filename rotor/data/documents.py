"""Documents, each with a topic: of files and folders, of data sets, of Python's own standard library."""

from __future__ import annotations

import importlib.util
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
    """The texts of `read_topics`, which raises likewise."""
    return [document.text for document in read_topics(path)]


def read_topics(path: Path) -> list[Document]:
    """The text of a file, or of every UTF-8 file in a folder, sorted by name.

    The topic of a file is the sub-folder of `path` that it lies in, at any depth, or its own name if it lies in none.

    Raises:
        MissingError: there is no such place. DataError: nothing to read there.
    """
    if not path.exists():
        raise MissingError(
            f"text {path}: no such file or folder.", "Give the path of a text file or of a folder of them."
        )
    documents = []
    for file in [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file()):
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
    check_dataset(str(spec.dataset))
    import datasets

    documents: list[Document] = []
    found = 0
    try:
        examples = _open_dataset(datasets, spec, what)
        for example in examples:
            text = example.get(spec.column)
            if not isinstance(text, str):
                got = type(text).__name__ if spec.column in example else "nothing"
                raise DataError(
                    f"{what}, split {spec.split}: column {spec.column!r} holds {got}, expected text.",
                    f"Name one with --set tokens.column=NAME; there are {', '.join(example)}.",
                )
            if text.strip():
                documents.append(Document(text, _topic(examples, spec, example)))
                length = len(encode(tokenizer, text))
                found += length
                advance(length)
            if found >= tokens:
                break
    except DataError:
        raise
    except Exception as error:  # errors of file readers, of pyarrow and of the network all come through `datasets`
        raise DataError(
            f"{what}, split {spec.split}: cannot be read: {' '.join(str(error).split())[:300]}",
            "Give the name of a data set on the hub (NAME or NAME:CONFIG), or a folder with one.",
        ) from error
    return sorted(documents, key=lambda document: document.topic)


def _topic(examples: Any, spec: Tokens, example: dict[str, Any]) -> str:
    """The label of an example; class labels by their names."""
    column = spec.topic_column
    if column is None:
        return "dataset"
    if column not in example:
        raise DataError(
            f"tokens.dataset {spec.dataset}, split {spec.split}: no column {column!r}.",
            f"Name one with --set tokens.topic_column=NAME; there are {', '.join(example)}.",
        )
    feature: Any = (examples.features or {}).get(column)
    value = example[column]
    return str(feature.int2str(value)) if hasattr(feature, "int2str") and isinstance(value, int) else str(value)


def check_dataset(name: str) -> None:
    """Raises DataError where the package `datasets` or a local folder is missing."""
    what = f"tokens.dataset {name}"
    if importlib.util.find_spec("datasets") is None:
        raise DataError(f"{what}: the package `datasets` is not installed.", f"Install it with: {pip_install('eval')}")
    if name.startswith((".", "/", "~")) and not Path(name).exists():
        raise DataError(f"{what}: no such folder.", "Give a folder, or the name of a data set on the hub.")


def _open_dataset(datasets: Any, spec: Tokens, what: str) -> Any:
    """One split of a data set, shuffled by the seed."""
    assert spec.dataset is not None
    folder = Path(spec.dataset)
    if not folder.exists():
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
