"""`rotor compile`: what it compiles and counts, what it says of it, and that a launch finds it."""

from __future__ import annotations

import importlib
import json
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from rotor.bench import precompile as module
from rotor.bench.precompile import count_layers, count_specialisation, named_layouts, named_subjects, parse_archs
from rotor.cli.commands import app
from rotor.errors import CheckpointError, UsageError
from rotor.export.export import export
from rotor.format.layout import kv_bytes_per_token
from rotor.prediction.cost import DecodeStep
from rotor.prediction.devices import find_device
from rotor.prediction.instructions import Specialisation, bundled_table, group_instructions

NO_TRITON = not module.triton_installed()
needs_triton = pytest.mark.skipif(NO_TRITON, reason="triton is not installed")
STEP = DecodeStep(32768, 8)
DEVICES = {90: find_device("h200"), 80: find_device("a100-80g")}


@pytest.fixture(scope="module")
def folder(demo_run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("compile") / "out"
    export(demo_run("fdc").folder, out, removal_rate=0.2)
    return out


def subjects(*names: str) -> list[module.Subject]:
    return [subject for subject in named_subjects() if subject.name in names]


@pytest.fixture
def decoding_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a layer's kernels those of a decode step; others take long."""
    specialise = importlib.import_module("rotor.bench.specialise")
    every = specialise.layer_variants

    def counted(*args: Any, **flags: Any) -> list[Any]:
        return [variant for variant in every(*args, **flags) if variant.keys]

    monkeypatch.setattr(specialise, "layer_variants", counted)


def test_named_layouts() -> None:
    """Bytes that each removes of 512 a key and KV head."""
    found = named_layouts()
    removed = {name: 1 - kv_bytes_per_token([layout], 2) / (8 * 512) for name, layout in found.items()}
    assert removed == {
        "joint-64-fast": 0.9375,
        "joint-128-fast": 0.875,
        "joint-128x2-fast": 0.9375,
        "joint-256x4-fast": 0.9375,
        "joint-64": 0.9375,
        "joint-128": 0.875,
        "apart-64": 0.875,
        "numbers-64": 0.5,
    }
    assert found["joint-256x4-fast"].form == (64, 16)
    assert found["apart-64"].form == (None, 0)


@needs_triton
@pytest.mark.parametrize(
    ("name", "arch", "goal"), [("joint-64-fast", 90, 20.0), ("joint-64", 80, 12.0), ("numbers-64", 80, 24.0)]
)
def test_a_layer_takes_no_more_instructions_than_its_goal(name, arch, goal, decoding_alone, tmp_path) -> None:
    (layer,) = count_layers(subjects(name), [arch], DEVICES, STEP, dump=tmp_path)
    assert [kernel.error for kernel in layer.kernels] == [None] * len(layer.kernels)
    assert layer.instructions_per_key is not None
    assert goal / 3 < layer.instructions_per_key < goal
    assert layer.spilled_bytes == 0
    assert sum(layer.by_pipe.values()) == pytest.approx(layer.instructions_per_key, rel=0.01)
    assert layer.by_pipe["tensor"] > 0.4
    kinds = [kernel.name.partition(" ")[0] for kernel in layer.kernels]
    assert kinds == ["absorb", "decode", "join"]
    for kernel in layer.kernels:
        assert 16 <= kernel.registers <= 255
    suffixes = {path.suffix for path in (tmp_path / f"sm_{arch}").iterdir()}
    assert suffixes == {".cubin", ".sass", ".ptx"}
    assert layer.issue_s == pytest.approx(DEVICES[arch].issue_seconds(STEP.keys * 8 * layer.instructions_per_key))
    assert layer.memory_s == DEVICES[arch].read_seconds(STEP.keys * 8 * layer.bytes_per_key)
    base = DEVICES[arch].read_seconds(STEP.keys * 8 * 512)
    assert layer.share == pytest.approx(max(layer.issue_s, layer.memory_s) / base)


@needs_triton
@pytest.mark.parametrize("wanted", [Specialisation("joint", 64, 8), Specialisation("apart", 64, 8)])
def test_the_bundled_table_is_what_is_counted(wanted: Specialisation) -> None:
    """`rotor compile --table rotor/prediction/instructions.json` counts it anew."""
    counted, bundled = count_specialisation(wanted, 90), bundled_table()[wanted]
    assert counted.decode == pytest.approx(bundled.decode, rel=0.05)
    assert counted.absorb == pytest.approx(bundled.absorb, rel=0.05, abs=0.1)


@needs_triton
def test_what_is_looked_up_is_near_what_is_counted(decoding_alone) -> None:
    (subject,) = subjects("joint-64-fast")
    (layer,) = count_layers([subject], [90], DEVICES, STEP)
    looked_up = group_instructions(subject.layout, subject.layout.groups[0], subject.shape)
    assert looked_up == pytest.approx(layer.instructions_per_key, rel=0.15)


@needs_triton
def test_one_that_fails_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch, decoding_alone) -> None:
    ahead = importlib.import_module("rotor.bench.ahead")
    compile_variant = ahead.compile_variant

    def compile_or_fail(variant, capability):
        if variant.name.startswith("absorb"):
            raise RuntimeError("out of\nregisters")
        return compile_variant(variant, capability)

    monkeypatch.setattr(ahead, "compile_variant", compile_or_fail)
    monkeypatch.setattr(module, "named_subjects", lambda: subjects("joint-64"))
    call = ["compile", "--named", "--arch", "sm_90", "-q"]
    monkeypatch.setattr("rotor.bench.precompile.named_subjects", module.named_subjects)
    done = CliRunner().invoke(app, [*call, "--json"])
    assert done.exit_code == 1, done.output
    data = json.loads(done.stdout)
    assert data["failed"] == 1
    assert data["cache"] == module.cache_folder()
    assert (data["predicted_for"], data["instructions_per_cycle"]) == ({"sm_90": "h200"}, {"sm_90": 1.5})
    (layer,) = data["layers"]
    assert (layer["layout"], layer["arch"], layer["instructions_per_key"]) == ("joint-64", "sm_90", None)
    assert [k["error"] for k in layer["kernels"]] == ["RuntimeError: out of registers", None, None]
    text = CliRunner().invoke(app, call[:-1])  # `-q` says nothing
    assert text.exit_code == 1
    assert "3 kernels, 1 failed" in text.output
    assert "out of registers" in text.output
    assert "h200 at 1.5 instructions a cycle and SM" in " ".join(text.output.split())


