"""Checkpoints without weights are, loaded, validated, served and materialised, what an export with weights writes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.command_line import expect_error, rotor
from support.paths import ROOT
from support.quick import mostly_nightly
from support.runs import contents
from transformers import AutoModelForCausalLM, LlamaConfig

from rotor import calibrate, export, materialise, validate
from rotor.checkpoint.rewritten import SOURCE
from rotor.checkpoint.section import CompressedSection
from rotor.errors import CheckpointError, MissingError, UsageError
from rotor.models.compressed import CompressedCheckpoint
from rotor.models.loading import weights_of
from rotor.runtime.integration import RotorConfig, RotorQuantizer
from rotor.vllm.layers import Plan

RANDOM = ["tokens.count=512", "tokens.seq_len=64", "tokens.source=random", "codes.tokens=256"]
PRE_REFIT = ["groups.domain=pre", "groups.size=2", "bases.qk=kq", "bases.vo=kq", "bases.refit=true"]
CASES = {
    "llama": ("rotor", []),  # codes, joint latents, blocks; biases, tied embeddings
    "qwen3": ("fdc", ["groups.size=2", "ranks.multiple_of=4"]),  # norms of keys
    "gpt2": ("rotor", []),  # codes folded into a transposed projection
    "opt": ("fdc", ["ranks.multiple_of=4", *PRE_REFIT]),  # biases
    "phi3": ("rotor", ["groups.rope_block=16"]),  # a fused projection
    "mixtral": ("fdc", ["ranks.multiple_of=4"]),  # experts, which transformers joins
    "falcon": ("rotor", ["groups.domain=pre"]),  # one KV head
}
IDS = torch.randint(1, 4096, (2, 12), generator=torch.Generator().manual_seed(3))


def exported(model: Path, folder: Path, recipe: str, settings: list[str]) -> tuple[Path, Path]:
    """Folders with weights and without, of one run, at equal depth."""
    run = calibrate(model, folder / "run", recipe, [*RANDOM, *settings])
    for name in ("whole", "apart"):
        export(run.folder, folder / name / "out", compression=0.4, measure=False, without_weights=name == "apart")
    return folder / "whole" / "out", folder / "apart" / "out"


@pytest.fixture(scope="module")
def both(tiny, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Of the tiny llama, a copy of which is the source."""
    folder = tmp_path_factory.mktemp("both")
    model = shutil.copytree(tiny("llama"), folder / "model")
    return exported(model, folder, *CASES["llama"])


@pytest.mark.parametrize("family", mostly_nightly(CASES, lambda family: family in ("llama", "opt")))
def test_it_is_the_same_model_and_becomes_the_same_folder(family: str, tiny, tmp_path: Path) -> None:
    source = contents(tiny(family))
    whole, apart = exported(tiny(family), tmp_path, *CASES[family])
    expected, model = (AutoModelForCausalLM.from_pretrained(folder) for folder in (whole, apart))
    tensors = expected.state_dict()
    assert list(model.state_dict()) == list(tensors)
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == tensors[name].dtype
        assert torch.equal(tensor, tensors[name]), name
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, expected(IDS).logits)

    place = tmp_path / "again" / "out"
    materialise(apart, place)
    assert contents(place) == contents(whole)
    assert json.loads((place / "manifest.json").read_text()) == json.loads((whole / "manifest.json").read_text())
    assert validate(place, measure=False).damaged is False
    assert contents(tiny(family)) == source


def test_its_folder_holds_no_weights_and_validates(both: tuple[Path, Path]) -> None:
    whole, apart = both
    stored = load_file(apart / "model.safetensors")
    parts = {"encode", "read", "shift", "offset", "dropped"}
    names = {name.split(".", 1)[1] for name in stored}
    sides = {f"{side}.{part}" for side in ("key", "value") for part in parts}
    of_joint_groups = {"key.mean", "value.mean", "code.shift", "code.length", "code.errors"}
    assert sides <= names <= sides | of_joint_groups
    assert all(tensor.dtype == torch.float64 for tensor in stored.values())
    assert not list(apart.glob("*.index.json"))
    result = validate(apart, measure=False)
    assert not result.damaged
    assert {check.name for check in result.checks if check.status == "pass"} >= {"tensor hashes", "source unchanged"}
    assert (apart / "rotor.json").read_bytes() == (whole / "rotor.json").read_bytes()
    assert "no weights" in (apart / "README.md").read_text()


