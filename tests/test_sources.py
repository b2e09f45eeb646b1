"""Weights are read as transformers reads them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.runs import calibrated
from transformers import AutoModelForCausalLM

from rotor import export
from rotor.errors import CheckpointError
from rotor.models.loading import weights_of
from rotor.models.source import Checkpoint

INDEX = "model.safetensors.index.json"
HEAD, NORM = "lm_head.weight", "model.layers.0.input_layernorm.weight"


@pytest.fixture
def sharded(tiny, tmp_path: Path) -> Path:
    """A model with a head of its own, in several shards."""
    folder = tmp_path / "model"
    model = AutoModelForCausalLM.from_pretrained(tiny("qwen2_moe"))
    model.save_pretrained(folder, max_shard_size="1MB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny("qwen2_moe") / name, folder / name)
    return folder


def in_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    data = json.loads((folder / INDEX).read_text())
    change(data["weight_map"])
    (folder / INDEX).write_text(json.dumps(data))


def holder(folder: Path, name: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][name]


def in_shard(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_the_shards_say_what_is_in_them(sharded: Path) -> None:
    """As transformers reads them: all of the shards that the index names; a single file before an index."""
    names = Checkpoint(sharded).names
    in_index(sharded, lambda index: index.pop(NORM))
    assert Checkpoint(sharded).names == names
    save_file({HEAD: torch.zeros(4096, 128)}, sharded / "model.safetensors", metadata={"format": "pt"})
    assert Checkpoint(sharded).names == {HEAD}


def test_a_head_that_is_neither_there_nor_tied(sharded: Path) -> None:
    """transformers would make up a random one, which is the same for both models, so that accuracy would look fine."""
    in_index(sharded, lambda names: names.pop(HEAD))  # its shard, which holds nothing else, is left there
    for streamed in (False, True):
        with pytest.raises(CheckpointError, match=rf"missing.*: {HEAD}"):
            weights_of(Checkpoint(sharded), torch.device("cpu"), torch.float32, streamed)


def test_mixed_dtypes_of_one_layer_are_kept(tiny, tmp_path: Path) -> None:
    """Each projection keeps the dtype of the one that it replaces; what is new takes the value projection's."""
    folder = shutil.copytree(tiny("llama"), tmp_path / "model")
    prefix = "model.layers.0.self_attn."
    kinds = {"q_proj": torch.float32, "k_proj": torch.float16, "v_proj": torch.bfloat16, "o_proj": torch.float32}

    def mix(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            if name.startswith(prefix):
                tensors[name] = tensors[name].to(kinds[name.removeprefix(prefix).partition(".")[0]])

    in_shard(folder / "model.safetensors", mix)
    run = calibrated(folder, tmp_path / "run", "post", 1)
    export(run.folder, tmp_path / "out", compression=0.4)
    written = load_file(tmp_path / "out" / "model.safetensors")
    for projection, dtype in kinds.items():
        assert written[f"{prefix}{projection}.weight"].dtype == dtype
    assert {written[f"{prefix}{name}_basis"].dtype for name in ("key", "query")} == {torch.bfloat16}
    assert written["model.layers.1.self_attn.q_proj.weight"].dtype == torch.float32
