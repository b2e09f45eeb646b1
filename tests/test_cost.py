"""The cost model: hand-computed numbers, identities, the objective, and devices."""

import dataclasses

import pytest

from rotor.errors import RecipeError
from rotor.format.columns import Columns
from rotor.format.layout import (
    AttentionShape,
    Domain,
    GroupLayout,
    LayerLayout,
    kv_bytes_per_token,
    uncompressed_kv_bytes_per_token,
)
from rotor.kernels.decode.tile_sizes import decode_config
from rotor.kernels.layer_table import layer_parts
from rotor.prediction.cost import (
    UNPACK_FLOPS,
    DecodeStep,
    decode_flops_per_token,
    decode_seconds,
    group_bytes_per_token,
    key_flops_per_token,
    key_work,
    latents_of,
    layer_residency,
    layer_work,
    uncompressed_decode_seconds,
    uncompressed_group_work,
    value_work,
)
from rotor.prediction.devices import Device, bundled_devices, find_device, parse_devices
from rotor.prediction.objective import Objective
from rotor.prediction.roofline import Work
from rotor.prediction.tiling import Tiling
from rotor.recipe import EXPORT_SECTIONS, ObjectiveSettings, load_recipe, override, parse_recipe

LLAMA = AttentionShape(num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, hidden_size=4096)
"""Llama 3 8B."""
ROUND = Device(bandwidth_bytes_per_s=1e12, matmul_flops_per_s=100e12, memory_bytes=1e11, source="measured")
"""100 FLOPs a byte."""
STEP = DecodeStep(context_tokens=32768, batch_size=8)


def layout(domain: Domain, size: int, qk_rank: int, v_rank: int, folded: bool | None = None) -> LayerLayout:
    groups = tuple(GroupLayout(tuple(range(h, h + size)), qk_rank, v_rank) for h in range(0, 8, size))
    return LayerLayout(domain, domain != "post" if folded is None else folded, groups)


def projection_bytes(layout: LayerLayout, shape: AttentionShape, element_bytes: int) -> float:
    """Bytes of attention weights (q, k, v, o and the bases) that a compressed layer reads in each decode step."""
    return layer_work(layout, shape, DecodeStep(0, 1, element_bytes)).weight_bytes


def uncompressed_projection_bytes(shape: AttentionShape, element_bytes: int) -> float:
    """Bytes of attention weights (q, k, v, o) that an uncompressed layer reads in each decode step."""
    return shape.num_kv_heads * uncompressed_group_work(shape, DecodeStep(0, 1, element_bytes)).weight_bytes


def test_bytes_of_the_cache() -> None:
    assert group_bytes_per_token(128, 128, 2) == 512
    assert 32 * 8 * group_bytes_per_token(128, 128, 2) == 131072 == uncompressed_kv_bytes_per_token(LLAMA, 2)
    compressed = layout("pre", 4, 96, 160)
    assert layer_work(compressed, LLAMA, DecodeStep(1, 1)).cache_bytes == kv_bytes_per_token([compressed], 2) == 1024


@pytest.mark.parametrize(
    ("domain", "group_size", "qk_rank", "v_rank", "flops"),
    [
        ("post", 1, 128, 128, 4 * 256 + 4 * 256),  # uncompressed: 4 query heads, 2 * 128 for the score and the value
        ("post", 1, 64, 48, 4 * 128 + 4 * 96),
        ("none", 1, 64, 48, 4 * 128 + 4 * 96),
        ("post", 8, 256, 128, 32 * 512 + 32 * 256),
        ("pre", 1, 48, 40, 2 * 48 * 128 + 4 * 256 + 4 * 80),
        ("pre", 8, 256, 256, 8 * 2 * 256 * 128 + 32 * 256 + 32 * 512),  # each of 8 keys rebuilt from one latent
    ],
)
def test_flops_for_one_cached_token(domain: Domain, group_size: int, qk_rank: int, v_rank: int, flops: int) -> None:
    assert decode_flops_per_token(domain, group_size, 4, 128, qk_rank, v_rank) == flops


