"""Token sequences for calibration and evaluation: random ones, text and data sets cut into rows of equal length, and
text that the model itself writes."""

from __future__ import annotations

import sysconfig
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import StaticCache

from ..errors import DataError, NumericsError
from ..installing import pip_install
from ..models.projections import longest_row
from ..models.tokenizer import encode
from ..numerics import first_not_finite
from ..progress import Advance, Progress
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


SAMPLING_TOKENS = 32768
"""Tokens whose keys and values are in memory at once while the model writes; a constant, so that what is drawn does not
depend on a command's flags."""

SHUFFLE_BUFFER = 1000
"""Documents that a streamed data set is shuffled among."""


class Document(NamedTuple):
    """A text and the topic that its source gives it."""

    text: str
    topic: str


@dataclass(frozen=True)
class CalibrationTokens:
    """Rows of tokens to calibrate on.

    rows: [num_rows, seq_len], int64.
    topics: one label a row; the same for all rows where the source has no topics.
    documents: the texts that they were taken from; empty where the source is no text.
    """

    rows: Tensor
    topics: tuple[str, ...]
    documents: tuple[str, ...] = ()

    def topic_counts(self) -> dict[str, int]:
        """Rows of each topic, sorted by name."""
        return dict(sorted(Counter(self.topics).items()))


