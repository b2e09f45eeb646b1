"""`rotor compile`: what it compiles, and what it says of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from rotor import export
from rotor.cli.commands import app
from rotor.errors import UsageError
from rotor.tools.bench import precompile as module
from rotor.tools.bench.precompile import compile_layers, parse_archs

needs_triton = pytest.mark.skipif(not module.triton_installed(), reason="triton is not installed")


@pytest.fixture(scope="module")
def folder(demo_run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("compile") / "out"
    export(demo_run("fdc").folder, out, removal_rate=0.2)
    return out


@pytest.mark.nightly
@needs_triton
def test_a_checkpoint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of a decode step; others take long."""
    from rotor.tools.bench import variants

    every = variants.layer_variants
    monkeypatch.setattr(variants, "layer_variants", lambda *a: [v for v in every(*a) if v.of_step is not None])
    done = CliRunner().invoke(app, ["compile", str(folder), "--arch", "sm_90", "--json", "-q"])
    assert done.exit_code == 0, done.output
    layers = json.loads(done.stdout)["layers"]
    assert sum(layer["layers"] for layer in layers) == 5
    kernels = [kernel for layer in layers for kernel in layer["kernels"]]
    assert {kernel["name"].partition(" ")[0] for kernel in kernels} == {"absorb", "decode", "join"}
    assert all(kernel["shared_bytes"] >= 0 and kernel["error"] is None for kernel in kernels)


@pytest.mark.nightly
@needs_triton
def test_one_that_fails_does_not_hide_the_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rotor.tools.bench.variants import Variant

    def compile_or_fail(variant):
        if variant.kind == "absorb":
            raise RuntimeError("out of\nregisters")
        return SimpleNamespace(metadata=SimpleNamespace(shared=4096))

    monkeypatch.setattr(Variant, "compile", compile_or_fail)
    done = CliRunner().invoke(app, ["compile", str(folder), "--arch", "sm_90"])
    assert done.exit_code == 1, done.output
    assert "RuntimeError: out of registers" in done.output
    kernels, failed = map(int, re.findall(r"(\d+) kernels, (\d+) failed", done.output)[0])
    assert 0 < failed < kernels


def test_architectures() -> None:
    assert parse_archs("sm_80, sm_90,sm_80") == [80, 90]
    assert parse_archs("sm_120") == [120]
    for wrong in ("", "90", "sm_9x", "sm_90a", "sm_80,,", "sm_12", "sm_75"):
        with pytest.raises(UsageError, match="--arch"):
            parse_archs(wrong)


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "triton_installed", lambda: False)
    with pytest.raises(UsageError, match="not installed") as caught:
        compile_layers([], [90])
    assert "PATH/TO/rotor[kernels]" in caught.value.hint
