"""`rotor compile`: what it compiles and counts, and what it says of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.quick import mostly_nightly
from typer.testing import CliRunner

from rotor.calibration.prediction.devices import find_device
from rotor.calibration.prediction.instructions import group_instructions
from rotor.checkpoint.layout import KeyForm
from rotor.checkpoint.sizes import kv_bytes_per_token
from rotor.cli.commands import app
from rotor.errors import UsageError
from rotor.search.export.export import export
from rotor.tools.bench import precompile as module
from rotor.tools.bench import subjects
from rotor.tools.bench.precompile import count_layers, parse_archs
from rotor.tools.bench.subjects import STEP, named_subjects

needs_triton = pytest.mark.skipif(not module.triton_installed(), reason="triton is not installed")
DEVICES = {90: find_device("h200"), 80: find_device("a100-80g")}


@pytest.fixture(scope="module")
def folder(demo_run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("compile") / "out"
    export(demo_run("fdc").folder, out, removal_rate=0.2)
    return out


@pytest.fixture
def decoding_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a layer's kernels those of a decode step; others take long."""
    from rotor.tools.bench import variants

    every = variants.layer_variants
    monkeypatch.setattr(variants, "layer_variants", lambda *a, **k: [v for v in every(*a, **k) if v.keys])


def test_named_layouts() -> None:
    """Bytes that each removes of 512 a key and KV head."""
    found = named_subjects()
    removed = {}
    for name, of in found.items():
        whole = 4 * of.shape.num_kv_heads * of.shape.head_dim
        removed[name] = 1 - kv_bytes_per_token([of.layout], 2) / whole
    assert removed == {
        "llama3-8b-64x2": 0.9375,
        "llama3-8b-128x1": 0.875,
        "llama3-8b-128x2": 0.875,
        "llama3-8b-128x2-split": 0.875,
        "llama3-8b-128x4": 0.875,
        "llama3-8b-256x2": 0.75,
        "qwen3-8b-128x2": 0.875,
        "smollm2-64x3": 0.875,
        "smollm2-128x3": 0.75,
        "gemma3-270m-256x1": 0.875,
        "llama3-8b-apart-64x1": 0.875,
        "llama3-8b-numbers-64x1": 0.5,
    }
    assert found["llama3-8b-128x4"].layout.form == KeyForm(64)
    assert found["llama3-8b-apart-64x1"].layout.form == KeyForm()


@needs_triton
@pytest.mark.parametrize(
    ("name", "arch", "goal", "spilled_bytes"),
    mostly_nightly(
        [
            ("llama3-8b-128x2", 90, 15.6, 96),
            ("llama3-8b-64x2", 90, 11.0, 0),
            ("smollm2-64x3", 90, 14.0, 0),
            ("llama3-8b-numbers-64x1", 80, 24.0, 48),
        ],
        lambda case: case[0] == "llama3-8b-128x2",  # whose kernels kernels/test_compile.py compiles too
    ),
)
def test_a_layer_takes_no_more_instructions_than_its_goal(name, arch, goal, spilled_bytes, decoding_alone) -> None:
    """And as many as predictions look up. Tiles that spill less were slower on an H100."""
    (layer,) = count_layers([named_subjects()[name]], [arch])
    assert [kernel.error for kernel in layer.kernels] == [None] * len(layer.kernels)
    assert goal / 3 < layer.instructions_per_key < goal
    assert layer.spilled_bytes <= spilled_bytes
    assert [kernel.name.partition(" ")[0] for kernel in layer.kernels] == ["absorb", "decode", "join"]
    assert all(16 <= kernel.registers <= 255 for kernel in layer.kernels)
    of = named_subjects()[name]
    heads = of.shape.num_kv_heads
    device, keys = DEVICES[arch], STEP.keys * heads
    issued, read = (
        device.issue_seconds(keys * layer.instructions_per_key),
        device.read_seconds(keys * layer.bytes_per_key),
    )
    assert layer.share == pytest.approx(max(issued, read) / device.read_seconds(keys * 4 * of.shape.head_dim))
    if arch == 90:
        looked_up = group_instructions(of.layout, of.layout.groups[0], of.shape)
        assert looked_up / of.layout.group_size == pytest.approx(layer.instructions_per_key, rel=0.15)


@pytest.mark.nightly
@needs_triton
def test_one_that_fails_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch, decoding_alone) -> None:
    from rotor.tools.bench.variants import Variant

    compile_variant, some = Variant.compile, {"llama3-8b-apart-64x1": named_subjects()["llama3-8b-apart-64x1"]}

    def compile_or_fail(variant):
        if variant.name.startswith("absorb"):
            raise RuntimeError("out of\nregisters")
        return compile_variant(variant)

    monkeypatch.setattr(Variant, "compile", compile_or_fail)
    monkeypatch.setattr(subjects, "named_subjects", lambda: some)
    call = ["compile", "--named", "--arch", "sm_90", "-q"]
    done = CliRunner().invoke(app, [*call, "--json"])
    assert done.exit_code == 1, done.output
    data = json.loads(done.stdout)
    assert data["failed"] == 1
    assert data["predicted_for"] == {"sm_90": "h200"}
    (layer,) = data["layers"]
    assert (layer["layout"], layer["arch"], layer["instructions_per_key"]) == ("llama3-8b-apart-64x1", "sm_90", None)
    assert [k["error"] for k in layer["kernels"]] == ["RuntimeError: out of registers", None, None]
    text = CliRunner().invoke(app, call[:-1])  # `-q` says nothing
    assert text.exit_code == 1
    assert "3 kernels, 1 failed" in text.output
    assert "out of registers" in text.output


@pytest.mark.nightly
@needs_triton
def test_a_checkpoint(folder: Path, decoding_alone) -> None:
    done = CliRunner().invoke(app, ["compile", str(folder), "--arch", "sm_90", "--json", "-q"])
    assert done.exit_code == 0, done.output
    layers = json.loads(done.stdout)["layers"]
    assert sum(layer["layers"] for layer in layers) == 5
    assert all(layer["instructions_per_key"] > 1 for layer in layers)


def test_architectures() -> None:
    assert parse_archs("sm_80, sm_90,sm_80") == [80, 90]
    assert parse_archs("sm_120") == [120]
    for wrong in ("", "90", "sm_9x", "sm_90a", "sm_80,,", "sm_12", "sm_75"):
        with pytest.raises(UsageError, match="--arch"):
            parse_archs(wrong)


def test_requests_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for call in (["compile"], ["compile", str(tmp_path), "--named"]):
        with pytest.raises(UsageError, match="expected either OUT or --named"):
            CliRunner().invoke(app, call, catch_exceptions=False)
    monkeypatch.setattr(module, "triton_installed", lambda: False)
    with pytest.raises(UsageError, match="not installed") as caught:
        count_layers(named_subjects().values(), [90])
    assert "PATH/TO/rotor[kernels]" in caught.value.hint
