"""Models, recipes and checkpoints of unknown origin: what they name is not opened, and nonsense ends at the start."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from support.command_line import expect_error, rotor
from support.paths import ROOT
from support.quick import mostly_nightly
from support.runs import calibrated, reseal

import rotor.models.tokenizer as tokenizer_module
from rotor import export, validate
from rotor.checked import options
from rotor.checkpoint.layout import LayerLayout
from rotor.checkpoint.section import CompressedSection
from rotor.cli.checkpoints import _how_to_validate
from rotor.errors import CheckpointError, DataError, RecipeError, UsageError
from rotor.models.source import Checkpoint
from rotor.models.tokenizer import check_ids
from rotor.recipe.reading import load_recipe, override
from rotor.recipe.recipe import Recipe
from rotor.recipe.reference import recipe_fields


@pytest.fixture
def model(tiny, tmp_path: Path) -> Path:
    return shutil.copytree(tiny("llama"), tmp_path / "model")


@pytest.fixture(scope="module")
def exported(tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint beside its run and model; do not write to it."""
    folder = tmp_path_factory.mktemp("untrusted")
    run = calibrated(shutil.copytree(tiny("llama"), folder / "model"), folder / "run", "post", 1)
    export(run.folder, folder / "out", compression=0.3)
    return folder / "out"


def edit(path: Path, **values: Any) -> None:
    data = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**data, **values}))


KERNEL = "code that transformers would fetch from the hub"
ABSURD = "{}: got {}, expected "


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"attn_implementation": "org/name"}, KERNEL),
        ({"attn_implementation": "kernels-community/flash-attn2@v1:flash"}, KERNEL),
        ({"attn_implementation": "flash_attention_2"}, KERNEL),  # fetched where the package is not installed
        ({"experts_implementation": "org/name"}, KERNEL),
        ({"text_config": {"attn_implementation": "org/name"}}, KERNEL),
        ({"return_dict": False}, ABSURD),
        ({"output_attentions": True}, ABSURD),
        ({"vocab_size": 10**9}, ABSURD),
        ({"num_hidden_layers": 1 << 40}, ABSURD),
        ({"max_position_embeddings": -5}, ABSURD),
        ({"eos_token_id": {"a": 1}}, ABSURD),
        ({"transformers_weights": "other.safetensors"}, ABSURD),
    ],
)
def test_nonsense_in_config(values: dict[str, Any], text: str, model: Path) -> None:
    """No kernel of the hub is reached, no absurd amount is allocated, and the model returns what models return."""
    edit(model / "config.json", **values)
    ((key, value),) = values.items()
    with pytest.raises(CheckpointError, match=re.escape(text.format(key, repr(value)))):
        Checkpoint(model)


def test_what_a_checkpoint_names_is_not_opened(exported: Path, tmp_path: Path) -> None:
    """A pipe would be waited for, and any file of this machine be read."""
    folder = shutil.copytree(exported.parent, tmp_path / "away") / "out"
    os.mkfifo(tmp_path / "pipe")
    path = folder / "recipe.yaml"
    data = yaml.safe_load(path.read_text())
    data["evaluation"].update(source="text", path=str(tmp_path / "pipe"))
    path.write_text(yaml.safe_dump(data))
    reseal(folder)
    result = validate(folder)
    assert "accuracy" not in result.summary
    assert "full-rank rewrite" in {check.name for check in result.checks if check.status == "pass"}
    (check,) = (check for check in result.checks if check.name == "accuracy target")
    assert check.status == "skipped"
    named = f"recipe.yaml names a text, which is opened only if you name it: --text {tmp_path / 'pipe'}"
    assert check.detail == named


def test_what_the_user_names_is_opened(exported: Path, tmp_path: Path) -> None:
    named = validate(exported, overrides=[f"evaluation.path={ROOT / 'LICENSE'}"])
    assert named.summary["same_data_as_export"]
    assert _how_to_validate(exported) == f"rotor validate {exported} --text {ROOT / 'LICENSE'}"
    assert validate(exported, text=ROOT / "LICENSE").summary["accuracy"] == named.summary["accuracy"]
    recipe = tmp_path / "own.yaml"
    recipe.write_text((exported / "recipe.yaml").read_text())
    assert validate(exported, recipe=str(recipe)).summary["accuracy"] == named.summary["accuracy"]
    with pytest.raises(RecipeError, match="only evaluation can be changed"):
        validate(exported, overrides=["tokens.count=5"])


