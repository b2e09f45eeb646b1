"""Files of unknown origin: whatever is in them, the end is success or a clean error, in bounded memory; no code runs.

Every file that rotor reads is mutated, as structure (a value replaced, removed, repeated) and as bytes.
"""

from __future__ import annotations

import copy
import json
import math
import os
import pickle
import random
import shutil
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.paths import DEMO_MODEL
from support.runs import FAST_EVALUATION, calibrated, reseal

from rotor import Progress, RotorError, Run, Validation, calibrate, export
from rotor.checkpoint.families import attention_shape, find_family
from rotor.checkpoint.projections import read_attention
from rotor.errors import CheckpointError, NumericsError, RecipeError
from rotor.models.loading import check_fit
from rotor.models.source import Checkpoint
from rotor.recipe.reading import load_recipe, parse_recipe
from rotor.runtime.integration import RotorConfig
from rotor.search.report.collect import collect
from rotor.search.table import RankTable
from rotor.tools.validation.integrity import check_integrity

pytestmark = pytest.mark.usefixtures("bounded_memory")

SMALL_RUN = ["tokens.count=512", "tokens.seq_len=64", "ranks.multiple_of=4"]


@pytest.fixture(params=[50, pytest.param(250, marks=pytest.mark.nightly)], ids=["few", "many"])
def cases(request: pytest.FixtureRequest) -> int:
    """Mutations of each kind of file, the same each time."""
    return request.param


VALUES: list[Any] = [0, 1, -1, 7, 2**31, 2**63, 10**30, 0.5, -1.5, 1e308, math.nan, math.inf]
VALUES += ["", "x", "..", "../model.safetensors", "\0", "\ud800", "F8_E4M3", "y" * 5000, "line\x1b[31m", "post"]
VALUES += [None, True, [], {}, [[]], {"": {}}, [0] * 300, [2**62, 2**62]]


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a JSON value."""
    found = []
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        found.append((value, key))
        if isinstance(value[key], (dict, list)):
            found += places(value[key])
    return found


def changed(value: Any, draw: random.Random) -> Any:
    value = copy.deepcopy(value)
    for _ in range(draw.randint(1, 3)):
        if not (known := places(value)):
            break
        node, key = draw.choice(known)
        kind = draw.choice(["replace", "replace", "remove", "repeat"])
        if kind == "remove":
            del node[key]
        elif kind == "repeat" and isinstance(node, list):
            node.extend([node[key]] * 3)
        else:
            node[key] = copy.deepcopy(draw.choice(VALUES))
    return value


def garbled(data: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(data))
    flipped = data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]
    return draw.choice([flipped, data[:at], data[:at] + b"\0\xff" + data[at:], data[: at // 2] + data[at:]])


def clean(action: Callable[[], Any]) -> None:
    """An action that ends well, or in an error of rotor's, of bounded and printable text."""
    caught: RotorError | None = None
    try:
        action()
    except RotorError as error:
        caught = error
    assert caught is None or (caught.message.isprintable() and 0 < len(str(caught)) < 5000)


def mutate(base: Any, cases: int, check: Callable[[bytes], None]) -> None:
    """Run `check` on mutations of a JSON value: two thirds by structure, one third by bytes."""
    draw, text = random.Random(0), json.dumps(base).encode()
    for _ in range(cases):
        check(garbled(text, draw) if draw.random() < 1 / 3 else json.dumps(changed(base, draw)).encode())


def with_header(data: bytes, header: bytes) -> bytes:
    """A safetensors file with another header."""
    length = struct.unpack("<Q", data[:8])[0]
    return struct.pack("<Q", len(header)) + header + data[8 + length :]


def header_of(data: bytes) -> Any:
    return json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])