def test_layer_by_layer_and_in_vllm_it_is_the_same(both: tuple[Path, Path]) -> None:
    whole, apart = map(CompressedCheckpoint, both)
    streamed = weights_of(apart, torch.device("cpu"), torch.float32, streamed=True)
    with streamed.loaded(1):
        for name, parameter in streamed.model.model.layers[1].named_parameters():
            assert torch.equal(parameter, whole.tensor(f"model.layers.1.{name}")), name
    section = CompressedSection(**apart.config_dict["quantization_config"])
    plan = Plan(apart.config, section, str(apart.folder), None, torch.float32, 64, 1)
    served = dict(plan.tensors([]))
    assert served.keys() == whole.names
    assert all(torch.equal(tensor, whole.tensor(name)) for name, tensor in served.items())


def test_what_is_saved_of_it_has_weights(both: tuple[Path, Path], tmp_path: Path) -> None:
    whole, apart = both
    AutoModelForCausalLM.from_pretrained(apart, dtype=torch.bfloat16).save_pretrained(tmp_path / "copy")
    assert "source" not in json.loads((tmp_path / "copy" / "config.json").read_text())["quantization_config"]
    copied, expected = (
        AutoModelForCausalLM.from_pretrained(f, dtype=torch.bfloat16) for f in (tmp_path / "copy", whole)
    )
    for name, tensor in expected.state_dict().items():
        assert torch.equal(copied.state_dict()[name], tensor), name


def moved(both: tuple[Path, Path], place: Path) -> tuple[Path, Path]:
    """The folder without weights far from its source, and a copy of that."""
    model = shutil.copytree(CompressedCheckpoint(both[1]).source_folder, place / "elsewhere")
    return shutil.copytree(both[1], place / "far" / "away" / "out"), model


def test_the_source_is_asked_for_where_it_is_not(both, tmp_path: Path, capsys, monkeypatch) -> None:
    apart, model = moved(both, tmp_path)
    with pytest.raises(MissingError, match=r"holds no weights but bases for those of model, which is not at") as error:
        AutoModelForCausalLM.from_pretrained(apart)
    assert SOURCE in error.value.hint
    expect_error(capsys, 2, "holds no weights", "generate", apart, "a")
    code, said, err = rotor(capsys, "generate", apart, "def main(", "--source", model, "--max-new-tokens", "4")
    assert code == 0, err
    assert rotor(capsys, "generate", both[0], "def main(", "--max-new-tokens", "4")[1] == said
    assert rotor(capsys, "validate", apart, "--model", model, "--no-measure")[0] == 0
    assert rotor(capsys, "materialise", apart, "-o", tmp_path / "full", "--source", model)[0] == 0
    assert (tmp_path / "full" / "model.safetensors").read_bytes() == (both[0] / "model.safetensors").read_bytes()
    monkeypatch.setenv(SOURCE, str(model))
    assert AutoModelForCausalLM.from_pretrained(apart).num_parameters() > 0


def test_another_source_is_refused(both: tuple[Path, Path], tmp_path: Path, capsys) -> None:
    apart, model = moved(both, tmp_path)
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    before = contents(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SOURCE, str(model))
        with pytest.raises(CheckpointError, match=r"elsewhere/model.safetensors: is not the .*\(its SHA-256 differs\)"):
            AutoModelForCausalLM.from_pretrained(apart)
    out = tmp_path / "full"
    expect_error(capsys, 1, "its SHA-256 differs", "materialise", apart, "-o", out, "--source", model)
    assert not out.exists()
    assert contents(model) == before
    (model / "model.safetensors").unlink()
    expect_error(capsys, 1, "no such file", "generate", apart, "a", "--source", model)


