"""Accuracy is that of serving: one pass over whole rows is a prompt and decoding token by token behind it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.compare import relative_error
from support.folded_models import MIXED, Folding, folded
from support.paths import ROOT
from support.quick import mostly_nightly
from support.runs import calibrated
from transformers import AutoModelForCausalLM, DynamicCache

from rotor import export, validate
from rotor.checkpoint.layout import POST_ROPE, ExactTokens, KeyForm
from rotor.models.layerwise import LayerwiseModel
from rotor.runtime.decoded import decoding, decoding_without_cache
from rotor.search.table import RankTable

EXACT = ExactTokens(3, 8)
PRE, SLOW, SOME = KeyForm(64), KeyForm(8), KeyForm(8)
CASES = {
    "post": ("llama", Folding(POST_ROPE, 1, bits=MIXED)),
    "window": ("mistral", Folding(PRE, 1, bits=MIXED)),
    "key norm": ("qwen3", Folding(SLOW, 2, joint=True, bits=MIXED)),
    "softcap": ("gemma2", Folding(POST_ROPE, 2, bits=MIXED)),
    "windows, key norm": ("gemma3_text", Folding(SOME, 1, joint=True, bits=MIXED)),
    "no rope, joint": ("gpt2", Folding(POST_ROPE, 4, joint=True, bits=MIXED)),
    "fast planes": ("llama", Folding(SOME, 2, joint=True, bits=MIXED)),
    "partial": ("gpt_neox", Folding(KeyForm(8), 2, bits=MIXED)),
    "numbers": ("falcon", Folding(POST_ROPE, 1, rank=8)),
}
"""Family, and how it is compressed."""

ROWS = torch.randint(1, 4096, (2, 44), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def compressed(tiny):
    """compressed(name) -> the model with random bases in float64, and its source; made once."""
    made = {}

    def get(name: str):
        if name not in made:
            family, folding = CASES[name]
            source = AutoModelForCausalLM.from_pretrained(tiny(family), dtype=torch.float64).eval()
            made[name] = folded(source, replace(folding, exact=EXACT)), source
        return made[name]

    return get


def decoded(model, rows, prompt: int, mask=None) -> torch.Tensor:
    """Logits of rows through a cache: a prompt at once, then token by token."""
    cache, logits = DynamicCache(config=model.config), []
    for start, end in ((0, prompt), *((n, n + 1) for n in range(prompt, rows.shape[1]))):
        own = None if mask is None else mask[:, :end]
        logits.append(model(rows[:, start:end], attention_mask=own, past_key_values=cache).logits)
    return torch.cat(logits, dim=1)


EVERY = [(name, prompt) for name in CASES for prompt in (1, 25)]
QUICK = {(name, 25 if index else 1) for index, name in enumerate(CASES)}


@pytest.mark.parametrize(("name", "prompt"), mostly_nightly(EVERY, lambda case: case in QUICK))
def test_one_pass_is_a_prompt_and_steps(name: str, prompt: int, compressed) -> None:
    model, source = compressed(name)
    with torch.no_grad():
        expected = decoded(model, ROWS, prompt)
        with decoding(model.modules(), prompt):
            got = model(ROWS, use_cache=False).logits
        assert relative_error(got, expected) < 1e-6
        assert relative_error(got, source(ROWS).logits) > 1e-3  # some keys are read as codes


@pytest.mark.parametrize("name", ["post", "window", "windows, key norm", "fast planes"])
def test_padding(name: str, compressed) -> None:
    """The first tokens are exact behind any padding."""
    model, _ = compressed(name)
    mask = torch.ones_like(ROWS)
    mask[1, :13] = 0
    with torch.no_grad():
        expected = decoded(model, ROWS, 14, mask)
        with decoding(model.modules(), 14):
            got = model(ROWS, attention_mask=mask, use_cache=False).logits
    assert relative_error(got[mask == 1], expected[mask == 1]) < 1e-6


def test_rows_within_what_is_exact_are_the_source(compressed) -> None:
    model, source = compressed("fast planes")
    network = LayerwiseModel.of(model)
    short, long = ROWS[:, :8], ROWS
    with torch.no_grad():
        with network.decoding():
            assert relative_error(network.final_states(short), LayerwiseModel.of(source).final_states(short)) < 1e-6
            assert relative_error(network.final_states(long), LayerwiseModel.of(source).final_states(long)) > 1e-3
        with network.decoding(prompt=44):
            assert relative_error(network.final_states(long), LayerwiseModel.of(source).final_states(long)) < 1e-6


def test_passes_without_a_cache_of_a_model_that_generates(compressed) -> None:
    """A task's likelihoods are decoded; what it generates follows an exact prompt."""
    model, _ = compressed("fast planes")
    options = {"max_new_tokens": 6, "do_sample": False, "use_cache": True}
    with torch.no_grad():
        served, written = model(ROWS).logits, model.generate(ROWS, **options)
        expected = decoded(model, ROWS, 1)
        with decoding_without_cache(model):
            assert relative_error(model(ROWS).logits, expected) < 1e-6
            assert torch.equal(model.generate(ROWS, **options), written)
        assert torch.equal(model(ROWS).logits, served)


def test_search_export_and_validate_measure_so(tiny, tmp_path) -> None:
    """In a table of its own, with a smaller loss, and the same numbers for what was written."""
    run = calibrated(tiny("llama"), tmp_path / "run", "pre", 2)
    exact = ["exact.first=2", "exact.newest=24"]
    plain = export(run.folder, tmp_path / "plain", compression=0.5).report["accuracy"]
    kept = export(run.folder, tmp_path / "kept", compression=0.5, overrides=exact).report["accuracy"]
    assert plain["table"] != kept["table"]
    losses = [found["measurements"]["report"]["values"]["kl_div"] for found in (plain, kept)]
    assert 0 < losses[1] < losses[0]
    assert RankTable.named(run, kept["table"]).context.settings["exact"] == {"first": 2, "newest": 24}
    checked = validate(tmp_path / "kept", text=ROOT / "LICENSE")
    assert not checked.damaged
    assert checked.summary["same_data_as_export"]
    assert checked.summary["accuracy"]["kl_div"] == pytest.approx(losses[1], rel=1e-3)
