"""Models whose layers keep exact tokens, by the kernels in Triton's interpreter and in plain PyTorch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.quick import mostly_nightly
from support.random_layers import NARROW_BOTH, WIDE_BOTH, LayoutOf, groups_of, write_random
from support.tiny_models import build_tiny
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from rotor.checkpoint import layout as checkpoint_layout
from rotor.checkpoint.layout import PRE_ROPE, ExactTokens, KeyForm
from rotor.checkpoint.rows import NumberRow
from rotor.kernels import absorb_launch
from rotor.kernels.absorb_launch import Absorbing

EXACT = ExactTokens(3, 8)
NUMBERS = (NumberRow(24), NumberRow(16))
CASES: dict[str, tuple[str, LayoutOf, str]] = {
    "llama, numbers": ("llama", groups_of(2, KeyForm(8), NUMBERS), "qkvo"),
    "llama, codes": ("llama", groups_of(1, PRE_ROPE, (WIDE_BOTH, None), (NARROW_BOTH, None)), "qkvo"),
    "qwen3, after RoPE": ("qwen3", groups_of(1, KeyForm(), (NumberRow(16), NumberRow(8))), ""),
    "gemma2, a window and a soft cap": ("gemma2", groups_of(2, KeyForm(64), NUMBERS), ""),
    "gemma4_text, heads of two sizes, normed values": ("gemma4_text", groups_of(2, KeyForm(8), NUMBERS), ""),
    "phi3, frequencies of two lengths": ("phi3", groups_of(2, KeyForm(16), NUMBERS), ""),
    "hunyuan_v1_dense, weights behind RoPE": (
        "hunyuan_v1_dense",
        groups_of(2, KeyForm(8), (NumberRow(16), NumberRow(12))),
        "",
    ),
    "gpt2, no RoPE": ("gpt2", groups_of(2, KeyForm(), NUMBERS), "qkvo"),
}


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    family, layout_of, biases = CASES[request.param]
    folder = tmp_path_factory.mktemp("exact")
    source = build_tiny(family, folder / "source")
    out = write_random(source, folder / "out", lambda shape: replace(layout_of(shape), exact=EXACT), biases)
    return AutoModelForCausalLM.from_pretrained(out).eval()


def passes(model: Any, cache: Any, chunks: list[int], padding: int, crop: int) -> torch.Tensor:
    """Logits of a batch of two in chunks, the first sequence behind padding."""
    ids = torch.randint(5, 4000, (2, sum(chunks) + crop), generator=torch.Generator().manual_seed(0))
    mask, start, found = torch.ones_like(ids), 0, []
    mask[0, :padding] = 0
    for number, chunk in enumerate(chunks):
        if number == len(chunks) - 1 and crop:
            start -= crop
            cache.crop(-crop)
        own = slice(start, start + chunk)
        with torch.no_grad():
            logits = model(ids[:, own], attention_mask=mask[:, : own.stop], past_key_values=cache).logits
        found.append(logits[:, padding:] if number == 0 else logits)
        start += chunk
    return torch.cat(found, 1)


@pytest.mark.parametrize(
    "model", mostly_nightly(CASES, lambda name: name.startswith(("gemma2", "phi3"))), indirect=True
)
def test_kernels_and_plain_pytorch_agree(model: Any, monkeypatch: pytest.MonkeyPatch, request) -> None:
    """A prompt behind padding, steps, a few tokens, a chunk, steps behind it; a static cache; a crop.

    phi3 has other frequencies behind 128 tokens: the prompt ends before them, within a block.
    """
    tolerance = 3e-2 if "codes" in request.node.name else 3e-5
    quick = "gemma2" in request.node.name
    runs: list[Any] = [(DynamicCache, [11, 1, 2, 12, 1], 3, 0) if quick else (DynamicCache, [17, 1, 4, 40, 1], 5, 0)]
    if "phi3" in request.node.name:
        runs = [(DynamicCache, [123, 1, 2, 3, 3, 1], 5, 0)]
    if "llama, numbers" in request.node.name:
        runs += [(StaticCache, [6, 1, 20, 1], 2, 0), (DynamicCache, [24, 1, 1], 0, 15)]
    for kind, chunks, padding, crop in runs:
        found = []
        for choice in ("reference", "triton"):
            monkeypatch.setenv("ROTOR_ATTENTION", choice)
            sizes = {"max_cache_len": 60} if kind is StaticCache else {}
            found.append(passes(model, kind(config=model.config, **sizes), chunks, padding, crop))
        assert not torch.equal(*found)  # sums of both have their own order
        error = (found[1] - found[0]).norm() / found[0].norm()
        assert error < tolerance, (kind, error)


@pytest.mark.parametrize("model", ["llama, numbers"], indirect=True)
@pytest.mark.parametrize("apart", mostly_nightly([False, True], lambda apart: not apart))
def test_queries_are_absorbed_with_their_rows(apart: bool, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step has no launch that absorbs alone, unless its batch is absorbed in parts."""
    absorbed, launch = [], Absorbing.launch

    def counted(self: Absorbing, query: torch.Tensor) -> None:
        absorbed.append(len(query))
        launch(self, query)

    monkeypatch.setattr(Absorbing, "launch", counted)
    if apart:
        monkeypatch.setattr(absorb_launch, "ABSORBED_BYTES", 1)
    found = []
    for choice in ("reference", "triton"):
        monkeypatch.setenv("ROTOR_ATTENTION", choice)
        found.append(passes(model, DynamicCache(config=model.config), [24, 1, 1], 3, 0))
    assert (found[1] - found[0]).norm() < 3e-5 * found[0].norm()
    layers, sequences = model.config.num_hidden_layers, 2
    assert absorbed == ([1] * (2 * layers * sequences) if apart else [])


