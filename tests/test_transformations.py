"""Changes that leave a model's function alone leave rotor's loss alone: scales of keys, mixtures of values."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.cache_truth import scores_behind
from support.paths import ROOT
from transformers import AutoModelForCausalLM

from rotor import calibrate, export
from rotor.policies import PerToken
from rotor.tools.study.inputs import StudyInputs, same_conditions
from rotor.tools.study.part import find_part

LARGEST = 100.0
"""Ratio of the scales of channels."""

SETTINGS = ["tokens.source=random", "tokens.count=1024", "tokens.seq_len=64", "codes.tokens=1024"]
SETTINGS += ["exact.first=0", "exact.newest=0"]
ROWS = torch.randint(5, 4000, (4, 64), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def models(tiny, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny llama with biases, and one that computes the same from other keys and values."""
    spec = importlib.util.spec_from_file_location("transformed", ROOT / "artifacts" / "studies" / "transformed.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    out = tmp_path_factory.mktemp("transformed") / "model"
    module.write_transformed(tiny("llama"), out, LARGEST)
    return {"plain": tiny("llama"), "transformed": out}


def logits(folder: Path) -> torch.Tensor:
    with torch.inference_mode():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(ROWS).logits.log_softmax(-1)


def divergence(base: torch.Tensor, other: torch.Tensor) -> float:
    return float((base.exp() * (base - other)).sum(-1).mean())


@pytest.mark.nightly
def test_a_transformed_model_loses_as_much_by_rotor_and_more_by_a_quantiser(
    models, tmp_path: Path, monkeypatch
) -> None:
    # The clip of gradients goes by lengths, which a transformation changes.
    monkeypatch.setattr("rotor.calibration.gradient_sums.CLIPPED_SHARE", 0.0)
    base = logits(models["plain"])
    assert divergence(base, logits(models["transformed"])) < 1e-6
    of_rotor, per_token = {}, {}
    for name, folder in models.items():
        run = calibrate(folder, tmp_path / name / "run", "rotor", SETTINGS)
        export(run.folder, tmp_path / name / "out", compression=0.85, measure=False)
        of_rotor[name] = divergence(base, logits(tmp_path / name / "out"))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        per_token[name] = float(scores_behind(model, ROWS, 16, PerToken(4, 16)).kl_div.mean())
    assert of_rotor["transformed"] == pytest.approx(of_rotor["plain"], rel=0.05)
    assert per_token["transformed"] > 10 * per_token["plain"]


def test_the_table_of_quantisers_and_recipes_can_be_made() -> None:
    """Of the part and the recipes that README's and docs' numbers are of; nothing is measured here."""
    folder = ROOT / "artifacts" / "studies"
    recipes = ["rotor", *map(str, sorted((folder / "shape").glob("*.yaml")))]
    study = SimpleNamespace(inputs=StudyInputs(same_conditions(recipes, ())), whole_bytes=2560)
    assert len(list(find_part(f"{folder / 'fair.py'}:Fair").tasks(study))) == 15 + 3 * len(recipes)
