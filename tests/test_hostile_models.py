"""Files of unknown origin: whatever is in them, the end is success or a clean error, in bounded memory; no code runs.

Every file that rotor reads is mutated, as structure (a value replaced, removed, repeated, nested) and as bytes.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DEMO_MODEL, FAST_EVALUATION
from hypothesis import given
from hypothesis import strategies as st
from mutations import BYTES, CASES, CHANGES, SHARES, both, changed, clean, garbled, mutations
from safetensors.torch import save_file
from worlds import limited

from rotor.calibration.calibrate import calibrate
from rotor.errors import CheckpointError, NumericsError
from rotor.export.export import export
from rotor.models.checkpoint import Checkpoint
from rotor.models.loading import check_fit
from rotor.runtime.families import attention_shape, find_family
from rotor.runtime.projections import read_attention

pytestmark = pytest.mark.usefixtures("bounded_memory")


def test_at_least_ten_thousand_mutations() -> None:
    assert sum(CASES.values()) >= 10_000


def open_checkpoint(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    for file in checkpoint.files:
        assert (folder / file).parent.resolve() == folder.resolve()
    for name in sorted(checkpoint.names):
        checkpoint.shape_of(name)
        checkpoint.tensor(name)


def test_a_pipe_in_a_model_is_not_waited_for(tmp_path: Path) -> None:
    folder = shutil.copytree(DEMO_MODEL, tmp_path / "model")
    for name in ("tokenizer.json", "model.safetensors", "config.json"):
        (folder / name).unlink()
        os.mkfifo(folder / name)
        with limited(60), pytest.raises(CheckpointError, match=f"{name}: is no regular file"):
            Checkpoint(folder)


@pytest.mark.parametrize("share", SHARES)
def test_safetensors_headers(tmp_path: Path, share: float) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(4, 4), "b.weight": torch.ones(8, dtype=torch.bfloat16)}, weights)
    data = weights.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])

    @mutations("header", share)
    @given(st.one_of(CHANGES, BYTES), st.one_of(st.none(), st.none(), st.integers(0, 2**64 - 1)))
    def run(changes: Any, declared: int | None) -> None:
        if changes[0][1] in ("flip", "insert", "cut", "end"):
            weights.write_bytes(garbled(data, changes))
        else:
            text = json.dumps(changed(header, changes)).encode()
            weights.write_bytes(
                struct.pack("<Q", len(text) if declared is None else declared) + text + data[8 + length :]
            )
        clean(lambda: open_checkpoint(tmp_path))

    run()


@pytest.mark.parametrize("share", SHARES)
def test_indexes(tmp_path: Path, share: float) -> None:
    (tmp_path / "in").mkdir()
    for folder in (tmp_path, tmp_path / "in"):
        save_file({"a": torch.ones(2)}, folder / "model.safetensors")
        save_file({"b": torch.ones(2)}, folder / "other.safetensors")
    folder = tmp_path / "in"
    (folder / "config.json").write_text("{}")
    index = {"metadata": {"total_size": 16}, "weight_map": {"a": "model.safetensors", "b": "other.safetensors"}}

    def check(data: bytes) -> None:
        (folder / "model.safetensors.index.json").write_bytes(data)
        clean(lambda: open_checkpoint(folder))

    both("index", index, check, share)


def test_index_entries_cannot_leave_the_folder(tmp_path: Path) -> None:
    (tmp_path / "in" / "sub").mkdir(parents=True)
    for place in (tmp_path, tmp_path / "in" / "sub"):
        save_file({"a": torch.ones(2)}, place / "model.safetensors")
    (tmp_path / "in" / "config.json").write_text("{}")
    for entry in ("../model.safetensors", "/abs/model.safetensors", "sub/model.safetensors", "..", ".", ""):
        (tmp_path / "in" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": entry}}))
        with pytest.raises(CheckpointError, match=r"a is in .*expected a file name in this folder"):
            Checkpoint(tmp_path / "in")


def read_model(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    family, shape = find_family(checkpoint.config), attention_shape(checkpoint.config)
    for layer in range(min(shape.num_layers, 2)):
        read_attention(family, layer, checkpoint.names, checkpoint.tensor, shape)
    check_fit(checkpoint)


@pytest.mark.parametrize("share", SHARES)
def test_configs(tiny, tmp_path: Path, share: float) -> None:
    model = shutil.copytree(tiny("llama"), tmp_path / "model")

    def check(data: bytes) -> None:
        (model / "config.json").write_bytes(data)
        clean(lambda: read_model(model))

    both("config", json.loads((model / "config.json").read_text()), check, share)


def test_no_pickle_is_loaded_and_no_code_of_the_model_runs(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shutil.copytree(tiny("llama"), tmp_path / "model")
    program = f"open({str(tmp_path / 'ran')!r}, 'w').close()\n"
    (model / "modeling_evil.py").write_text(program + "class Evil: pass\n")
    for file in ("config.json", "tokenizer_config.json"):
        data = json.loads((model / file).read_text())
        data["auto_map"] = {
            name: "modeling_evil.Evil" for name in ("AutoConfig", "AutoModelForCausalLM", "AutoModel", "AutoTokenizer")
        }
        data["trust_remote_code"] = True
        (model / file).write_text(json.dumps(data))

    class Bomb:
        def __reduce__(self) -> Any:
            return exec, (program,)

    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "state.pkl"):
        (model / name).write_bytes(pickle.dumps(Bomb()))

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a pickle was loaded")

    monkeypatch.setattr(pickle, "load", refuse)
    monkeypatch.setattr(pickle, "loads", refuse)
    monkeypatch.setattr(torch, "load", refuse)
    small_run = ["tokens.count=512", "tokens.seq_len=64", "ranks.multiple_of=4"]
    run = calibrate(model, tmp_path / "run", "fdc", [*small_run, *FAST_EVALUATION])
    export(run.folder, tmp_path / "out", compression=0.3)
    assert not (tmp_path / "ran").exists()
    assert not [path for path in (tmp_path / "out").iterdir() if path.suffix in (".bin", ".pt", ".pkl")]


def test_a_config_that_asks_for_too_much_is_refused_before_anything_is_allocated(tmp_path: Path, tiny) -> None:
    model = shutil.copytree(tiny("llama"), tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    for change, text in (
        ({"vocab_size": 1 << 24}, "describes a model of"),
        ({"intermediate_size": 65}, r"tensor model.layers.0.mlp.gate_proj.weight has shape \[64, 48\]"),
        ({"num_hidden_layers": 0}, "expected numbers from 1"),
        ({"num_attention_heads": 0}, "expected numbers from 1|cannot read it"),
    ):
        (model / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(CheckpointError, match=text):
            read_model(model)


def test_files_that_are_not_what_their_names_say(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.tensor([1.0, math.nan]).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(NumericsError, match="tensor a has 1 elements"):
        Checkpoint(tmp_path).tensor("a")
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(CheckpointError, match="1073741824 bytes, more than"):
        Checkpoint(tmp_path)