def test_slots_that_grow_with_a_sequence_hold_what_all_of_them_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that add slots, a crop, a chunk that fills the ring. Where several tokens are new, sums have another
    order."""
    exact = ExactTokens(3, 20)
    family, layout_of, biases = CASES["llama, numbers"]
    source = build_tiny(family, tmp_path / "source")
    out = write_random(source, tmp_path / "out", lambda shape: replace(layout_of(shape), exact=exact), biases)
    model = AutoModelForCausalLM.from_pretrained(out).eval()
    monkeypatch.setenv("ROTOR_ATTENTION", "triton")
    found, slots = [], []
    for at_a_time in (1 << 20, 2):
        monkeypatch.setattr(checkpoint_layout, "SLOTS_AT_A_TIME", at_a_time)
        for chunks, crop in (([6, 1, 1, 1, 2, 1, 1], 3), ([6, 1, 1, 13, 1], 0)):
            cache = DynamicCache(config=model.config)
            found.append(passes(model, cache, chunks, 2, crop))
            slots.append({layer.exact_rows.keys.shape[2] for layer in cache.layers})
    assert (found[2] - found[0]).norm() < 1e-6 * found[0].norm()
    assert (found[3] - found[1]).norm() < 1e-6 * found[1].norm()
    assert slots == [{23}, {23}, {3 + 12}, {23}]


@pytest.mark.parametrize(
    "model", mostly_nightly(CASES, lambda name: name.startswith(("llama, numbers", "qwen3"))), indirect=True
)
@pytest.mark.parametrize("order", [("reference", "triton"), ("triton", "reference")], ids=" then ".join)
def test_one_cache_is_read_by_both(
    order: tuple[str, str], model: Any, monkeypatch: pytest.MonkeyPatch, request
) -> None:
    """A prompt behind padding by one, steps and a few tokens by the other: gradients or a mask may decide so."""
    tolerance = 3e-2 if "codes" in request.node.name else 3e-5
    ids = torch.randint(5, 4000, (2, 31), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)  # as `generate` counts them: from the first real token
    found = []
    for choices in (("reference", "reference"), order):
        cache, logits = DynamicCache(config=model.config), []
        for start, stop in ((0, 17), (17, 18), (18, 19), (19, 23), (23, 24), (24, 31)):
            monkeypatch.setenv("ROTOR_ATTENTION", choices[int(start > 0)])
            with torch.no_grad():
                given = {"attention_mask": mask[:, :stop], "past_key_values": cache}
                given |= {"position_ids": positions[:, start:stop]} if "gpt2" not in request.node.name else {}
                logits.append(model(ids[:, start:stop], **given).logits[:, -1])
        found.append(torch.stack(logits, 1))
    error = (found[1] - found[0]).norm() / found[0].norm()
    assert error < tolerance, error