def test_bytes_of_the_projections() -> None:
    assert uncompressed_projection_bytes(LLAMA, 2) == 2 * (2 * 4096 * 4096 + 2 * 4096 * 1024) == 83886080
    q, k = 4096 * 4096, 4096 * 1024
    # Post: q and k as they were; v and o halved; two bases of 128 x 64 for each of 8 heads.
    halved = 2 * (q + k + k // 2 + q // 2 + 2 * 8 * 128 * 64)
    assert projection_bytes(layout("post", 1, 64, 64), LLAMA, 2) == halved
    # Pre, one group: k and v have 256 rows; o has 256 columns for each of 32 heads (before: 128); a basis 1024 x 256.
    grouped = 2 * (q + 256 * 4096 + 256 * 4096 + 2 * q + 1024 * 256)
    assert projection_bytes(layout("pre", 8, 256, 256), LLAMA, 2) == grouped > uncompressed_projection_bytes(LLAMA, 2)
    # Not folded (a norm between k_proj and RoPE): k_proj stays, and a key basis comes with it.
    unfolded = projection_bytes(layout("pre", 8, 256, 256, folded=False), LLAMA, 2)
    assert unfolded == grouped + 2 * (k - 256 * 4096 + 1024 * 256)
    # Without RoPE all four shrink and no basis is left.
    assert projection_bytes(layout("none", 1, 32, 32), LLAMA, 2) == uncompressed_projection_bytes(LLAMA, 2) / 4


def test_full_rank_in_groups_of_one_costs_what_the_uncompressed_costs_plus_bases() -> None:
    full = layer_work(layout("post", 1, 128, 128), LLAMA, STEP)
    base = sum((uncompressed_group_work(LLAMA, STEP) for _ in range(8)), Work())
    assert (full.cache_bytes, full.cache_flops) == (base.cache_bytes, base.cache_flops)
    assert base.cache_bytes == 8 * 32768 * 4096
    basis = 8 * 128 * 128
    assert full.weight_bytes - base.weight_bytes == 2 * 2 * basis
    # The key basis meets one key per KV head, the query basis four queries; a batch of 8; 2 FLOPs each.
    assert full.weight_flops - base.weight_flops == 2 * 8 * 5 * basis
    folded = layer_work(layout("none", 1, 128, 128), LLAMA, STEP)
    assert dataclasses.replace(folded, tile_flops=0.0) == base
    assert folded.tile_flops == 8 * 8 * 32768 * 2 * (16 - 4) * 256  # a tile has 16 query rows, a KV head 4


def test_seconds_are_the_longer_of_reading_and_multiplying_in_each_stage() -> None:
    work = Work(cache_bytes=3e12, cache_flops=200e12, weight_bytes=1e12, weight_flops=500e12)
    assert work.cache_seconds(ROUND) == 3
    assert work.seconds(ROUND) == 3 + 5
    assert work.serial_seconds(ROUND) == 4 + 7


def test_decode_seconds_of_llama() -> None:
    tokens = 8 * 32768
    base = 32 * (tokens * 4096 + 83886080) / 1e12  # 4 FLOPs a byte, 8 in the projections: both limited by bandwidth
    assert uncompressed_decode_seconds(LLAMA, ROUND, STEP) == pytest.approx(base)
    layers = [layout("post", 1, 64, 64)] * 32
    projections = projection_bytes(layers[0], LLAMA, 2)
    assert decode_seconds(layers, LLAMA, ROUND, STEP) == pytest.approx(32 * (tokens * 2048 + projections) / 1e12)
    # Keys of all heads rebuilt from one latent: 536 FLOPs a byte, but limited by the basis, of 512 KB, and the table,
    # which come out of the L2 cache for every 64 keys, and by the key latents, which come out of it for every head.
    layers = [layout("pre", 8, 256, 256)] * 32
    projections = projection_bytes(layers[0], LLAMA, 2)
    from_l2 = 1024 + (1024 * 256 * 2 + 4 * 128 * 64) / 64 + 8 * 512
    expected = 32 * (tokens * from_l2 / 2e12 + projections / 1e12)
    assert from_l2 / 2e12 > 548864 / 100e12
    assert decode_seconds(layers, LLAMA, ROUND, STEP) == pytest.approx(expected)


def test_large_batches_make_projections_a_matter_of_flops() -> None:
    step = DecodeStep(context_tokens=1, batch_size=4096)
    assert uncompressed_group_work(LLAMA, step).seconds(ROUND) == pytest.approx(
        4096 * (512 / 1e12 + 2 * 83886080 / 2 / 8 / 100e12)
    )


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_an_uncompressed_layer_costs_one(weight: float) -> None:
    objective = Objective(weight, ROUND, LLAMA, STEP)
    assert 8 * objective.group_cost("none", True, 1, 128, 128) == pytest.approx(1)


def test_memory_is_the_share_of_bytes_and_splits_into_sides() -> None:
    objective = Objective(0.0, ROUND, LLAMA, STEP)
    assert objective.group_cost("pre", True, 8, 256, 128) == pytest.approx(384 / 2048)
    assert objective.key_cost("pre", True, 8, 256) == pytest.approx(256 / 2048)
    assert objective.value_cost(8, 128) == pytest.approx(128 / 2048)


def test_latency_is_the_ratio_of_decode_seconds_where_all_groups_are_alike() -> None:
    objective = Objective(1.0, ROUND, LLAMA, STEP)
    for one in (layout("post", 1, 64, 48), layout("pre", 8, 256, 256), layout("pre", 2, 64, 64, folded=False)):
        group, base = one.groups[0], uncompressed_decode_seconds(LLAMA, ROUND, STEP)
        cost = objective.group_cost(one.domain, one.folded_keys, one.group_size, group.qk_rank, group.v_rank)
        assert len(one.groups) * cost == pytest.approx(decode_seconds([one] * 32, LLAMA, ROUND, STEP) / base)


def test_costs_of_groups_add_up_to_at_least_the_roofline_of_the_layer() -> None:
    # One group limited by multiplying, the others by reading.
    groups = [GroupLayout((0,), 128, 16)] + [GroupLayout((h,), 16, 128) for h in range(1, 8)]
    ragged = LayerLayout("pre", True, tuple(groups))
    objective = Objective(1.0, ROUND, LLAMA, STEP)
    added = sum(objective.group_cost("pre", True, 1, g.qk_rank, g.v_rank) for g in groups)
    shape = dataclasses.replace(LLAMA, num_layers=1)
    layer = decode_seconds([ragged], shape, ROUND, STEP) / uncompressed_decode_seconds(shape, ROUND, STEP)
    assert layer < added < 2 * layer


DOMAINS = [("post", False), ("pre", True), ("pre", False), ("none", True)]


@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("domain", "folded"), DOMAINS)
@pytest.mark.parametrize("size", [1, 4])
def test_costs_rise_with_both_ranks_and_sides_bound_the_whole(
    domain: Domain, folded: bool, size: int, weight: float
) -> None:
    objective = Objective(weight, ROUND, LLAMA, STEP)
    ranks = [8, 64, 128 * size]
    for qk_rank in ranks:
        key = objective.key_cost(domain, folded, size, qk_rank)
        assert key < objective.key_cost(domain, folded, size, qk_rank + 8)
        for v_rank in ranks:
            whole = objective.group_cost(domain, folded, size, qk_rank, v_rank)
            # Where multiplying is the limit, reading a wider latent is free, but not the weights that make and use it.
            assert whole < objective.group_cost(domain, folded, size, qk_rank + 8, v_rank)
            assert whole < objective.group_cost(domain, folded, size, qk_rank, v_rank + 8)
            sides = key + objective.value_cost(size, v_rank)
            assert whole <= sides * (1 + 1e-12)
            assert sides <= 4 * whole


