"""Mistakes of a first hour: each message names the mistake and what to do next."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.runs import FAST_EVALUATION, SHORT_TEXT, WITH_EXACT, calibrated

from rotor import RotorError, Run, calibrate, export, inspect, validate
from rotor.errors import AccuracyError, DataError, UnsupportedModelError, UsageError
from rotor.models.readiness import check_text, describe_evaluation
from rotor.models.source import Checkpoint
from rotor.options import DeviceOptions
from rotor.policies import use_cache_policy
from rotor.recipe.reading import load_recipe, text_overrides
from rotor.recipe.sections import Evaluation


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calibrated(tiny("llama"), tmp_path_factory.mktemp("messages") / "run", "post", 1).folder


def said(error: RotorError) -> str:
    return f"{error.message}\n{error.hint}"


def test_a_run_is_not_a_model_and_a_model_is_not_a_run(run: Path, tiny, tmp_path: Path) -> None:
    for use in (Checkpoint, validate, inspect):
        with pytest.raises(UsageError) as caught:
            use(run)
        assert f"{run} is a run of `rotor calibrate`, not a model." in said(caught.value)
        assert f"rotor export {run} -o OUT --accuracy 0.99" in said(caught.value)
    with pytest.raises(UsageError) as caught:
        Run.open(tiny("llama"))
    assert f"rotor calibrate {tiny('llama')} -o RUN, then rotor export RUN" in said(caught.value)
    out = export(run, tmp_path / "out", compression=0.3, measure=False).folder
    with pytest.raises(UsageError, match="is a checkpoint that `rotor export` wrote, not a run"):
        Run.open(out)


def test_an_accuracy_out_of_reach_is_told_from_the_best_one(tiny, tmp_path: Path) -> None:
    """By as many digits as differ."""
    run = calibrated(tiny("llama"), tmp_path / "run", "post", 1)
    with pytest.raises(AccuracyError) as caught:
        export(run.folder, tmp_path / "out", accuracy=0.9999999, overrides=["ranks.multiple_of=16"])
    best = caught.value.message.partition("the best measured is ")[2].partition(",")[0]
    assert float(best) < 0.9999999


@pytest.mark.parametrize(("given", "meant"), [("fp16", "float16"), ("bf16", "bfloat16"), ("half", "float16")])
def test_short_names_of_dtypes_are_understood(given: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f"did you mean '{meant}'"):
        DeviceOptions(dtype=given)


def test_a_model_type_that_transformers_does_not_know(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llamma"}))
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"model_type 'llamma' is not known to .*; did you mean 'llama'\?"):
        _ = Checkpoint(tmp_path).config


def test_a_short_text_says_how_much_is_enough(tiny, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a few words, and a few more of them\n" * 40)
    recipe = load_recipe("fdc", text_overrides(text))
    checkpoint = Checkpoint(tiny("llama"))
    with pytest.raises(DataError) as caught:
        check_text(recipe, checkpoint.config, checkpoint.tokenizer)
    enough = int(caught.value.hint.partition("about ")[2].partition(" ")[0].replace(",", ""))
    text.write_text("a few words, and a few more of them\n" * (round(1.3 * enough) // 36))
    check_text(recipe, checkpoint.config, checkpoint.tokenizer)


def test_without_a_tokenizer_what_to_do_is_said_before_any_work() -> None:
    assert describe_evaluation(Evaluation(), None).endswith("or export the run with --compression")


def test_a_quantising_policy_on_codes_names_the_recipe(tiny, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    run = calibrate(tiny("llama"), tmp_path / "run", "rotor", [*FAST_EVALUATION, *SHORT_TEXT, *WITH_EXACT])
    out = export(run.folder, tmp_path / "out", compression=0.6, measure=False).folder
    with pytest.raises(UsageError, match=r"rows are codes already(.|\n)*--recipe rotor-16"):
        use_cache_policy(AutoModelForCausalLM.from_pretrained(out), "kivi-4")