@needs_triton
def test_a_checkpoint(folder: Path, decoding_alone) -> None:
    done = CliRunner().invoke(app, ["compile", str(folder), "--arch", "sm_90", "--json", "-q", "--batch", "1"])
    assert done.exit_code == 0, done.output
    layers = json.loads(done.stdout)["layers"]
    assert sum(layer["layers"] for layer in layers) == 5
    assert all(layer["instructions_per_key"] > 1 for layer in layers)


class Driver:
    """A GPU that is not there, of compute capability 9.0; each is a device of its own, with nothing compiled yet."""

    numbers = count(1 << 20)

    def __init__(self) -> None:
        self.number = next(self.numbers)

    def get_current_device(self) -> int:
        return self.number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


@needs_triton
@pytest.mark.parametrize("name", ["joint-64-fast", "joint-128x2-fast", "apart-64", "numbers-64"])
def test_a_launch_looks_for_what_was_compiled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher's key for Triton's cache, source and options, is that of a variant."""
    from triton import runtime
    from triton.compiler import make_backend

    from rotor.bench.specialise import decode_variants
    from rotor.kernels import absorb, decode, decoding, join
    from rotor.kernels.parameters import AttentionParameters
    from rotor.kernels.ranges import KeyRanges

    (subject,) = subjects(name)
    layout, shape, dtype = subject.layout, subject.shape, torch.bfloat16
    variants = decode_variants(layout, shape, subject.kernels, dtype, 90, page=64)
    launched = []

    def record(source: Any, target: Any, options: dict[str, Any], **_: Any) -> Any:
        launched.append((source, target, options))
        nothing = SimpleNamespace(function=0, packed_metadata=(), launch_metadata=lambda *args: None)
        nothing.run = lambda *args: None
        return nothing

    for kernel in (absorb.absorb_kernel, decode.decode_kernel, join.join_kernel):
        monkeypatch.setattr(kernel, "compile", record, raising=False)  # put back afterwards
    monkeypatch.setattr("triton.compiler.compile", record)  # a first launch on a device takes it from here
    monkeypatch.setattr(runtime.driver, "_active", Driver())
    constant = torch.zeros(8, 128) if layout.coded else None
    parameters = AttentionParameters(
        layout, shape, 0.1, torch.zeros(layout.group_size * 128, layout.key_width), constant
    )
    layer = decoding.DecodeLayer(parameters, dtype, torch.device("cpu"))
    rotation = torch.zeros(2, 256, 128).unbind(0)
    rotations = decoding.BlockRotations.of(rotation, layout, dtype) if layout.in_blocks else None
    key, value = (
        torch.zeros(4, 64, size, dtype=torch.uint8) if layout.coded else torch.zeros(4, 64, size // 2, dtype=dtype)
        for size in layout.read_bytes(2)
    )
    lengths, block_table = torch.tensor([200]), torch.zeros(1, 4, dtype=torch.int32)
    query = torch.zeros(1, 32, 128, dtype=dtype)
    decoding.decode_attention(
        query, key, value, layer, KeyRanges.of_lengths(lengths), rotations, block_table=block_table
    )
    assert len(launched) == 3
    for source, target, options in launched:
        (variant,) = [v for v in variants if v.source().hash() == source.hash()]
        backend = make_backend(target)
        assert backend.parse_options(variant.options).hash() == backend.parse_options(options).hash()


def test_architectures() -> None:
    assert parse_archs("sm_80, sm_90,sm_80") == [80, 90]
    assert parse_archs("sm_120") == [120]
    for wrong in ("", "90", "sm_9x", "sm_90a", "sm_80,,", "sm_12", "sm_75"):
        with pytest.raises(UsageError, match="--arch"):
            parse_archs(wrong)


def test_without_triton_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "triton_installed", lambda: False)
    with pytest.raises(UsageError, match="not installed") as caught:
        count_layers(named_subjects(), [90], DEVICES, STEP)
    assert "PATH/TO/rotor[kernels]" in caught.value.hint


def test_one_of_a_checkpoint_named_layouts_and_the_table(tmp_path: Path) -> None:
    for call in (["compile"], ["compile", str(tmp_path), "--named"]):
        with pytest.raises(UsageError, match="expected one of OUT, --named and --table"):
            CliRunner().invoke(app, call, catch_exceptions=False)


def test_folders_and_dtypes_that_do_not_fit(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--dtype int8: the kernels have float16, bfloat16, float32"):
        module.subjects_of(folder, "int8")
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    data = json.loads((copy / "kernel_config.json").read_text())
    (copy / "kernel_config.json").write_text(json.dumps(data | {"version": 99}))
    with pytest.raises(CheckpointError, match="version 99"):
        module.subjects_of(copy, "auto")