def test_sides_are_affine_in_their_ranks_where_the_tiles_are_alike() -> None:
    objective = Objective(0.7, ROUND, LLAMA, STEP)
    for domain, folded in DOMAINS:
        first, second, third = (objective.key_cost(domain, folded, 2, rank) for rank in (32, 48, 64))
        assert third - second == pytest.approx(second - first)
    assert objective.value_cost(2, 96) == pytest.approx(3 * objective.value_cost(2, 32))


def test_work_of_a_group_is_the_sum_of_its_sides() -> None:
    one = LayerLayout("pre", True, (GroupLayout((0, 1), 48, 80),))
    tiling = Tiling.of("pre", 2, 4, 48, 80)
    sides = key_work("pre", True, 2, 48, LLAMA, STEP, tiling) + value_work(2, 80, LLAMA, STEP, tiling)
    assert layer_work(one, LLAMA, STEP) == sides


def columns(rank: int, bits: int) -> Columns:
    return Columns(**{f"n{bits}": rank})


def test_codes_are_counted_in_bytes_and_in_unpacking() -> None:
    """Each part of a group unpacks the latents by itself: 64 query rows and 512 columns do not fit into one tile."""
    exact = GroupLayout(tuple(range(8)), 512, 512)
    coded = GroupLayout.coded(exact.kv_heads, columns(512, 4), Columns(n16=64, n2=448))
    shape = dataclasses.replace(LLAMA, num_heads=64)
    before, after = (layer_work(LayerLayout("post", False, (g,)), shape, DecodeStep(1, 1)) for g in (exact, coded))
    assert (before.cache_bytes, after.cache_bytes) == (2048, 256 + 128 + 112)
    assert (before.l2_bytes, after.l2_bytes) == (2048, 256 + 128 + 112)  # the second part reads them again
    assert (before.vector_flops, after.vector_flops) == (0, 2 * UNPACK_FLOPS * 1024)
    assert before.cache_flops == after.cache_flops
    assert before.weight_bytes == after.weight_bytes
    memory = Objective(0.0, ROUND, LLAMA, STEP)
    assert memory.group_cost("post", False, 8, *latents_of(coded)) == pytest.approx((256 + 240) / 4096)
    assert memory.key_cost("post", False, 8, columns(512, 4)) == pytest.approx(256 / 4096)


