"""Bits per channel through the whole chain: calibration, allocation, export, validation, attention over the codes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compare import relative_error
from support.joint_truth import read_numbers
from support.quick import mostly_nightly
from support.runs import SHORT_TEXT
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from rotor import Run, calibrate, export, validate
from rotor.calibration.run import layer_path
from rotor.checkpoint.bases import BasisPair, LayerBases
from rotor.checkpoint.folding import model_layouts
from rotor.checkpoint.layout import POST_ROPE
from rotor.checkpoint.sizes import kv_bytes_per_token
from rotor.errors import CheckpointError, RecipeError, UsageError
from rotor.kernels.rotary import rotate, when_read
from rotor.models.compressed import CompressedCheckpoint
from rotor.models.compressible import CompressibleModel
from rotor.models.hardware import DevicePlan
from rotor.models.source import Checkpoint
from rotor.recipe.reading import load_recipe
from rotor.search.plan_evaluator import rank_path
from rotor.search.table import RankTable
from rotor.tools.validation.validate import cache_bytes_per_token

BITS = "codes.bits=[0,4,8]"
SMALL = ["tokens.count=1024", "tokens.seq_len=64", "codes.tokens=512", "evaluation.metric=ppl_ratio", *SHORT_TEXT]
SMALL += ["evaluation.seq_len=128", "search.resolution=0.1", "groups.size=all", "exact.first=0", "exact.newest=0"]
PROMPT = torch.randint(5, 4000, (2, 24), generator=torch.Generator().manual_seed(7))
COMPRESSION = 0.8


@pytest.fixture(scope="module")
def coded_run(tiny, tmp_path_factory: pytest.TempPathFactory):
    """coded_run(family, recipe, *overrides) -> a run with codes of a tiny model, calibrated once."""
    runs: dict[tuple[str, ...], Run] = {}

    def get(family: str, recipe: str, *overrides: str) -> Run:
        key = family, recipe, *overrides
        if key not in runs:
            out = tmp_path_factory.mktemp("coded") / "run"
            runs[key] = calibrate(tiny(family), out, recipe, [*SMALL, *overrides])
        return runs[key]

    return get


def plan_of(run: Run, compression: float = COMPRESSION) -> Any:
    plan = rank_path(run, run.recipe).at_compression(compression)
    assert plan is not None
    return plan


def in_memory(run: Run, plan: Any) -> tuple[CompressibleModel, Any]:
    network = CompressibleModel(Checkpoint(run.model_folder), DevicePlan(torch.device("cpu"), torch.float32))
    return network, network.compress(run.bases(plan.channels), plan.ranks)


class CodedCache(DynamicCache):
    """Hands out keys and values as codes leave them: a reference that knows nothing of rows or folding."""

    def __init__(self, layers: list[LayerBases], network: CompressibleModel) -> None:
        super().__init__()
        self.coded, self.network = layers, network

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        bases = self.coded[layer_idx]
        if bases.form == POST_ROPE:
            return self.code(key, value, bases)
        rotary = self.network.model.get_submodule(self.network.family.rotary)  # of a model with one kind of RoPE
        cos, sin = when_read([x[0] for x in rotary(torch.zeros(1), torch.arange(key.shape[2])[None])], bases.form)
        key, value = self.code(rotate(key, cos, -sin), value, bases)
        return rotate(key, cos, sin), value

    def code(self, key: Tensor, value: Tensor, bases: LayerBases) -> tuple[Tensor, Tensor]:
        """Keys as they are stored, and values."""
        if bases.joint:
            return fake_both(key, value, bases)
        key = fake(key, bases.qk, bases.group_size)
        return key, fake(value, bases.vo, bases.group_size)

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        return 0


def fake(x: Tensor, pair: BasisPair, group_size: int) -> Tensor:
    """Keys or values [batch_size, num_kv_heads, seq_len, head_dim] through their codes and back, in float64."""
    groups = x.double().unflatten(1, (-1, group_size)).permute(1, 0, 3, 2, 4).flatten(3)
    read = torch.stack(
        [
            code.decode(code.encode(group @ encode)) @ decode.T
            for group, code, encode, decode in zip(groups, pair.codes, pair.encode, pair.decode, strict=True)
        ]
    )
    return read.unflatten(3, (group_size, -1)).permute(1, 0, 3, 2, 4).flatten(1, 2).to(x.dtype)


def fake_both(key: Tensor, value: Tensor, bases: LayerBases) -> tuple[Tensor, Tensor]:
    """Keys and values [batch_size, num_kv_heads, seq_len, head_dim] through the codes of joint groups and back."""
    numbers = torch.cat([key, value], dim=-1).unflatten(1, (-1, bases.group_size)).permute(1, 0, 3, 2, 4).flatten(3)
    read = torch.stack([read_numbers(own, bases.latents[0], group)[0] for group, own in enumerate(numbers)])
    both = read.unflatten(3, (bases.group_size, -1)).permute(1, 0, 3, 2, 4).flatten(1, 2).to(key.dtype)
    key, value = both.chunk(2, dim=-1)
    return key, value


def coded_logits(network: CompressibleModel, layers: list[LayerBases]) -> Tensor:
    """Of the uncompressed model whose keys and values are coded."""
    model = network.restore()
    model.config._attn_implementation = "eager"
    with torch.inference_mode():
        return model(PROMPT, past_key_values=CodedCache(layers, network), use_cache=True).logits


CASES = [
    ("llama", "rotor", ()),
    ("llama", "rotor", ("groups.size=2", "groups.rope_block=4")),
    ("llama", "rotor", ("groups.domain=post", "bases.qk=kq")),
    ("llama", "rotor", ("groups.joint=false",)),
    ("llama", "rotor", ("groups.domain=pre",)),
    ("gpt2", "rotor", ()),
    ("qwen3", "rotor", ("groups.domain=pre",)),
    ("gpt_neox", "rotor", ()),
    ("gemma2", "rotor", ("groups.domain=post",)),
]


QUICK = (1, 3, 5)
"""Joint, keys and values apart, no RoPE; the others are nightly."""


@pytest.mark.parametrize("case", mostly_nightly(range(len(CASES)), lambda case: case in QUICK))
def test_compressed_model_is_the_model_with_its_keys_and_values_coded(case: int, coded_run, tmp_path: Path):
    """In memory, against fake quantisation of what the uncompressed model caches; then exported and loaded."""
    family, recipe, overrides = CASES[case]
    run = coded_run(family, recipe, *overrides)
    plan = plan_of(run)
    network, model = in_memory(run, plan)
    with torch.inference_mode():
        got, plain = model(PROMPT, use_cache=False).logits, network.restore()(PROMPT, use_cache=False).logits
    expected = coded_logits(network, list(run.bases(plan.channels)))
    # A number on the edge between two levels may fall on either side, which few tokens see.
    assert (got - expected).abs().median() < 1e-4 * expected.abs().median()
    assert relative_error(got, expected) < max(0.2 * relative_error(expected, plain), 1e-4)

    result = export(
        run.folder, tmp_path / "out", compression=COMPRESSION, measure=False, context=12
    )  # in gemma2's window
    loaded = AutoModelForCausalLM.from_pretrained(result.folder)
    with torch.inference_mode():
        output = loaded(PROMPT, use_cache=True)
    torch.testing.assert_close(output.logits, got, rtol=1e-4, atol=1e-4)
    size = result.report["kv_bytes_per_token"]
    assert sum(cache_bytes_per_token(output.past_key_values)) == size["after"]
    assert all(layer.keys.dtype == torch.uint8 for layer in output.past_key_values.layers)
    stored = 1 - size["after"] / size["before"]
    assert result.report["compression"]["stored"] == pytest.approx(stored, abs=1e-6)
    assert COMPRESSION <= stored < COMPRESSION + 0.04
    assert result.report["ranks"]["channels"] == plan.channels_json
    checks = validate(result.folder, recipe=run.recipe, measure=False)
    assert not [check for check in checks.checks if check.status == "fail"]


def test_accuracy_and_its_table_of_points(coded_run, tmp_path: Path):
    """The search measures coded points, keeps them by their channels, and reads them back."""
    run = coded_run("llama", "rotor")
    first = export(run.folder, tmp_path / "out", accuracy=0.99)
    assert first.measured_points > 1
    assert first.report["accuracy"]["search"] >= 0.99
    table = RankTable.latest(Run.open(run.folder))
    assert table is not None
    point = next(p for p in table.points if p.ranks_json == first.report["ranks"])
    assert point.channels is not None
    again = export(run.folder, tmp_path / "again", accuracy=0.99)
    assert again.measured_points == 0
    assert again.report["tensors"] == first.report["tensors"]


def test_bits_of_a_run_can_be_changed_on_export(coded_run, tmp_path: Path):
    """Other widths; and numbers of 16 bits, by ranks."""
    run = coded_run("llama", "rotor")
    mixed = export(run.folder, tmp_path / "mixed", compression=0.7, overrides=["codes.bits=[0,4,16]"])
    channels = mixed.report["ranks"]["channels"]
    rows = [row for layer in channels for rows in layer for row in rows]
    assert {bits for row in rows for bits in row} == {"4", "16", "scaled"}
    assert not [check for check in validate(mixed.folder, recipe=run.recipe).checks if check.status == "fail"]
    numbers = ["codes.bits=[0,16]", "ranks.method=uniform"]
    with pytest.raises(UsageError, match=r"share latents.*bits of codes alone"):
        export(run.folder, tmp_path / "plain", compression=0.3, overrides=numbers)
    apart = coded_run("llama", "rotor", "groups.joint=false")
    plain = export(apart.folder, tmp_path / "plain", compression=0.3, overrides=numbers)
    assert "channels" not in plain.report["ranks"]
    assert not CompressedCheckpoint(plain.folder).layouts[0].coded


def test_plans_of_a_path(coded_run):
    """By rising share of bytes removed, each counted from its rows; a target is met by the most bytes that meet it."""
    run = coded_run("llama", "rotor")
    path = rank_path(run, run.recipe)
    steps = path.plans()
    assert [plan.stored for plan in steps] == sorted({plan.stored for plan in steps})
    before = 2 * run.shape.num_kv_heads * run.shape.head_dim * run.shape.num_layers * run.info["element_bytes"]
    for plan in steps:
        layouts = model_layouts(run.bases(plan.channels), plan.ranks)
        assert plan.stored == pytest.approx(1 - kv_bytes_per_token(layouts, 4) / before)
    assert path.at_compression(0.8).stored >= 0.8
    assert path.at_compression(0.8).stored - 0.8 < 8 / before * 2
    assert path.at_compression(0.9999) is None


def test_requests_that_codes_cannot_serve_are_refused(coded_run, tmp_path: Path):
    run = coded_run("llama", "rotor")
    out = tmp_path / "out"
    with pytest.raises(UsageError, match="does not choose ranks by a removal rate"):
        export(run.folder, out, removal_rate=0.1)
    with pytest.raises(UsageError, match="at least 8 bytes a latent"):
        export(run.folder, out, compression=0.999)
    for bits in ("[4,8]", "[0]", "[0,3]", "[0,4,4]"):
        with pytest.raises(RecipeError, match=r"codes\.bits.*0 and at least one of 2, 4, 6, 8, 12, 16"):
            load_recipe("rotor", [f"codes.bits={bits}"])
    plain = calibrate(run.model_folder, tmp_path / "plain", "fdc", [*SMALL, "tokens.source=random"])
    with pytest.raises(UsageError, match=r"calibrated without codes.*codes\.bits=\[0, 4, 8\]|calibrated without"):
        export(plain.folder, out, compression=0.5, overrides=[BITS])


def test_damaged_codes_of_a_run_are_refused(coded_run, tmp_path: Path):
    run = coded_run("llama", "rotor")
    copy = Path(shutil.copytree(run.folder, tmp_path / "run"))
    export(copy, tmp_path / "whole", compression=COMPRESSION)  # measures a point, which the run's table keeps
    path = layer_path(copy, "codes", 0)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="layer-0000"):
        export(copy, tmp_path / "out", compression=COMPRESSION)
    path = next((copy / "tables").glob("[0-9a-f]*.json"))
    tables, run = json.loads(path.read_text()), Run.open(copy)
    point = next(p for p in tables["points"] if p["channels"])
    for wrong, text in (({"n3": 8}, r"points\[0\]\.channels.*"), ({"n4": 1600}, "as many as ranks says")):
        point["channels"][0][0][0] = wrong
        path.write_text(json.dumps(tables))
        with pytest.raises(CheckpointError, match=text):
            RankTable.named(run, path.stem)
