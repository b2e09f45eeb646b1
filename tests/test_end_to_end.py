"""calibrate, export and validate on the bundled model: the table, the files, the numbers, determinism."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.paths import DEMO_MODEL, ROOT
from support.quick import mostly_nightly
from support.runs import FAST_EVALUATION, SHORT_TEXT, calibrated, contents
from support.stopped import Counting

from rotor import calibrate, export, validate
from rotor.checkpoint.section import MARK
from rotor.cli.checkpoints import _print_run
from rotor.errors import CheckpointError
from rotor.search.table import RankTable


@pytest.mark.parametrize("recipe", mostly_nightly(["fdc", "rotor"], lambda recipe: recipe == "fdc"))
def test_main_job(recipe: str, run_copy, tmp_path: Path, capsys) -> None:
    before = contents(DEMO_MODEL)
    run = run_copy(recipe)
    shares = run.info.get("fisher_top_share", [])
    assert len(shares) == (5 if recipe == "rotor" else 0)
    assert all(0.001 <= share < 1 for share in shares)
    _print_run(run, measurable=True, verbose=True)
    assert ("in the top 0.1 % of tokens: 0." in capsys.readouterr().out) == (recipe == "rotor")
    first = export(run.folder, tmp_path / "out", accuracy=0.95)
    assert first.measured_points >= 2
    report = first.report
    assert report["accuracy"]["search"] >= 0.95
    low, high = report["accuracy"]["interval_95"]
    assert low <= report["accuracy"]["report"] <= high
    assert 0.2 < report["compression"]["stored"] <= report["compression"]["planned"]

    before_again = contents(run.folder / "tables")
    again = export(run.folder, tmp_path / "out-again", accuracy=0.95)
    assert again.measured_points == 0
    assert "measure" not in again.seconds
    assert contents(run.folder / "tables") == before_again
    assert again.report["ranks"] == report["ranks"]

    result = validate(tmp_path / "out")
    assert result.target_met
    assert not result.damaged
    statuses = {check.name: check.status for check in result.checks}
    assert set(statuses.values()) == {"pass"}
    summary = result.summary
    assert summary["same_data_as_export"]
    assert summary["accuracy"]["value"] == pytest.approx(report["accuracy"]["report"], abs=1e-4)
    assert summary["measured_compression"] == pytest.approx(report["compression"]["stored"])
    assert summary["measured_kv_bytes_per_token"] == report["kv_bytes_per_token"]["after"]
    assert report["kv_bytes_per_token"]["before"] == 2 * 5 * 2 * 2 * 64  # bf16, layers, K and V, heads, head_dim
    assert contents(DEMO_MODEL) == before

    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (DEMO_MODEL / name).read_bytes()
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as handle:
        dtypes = {handle.get_slice(name).get_dtype() for name in handle.keys()}  # noqa: SIM118
    assert dtypes == ({"BF16", "F32"} if recipe == "rotor" else {"BF16"})  # constants of codes are float32
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"{report['accuracy']['report']:.4f}" in card
    metadata = ModelCard(card).data
    assert metadata.to_dict().items() >= {"base_model": "demo-model", "library_name": "transformers"}.items()
    values = report["accuracy"]["measurements"]["report"]["values"]
    assert all(f"| {values[name]:.4f}" in card for name in ("token_accuracy", "ppl_ratio", "lookup", "copy"))


def test_the_search_split_alone_chooses_and_the_report_split_is_measured_once(run_copy, tmp_path: Path) -> None:
    run = run_copy("fdc")
    shutil.rmtree(run.folder / "tables", ignore_errors=True)  # of tests before
    chosen = export(run.folder, tmp_path / "a", accuracy=0.9).report
    table = RankTable.latest(run)
    assert table is not None
    assert len(table.points) > 2
    assert [p.stored for p in table.points if p.has("report")] == [chosen["compression"]["stored"]]
    table.points = [
        p.with_fidelity("report", replace(p.fidelity("report"), accuracy=0.5)) if p.has("report") else p
        for p in table.points
    ]
    table.save()
    again = export(run.folder, tmp_path / "b", accuracy=0.9)
    assert again.report["ranks"] == chosen["ranks"]
    assert again.report["accuracy"]["report"] == 0.5
    assert again.measured_points == 0


def test_compression_and_removal_rate_measure_one_point(run_copy, tmp_path: Path) -> None:
    run = run_copy("fdc")
    shutil.rmtree(run.folder / "tables", ignore_errors=True)  # of tests before
    half = export(run.folder, tmp_path / "half", compression=0.5)
    assert half.report["compression"]["stored"] >= 0.5
    assert half.measured_points == 2  # one point, on both splits
    assert half.report["accuracy"]["target"] is None
    same = export(run.folder, tmp_path / "same", removal_rate=half.report["parameter"])
    assert same.measured_points == 0
    assert same.report["ranks"] == half.report["ranks"]


def test_several_folders_of_a_source_measure_it_once(run_copy, tmp_path: Path) -> None:
    run, begun = run_copy("fdc"), Counting()
    for share in (0.5, 0.3):
        export(run.folder, tmp_path / str(share), compression=share, measure=False)
    shared: dict = {}
    together = [validate(tmp_path / "0.5", shared=shared, progress=begun)]
    text = shared["text"][1]
    together.append(validate(tmp_path / "0.3", shared=shared, progress=begun))
    assert shared["text"][1] is text
    assert begun.names.count("measure") == 3  # the source, and each folder
    alone = validate(tmp_path / "0.3")
    assert (together[1].checks, together[1].summary) == (alone.checks, alone.summary)
    assert together[0].summary["accuracy"] != alone.summary["accuracy"]


def test_shards_are_kept_and_a_layer_may_be_spread_over_them(tmp_path: Path, tiny) -> None:
    """Sharded source with odd file names, the tensors of each layer split between two files."""
    source = shutil.copytree(tiny("qwen2"), tmp_path / "sharded")
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    parts = {"weights-a.safetensors": {}, "weights-b.safetensors": {}}
    for i, (name, tensor) in enumerate(sorted(tensors.items())):
        parts[list(parts)[i % 2]][name] = tensor
    for file, part in parts.items():
        save_file(part, source / file, metadata={"format": "pt"})
    weight_map = {name: file for file, part in parts.items() for name in part}
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    run = calibrated(source, tmp_path / "run", "pre", 2)
    export(run.folder, tmp_path / "out", compression=0.4)
    single = calibrated(tiny("qwen2"), tmp_path / "run-single", "pre", 2)
    export(single.folder, tmp_path / "out-single", compression=0.4)
    assert {p.name for p in (tmp_path / "out").glob("*.safetensors")} == set(parts)
    merged = {name: t for file in parts for name, t in load_file(tmp_path / "out" / file).items()}
    expected = load_file(tmp_path / "out-single" / "model.safetensors")
    assert merged.keys() == expected.keys()
    assert all(torch.equal(merged[name], expected[name]) for name in merged)
    assert not validate(tmp_path / "out", measure=False).damaged


LOADS = """
import sys, rotor
from transformers import AutoModelForCausalLM
for folder in sys.argv[1:]:
    for saved in (folder + "-again", folder + "-twice"):
        model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        print(*(len(report[kind]) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")))
        model.save_pretrained(saved)
        folder = saved
"""
LOADS_WITHOUT_ROTOR = """
import sys
from transformers import AutoModelForCausalLM
for folder in sys.argv[1:]:
    try:
        AutoModelForCausalLM.from_pretrained(folder)
    except ValueError as error:
        print(error)
"""


def said_by_a_fresh_process(program: str, folders: list[str], **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", program, *folders], capture_output=True, text=True, env=os.environ | environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.nightly
def test_a_fresh_process_loads_every_tensor_and_only_with_rotor(run_copy, tmp_path: Path, monkeypatch) -> None:
    """Where every shape fits, too: with a removal rate that removes nothing, and where only queries and keys are
    compressed; and what was loaded and saved again. Without rotor the error says what to install.
    """
    plan_for = importlib.import_module("rotor.search.export.search").plan_for

    def keys_alone(*arguments):
        plan = plan_for(*arguments)
        ranks = [[(qk, 64) for qk, _ in layer] for layer in plan.ranks]
        stored = 1 - sum(sum(pair) for layer in ranks for pair in layer) / (128 * sum(map(len, ranks)))
        return dataclasses.replace(plan, ranks=ranks, stored=stored)

    run = calibrated(DEMO_MODEL, tmp_path / "run", "post", 1).folder
    export(run, tmp_path / "out", compression=0.3, measure=False)
    with monkeypatch.context() as patch:
        patch.setattr(importlib.import_module("rotor.search.export.search"), "plan_for", keys_alone)
        export(run, tmp_path / "keys", compression=0.3, measure=False)
    before, after = (load_file(folder / "model.safetensors") for folder in (DEMO_MODEL, tmp_path / "keys"))
    assert all(after[name].shape == tensor.shape for name, tensor in before.items())
    assert {name.rpartition(".")[2] for name in after.keys() - before.keys()} == {"key_basis", "query_basis"}
    export(run, tmp_path / "whole", removal_rate=0.0, measure=False)
    export(run_copy("rotor-16").folder, tmp_path / "rotor-16", compression=0.2)

    folders = [str(tmp_path / name) for name in ("out", "keys")]
    assert said_by_a_fresh_process(LOADS, folders) == ["0 0 0"] * 4
    folders += [f"{folder}-again" for folder in folders] + [str(tmp_path / name) for name in ("whole", "rotor-16")]
    said = said_by_a_fresh_process(LOADS_WITHOUT_ROTOR, folders, ROTOR_AUTOLOAD="0")
    assert [f'`attn_implementation="{MARK}"` is not supported' in line for line in said] == [True] * len(folders), said


def test_validate_elsewhere_says_what_it_could_not_check(run_copy, tmp_path: Path) -> None:
    run = run_copy("fdc")
    export(run.folder, tmp_path / "out", compression=0.5)
    moved = tmp_path / "far" / "away" / "out"
    shutil.copytree(tmp_path / "out", moved)
    result = validate(moved)
    skipped = {c.name for c in result.checks if c.status == "skipped"}
    assert {"source unchanged", "full-rank rewrite", "accuracy target"} <= skipped
    result = validate(moved, model=DEMO_MODEL, run=run.folder)
    assert {c.name for c in result.checks if c.status == "skipped"} == {"accuracy target"}  # no target was set
    with pytest.raises(CheckpointError, match="no such folder"):
        validate(moved, model=tmp_path / "nowhere")


RECIPES = [
    *((recipe, "qwen3") for recipe in ("zack", "zdc", "palu", "rotor-16")),
    *((str(ROOT / f"artifacts/studies/recipes/fdc-{name}.yaml"), "qwen3") for name in ("uniform", "prerope")),
    *((recipe, "gpt2") for recipe in ("zack", "rotor-16")),
]


@pytest.mark.parametrize(
    ("recipe", "family"),
    mostly_nightly(RECIPES, lambda case: case in (("zdc", "qwen3"), ("palu", "qwen3"), ("rotor-16", "gpt2"))),
)
def test_every_recipe_on_models_with_and_without_rope(recipe: str, family: str, tiny, tmp_path: Path) -> None:
    small = ["tokens.count=512", "tokens.seq_len=64", *(["prune.kmeans=32"] if recipe == "zdc" else [])]
    ranks = ["ranks.multiple_of=4", "ranks.probe_tokens=256", "ranks.fisher_tokens=128", *FAST_EVALUATION, *SHORT_TEXT]
    run = calibrate(tiny(family), tmp_path / "run", recipe, [*small, *ranks])
    report = export(run.folder, tmp_path / "out", compression=0.3).report
    assert 0.3 <= report["compression"]["stored"] < 0.6
    result = validate(tmp_path / "out", measure=False)
    assert not result.damaged, [c for c in result.checks if c.status == "fail"]
    # A second export of the same point measures and probes nothing.
    assert "load model" not in export(run.folder, tmp_path / "again", compression=0.3).seconds