def in_tokenizer(folder: Path, damage: str) -> None:
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text())
    if damage == "no-unk":
        data["model"] = {"type": "WordLevel", "vocab": {"the": 0, "quick": 1}, "unk_token": "nothing"}
        data["pre_tokenizer"], data["normalizer"] = {"type": "Whitespace"}, None
    elif damage == "bomb":  # every letter becomes ten, twelve times over
        step = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
        data["normalizer"] = {"type": "Sequence", "normalizers": [step] * 12}
    elif damage == "large":
        data["model"]["vocab"]["far"] = 1 << 20
    elif damage == "merges":
        data["model"]["merges"].append(["no", "such"])
    path.write_text({"binary": "\0" * 100, "deep": "[" * 100_000}.get(damage) or json.dumps(data))


@pytest.mark.parametrize(
    ("damage", "text"),
    mostly_nightly(
        [
            ("no-unk", "the tokenizer cannot be loaded"),
            ("bomb", "the process that tried it ended"),
            ("large", r"ids up to 1048576, config.json says vocab_size 4096"),
            ("merges", "the tokenizer cannot be loaded"),
            ("binary", "the tokenizer cannot be loaded"),
            ("deep", "the tokenizer cannot be loaded"),
        ],
        lambda case: case[0] == "large",
    ),
)
def test_hostile_tokenizers_are_refused_before_any_work(
    damage: str, text: str, model: Path, capsys, monkeypatch
) -> None:
    """In a process of their own: one that takes all memory, aborts or panics takes nothing else with it."""
    in_tokenizer(model, damage)
    monkeypatch.setattr(tokenizer_module, "MEMORY_BYTES", 1 << 30)
    with pytest.raises(CheckpointError, match=text):
        _ = Checkpoint(model).tokenizer
    code, _, error = rotor(capsys, "calibrate", model, "-o", model.parent / "run")
    assert (code, error.count("\n")) == (1, 2), error
    assert {path.name for path in model.parent.iterdir()} == {"model"}


def test_a_text_that_names_an_added_token_beyond_the_model() -> None:
    """As in Gemma 3, whose tokenizer has one more than there are embeddings: only a text that names it is refused."""
    with pytest.raises(DataError, match=r"gives the id 9, config\.json says"):
        check_ids(torch.tensor([[1, 9]]), 9)
    check_ids(torch.tensor([[0, 8]]), 9)


