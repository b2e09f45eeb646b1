"""Finite in, finite out: a NaN, an Inf or an overflow at any stage is named with its layer and tensor."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.runs import calibrated, reseal
from support.tiny_models import build_tiny

from rotor import Run, calibrate, export
from rotor.calibration.bases import kq
from rotor.calibration.moments import LayerStatistics
from rotor.calibration.run import read_weight_fisher, write_weight_fisher
from rotor.checkpoint.files import file_sha256
from rotor.checkpoint.layout import POST_ROPE, AttentionShape, LayerForm
from rotor.checkpoint.projections import AttentionWeights
from rotor.errors import NumericsError
from rotor.models.compressible import CompressibleModel
from rotor.models.hardware import DevicePlan
from rotor.models.layerwise import LayerwiseModel
from rotor.models.loading import load_model
from rotor.models.source import Checkpoint
from rotor.models.tokens import synthetic_tokens
from rotor.models.weights import Weights
from rotor.search.evaluation.scoring import batch_logits

CPU = torch.device("cpu")


@pytest.fixture
def model(tiny, tmp_path: Path) -> Path:
    return shutil.copytree(tiny("llama"), tmp_path / "model")


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a tiny model; do not write to it."""
    return calibrated(tiny("llama"), tmp_path_factory.mktemp("numerics") / "run", "pre", 2).folder


@pytest.fixture
def run_copy(run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(run, tmp_path / "run")


def edit(path: Path, name: str, value: float, every: bool = False) -> None:
    """Put a value into one element (or all) of a tensor of a safetensors file, keeping its metadata."""
    from safetensors import safe_open

    with safe_open(path, "pt") as handle:
        metadata = handle.metadata()
    tensors = load_file(path)
    tensors[name].view(-1)[slice(None) if every else 5] = value
    save_file(tensors, path, metadata=metadata)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.layers.1.self_attn.v_proj.weight", float("nan")),
        ("model.embed_tokens.weight", float("inf")),
        ("model.norm.weight", -float("inf")),
    ],
)
def test_in_the_weights(name: str, value: float, model: Path, tmp_path: Path) -> None:
    edit(model / "model.safetensors", name, value)
    with pytest.raises(NumericsError, match=rf"model\.safetensors: tensor {name} has 1 elements that are NaN or Inf"):
        calibrate(model, tmp_path / "run", "fdc")
    assert not (tmp_path / "run").exists()


def test_in_activations_during_capture(model: Path, tmp_path: Path) -> None:
    """Finite weights with which layer 0 overflows."""
    edit(model / "model.safetensors", "model.layers.0.mlp.down_proj.weight", 3e38, every=True)
    tokens = ["tokens.count=512", "tokens.seq_len=64"]
    first = r"the first is the output of model\.layers\.0\.mlp\.down_proj"
    with pytest.raises(NumericsError, match=rf"layer 0: its output is not finite; {first}"):
        calibrate(model, tmp_path / "run", "fdc", tokens)
    assert not (tmp_path / "run").exists()


def test_in_text_that_the_model_writes(model: Path) -> None:
    edit(model / "model.safetensors", "model.layers.1.mlp.down_proj.weight", 3e38, every=True)
    network = load_model(model, CPU, torch.float32)
    tokenizer = Checkpoint(model).tokenizer
    with pytest.raises(
        NumericsError, match=r"token 1 of .*; the first is the output of model\.layers\.1\.mlp\.down_proj"
    ):
        synthetic_tokens(Weights(network), 2, 16, network.config, tokenizer, 0)


def test_in_fisher_information(run_copy: Path) -> None:
    opened = Run.open(run_copy)
    information = torch.ones(opened.shape.num_layers, 2, opened.shape.num_kv_heads, dtype=torch.float64)
    bad = information.clone()
    bad[1, 1] = float("nan")
    with pytest.raises(NumericsError, match="the Fisher information of the weights has elements that are NaN or Inf"):
        write_weight_fisher(run_copy, bad)
    write_weight_fisher(run_copy, information)
    edit(run_copy / "fisher.safetensors", "information", float("inf"), every=True)
    with pytest.raises(NumericsError, match=r"fisher\.safetensors: information has elements that are NaN or Inf"):
        read_weight_fisher(run_copy, opened.shape)


