"""`rotor compile`: what it compiles, what it says of it, and that a launch finds it."""

from __future__ import annotations

import importlib
import json
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from coded import coded_layer
from ragged import layer
from typer.testing import CliRunner

from rotor.bench import precompile as module
from rotor.bench.precompile import kernel_variants, parse_archs, precompile
from rotor.bench.problem import random_problem
from rotor.cli.commands import app
from rotor.errors import CheckpointError, UsageError
from rotor.export.export import export
from rotor.format.columns import Columns
from rotor.format.kernel_config import KernelConfig
from rotor.format.layout import AttentionShape, LayerLayout, kv_bytes_per_token
from rotor.kernels.defaults import default_config
from rotor.models.compressed import CompressedCheckpoint

SHAPE = AttentionShape(num_layers=1, num_heads=6, num_kv_heads=2, head_dim=64, hidden_size=192)
NO_TRITON = not module.triton_installed()
needs_triton = pytest.mark.skipif(NO_TRITON, reason="triton is not installed")


@pytest.fixture(scope="module")
def folder(demo_run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("compile") / "out"
    export(demo_run("fdc").folder, out, removal_rate=0.2)
    return out


@pytest.fixture
def two_kernels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The first specialisations of the folder, a decode kernel and its combination of slices; others take long."""
    variants = kernel_variants(folder, "auto", [1], 90)[:2]
    monkeypatch.setattr(module, "kernel_variants", lambda folder, dtype, batch_sizes, arch: variants)
    return variants


@needs_triton
def test_two_specialisations_for_two_architectures(folder, two_kernels, tmp_path, monkeypatch) -> None:
    from triton import knobs

    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    found = precompile(folder, [80, 90])
    assert [(k.arch, k.name) for k in found] == [(arch, v.name) for arch in ("sm_80", "sm_90") for v in two_kernels]
    for kernel in found:
        assert kernel.error is None
        assert 0 < kernel.registers <= 255
        assert (kernel.spill_bytes, kernel.scalar_loads) == (0, 0)
        assert kernel.shared_bytes > 0
    assert (found[0].batch_size, found[1].batch_size) == (1, None)
    assert found[0].async_copies > 0
    assert found[0].matrix_products > 0
    assert min(found[0].flight_bytes[side] for side in ("key", "value")) > 0
    assert len(list(tmp_path.rglob("*.cubin"))) == 4


@needs_triton
def test_one_that_fails_does_not_hide_the_others(folder, two_kernels, monkeypatch) -> None:
    ahead = importlib.import_module("rotor.kernels.ahead")
    numbers = ahead.Resources(10, 0, 20, 1, 0, 2, {}, {"key": 4096, "value": 4096})

    def compile_or_fail(variant, capability):
        if capability == 80 and variant is two_kernels[0]:
            raise RuntimeError("out of\nregisters")
        return numbers

    monkeypatch.setattr(ahead, "compile_variant", compile_or_fail)
    call = ["compile", str(folder), "--arch", "sm_80,sm_90", "-q"]
    done = CliRunner().invoke(app, [*call, "--json"])
    assert done.exit_code == 1
    data = json.loads(done.stdout)
    assert data["failed"] == 1
    assert data["cache"] == module.cache_folder()
    assert [k["error"] for k in data["kernels"]] == ["RuntimeError: out of registers", None, None, None]
    assert (data["kernels"][0]["registers"], data["kernels"][1]["registers"]) == (None, 10)
    assert data["predicted_for"] == {"sm_80": "a100-80g", "sm_90": "h200"}
    assert data["kernels"][0]["floors"] == []  # of what was not compiled nothing is known
    (decoding,) = data["kernels"][2]["floors"]
    assert (decoding["batch_size"], decoding["past"], decoding["programs_per_sm"]) == (1, 32767, 2)
    assert decoding["flight_bytes"] == 2 * 8192
    served = [layout for layout in CompressedCheckpoint(folder).default_layouts if layout.qk_width == 96]
    assert decoding["launches"] == len(served)
    assert decoding["memory_bytes"] == 32768 * kv_bytes_per_token(served, 2)
    assert decoding["share"] == pytest.approx(decoding["floor_seconds"] / decoding["seconds"])
    assert decoding["limit"] == "waiting"  # 16 KB are less than what arrives in 700 ns on one SM
    text = CliRunner().invoke(app, call[:-1])  # `-q` says nothing
    assert text.exit_code == 1
    assert "3 compiled, 1 failed" in text.output
    assert "out of registers" in text.output
    assert "Predicted, all layers that launch it together (sm_80: a100-80g, sm_90: h200)" in text.output
    other = CliRunner().invoke(
        app, [*call, "--json", "--batch", "1", "--lengths", "100", "--target-device", "h100-sxm"]
    )
    (floor,) = json.loads(other.stdout)["kernels"][3]["floors"]
    assert (floor["batch_size"], floor["past"]) == (1, 99)
    more = CliRunner().invoke(app, [*call, "--json", "--batch", "2"])
    assert json.loads(more.stdout)["kernels"][3]["floors"] == []  # of two sequences another kernel joins the slices


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


def launch_decode(layout: LayerLayout, schedule: str = "stream") -> None:
    from rotor.bench.rows import kernel_decode

    kernel_decode(random_problem(layout, SHAPE, 1, 1, 40, torch.bfloat16, torch.Generator()), schedule)()


def launch_prefill(layout: LayerLayout, seq_len: int = 40) -> None:
    from rotor.bench.rows import kernel_prefill

    kernel_prefill(random_problem(layout, SHAPE, 1, seq_len, seq_len, torch.bfloat16, torch.Generator()))()


def launch_rotation(layout: LayerLayout) -> None:
    from rotor.kernels.projection.rotation import rotate_and_project

    for seq_len in (1, 400):
        query, key = (torch.zeros(1, seq_len, heads, 64, dtype=torch.bfloat16) for heads in (6, 2))
        table = torch.zeros(1, seq_len, 64, dtype=torch.bfloat16)
        basis = torch.zeros(64, layout.qk_width, dtype=torch.bfloat16)
        rotate_and_project(query, key, table, table, layout, 3, basis, basis)


def launch_rotation_with_packing(layout: LayerLayout) -> None:
    from rotor.kernels.projection.coded import rotate_and_pack

    for seq_len in (1, 400):
        query, key = (torch.zeros(1, seq_len, heads, 64, dtype=torch.bfloat16) for heads in (6, 2))
        table = torch.zeros(1, seq_len, 64, dtype=torch.bfloat16)
        value = torch.zeros(1, seq_len, layout.v_width, dtype=torch.bfloat16)
        basis, shift = torch.zeros(64, layout.qk_width, dtype=torch.bfloat16), torch.zeros(layout.qk_width)
        rotate_and_pack(query, key, value, table, table, layout, 3, basis, basis, shift)


def launch_packing(layout: LayerLayout) -> None:
    from rotor.kernels.projection.append import pack_rows
    from rotor.kernels.rows import LayerColumns

    pack_rows(*torch.zeros(2, 1, 1, 5, 80, dtype=torch.bfloat16).unbind(0), LayerColumns.of(layout))


def launch_sums(layout: LayerLayout, softened: bool) -> None:
    from rotor.kernels.parameters import AttentionParameters
    from rotor.kernels.scores.column_sums import Softening, column_sums

    query = torch.zeros(1, 5, 3 * layout.qk_width, dtype=torch.bfloat16)
    key, bias = torch.zeros(1, 1, 5, layout.qk_width, dtype=torch.bfloat16), torch.zeros(1, 1, 5)
    log_sums, mask = torch.zeros(1, 5, 6), torch.ones(1, 1, 5, 5, dtype=torch.bool)
    given = (Softening(bias), None) if softened else (None, log_sums)
    column_sums(query, key, AttentionParameters(layout, 3, 0.1), None, mask if softened else None, given[1], given[0])


def launch_masks(layout: LayerLayout) -> None:
    from rotor.kernels.key_ranges import DecodeKeys, PrefillKeys

    mask = torch.ones(1, 5, 40, dtype=torch.bool)
    PrefillKeys.from_mask(mask)
    DecodeKeys.from_mask(mask[:, 0])


LAUNCHES = {
    "decode none": (launch_decode, "none", 3),  # tiles of keys, decode and combine
    "decode pre": (launch_decode, "pre", 3),
    "decode lpt": (partial(launch_decode, schedule="lpt"), "none", 3),  # tiles of keys, assign and decode
    "masks": (launch_masks, "none", 2),  # of one query and of many
    "prefill none": (partial(launch_prefill, seq_len=170), "none", 2),  # both classes of groups, in full rounds
    "prefill none, pieces": (partial(launch_prefill, seq_len=50), "none", 2),
    "few none": (partial(launch_prefill, seq_len=4), "none", 3),  # a plan, both classes of groups, and their join
    "prefill pre": (partial(launch_prefill, seq_len=60), "pre", 2),
    "few pre": (launch_prefill, "pre", 3),
    "prefill pre, keys rebuilt": (partial(launch_prefill, seq_len=256), "pre", 3),
    "rotation": (launch_rotation, "post", 2),  # one position and many
    "coded: rotation and packing": (launch_rotation_with_packing, "post", 2),
    "coded: packing": (launch_packing, "pre", 1),
    "column sums": (partial(launch_sums, softened=False), "none", 2),  # of both classes of groups
    "column sums, softened": (partial(launch_sums, softened=True), "none", 4),
}


@needs_triton
@pytest.mark.parametrize("name", LAUNCHES)
def test_a_launch_looks_for_what_was_compiled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher's key for Triton's cache, source and options, is that of a variant, for every kernel."""
    from triton import runtime
    from triton.compiler import make_backend

    from rotor.kernels import masks
    from rotor.kernels.decode import combine, longest_first
    from rotor.kernels.decode import kernel as decode
    from rotor.kernels.prefill import few_kernel, rebuild, slices
    from rotor.kernels.prefill import kernel as prefill
    from rotor.kernels.projection import append, coded, rotation
    from rotor.kernels.scores import kernel as scores
    from rotor.kernels.specialise import model_variants

    launch, domain, kernels = LAUNCHES[name]
    layout = layer(domain, 1, (48, 32), (32, 16))  # type: ignore[arg-type]
    if name.startswith("coded"):
        layout = coded_layer(domain, 1, (Columns(n8=16, n4=32), Columns(n4=64)), (Columns(n2=32), Columns(n16=16)))  # type: ignore[arg-type]
    config = KernelConfig("lpt" if "lpt" in name else "stream", default_config([layout], SHAPE).layers)
    softened = "softened" in name if "sums" in name else None
    variants = model_variants(config, [layout], SHAPE, torch.bfloat16, masks=(False, True), softened=softened)
    monkeypatch.setenv("ROTOR_ATTENTION", "triton")
    launched = []

    def record(source: Any, target: Any, options: dict[str, Any], **_: Any) -> Any:
        launched.append((source, target, options))
        nothing = SimpleNamespace(function=0, packed_metadata=(), launch_metadata=lambda *args: None)
        nothing.run = lambda *args: None
        return nothing

    for kernel in (
        decode.decode_kernel,
        combine.combine_kernel,
        longest_first.assign_kernel,
        prefill.prefill_kernel,
        few_kernel.few_kernel,
        rebuild.rebuild_kernel,
        slices.plan_kernel,
        slices.join_kernel,
        masks.mask_kernel,
        masks.prefix_kernel,
        rotation.rotation_kernel,
        coded.rotate_and_pack_kernel,
        append.append_kernel,
        scores.log_sums_kernel,
        scores.column_sums_kernel,
    ):
        monkeypatch.setattr(kernel, "compile", record, raising=False)  # put back afterwards
    monkeypatch.setattr("triton.compiler.compile", record)  # a first launch on a device takes it from here
    monkeypatch.setattr(runtime.driver, "_active", Driver())
    launch(layout)
    assert len(launched) == kernels
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


def test_without_triton_the_error_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "triton_installed", lambda: False)
    with pytest.raises(UsageError, match="not installed") as caught:
        precompile(folder, [90])
    assert "PATH/TO/rotor[kernels]" in caught.value.hint


@needs_triton
def test_folders_and_dtypes_that_do_not_fit(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--dtype int8: the kernels have float16, bfloat16, float32"):
        kernel_variants(folder, "int8", [1], 90)
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    data = json.loads((copy / "kernel_config.json").read_text())
    (copy / "kernel_config.json").write_text(json.dumps(data | {"version": 99}))
    with pytest.raises(CheckpointError, match="version 99"):
        kernel_variants(copy, "auto", [1], 90)
    (copy / "kernel_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"kernel_config\.json"):
        kernel_variants(copy, "auto", [1], 90)
