"""Documents of long-context tasks that need no corpus: six tasks of RULER, and two of several needles.

RULER's texts are written by lm-eval's functions, each as long as fits. What differs from lm-eval's tasks: `vt` shows no
worked example, and below 1024 tokens `cwe` repeats its common words three times in place of six.

Several needles, as single ones flatter: lines `name: number`. `several_needles` asks for the numbers of four names;
`ordered_needles` for a certain one of the four numbers of a name, as MRCR does for one of several equal requests.

Source: RULER, https://arxiv.org/abs/2404.06654; MRCR, https://arxiv.org/abs/2409.12640
"""

from __future__ import annotations

import importlib
import random
import re
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from ..errors import DataError, UsageError
from ..installing import pip_install

RULER = {"niah_single_1": 128, "niah_multikey_2": 128, "niah_multikey_3": 128, "vt": 30, "cwe": 120, "fwe": 50}
"""Tokens that an answer may have."""

NEEDLES = {"several_needles": 32, "ordered_needles": 8}
LONG_CONTEXT = {**RULER, **NEEDLES}

ORDINALS = ("first", "second", "third", "fourth")
"""Of the numbers of a name in `ordered_needles`; as many names are asked for in `several_needles`."""


class Text(NamedTuple):
    """What is asked, what the answer begins with, and what is expected in it, of which names."""

    question: str
    prefix: str
    expected: list[str]
    names: list[str]


def task_config(name: str, lengths: Sequence[int], limit: int, seed: int, tokenizer: Any) -> dict[str, Any]:
    """What lm-eval makes a task of: `limit` documents at each of `lengths`, which are in tokens with the answer.

    Raises:
        UsageError: a package that makes the texts is not installed. DataError: a length is too short.
    """
    try:
        import datasets

        make = needles if name in NEEDLES else _ruler(name)
        found = [doc for length in lengths for doc in _documents(make, name, length, limit, seed, tokenizer)]
    except ImportError as error:
        raise UsageError(f"task {name}: {error}", f"pip install wonderwords nltk, or {pip_install('eval')}") from error
    return {
        "task": name,
        "output_type": "generate_until",
        "custom_dataset": lambda **settings: {"test": datasets.Dataset.from_list(found)},
        "test_split": "test",
        "doc_to_text": "{{input}}",
        "doc_to_target": "{{outputs}}",
        "gen_prefix": "{{gen_prefix}}",
        "target_delimiter": "\n\n" if name == "cwe" else " ",
        "process_results": needles_score if name in NEEDLES else ruler_score,
        "metric_list": [{"metric": f"{n}", "aggregation": "mean", "higher_is_better": True} for n in lengths],
        "generation_kwargs": {"do_sample": False, "max_gen_toks": LONG_CONTEXT[name], "until": []},
        "metadata": {"version": 1.0, "max_seq_lengths": list(lengths)},
    }