def test_unpacking_can_be_what_limits() -> None:
    device = dataclasses.replace(ROUND, vector_flops_per_s=1e12)
    work = Work(cache_bytes=1e12, vector_flops=4e12)
    assert work.cache_seconds(device) == 4
    assert work.cache_seconds(ROUND) == 1
    assert work.serial_seconds(device) == 5
    assert Work(l2_bytes=3e12).cache_seconds(ROUND) == 1.5  # twice the memory's rate, where the file does not say


@pytest.mark.parametrize("domain", ["post", "pre", "none"])
@pytest.mark.parametrize("size", [1, 2, 8])
@pytest.mark.parametrize("ranks", [(16, 16), (64, 48), (128, 96), (256, 256), (512, 320)])
def test_tiles_are_those_of_the_decode_kernel(domain: Domain, size: int, ranks: tuple[int, int]) -> None:
    exact = layout(domain, size, *ranks)
    by_bits = columns(ranks[0], 4), Columns(n8=ranks[1] - 16, n2=16)
    coded = [GroupLayout.coded(group.kv_heads, *by_bits) for group in exact.groups] if ranks[1] > 16 else []
    for one in (exact, *([dataclasses.replace(exact, groups=tuple(coded))] if coded else [])):
        parts = layer_parts(one, 4, 128)
        config = decode_config(parts, 4, 2, 128 if domain == "pre" else 0)
        found = Tiling.of(domain, size, 4, *latents_of(one.groups[0]))
        assert found.parts * (8 // size) == len(parts.table)
        assert found.rows == config["TILE_ROWS"]
        if domain == "pre":
            assert found.keys == config["TILE"]


@pytest.mark.parametrize("kv_heads, heads, layers, hidden", [(8, 32, 32, 4096), (8, 64, 80, 8192)])
def test_latency_does_not_favour_rebuilding_keys_from_wide_latents(kv_heads, heads, layers, hidden) -> None:
    """At equal bytes: what one group of all heads costs in bases out of the L2 cache is more than it reads."""
    shape = AttentionShape(layers, heads, kv_heads, 128, hidden)
    objective = Objective(1.0, find_device("h200"), shape, STEP)
    for latents in ((256, 256), (columns(512, 4), columns(512, 4))):
        assert objective.group_cost("pre", True, 8, *latents) > objective.group_cost("post", False, 8, *latents)
    narrow, wide = 8 * objective.group_cost("pre", True, 1, 32, 32), objective.group_cost("pre", True, 8, 256, 256)
    assert narrow < 1 < wide


def test_keys_turned_within_blocks_are_not_rebuilt() -> None:
    """One head of 48 columns and 4 query heads in blocks of 16, tiles of 64 keys whose 4 blocks fill 16 rows."""
    least = key_work("pre", False, 1, 48, LLAMA, DecodeStep(1, 1), rope_block=16)
    assert least.cache_flops == 2 * 4 * 48 * (1 + 128 / 16)
    rebuilt = key_work("pre", False, 1, 48, LLAMA, DecodeStep(1, 1), rope_block=4)  # no more keys than query heads
    assert rebuilt.cache_flops == key_flops_per_token("pre", 1, 4, 128, 48) == 2 * 128 * (48 + 4)
    tiling = Tiling.of("pre", 1, 4, 48, 48, rope_block=16, joint=True)
    assert (tiling.step, tiling.keys, tiling.rows, tiling.joint) == (16, 64, 16, True)
    done = key_work("pre", False, 1, 48, LLAMA, DecodeStep(1, 1), tiling)
    assert done.cache_flops == least.cache_flops
    absorbed = 2 * tiling.node_rows * 128 * 48 / tiling.block
    assert done.cache_flops + done.tile_flops == 2 * 16 * 48 + absorbed
    assert done.l2_bytes == 2 * (4 * 48 * 2) / 16  # written once, and read
    values = value_work(1, 48, LLAMA, DecodeStep(1, 1), tiling, joint=True)
    assert (values.cache_bytes, values.l2_bytes, values.vector_flops) == (0, 0, 0)


def test_a_block_of_positions_makes_keys_before_rope_predicted_faster() -> None:
    objective = Objective(1.0, find_device("h200"), LLAMA, STEP)
    latent = columns(48, 4)
    costs = [objective.group_cost("pre", block == 1, 1, latent, None, block) for block in (1, 16, 64)]
    assert costs[0] > 2 * costs[1] >= 2 * costs[2]  # what is left is reading
    in_16 = LayerLayout("pre", False, tuple(GroupLayout.coded((head,), latent, None) for head in range(8)), 16)
    seconds = layer_work(in_16, LLAMA, STEP).seconds(objective.device, layer_residency(in_16, LLAMA, 2))
    one = uncompressed_group_work(LLAMA, STEP).seconds(objective.device)
    assert 8 * costs[1] == pytest.approx(seconds / (8 * one))


def test_an_objective_from_a_recipe() -> None:
    settings = load_recipe("rotor-16", ["objective.kind=0.25", "objective.batch_size=2"]).objective
    objective = Objective.from_settings(settings, find_device(settings.device), LLAMA, 4)
    assert objective.latency_weight == 0.25
    assert objective.step == DecodeStep(context_tokens=32768, batch_size=2, element_bytes=4)
    assert objective.device == bundled_devices()["h200"]
    for kind, weight in (("memory", 0.0), ("latency", 1.0)):
        assert Objective.from_settings(ObjectiveSettings(kind), ROUND, LLAMA, 2).latency_weight == weight


def test_the_objective_can_be_changed_on_export_and_survives_yaml() -> None:
    recipe = override(load_recipe("fdc"), ["objective.kind=latency", "objective.device=l40s"], EXPORT_SECTIONS)
    assert (recipe.objective.kind, recipe.objective.device) == ("latency", "l40s")
    assert parse_recipe(recipe.to_yaml(), "x") == recipe
    assert load_recipe("fdc").objective.kind == "memory"


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ("objective.kind=latncy", "expected one of memory, latency or a finite number; did you mean 'latency'?"),
        ("objective.kind=1.5", "objective.kind: got 1.5, expected memory, latency or a number from 0"),
        ("objective.kind=.nan", "objective.kind: got nan"),
        ("objective.context_tokens=0", "objective.context_tokens: got 0, expected a positive number"),
        ("objective.batch_size=-1", "objective.batch_size: got -1, expected a positive number"),
        ("objective.devise=h200", "unknown key 'devise' in objective; did you mean 'device'?"),
    ],
)
def test_a_wrong_objective_says_what_is_wrong(item: str, text: str) -> None:
    with pytest.raises(RecipeError) as error:
        load_recipe("fdc", [item])
    assert text in str(error.value)