def test_what_is_damaged_or_needs_nothing_is_refused(both: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has its weights"):
        materialise(both[0], tmp_path / "full")
    apart, model = moved(both, tmp_path)
    stored = load_file(apart / "model.safetensors")
    save_file(stored | {"0.key.encode": stored["0.key.encode"].float()}, apart / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model.safetensors: differs from its SHA-256"):
        materialise(apart, tmp_path / "full", source=model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SOURCE, str(model))
        name = "model.layers.0.self_attn.k_proj.weight"
        with pytest.raises(CheckpointError, match=r"layer 0: key.encode is torch.float32 of .*, expected float64"):
            CompressedCheckpoint(apart).unchecked_tensor(name)
        save_file({"a": torch.zeros(1)}, apart / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"tensor 0.key.encode is missing"):
            CompressedCheckpoint(apart).unchecked_tensor(name)


def test_a_source_that_changes_under_an_equal_time_is_noticed(both: tuple[Path, Path], tmp_path: Path) -> None:
    """Within one process, which computes the SHA-256 of a file once."""
    apart, model = moved(both, tmp_path)
    shard = model / "model.safetensors"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SOURCE, str(model))
        AutoModelForCausalLM.from_pretrained(apart)
        before, stored = shard.stat(), shard.read_bytes()
        shard.write_bytes(stored[:-1] + bytes([stored[-1] ^ 1]))
        os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
        with pytest.raises(CheckpointError, match="its SHA-256 differs"):
            AutoModelForCausalLM.from_pretrained(apart)
        shard.write_bytes(stored + b" ")
        with pytest.raises(CheckpointError, match=rf"{len(stored) + 1} bytes, expected {len(stored)}"):
            AutoModelForCausalLM.from_pretrained(apart)


def test_weights_that_are_not_there_are_not_offloaded_to_disk(both: tuple[Path, Path]) -> None:
    """transformers asks with the device map that it was given, and again with the one that it worked out."""
    for folder, refused in zip(both, (False, True), strict=True):
        section = json.loads((folder / "config.json").read_text())["quantization_config"]
        quantizer = RotorQuantizer(RotorConfig.from_dict(section))
        quantizer.validate_environment(device_map={"": "cpu"})
        with pytest.raises(UsageError, match="this checkpoint has none") if refused else nullcontext() as error:
            quantizer.validate_environment(device_map={"model.embed_tokens": "cpu", "model.layers": "disk"})
        assert not refused or "rotor materialise" in error.value.hint


@pytest.mark.parametrize("name", ["../model.safetensors", "*.safetensors", "model.bin"])
def test_shards_have_plain_names(both: tuple[Path, Path], tmp_path: Path, name: str) -> None:
    apart, _ = moved(both, tmp_path)
    config = json.loads((apart / "config.json").read_text())
    config["quantization_config"]["source"]["shards"] = {name: "0"}
    (apart / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"source.*expected a plain file name, \*.safetensors"):
        AutoModelForCausalLM.from_pretrained(apart)


def test_a_source_on_the_hub_is_fetched_when_asked_at_its_commit(
    both: tuple[Path, Path], tmp_path: Path, monkeypatch
) -> None:
    apart, model = moved(both, tmp_path)
    config = json.loads((apart / "config.json").read_text())
    config["quantization_config"]["source"] |= {"hub_id": "somebody/model", "revision": "0123"}
    (apart / "config.json").write_text(json.dumps(config))
    asked = []

    def fetched(name: str, **arguments: object) -> str:
        asked.append((name, arguments["revision"]))
        return str(model)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched)
    with pytest.raises(MissingError, match="holds no weights") as refused:
        AutoModelForCausalLM.from_pretrained(apart)
    assert "--source somebody/model" in (refused.value.hint or "")
    assert not asked
    monkeypatch.setenv(SOURCE, "somebody/model")
    AutoModelForCausalLM.from_pretrained(apart)
    assert set(asked) == {("somebody/model", "0123")}


LOAD = """
import sys
from contextlib import nullcontext
from pathlib import Path
import torch, rotor
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
print(sum(parameter.sum(dtype=torch.float64).item() for parameter in model.parameters()))
print(next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")).split()[1])
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="reads memory from /proc")
def test_loading_takes_the_memory_of_one_layer_more(tmp_path: Path) -> None:
    """Of 16 layers: what was read of the projections of all would take 0.13 GB, and in float64 0.5 GB."""
    sizes = {"hidden_size": 1024, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 8}
    config = LlamaConfig(**sizes, num_hidden_layers=16, vocab_size=4096, bos_token_id=0, eos_token_id=1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "model", max_shard_size="20MB")
    folders = exported(tmp_path / "model", tmp_path, "fdc", ["ranks.multiple_of=64"])

    def load(folder: Path) -> tuple[str, int]:
        loaded = subprocess.run(
            [sys.executable, "-c", LOAD, str(folder)],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        assert loaded.returncode == 0, loaded.stderr[-3000:]
        total, peak = loaded.stdout.split()
        return total, int(peak) << 10

    (total, peak), (same, apart_peak) = map(load, folders)
    assert same == total
    one_layer = 4 * 1024 * 1024 * 8  # in float64
    assert apart_peak - peak < 3.5 * one_layer
