"""`rotor compile`: what it compiles, and what it says of it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.random_layers import groups_of, write_random
from support.tiny_models import build_tiny
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache
from typer.testing import CliRunner

from rotor import export
from rotor.checkpoint.layout import ExactTokens, KeyForm
from rotor.checkpoint.rows import CodedRow
from rotor.cli.commands import app
from rotor.errors import UsageError
from rotor.tools.bench import precompile as module
from rotor.tools.bench.precompile import compile_layers, parse_archs, subjects_of

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


@needs_triton
@pytest.mark.parametrize("exact", [ExactTokens(4, 128), None], ids=["exact tokens", "none"])
def test_what_a_model_launches_is_compiled(
    exact: ExactTokens | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt, and steps of caches that grow, of static ones, and behind padding."""
    from rotor.tools.bench.variants import Variant, layer_variants, recorded

    layouts: Any = groups_of(2, KeyForm(64), (CodedRow(n4=48, scaled=True), None))
    source = build_tiny("llama", tmp_path / "source")
    out = write_random(source, tmp_path / "out", lambda shape: replace(layouts(shape), exact=exact))
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16).eval()
    monkeypatch.setenv("ROTOR_ATTENTION", "triton")
    mask = torch.ones(2, 292, dtype=torch.long)
    mask[0, :5] = 0
    with recorded(90) as launched, torch.no_grad():
        for cache in (DynamicCache(), DynamicCache(), StaticCache(model.config, max_cache_len=400)):
            for start, stop in ((0, 290), (290, 291), (291, 292)):
                given = mask[:, :stop] if launched else None  # the first cache has no padding
                model(torch.ones(2, stop - start).long(), attention_mask=given, past_key_values=cache)

    def described(variant: Variant) -> tuple[str, ...]:  # on a CPU tensors of a file begin anywhere, on a GPU aligned
        return variant.kind, str(variant.source.signature), str(variant.source.constants), str(variant.options)

    subjects = [replace(subject, dtype=torch.bfloat16) for subject in subjects_of(out)]
    compiled = {described(variant) for subject in subjects for variant in layer_variants(subject, 90)}
    used = {described(variant) for variant in launched}
    assert {kind for kind, *_ in used} == {"append", "decode", *(["finish"] if exact else ["join", "expand"])}
    assert used <= compiled


@needs_triton
def test_a_kernel_that_no_gpu_of_an_architecture_launches_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from rotor.tools.bench import variants

    compiled = SimpleNamespace(metadata=SimpleNamespace(shared=120 << 10))
    kernel = SimpleNamespace(name="absorb", warps=4, compile=lambda: compiled)
    monkeypatch.setattr(variants, "layer_variants", lambda *_: [kernel])
    wide, roomy = compile_layers([SimpleNamespace(name="layer", layers=1)], [89, 90])
    assert wide.kernels[0].error == "a program asks for 122,880 bytes of shared memory, sm_89 has 101,376"
    assert roomy.kernels[0].error is None


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
