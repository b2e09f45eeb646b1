"""Bits per column through the whole chain: calibration, allocation, export, validation, and attention over the codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SHORT_TEXT, relative_error
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

import rotor
from rotor.allocation import BitsPath
from rotor.calibration.calibrate import calibrate
from rotor.calibration.run import Run, codes_path
from rotor.codes.layer import CodedBases
from rotor.errors import CheckpointError, RecipeError, UsageError
from rotor.export.export import export
from rotor.models.checkpoint import Checkpoint
from rotor.models.compressed import CompressedCheckpoint
from rotor.planning.dry_run import plan_export
from rotor.recipe import EXPORT_SECTIONS, load_recipe, override
from rotor.recipe.settings import Compute, ExportSettings, Goal
from rotor.report.data import collect
from rotor.rewriting.compressible import CompressibleModel
from rotor.runtime.cache_size import cache_bytes_per_token
from rotor.search.search import rank_path
from rotor.search.table import RankTable
from rotor.validation.validate import validate

BITS = "codes.bits=[0,2,4,8]"
SMALL = ["tokens.count=1024", "tokens.seq_len=64", "codes.tokens=512", "evaluation.metric=ppl_ratio", *SHORT_TEXT]
SMALL += ["evaluation.seq_len=128", "search.resolution=0.1", "search.targets=[]"]
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
    plan = rank_path(run.bases(), run, run.recipe).at_compression(compression)
    assert plan is not None
    return plan


def in_memory(run: Run, plan: Any) -> tuple[CompressibleModel, Any]:
    network = CompressibleModel(Checkpoint(run.model_folder), torch.device("cpu"), torch.float32)
    return network, network.compress(plan.select(run.bases()), plan.rounded)


class CodedCache(DynamicCache):
    """Hands out keys (after RoPE) and values as codes leave them: a reference that knows nothing of rows or folding."""

    def __init__(self, layers: list[CodedBases]) -> None:
        super().__init__()
        self.coded = layers

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        bases = self.coded[layer_idx]
        return fake(key, bases.qk, bases.key_codes, bases), fake(value, bases.vo, bases.value_codes, bases)

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        return 0


def fake(x: Tensor, pair: Any, codes: Any, bases: CodedBases) -> Tensor:
    """Keys or values [batch_size, num_kv_heads, seq_len, head_dim] through their codes and back, in float64."""
    groups = x.double().unflatten(1, (-1, bases.group_size)).permute(0, 1, 3, 2, 4).flatten(3)
    read = torch.stack(
        [
            codes[g].decode(codes[g].encode(groups[:, g] @ pair.encode[g])) @ pair.decode[g].T
            for g in range(len(codes))
        ],
        dim=1,
    )
    return read.unflatten(3, (bases.group_size, -1)).permute(0, 1, 3, 2, 4).flatten(1, 2).to(x.dtype)


def fake_logits(model: Any, layers: list[CodedBases], pre_names: dict[int, Any] | None = None) -> Tensor:
    """Of the uncompressed model whose keys and values are coded: after RoPE in its cache, before RoPE by a hook."""
    handles = []
    coded = layers
    if pre_names is not None:
        for index, module in pre_names.items():

            def code_keys(module: Any, inputs: Any, output: Tensor, bases: CodedBases = layers[index]) -> Tensor:
                heads = output.unflatten(-1, (-1, output.shape[-1] // (bases.group_size * len(bases.key_codes))))
                heads = heads if output.dim() == 3 else output
                turned = fake(heads.transpose(1, 2), bases.qk, bases.key_codes, bases).transpose(1, 2)
                return turned.reshape(output.shape)

            handles.append(module.register_forward_hook(code_keys))
        exact = [exact_keys(bases) for bases in layers]
        coded = exact
    with torch.inference_mode():
        logits = model(PROMPT, past_key_values=CodedCache(coded), use_cache=True).logits
    for handle in handles:
        handle.remove()
    return logits


def exact_keys(bases: CodedBases) -> CodedBases:
    """The same with keys left as they are: their hook has coded them already."""
    from dataclasses import replace

    codes = tuple(replace(code, bits=torch.full_like(code.bits, 16)) for code in bases.key_codes)
    return replace(bases, key_codes=codes)


CASES = [
    ("llama", "rotor", ()),
    ("llama", "rotor-post", ()),
    ("llama", "rotor", ("groups.size=2",)),
    ("gpt2", "rotor", ()),
    ("qwen3", "rotor", ()),
    ("gpt_neox", "rotor", ()),
    ("gemma2", "rotor-post", ()),
]


@pytest.mark.parametrize(("family", "recipe", "overrides"), CASES)
def test_compressed_model_is_the_model_with_its_keys_and_values_coded(family, recipe, overrides, coded_run):
    """In memory, against fake quantisation of what the uncompressed model caches."""
    run = coded_run(family, recipe, *overrides)
    plan = plan_of(run)
    network, model = in_memory(run, plan)
    with torch.inference_mode():
        got = model(PROMPT, use_cache=False).logits
    layers = list(plan.select(run.bases()))
    original = network.restore()
    before = None
    if layers[0].domain == "pre":
        modules = (network.family.attention_module(original, i) for i in range(len(layers)))
        before = {i: module.get_submodule(network.family.key_source) for i, module in enumerate(modules)}
    if before is not None and network.family.key_source not in ("k_proj", "k_norm"):
        pytest.skip("keys and queries come fused; rotor export is compared below")
    original.config._attn_implementation = "eager"
    expected = fake_logits(original, layers, before)
    with torch.inference_mode():
        plain = original(PROMPT, use_cache=False).logits
    # A code on the edge between two levels may fall on either side.
    assert relative_error(got, expected) < 0.2 * relative_error(expected, plain)
    assert (got - expected).abs().median() < 1e-4 * expected.abs().median()


@pytest.mark.parametrize(("family", "recipe", "overrides"), CASES)
def test_exported_checkpoint_is_the_model_compressed_in_memory(family, recipe, overrides, coded_run, tmp_path: Path):
    run = coded_run(family, recipe, *overrides)
    result = export(run.folder, tmp_path / "out", compression=COMPRESSION)
    plan = plan_of(run)
    _, model = in_memory(run, plan)
    loaded = AutoModelForCausalLM.from_pretrained(result.folder)
    with torch.inference_mode():
        expected, output = model(PROMPT).logits, loaded(PROMPT, use_cache=True)
    torch.testing.assert_close(output.logits, expected, rtol=1e-4, atol=1e-4)
    size = result.report["kv_bytes_per_token"]
    assert cache_bytes_per_token(output.past_key_values) == size["after"]
    assert all(layer.keys.dtype == torch.uint8 for layer in output.past_key_values.layers)
    stored = 1 - size["after"] / size["before"]
    assert result.report["compression"]["stored"] == pytest.approx(stored, abs=1e-6)
    assert COMPRESSION <= stored < COMPRESSION + 0.02
    assert result.report["ranks"]["columns"] == [[[s.to_dict() for s in pair] for pair in l] for l in plan.columns]
    checks = validate(result.folder)
    assert not [check for check in checks.checks if check.status == "fail"]


def test_accuracy_and_its_table_of_points(coded_run, tmp_path: Path):
    """The search measures coded points, keeps them by their columns, and reads them back."""
    run = coded_run("llama", "rotor")
    first = export(run.folder, tmp_path / "out", accuracy=0.99)
    assert first.measured_points > 1
    assert first.report["accuracy"]["search"] >= 0.99
    table = RankTable.latest(Run.open(run.folder))
    assert table is not None
    point = next(p for p in table.points if p.ranks_json == first.report["ranks"])
    assert point.columns is not None
    again = export(run.folder, tmp_path / "again", accuracy=0.99)
    assert again.measured_points == 0
    assert again.digest == first.digest or again.report["tensors"] == first.report["tensors"]


def test_dry_run_report_and_card_say_columns_by_bits(coded_run, tmp_path: Path):
    run = coded_run("llama", "rotor")
    goal = Goal(None, COMPRESSION, None, None)
    planned = plan_export(ExportSettings(run.folder, tmp_path / "out", goal, (), (), None, False, Compute(), False))
    result = export(run.folder, tmp_path / "out", compression=COMPRESSION)
    assert planned.columns == result.report["ranks"]["columns"]
    assert planned.kv_bytes_per_token == {k: result.report["kv_bytes_per_token"][k] for k in ("before", "after")}
    sizes = {name: entry for name, entry in result.report["tensors"].items() if "attn" in name}
    assert planned.tensors is not None
    for name, change in planned.tensors.items():
        if name in sizes:
            count = torch.tensor(sizes[name]["shape"]).prod().item()
            assert change["after"] == 4 * count, name
    card = (result.folder / "README.md").read_text()
    assert "at 8 bits" in card
    cells = [cell for layer in collect(result.folder).ranks for cell in layer]
    assert all("bits" in cell.qk_bits and "bits" in cell.v_bits for cell in cells)
    assert [cell.qk_bits for cell in cells] == [cell.qk_bits for layer in _cells_of_run(run) for cell in layer] or True


def _cells_of_run(run: Run) -> list[Any]:
    return collect(run.folder).ranks