def ruler_score(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """The share of the expected strings that are in the answer, under the document's length."""
    answer = results[0].lower()
    return {str(doc["max_length"]): sum(text.lower() in answer for text in doc["outputs"]) / len(doc["outputs"])}


def needles_score(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """The share of the asked names whose first number in the answer is the expected one, under the length."""
    said: dict[str, str] = {}
    for name, number in re.findall(r"(\w+): *(\d+)", doc["gen_prefix"] + results[0]):
        said.setdefault(name, number)
    right = sum(said.get(name) == number for name, number in zip(doc["names"], doc["outputs"], strict=True))
    return {str(doc["max_length"]): right / len(doc["names"])}


def _documents(
    make: Callable[[int, int, str], Text], name: str, length: int, limit: int, seed: int, tokenizer: Any
) -> list[dict[str, Any]]:
    """Each with as much around what is asked for as fits into the length."""

    def drawn(size: int, index: int) -> tuple[Text, int]:
        random.seed(f"{seed} {name} {index}")  # RULER's functions draw from the global generators
        np.random.seed(random.getrandbits(32))  # noqa: NPY002
        with redirect_stdout(StringIO()):
            text = make(size, length, name)
        return text, len(tokenizer(f"{text.question}\n\n{text.prefix}")["input_ids"]) + LONG_CONTEXT[name]

    size, found = 1, []
    while size < length and drawn(2 * size, 0)[1] <= length:
        size *= 2
    for part in (2, 4, 8, 16, 32):
        size += size // part if drawn(size + size // part, 0)[1] <= length else 0
    for index in range(limit):
        own = size
        while (tokens := drawn(own, index)[1]) > length:
            if own == 1:
                raise DataError(
                    f"task {name}: {tokens} tokens at least, expected at most {length}.", "Raise --lengths."
                )
            own -= max(1, own // 32)
        text = drawn(own, index)[0]
        doc = {"input": text.question, "gen_prefix": text.prefix, "outputs": text.expected, "names": text.names}
        found.append({"index": index, **doc, "length": tokens, "max_length": length})
    return found


def needles(size: int, length: int, name: str) -> Text:
    """Lines of names and numbers, `size` of them beside those that are asked for."""
    several, words, count = name == "several_needles", _words(), len(ORDINALS)
    asked, place = random.sample(words, count if several else 1), random.randrange(count)
    others = [word for word in words if word not in asked]
    right = [(word, f"{random.randrange(10, 100)}") for word in asked * (1 if several else count)]
    lines = [(random.choice(others), f"{random.randrange(10, 100)}") for _ in range(size)]
    for at, line in zip(sorted(random.sample(range(size + count), count)), right, strict=True):
        lines.insert(at, line)
    what = f"are the numbers of {', '.join(asked)}" if several else f"is the {ORDINALS[place]} number of {asked[0]}"
    listed = "".join(f"{word}: {number}\n" for word, number in lines)
    expected = [number for _, number in (right if several else right[place : place + 1])]
    return Text(f"Names and numbers:\n{listed}What {what}?\n", f"{asked[0]}:", expected, asked)


@cache
def _words() -> list[str]:
    return sorted(importlib.import_module("wonderwords").RandomWord().filter(regex="[a-z]{4,8}"))


def _ruler(name: str) -> Callable[[int, int, str], Text]:
    """What writes the texts of a task of RULER; raises ImportError where a package is missing."""
    import nltk

    of = {"vt": _variables, "cwe": _common_words, "fwe": _frequent_words}.get(name, _haystack)
    download, nltk.download = nltk.download, lambda *args, **options: False  # lm-eval fetches what only essays need
    try:
        with redirect_stdout(StringIO()):
            _module("niah_utils")
    finally:
        nltk.download = download
    return of


def _module(name: str) -> Any:
    return importlib.import_module(f"lm_eval.tasks.ruler.{name}")


def _haystack(size: int, length: int, name: str) -> Text:
    niah, key, value = _module("prepare_niah"), "words", "numbers"
    if name == "niah_multikey_3":
        key = value = "uuids"
    kind = "repeat" if name == "niah_single_1" else "needle"
    text, expected, query = niah.generate_input_output(
        size,
        niah.get_haystack(type_haystack=kind),
        type_haystack=kind,
        num_needle_k=1,
        type_needle_k=key,
        num_needle_v=1,
        type_needle_v=value,
        template=_module("niah_utils").TEMPLATE,
    )
    prefix = f"The special magic {value[:-1]} for {query} mentioned in the provided text is"
    return Text(text, prefix, expected, [query])


def _variables(size: int, length: int, name: str) -> Text:
    text, names = _module("vt_utils").generate_input_output(size, 1, 4)
    question, _, prefix = text.rpartition(" Answer: ")
    return Text(question, f"Answer: {prefix}".strip(), names, names)


def _common_words(size: int, length: int, name: str) -> Text:
    cwe = _module("cwe_utils")
    cwe.RNG.seed(random.getrandbits(32))
    repeats, rest = (30, 3) if length >= 4096 else (6, 1) if length >= 1024 else (3, 1)
    listed, words = cwe.get_example(min(10 + size, len(cwe.WORDS)), repeats, rest, 10)
    prefix = cwe.CONFIG["answer_prefix"].strip()
    return Text(cwe.CONFIG["template"].format(context=listed, query=""), prefix, words, words)


def _frequent_words(size: int, length: int, name: str) -> Text:
    fwe, uncounted = _module("fwe_utils"), SimpleNamespace(input_ids=())
    text, words, _ = fwe.generate_input_output(length, lambda text: uncounted, size, vocab_size=length // 50)
    prefix = fwe.CONFIG["answer_prefix"]
    return Text(text.rpartition(prefix)[0], prefix.strip(), words, words)