def read_tensors(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    for name in sorted(checkpoint.names):
        checkpoint.shape_of(name)
        checkpoint.tensor(name)


def test_safetensors_headers_and_indexes(cases: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights, index = tmp_path / "model.safetensors", tmp_path / "model.safetensors.index.json"
    save_file({"a": torch.ones(4, 4), "b.weight": torch.ones(8, dtype=torch.bfloat16)}, weights)
    data = weights.read_bytes()

    def check(header: bytes) -> None:
        weights.write_bytes(with_header(data, header))
        clean(lambda: read_tensors(tmp_path))

    mutate(header_of(data), cases, check)
    weights.write_bytes(data)

    def check_index(content: bytes) -> None:
        index.write_bytes(content)
        clean(lambda: read_tensors(tmp_path))

    weights.rename(tmp_path / "other.safetensors")
    named = dict.fromkeys(("a", "b.weight"), "other.safetensors")
    mutate({"metadata": {"total_size": 16}, "weight_map": named}, cases, check_index)
    for entry in ("../model.safetensors", "/abs/model.safetensors", "sub/model.safetensors", ".."):
        index.write_text(json.dumps({"weight_map": {"a": entry}}))
        with pytest.raises(CheckpointError, match=r"a is in .*expected a file name in this folder"):
            Checkpoint(tmp_path)


def read_model(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    family, shape = find_family(checkpoint.config), attention_shape(checkpoint.config)
    for layer in range(min(shape.num_layers, 2)):
        read_attention(family, layer, checkpoint.names, checkpoint.tensor, shape)
    check_fit(checkpoint)


def test_configs(cases: int, tiny, tmp_path: Path) -> None:
    model = shutil.copytree(tiny("llama"), tmp_path / "model")
    config = json.loads((model / "config.json").read_text())

    def check(data: bytes) -> None:
        (model / "config.json").write_bytes(data)
        clean(lambda: read_model(model))

    mutate(config, cases, check)
    for change, text in (
        ({"vocab_size": 1 << 24}, "describes a model of"),
        ({"intermediate_size": 65}, r"tensor model.layers.0.mlp.gate_proj.weight has shape \[64, 48\]"),
        ({"num_hidden_layers": 0}, "expected numbers from 1"),
    ):
        (model / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(CheckpointError, match=text):
            read_model(model)


def test_files_that_are_not_what_their_names_say(tmp_path: Path) -> None:
    model = shutil.copytree(DEMO_MODEL, tmp_path / "model")
    for name, text in (("model.safetensors", "no model.safetensors"), ("config.json", "no such file")):
        (model / name).unlink()
        os.mkfifo(model / name)  # which is not waited for
        with pytest.raises(CheckpointError, match=text):
            Checkpoint(model)
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.tensor([1.0, math.nan]).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(NumericsError, match="tensor a has 1 elements"):
        Checkpoint(tmp_path).tensor("a")
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(CheckpointError, match="1073741824 bytes, more than"):
        Checkpoint(tmp_path)


def test_no_pickle_is_loaded_and_no_code_of_the_model_runs(tiny, tmp_path: Path, monkeypatch) -> None:
    model = shutil.copytree(tiny("llama"), tmp_path / "model")
    program = f"open({str(tmp_path / 'ran')!r}, 'w').close()\n"
    (model / "modeling_evil.py").write_text(program + "class Evil: pass\n")
    names = ("AutoConfig", "AutoModelForCausalLM", "AutoModel", "AutoTokenizer")
    for file in ("config.json", "tokenizer_config.json"):
        data = json.loads((model / file).read_text())
        data |= {"auto_map": dict.fromkeys(names, "modeling_evil.Evil"), "trust_remote_code": True}
        (model / file).write_text(json.dumps(data))

    class Bomb:
        def __reduce__(self) -> Any:
            return exec, (program,)

    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "state.pkl"):
        (model / name).write_bytes(pickle.dumps(Bomb()))
    run = calibrate(model, tmp_path / "run", "fdc", [*SMALL_RUN, *FAST_EVALUATION])
    export(run.folder, tmp_path / "out", compression=0.3, measure=False)
    assert not (tmp_path / "ran").exists()
    assert not [path for path in (tmp_path / "out").iterdir() if path.suffix in (".bin", ".pt", ".pkl")]


@pytest.fixture(scope="module")
def made(tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """run and out in one folder."""
    folder = tmp_path_factory.mktemp("hostile")
    run = calibrated(tiny("llama"), folder / "run", "pre", 2)
    export(run.folder, folder / "out", compression=0.4)
    return folder


@pytest.mark.parametrize("file", ["rotor.json", "kernel_config.json", "config.json"])
def test_checkpoint_files(cases: int, made: Path, tmp_path: Path, file: str) -> None:
    out = shutil.copytree(made / "out", tmp_path / "out")
    written = (out / file).read_bytes()
    shape = attention_shape(Checkpoint(out).config)

    def check(data: bytes) -> None:
        (out / file).write_bytes(data)
        result = Validation(out)
        clean(lambda: check_integrity(result, Progress()))
        clean(lambda: collect(out))
        with suppress(ValueError, KeyError, TypeError):
            section = json.loads(data)["quantization_config"]
            clean(lambda: RotorConfig(**section).layouts(shape))

    mutate(json.loads(written), cases, check)


def test_run_files(cases: int, made: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(made / "run", tmp_path / "run")
    run = Run.open(folder)
    latest = RankTable.latest(run)
    assert latest is not None
    table = folder / "tables" / f"{latest.context.key}.json"
    bases = folder / "bases" / "layer-0000.safetensors"
    measured, tensors, info = json.loads(table.read_text()), bases.read_bytes(), (folder / "run.json").read_bytes()

    def check_table(data: bytes) -> None:
        table.write_bytes(data)
        clean(lambda: RankTable.open(run, latest.context).points)

    def check_bases(header: bytes) -> None:
        bases.write_bytes(with_header(tensors, header))
        clean(lambda: run.bases()[0])

    def check_info(data: bytes) -> None:
        (folder / "run.json").write_bytes(data)
        reseal(folder)
        clean(lambda: collect(Run.open(folder).folder))

    mutate(measured, cases, check_table)
    mutate(header_of(tensors), cases, check_bases)
    shutil.rmtree(folder / "tables")
    mutate(json.loads(info), cases, check_info)


def test_recipes(cases: int) -> None:
    base = load_recipe("rotor").to_dict()
    mutate(base, cases, lambda data: clean(lambda: parse_recipe(data.decode("utf-8", "replace"), "x.yaml")))


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]",
        "name: " + "[" * 5000,
        "name: !!python/object/apply:os.system [echo]",
        "name: x\nsummary: y\ntokens: {count: " + "9" * 5000 + "}",
        "name: x\nsummary: " + "y" * (1 << 19),
        "? [1, 2]\n: 3",
        "name: 2001-13-45",
        "",
    ],
)
def test_yaml_that_asks_for_too_much(text: str) -> None:
    with pytest.raises(RecipeError):
        parse_recipe(text, "x.yaml")
