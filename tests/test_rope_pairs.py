"""Whole rotary planes: folded into the projections, with nothing left to do at run time but RoPE itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import calibrated, in_memory, relative_error
from transformers import AutoModelForCausalLM

from rotor.errors import RecipeError
from rotor.export.export import export
from rotor.format.layout import LayerLayout
from rotor.recipe import load_recipe
from rotor.runtime.attention import RotorAttention
from rotor.search.search import rank_path
from rotor.validation.validate import validate

PROMPT = torch.randint(1, 4096, (2, 20), generator=torch.Generator().manual_seed(5))
COMPRESSION = 0.45


@pytest.fixture(scope="module", params=[("llama", 1), ("qwen2", 2)], ids=str)
def folded(request, tiny, tmp_path_factory: pytest.TempPathFactory):
    """(run, exported folder) of a model with and of one without biases."""
    family, size = request.param
    folder = tmp_path_factory.mktemp("pairs")
    run = calibrated(tiny(family), folder / "run", "post", size, qk="rope-pairs")
    export(run.folder, folder / "out", compression=COMPRESSION)
    return run, folder / "out"


def load(folder: Path, **options):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()


def test_folded_planes_equal_the_projection_at_run_time(folded) -> None:
    """At every rank, and the uncompressed model at full rank."""
    run, _ = folded
    network, bases = in_memory(run), run.bases()
    path = rank_path(bases, run, run.recipe)
    with torch.inference_mode():
        original = network.model(PROMPT).logits
        for plan in (path.full(), path.at_compression(0.3), path.at_compression(0.6)):
            assert plan is not None
            chosen = plan.select(bases)
            unfolded = [replace(layer, whole_planes=False) for layer in chosen]
            expected = network.compress(unfolded, plan.rounded)(PROMPT).logits
            got = network.compress(chosen, plan.rounded)(PROMPT).logits
            assert relative_error(got, expected) < 1e-5
            if plan.stored == 0:
                assert relative_error(got, original) < 1e-5


def test_nothing_is_added_to_the_projections(folded) -> None:
    """No basis, and as many rows of W_q and W_k as the latents have columns."""
    run, out = folded
    model = load(out)
    modules = [module for module in model.modules() if isinstance(module, RotorAttention)]
    assert len(modules) == run.shape.num_layers
    for module in modules:
        assert {name.split(".")[0] for name, _ in module.named_parameters()} == {"q_proj", "k_proj", "v_proj", "o_proj"}
        layout = module.layout
        assert (layout.domain, layout.folded_keys) == ("none", True)
        assert module.k_proj.out_features == layout.qk_width
        assert module.q_proj.out_features == layout.qk_width * layout.group_size * run.shape.heads_per_kv
        assert all(2 * len(group.planes) == group.qk_rank for group in layout.groups)
        assert LayerLayout.from_dict(layout.to_dict(), "here") == layout


def test_generation_padding_and_saving(folded, tmp_path: Path) -> None:
    model = load(folded[1])
    settings = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    output = model.generate(PROMPT, output_logits=True, return_dict_in_generate=True, **settings)
    with torch.inference_mode():
        full = model(output.sequences, use_cache=False).logits[:, PROMPT.shape[1] - 1 : -1]
    assert relative_error(torch.stack(output.logits, dim=1)[:, : full.shape[1]], full) < 1e-4
    mask = torch.ones_like(PROMPT)
    mask[0, :9] = 0
    together = model.generate(PROMPT, attention_mask=mask, **settings)
    static = model.generate(PROMPT, attention_mask=mask, cache_implementation="static", **settings)
    alone = model.generate(PROMPT[:1, 9:], **settings)
    assert torch.equal(together[0, 20:], alone[0, 11:])
    assert torch.equal(static, together)
    model.save_pretrained(tmp_path / "again")
    with torch.inference_mode():
        assert torch.equal(load(tmp_path / "again")(PROMPT).logits, model(PROMPT).logits)


def test_validation_passes_and_a_profile_is_a_prefix_of_the_planes(folded, tmp_path: Path) -> None:
    run, out = folded
    checked = validate(out)
    assert not checked.damaged, [c for c in checked.checks if c.status == "fail"]
    settings = ["evaluation.metric=kl_div", "search.targets=[0.9,0.5]"]
    elastic = export(run.folder, tmp_path / "elastic", accuracy=0.9, elastic=True, overrides=settings).folder
    full = load(elastic, rank_profile=0.9)
    small = load(elastic, rank_profile=0.5)
    for wide, narrow in zip(full.modules(), small.modules(), strict=True):
        if isinstance(wide, RotorAttention):
            by_heads = {group.kv_heads: group.planes for group in wide.layout.groups}
            for group in narrow.layout.groups:
                assert group.planes == by_heads[group.kv_heads][: group.qk_rank // 2]
    assert small.generate(PROMPT, max_new_tokens=4, do_sample=False, pad_token_id=0).shape == (2, 24)


def test_a_norm_of_the_keys_keeps_the_planes_out_of_the_weights(tiny, tmp_path: Path) -> None:
    run = calibrated(tiny("qwen3"), tmp_path / "run", "post", 1, qk="rope-pairs")
    network, bases = in_memory(run), run.bases()
    plan = rank_path(bases, run, run.recipe).full()
    with torch.inference_mode():
        original = network.model(PROMPT).logits
        model = network.compress(plan.select(bases), plan.rounded)
        assert relative_error(model(PROMPT).logits, original) < 1e-5
    module = next(m for m in model.modules() if isinstance(m, RotorAttention))
    assert module.layout.domain == "post"


def test_planes_need_even_ranks() -> None:
    with pytest.raises(RecipeError, match=r"ranks\.multiple_of: got 3, expected an even number"):
        load_recipe("fdc", ["bases.qk=rope-pairs", "ranks.multiple_of=3"])
