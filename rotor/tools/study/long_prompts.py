"""Long prompts with questions at their end: what agents and chats need from tens of thousands of tokens before.

A prompt is held-out text in which statements stand at seeded places; questions follow, each with its answer. All of a
prompt's questions are asked of one cache. The tasks are those of needles in a haystack and of RULER (Hsieh et al.,
arXiv 2404.06654), and two of agents: the arguments of a call, and what a tool answered.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ...errors import DataError
from ...search.evaluation.prompts import EvaluationContext, key_words

LEAST_TOKENS = 1024
"""Fewest tokens of a prompt: statements take half of that."""

WORDS = 256
"""Words that statements are made of, each a single token."""

NEEDLES = 4
"""Statements of one kind, each of which is asked for."""

CHAIN = 3
"""Variables of a chain: a number, and two that are set to the one before."""

LISTED = (12, 8, 2)
"""Words of a list, times that the commonest occurs, and times that the others do."""

ANSWER_PLACE = 0.25
"""Place of what a tool answered, as a share of the prompt: of 8K tokens it is 6K back."""


@dataclass(frozen=True)
class Question:
    """Tokens that ask, and tokens of the right answer. task: that it belongs to."""

    task: str
    asked: list[int]
    answer: list[int]


@dataclass(frozen=True)
class LongPrompt:
    """Tokens of a prompt, and its questions."""

    tokens: list[int]
    questions: list[Question]


@dataclass(frozen=True)
class _Stated:
    """A line of a prompt, and what is asked of it. place: where it stands, from 0 to 1."""

    place: float
    text: str
    questions: Sequence[tuple[str, str]] = ()


def long_prompt(context: EvaluationContext, tokens: int, seed: int) -> LongPrompt:
    """A prompt of so many tokens on the report split's text.

    Raises:
        DataError: no tokenizer that tells which characters a token is, or fewer tokens than LEAST_TOKENS.
    """
    tokenizer = context.tokenizer
    if tokenizer is None or not tokenizer.is_fast:
        raise DataError(
            "long prompts need a tokenizer with character offsets, and the model's folder has none.",
            "Add tokenizer.json to the model's folder.",
        )
    if tokens < LEAST_TOKENS:
        raise DataError(f"long prompts: {tokens} tokens are too few, expected at least {LEAST_TOKENS}.")
    draw = random.Random(seed)
    words = draw.sample(key_words(tokenizer, WORDS), WORDS)
    stated = [(task, line) for task, make in TASKS.items() for line in make(draw, words)]
    stated.sort(key=lambda one: one[1].place)

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    lines = [(line.place, encode(f"\n{line.text}\n")) for _, line in stated]
    start = context.start()
    room = tokens - len(start) - sum(len(ids) for _, ids in lines)
    if room <= 0:
        raise DataError(f"long prompts: statements leave no room in {tokens} tokens for other text.", "Give more.")
    filler = _filler(context.ordinary_text("report"), room, seed)
    prompt, done = list(start), 0
    for place, ids in lines:
        end = int(place * room)
        prompt += [*filler[done:end], *ids]
        done = end
    prompt += filler[done:]
    questions = [
        Question(task, *_tokens_of(tokenizer, f"\n{ask}", answer))
        for task, line in stated
        for ask, answer in line.questions
    ]
    return LongPrompt(prompt, sorted(questions, key=lambda one: list(TASKS).index(one.task)))


def _filler(text: Tensor, count: int, seed: int) -> list[int]:
    """Tokens of a split's text from a seeded place on, again from its start where it ends."""
    begin = random.Random(f"text {seed}").randrange(len(text))
    repeated = text.roll(-begin).repeat(-(-count // len(text)))
    ids: list[int] = repeated[:count].tolist()
    return ids


def _tokens_of(tokenizer: Callable[..., dict[str, list]], ask: str, answer: str) -> tuple[list[int], list[int]]:
    """Tokens of a question and of its answer, of one text: those that have a character of the answer are its."""
    encoded = tokenizer(ask + answer, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    first = next(i for i, (_, end) in enumerate(encoded["offset_mapping"]) if end > len(ask))
    return encoded["input_ids"][:first], encoded["input_ids"][first:]


def _needle(draw: random.Random, words: list[str]) -> list[_Stated]:
    number = str(draw.randint(10_000, 99_999))
    text = "The number of the vault is "
    return [_Stated(draw.uniform(0.05, 0.6), f"{text}{number}.", [(text, number)])]


def _needles(draw: random.Random, words: list[str]) -> list[_Stated]:
    lines = []
    for word in draw.sample(words, NEEDLES):
        text, number = f"The code of the {word} is ", str(draw.randint(10_000, 99_999))
        lines.append(_Stated(draw.uniform(0.0, 0.9), f"{text}{number}.", [(text, number)]))
    return lines


def _variables(draw: random.Random, words: list[str]) -> list[_Stated]:
    names, number = [f"{word}_id" for word in draw.sample(words, CHAIN)], str(draw.randint(10_000, 99_999))
    places = sorted(draw.uniform(0.0, 0.9) for _ in names)
    values = [number, *names]
    asked = [(f"# all of {', '.join(names)} are equal\nassert {name} == ", number) for name in names[1:]]
    lines = [_Stated(place, f"{name} = {value}") for place, name, value in zip(places, names, values, strict=False)]
    return [*lines[:-1], _Stated(lines[-1].place, lines[-1].text, asked)]


def _commonest(draw: random.Random, words: list[str]) -> list[_Stated]:
    count, most, others = LISTED
    listed = draw.sample(words, count)
    items = [*listed[:1] * most, *(word for word in listed[1:] for _ in range(others))]
    draw.shuffle(items)
    ask = "The word that stands most often in the list of words above is"
    return [_Stated(draw.uniform(0.1, 0.8), f"List of words: {', '.join(items)}.", [(ask, f" {listed[0]}")])]


def _arguments(draw: random.Random, words: list[str]) -> list[_Stated]:
    one, two, three = draw.sample(words, 3)
    arguments = json.dumps(
        {"customer": one, "item": two, "note": three, "quantity": draw.randint(10, 99), "price": draw.randint(100, 999)}
    )
    call = '{"name": "create_order", "arguments": '
    answer = arguments.removeprefix('{"customer": "')
    ask = f'The same call once more:\n{call}{{"customer": "'
    return [_Stated(draw.uniform(0.05, 0.5), f"{call}{arguments}}}", [(ask, answer)])]


def _tool(draw: random.Random, words: list[str]) -> list[_Stated]:
    station = f"{draw.choice(words)}-{draw.randint(10, 99)}"
    temperature, pressure = f"{draw.randint(10, 39)}.{draw.randint(0, 9)}", str(draw.randint(950, 1049))
    content = {"station": station, "temperature": temperature, "pressure": pressure}
    asked = [
        (f'At station {station} the tool answered: "temperature": "', temperature),
        (f'At station {station} the tool answered: "pressure": "', pressure),
    ]
    return [_Stated(ANSWER_PLACE, f"<tool_response>\n{json.dumps(content)}\n</tool_response>", asked)]


TASKS: dict[str, Callable[[random.Random, list[str]], list[_Stated]]] = {
    "one needle": _needle,
    "several needles": _needles,
    "variables": _variables,
    "commonest word": _commonest,
    "arguments": _arguments,
    "a tool's answer": _tool,
}
"""Tasks by name, each the statements of a prompt."""
