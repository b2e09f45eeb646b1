"""Jobs of `python artifacts/gpu`, at sizes that Triton's interpreter runs; its times mean nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gpu import absorbing, arrived, counters, model, tiles, times
from gpu.loads import PROMPT, RAGGED
from gpu.subjects import with_exact
from gpu.summary import markdown, tuned

from rotor.checkpoint.layout import AttentionShape, GroupLayout, LayerLayout
from rotor.checkpoint.rows import CodedRow
from rotor.kernels.dispatch import default_layer
from rotor.tools.bench import tuning
from rotor.tools.bench.precompile import Subject

SHAPE = AttentionShape(1, 4, 1, 32, 64, 32)
LAYOUT = LayerLayout((GroupLayout((0,), CodedRow(n4=23, scaled=True), None),), 16)
LOAD, LONG = "8 x 32K", "1 x 32K"
SMALL = {LOAD: [20] * 2, LONG: [37], RAGGED: [20, 3], PROMPT: [70]}
SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 1024,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Subject("tiny", 1, LAYOUT, default_layer(LAYOUT), SHAPE, torch.float16, 16)
    for module in (times, tiles, model):
        monkeypatch.setattr(module, "gpu_subjects", lambda: {"tiny": subject})
    monkeypatch.setattr(times, "MODELS", {"tiny": SHAPE})
    monkeypatch.setattr(counters, "LOADS", SMALL)
    monkeypatch.setattr("gpu.subjects.gpu_subjects", lambda: {"tiny": subject})
    monkeypatch.setattr(times, "DTYPE", torch.float16)  # the interpreter knows no bfloat16
    monkeypatch.setattr(times, "COPIES", (1, 1))
    monkeypatch.setattr(times, "PAGE", 16)
    monkeypatch.setattr(times, "_on_host", lambda calls: float(len([call() for call in calls[:1]])))


@pytest.mark.nightly
def test_times_of_a_step_and_of_a_prompt() -> None:
    found = [*times.decoding("tiny", LONG, "cpu", SMALL[LONG])]
    assert [record["row"] for record in found] == ["rotor", "rotor, with append", "rotor, absorbed by append"]
    assert found[0]["right"]
    assert [record["cache"] for record in times.decoding("tiny", RAGGED, "cpu", SMALL[RAGGED])] == ["pages of 16"]
    (record,) = times.prompt("tiny", "cpu", 70)
    assert record["right"]
    for bits, row in times.FLASH_ROWS.items():
        (record,) = times.flash("tiny", LONG, bits, "cpu", [70])
        assert record["right"]
        assert record["row"] == row
    assert [record["layout"] for record in times.compile_subject("tiny", [*SMALL], "cpu", SMALL)] == ["tiny"]
    counters.step(LOAD, ["tiny"], "cpu")


@pytest.mark.nightly
def test_times_of_a_layer_with_exact_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = with_exact(times.gpu_subjects()["tiny"])
    monkeypatch.setattr(times, "gpu_subjects", lambda: {"tiny": tiny})
    found = [*times.decoding("tiny", LONG, "cpu", [170])]
    assert [record["row"] for record in found] == ["rotor", "rotor, with append", "rotor, absorbed by append"]
    assert found[0]["right"]
    assert [record["layout"] for record in times.compile_subject("tiny", [LONG, PROMPT], "cpu", SMALL)] == ["tiny"]


@pytest.mark.nightly
def test_tiles_are_compiled_then_timed(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tiles, "COMPILED_KEYS", 20)
    monkeypatch.setattr(tuning, "WARPS_PER_SM", (1, 2))
    monkeypatch.setattr(tuning, "tiles", lambda own, layout: [own, own.__class__(16), own.__class__(16, 2)])
    monkeypatch.setattr(absorbing, "ABSORBING", [absorbing.Absorbing(16, 1), absorbing.Absorbing(32, 2)])
    chosen = [record for index in (0, 1, 3, 9) for record in tiles.compile_launch("tiny", index, "cpu")]
    assert [next(iter({"tile", "absorbing"} & set(record))) for record in chosen] == ["tile", "tile", "absorbing"]
    results = tmp_path / "results.jsonl"
    results.write_text("\n".join(map(json.dumps, chosen)))
    seconds = iter(range(9, 0, -1))
    monkeypatch.setattr(tiles, "cold_seconds", lambda calls, *_: {"median": float(next(seconds))})
    monkeypatch.setattr(tiles, "TUNED", (LONG,))
    records = [{"job": "tune", "task": "", **r} for r in tiles.tune("tiny", str(results), 60, "cpu", SMALL)]
    left_out = [record["left_out"] for record in records if "left_out" in record]
    assert left_out == ["it was not compiled"] * len(left_out)
    assert len(left_out) == 2
    (of,) = tuned(records).values()
    assert (of["own"]["tile"]["keys"], of["own"]["seconds"]["median"]) == (64, 9.0)
    assert of["best"]["seconds"]["median"] < of["own"]["seconds"]["median"]
    assert of["absorbing"]["absorbing"] == {"blocks": 16, "warps": 1, "stages": 1}
    assert "| tiny | 1 x 32K | 64 x 1, 3; 16 | " in markdown(records)


@pytest.mark.nightly
def test_a_model_decodes(monkeypatch) -> None:
    monkeypatch.setenv("ROTOR_ATTENTION", "triton")
    monkeypatch.setattr(model, "STEPS", 1)
    monkeypatch.setattr(model, "DTYPE", torch.float16)  # the interpreter knows no bfloat16
    for name in (model.UNCOMPRESSED, "tiny"):
        made, *found = model.decoding(name, [LOAD], True, "cpu", SIZES, SMALL)
        assert made["row"] == "made"
        assert [record["row"] for record in found] == ["as it is", "CUDA graph"]
        assert found[0]["cache_bytes"] == 40 * (2 * 2 * 32 if name == model.UNCOMPRESSED else 16)
        assert found[1]["finite"]
        assert found[0]["tokens_per_s"] > 0


def test_rows_that_several_programs_append_are_those_of_each_input() -> None:
    """In the interpreter programs come one after the other, so that none reads too early."""
    layout = LayerLayout((GroupLayout((0,), CodedRow(n4=95, scaled=True), None),), 16)
    subject = Subject("wide", 1, layout, default_layer(layout), SHAPE, torch.float16)
    calls = arrived.appends(subject, 2, torch.device("cpu"))[:2]
    (record,) = arrived.compared("wide", calls, 2)
    assert record["different"] == 0
    rows = [call() for call in calls]
    assert rows[0].shape == (1, 1, 2, 48)
    assert not torch.equal(rows[0], rows[1])
