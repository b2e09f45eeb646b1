"""`rotor inspect`: numbers from a configuration and headers alone."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.paths import DEMO_MODEL
from support.stopped import Stopping
from typer.testing import CliRunner

from rotor import calibrate, inspect
from rotor.calibration.codes.side import codes_bytes
from rotor.calibration.form import wanted_gradients
from rotor.calibration.information import stored_bytes
from rotor.calibration.prediction.cost import (
    DecodeStep,
    layer_time,
    uncompressed_layer_time,
)
from rotor.calibration.prediction.decode_times import decode_times, uniform_layout
from rotor.calibration.prediction.devices import find_device
from rotor.calibration.run import layer_path
from rotor.checkpoint.bases import bases_bytes
from rotor.checkpoint.layout import AttentionShape, KeyForm, LayerForm
from rotor.cli.commands import app
from rotor.errors import CheckpointError
from rotor.models.outline import ModelOutline
from rotor.models.source import Checkpoint
from rotor.progress import in_time
from rotor.recipe.reading import load_recipe, quick_overrides
from rotor.recipe.requests import ExportRequest
from rotor.search.evaluation.estimate import evaluation_flops
from rotor.search.export.job import ExportJob


def test_the_bundled_model() -> None:
    found = inspect(DEMO_MODEL)
    assert (found.model_type, found.dtype) == ("llama", "bfloat16")
    assert found.kv_bytes_per_token == 2 * 2 * 64 * 5 * 2  # K and V, heads, head_dim, layers, bfloat16
    assert found.kv_cache_bytes == {2048: 2048 * found.kv_bytes_per_token}
    with_weights = sum(t.numel() for t in load_file(DEMO_MODEL / "model.safetensors").values())
    assert found.parameters == with_weights
    assert found.form == "joint, blocks of 64, 2 heads"
    assert not found.calibrate.streamed
    assert sum(found.calibrate.host_bytes.values()) < found.calibrate.available_host_bytes
    assert found.calibrate.product_seconds.keys() >= {"text", "statistics"}


def test_long_blocks_whose_near_keys_are_read_from_codes_are_warned_of(demo_run, tmp_path: Path) -> None:
    rows_alone = ["exact.first=0", "exact.newest=0"]
    assert not inspect(DEMO_MODEL).warning
    assert not inspect(DEMO_MODEL, overrides=[*rows_alone, "groups.rope_block=16"]).warning
    assert "groups.rope_block=16" in inspect(DEMO_MODEL, overrides=rows_alone).warning
    run = demo_run("rotor").folder
    goal = ExportRequest(run, tmp_path / "out", compression=0.8)
    assert ExportJob.check(goal).warnings == ()
    assert "groups.rope_block=16" in ExportJob.check(replace(goal, overrides=rows_alone)).warnings[0]


def test_times_are_those_of_the_given_settings() -> None:
    """The search runs the uncompressed model once and a compressed one at each point; validate takes the report's."""
    recipe = load_recipe("rotor", ["search.resolution=0.02", "evaluation.metric=token_accuracy"])
    outline = ModelOutline.of(Checkpoint(DEMO_MODEL))
    spec = recipe.evaluation
    layers, head = 2 * sum(outline.layers), 2 * max(outline.vocabulary)
    flops = evaluation_flops(outline, recipe)
    assert flops["search"] == (1 + 4) * (layers + head) * spec.search_tokens
    prompts = spec.seq_len * (spec.lookup_prompts + spec.copy_prompts)
    assert 2 * (layers + 1.5 * head) * spec.report_tokens <= flops["report"]
    assert flops["report"] <= 2 * (layers + 1.5 * head) * 2 * spec.report_tokens + 2 * layers * prompts
    found = inspect(DEMO_MODEL, quick=True)
    assert found.validate.product_seconds == {"report": found.export.product_seconds["report"]}
    few, many = (evaluation_flops(outline, load_recipe("rotor", given)) for given in (quick_overrides(recipe), ()))
    assert few["search"] < many["search"] / 4
    assert few["report"] < many["report"] / 2
    shown = CliRunner().invoke(app, ["inspect", str(DEMO_MODEL), "--quick"]).output
    assert re.search(r"\nvalidate +about [^ ]+ (s|min) for the matrix products alone", shown)
    assert "16384 synthetic tokens" in shown


