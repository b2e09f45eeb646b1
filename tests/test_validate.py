"""Damage that validate catches: each kind, to the weights and to the JSON files, named with what and where."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.compare import close
from support.quick import mostly_nightly
from support.runs import SHORT_TEXT, calibrated, reseal
from transformers import AutoModelForCausalLM

from rotor import Progress, RotorError, Validation, export, validate
from rotor.tools.validation.integrity import check_integrity

LAYER = "model.layers.1.self_attn."


@pytest.fixture(scope="module")
def good(tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compressed checkpoint of three shards, keys after RoPE, so that all kinds of tensors are in it."""
    folder = tmp_path_factory.mktemp("validate")
    model = AutoModelForCausalLM.from_pretrained(tiny("llama"))
    model.save_pretrained(folder / "model", max_shard_size="400KB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny("llama") / name, folder / "model" / name)
    run = calibrated(folder / "model", folder / "run", "post", 1)
    export(run.folder, folder / "out", compression=0.4)
    assert len(list((folder / "out").glob("*.safetensors"))) >= 2
    return folder / "out"


@pytest.fixture
def out(good: Path, tmp_path: Path) -> Path:
    return shutil.copytree(good, tmp_path / "out")


def problems(folder: Path) -> dict[str, str]:
    """Failed checks with their details; an error that ends the validation is one, too."""
    result = Validation(folder)
    try:
        check_integrity(result, Progress())
    except RotorError as error:
        return {"error": error.message}
    return {check.name: check.detail for check in result.checks if check.status == "fail"}


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def holder(folder: Path, name: str) -> Path:
    return folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]


def test_a_bit_flipped_in_the_data_of_any_tensor_names_it_and_its_file(out: Path) -> None:
    tried = 0
    for path in shards(out):
        data = path.read_bytes()
        start = 8 + struct.unpack("<Q", data[:8])[0]
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__":
                at = start + (entry["data_offsets"][0] + entry["data_offsets"][1]) // 2
                path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
                found = problems(out)
                assert found["tensor hashes"] == f"{name} in {path.name} differs from its SHA-256"
                assert found["files"] == f"{path.name} differs from its SHA-256"
                tried += 1
        path.write_bytes(data)
    assert tried == len(json.loads((out / "rotor.json").read_text())["tensors"])


@pytest.mark.parametrize("step", [0, 5])
def test_a_bit_flipped_in_the_header_of_any_shard_is_found(step: int, out: Path) -> None:
    """Also where it changes no tensor, as in the file's metadata or in a space."""
    for path in shards(out):
        data = path.read_bytes()
        end = 8 + struct.unpack("<Q", data[:8])[0]
        for at in range(step, end, 151):
            path.write_bytes(data[:at] + bytes([data[at] ^ (1 << step)]) + data[at + 1 :])
            found = problems(out)
            assert path.name in found.get("files", "") + found.get("error", ""), (at, found)
        path.write_bytes(data)


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


O_PROJ = LAYER + "o_proj.weight"


def in_tensors(name: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    return lambda folder: rewrite(holder(folder, name), change)


def swapped(a: str, b: str) -> Callable[[Path], object]:
    def swap(folder: Path) -> None:
        first, second = load_file(holder(folder, a))[a], load_file(holder(folder, b))[b]
        rewrite(holder(folder, a), lambda t: t.update({a: second}))
        rewrite(holder(folder, b), lambda t: t.update({b: first}))

    return swap


drop = in_tensors(O_PROJ, lambda t: t.pop(O_PROJ))
add = in_tensors(O_PROJ, lambda t: t.update({"extra.weight": torch.ones(2)}))
rename = in_tensors(O_PROJ, lambda t: t.update({"other.weight": t.pop(O_PROJ)}))
NORMS = [f"model.layers.{i}.input_layernorm.weight" for i in (0, 1)]
DAMAGES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "dropped": (drop, "tensor names", f"{O_PROJ} is missing"),
    "added": (add, "tensor names", "extra.weight in model-0000"),
    "renamed": (rename, "tensor names", f"{O_PROJ} is missing; other.weight in model-0000"),
    "shape": (
        in_tensors(O_PROJ, lambda t: t.update({O_PROJ: t[O_PROJ].T.contiguous()})),
        "tensor shapes and dtypes",
        f"{O_PROJ} is float32 [",
    ),
    "dtype": (
        in_tensors(O_PROJ, lambda t: t.update({O_PROJ: t[O_PROJ].to(torch.bfloat16)})),
        "tensor shapes and dtypes",
        f"{O_PROJ} is bfloat16 [",
    ),
    "swapped": (swapped(*NORMS), "tensor hashes", f"{NORMS[0]} in model-0000"),
    "swapped bases": (
        swapped(LAYER + "key_basis", LAYER + "query_basis"),
        "tensor hashes",
        LAYER + "key_basis in model-0000",
    ),
    "not finite": (
        in_tensors(O_PROJ, lambda t: t[O_PROJ].view(-1)[3:5].fill_(float("nan"))),
        "tensors finite",
        f"{O_PROJ} has 2 elements that are NaN or Inf",
    ),
    "stray shard": (
        lambda f: save_file({"x": torch.ones(1)}, f / "model-00009-of-00009.safetensors"),
        "files",
        "model-00009-of-00009.safetensors is unexpected",
    ),
    "lost shard": (lambda f: shards(f)[0].unlink(), "error", "missing shard"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_weights(name: str, out: Path) -> None:
    damage, check, text = DAMAGES[name]
    damage(out)
    assert text in problems(out)[check]


@pytest.mark.parametrize(("keys", "served"), [(32, True), (48, False)])
def test_tiles_may_be_edited_within_what_can_be_launched(keys: int, served: bool, out: Path) -> None:
    data = json.loads((out / "kernel_config.json").read_text())
    data["layers"][0]["sm_80"]["keys"] = keys
    (out / "kernel_config.json").write_text(json.dumps(data))
    reseal(out)
    assert ("kernel_config.json" in problems(out).get("layouts agree", "")) != served


@pytest.mark.parametrize(
    ("family", "domain"),
    mostly_nightly(
        [("llama", "pre"), ("gpt2", "none"), ("qwen3", "pre"), ("falcon", "post")], lambda case: case[0] == "qwen3"
    ),
)
def test_one_layer_of_weights_at_a_time_finds_the_same(family: str, domain: str, tiny, tmp_path: Path) -> None:
    run = calibrated(tiny(family), tmp_path / "run", "post" if domain == "none" else domain, 1)
    export(run.folder, tmp_path / "out", compression=0.3)
    whole, streamed = (
        validate(tmp_path / "out", offload=offload, overrides=SHORT_TEXT) for offload in ("never", "always")
    )
    assert not streamed.damaged
    assert close(streamed.summary["accuracy"], whole.summary["accuracy"])
    found = {check.name: check for check in streamed.checks}
    assert found.pop("KV bytes per token").status == "skipped"
    statuses = {check.name: check.status for check in whole.checks if check.name != "KV bytes per token"}
    assert {name: check.status for name, check in found.items()} == statuses
