"""The predicted floor of a kernel: programs on an SM, bytes in flight, and the work of every kernel, by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ragged import layer

from rotor.bench import floors
from rotor.bench.precompile import Compiled
from rotor.format.columns import Columns
from rotor.format.layout import AttentionShape, GroupLayout, LayerLayout
from rotor.kernels.occupancy import programs_per_sm
from rotor.prediction.cost import DecodeStep, layer_residency, layer_work, prefill_work
from rotor.prediction.devices import Device
from rotor.prediction.kernels import Launch, Load, compiled_residency, kernel_work, predicted_floor
from rotor.prediction.roofline import MEMORY_LATENCY_S, Residency, Work
from rotor.prediction.tiling import Tiling

SHAPE = AttentionShape(num_layers=1, num_heads=8, num_kv_heads=2, head_dim=64, hidden_size=512)
POST = LayerLayout("post", False, (GroupLayout((0,), 32, 48), GroupLayout((1,), 32, 48)))
PRE = LayerLayout("pre", True, (GroupLayout((0, 1), 64, 48),))
DEVICE = Device(1e12, 100e12, 1e11, "measured", l2_bytes_per_s=2e12, vector_flops_per_s=10e12, sms=100)


@pytest.mark.parametrize(
    ("warps", "shared_bytes", "capability", "registers", "programs"),
    [
        (4, 45056, 90, 85, 5),  # 85 registers of 32 threads are 11 times 256; 227 + 1 KB hold five of 44 + 1
        (8, 49408, 90, 185, 1),  # 24 times 256 for each of 8 warps: 49152 of 65536
        (4, 0, 90, 239, 2),  # 30 times 256 for each of 4 warps
        (4, 81920, 80, 96, 2),  # 163 + 1 KB hold two of 80 + 1
        (4, 84000, 80, 96, 1),
        (1, 0, 86, 16, 16),  # slots
        (2, 1024, 86, 16, 16),
        (4, 0, 86, 16, 12),  # 48 warps
        (8, 0, 90, None, 1),  # not known: 255
        (4, 300000, 90, 32, 0),
    ],
)
def test_programs_that_an_sm_holds(warps, shared_bytes, capability, registers, programs) -> None:
    assert programs_per_sm(warps, shared_bytes, capability, registers) == programs


def test_bytes_arrive_in_the_latency_as_many_as_are_in_flight() -> None:
    work = Work(cache_bytes=1e9, cache_flops=5e9)
    assert work.cache_seconds(DEVICE) == 1e-3
    # Two programs with 4000 bytes on each of 100 SMs: 800 KB in 700 ns.
    enough = Residency(2, 4000, overlapped=True)
    assert enough.waiting_seconds(1e9, 100) == pytest.approx(1e9 / 8e5 * MEMORY_LATENCY_S)
    assert work.cache_seconds(DEVICE, enough) == 1e-3  # 0.875 ms of waiting are less
    half = dataclasses.replace(enough, flight_bytes=1750)
    assert work.cache_seconds(DEVICE, half) == pytest.approx(2e-3)
    assert work.share_of_floor(DEVICE, half) == pytest.approx(0.5)
    assert work.cache_seconds(dataclasses.replace(DEVICE, sms=None), half) == 1e-3  # not known
    assert work.serial_seconds(DEVICE, half) == pytest.approx(1e-3 + 5e-5 + 2e-3)


def test_a_program_that_waits_for_its_own_loads_computes_afterwards() -> None:
    work = Work(cache_bytes=1e9, cache_flops=50e9)  # 0.5 ms of products
    alone = Residency(1, 17500, overlapped=False)
    assert alone.waiting_seconds(1e9, 100) == pytest.approx(4e-4)
    assert work.cache_seconds(DEVICE, alone) == pytest.approx(1e-3)  # 0.4 + 0.5, less than the reading
    assert work.cache_seconds(DEVICE, dataclasses.replace(alone, flight_bytes=7000)) == pytest.approx(1e-3 + 5e-4)
    two = dataclasses.replace(alone, programs=2, flight_bytes=3500)  # one computes while the other waits
    assert work.cache_seconds(DEVICE, two) == pytest.approx(1e-3 + 2.5e-4)


def test_sides_that_are_waited_for_in_turn() -> None:
    turns = Residency.in_turn(2, [(64, 4096), (96, 6144)])  # both 64 keys: two waits for 160 bytes a key
    assert turns.flight_bytes == pytest.approx(64 * 160 / 2)
    assert not turns.overlapped
    assert Residency.in_turn(1, [(512, 8192), (0, 0)]).flight_bytes == 8192


def test_what_is_on_an_sm_before_anything_is_compiled() -> None:
    tiling = Tiling.of("post", 1, 4, 64, 64)
    assert (tiling.programs, tiling.ahead, tiling.keys) == (2, 2, 64)  # the grid has two; three stages
    assert tiling.residency(128, 128) == Residency(2, 2 * 64 * 256, True)
    narrow, wide = Tiling.of("pre", 1, 4, 32, 32), Tiling.of("pre", 8, 4, 256, 256)
    for found, keys, columns in ((narrow, 64, 0), (wide, 64, 64)):
        assert (found.keys, found.columns) == (keys, columns)
    if not narrow.ahead:
        assert narrow.residency(64, 64) == Residency(2, 4096, False)
    if not wide.ahead:
        # Of 64 keys 64 of 256 columns at a time, four waits, and their values whole, one: 1024 bytes a key.
        assert wide.residency(512, 512) == Residency(1, 64 * 1024 / 5, False)
    ragged = layer("none", 1, (64, 64), (64, 32))
    assert layer_residency(ragged, SHAPE, 2) == Residency(2, 2 * 64 * 2 * (64 + 48), True)


def launch(kind: str, layout: LayerLayout, **constants: object) -> Launch:
    return Launch(kind, constants, layout, SHAPE, 2)


def test_a_decode_kernel_does_what_the_cost_model_counts() -> None:
    whole = layer_work(POST, SHAPE, DecodeStep(1000, 3))
    work = kernel_work(launch("decode", POST, SCHEDULE="stream", TILE=64), Load(3, 1, 999), 100)
    assert work == dataclasses.replace(whole, weight_bytes=0.0, weight_flops=0.0)
    assert work.cache_bytes == 3 * 1000 * 2 * (32 + 48) * 2
    assert work.cache_flops + work.tile_flops == 3 * 1000 * 2 * 2 * 16 * (32 + 48)  # 16 rows a tile, 4 of them used


def test_a_combine_kernel_reads_partial_results_and_writes_the_output() -> None:
    work = kernel_work(launch("combine", POST), Load(3, 1, 999), 100)
    pieces = 200 + 6 - 1  # slices and units, two programs on each SM
    assert work.l2_bytes == pytest.approx(4 * pieces * 4 * (48 + 1))
    assert work.cache_bytes == 6 * 4 * (48 * 2 + 4)


PREFILL = {"QK": 32, "V": 48, "PRE": False, "HEADS": 1, "PACK": 4, "ROWS": 64, "TILE": 64, "SPLIT": 1}


def test_a_prefill_kernel_meets_the_keys_up_to_each_row_block() -> None:
    work = kernel_work(launch("prefill", POST, **PREFILL), Load(1, 32), 100)
    met = 16 + 32  # two row blocks of 16 queries with 4 heads each, in each of two groups
    least = 2 * 8 * (32 + 48) * (32 * 33 / 2)
    assert work.cache_flops == least
    assert work.cache_flops + work.tile_flops == 2 * met * 2 * 64 * (32 + 48)
    stored = 32 * 2 * (32 + 48) * 2
    assert work.cache_bytes == stored + 32 * 8 * (32 + 48) * 2
    assert work.l2_bytes == 2 * met * (32 + 48) * 2 - stored
    after = kernel_work(launch("prefill", POST, **PREFILL), Load(1, 32, past=1000), 100)
    assert after.cache_flops - least == 2 * 8 * (32 + 48) * 32 * 1000
    assert kernel_work(launch("prefill", POST, **PREFILL | {"SPLIT": 4}), Load(1, 32), 100) is None
    assert (
        kernel_work(launch("prefill", POST, **PREFILL | {"V": 64}), Load(1, 32), 100) == Work()
    )  # none of its classes


def test_a_prefill_kernel_before_rope_rebuilds_for_every_row_block_or_reads_what_was_rebuilt() -> None:
    constants = PREFILL | {"QK": 64, "PRE": True, "HEADS": 2}
    work = kernel_work(launch("prefill", PRE, **constants), Load(1, 32), 100)
    met = 16 + 32
    assert work.cache_flops == 2 * (2 * 4 * (64 + 48) * 528 + 2 * 64 * 64 * 32)
    assert work.cache_flops + work.tile_flops == 2 * met * (2 * 64 * (64 + 48) + 2 * 64 * 64)
    basis = 64 * 64 * 2 / 64  # of a key, read for each tile
    assert work.l2_bytes == 2 * met * ((64 + 48) * 2 + basis) - 32 * (64 + 48) * 2
    rebuilt = kernel_work(launch("prefill", PRE, **constants | {"PRE": False}), Load(1, 32), 100)
    assert rebuilt.cache_bytes == 32 * (2 * 64 + 48) * 2 + 32 * 8 * (64 + 48) * 2
    rebuilding = kernel_work(launch("rebuild", PRE), Load(1, 32), 100)
    assert rebuilding == Work(cache_bytes=32 * (64 + 2 * 64) * 2, cache_flops=32 * 2 * 2 * 64 * 64)


def test_small_kernels_read_and_write_their_rows() -> None:
    rotation = kernel_work(launch("rotation", POST), Load(5, 1, 99), 100)
    # Each of 4 heads and a key of both groups; bases of 64 x 32.
    assert rotation.cache_bytes == 2 * (5 * ((8 + 2) * 64 + (8 + 2) * 32) + 2 * 2 * 64 * 32)
    assert rotation.cache_flops == 2 * 5 * (8 + 2) * 64 * 32
    coded = LayerLayout("pre", True, (GroupLayout.coded((0, 1), Columns(n8=16, n4=32), Columns(n4=64)),))
    append = kernel_work(launch("append", coded), Load(5, 1, 99), 100)
    assert append.cache_bytes == 5 * ((48 + 64) * 2 + 32 + 32)
    packed = LayerLayout("post", False, (GroupLayout.coded((0, 1), Columns(n8=16, n4=32), Columns(n4=64)),))
    both = kernel_work(launch("rotation", packed), Load(5, 1, 99), 100)
    # Two times 8 query heads' latents of 48; keys of 48 come out as 32 bytes, values of 64 go in and come out as 32.
    assert both.cache_bytes == 2 * (5 * ((8 + 2) * 64 + 8 * 48 + 64) + 2 * 2 * 64 * 48) + 5 * (32 + 32)
    assert kernel_work(launch("assign", POST), Load(5, 1, 99), 100) is None


def test_plans_and_masks_read_ranges_and_a_byte_a_key() -> None:
    step, few = Load(3, 1, 99), Load(3, 16, 84)
    ranges = kernel_work(launch("ranges", POST, WORDS=False), step, 100)
    assert ranges == Work(cache_bytes=3 * (100 + 12))
    words = kernel_work(launch("words", POST, WORDS=True), Load(2, 32), 100)
    assert words == Work(cache_bytes=2 * 32 * (32 + 12) + 2 * 32 * 32 / 8)
    assert kernel_work(launch("tiles", POST), step, 100) == Work(cache_bytes=3 * 8 + 4 * 8)
    plan = kernel_work(launch("plan", POST, ROWS=64, PACK=4), few, 100)
    assert plan == Work(cache_bytes=3 * 16 * 8 + 200 * 12 + (3 + 1) * 4)  # a row block a sequence
    join = kernel_work(launch("join", POST, ROWS=64, PACK=4, V=48), few, 100)
    assert join.cache_bytes == 3 * 16 * 8 * (48 * 2 + 4)
    assert join.l2_bytes == pytest.approx(4 * 200 * 64 * (48 + 1))


def test_column_sums_are_one_product_of_all_pairs() -> None:
    constants = {"HEADS": 4, "ROW": 32, "CAUSAL": True, "MASK": False}
    work = kernel_work(launch("column", POST, **constants), Load(2, 32), 100)
    pairs = 2 * 32 * 33 / 2
    assert work.cache_flops == 2 * 32 * 8 * pairs
    assert work.cache_bytes == 2 * (2 * 64 * 32 * (4 + 1)) + 4 * 2 * 64 * (4 + 1)
    masked = kernel_work(launch("log", POST, **constants | {"CAUSAL": False, "MASK": True}), Load(2, 32), 100)
    assert masked.cache_flops == 2 * 32 * 8 * 2 * 32 * 32
    assert masked.cache_bytes == work.cache_bytes + 2 * 32 * 32
    rebuilt = kernel_work(launch("column", PRE, **constants | {"ROW": 64}), Load(2, 32), 100)
    assert rebuilt.cache_flops == 2 * work.cache_flops  # two KV heads of 64


def test_the_floor_of_a_kernel_says_what_limits_it() -> None:
    one = launch("decode", POST, SCHEDULE="stream", TILE=64)
    load = Load(8, 1, 9999)
    floor = predicted_floor([one, one], load, DEVICE, 5, {"key": 8192, "value": 12288})
    assert (floor.programs_per_sm, floor.flight_bytes, floor.launches) == (2, 2 * 20480, 2)
    memory = 8 * 10000 * 2 * 80 * 2
    assert floor.memory_bytes == 2 * memory
    assert floor.floor_seconds == pytest.approx(2 * memory / 1e12)
    assert (floor.limit, floor.share) == ("memory", pytest.approx(1.0))
    # Without copies that run ahead both sides wait in turn: 64 keys of 64 and of 96 bytes.
    waiting = predicted_floor([one], load, DEVICE, 5, {})
    assert compiled_residency(one, 2, {}) == Residency(2, 64 * 160 / 2, False)
    products = 8 * 10000 * 2 * 2 * 16 * 80 / 100e12
    seconds = memory / (2 * 5120 * 100) * MEMORY_LATENCY_S
    computing = max(products, memory / 2e12) / 2
    assert waiting.seconds == pytest.approx(max(memory / 1e12, seconds + computing))
    slow = predicted_floor([one], load, DEVICE, 1, {"key": 2048, "value": 2048})
    assert (slow.limit, slow.flight_bytes) == ("waiting", 4096)
    assert slow.share == pytest.approx(4096 * 100 / MEMORY_LATENCY_S / 1e12)
    assert predicted_floor([launch("assign", POST)], load, DEVICE, 5, {}) is None


def test_new_tokens_behind_cached_ones_meet_all_of_them() -> None:
    alone, after = prefill_work(POST, SHAPE, 4, 2), prefill_work(POST, SHAPE, 4, 2, past=100)
    assert alone.cache_bytes == 2 * 4 * 320
    assert after.cache_bytes == 2 * 104 * 320
    assert after.cache_flops - alone.cache_flops == 2 * 4 * 100 * 2 * 8 * 80


TTGIR = """\
module {
  tt.func public @k(%key: !tt.ptr<bf16>, %value: !tt.ptr<bf16>, %basis: !tt.ptr<bf16>) {
    %k0 = tt.addptr %key, %c
    %v0 = tt.addptr %value, %c
    %a = ttg.async_copy_global_to_local %k0, %m {contiguity = 8 : i32} : tensor<64x32x!tt.ptr<bf16>, #b> -> <64x32>
    %b = ttg.async_copy_global_to_local %v0, %m {contiguity = 4 : i32} : tensor<64x16x!tt.ptr<bf16>, #b> -> <64x16>
    %d = ttg.async_copy_global_to_local %k0, %m {contiguity = 8 : i32} : tensor<64x32x!tt.ptr<bf16>, #b> -> <64x32>
    %r:2 = scf.for %i = %l to %u step %s iter_args(%p = %k0, %q = %v0) -> (!tt.ptr<bf16>, !tt.ptr<bf16>) {
      %e = ttg.async_copy_global_to_local %p, %m {contiguity = 8 : i32} : tensor<64x32x!tt.ptr<bf16>, #b> -> <64x32>
      %f = ttg.async_copy_global_to_local %q, %m {contiguity = 8 : i32} : tensor<64x16x!tt.ptr<bf16>, #b> -> <64x16>
      %g = tt.addptr %basis, %c
      %n = ttg.async_copy_global_to_local %g, %m : tensor<16x16x!tt.ptr<bf16>, #b> -> <16x16>
      scf.for %j = %l to %u step %s {
        %h = ttg.async_copy_global_to_local %g, %m : tensor<16x16x!tt.ptr<bf16>, #b> -> <16x16>
      } loc(#loc1)
      scf.yield %p, %q
    } loc(#loc2)
    tt.return
  }
}
"""


def test_bytes_in_flight_are_read_from_what_the_compiler_copies_before_a_loop() -> None:
    ahead = pytest.importorskip("rotor.kernels.ahead", reason="triton is not installed")
    copies = ahead.async_copies(TTGIR)
    assert [(c.argument, c.tile_bytes) for c in copies[:3]] == [("key", 4096), ("value", 2048), ("key", 4096)]
    assert ahead.smallest_copies(copies) == {"key": 16, "value": 8, "basis": 2}
    assert ahead.bytes_in_flight(TTGIR, copies) == {"key": 8192, "value": 2048, "basis": 512}


def test_kernels_are_predicted_at_the_loads_that_they_are_launched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode kernel at its batch size, prompts for a prefill, few queries for one whose keys are split."""
    variants = {
        "decode post": {"SCHEDULE": "none", "TILE": 64},
        "prefill post": PREFILL,
        "few post": PREFILL | {"ROWS": 16},
        "rotation": {},
        "assign": {},
        "tiles of 64 keys": {},
        "plan 64/4 rows": {"ROWS": 64, "PACK": 4},
    }
    made = [(SimpleNamespace(name=name, constants=constants), [POST, POST]) for name, constants in variants.items()]
    checkpoint = SimpleNamespace(config=SimpleNamespace(dtype=torch.bfloat16), shape=SHAPE)
    monkeypatch.setattr(floors, "CompressedCheckpoint", lambda folder: checkpoint)
    monkeypatch.setattr(floors, "variants_of_layers", lambda folder, dtype, batch_sizes, arch: made)
    numbers = {"registers": 64, "shared_bytes": 8192, "flight_bytes": {"key": 4096, "value": 4096}}
    compiled = [
        Compiled(name, "sm_90", False, 4 if name.startswith("decode") else None, 0.0, constants, 4, **numbers)
        for name, constants in variants.items()
    ]
    loads = {"batch_sizes": (1, 3), "lengths": (100,), "prompts": (32,)}
    found = floors.with_floors(Path("x"), compiled, {"sm_90": DEVICE}, **loads)
    shown = {k.name: [(f.batch_size, f.new_tokens, f.past) for f in k.floors] for k in found}
    assert shown == {
        "decode post": [(3, 1, 99)],
        "prefill post": [(1, 32, 0)],
        "few post": [(1, 16, 84), (3, 16, 84)],
        "rotation": [(1, 1, 99), (3, 1, 99), (1, 32, 0)],
        "assign": [],
        "tiles of 64 keys": [(1, 1, 99), (3, 1, 99)],
        "plan 64/4 rows": [(1, 16, 84), (3, 16, 84)],
    }
    launches = {k.name: {f.launches for f in k.floors} for k in found}
    assert launches["decode post"] == {2}
    assert launches["tiles of 64 keys"] == launches["plan 64/4 rows"] == {1}  # for all layers
    assert all(not k.floors for k in floors.with_floors(Path("x"), compiled, {}, **loads))  # no device for sm_90