def test_what_one_came_for_is_told_and_layouts_where_they_are_asked_for(tmp_path: Path) -> None:
    """The cache afterwards, the time with --quick, no length that the model has not; other layouts by --layouts."""
    found = inspect(DEMO_MODEL)
    assert list(found.kv_cache_bytes) == [2048]
    before, (least, most) = found.kv_cache_bytes[2048], found.after[2048]
    exact = 132 * found.kv_bytes_per_token
    assert (least - exact, most - exact) == pytest.approx((0.10 * before, 0.19 * before), abs=1)
    # 0.10 and 0.19 of the bytes for each token, and 132 of them exactly beside.
    assert found.smaller_from == [147, 163]
    shown = " ".join(CliRunner().invoke(app, ["inspect", str(DEMO_MODEL)]).output.split())
    assert "smaller from 147 to 163 tokens on" in shown
    assert inspect(DEMO_MODEL, "fdc").after == {}
    quick = inspect(DEMO_MODEL, quick=True)
    for command in ("calibrate", "export"):
        given = sum(getattr(found, command).product_seconds.values())
        assert found.quick_seconds[command] < given / 2
        assert quick.quick_seconds[command] == pytest.approx(
            sum(getattr(quick, command).product_seconds.values()), abs=0.2
        )
    shown = CliRunner().invoke(app, ["inspect", str(DEMO_MODEL)]).output
    assert "KV cache          2,560 bytes per token: 5.24 MB at 2 K" in shown
    assert "at 2 K with its exact tokens, if as much can go as of other models" in " ".join(shown.split())
    assert "with --quick; as it is less than 10 s on an H100" in " ".join(shown.split())
    assert "layout of the cache" not in shown
    assert "layout of the cache" in CliRunner().invoke(app, ["inspect", str(DEMO_MODEL), "--layouts"]).output


def test_a_config_alone_is_enough(tiny, tmp_path: Path) -> None:
    """Names, shapes and bytes of the tensors follow from it."""
    for model in (DEMO_MODEL, tiny("gpt2"), tiny("qwen3")):
        folder = tmp_path / Path(model).name
        folder.mkdir()
        shutil.copy(Path(model) / "config.json", folder)
        alone, whole = inspect(folder / "config.json"), inspect(model)
        assert (alone.shape, alone.form, alone.parameters) == (whole.shape, whole.form, whole.parameters)
        assert alone.weight_bytes == pytest.approx(whole.weight_bytes, rel=0.02)
        assert alone.calibrate.host_bytes == pytest.approx(whole.calibrate.host_bytes, rel=0.1)
    with pytest.raises(CheckpointError, match=r"other\.json: is a file"):
        inspect(shutil.copy(DEMO_MODEL / "config.json", tmp_path / "other.json"))
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    shutil.copy(DEMO_MODEL / "config.json", pickled)
    (pickled / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="a pickle checkpoint"):
        inspect(pickled)


def test_times_are_in_units_that_people_use() -> None:
    assert [in_time(s) for s in (0.04, 9.96, 59, 400, 9000, 663724.4)] == [
        "0.04 s",
        "10 s",
        "59 s",
        "6.7 min",
        "2.5 h",
        "7.7 days",
    ]


def test_the_recipe_and_the_model_decide_the_form(tiny) -> None:
    assert inspect(DEMO_MODEL, "fdc").form == "apart, post-RoPE, 1 head"
    assert inspect(DEMO_MODEL, "rotor", ["groups.domain=pre"]).form.startswith("joint, pre-RoPE, ")
    assert inspect(tiny("gpt2")).form.startswith("joint, no RoPE, ")
    assert inspect(tiny("gpt2"), "rotor", ["groups.joint=false"]).form.startswith("apart, no RoPE, ")


def test_more_tokens_and_wider_groups_need_more() -> None:
    few, many = (inspect(DEMO_MODEL, "rotor", [f"tokens.count={n}"]).calibrate for n in (1024, 1 << 20))
    assert many.disk_bytes > few.disk_bytes
    assert many.kept_disk_bytes == few.kept_disk_bytes
    narrow, wide = (inspect(DEMO_MODEL, "rotor", [f"groups.size={n}"]).calibrate for n in (1, 2))
    assert wide.kept_disk_bytes > narrow.kept_disk_bytes


@pytest.mark.parametrize("joint", ["true", "false"])
def test_the_estimated_bytes_of_a_run_are_those_of_its_files(tiny, tmp_path: Path, joint: str) -> None:
    """Bases, codes and gradients are counted by the code that allocates them; joint latents and separate ones."""
    spec = load_recipe("rotor", ["tokens.count=1024", "codes.tokens=1024", f"groups.joint={joint}"])
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        calibrate(tiny("llama"), out, spec, progress=Stopping("calibrate", 1))
    (gradients,) = out.with_name("run.partial").rglob("gradients-0000.safetensors")
    kept = sum(tensor.nbytes for tensor in load_file(gradients).values())
    run = calibrate(tiny("llama"), out, spec, resume=True)
    form, shape = run.form.layer(0), run.shape
    files = {kind: load_file(layer_path(run.folder, kind, 0)).values() for kind in ("bases", "codes")}
    written = {kind: sum(tensor.nbytes for tensor in tensors) for kind, tensors in files.items()}
    assert written["codes"] == codes_bytes(form, shape)
    stored = sum(stored_bytes(shape, form.group_size, name, 1024) for name in wanted_gradients(form))
    assert kept == pytest.approx(stored, rel=0.05)
    assert written["bases"] == pytest.approx(bases_bytes(form, shape), rel=0.05)


