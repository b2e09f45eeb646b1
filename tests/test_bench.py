"""`rotor bench` on a CPU with tiny sizes: what they record, and that wrong results are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gpu.subjects import named_subjects
from support.command_line import rotor
from support.kernel_cases import shape_of
from support.random_layers import NARROW, NARROW_BOTH, WIDE, WIDE_BOTH, layout_of
from typer.testing import CliRunner

from rotor import export
from rotor.checkpoint.layout import ExactTokens, KeyForm
from rotor.cli import console
from rotor.cli.commands import app
from rotor.errors import NumericsError, UsageError
from rotor.kernels.dispatch import default_layer
from rotor.tools.bench import attention, tuning
from rotor.tools.bench.attention import pytorch_path
from rotor.tools.bench.baselines import BASELINES, random_baseline, widened
from rotor.tools.bench.bench import bench

APART = layout_of(1, [(WIDE, NARROW)] * 4)
JOINT = layout_of(2, [(WIDE_BOTH, None), (NARROW_BOTH, None)], KeyForm(8))
SMALL = {"lengths": (48,), "prefill": (24,), "batch": (2,), "repetitions": 2, "new_tokens": 0}


@pytest.fixture(scope="module")
def folder(demo_run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bench") / "out"
    export(demo_run("fdc").folder, out, removal_rate=0.2, measure=False)
    return out


@pytest.fixture(autouse=True)
def small_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "FLUSH_BYTES", 1 << 16)


def test_every_row_of_a_cpu_is_measured_and_the_others_say_why(folder: Path) -> None:
    report = bench(folder, **SMALL, device="cpu", command="rotor bench")
    assert (report["device"]["type"], report["command"]) == ("cpu", "rotor bench")
    assert {"rotor", "torch", "transformers", "python"} <= set(report["versions"])
    assert report["commit"] is None or len(report["commit"].removesuffix("-dirty")) == 40
    stock = {"SDPA", "SDPA flash"}
    measured = {"rotor, PyTorch path", *stock}
    others = {f"{BASELINES[bits]}, widened by PyTorch" for bits in (8, 4)}
    assert {(r["phase"], r["row"]) for r in report["attention"]} == {
        *(("decode", row) for row in measured | others),
        *(("prefill", row) for row in measured),
    }
    left_out = {f"SDPA cuDNN, {phase}" for phase in ("decode", "prefill")}
    assert set(report["not_measured"]) == {"rotor, kernel", *left_out}
    assert "CUDA" in report["not_measured"]["rotor, kernel"]
    for name in left_out:
        assert report["not_measured"][name].startswith("PyTorch has none for this device, dtype or size (No viable")
    for record in report["attention"]:
        assert record["batch_size"] == 2
        assert record["seconds"]["low"] <= record["seconds"]["median"] <= record["seconds"]["high"]
        assert record["largest_error"] <= 1e-5
    for phase in ("decode", "prefill"):
        over = {r["row"]: r["over_uncompressed"] for r in report["attention"] if r["phase"] == phase}
        assert min(over[row] for row in stock) == 1.0
    json.dumps(report)


def test_a_step_with_exact_tokens_is_measured_whole_and_a_prompt_is_stock_attention() -> None:
    layout, left_out = replace(JOINT, exact=ExactTokens(2, 16)), dict[str, str]()
    generator = torch.Generator().manual_seed(0)
    shape = shape_of(4, 2, 16, 16)
    step, prompt = (
        attention.bench_layer(layout, shape, load, torch.float32, generator, 1, left_out)
        for load in ((2, 1, 48), (2, 24, 24))
    )
    others = {f"{BASELINES[bits]}, widened by PyTorch" for bits in (8, 4)}
    assert step.keys() == {"rotor, PyTorch path", "SDPA", "SDPA flash", *others}
    assert prompt.keys() == {"SDPA", "SDPA flash"}
    assert left_out.keys() == {"rotor, kernel", "rotor, prompts", "SDPA cuDNN, decode", "SDPA cuDNN, prefill"}


def test_a_back_end_of_stock_attention_is_the_only_one_that_runs() -> None:
    def enabled() -> torch.Tensor:
        flags = torch.backends.cuda
        return torch.tensor([flags.flash_sdp_enabled(), flags.cudnn_sdp_enabled(), flags.math_sdp_enabled()])

    before = enabled()
    found = {name: attention.by_backend(enabled, backend)().tolist() for name, backend in attention.BACKENDS.items()}
    assert found == {"SDPA flash": [True, False, False], "SDPA cuDNN": [False, True, False]}
    assert torch.equal(enabled(), before)


def test_a_device_without_memory_is_no_missing_back_end() -> None:
    def call() -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        attention.other_backends(call, "decode", {})


@pytest.mark.parametrize(("bits", "part"), [(16, 4), (8, 2), (4, 1 + 0.5)])
def test_other_caches_hold_what_they_say_and_are_read_as_they_are(bits: int, part: float) -> None:
    """Bytes by those of 4 bits; a number of 4 bits is one of 16 levels of its group's scale."""
    problem = random_baseline((4, 2, 32), [70, 70], bits, torch.bfloat16, torch.Generator().manual_seed(0))
    numbers = 2 * 2 * 140 * 32  # scales and offsets of 4 bits: four numbers of 16 bits for 32
    assert problem.cache_bytes == part * numbers / 2 + (8 if bits == 8 else 0)
    found, exact = widened(problem)(), problem.unrounded()
    assert (found.double() - exact).norm() / exact.norm() < attention.TOLERANCE[torch.bfloat16]
    if bits == 4:
        (key, _), levels = problem.read(torch.float64), problem.key_scale.double()
        assert (key[..., :16] - levels[..., 1:2]).div(levels[..., :1]).round().unique().tolist() == [*range(16)]


