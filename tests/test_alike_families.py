"""Families whose attention differs from another one's in a row of data: the whole pipeline, in seconds each."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compare import relative_error
from support.folded_models import Folding, folded
from support.quick import mostly_nightly
from support.runs import WITH_EXACT, in_memory, whole_ranks
from support.tiny_models import ALIKE, VARIANTS, build_tiny, tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

import rotor
from rotor import inspect
from rotor.checkpoint.layout import POST_ROPE, KeyForm
from rotor.models.compressed import CompressedCheckpoint
from rotor.runtime.decoded import decoding
from rotor.search.plan_evaluator import rank_path

PROMPT = torch.randint(1, 4096, (2, 20), generator=torch.Generator().manual_seed(5))
PADDING = 64
"""A whole block of RoPE, so that codes are those of the sequence alone."""


def decoded(model: Any) -> Tensor:
    """Logits of a prompt, each token of which reads the rows of those before it."""
    with decoding(model.modules()):
        return model(PROMPT, use_cache=False).logits


UNLIKE = (
    "afmoe",
    "cohere2",
    "gemma4_text",
    "gemma4_unified_text",
    "gpt_oss",
    "llama4_text",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_next",
    "smollm3",
)
"""Gates, sinks, norms of values or layers without RoPE: models folded by hand have none of them, so that the pipeline
checks them."""
KINDS = ("gpt_oss", "qwen3_5_text", "smollm3")
"""The quick tests: sinks and windows, gates and layers other than attention, layers without RoPE."""


@pytest.mark.parametrize("name", [name for name in ALIKE if name not in UNLIKE])
def test_at_full_rank_a_family_is_its_source(name: str) -> None:
    """Folded with random bases, keys after RoPE and before; the pipeline checks the rest."""
    model = tiny_model(name).eval()
    with torch.inference_mode():
        expected = model(PROMPT).logits
        for form in (POST_ROPE, KeyForm(8)):
            assert relative_error(folded(model, Folding(form, 2))(PROMPT).logits, expected) < 1e-5


def test_chunks_and_queries_scaled_by_place(tmp_path: Path) -> None:
    """Tokens come alone and together, at the edges of chunks of 12 and within; every fourth place has a new scale."""
    model = build_tiny("llama4_text", tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"floor_scale": 4, "attn_scale": 0.5}))
    run = rotor.calibrate(model, tmp_path / "run", "rotor", WITH_EXACT)
    network = in_memory(run)
    prompt = torch.randint(1, 4096, (2, 44), generator=torch.Generator().manual_seed(8))
    edges = [0, 10, *range(11, 26), 31, 44]
    with torch.inference_mode():
        expected = network.model(prompt).logits
        compressed = network.compress(run.bases(), whole_ranks(run), run.recipe.exact.tokens)
        config = compressed.config
        for cache in (DynamicCache(config=config), StaticCache(config=config, max_cache_len=44)):
            parts = [compressed(prompt[:, a:b], past_key_values=cache).logits for a, b in pairwise(edges)]
            assert relative_error(torch.cat(parts, dim=1), expected) < 1e-5


@pytest.mark.parametrize("name", mostly_nightly([*ALIKE, *VARIANTS], lambda name: name in KINDS))
def test_a_family_goes_through_the_whole_pipeline(name: str, tmp_path: Path) -> None:
    model = build_tiny(name, tmp_path / "model")
    run = rotor.calibrate(model, tmp_path / "run", "rotor", WITH_EXACT, offload="always")
    (tmp_path / "config").mkdir()
    shutil.copy(model / "config.json", tmp_path / "config")
    found = inspect(tmp_path / "config", overrides=WITH_EXACT)
    assert (found.shape, found.form) == (run.shape, run.form.in_words(run.shape))

    network, finest = in_memory(run), rank_path(run, run.recipe).plans()[0]
    whole = whole_ranks(run)
    exact = run.recipe.exact.tokens if run.shape.needs_exact else None
    with torch.inference_mode():
        expected = network.model(PROMPT).logits
        assert relative_error(decoded(network.compress(run.bases(), whole, exact)), expected) < 1e-5
        # Codes of the widest kind, which fit only what calibration has seen as attention stores it. They make a router
        # choose another expert for a few tokens.
        coded = decoded(network.compress(run.bases(finest.channels), finest.ranks, exact))
        errors = (coded - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert errors.quantile(0.75) < 0.25

    rotor.export(run.folder, tmp_path / "out", compression=0.6, measure=False, context=12)
    result = rotor.validate(tmp_path / "out", measure=False)
    assert not result.damaged, [check for check in result.checks if check.status == "fail"]
    states = run.info["model"]["state_bytes"]
    assert (found.state_bytes, CompressedCheckpoint(tmp_path / "out").report["source"].get("state_bytes")) == (
        states,
        states,
    )
    assert (states > 0) == ("other states" in (tmp_path / "out" / "README.md").read_text())

    compressed = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    tokens = compressed.generate(PROMPT, **settings)
    assert torch.equal(compressed.generate(PROMPT, cache_implementation="static", **settings), tokens)

    short = PROMPT[:1]
    long = torch.randint(1, 4096, (1, PADDING + short.shape[1]), generator=torch.Generator().manual_seed(6))
    batch = torch.cat([torch.cat([torch.full((1, PADDING), 7), short], dim=1), long])
    mask = torch.ones_like(batch)
    mask[0, :PADDING] = 0
    for beams in (1, 2):
        options = settings | {"num_beams": beams}
        alone = compressed.generate(short, attention_mask=torch.ones_like(short), **options)
        together = compressed.generate(batch, attention_mask=mask, **options)
        assert torch.equal(
            together[:1, batch.shape[1] :][:, : alone.shape[1] - short.shape[1]], alone[:, short.shape[1] :]
        )
