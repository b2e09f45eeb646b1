"""`rotor study --parts long`: prompts with questions at their end, each read once by every cache."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.paths import DEMO_MODEL
from support.tiny_models import demo_model

from rotor import study
from rotor.errors import DataError
from rotor.models.source import Checkpoint
from rotor.recipe.sections import Evaluation
from rotor.search.evaluation.prompts import EvaluationContext
from rotor.tools.study.context import StudyContext
from rotor.tools.study.long_prompts import TASKS, long_prompt
from rotor.tools.study.part import Part, Task
from rotor.tools.study.parts import long

TOKENS = 1024
SETTINGS = ["tokens.source=random", "tokens.count=1024", "tokens.seq_len=128", "codes.tokens=512", "groups.size=2"]
SETTINGS += ["evaluation.search_tokens=128", "evaluation.report_tokens=128", "evaluation.seq_len=64"]


@pytest.fixture(scope="module")
def context() -> EvaluationContext:
    """The bundled model's tokenizer, and text of numbers of its vocabulary."""
    checkpoint = Checkpoint(DEMO_MODEL)
    text = torch.arange(300, 700)
    rows = {split: text[None, :64] for split in ("search", "report")}
    return EvaluationContext(Evaluation(), rows, checkpoint.tokenizer, checkpoint.config, {"report": text})


def test_a_prompt_states_what_is_asked(context: EvaluationContext) -> None:
    prompt = long_prompt(context, 1500, 3)
    assert len(prompt.tokens) == 1500
    assert context.tokenizer is not None
    text = context.tokenizer.decode(prompt.tokens)
    assert list(dict.fromkeys(question.task for question in prompt.questions)) == list(TASKS)
    for question in prompt.questions:
        answer = context.tokenizer.decode(question.answer).strip()
        assert answer in text
        asked = context.tokenizer.decode([*question.asked, *question.answer])
        assert asked.endswith(context.tokenizer.decode(question.answer))
    assert long_prompt(context, 1500, 3) == prompt
    assert long_prompt(context, 1500, 4) != prompt


def test_commonest_word_and_chain_of_variables(context: EvaluationContext) -> None:
    """Answers follow from what is stated."""
    assert context.tokenizer is not None
    prompt = long_prompt(context, 1500, 5)
    text = context.tokenizer.decode(prompt.tokens)
    listed = text.partition("List of words: ")[2].partition(".")[0].split(", ")
    answers = {q.task: context.tokenizer.decode(q.answer).strip() for q in prompt.questions}
    assert max(set(listed), key=listed.count) == answers["commonest word"]
    number = answers["variables"]
    first = next(line for line in text.splitlines() if line.endswith(f"_id = {number}")).partition(" = ")[0]
    second = next(line for line in text.splitlines() if line.endswith(f"_id = {first}")).partition(" = ")[0]
    assert any(line.endswith(f"_id = {second}") for line in text.splitlines())


def test_too_few_tokens_or_no_tokenizer(context: EvaluationContext) -> None:
    with pytest.raises(DataError, match="1023 tokens are too few, expected at least 1024"):
        long_prompt(context, 1023, 0)
    without = EvaluationContext(context.spec, context.rows, None, context.config)
    with pytest.raises(DataError, match="tokenizer with character offsets"):
        long_prompt(without, TOKENS, 0)


class OnePass(Part):
    """Answers behind an uncompressed cache, and of one pass over prompt and answer."""

    name = "one-pass"

    def tasks(self, study: StudyContext) -> Iterator[Task]:
        yield Task("one-pass/answers", lambda: self.answers(study))

    def answers(self, study: StudyContext) -> dict[str, list[tuple[bool, float]]]:
        prompt = long_prompt(study.evaluation_context, TOKENS, 0)
        whole = [whole_pass(study, prompt.tokens, question) for question in prompt.questions]
        return {"cache": long.answers(study, prompt), "whole": whole}


def test_a_study_asks_every_cache(tmp_path: Path) -> None:
    """Answers behind an uncompressed cache are those of one pass over all; a second start measures nothing."""
    model = demo_model(tmp_path / "model", max_position_embeddings=TOKENS + long.QUESTION_TOKENS)
    given = {"sizes": [600], "plots": False}
    passes = study(model, tmp_path / "study", ["rotor"], SETTINGS, parts=[f"{__file__}:OnePass"], **given)
    behind_cache, whole = passes.records["one-pass/answers"].values()
    given["parts"] = ["long"]
    result = study(model, tmp_path / "study", ["rotor"], SETTINGS, **given)
    names = ["uncompressed", "fp8, one scale", "KIVI-4", "4 bits a token and head", "rotor, 600 bytes"]
    del result.records["one-pass/answers"]
    assert list(result.records) == [f"long/{name}, {TOKENS} tokens" for name in names]
    sizes = [record["kv_bytes_per_token"] for record in result.records.values()]
    assert (sizes[0], sizes[1], sizes[3]) == (2560, 1280, 720)
    assert 0.9 * 600 < sizes[4] - 132 * 2560 / TOKENS <= 600  # behind tokens that are exact
    assert [exact for exact, _ in behind_cache] == [exact for exact, _ in whole]
    assert [one for _, one in behind_cache] == pytest.approx([one for _, one in whole], abs=1e-3)
    with (tmp_path / "study/long.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(names) * len(TASKS)
    assert "| 1,024 tokens | bytes | mean |" in (tmp_path / "study/summary.md").read_text()
    assert study(model, tmp_path / "study", ["rotor"], SETTINGS, **given).added == 0


def whole_pass(study: StudyContext, prompt: list[int], question) -> tuple[bool, float]:
    """The same as `long.answers`, of one pass without a cache."""
    tokens = torch.tensor([[*prompt, *question.asked, *question.answer]])
    with torch.inference_mode():
        logits = study.network.model(tokens, use_cache=False).logits[0].float().log_softmax(-1)
    answer = torch.tensor(question.answer)
    scored = logits[-1 - len(answer) : -1]
    exact = bool((scored.argmax(-1) == answer).all())
    return exact, float(scored.gather(-1, answer[:, None]).sum())