@pytest.mark.parametrize("seq_len", [1, 24])
@pytest.mark.parametrize("wrong", ["scaled", "nan"])
def test_a_wrong_row_stops_the_report(folder: Path, wrong: str, seq_len: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(problem):
        factor = {"scaled": 1.001, "nan": torch.nan}[wrong] if problem.seq_len == seq_len else 1.0
        run = pytorch_path(problem)
        return lambda: run() * factor

    monkeypatch.setattr(attention, "pytorch_path", broken)
    with pytest.raises(NumericsError, match=rf"'rotor, PyTorch path', {seq_len} of .*nothing is reported"):
        bench(folder, **SMALL, device="cpu")


def test_command_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call = ["bench", str(folder), "--device", "cpu", "--lengths", "24,2048", "--prefill", "16", "--batch", "1"]
    call += ["--repetitions", "1", "--new-tokens", "2", "-q"]
    done = CliRunner().invoke(app, [*call, "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert [(r["row"], r["length"]) for r in report["model"]] == [
        (f"model, {name}", length) for length in (16, 24) for name in ("compressed", "source")
    ]
    compressed, source = report["model"][2:]
    # The last of the new tokens is never fed back. float32 on a CPU.
    assert source["kv_cache_bytes"] == 26 * 2560 * 2
    assert compressed["kv_cache_bytes"] < source["kv_cache_bytes"]
    assert source["first_token_over_source"] == 1.0
    first = [record["time_to_first_token_s"]["median"] for record in (compressed, source)]
    assert compressed["first_token_over_source"] == first[0] / first[1]
    assert "longer than the model's" in report["not_measured"]["model, 2048 tokens"]
    monkeypatch.setattr(console.stdout, "width", 200)  # cells wrap by the times in others
    text = CliRunner().invoke(app, call[:-1]).output  # without -q
    assert "over uncompressed" in text
    assert "fp8 (e4m3), one scale, widened by PyTorch" in text
    assert "over source" in text
    assert "not measured: rotor, kernel: the Triton kernels need" in text


def test_requests_that_are_refused(folder: Path) -> None:
    for options, text in (
        (["--lengths", "1,0"], "--lengths 1,0"),
        (["--prefill", "1,0"], "--prefill 1,0"),
        (["--batch", "1,0"], "--batch 1,0"),
    ):
        with pytest.raises(UsageError, match=text):
            CliRunner().invoke(app, ["bench", str(folder), *options], catch_exceptions=False)


def test_tuning_tries_no_tile_above_a_block() -> None:
    layout = named_subjects()["llama3-8b-64x2"].layout
    own = default_layer(layout)
    tried = dict(tuning.search(own, layout, 90, lambda kernels: kernels.sm_90.stages - kernels.slices_per_sm / 64))
    assert next(iter(tried)) == own
    assert {kernels.sm_90.keys for kernels in tried} == {32, 64}
    assert {kernels.sm_90.stages for kernels in tried} == {1, 2, 3, 4}
    assert [*tried][-1].materialise
    assert all(kernels.sm_80 == own.sm_80 for kernels in tried)
    best = min(tried, key=lambda kernels: tried[kernels])
    assert (best.sm_90.stages, best.sm_90.warps, best.slices_per_sm) == (1, 1, 32)


def test_tuning_tries_one_that_does_not_run_no_further() -> None:
    layout = named_subjects()["llama3-8b-apart-64x1"].layout
    own = default_layer(layout)
    tried = [kernels for kernels, _ in tuning.search(own, layout, 80, lambda kernels: float("inf"))]
    assert len(tried) == len(set(tried)) == len(tuning.launches(own, layout, 80)) + 1
    assert all(kernels.sm_90 == own.sm_90 for kernels in tried)


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is said where there is no GPU")
def test_tuning_needs_a_gpu(capsys, tmp_path) -> None:
    code, _, said = rotor(capsys, "tune", str(tmp_path))
    assert code == 2
    assert "there is no CUDA device here" in said
