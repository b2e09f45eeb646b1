"""`rotor inspect`: numbers from a configuration and headers alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import DEMO_MODEL
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from rotor.calibration.candidates import candidates_of
from rotor.cli.commands import app
from rotor.errors import CheckpointError, UnsupportedModelError
from rotor.format.layout import AttentionShape, Candidate, kv_bytes_per_token
from rotor.planning.inspection import inspect
from rotor.prediction.cost import DecodeStep, decode_seconds, uncompressed_decode_seconds
from rotor.prediction.decode_times import decode_times, uniform_layout
from rotor.prediction.devices import find_device
from rotor.progress import in_time
from rotor.recipe import load_recipe
from rotor.runtime.families import FAMILIES


def test_the_bundled_model() -> None:
    found = inspect(DEMO_MODEL)
    assert (found.model_type, found.dtype) == ("llama", "bfloat16")
    assert found.kv_bytes_per_token == 2 * 2 * 64 * 5 * 2  # K and V, heads, head_dim, layers, bfloat16
    assert found.kv_cache_bytes[32768] == 32768 * found.kv_bytes_per_token
    with_weights = sum(t.numel() for t in load_file(DEMO_MODEL / "model.safetensors").values())
    assert found.parameters == with_weights
    assert list(found.keys) == ["pre-2"]
    assert not found.calibrate.streamed
    assert found.calibrate.host_bytes < found.available_host_bytes


def test_weights_are_not_read(tmp_path: Path) -> None:
    """NaN weights do not matter, and neither do their pages: the file is cut to a hole after its header."""
    folder = shutil.copytree(DEMO_MODEL, tmp_path / "model")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({name: torch.full_like(t, float("nan")) for name, t in tensors.items()}, path)
    assert inspect(folder).parameters == sum(t.numel() for t in tensors.values())


def test_a_config_alone_is_enough(tiny, tmp_path: Path) -> None:
    """Names, shapes and bytes of the tensors follow from it."""
    for model in (DEMO_MODEL, tiny("gpt2"), tiny("qwen3")):
        folder = tmp_path / Path(model).name
        folder.mkdir()
        shutil.copy(Path(model) / "config.json", folder)
        alone, whole = inspect(folder / "config.json"), inspect(model)
        assert (alone.shape, alone.keys, alone.parameters) == (whole.shape, whole.keys, whole.parameters)
        assert alone.weight_bytes == pytest.approx(whole.weight_bytes, rel=0.02)
        assert alone.calibrate.host_bytes == pytest.approx(whole.calibrate.host_bytes, rel=0.02)
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


def test_the_recipe_and_the_model_decide_what_happens_to_keys(tiny) -> None:
    assert inspect(DEMO_MODEL, "fdc").keys == {
        "post-1": "compressed after RoPE by a product at run time, never rebuilt"
    }
    both = inspect(DEMO_MODEL, "rotor", ["groups.domain=any", "groups.size=any"]).keys
    assert list(both) == ["pre-2", "pre-1", "post-2", "post-1"]
    assert "basis inside W_k, one latent with the values" in both["pre-2"]
    assert "values" not in both["post-2"]
    assert "behind the key norm)" in inspect(tiny("qwen3")).keys["pre-4"]
    without_rope = "no RoPE: basis inside W_q and W_k, no overhead"
    assert inspect(tiny("gpt2")).keys == {"none-4": f"{without_rope}, one latent with the values"}
    assert inspect(tiny("gpt2"), "rotor", ["groups.joint=false"]).keys == {"none-4": without_rope}


def test_more_tokens_and_wider_groups_need_more() -> None:
    few, many = (inspect(DEMO_MODEL, "rotor", [f"tokens.count={n}"]).calibrate for n in (1024, 1 << 20))
    assert many.disk_bytes > few.disk_bytes
    assert many.kept_disk_bytes == few.kept_disk_bytes
    narrow, wide = (inspect(DEMO_MODEL, "rotor", [f"groups.size={n}"]).calibrate for n in (1, 2))
    assert wide.kept_disk_bytes > narrow.kept_disk_bytes


def test_an_unsupported_model_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(DEMO_MODEL, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "bert"}))
    with pytest.raises(UnsupportedModelError, match=r"Supported: .*llama"):
        inspect(folder)


def test_command_line() -> None:
    text = CliRunner().invoke(app, ["inspect", str(DEMO_MODEL)])
    assert text.exit_code == 0, text.output
    assert "5 layers, 6 query and 2 KV heads of 64, RoPE" in text.output
    assert "2,560 bytes per token" in text.output
    data = json.loads(CliRunner().invoke(app, ["inspect", str(DEMO_MODEL), "--json"]).stdout)
    assert data["shape"]["num_layers"] == 5
    assert data["kv_bytes_per_token"] == 2560


def test_layers_with_a_sliding_window_keep_no_more_than_it(tiny) -> None:
    """Mistral's layers all have one, of Gemma 2's two layers one."""
    for family, layers in (("mistral", 2), ("gemma2", 1)):
        found = inspect(tiny(family))
        per_layer = found.kv_bytes_per_token // 2
        assert found.kv_cache_bytes[32768] == per_layer * (12 * layers + 32768 * (2 - layers))


LOAD = DecodeStep(32768, 8)


@pytest.mark.parametrize("heads, layers, hidden", [(32, 32, 4096), (64, 80, 8192)])
def test_decode_times_of_8b_and_70b_shapes(heads: int, layers: int, hidden: int) -> None:
    shape, device = AttentionShape(layers, heads, 8, 128, hidden), find_device("h200")
    found = {(t.candidate, t.scenario): t for t in decode_times(shape, True, False, device, LOAD)}
    sizes = (1, 2, 4, 8)
    assert {key for key, _ in found} == {
        *(f"{domain}-{size}" for domain in ("post", "pre") for size in sizes),
        *(f"pre-{size}, joint" for size in sizes),
        *(f"pre-{size}, joint, turned in 16" for size in sizes),
    }
    whole = layers * 2 * 8 * 128 * 2
    for (_, scenario), time in found.items():
        share = {"1/2 at 16 bits": 1 / 2, "1/4 at 16 bits": 1 / 4, "1/2 at 4 bits": 1 / 8, "1/2 at 2 bits": 1 / 16}
        assert time.kv_bytes_per_token == whole * share[scenario]
        assert time.share == pytest.approx(time.seconds / uncompressed_decode_seconds(shape, device, LOAD))
    assert found["post-1", "1/4 at 16 bits"].share < found["post-1", "1/2 at 16 bits"].share < 1
    one = uniform_layout(shape, Candidate("pre", 8), True, 1 / 4, 16)
    assert found["pre-8", "1/4 at 16 bits"].seconds == decode_seconds([one] * layers, shape, device, LOAD)
    assert kv_bytes_per_token([one] * layers, 2) == whole / 4
    joint = uniform_layout(shape, Candidate("pre", 8, joint=True), True, 1 / 4, 16)
    assert joint.groups[0].qk_rank == joint.groups[0].v_rank == 2 * one.groups[0].qk_rank
    assert found["pre-8, joint", "1/4 at 16 bits"].seconds == decode_seconds([joint] * layers, shape, device, LOAD)
    assert ("pre-8, joint", "1/2 at 16 bits") not in found  # 1024 columns of values


def test_joint_latents_are_predicted_where_keys_and_values_are_linear_in_the_hidden_state() -> None:
    """Not after RoPE, nor behind a norm of the keys."""
    shape, device = AttentionShape(2, 8, 2, 64, 512), find_device("h200")
    for rotary, key_norm, expected in ((True, False, ["pre"]), (True, True, []), (False, False, ["none"])):
        times = decode_times(shape, rotary, key_norm, device, LOAD)
        joint = [t.candidate for t in times if t.candidate.endswith("joint")]
        assert list(dict.fromkeys(joint)) == [f"{domain}-{size}, joint" for domain in expected for size in (1, 2)]


@pytest.mark.parametrize(
    ("heads", "head_dim", "expected"),
    [(8, 128, {"pre-1", "none-4"}), (2, 64, {"pre-2", "none-2"}), (7, 256, {"pre-1", "none-1"})],
)
def test_as_many_heads_share_a_latent_as_cost_no_time(heads: int, head_dim: int, expected: set[str]) -> None:
    shape, recipe = AttentionShape(4, 4 * heads, heads, head_dim, 4 * heads * head_dim), load_recipe("rotor")
    found = [candidates_of(recipe, FAMILIES[name], shape) for name in ("llama", "gpt2")]
    assert {key for keys in found for key in keys} == expected
    times = decode_times(shape, True, False, find_device("h200"), LOAD)
    share = {t.candidate: t.share for t in times if t.scenario == "1/2 at 4 bits" and t.candidate.endswith("joint")}
    (chosen,) = (candidate.group_size for candidate in found[0].values())
    assert chosen == max((size for size in range(1, heads + 1) if share.get(f"pre-{size}, joint", 2) <= 1), default=1)


def test_decode_times_are_shown_as_a_prediction(tiny) -> None:
    text = " ".join(CliRunner().invoke(app, ["inspect", str(DEMO_MODEL)]).output.split())
    assert "Predicted attention time of a decode step" in text
    assert "h200, 8 x 32768 tokens; arithmetic, not measured" in text
    assert "Below 1: faster than the uncompressed model." in text
    assert "0.01 GB" not in text
    assert "where the model has 6.50 MB: bases come beside its projections" in text
    data = inspect(DEMO_MODEL, "rotor", ["objective.device=l40s"]).to_dict()
    assert data["objective"]["device"] == "l40s"
    pre = {f"pre-{size}{kind}" for size in (1, 2) for kind in ("", ", joint", ", joint, turned in 16")}
    assert {time["candidate"] for time in data["decode_times"]} == {"post-1", "post-2", *pre}
    none = {f"none-{size}" for size in (1, 2, 4)}
    assert {t.candidate for t in inspect(tiny("gpt2")).decode_times} == none | {f"{name}, joint" for name in none}
