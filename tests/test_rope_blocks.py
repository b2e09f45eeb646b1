"""Keys in blocks of positions: what is measured of them, what is written, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from support.compare import relative_error
from support.runs import FAST_EVALUATION, SHORT_TEXT
from transformers import AutoModelForCausalLM

from rotor import calibrate, export, validate
from rotor.calibration.capture import capture
from rotor.calibration.form import model_form
from rotor.calibration.gradients import fisher_information
from rotor.calibration.moments import stored_name
from rotor.checkpoint.families import attention_shape, find_family
from rotor.checkpoint.layout import POST_ROPE, KeyForm, LayerForm
from rotor.errors import RecipeError
from rotor.kernels.rotary import rotate, when_read, within_blocks
from rotor.models.layerwise import LayerwiseModel
from rotor.models.loading import load_model
from rotor.models.outline import ModelOutline
from rotor.models.source import Checkpoint
from rotor.recipe.reading import load_recipe
from rotor.runtime.attention import RotorAttention

ROWS = torch.randint(5, 4000, (3, 22), generator=torch.Generator().manual_seed(0))


def rotation_of(model, family, layer: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    kind = family.rotary_type(model.config, layer)
    like, positions = torch.zeros(1), torch.arange(length)[None]
    cos, sin = model.get_submodule(family.rotary)(like, positions, *([] if kind is None else [kind]))
    return cos[0], sin[0]


def test_both_parts_of_a_rotation_are_the_rotation() -> None:
    """An attention factor, by which RoPE makes keys longer (YaRN), is in the second part alone."""
    angles = torch.outer(torch.arange(40).double(), 10.0 ** -torch.arange(4).double()).repeat(1, 2)
    exact = 1.3 * angles.cos(), 1.3 * angles.sin()
    key = torch.randn(40, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for form in (KeyForm(2), KeyForm(16), KeyForm(64)):
        stored = rotate(key, *within_blocks(exact, torch.arange(40), form))
        assert relative_error(stored.norm(dim=-1), key.norm(dim=-1)) < 1e-12
        read = rotate(stored, *when_read(exact, form))
        assert relative_error(read, rotate(key, *exact)) < 1e-12


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_neox"])
def test_moments_are_of_stored_keys(name: str, tiny) -> None:
    """Rotated as when they are read they are the keys after RoPE."""
    model = load_model(tiny(name), torch.device("cpu"), torch.float32)
    family, shape = find_family(model.config), attention_shape(model.config)
    seen: dict[int, dict[str, torch.Tensor]] = {}
    form = KeyForm(8)
    own, joint, post = stored_name(form, False), stored_name(form, True), stored_name(POST_ROPE, False)
    wanted = frozenset({own, joint, post})
    with torch.inference_mode(), capture(model, family, shape, 1, wanted, seen.__setitem__):
        model(ROWS, use_cache=False)
    for layer, activations in seen.items():
        rotation = when_read(rotation_of(model, family, layer, ROWS.shape[1]), form)
        keys = activations[own].unflatten(0, ROWS.shape).transpose(1, 2)
        assert relative_error(rotate(keys, *rotation).transpose(1, 2).flatten(0, 1), activations[post]) < 1e-5
        assert torch.equal(activations[joint][..., : shape.head_dim], activations[own])


@pytest.mark.parametrize("name", ["qwen3", "gpt_neox"])
def test_gradients_are_by_stored_keys(name: str, tiny) -> None:
    """In a row of one block, by what they are after RoPE: nothing is left to rotate."""
    network = LayerwiseModel.of(load_model(tiny(name), torch.device("cpu"), torch.float32), batch_tokens=16)
    form = KeyForm(8)
    own, joint, post = stored_name(form, False), stored_name(form, True), stored_name(POST_ROPE, False)
    wanted = [frozenset({own, joint, post, "value"})] * network.shape.num_layers
    for layer in dict(fisher_information(network, ROWS[:, :8], 1, wanted)).values():
        for kind in ("vectors", "gradients"):
            before, after, both = (getattr(layer.samples[of], kind) for of in (own, post, joint))
            assert relative_error(before, after) < 1e-4
            assert both.shape[-1] == 2 * before.shape[-1]
        moments = [layer.information.moment(of) for of in (own, post)]
        assert relative_error(*moments) < 1e-4
        width = moments[0].shape[-1]
        assert relative_error(layer.information.moment(joint)[:, :width, :width], moments[0]) < 1e-6


@pytest.fixture(scope="module")
def written(tiny, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of each family a checkpoint with keys in blocks: of codes, joint ones too, and of 16 bits."""
    found = {}
    for name, recipe in (("qwen3", "rotor"), ("gpt_neox", "rotor-16")):
        folder = tmp_path_factory.mktemp("blocks")
        settings = ["tokens.source=random", "tokens.count=1024", "tokens.seq_len=64", "groups.domain=block"]
        settings += [*FAST_EVALUATION, *SHORT_TEXT]
        if recipe == "rotor":
            settings += ["codes.tokens=512", "groups.size=all", "exact.first=0", "exact.newest=0"]
        else:
            settings += ["ranks.method=removal-rate"]
        run = calibrate(tiny(name), folder / "run", recipe, [*settings, "groups.rope_block=4"])
        export(run.folder, folder / "out", compression=0.45, measure=False)
        found[name] = folder / "out"
    return found


@pytest.mark.parametrize("name", ["qwen3", "gpt_neox"])
def test_a_checkpoint_validates_and_generates_as_it_computes(name: str, written: dict[str, Path]) -> None:
    result = validate(written[name])
    assert not result.damaged, [check for check in result.checks if check.status == "fail"]
    assert "full-rank rewrite" in {check.name for check in result.checks if check.status == "pass"}
    model = AutoModelForCausalLM.from_pretrained(written[name], dtype=torch.float32).eval()
    forms = {m.layout.form for m in model.modules() if isinstance(m, RotorAttention)}
    assert forms == {KeyForm(4)}
    options = {"max_new_tokens": 13, "do_sample": False, "output_logits": True, "pad_token_id": 0}
    output = model.generate(ROWS, return_dict_in_generate=True, **options)
    with torch.inference_mode():
        whole = model(output.sequences[:, :-1], use_cache=False).logits[:, ROWS.shape[1] - 1 :]
    assert relative_error(torch.stack(output.logits, dim=1), whole) < 1e-4


def test_frequencies_that_depend_on_the_length_make_no_difference_to_the_form(tiny, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny("llama"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps(config))
    outline = ModelOutline.of(Checkpoint(folder))
    assert model_form(load_recipe("rotor"), outline.shape).distinct == [LayerForm(KeyForm(64), 4, joint=True)]


def test_sizes_of_blocks_that_are_refused() -> None:
    for positions in (0, 3, 256):
        with pytest.raises(RecipeError, match=r"groups\.rope_block"):
            load_recipe("rotor", ["groups.domain=block", f"groups.rope_block={positions}"])
    with pytest.raises(RecipeError, match=r"bases\.qk"):
        load_recipe("fdc", ["groups.domain=block"])  # svd is of keys after RoPE