def test_prompts_that_no_model_can_take(model: Path, capsys) -> None:
    """Bytes that are not UTF-8, and a post-processor with an id that the model lacks."""
    expect_error(capsys, 2, "the prompt is not UTF-8: 'x\\udcff'.", "generate", model, os.fsdecode(b"x\xff"))
    special = {"a": {"id": "a", "ids": [1 << 20], "tokens": ["a"]}}
    single = [{"SpecialToken": {"id": "a", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    added = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": special}
    edit(model / "tokenizer.json", post_processor=added)
    expect_error(capsys, 1, "gives the id 1048576, config.json says vocab_size 4096", "generate", model, "x")


def test_counts_of_recipes_are_bounded() -> None:
    """One that is not would fill the memory before anything is said."""
    names = [field.name for section in recipe_fields().values() for field in section]
    unbounded = [
        name
        for name in names
        for option in options(Recipe, name.split("."))
        if option.get("type") == "integer" and not {"maximum", "expected"} & option.keys()
    ]
    assert unbounded == []
    with pytest.raises(
        RecipeError, match=r"tokens\.count: got 10000000000, expected a whole number from 1 to 67108864"
    ):
        override(load_recipe("fdc"), ["tokens.count=10000000000"])
    with pytest.raises(RecipeError, match=r"ranks\.probe_shares: .*expected 1 to 256 shares"):
        override(load_recipe("rotor"), [f"ranks.probe_shares={[0.5] * 1000}"])


def test_no_model_is_fetched_that_only_a_checkpoint_leads_to(
    exported: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    """rotor.json names a run, and run.json a model of the hub."""

    def fetched(*_: object, **__: object) -> None:
        raise AssertionError("asked the hub")

    folder = shutil.copytree(exported.parent, tmp_path / "x")
    shutil.rmtree(folder / "model")
    info = json.loads((folder / "run" / "run.json").read_text())
    info["model"] |= {"path": str(tmp_path / "gone"), "hub_id": "team/evil", "revision": "0" * 40}
    (folder / "run" / "run.json").write_text(json.dumps(info))
    reseal(folder / "run")
    for name in ("snapshot_download", "hf_hub_download", "get_safetensors_metadata"):
        monkeypatch.setattr(f"huggingface_hub.{name}", fetched)
    code, said, error = rotor(capsys, "validate", folder / "out", "--json")
    assert code == 0, error
    skipped = {check["name"] for check in json.loads(said)["checks"] if check["status"] == "skipped"}
    assert {"source unchanged", "full-rank rewrite", "accuracy target"} <= skipped
    for name in ("out", "run"):
        assert rotor(capsys, "report", folder / name)[0] == 0


@pytest.mark.parametrize("what", ["layers", "groups", "kv_heads", "key", "fast", "biases", "method"])
def test_a_hundred_thousand_of_anything_are_not_read(what: str, exported: Path) -> None:
    """Also of what the section does not know."""
    section = json.loads((exported / "config.json").read_text())["quantization_config"]
    layer, many = section["layers"]["0"], [0] * 100_000
    if what == "layers":
        section["layers"] = {str(index): layer for index in range(100_000)}
    elif what == "groups":
        layer["groups"] *= 100_000
    elif what in ("kv_heads", "key"):
        layer["groups"][0][what] = many
    elif what == "fast":
        layer["groups"][0]["key"] = {"4": 8, "fast": many}
    else:
        section |= {"biases": many} if what == "biases" else {"cache": {"method": many}}
    with pytest.raises(CheckpointError, match=rf"{what}: got '\d+ entries', expected at most 4096"):
        CompressedSection(**section)


def test_what_an_earlier_rotor_wrote_is_refused_with_what_makes_it_anew(tiny, tmp_path: Path, capsys) -> None:
    """Also where its recipe has fields that are gone."""
    run = calibrated(tiny("llama"), tmp_path / "run", "post", 1).folder
    export(run, tmp_path / "out", compression=0.3, measure=False)
    for folder, name in ((run, "run.json"), (tmp_path / "out", "rotor.json")):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | {"format_version": 4}))
        recipe = folder / "recipe.yaml"
        recipe.write_text(recipe.read_text().replace("rope_block:", "fast_planes: quarter\n  rope_block:"))
    calls = (("export", run, "-o", tmp_path / "again", "--compression", "0.3"), ("validate", tmp_path / "out"))
    for call in (*calls, ("report", run)):
        code, _, said = rotor(capsys, *map(str, call))
        assert code == 1
        assert "format_version is 4, this rotor reads 5" in said
        assert "rotor calibrate MODEL -o RUN" in said


def test_no_field_of_a_layout_may_be_null(exported: Path) -> None:
    section = json.loads((exported / "config.json").read_text())["quantization_config"]
    for field in ("groups", "kv_heads", "key", "layers"):
        own = json.loads(json.dumps(section))
        layer = own["layers"]["0"]
        holder = own["layers"] if field == "layers" else layer if field == "groups" else layer["groups"][0]
        holder["0" if field == "layers" else field] = None
        with pytest.raises(CheckpointError, match="got None, expected"):
            LayerLayout.from_dict(CompressedSection(**own).layers["0"], "config.json, layer 0")


def test_a_model_that_a_checkpoint_was_not_made_from(exported: Path, tiny, tmp_path: Path) -> None:
    """Of other sizes, compressed itself, or of the same sizes with other weights."""
    other = shutil.copytree(exported.parent / "model", tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, other / "model.safetensors")
    for model in (tiny("gpt2"), exported, other):
        with pytest.raises(UsageError, match=r"is not the model that .*out was made from, model\.") as caught:
            validate(exported, model=model, text=ROOT / "LICENSE")
        assert "--model MODEL" in caught.value.hint
    moved = shutil.copytree(exported.parent / "model", tmp_path / "moved")
    assert not validate(exported, model=moved, measure=False).damaged