@pytest.mark.parametrize(("part", "value"), [("qk.decode", float("nan")), ("vo.singular_values", float("inf"))])
def test_in_bases_on_disk(part: str, value: float, run_copy: Path, tmp_path: Path) -> None:
    path = run_copy / "bases" / "layer-0001.safetensors"
    edit(path, part, value)
    reseal(run_copy)
    with pytest.raises(NumericsError, match=rf"{path.name}: {part} has elements that are NaN or Inf"):
        export(run_copy, tmp_path / "out", compression=0.4)
    assert not (tmp_path / "out").exists()


def test_in_a_factorisation() -> None:
    """Finite moments whose product overflows."""
    from rotor.calibration.bases.layer import layer_bases

    shape = AttentionShape(1, 2, 2, 4, 8)
    huge = torch.full((2, 4, 4), 1e308, dtype=torch.float64)
    statistics = LayerStatistics(shape, 1, {"query": huge, "key_post": huge, "value": huge}, 8)
    weights = AttentionWeights(*(torch.ones(8, 8) for _ in range(4)))
    with pytest.raises(NumericsError, match="layer 3, post-1: "):
        layer_bases(statistics, weights, LayerForm(POST_ROPE, 1), "kq", "kq", where="layer 3, post-1")
    assert torch.isfinite(kq.closed_form(torch.eye(4).double()[None], torch.eye(4).double()[None]).encode).all()


def test_on_the_cast_of_rewritten_weights(tmp_path: Path) -> None:
    """A float16 model whose rotated output projection leaves float16's range; the error names layer and tensor."""
    model = build_tiny("llama", tmp_path / "model", torch.float16)
    run = calibrated(model, tmp_path / "run", "post", 1)
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj.weight"
    tensors[name] = torch.full_like(tensors[name], 65504.0)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    info = json.loads((run.folder / "run.json").read_text())
    info["model"]["shards"] = {"model.safetensors": file_sha256(model / "model.safetensors")}
    (run.folder / "run.json").write_text(json.dumps(info))
    reseal(run.folder)
    text = r"model\.layers\.1\.self_attn\.o_proj\.weight: not finite after the cast to torch\.float16"
    with pytest.raises(NumericsError, match=text):
        export(run.folder, tmp_path / "out", compression=0.4)
    assert not (tmp_path / "out").exists()


def test_on_the_cast_of_a_model_to_the_dtype_of_the_forward_passes(model: Path, tmp_path: Path) -> None:
    edit(model / "model.safetensors", "model.layers.0.mlp.up_proj.weight", 1e6)
    load_model(model, CPU, torch.bfloat16)
    text = r"tensor model\.layers\.0\.mlp\.up_proj\.weight has 1 elements that are NaN or Inf in torch\.float16"
    with pytest.raises(NumericsError, match=text):
        calibrate(model, tmp_path / "run", "fdc", dtype="float16")


def test_on_the_cast_of_compressed_modules_to_the_dtype_of_the_forward_passes(run: Path, tiny, monkeypatch) -> None:
    """Rewritten in float32, computed with in float16."""
    opened = Run.open(run)
    network = CompressibleModel(Checkpoint(tiny("llama")), DevicePlan(CPU, torch.float16))
    read = network.attention_weights
    monkeypatch.setattr(
        network, "attention_weights", lambda i: dataclasses.replace(w := read(i), v_weight=w.v_weight * 10.0 ** (7 * i))
    )
    bases = opened.bases()
    ranks = [[(8, 8)] * 2] * 2
    text = r"tensor model\.layers\.1\.self_attn\.v_proj\.weight has \d+ elements that are NaN or Inf in torch\.float16"
    with pytest.raises(NumericsError, match=text):
        network.compress(bases, ranks)


def test_in_logits(model: Path) -> None:
    edit(model / "model.safetensors", "model.norm.weight", 3e38, every=True)
    network = LayerwiseModel.of(load_model(model, CPU, torch.float32))
    with pytest.raises(NumericsError, match="logits are not finite"):
        batch_logits(network, torch.arange(32).reshape(2, 16))


@pytest.mark.parametrize(("dtype", "hint"), [("float32", "damaged"), ("float16", "--dtype")])
def test_the_hint_fits_the_dtype(dtype: str, hint: str, model: Path) -> None:
    edit(model / "model.safetensors", "model.norm.weight", float("nan"))
    with pytest.raises(NumericsError) as error:
        load_model(model, CPU, getattr(torch, dtype))
    assert hint in error.value.hint
