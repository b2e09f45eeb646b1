"""`recall`: values looked up by keys that stand earlier in the prompt, which compression of keys breaks first.

A prompt states keys with two-digit values, as lines (`name: 42`) or as a dict literal, and then asks for them again,
as further lines or as assertions about the dict. The answers stand in the prompt too (teacher forcing), so that one
forward pass scores all of them: an answer token is right if it is the argmax at the position before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import DataError
from ..evaluation import Scores, bootstrap, score
from ..layerwise import LayerwiseModel
from ..recipe import Evaluation
from .base import Measurement, Metric

LEAST_BASE_RECALL = 0.2
"""Below this the uncompressed model cannot look up keys, and a ratio to it says nothing."""

DICT_NAMES = ("table", "config", "index", "codes")
SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
FEWER = "Set smaller evaluation.recall_keys and evaluation.recall_questions."


@dataclass(frozen=True)
class RecallPrompts:
    """Look-up prompts, padded on the right: rows [prompts, seq_len] int64; answers, the same shape, true at answers."""

    rows: Tensor
    answers: Tensor


class Recall(Metric):
    """Recall of the compressed model over that of the base model; both absolute values are recorded beside it."""

    def __init__(self, name: str, spec: Evaluation, tokenizer: Any, config: Any) -> None:
        super().__init__(name)
        self._spec, self._tokenizer, self._config = spec, tokenizer, config
        self._prompts: dict[str, RecallPrompts] = {}
        self._base_hits: dict[str, np.ndarray] = {}

    def measure_base(self, model: LayerwiseModel, split: str) -> dict[str, Any]:
        """Raises DataError if the model's recall is below LEAST_BASE_RECALL."""
        self._prompts[split] = recall_prompts(self._spec, split, self._tokenizer, self._config)
        self._base_hits[split] = recall_hits(model, self._prompts[split])
        recall = self._share(split, self._base_hits[split])
        if recall < LEAST_BASE_RECALL:
            raise DataError(
                f"evaluation.metric recall: the uncompressed model looks up {recall:.3f} of the keys ({split} split), "
                f"expected at least {LEAST_BASE_RECALL}.",
                "This model cannot do the task; choose another metric, or fewer keys with evaluation.recall_keys.",
            )
        return {"recall": round(recall, 6)}

    def measure(self, model: LayerwiseModel, split: str, base: Scores, scores: Scores) -> Measurement:
        before, after = self._base_hits[split], recall_hits(model, self._prompts[split])
        value = round(float(after.sum() / before.sum()), 6)
        bounds = bootstrap(lambda base, other: other / np.maximum(base, 1), before, after)
        fields = {"recall": value, "compressed_recall": round(self._share(split, after), 6)}
        return Measurement(value, bounds, fields)

    def ratio(self, model: LayerwiseModel, split: str) -> float:
        """Recall of the model over that of the base model, which `measure_base` has seen."""
        return round(float(recall_hits(model, self._prompts[split]).sum() / self._base_hits[split].sum()), 6)

    def _share(self, split: str, hits: np.ndarray) -> float:
        return float(hits.sum() / int(self._prompts[split].answers.sum()))


def recall_prompts(spec: Evaluation, split: str, tokenizer: Any, config: Any) -> RecallPrompts:
    """The look-up prompts of a split, drawn with a seed of its own.

    Raises:
        DataError: the tokenizer is missing or cannot tell which characters a token is, or a prompt exceeds the model's
            positions.
    """
    if tokenizer is None or not tokenizer.is_fast:
        missing = "the model's folder has none" if tokenizer is None else "the model's is of the slow kind"
        raise DataError(f"recall needs a tokenizer with character offsets, and {missing}.", "Add tokenizer.json to it.")
    generator = torch.Generator().manual_seed(2 * spec.seed + (split == "report"))
    words = key_words(tokenizer, spec.recall_keys)
    bos = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    start = [] if bos is None else [bos]
    encoded = []
    for _ in range(spec.recall_prompts):
        text, spans = lookup_text(words, spec.recall_keys, spec.recall_questions, generator)
        tokens = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        inside = [any(a < end and begin < b for begin, end in spans) for a, b in tokens["offset_mapping"]]
        encoded.append((start + tokens["input_ids"], [False] * len(start) + inside))
    longest = max(len(ids) for ids, _ in encoded)
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and longest > positions:
        raise DataError(f"recall: a prompt has {longest} tokens, the model {positions} positions.", FEWER)
    rows = torch.zeros(len(encoded), longest, dtype=torch.int64)
    answers = torch.zeros(len(encoded), longest, dtype=torch.bool)
    for i, (ids, inside) in enumerate(encoded):
        rows[i, : len(ids)] = torch.tensor(ids)
        answers[i, : len(ids)] = torch.tensor(inside)
    return RecallPrompts(rows, answers)


def lookup_text(words: list[str], keys: int, questions: int, generator: torch.Generator) -> tuple[str, list[tuple]]:
    """One prompt, and the [begin, end) characters of each answer in it."""

    def draw(size: int) -> int:
        return int(torch.randint(size, (1,), generator=generator))

    chosen = [words[i] for i in torch.randperm(len(words), generator=generator)[:keys].tolist()]
    values = {key: str(10 + draw(90)) for key in chosen}
    name = DICT_NAMES[draw(len(DICT_NAMES))]
    if draw(2):
        text, question = "".join(f"{key}: {value}\n" for key, value in values.items()), "{key}: "
    else:
        lines = "".join(f'    "{key}": {value},\n' for key, value in values.items())
        text, question = f"{name} = {{\n{lines}}}\n", f'assert {name}["{{key}}"] == '
    spans = []
    for _ in range(questions):
        key = chosen[draw(keys)]
        text += question.format(key=key)
        spans.append((len(text), len(text) + len(values[key])))
        text += values[key] + "\n"
    return text, spans


def key_words(tokenizer: Any, count: int) -> list[str]:
    """At least `count` lower-case words of 3 to 9 letters: those that are tokens, made-up ones if there are too few."""
    found = {w for w in tokenizer.get_vocab() if w.isascii() and w.isalpha() and w.islower() and 3 <= len(w) <= 9}
    words = sorted(found)
    if len(words) < count:
        made = (a + b + c for a in SYLLABLES for b in SYLLABLES for c in SYLLABLES)
        words += [word for word, _ in zip((w for w in made if w not in found), range(count), strict=False)]
    if len(words) < count:
        raise DataError(f"recall: {count} keys asked for, {len(words)} words to be had.", FEWER)
    return words


def recall_hits(network: LayerwiseModel, prompts: RecallPrompts) -> np.ndarray:
    """Answer tokens predicted right in each prompt, [prompts] int64."""
    predicted = score(network, prompts.rows).top1
    assert predicted is not None
    right = (predicted == prompts.rows[:, 1:].numpy()) & prompts.answers[:, 1:].numpy()
    return right.sum(-1)