def calibration_tokens(
    spec: Tokens,
    config: Any,
    tokenizer: Any,
    model: Any = None,
    progress: Progress | None = None,
    select: Callable[[list[Document]], list[Document]] = lambda documents: documents,
) -> CalibrationTokens:
    """Sequences to calibrate on.

    Args:
        spec: what the recipe asks for.
        select: which documents of a text may be taken; held-out ones may not.
        config: the model's transformers config (vocabulary size, longest sequence).
        tokenizer: the model's tokenizer, or None if the folder has none.
        model: the causal model itself; only the source `synthetic` runs it.
    Returns:
        At least spec.count tokens in rows of spec.seq_len, or of the model's longest sequence if that is shorter.
    Raises:
        DataError: the text or data set is missing or too short, or a package that reads it is.
        NumericsError: the model that writes the text overflows.
    """
    seq_len = longest_row(spec.seq_len, config)
    count = -(-spec.count // seq_len)
    progress = progress or Progress()
    if spec.source == "random":
        rows = random_tokens(count, seq_len, config, tokenizer, spec.seed)
    elif spec.source == "synthetic":
        with progress.task("sample", count * seq_len, "tokens") as advance:
            rows = synthetic_tokens(model, count, seq_len, config, tokenizer, spec.seed, advance)
    else:
        if spec.source == "text":
            assert spec.path is not None
            documents, what = read_topics(Path(spec.path)), f"tokens.path {spec.path}"
        else:
            with progress.task("read data set", count * seq_len, "tokens") as advance:
                documents = dataset_documents(spec, tokenizer, count * seq_len, advance)
            what = f"tokens.dataset {spec.dataset}"
        documents = select(documents)
        cut = topic_rows(documents, tokenizer, seq_len)
        check_ids(cut.rows, config)
        chosen = spread_indices(cut.rows, count, what)
        topics, texts = tuple(cut.topics[i] for i in chosen.tolist()), tuple(document.text for document in documents)
        return CalibrationTokens(cut.rows[chosen], topics, texts)
    return CalibrationTokens(rows, (spec.source,) * count)


def ordinary_tokens(config: Any, tokenizer: Any) -> Tensor:
    """Ids of the vocabulary without special tokens, and without those beyond the tokenizer's: [n], int64, ascending."""
    special = {getattr(config, f"{kind}_token_id", None) for kind in ("bos", "eos", "pad")}
    size = config.vocab_size
    if tokenizer is not None:
        special |= set(tokenizer.all_special_ids)
        size = min(size, len(tokenizer))
    flat = {i for item in special for i in (item if isinstance(item, list) else [item])}
    return torch.tensor([i for i in range(size) if i not in flat])


def random_tokens(rows: int, seq_len: int, config: Any, tokenizer: Any, seed: int) -> Tensor:
    """Uniform draws from the vocabulary without special tokens: [rows, seq_len]; raises DataError if it has no others.

    Source: FDC section 5.1.
    """
    allowed = ordinary_tokens(config, tokenizer)
    if len(allowed) == 0:
        raise DataError(
            f"all {config.vocab_size} tokens of the vocabulary are special: there are none to draw from.",
            "Check that the tokenizer belongs to this model.",
        )
    generator = torch.Generator().manual_seed(seed)
    return allowed[torch.randint(len(allowed), (rows, seq_len), generator=generator)]


@torch.inference_mode()
def synthetic_tokens(
    model: Any,
    rows: int,
    seq_len: int,
    config: Any,
    tokenizer: Any,
    seed: int,
    advance: Advance = lambda done: None,
) -> Tensor:
    """Text sampled from the model at temperature 1: [rows, seq_len], int64.

    Every second row starts with the token that text starts with, where there is one, the others with a random ordinary
    token: what attention does with such a first token, often a sink, must be in the statistics. Other special tokens
    are never drawn, so a row does not end early. transformers' `generate` would draw from the global
    generator; this draws from its own.

    Raises:
        NumericsError: the model's logits are not finite.
    Source: ZACK calibrates on sentences that the model generates from random starts.
    """
    allowed = ordinary_tokens(config, tokenizer)
    starts = random_tokens(rows, 1, config, tokenizer, seed)
    first = separator_token(tokenizer)
    if first is not None:
        starts[::2] = first
    allowed_there = allowed.to(model.device)
    generator = torch.Generator(model.device).manual_seed(seed)
    written = []
    for batch in starts.split(max(1, SAMPLING_TOKENS // seq_len)):
        last = batch.to(model.device)
        steps = [last]
        cache = StaticCache(config=model.config, max_cache_len=seq_len)  # a growing one would be copied at every step
        advance(len(batch))
        for _ in range(seq_len - 1):
            logits = model(last, past_key_values=cache, use_cache=True).logits[:, -1, allowed_there].float()
            if not torch.isfinite(logits).all():
                place = first_not_finite(model, lambda: model(torch.cat(steps, dim=1), use_cache=False))  # noqa: B023
                raise NumericsError(
                    f"the model's logits are not finite while it writes token {len(steps)} of its calibration text"
                    f"{place}.",
                    "Calibrate with --dtype float32, or on other tokens with --set tokens.source=random.",
                )
            last = allowed_there[torch.multinomial(logits.softmax(-1), 1, generator=generator)]
            steps.append(last)
            advance(len(batch))
        written.append(torch.cat(steps, dim=1).cpu())
    return torch.cat(written)


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
        DataError: nothing to read there.
    """
    if not path.exists():
        raise DataError(f"text {path}: no such file or folder.", "Give the path of a text file or of a folder of them.")
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


def separator_token(tokenizer: Any) -> int | None:
    """The token that a text starts with, or is kept apart from the next by; None where nothing is known of one."""
    if tokenizer is None:
        return None
    return tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id


def require_tokenizer(tokenizer: Any) -> None:
    """Raises DataError if there is no tokenizer to read text with."""
    if tokenizer is None:
        raise DataError(
            "text needs a tokenizer, and the model's folder has none.",
            "Add tokenizer.json to it; without one calibrate on random tokens, and export a --compression.",
        )


def check_ids(rows: Tensor, config: Any) -> None:
    """Raises DataError if rows of text hold an id that the model has no embedding for, as some added tokens are."""
    if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < config.vocab_size:
        raise DataError(
            f"the tokenizer gives the id {int(rows.max())}, config.json says vocab_size {config.vocab_size}.",
            "Check that the tokenizer belongs to this model, and that the text names no special tokens.",
        )


def text_rows(documents: list[str], tokenizer: Any, seq_len: int) -> Tensor:
    """Documents joined by the model's separator token and cut into rows: [rows, seq_len], the rest dropped."""
    return topic_rows([Document(text, "") for text in documents], tokenizer, seq_len).rows


def topic_rows(documents: list[Document], tokenizer: Any, seq_len: int) -> CalibrationTokens:
    """Documents joined by the model's separator token and cut into rows, the rest dropped.

    A row may run over the end of a document; its topic is the one that most of its tokens come from.
    """
    require_tokenizer(tokenizer)
    separator = separator_token(tokenizer)
    names = sorted({document.topic for document in documents})
    number = {name: i for i, name in enumerate(names)}
    ids: list[int] = []
    lengths, owners = [], []
    for text, topic in documents:
        before = len(ids)
        if separator is not None:
            ids.append(separator)
        ids += encode(tokenizer, text)
        lengths.append(len(ids) - before)
        owners.append(number[topic])
    count = len(ids) // seq_len
    rows = torch.tensor(ids[: count * seq_len], dtype=torch.int64).reshape(count, seq_len)
    owner = torch.tensor(owners, dtype=torch.int64).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
    most = owner[: count * seq_len].reshape(count, seq_len).mode(dim=1).values if count else owner[:0]
    return CalibrationTokens(rows, tuple(names[i] for i in most.tolist()))


def rows_in(documents: list[str], tokenizer: Any, seq_len: int, enough: int) -> int:
    """How many rows `text_rows` would cut documents into; no more is read than what makes `enough` of them."""
    count, own = 0, separator_token(tokenizer) is not None
    for text in documents:
        count += own + len(encode(tokenizer, text))
        if count >= enough * seq_len:
            return enough
    return count // seq_len


def spread_rows(rows: Tensor, count: int, what: str) -> Tensor:
    """`count` rows at equal distances.

    Raises:
        DataError: there are fewer; names `what`.
    """
    return rows[spread_indices(rows, count, what)]


def spread_indices(rows: Tensor, count: int, what: str) -> Tensor:
    """Indices of `count` rows at equal distances; DataError that names `what` if there are fewer."""
    if rows.shape[0] < count:
        raise DataError(
            f"{what}: {rows.shape[0]} rows of {rows.shape[1]} tokens, expected {count}.",
            "Give a longer text, or ask for fewer or shorter rows with --set.",
        )
    return torch.arange(count) * rows.shape[0] // max(count, 1)
