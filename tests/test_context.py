"""Bytes at the context that is served: a layer with a window holds no more than that, and its channels cost less."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.command_line import rotor
from support.compare import relative_error
from test_bit_plans import layer_codes, predicted_loss
from transformers import AutoModelForCausalLM

from rotor import Run, calibrate, export, inspect, validate
from rotor.calibration.allocation.bits import BitsPath
from rotor.calibration.allocation.plan import RankInputs, Spectra
from rotor.calibration.allocation.uniform import UniformPath
from rotor.calibration.allocation.water_filling import WaterFillingPath
from rotor.calibration.codes.layer import channels_bytes
from rotor.checkpoint.families import attention_shape
from rotor.checkpoint.layout import AttentionShape, KeyForm
from rotor.checkpoint.sizes import compression
from rotor.errors import CheckpointError, UsageError
from rotor.models.source import Checkpoint
from rotor.search.report.collect import collect

SHAPE = AttentionShape(2, 8, 2, 16, 64, rotary_dim=16, windows=(16, None))


def test_windows_of_a_model(tiny) -> None:
    assert attention_shape(Checkpoint(tiny("mistral")).config).windows == (12, 12)
    assert attention_shape(Checkpoint(tiny("gemma3_text")).config).windows == (12, None)
    assert attention_shape(Checkpoint(tiny("qwen3")).config).windows == ()
    assert SHAPE.held_tokens(64) == (16, 64)
    assert SHAPE.held_tokens(8) == (8, 8)
    with pytest.raises(CheckpointError, match="3 windows of 2 layers"):
        replace(SHAPE, windows=(1, 2, 3))


@pytest.mark.parametrize("context", [16, 40, 64, 1000])
def test_the_best_plan_of_every_number_of_bytes(context: int) -> None:
    """Against every split of units among the layers; within the window both cost alike."""
    layers = [layer_codes(1, 32, size, seed) for seed, size in enumerate((1.0, 3.0))]
    path, held = BitsPath(layers, SHAPE, (0, 4, 8), 2, context), SHAPE.held_tokens(context)
    whole = 128 * sum(held)
    every = []
    for split in itertools.product(*(range(len(layer.path.loss)) for layer in path._layers)):
        loss = sum(layer.path.loss[units] for layer, units in zip(path._layers, split, strict=True))
        every.append((8 * sum(units * tokens for units, tokens in zip(split, held, strict=True)), loss))
    for target in (0.3, 0.6, 0.75, 0.85):
        plan = path.at_compression(target)
        assert plan is not None
        assert plan.channels is not None
        kept = sum(channels_bytes([own]) * tokens for own, tokens in zip(plan.channels, held, strict=True))
        assert plan.stored == pytest.approx(1 - kept / whole)
        assert plan.stored >= target - 1e-9
        best = min(loss for size, loss in every if size <= (1 - target) * whole)
        assert predicted_loss(layers, plan) == pytest.approx(best)
    stored = [plan.stored for plan in path.plans()]
    assert stored == sorted(stored)
    assert path.at_compression(0.9999) is None


def test_a_layer_with_a_window_gets_more_bits_the_longer_the_context() -> None:
    layers, shape = [layer_codes(1, 128, 1.0, 0)] * 2, replace(SHAPE, head_dim=64, rotary_dim=64)
    plans = [BitsPath(layers, shape, (0, 2, 4, 6, 8), 2, context).at_compression(0.9) for context in (16, 64, 1024)]
    sizes = [[channels_bytes([own]) for own in plan.channels or []] for plan in plans if plan is not None]
    assert sizes[0][0] == sizes[0][1]
    assert sizes[0][0] < sizes[1][0] < sizes[2][0]


def test_lighter_plans_are_ordered_by_what_each_byte_of_a_sequence_costs() -> None:
    layers = [layer_codes(1, 32, 1.0, seed) for seed in range(2)]
    path = BitsPath(layers, SHAPE, (0, 4, 8), 2, 1024)
    plan = path.at_compression(0.7)
    assert plan is not None
    before = predicted_loss(layers, plan)
    costs = [(predicted_loss(layers, other) - before) / (other.stored - plan.stored) for other in path.lighter(plan)]
    assert costs == sorted(costs)


def test_ranks_count_what_layers_hold() -> None:
    ranks = [[(16, 16), (16, 16)], [(8, 8), (8, 8)]]
    assert compression(ranks, SHAPE) == pytest.approx(0.25)
    assert compression(ranks, SHAPE, 64) == pytest.approx(1 - (16 * 64 + 64 * 32) / (64 * 80))
    spectra = [Spectra(*(torch.linspace(2, 1, 16, dtype=torch.float64).repeat(2, 1) for _ in range(2)))] * 2
    plan = UniformPath(RankInputs(spectra, SHAPE, 8, context_tokens=64)).at_compression(0.4)
    assert plan is not None
    assert plan.stored == pytest.approx(0.5)
    probed = [([(8, 1.0)], [(8, 1.0)])] * 2
    filled = WaterFillingPath(RankInputs(spectra, SHAPE, 2, sensitivities=probed, context_tokens=64))
    plan = filled.at_compression(0.5)
    assert plan is not None
    windowed, full = (sum(a + b for a, b in layer) for layer in plan.ranks)
    assert windowed > full


@pytest.fixture(scope="module")
def two_ropes(tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma 3 in small: a layer with a window and fast RoPE, one without and with slow RoPE."""
    folder = shutil.copytree(tiny("gemma3_text"), tmp_path_factory.mktemp("context") / "model")
    config = json.loads((folder / "config.json").read_text())
    for kind, theta in (("sliding_attention", 100.0), ("full_attention", 1e6)):
        config["rope_parameters"][kind]["rope_theta"] = theta
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def run(two_ropes: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    settings = ["tokens.source=random", "tokens.count=1024", "tokens.seq_len=64", "codes.tokens=512", "groups.size=2"]
    return calibrate(two_ropes, tmp_path_factory.mktemp("context") / "run", "rotor", settings)


def test_layers_of_two_ropes_have_one_form(two_ropes: Path, run: Run) -> None:
    assert run.form.keys == (KeyForm(64), KeyForm(64))
    assert inspect(two_ropes, "rotor", ["groups.size=2"]).form == "joint, blocks of 64, 2 heads"


def test_an_export_says_where_its_cache_is_smaller(run: Run, tmp_path: Path, capsys) -> None:
    """Exact tokens of a short sequence are all of it, so that its rows come on top."""
    for context, said, card in (
        (12, "smaller at no length up to 12 tokens", "Sequences of up to 12 tokens take no less than without rotor."),
        (256, r"smaller from \d+ tokens on", r"Sequences of fewer than \d+ tokens take more than without rotor."),
    ):
        out = tmp_path / str(context)
        arguments = ("--compression", "0.6", "--no-measure", "--context", str(context))
        code, shown, _ = rotor(capsys, "export", run.folder, "-o", out, *arguments)
        assert code == 0
        assert re.search(said, shown)
        assert re.search(card, (out / "README.md").read_text())


def test_an_export_counts_the_bytes_of_its_context(run: Run, tmp_path: Path) -> None:
    """By default of the model's 256 tokens; what it writes says so, loads, computes and validates."""
    found = {}
    for context in (None, 12):
        folder = tmp_path / f"out-{context}"
        result = export(run.folder, folder, compression=0.6, measure=False, context=context)
        sizes, report = result.report["kv_bytes_of_sequence"], result.report
        tokens = context or 256
        rows = 2 * 4 * 16 * report["kv_bytes_per_token"]["element_bytes"]
        assert (sizes["tokens"], sizes["before"]) == (tokens, rows * (12 + tokens))
        # Compression is of what every token has, without exact tokens: those of a short sequence are fewer.
        after = sizes["after"] - (4 + 12 + 4 + (16 if context else 128)) * rows
        assert report["compression"]["stored"] == pytest.approx(1 - after / sizes["before"], abs=1e-6)
        assert (
            f"| KV bytes of {tokens:,} tokens before, after | {sizes['before']:,}, {sizes['after']:,} |"
            in (folder / "README.md").read_text()
        )
        assert any(label == f"KV cache at {tokens} tokens" for label, *_ in collect(folder).sizes)
        found[context], checked = report["layouts"], validate(folder, measure=False)
        assert not checked.damaged, [check for check in checked.checks if check.status == "fail"]
        assert checked.summary["measured_compression"] == pytest.approx(report["compression"]["stored"], abs=1e-5)
    assert found[None] != found[12]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out-None", dtype=torch.float32).eval()
    rows = torch.randint(1, 4000, (2, 40), generator=torch.Generator().manual_seed(0))
    options = {"max_new_tokens": 9, "do_sample": False, "output_logits": True, "pad_token_id": 0}
    output = model.generate(rows, return_dict_in_generate=True, **options)
    with torch.inference_mode():
        whole = model(output.sequences[:, :-1], use_cache=False).logits[:, rows.shape[1] - 1 :]
    assert relative_error(torch.stack(output.logits, dim=1), whole) < 1e-4


def test_contexts_that_are_refused(run: Run, tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"--context 512: the model's longest sequence has 256 tokens(.|\n)*at most 256"
    ):
        export(run.folder, tmp_path / "out", compression=0.5, measure=False, context=512)
    with pytest.raises(UsageError, match=r"--context: got 0, expected"):
        export(run.folder, tmp_path / "out", compression=0.5, measure=False, context=0)
    assert not (tmp_path / "out").exists()