def test_layers_with_a_sliding_window_keep_no_more_than_it(tiny) -> None:
    """Mistral's layers all have one, of Gemma 2's two layers one."""
    for family, layers in (("mistral", 2), ("gemma2", 1)):
        found = inspect(tiny(family))
        per_layer = found.kv_bytes_per_token // 2
        for tokens, size in found.kv_cache_bytes.items():
            assert size == per_layer * (12 * layers + tokens * (2 - layers))


LOAD = DecodeStep(32768, 8)
JOINT = "joint, blocks of 64"


@pytest.mark.parametrize(("heads", "layers", "hidden"), [(32, 32, 4096), (64, 80, 8192)])
def test_decode_times_of_8b_and_70b_shapes(heads: int, layers: int, hidden: int) -> None:
    shape, device = AttentionShape(layers, heads, 8, 128, hidden, rotary_dim=128), find_device("h200")
    found = {(t.candidate, t.scenario): t for t in decode_times(shape, device, LOAD)}
    forms = JOINT, "apart, post-RoPE"
    heads = "1 head", "2 heads", "4 heads", "8 heads"
    assert {key for key, _ in found} == {f"{form}, {size}" for form in forms for size in heads}
    whole = layers * 2 * 8 * 128 * 2
    for (_, scenario), time in found.items():
        removed = {"0.75": 0.75, "0.875": 0.875, "0.94": 0.9375}
        assert time.kv_bytes_per_token == whole * (1 - removed[scenario])
        base = uncompressed_layer_time(shape, device, LOAD).attention_s
        assert time.share == pytest.approx(time.seconds / layers / base)
    one = uniform_layout(shape, LayerForm(KeyForm(64), 2, joint=True), 1 / 8, True)
    time = found[f"{JOINT}, 2 heads", "0.875"]
    predicted = layer_time(one, shape, device, LOAD)
    assert time.seconds == pytest.approx(layers * predicted.attention_s)
    assert time.instructions_per_key == pytest.approx(predicted.instructions / 8 / LOAD.keys)


def test_decode_times_are_shown_as_a_prediction_with_the_recipes_marked(tiny) -> None:
    shown = CliRunner().invoke(app, ["inspect", str(DEMO_MODEL), "--layouts"])
    text = shown.output
    assert shown.exit_code == 0, text
    assert "5 layers, 6 query and 2 KV heads of 64, RoPE" in text
    assert "2,560 bytes per token" in text
    marked = [line for line in text.splitlines() if "* " in line and "│" in line]
    assert len(marked) == 1
    assert "* joint, blocks of 64, 2 heads" in marked[0]
    text = " ".join(text.split())
    assert "Predicted time of attention in a decode step" in text
    assert "1.5 instructions a cycle and SM; arithmetic, not measured" in text
    assert "Below 1: faster than the uncompressed model." in text
    assert "up to 7.15 MB, 6.50 MB before: it grows because bases are stored beside projections" in text
    data = inspect(DEMO_MODEL, "rotor", ["objective.device=l40s"]).to_dict()
    assert (data["objective"]["device"], data["instructions_per_cycle"]) == ("l40s", 1.5)
    assert {t.candidate.partition(",")[0] for t in inspect(tiny("gpt2")).decode_times} == {"joint", "apart"}


def test_layouts_that_no_kernel_attends_to_are_left_out() -> None:
    """Keys before RoPE are expanded in memory."""
    chosen = ["--set", "groups.domain=pre", "--set", "groups.size=1"]
    found = inspect(DEMO_MODEL, "rotor", chosen[1::2])
    unserved = {t.candidate for t in found.decode_times if not t.instructions_per_key}
    assert unserved == {"joint, pre-RoPE, 1 head", "joint, pre-RoPE, 2 heads"}
    text = CliRunner().invoke(app, ["inspect", str(DEMO_MODEL), "--layouts", *chosen]).output
    assert "joint, pre-RoPE, 2 heads" not in text
    assert "* joint, pre-RoPE, 1 head" in text  # the recipe's own