def test_bundled_devices_are_from_data_sheets() -> None:
    devices = bundled_devices()
    assert set(devices) == {"a100-80g", "h100-sxm", "h200", "b200", "l40s", "rtx-4090", "mi300x"}
    assert {device.source for device in devices.values()} == {"data-sheet"}
    h200 = devices["h200"]
    assert (h200.bandwidth_bytes_per_s, h200.memory_bytes) == (4.8e12, 141e9)
    assert h200.matmul_flops_per_s / h200.bandwidth_bytes_per_s == pytest.approx(206.1, abs=0.1)


def test_an_unknown_device_names_the_nearest_and_lists_all() -> None:
    with pytest.raises(RecipeError, match="device 'h20' is not known; did you mean 'h200'") as error:
        find_device("h20")
    assert "rtx-4090" in error.value.hint
    assert error.value.exit_code == 2


FIELDS = "bandwidth_bytes_per_s: 4.4e12, matmul_flops_per_s: 7.9e14, memory_bytes: 141000000000, source: measured"


def test_a_device_file_adds_and_replaces(tmp_path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"h200: {{{FIELDS}}}\nmine: {{{FIELDS}}}\n")
    assert find_device("h200", str(path)) == find_device("mine", str(path)) == Device(4.4e12, 7.9e14, 141e9, "measured")
    assert find_device("l40s", str(path)) == find_device("l40s")
    with pytest.raises(RecipeError, match=r"absent\.yaml: cannot be read"):
        find_device("h200", str(tmp_path / "absent.yaml"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1", "expected a mapping from device names to their rates, got [1]"),
        ("x: [", "not valid YAML"),
        ("x: 3", "x: got 3, expected a mapping"),
        (f"x: {{{FIELDS}, bandwith: 1}}", "unknown key 'x.bandwith'; did you mean 'bandwidth_bytes_per_s'?"),
        ("x: {source: measured}", "missing key 'x.bandwidth_bytes_per_s'"),
        (f"x: {{{FIELDS.replace('4.4e12', 'fast')}}}", "x.bandwidth_bytes_per_s: got 'fast', expected a finite number"),
        (f"x: {{{FIELDS.replace('4.4e12', '0')}}}", "x.bandwidth_bytes_per_s: got 0.0, expected a positive number"),
        (f"x: {{{FIELDS.replace('7.9e14', '.inf')}}}", "x.matmul_flops_per_s: got inf, expected a finite number"),
        (f"x: {{{FIELDS.replace('measured', 'guessed')}}}", "x.source: got 'guessed', expected one of data-sheet"),
    ],
)
def test_a_wrong_device_file_says_what_and_where(text: str, message: str) -> None:
    with pytest.raises(RecipeError) as error:
        parse_devices(text, "mine.yaml")
    assert message in str(error.value)
    assert "device file mine.yaml: " in str(error.value)
    assert "recipe" not in str(error.value)
