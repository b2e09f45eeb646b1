"""`python artifacts/gpu count`: the layouts that have names, and what a decode step of them issues."""

from __future__ import annotations

import json

import pytest
from support.quick import mostly_nightly

pytest.importorskip("triton", reason="triton is not installed")

from gpu import arguments, count
from gpu.count import count_layers
from gpu.subjects import STEP, named_subjects

from rotor.calibration.prediction.devices import find_device
from rotor.calibration.prediction.instructions import group_instructions
from rotor.checkpoint.layout import KeyForm
from rotor.checkpoint.sizes import kv_bytes_per_token
from rotor.errors import UsageError
from rotor.tools.bench.variants import Variant

DEVICES = {90: find_device("h200"), 80: find_device("a100-80g")}


@pytest.fixture
def decoding_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a layer's kernels those of a decode step; others take long."""
    every = count.layer_variants
    monkeypatch.setattr(count, "layer_variants", lambda *a: [v for v in every(*a) if v.of_step is not None])


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
        "llama3-8b-128x2-blocks128": 0.875,
        "llama3-8b-128x4": 0.875,
        "llama3-8b-128x4-blocks128": 0.875,
        "llama3-8b-256x2": 0.75,
        "qwen3-8b-128x2": 0.875,
        "smollm2-64x3": 0.875,
        "smollm2-128x3": 0.75,
        "gemma3-270m-256x1": 0.875,
        "llama3-8b-apart-64x1": 0.875,
        "llama3-8b-numbers-64x1": 0.5,
    }
    assert found["llama3-8b-128x4"].layout.form == KeyForm(64)
    assert found["llama3-8b-128x4-blocks128"].layout.form == KeyForm(128)
    assert found["llama3-8b-apart-64x1"].layout.form == KeyForm()


@pytest.mark.parametrize(
    ("name", "arch", "goal", "spilled_bytes"),
    mostly_nightly(
        [
            ("llama3-8b-128x2", 90, 11.4, 0),
            ("llama3-8b-64x2", 90, 7.8, 0),
            ("llama3-8b-128x2-blocks128", 90, 10.5, 0),
            ("smollm2-64x3", 90, 9.9, 64),
            ("llama3-8b-numbers-64x1", 80, 7.7, 0),
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
def test_one_that_fails_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch, decoding_alone, capsys) -> None:
    compile_variant, some = Variant.compile, {"llama3-8b-apart-64x1": named_subjects()["llama3-8b-apart-64x1"]}

    def compile_or_fail(variant):
        if variant.name.startswith("absorb"):
            raise RuntimeError("out of\nregisters")
        return compile_variant(variant)

    monkeypatch.setattr(Variant, "compile", compile_or_fail)
    monkeypatch.setattr(arguments, "named_subjects", lambda: some)
    call = ["count", "--named", "--arch", "sm_90"]
    assert arguments.run_command([*call, "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["failed"] == 1
    assert data["predicted_for"] == {"sm_90": "h200"}
    (layer,) = data["layers"]
    assert (layer["layout"], layer["arch"], layer["instructions_per_key"]) == ("llama3-8b-apart-64x1", "sm_90", None)
    assert [k["error"] for k in layer["kernels"]] == ["RuntimeError: out of registers", None, None]
    assert arguments.run_command(call) == 1
    text = capsys.readouterr().out
    assert "3 kernels, 1 failed" in text
    assert "out of registers" in text


def test_requests_that_are_refused(tmp_path) -> None:
    for call in (["count"], ["count", str(tmp_path), "--named"]):
        with pytest.raises(UsageError, match="expected either OUT or --named"):
            arguments.run_command(call)
