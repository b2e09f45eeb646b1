"""The command line: a failure is two lines and its exit code, nothing is written, sources stay as they were."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import DEMO_MODEL, FAST_EVALUATION, reseal
from safetensors.torch import load_file, save_file
from test_end_to_end import contents

from rotor import cli
from rotor.calibration.run import Run
from rotor.search.table import RankTable

FAST = [item for setting in ["tokens.count=1024", *FAST_EVALUATION] for item in ("--set", setting)]
FAST_EXPORT = [item for setting in FAST_EVALUATION for item in ("--set", setting)]


def rotor(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    """Run a command in this process: (exit code, stdout, stderr)."""
    capsys.readouterr()  # what fixtures printed
    old = sys.argv
    sys.argv = ["rotor", *map(str, arguments)]
    try:
        cli.main()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.argv = old
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return shutil.copytree(DEMO_MODEL, tmp_path / "model")


def expect_error(capsys, code: int, text: str, *arguments: str | Path) -> None:
    got, out, err = rotor(capsys, *arguments)
    assert got == code, err
    assert text in err, err
    assert out == ""
    told = ("memory: ", "text: ")  # before the work begins
    said = [line for line in err.splitlines() if not line.startswith(told)]
    assert len(said) == 2, err
    assert said[0].startswith("error: ")


def not_a_model(folder: Path) -> None:
    (folder / "config.json").unlink()


def broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def truncated(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def index_without_shard(folder: Path) -> None:
    weight_map = {name: "model-00001-of-00002.safetensors" for name in load_file(folder / "model.safetensors")}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def index_outside(folder: Path) -> None:
    weight_map = {name: "../model.safetensors" for name in load_file(folder / "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def unsupported(folder: Path) -> None:
    edit_config(folder, model_type="mamba")


def compressed_already(folder: Path) -> None:
    edit_config(folder, quantization_config={"quant_method": "rotor", "layers": {}})


def quantised(method: str) -> Callable[[Path], None]:
    return lambda folder: edit_config(folder, quantization_config={"quant_method": method, "bits": 4})


def unsupported_and_pickled(folder: Path) -> None:
    unsupported(folder)
    pickled(folder)


def other_sizes(folder: Path) -> None:
    edit_config(folder, num_key_value_heads=3)


def poison(folder: Path, name: str, value: float) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[name][0, 3] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def nan_weight(folder: Path) -> None:
    poison(folder, "model.layers.2.self_attn.k_proj.weight", float("nan"))


def inf_weight(folder: Path) -> None:
    poison(folder, "model.layers.4.mlp.up_proj.weight", float("inf"))


def missing_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.self_attn.v_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("breakage", "code", "text"),
    [
        (not_a_model, 1, "config.json: no such file"),
        (broken_config, 1, "config.json: not readable as JSON"),
        (no_weights, 1, "no model.safetensors and no model.safetensors.index.json"),
        (pickled, 1, "pytorch_model.bin: a pickle checkpoint, which can run code when loaded; rotor refuses it"),
        (truncated, 1, "model.safetensors: truncated or not a safetensors file"),
        (index_without_shard, 1, "model-00001-of-00002.safetensors: missing shard"),
        (index_outside, 1, "is in '../model.safetensors', expected a file name in this folder"),
        (unsupported, 1, "model_type 'mamba' is not supported"),
        (compressed_already, 1, "`rotor export` wrote it: it is compressed already."),
        (quantised("awq"), 1, "already quantised: its weights are integers of AWQ.\n  Give the checkpoint that it was"),
        (quantised("gptq"), 1, "already quantised: its weights are integers of GPTQ.\n  Give the checkpoint that it"),
        (quantised("fp8"), 1, "FineGrainedFP8Config(dequantize=True)), save_pretrained, and give that folder."),
        (quantised("mine"), 1, "already quantised: its weights are quantised (mine)."),
        (unsupported_and_pickled, 1, "model_type 'mamba' is not supported"),
        (other_sizes, 1, "k_weight is [128, 192], config.json implies [192, 192]"),
        (nan_weight, 1, "model.layers.2.self_attn.k_proj.weight has 1 elements that are NaN or Inf"),
        (inf_weight, 1, "model.layers.4.mlp.up_proj.weight has 1 elements that are NaN or Inf"),
        (missing_tensor, 1, "model.layers.1.self_attn.v_proj.weight"),
    ],
)
def test_a_broken_model_is_refused(breakage, code: int, text: str, model: Path, tmp_path: Path, capsys) -> None:
    breakage(model)
    before = contents(model)
    expect_error(capsys, code, text, "calibrate", model, "-o", tmp_path / "run", "--recipe", "fdc", *FAST)
    assert not (tmp_path / "run").exists()
    assert contents(model) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--recipe", "fcd"], 2, "did you mean 'fdc'"),
        (["--set", "tokens.cuont=3"], 2, "did you mean 'count'"),
        (["--set", "groups.size=3"], 2, "groups.size 3 does not divide the model's 2 KV heads"),
        (["--set", "tokens.count=40", "--set", "tokens.seq_len=40"], 1, "fewer than the 128 dimensions"),
        (["--device", "cuda:7"], 2, "cuda:7"),
        (["--device", "abacus"], 2, "abacus"),
        (["--dtype", "int3"], 2, "int3"),
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
        ([], 2, "got no goal"),
        (["--accuracy", "0.9", "--compression", "0.5"], 2, "got --accuracy and --compression"),
        (["--accuracy", "1.2"], 2, "--accuracy: got 1.2, expected a finite number above 0"),
        (["--compression", "1"], 2, "--compression: got 1.0, expected a finite number above 0"),
        (["--removal-rate", "-0.1"], 2, "--removal-rate -0.1"),
        (["--compression", "0.99"], 2, "the most that can be removed is 0.7500"),
        (["--compression", "0.5", "--set", "tokens.count=9"], 2, "Calibrate again with this setting"),
        (["--accuracy", "0.9", "--set", "evaluation.source=text", "--set", f"evaluation.path={empty}"], 1, "no text"),
        (["--accuracy", "0.9", "--set", "evaluation.report_tokens=60000000"], 1, "report split"),
    ):
        expect_error(capsys, code, text, "export", run, "-o", out, *arguments)
    for place in (run, run / "inside", DEMO_MODEL, DEMO_MODEL / "inside", tmp_path):
        expect_error(capsys, 2, str(place), "export", run, "-o", place, "--compression", "0.5", "--overwrite")
    out.mkdir()
    (out / "mine.txt").write_text("keep")
    nothing_says = "is not empty, and nothing in it says that it is a checkpoint folder"
    for flags in ([], ["--overwrite"]):  # what would be refused is not advised
        expect_error(capsys, 2, nothing_says, "export", run, "-o", out, "--compression", "0.5", *flags)
    assert (out / "mine.txt").read_text() == "keep"
    expect_error(
        capsys, 2, "no such folder", "export", tmp_path / "nowhere", "-o", tmp_path / "x", "--compression", ".5"
    )
    assert {p.name for p in tmp_path.iterdir()} == {"run", "out", "empty.txt"}


def test_a_target_out_of_reach_is_exit_code_3(demo_run, tmp_path: Path, capsys) -> None:
    run = shutil.copytree(demo_run("fdc").folder, tmp_path / "run")
    sure = ["--accuracy", "0.9999", "--confidence", "0.95"]  # measures down to the mildest plan
    expect_error(capsys, 3, "at the lower end of its 95 % interval", "export", run, "-o", tmp_path / "a", *sure, "-q")
    table = RankTable.latest(Run.open(run))
    assert table is not None
    table.points = [p.with_fidelity("search", replace(p.fidelity("search"), accuracy=0.91)) for p in table.points]
    table.save()
    expect_error(capsys, 3, "best measured is 0.91", "export", run, "-o", tmp_path / "b", "--accuracy", "0.92", "-q")
    assert not (tmp_path / "b").exists()


def test_a_disk_that_is_too_small_is_noticed_first(demo_run, tmp_path: Path, capsys, monkeypatch) -> None:
    run = shutil.copytree(demo_run("fdc").folder, tmp_path / "run")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(
        importlib.import_module("rotor.search.rank_search"), "Placement", None
    )  # the disk is checked first
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    expect_error(capsys, 1, "0.0 MB free", "export", run, "-o", tmp_path / "out", "--compression", "0.5", "-q")
    assert not (tmp_path / "out").exists()


def test_overwrite_replaces_the_whole_folder(demo_run, tmp_path: Path, capsys) -> None:
    run = shutil.copytree(demo_run("fdc").folder, tmp_path / "run")
    out = tmp_path / "out"
    assert rotor(capsys, "export", run, "-o", out, "--compression", "0.3", "-q")[0] == 0
    (out / "report.html").unlink()
    before = contents(out)
    again = ["export", run, "-o", out, "--compression", "0.5", "--overwrite", "-q"]
    (out / "mine.txt").write_text("keep")
    expect_error(capsys, 2, "holds mine.txt, which rotor did not write", *again)
    (out / "mine.txt").unlink()
    assert rotor(capsys, *again)[0] == 0
    after = contents(out)
    assert after["model.safetensors"] != before["model.safetensors"]
    assert after.keys() - before.keys() == {"report.html"}
    assert {p.name for p in tmp_path.iterdir()} == {"run", "out"}


def test_json_output_of_every_command(model: Path, tmp_path: Path, capsys) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    code, text, _ = rotor(capsys, "calibrate", model, "-o", run, "--recipe", "rotor-16", *FAST, "--json")
    assert code == 0
    calibrated = json.loads(text)
    assert calibrated["tokens"]["count"] == 1024
    assert set(calibrated["stages"]) == {"check model", "tokens", "load model", "capture", "bases", "write"}
    code, text, _ = rotor(capsys, "export", run, "-o", out, "--compression", "0.6", "--json")
    assert code == 0
    exported = json.loads(text)
    assert exported["compression"]["stored"] >= 0.6
    code, text, _ = rotor(capsys, "validate", out, "--json")
    assert code == 0
    validated = json.loads(text)
    assert validated["ok"] is True
    code, text, _ = rotor(capsys, "generate", out, "def main(", "--max-new-tokens", "5", "--json")
    assert code == 0
    generated = json.loads(text)
    assert generated["text"].startswith("def main(")
    assert generated["new_tokens"] == 5
    tokens = generated["kv_cache_bytes"] / (2 * exported["kv_bytes_per_token"]["after"])  # float32 on a CPU
    assert tokens == 4 + len(load_tokenizer()("def main(")["input_ids"])
    code, text, _ = rotor(capsys, "recipes", "--json")
    assert code == 0
    assert {"fdc", "rotor"} <= set(json.loads(text))


def test_a_quiet_generate_prints_its_text_and_the_help_says_so(capsys) -> None:
    code, text, error = rotor(capsys, "generate", DEMO_MODEL, "def main(", "--max-new-tokens", "2", "-q")
    assert (code, error) == (0, "")
    assert text.startswith("def main(")
    assert "Print nothing but errors and the text itself." in " ".join(rotor(capsys, "generate", "--help")[1].split())


def load_tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DEMO_MODEL)


def test_sampling_is_seeded(capsys) -> None:
    sample = ["generate", DEMO_MODEL, "import ", "--temperature", "1.0", "--max-new-tokens", "12"]
    texts = [rotor(capsys, *sample, "--seed", seed)[1] for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]


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
    assert rotor(capsys, "validate", tmp_path / "out")[0] == 1
    expect_error(capsys, 1, "demo-model: not a compressed checkpoint", "validate", DEMO_MODEL)
