"""Several needles in a long context, as single ones flatter: lines `name: number`, and the numbers of four names asked.

It needs no corpus. RULER's tasks are lm-eval's own.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from ..errors import DataError, UsageError
from ..installing import pip_install

NEEDLES = "several_needles"
ANSWER_TOKENS, ASKED = 32, 4
"""Tokens that an answer may have, and names that are asked for."""


def needles_task(lengths: Sequence[int], limit: int, seed: int, tokenizer: Any) -> dict[str, Any]:
    """What lm-eval makes a task of: `limit` documents at each of `lengths`, which are in tokens with the answer.

    Raises:
        UsageError: a package is not installed. DataError: a length is too short.
    """
    try:
        import datasets
        from wonderwords import RandomWord
    except ImportError as error:
        hint = f"pip install wonderwords datasets, or {pip_install('eval')}"
        raise UsageError(f"task {NEEDLES}: {error}", hint) from error
    words = sorted(RandomWord().filter(regex="[a-z]{4,8}"))
    found = [doc for length in lengths for doc in _documents(words, length, limit, seed, tokenizer)]
    return {
        "task": NEEDLES,
        "output_type": "generate_until",
        "custom_dataset": lambda **settings: {"test": datasets.Dataset.from_list(found)},
        "test_split": "test",
        "doc_to_text": "{{input}}",
        "doc_to_target": "{{outputs}}",
        "gen_prefix": "{{gen_prefix}}",
        "process_results": needles_score,
        "metric_list": [{"metric": f"{n}", "aggregation": "mean", "higher_is_better": True} for n in lengths],
        "generation_kwargs": {"do_sample": False, "max_gen_toks": ANSWER_TOKENS, "until": []},
        "metadata": {"version": 1.0, "max_seq_lengths": list(lengths)},
    }


def needles_score(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """The share of the asked names whose first number in the answer is the expected one, under the length."""
    said: dict[str, str] = {}
    for name, number in re.findall(r"(\w+): *(\d+)", doc["gen_prefix"] + results[0]):
        said.setdefault(name, number)
    right = sum(said.get(name) == number for name, number in zip(doc["names"], doc["outputs"], strict=True))
    return {str(doc["max_length"]): right / len(doc["names"])}


def _documents(words: list[str], length: int, limit: int, seed: int, tokenizer: Any) -> list[dict[str, Any]]:
    """Each with as many lines around what is asked for as fit into the length."""

    def drawn(size: int, index: int) -> tuple[dict[str, Any], int]:
        draw = random.Random(f"{seed} {NEEDLES} {index}")
        draw.getrandbits(32)
        doc = _document(words, size, draw)
        return doc, len(tokenizer(f"{doc['input']}\n\n{doc['gen_prefix']}")["input_ids"]) + ANSWER_TOKENS

    size, found = 1, []
    while size < length and drawn(2 * size, 0)[1] <= length:
        size *= 2
    for part in (2, 4, 8, 16, 32):
        size += size // part if drawn(size + size // part, 0)[1] <= length else 0
    for index in range(limit):
        own = size
        while (tokens := drawn(own, index)[1]) > length:
            if own == 1:
                what = f"task {NEEDLES}: {tokens} tokens at least, expected at most {length}."
                raise DataError(what, "Raise --lengths.")
            own -= max(1, own // 32)
        found.append({"index": index, **drawn(own, index)[0], "length": tokens, "max_length": length})
    return found


def _document(words: list[str], size: int, draw: random.Random) -> dict[str, Any]:
    """Lines of names and numbers, `size` of them beside those that are asked for."""
    asked = draw.sample(words, ASKED)
    draw.randrange(ASKED)
    others = [word for word in words if word not in asked]
    right = [(word, f"{draw.randrange(10, 100)}") for word in asked]
    lines = [(draw.choice(others), f"{draw.randrange(10, 100)}") for _ in range(size)]
    for at, line in zip(sorted(draw.sample(range(size + ASKED), ASKED)), right, strict=True):
        lines.insert(at, line)
    listed = "".join(f"{word}: {number}\n" for word, number in lines)
    question = f"Names and numbers:\n{listed}What are the numbers of {', '.join(asked)}?\n"
    return {
        "input": question,
        "gen_prefix": f"{asked[0]}:",
        "outputs": [number for _, number in right],
        "names": asked,
    }
