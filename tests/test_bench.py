"""`rotor bench` on a CPU with tiny sizes: what it records, what it leaves out, and that it refuses wrong results."""

from __future__ import annotations

import importlib
import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from random_layers import NARROW, SHAPE, WIDE, layout_of
from typer.testing import CliRunner

from rotor.bench import rows as bench_rows
from rotor.bench.attention import relative_error
from rotor.bench.bench import bench, spread_layers
from rotor.bench.clock import Clock, Seconds
from rotor.bench.problem import (
    CHECKED_QUERIES,
    checked_output,
    least_work,
    random_problem,
    rebuilt_layout,
    truth,
    uncompressed_layout,
    without_rope,
)
from rotor.bench.report import add_device
from rotor.bench.rows import attention_rows, pytorch_path
from rotor.bench.settings import BenchSettings
from rotor.cli.commands import app
from rotor.errors import NumericsError, RecipeError, UsageError
from rotor.export.export import export
from rotor.format.layout import KeyForm, LayerLayout
from rotor.prediction.devices import find_device

APART = layout_of(1, [(WIDE, NARROW)] * 4)
FAST = layout_of(2, [(WIDE, None), (NARROW, None)], KeyForm(8, 8))
SMALL = BenchSettings((48,), (24,), (2,), layers=2, repetitions=2, new_tokens=0)


