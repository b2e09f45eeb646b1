"""Keys in blocks where rotations do not follow from places in the cache: frequencies that depend on the length,
positions on three axes (test_multimodal.py), weights of norms behind RoPE."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compare import relative_error
from support.folded_models import Folding, folded
from support.paths import DEMO_MODEL
from support.quick import mostly_nightly
from support.tiny_models import tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaForCausalLM, StaticCache

from rotor import export
from rotor.calibration.capture import StoredKeys
from rotor.calibration.form import model_form
from rotor.checkpoint.families import attention_shape, find_family
from rotor.checkpoint.layout import PRE_ROPE, ExactTokens, KeyForm
from rotor.errors import UsageError
from rotor.kernels.rotary import rotate
from rotor.models.outline import ModelOutline
from rotor.models.source import Checkpoint
from rotor.policies import H2O, cache_policy
from rotor.runtime.decoded import decoding

ROWS = torch.randint(1, 4096, (2, 160), generator=torch.Generator().manual_seed(3))
STEP_BY_STEP = [0, 120, *range(121, 161)]
IN_CHUNKS = [0, 100, 140, 160]
LONG_PROMPT = [0, 150, 151, 160]
FORMS = {"blocks of 8": KeyForm(8), "blocks of 64": KeyForm(64), "pre": PRE_ROPE}
EXACT = ExactTokens(2, 20)
CASES = {
    f"{name}, {blocks}, {'exact tokens' if exact else 'rows'}": (name, form, exact)
    for name in ("phi3", "dynamic", "hunyuan_v1_dense")
    for blocks, form in FORMS.items()
    for exact in (None, EXACT)
}
QUICK = (
    "phi3, blocks of 64, exact tokens",
    "dynamic, blocks of 8, rows",
    "hunyuan_v1_dense, blocks of 8, exact tokens",
)


def source(name: str) -> Any:
    """phi3's longrope changes its frequencies behind 128 tokens; so does the dynamic llama's RoPE, at each token."""
    if name != "dynamic":
        return tiny_model(name).eval()
    config = tiny_model("llama").config
    config.rope_parameters = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    config.max_position_embeddings = 128
    torch.manual_seed(5)
    return LlamaForCausalLM(config).eval()


def passes(model: Any, edges: Sequence[int], padding: int = 0, cache: Any = None) -> Tensor:
    """Logits of a batch in parts, the first sequence behind padding; those of the padding are left out."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    mask, found = torch.ones_like(ROWS), []
    mask[0, :padding] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.inference_mode():
        for start, stop in pairwise(edges):
            own = {"attention_mask": mask[:, :stop], "position_ids": positions[:, start:stop]}
            found.append(model(ROWS[:, start:stop], past_key_values=cache, **own).logits)
    return torch.cat(found, 1)[:, padding:]


@pytest.mark.parametrize("case", mostly_nightly(CASES, lambda case: case in QUICK))
def test_at_full_rank_a_model_is_its_source_on_both_sides_of_a_switch(case: str) -> None:
    """Old keys keep the frequencies that they came with; a chunk goes by its own end, and may switch within a block."""
    name, form, exact = CASES[case]
    model = source(name)
    own = folded(model, Folding(form, 1, exact=exact))
    for edges in (STEP_BY_STEP, IN_CHUNKS, LONG_PROMPT):
        expected = passes(model, edges)
        assert relative_error(passes(own, edges), expected) < 1e-5
        cache = StaticCache(config=own.config, max_cache_len=200)
        assert relative_error(passes(own, edges, cache=cache), expected) < 1e-5
    if name != "hunyuan_v1_dense":
        with torch.inference_mode():
            assert relative_error(passes(model, STEP_BY_STEP), model(ROWS).logits) > 1e-3


@pytest.mark.parametrize("name", ["phi3", "dynamic", "hunyuan_v1_dense"])
def test_padding_shifts_a_sequence_and_not_the_others(name: str) -> None:
    """The switch is that of the batch: its longest sequence decides for all, as in the source."""
    model = source(name)
    own = folded(model, Folding(KeyForm(16), 1, exact=EXACT))
    for edges in (STEP_BY_STEP, IN_CHUNKS):
        assert relative_error(passes(own, edges, padding=21), passes(model, edges, padding=21)) < 1e-5


@pytest.mark.parametrize("beams", [1, 2])
def test_generating_across_the_switch_begins_anew_as_in_the_source(beams: int) -> None:
    """Phi-3 drops its cache there, and reads all tokens again with the frequencies of long sequences."""
    model = source("phi3")
    own = folded(model, Folding(KeyForm(64), 1, exact=EXACT))
    mask = torch.ones_like(ROWS[:, :120])
    mask[0, :9] = 0
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, "num_beams": beams}
    expected = model.generate(ROWS[:, :120], attention_mask=mask, **options)
    assert torch.equal(own.generate(ROWS[:, :120], attention_mask=mask, **options), expected)
    options["cache_implementation"] = "static"
    expected = model.generate(ROWS[:, :120], attention_mask=mask, **options)
    assert torch.equal(own.generate(ROWS[:, :120], attention_mask=mask, **options), expected)


