"""The command line: a failure is two lines and its exit code, nothing is written, sources stay as they were."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.command_line import expect_error, rotor
from support.paths import DEMO_MODEL
from support.runs import FAST_EVALUATION, SMALL_OPTIONS, contents, reseal
from support.stopped import Counting

from rotor import RotorError, Run, export
from rotor.search.plan_evaluator import rank_path
from rotor.search.point import Point
from rotor.search.table import RankTable

FAST = [item for setting in ["tokens.count=1024", *FAST_EVALUATION] for item in ("--set", setting)]
FAST_EXPORT = [item for setting in FAST_EVALUATION for item in ("--set", setting)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return shutil.copytree(DEMO_MODEL, tmp_path / "model")


WEIGHTS = "model.safetensors"


def edit_config(**changes: object) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return edit


def edit_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    return edit


def indexed(file: str) -> Callable[[Path], object]:
    """An index whose tensors are all in this file."""

    def write(folder: Path) -> None:
        weight_map = dict.fromkeys(load_file(folder / WEIGHTS), file)
        (folder / WEIGHTS).unlink()
        (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return write


def pickled(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")


K_PROJ = "model.layers.2.self_attn.k_proj.weight"
V_PROJ = "model.layers.1.self_attn.v_proj.weight"
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json: no such file"),
    "broken config": (lambda f: (f / "config.json").write_text("{"), "config.json: not readable as JSON"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "no model.safetensors and no model.safetensors.index.json"),
    "pickle": (pickled, "pytorch_model.bin: a pickle checkpoint, which can run code when loaded"),
    "truncated": (
        lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:-1000]),
        "model.safetensors: truncated or not a safetensors file",
    ),
    "no shard": (indexed("model-00001-of-00002.safetensors"), "model-00001-of-00002.safetensors: missing shard"),
    "family": (edit_config(model_type="mamba"), "model_type 'mamba' is not supported"),
    "rotor": (
        edit_config(quantization_config={"quant_method": "rotor", "layers": {}}),
        "`rotor export` wrote it: it is compressed already.",
    ),
    "sizes": (edit_config(num_key_value_heads=3), "k_weight is [128, 192], config.json implies [192, 192]"),
    "nan": (
        edit_weights(lambda tensors: tensors[K_PROJ][0, 3].fill_(float("nan"))),
        f"{K_PROJ} has 1 elements that are NaN or Inf",
    ),
    "no tensor": (edit_weights(lambda tensors: tensors.pop(V_PROJ)), V_PROJ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_model_is_refused(name: str, model: Path, tmp_path: Path, capsys) -> None:
    damage, text = BROKEN[name]
    damage(model)
    before = contents(model)
    expect_error(capsys, 1, text, "calibrate", model, "-o", tmp_path / "run", "--recipe", "fdc", *FAST)
    assert not (tmp_path / "run").exists()
    assert contents(model) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--set", "groups.size=3"], 2, "groups.size 3 does not divide the model's 2 KV heads"),
        (["--set", "tokens.count=40", "--set", "tokens.seq_len=40"], 1, "fewer than the 128 dimensions"),
        (["--device", "cuda:7"], 2, "cuda:7"),
        (["--set", "tokens.source=text", "--set", "tokens.path=nowhere.txt"], 2, "nowhere.txt: no such file"),
        (["--set", "codes.bits=[3]"], 2, "codes.bits: got [3], expected"),
    ],
)
def test_a_wrong_request_to_calibrate(arguments: list[str], code: int, text: str, tmp_path: Path, capsys) -> None:
    if "cuda:7" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    expect_error(capsys, code, text, "calibrate", DEMO_MODEL, "-o", tmp_path / "run", *arguments)
    assert not (tmp_path / "run").exists()


def test_wrong_requests_to_export(demo_run, tmp_path: Path, capsys) -> None:
    run = shutil.copytree(demo_run("fdc").folder, tmp_path / "run")
    out = tmp_path / "out"
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    for arguments, code, text in (
        (["--accuracy", "0.9", "--compression", "0.5"], 2, "got --accuracy and --compression"),
        (["--compression", "1"], 2, "--compression: got 1.0, expected a finite number above 0"),
        (["--removal-rate", "-0.1"], 2, "--removal-rate: got -0.1, expected"),
        (["--compression", "0.99"], 2, "the most that can be removed is 0.7500"),
        (["--compression", "0.5", "--set", "tokens.count=9"], 2, "Calibrate again with this setting"),
        (["--accuracy", "0.9", "--set", "evaluation.source=text", "--set", f"evaluation.path={empty}"], 1, "no text"),
        (["--accuracy", "0.9", "--set", "evaluation.report_tokens=60000000"], 1, "report split"),
    ):
        expect_error(capsys, code, text, "export", run, "-o", out, *arguments)
    expect_error(
        capsys, 2, "no such folder", "export", tmp_path / "nowhere", "-o", tmp_path / "x", "--compression", ".5"
    )
    assert {p.name for p in tmp_path.iterdir()} == {"run", "empty.txt"}


def test_a_target_out_of_reach_is_exit_code_3(demo_run, tmp_path: Path, capsys) -> None:
    run = shutil.copytree(demo_run("fdc").folder, tmp_path / "run")
    assert rotor(capsys, "export", run, "-o", tmp_path / "a", "--accuracy", "0.5", "-q")[0] == 0
    table = RankTable.latest(Run.open(run))
    assert table is not None
    plans = rank_path(table.run, table.run.recipe).plans()
    bad = replace(table.points[0].fidelity("search"), accuracy=0.91)
    table.points = [Point.of(plan).with_fidelity("search", bad) for plan in plans]
    table.save()
    expect_error(capsys, 3, "best measured is 0.91", "export", run, "-o", tmp_path / "b", "--accuracy", "0.92", "-q")
    assert not (tmp_path / "b").exists()


def test_a_disk_that_is_too_small_is_noticed_first(demo_run, tmp_path: Path, capsys, monkeypatch) -> None:
    run = shutil.copytree(demo_run("fdc").folder, tmp_path / "run")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    expect_error(capsys, 1, "0.0 MB free", "export", run, "-o", tmp_path / "out", "--compression", "0.5", "-q")
    begun = Counting()
    with pytest.raises(RotorError, match="free"):
        export(run, tmp_path / "out", compression=0.5, progress=begun)
    assert "measure" not in begun.names
    assert not (tmp_path / "out").exists()


def test_json_output_of_every_command(tiny, tmp_path: Path, capsys) -> None:
    model, run, out = tiny("llama"), tmp_path / "run", tmp_path / "out"
    command = ["calibrate", model, "-o", run, "--recipe", "rotor-16", *SMALL_OPTIONS]
    calibrated = json.loads(rotor(capsys, *command, "--json")[1])
    assert calibrated["tokens"]["count"] == 1024
    assert set(calibrated["stages"]) == {"check model", "tokens", "load model", "capture", "bases", "write"}
    exported = json.loads(rotor(capsys, "export", run, "-o", out, "--compression", "0.6", "--json")[1])
    assert exported["compression"]["stored"] >= 0.6
    validated = json.loads(rotor(capsys, "validate", out, "--json")[1])
    assert validated["ok"] is True
    generated = json.loads(rotor(capsys, "generate", out, "def main(", "--max-new-tokens", "5", "--json")[1])
    assert generated["text"].startswith("def main(")
    assert generated["new_tokens"] == 5
    tokens = generated["kv_cache_bytes"] / exported["kv_bytes_per_token"]["after"]
    assert tokens == 4 + generated["prompt_tokens"]
    assert {"fdc", "rotor"} <= set(json.loads(rotor(capsys, "recipes", "--json")[1]))
    for command, key in ((["inspect", model], "shape"), (["report", run], "figures")):
        assert key in json.loads(rotor(capsys, *command, "--json")[1])


def test_sampling_is_seeded(capsys) -> None:
    """And -q leaves the text."""
    sample = ["generate", DEMO_MODEL, "import ", "--temperature", "1.0", "--max-new-tokens", "12", "-q"]
    said = [rotor(capsys, *sample, "--seed", seed) for seed in ("1", "1", "2")]
    assert said[0] == said[1] != said[2]
    assert [(code, text.startswith("import "), error) for code, text, error in said] == [(0, True, "")] * 3


def test_a_run_whose_recipe_is_damaged(demo_run, tmp_path: Path, capsys) -> None:
    run = shutil.copytree(demo_run("fdc").folder, tmp_path / "run")
    (run / "recipe.yaml").write_text("tokens: 3\n")
    expect_error(capsys, 1, "It is damaged", "export", run, "-o", tmp_path / "out", "--compression", "0.7")


def test_validate_exit_codes(demo_run, tmp_path: Path, capsys) -> None:
    run = shutil.copytree(demo_run("fdc").folder, tmp_path / "run")
    assert rotor(capsys, "export", run, "-o", tmp_path / "out", "--compression", "0.7", "-q")[0] == 0
    code, text, _ = rotor(capsys, "validate", tmp_path / "out")
    assert code == 0
    assert "KV bytes per token" in text
    report = json.loads((tmp_path / "out" / "rotor.json").read_text())
    report["accuracy"]["target"] = 0.9999
    (tmp_path / "out" / "rotor.json").write_text(json.dumps(report))
    reseal(tmp_path / "out")
    assert rotor(capsys, "validate", tmp_path / "out")[0] == 3
    weights = tmp_path / "out" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 4
    weights.write_bytes(data)
    assert rotor(capsys, "validate", tmp_path / "out", "--no-measure")[0] == 1
    expect_error(capsys, 1, "demo-model: not a compressed checkpoint", "validate", DEMO_MODEL)
