"""Layers that read the cache of others, and the tokens (Gemma 4's E2B and E4B); the pipeline checks the rest."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.attention import attention_to_two_kinds
from support.compare import close, relative_error
from support.quick import mostly_nightly
from support.runs import FAST_EVALUATION, SHORT_TEXT, WITH_EXACT, in_memory, whole_ranks
from support.tiny_models import build_tiny
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, DynamicCache, StaticCache
from transformers.masking_utils import sdpa_mask

import rotor
from rotor import Run, inspect
from rotor.calibration.capture import EXACT_SHARE, layer_statistics
from rotor.calibration.gradients import fisher_information
from rotor.checkpoint.layout import ExactTokens
from rotor.errors import UnsupportedModelError, UsageError
from rotor.kernels.reference.attention import dense_attention
from rotor.models.layerwise import LayerwiseModel
from rotor.models.loading import load_model, weights_of
from rotor.models.source import Checkpoint
from rotor.policies import Streaming, cache_policy

PROMPT = torch.randint(1, 4096, (2, 44), generator=torch.Generator().manual_seed(8))
SOURCES = {3: 1, 4: 2, 5: 1}
"""Layers without a cache, and those that they read; all of them run at the turn of layer 2."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its checkpoint has tensors that nothing reads, as those on the hub may."""
    folder = build_tiny("gemma4_text-e2b", tmp_path_factory.mktemp("shared") / "model")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    prefix = "model.layers.{}.self_attn.k_proj.weight"
    tensors[prefix.format(5)] = tensors[prefix.format(1)].clone()
    save_file(tensors, file, {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    settings = [*WITH_EXACT, *FAST_EVALUATION, *SHORT_TEXT]
    return rotor.calibrate(model, tmp_path_factory.mktemp("shared") / "run", "rotor", settings, offload="always")


def test_layers_that_share_a_cache_run_together(model: Path) -> None:
    network = LayerwiseModel.of(load_model(model, torch.device("cpu"), torch.float32))
    assert dict(network.family.readers) == SOURCES
    assert [network.layers_at(index) for index in range(3)] == [[0], [], [1, 2]]
    assert [network.turn_of(layer) for layer in range(3)] == [0, 2, 2]
    assert network.shape.num_layers == inspect(model, overrides=WITH_EXACT).shape.num_layers == 3


@pytest.mark.parametrize("streamed", [False, True])
def test_layer_by_layer_it_is_the_model(model: Path, streamed: bool) -> None:
    expected = load_model(model, torch.device("cpu"), torch.float32)(PROMPT, use_cache=False).logits
    network = LayerwiseModel(weights_of(Checkpoint(model), torch.device("cpu"), torch.float32, streamed), 44)
    states = network.final_states(PROMPT)
    with network.head() as head:
        assert relative_error(head(states), expected) < 1e-5


@pytest.mark.parametrize("compares", mostly_nightly([True, False], lambda compares: compares))
def test_nothing_removed_loses_nothing_however_tokens_come(
    compares: bool, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone and together, through windows; what nobody asks for is left out of the layers without a cache.

    On a GPU rotations are not compared, so that queries of layers that share a cache are always rotated anew.
    """
    if not compares:
        monkeypatch.setattr("rotor.runtime.steps.is_same", lambda own, given: False)
    network = in_memory(run)
    edges = [0, 10, *range(11, 26), 31, 44]
    padded = torch.ones_like(PROMPT)
    padded[0, :5] = 0
    with torch.inference_mode():
        for mask in (None, padded):
            expected = network.restore()(PROMPT, attention_mask=mask).logits
            compressed = network.compress(run.bases(), whole_ranks(run), run.recipe.exact.tokens)
            config = compressed.config
            for cache in (DynamicCache(config=config), StaticCache(config=config, max_cache_len=44)):
                for start, stop in pairwise(edges):
                    seen = None if mask is None else mask[:, :stop]
                    given: dict[str, Any] = {"attention_mask": seen, "past_key_values": cache}
                    last = 2 if start else 0
                    if mask is not None:
                        given["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, start:stop]
                    logits = compressed(PROMPT[:, start:stop], logits_to_keep=last, **given).logits
                    wanted = expected[:, start:stop][:, -last:]
                    assert relative_error(logits[1], wanted[1]) < 1e-5
                    if mask is None or start:
                        assert relative_error(logits[0], wanted[0]) < 1e-5, (start, stop)


def test_measured_layer_by_layer_it_is_the_compressed_model(run: Run) -> None:
    network = in_memory(run)
    bases, ranks, exact = run.bases(), whole_ranks(run), run.recipe.exact.tokens
    whole = network.compress(bases, ranks, exact)
    with torch.inference_mode():
        expected = whole(PROMPT, use_cache=False).logits
    network.restore()
    network._compressed = bases, ranks, exact
    states = network.final_states(PROMPT)
    with network.head() as head:
        assert relative_error(head(states), expected) < 1e-5


@pytest.mark.parametrize("tokens", [None, ExactTokens(1, 3)], ids=["coded", "exact"])
def test_gradients_are_those_of_all_that_read_a_cache(model: Path, tokens: ExactTokens | None) -> None:
    """Against autograd through the whole model; with exact tokens, by keys and values of two kinds."""
    source = load_model(model, torch.device("cpu"), torch.float32)
    network, rows = LayerwiseModel.of(source, batch_tokens=32), PROMPT[:, :16]
    wanted = [frozenset({"key_post", "value"})] * 3
    found = dict(fisher_information(network, rows, 4, wanted, exact=tokens))
    moved: dict[tuple[int, str], Tensor] = {}

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, **_: Any
    ) -> Any:
        source_idx = SOURCES.get(module.layer_idx, module.layer_idx)
        if source_idx == module.layer_idx:
            coded = (key, value) if tokens is None else (key.clone(), value.clone())
            moved[module.layer_idx, "key_post"], moved[module.layer_idx, "value"] = coded
        if tokens is None:
            return dense_attention(query, key, value, scaling, mask).unflatten(-1, (8, -1)), None
        coded = moved[source_idx, "key_post"], moved[source_idx, "value"]
        output = attention_to_two_kinds(query, (key, value), coded, tokens, scaling, mask, share=EXACT_SHARE)
        return output.unflatten(-1, (8, -1)), None

    AttentionInterface.register("rotor_test_shared", attention)
    AttentionMaskInterface.register("rotor_test_shared", sdpa_mask)
    source.config._attn_implementation = "rotor_test_shared"
    totals: dict[tuple[int, str], Tensor] = {}
    source.requires_grad_(True)
    for row in rows.split(1):
        logits = source(row, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[0, :-1], row[0, 1:], reduction="sum")
        for at, gradient in zip(moved, torch.autograd.grad(loss, list(moved.values())), strict=True):
            stacked = gradient[0].transpose(0, 1).flatten(1).double()
            totals[at] = totals.get(at, 0) + stacked.T @ stacked
    assert {layer for layer, _ in totals} == {0, 1, 2}
    for (layer, name), expected in totals.items():
        assert relative_error(found[layer].information.moment(name)[0], expected) < 1e-3, (layer, name)


def test_moments_of_queries_are_those_of_all_that_read_a_cache(model: Path) -> None:
    source = load_model(model, torch.device("cpu"), torch.float32)
    network, rows = LayerwiseModel.of(source), PROMPT[:, :16]
    states = [network.embed(rows)]
    wanted = frozenset({"query", "value"})
    for layer in range(3):
        states.append(network.states_like(rows))
        moments = layer_statistics(network, layer, rows, states[-2], states[-1], 2, wanted)
        queries = {}
        handles = [
            source.model.layers[at].self_attn.q_norm.register_forward_hook(
                lambda _, inputs, output, at=at, queries=queries: queries.update({at: output})
            )
            for at in (layer, *(reader for reader, read in SOURCES.items() if read == layer))
        ]
        with torch.inference_mode():
            source(rows, use_cache=False)
        for handle in handles:
            handle.remove()
        lengths = sum(float(own.double().square().sum()) for own in queries.values())  # RoPE keeps them
        assert float(moments.moment("query").diagonal(dim1=-2, dim2=-1).sum()) == pytest.approx(lengths, rel=1e-5)
        assert moments.tokens == rows.numel()


def test_measured_and_written_it_keeps_what_layers_with_a_cache_keep(run: Run, tmp_path: Path) -> None:
    written = [
        rotor.export(run.folder, tmp_path / offload, compression=0.6, context=12, offload=offload)
        for offload in ("never", "always")
    ]
    assert close(*(one.report["accuracy"] for one in written))
    compressed = AutoModelForCausalLM.from_pretrained(tmp_path / "never", dtype=torch.float32)
    with torch.inference_mode():
        cache = compressed(PROMPT, use_cache=True).past_key_values
    filled = [layer.keys is not None for layer in cache.layers]
    assert all(filled[:3])
    assert not any(filled[3:])
    with pytest.raises(UnsupportedModelError), cache_policy(compressed, Streaming(0.5)):
        pass


def test_layers_on_several_devices_are_refused(run: Run) -> None:
    network = in_memory(run)
    compressed = network.compress(run.bases(), whole_ranks(run), run.recipe.exact.tokens)
    handed: list[Any] = []
    reader = compressed.model.layers[5].self_attn
    handle = reader.register_forward_pre_hook(
        lambda _, args, kwargs: handed.append(kwargs["shared_kv_states"]), with_kwargs=True
    )
    compressed(PROMPT)
    handle.remove()
    rows, _ = handed[0]["full_attention"]
    assert rows.to("cpu") is rows
    with pytest.raises(UsageError, match="one on meta reads its cache"):
        rows.to("meta")