@pytest.fixture(scope="module")
def folder(demo_run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bench") / "out"
    export(demo_run("fdc").folder, out, removal_rate=0.2)
    return out


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates and flushes on arrays that take no time; the numbers mean nothing here."""
    monkeypatch.setitem(importlib.import_module("rotor.bench.clock").COPY_BYTES, "cpu", 1 << 16)
    monkeypatch.setitem(importlib.import_module("rotor.bench.clock").FLUSH_BYTES, "cpu", 1 << 16)
    monkeypatch.setitem(importlib.import_module("rotor.bench.clock").MATRIX, "cpu", 32)


def test_the_compressed_model_may_follow_a_cache_policy(folder: Path) -> None:
    settings = BenchSettings((48,), (24,), (2,), layers=1, repetitions=2, new_tokens=2)
    sizes = {}
    for cache in (None, "streaming-50", "h2o-50-4"):
        report = bench(folder, replace(settings, cache=cache), device="cpu")
        assert report["settings"]["cache"] == cache
        sizes[cache] = {(r["row"], r["length"]): r["kv_cache_bytes"] for r in report["model"]}
    for length in (24, 48):
        source, compressed = ("model, source", length), ("model, compressed", length)
        assert len({found[source] for found in sizes.values()}) == 1
        assert sizes["h2o-50-4"][compressed] < sizes["streaming-50"][compressed] < 0.6 * sizes[None][compressed]
    with pytest.raises(UsageError, match="policy kvquant: levels of 0 layers"):
        bench(folder, replace(settings, cache="kvquant-4"), device="cpu")


def test_every_row_of_a_cpu_is_measured_and_the_others_say_why(folder: Path) -> None:
    report = bench(folder, SMALL, device="cpu", command="rotor bench")
    assert report["device"]["type"] == "cpu"
    assert report["command"] == "rotor bench"
    assert {"rotor", "torch", "transformers", "triton", "python"} <= set(report["versions"])
    assert report["commit"] is None or len(report["commit"].removesuffix("-dirty")) == 40
    assert min(report["rates"].values()) > 0
    measured = {(r["phase"], r["row"]) for r in report["attention"]}
    left_out = {(r["phase"], r["row"]) for r in report["not_measured"] if "phase" in r}
    assert measured | left_out == {(phase, row.name) for row in attention_rows() for phase in row.phases}
    assert not measured & left_out
    assert {row for _, row in measured} == {
        "rotor compressed, PyTorch path",
        "rotor uncompressed, PyTorch path",
        "SDPA flash",
        "SDPA math",
        "keys rebuilt in memory, SDPA (Palu)",
    }
    assert all(r["why"] for r in report["not_measured"])
    for record in report["attention"]:
        assert record["device"] == "cpu"
        assert record["batch_size"] == 2
        assert record["seconds"]["low"] <= record["seconds"]["median"] <= record["seconds"]["high"]
        assert record["fraction_of_floor"] == pytest.approx(record["floor_seconds"] / record["seconds"]["median"])
        assert record["seconds"]["median"] == pytest.approx(sum(record["layer_seconds"]))
    best = [r["speed_up"] for r in report["attention"] if r["phase"] == "decode" and r["kind"] == "uncompressed"]
    assert max(best) == pytest.approx(1.0)
    assert {(c["phase"], c["row"]) for c in report["checks"]} == measured
    assert all(c["error"] <= c["limit"] for c in report["checks"])
    json.dumps(report)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_every_kernel_is_measured_on_a_gpu(folder: Path) -> None:
    report = bench(folder, BenchSettings((300,), (200,), (1, 3), layers=2, repetitions=2, new_tokens=2), device="cuda")
    measured = {(r["phase"], r["row"]) for r in report["attention"]}
    kernels = {(phase, row.name) for row in attention_rows() for phase in row.phases if "kernel" in row.name}
    assert kernels <= measured
    assert all(r["peak_bytes"] > 0 for r in report["model"])


def test_kernels_are_never_timed_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator()
    problem = random_problem(uncompressed_layout(SHAPE), without_rope(SHAPE), 1, 1, 8, torch.float32, generator)
    monkeypatch.setenv("ROTOR_ATTENTION", "triton")
    kernels = [row for row in attention_rows() if "kernel" in row.name]
    assert len(kernels) == 2
    assert all("CUDA" in str(row.why_not(problem)) for row in kernels)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("wrong", ["scaled", "nan"])
def test_a_wrong_row_stops_the_report(folder: Path, wrong: str, phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(problem):
        run = pytorch_path(problem)
        hit = problem.seq_len == 1 if phase == "decode" else problem.seq_len > 1
        factor = {"scaled": 1.001, "nan": torch.nan}[wrong]
        return lambda: run() * (factor if hit else 1.0)

    monkeypatch.setattr(bench_rows, "pytorch_path", broken)
    with pytest.raises(NumericsError, match=rf"'rotor compressed, PyTorch path' \({phase}, .*nothing is rep"):
        bench(folder, SMALL, device="cpu")


def test_what_a_backend_refuses_is_a_reason_and_a_defect_of_ours_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(problem, backend=None):
        raise RuntimeError("no such\nkernel")

    monkeypatch.setattr(bench_rows, "sdpa", refuse)
    report = bench(folder, SMALL, device="cpu")
    reasons = {r["row"]: r["why"] for r in report["not_measured"]}
    assert reasons["SDPA flash"] == "RuntimeError: no such kernel"
    monkeypatch.setattr(bench_rows, "pytorch_path", refuse)
    with pytest.raises(RuntimeError, match="no such"):
        bench(folder, SMALL, device="cpu")


@pytest.mark.parametrize("seq_len", [1, 3 * CHECKED_QUERIES])
@pytest.mark.parametrize("layout", [APART, FAST], ids=["apart", "fast"])
def test_rows_agree_with_the_truth(layout: LayerLayout, seq_len: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for chosen, shape in (
        (layout, SHAPE),
        (rebuilt_layout(layout, SHAPE), SHAPE),
        (uncompressed_layout(SHAPE), without_rope(SHAPE)),
    ):
        kv_len = seq_len if seq_len > 1 else 100
        problem = random_problem(chosen, shape, 3, seq_len, kv_len, torch.float32, generator)
        exact = truth(problem)
        assert exact.shape[:2] == (2, min(seq_len, 2 * CHECKED_QUERIES))  # first and last sequence, both ends
        assert relative_error(checked_output(problem, pytorch_path(problem)()), exact) < 4e-6


def test_floors_count_what_has_to_be_done() -> None:
    for layout in (APART, FAST):
        problem = random_problem(layout, SHAPE, 2, 1, 50, torch.float16, torch.Generator())
        assert problem.work.cache_bytes == problem.key.nbytes + problem.value.nbytes
    # A prompt of three tokens has six pairs of query and key, and where all planes are fast three rebuilt keys.
    work = least_work(APART, SHAPE, 3, 1)
    assert work.flops == 6 * 2 * SHAPE.num_heads * (WIDE.width + NARROW.width)
    width = FAST.key_width
    rebuilding = 3 * 2 * 2 * width * SHAPE.head_dim
    pairs = 6 * 2 * 2 * SHAPE.heads_per_kv * (2 * SHAPE.head_dim + width)
    assert least_work(FAST, SHAPE, 3, 1).flops == pairs + rebuilding


def test_repetitions_are_interleaved() -> None:
    order = []
    calls = {name: lambda name=name: order.append(name) for name in ("a", "b")}
    times = Clock(torch.device("cpu")).interleaved(calls, 2)
    assert order == ["a", "b"] * 3  # a warm-up, then the two that count
    assert times["a"].repetitions == 2
    assert Seconds.of([3.0, 1.0, 2.0]) == Seconds(2.0, 1.5, 2.5, 3)
    assert Seconds.of([1.0]) == Seconds(1.0, 1.0, 1.0, 1)


def test_layers_are_spread_over_the_depth() -> None:
    assert spread_layers(32, 4) == [0, 10, 21, 31]
    assert spread_layers(2, 4) == [0, 1]
    assert spread_layers(5, 1) == [0]


def test_command_line_writes_numbers_and_measured_rates(folder: Path, tmp_path: Path) -> None:
    out, rates = tmp_path / "bench.json", tmp_path / "devices.yaml"
    rates.write_text(
        "other: {bandwidth_bytes_per_s: 1.0, matmul_flops_per_s: 2.0, memory_bytes: 3.0, source: data-sheet}\n"
    )
    call = ["bench", str(folder), "--device", "cpu", "--lengths", "24,2048", "--prefill", "16", "--batch", "1"]
    call += ["--layers", "1", "--repetitions", "1", "--new-tokens", "2", "--memory-gb", "1", "-q"]
    done = CliRunner().invoke(app, [*call, "--json", "-o", str(out), "--device-file", str(rates)])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert json.loads(out.read_text()) == report
    assert [(r["row"], r["length"]) for r in report["model"]] == [
        (f"model, {name}", length) for length in (16, 24) for name in ("compressed", "source")
    ]
    compressed, source = report["model"][2:]
    # The last of the new tokens is never fed back. float32 on a CPU.
    assert source["kv_cache_bytes"] == 26 * 2560 * 2
    assert compressed["kv_cache_bytes"] < source["kv_cache_bytes"]
    assert compressed["largest_batch"] > source["largest_batch"] > 0
    assert source["largest_batch"] == int((1e9 - source["weight_bytes"]) / source["kv_cache_bytes"])
    assert source["peak_bytes"] is None
    assert {"row": "model", "length": 2048} in [
        {key: r[key] for key in ("row", "length") if key in r} for r in report["not_measured"]
    ]
    (name,) = [key for key in _names(rates) if key != "other"]
    device = find_device(name, str(rates))
    assert device.source == "measured"
    assert device.bandwidth_bytes_per_s == report["rates"]["copy_bytes_per_s"]
    assert device.matmul_flops_per_s == report["rates"]["bfloat16_flops_per_s"]
    assert find_device("other", str(rates)).memory_bytes == 3.0

    text = CliRunner().invoke(app, call[:-1]).output  # without -q
    assert "measured in this run" in text
    assert "not measured: rotor compressed, kernel, phase decode" in text


def test_a_model_that_differs_from_itself_in_float64_stops_the_report(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("rotor.bench.models")
    real = module.load_model

    def noisy(path, device, dtype):
        model = real(path, device, dtype)
        with torch.no_grad():
            model.model.norm.weight.mul_(1.01)
        return model

    monkeypatch.setattr(module, "load_model", noisy)
    settings = BenchSettings((48,), (24,), (1,), layers=1, repetitions=1, new_tokens=2)
    with pytest.raises(NumericsError, match=r"row model, compressed.*nothing is"):
        bench(folder, settings, device="cpu")


def test_a_file_that_is_no_device_file_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "notes.yaml"
    file.write_text("a: [1, 2]\n")
    report = {
        "rates": {"copy_bytes_per_s": 1.0, "bfloat16_flops_per_s": 1.0},
        "device": {"name": "A", "memory_bytes": 1},
    }
    with pytest.raises(RecipeError, match="device file"):
        add_device(file, "a", report)
    assert file.read_text() == "a: [1, 2]\n"


@pytest.mark.parametrize("option", ["--lengths", "--prefill", "--batch"])
def test_numbers_that_are_none(folder: Path, option: str) -> None:
    done = CliRunner().invoke(app, ["bench", str(folder), option, "1,0"])
    assert isinstance(done.exception, UsageError)
    assert option in done.exception.message


def _names(file: Path) -> list[str]:
    return [line.rstrip(":") for line in file.read_text().splitlines() if line and not line.startswith(" ")]


def test_an_engine_that_is_not_there_and_options_that_it_does_not_take_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "vllm" else found(name, *a))
    for options, text in (
        (["--engine", "vllm"], "vLLM is not installed"),
        (["--engine", "vllm", "--lengths", "64", "--device", "cpu"], "--lengths, --device: not with --engine vllm"),
        (["--engine", "vllm", "--layers", "2"], "--layers: not with --engine vllm"),
        (["--engine", "vllm", "--cache", "gear-2"], "--cache: not with --engine vllm"),
        (["--engine", "vllm", "--new-tokens", "0"], "at least 2 new tokens"),
        (["--engine", "other"], "expected transformers or vllm"),
    ):
        with pytest.raises(UsageError, match=text):
            CliRunner().invoke(app, ["bench", str(folder), *options], catch_exceptions=False)