def test_a_cache_that_was_cropped_copied_and_reordered() -> None:
    """Back over the switch, tokens come anew with short frequencies; sequences keep their own."""
    model = source("phi3")
    own = folded(model, Folding(KeyForm(16), 1, exact=EXACT))
    found = []
    for each in (model, own):
        cache = DynamicCache(config=each.config)
        with torch.inference_mode():
            each(ROWS[:, :120], past_key_values=cache, position_ids=torch.arange(120)[None] + torch.tensor([[0], [3]]))
            each(ROWS[:, 120:140], past_key_values=cache)
            cache.crop(-27)
            cache.reorder_cache(torch.tensor([1, 0]))
            cache = copy.deepcopy(cache)
            each(ROWS[:, 113:120], past_key_values=cache)
            cache.batch_repeat_interleave(2)
            cache.batch_select_indices(torch.tensor([0, 3, 2]))
            ids = ROWS[[0, 1, 0], 120:125]
            found.append(each(ids, past_key_values=cache, position_ids=torch.arange(120, 125)[None]).logits)
    assert relative_error(found[1], found[0]) < 1e-5


def test_a_cache_filled_elsewhere_is_refused() -> None:
    own = folded(source("phi3"), Folding(KeyForm(16), 1))
    cache = DynamicCache(config=own.config)
    with torch.inference_mode():
        own(ROWS[:, :20], past_key_values=cache)
        del cache.rotor_beginnings
        with pytest.raises(UsageError, match="the cache holds 20 tokens whose rotations are unknown"):
            own(ROWS[:, 20:21], past_key_values=cache)


def test_a_policy_that_keeps_everything_reads_each_key_as_it_came() -> None:
    own = folded(source("phi3"), Folding(KeyForm(16), 1))
    expected = passes(own, IN_CHUNKS, padding=21)
    with cache_policy(own, H2O(tokens=200)):
        assert relative_error(passes(own, IN_CHUNKS, padding=21), expected) < 1e-5


def as_longrope(folder: Path, switch: int) -> Any:
    """A checkpoint of the bundled model's as longrope that switches to the same frequencies, which is no difference."""
    config = json.loads((folder / "config.json").read_text())
    same = {"short_factor": [1.0] * 32, "long_factor": [1.0] * 32, "attention_factor": 1.0}
    config["rope_parameters"] |= same | {"rope_type": "longrope", "original_max_position_embeddings": switch}
    (folder / "config.json").write_text(json.dumps(config))
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_longrope_loses_no_more_than_llama_by_codes(demo_run, tmp_path: Path) -> None:
    """The same function, so the same layout and, but for a few codes, the same logits. Behind 1,536 tokens a run of
    so few tokens has a KL of 0.041, with keys after RoPE 0.226."""
    run = demo_run("rotor")
    out = export(run.folder, tmp_path / "out", compression=0.75, measure=False).folder
    shutil.copytree(DEMO_MODEL, tmp_path / "model")
    llama = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    text = "\n\n".join(path.read_text() for path in sorted((DEMO_MODEL.parent.parent / "docs").glob("*.md")))
    row = AutoTokenizer.from_pretrained(DEMO_MODEL)(text, return_tensors="pt").input_ids[:, :2048]
    model, own = as_longrope(tmp_path / "model", 1024), as_longrope(out, 1024)
    assert model_form(run.recipe, ModelOutline.of(Checkpoint(tmp_path / "model")).shape) == run.form
    with torch.inference_mode(), decoding([*own.modules(), *llama.modules()]):
        logits, expected = own(row, use_cache=False).logits[0], llama(row, use_cache=False).logits[0]
        assert relative_error(logits, expected) < 1e-3
        behind = slice(1536, None)
        found, exact = (each[behind].log_softmax(-1) for each in (logits, model(row, use_cache=False).logits[0]))
    assert float((exact.exp() * (exact - found)).sum(-1).mean()) < 0.1


@pytest.mark.parametrize("name", ["phi3", "llama", "hunyuan_v1_dense"])
def test_stored_keys_and_their_gradients_undo_all_that_stands_behind_them(name: str) -> None:
    """An attention factor above 1, and weights: keys are those before RoPE, and gradients follow the chain rule."""
    model = tiny_model(name)
    if name == "llama":
        yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
        config = model.config
        config.rope_parameters = yarn
        model = LlamaForCausalLM(config)
    family, shape = find_family(model.config), attention_shape(model.config)
    stored, form, length = StoredKeys(model, family, shape), KeyForm(8), 150
    generator = torch.Generator().manual_seed(4)
    before = torch.randn(length, shape.num_kv_heads, shape.head_dim, generator=generator)
    stored_keys = stored._within_blocks(0, before, length, form).requires_grad_()
    begins = torch.arange(length) // 8 * 8
    cos, sin = (table[begins][:, None] for table in stored._rotation(0, length, before.device, torch.float32))
    weight = stored._weight(0)
    keys = rotate(stored_keys.transpose(0, 1), cos[:, 0], sin[:, 0]).transpose(0, 1)
    keys = keys if weight is None else keys * weight
    assert float(keys.detach().norm() / before.norm()) != pytest.approx(1.0, abs=1e-3)  # by a factor, or by weights
    gradient = torch.randn(keys.shape, generator=generator)
    (expected,) = torch.autograd.grad(keys, stored_keys, gradient)
    observed = {"key_post": keys.detach().transpose(0, 1)[None], "value": torch.zeros(1, shape.num_kv_heads, length, 1)}
    found = stored.of(["key_8"], 0, length, observed)["key_8"]
    assert relative_error(found, stored_keys.detach()) < 1e-5
    by_keys = observed | {"key_post": gradient.transpose(0, 1)[None]}
    assert relative_error(stored.of(["key_8"], 0, length, by_keys, gradients=True)["key_8"], expected) < 1e-5
