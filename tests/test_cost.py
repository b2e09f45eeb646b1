"""Predicted decode time: bytes, counted instructions, devices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rotor.calibration.prediction import instructions
from rotor.calibration.prediction.cost import (
    DecodeStep,
    decode_seconds,
    layer_time,
    uncompressed_decode_seconds,
    uncompressed_layer_time,
)
from rotor.calibration.prediction.decode_times import best_group_size, decode_times, group_sizes, uniform_layout
from rotor.calibration.prediction.devices import bundled_devices, find_device
from rotor.calibration.prediction.instructions import (
    BLOCK,
    Counts,
    Specialisation,
    bundled_table,
    group_instructions,
    look_up,
)
from rotor.checkpoint.layout import POST_ROPE, AttentionShape, GroupLayout, KeyForm, LayerForm, LayerLayout, pre_rope
from rotor.checkpoint.rows import CodedRow, NumberRow, Parted
from rotor.errors import RecipeError

LLAMA = AttentionShape(num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, hidden_size=4096, rotary_dim=128)
STEP = DecodeStep(context_tokens=32768, batch_size=8)
H200 = find_device("h200")
BLOCKS = KeyForm(64)
JOINT = LayerForm(BLOCKS, 1, joint=True)


def joint(places: int, heads: int = 1, form: KeyForm = BLOCKS) -> LayerLayout:
    """Rows of so many nibbles, 16 of them of the fast planes of each head."""
    fast = (CodedRow(n4=16),) * heads if form.fast_planes else ()
    row = Parted(CodedRow(n4=places - 16 * len(fast) - 1), fast)
    groups = (GroupLayout(tuple(range(i, i + heads)), row, None) for i in range(0, 8, heads))
    return LayerLayout(tuple(groups), *form)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> dict[Specialisation, Counts]:
    """A key costs as many instructions as its width for 8 rows, twice that with values apart, and those of planes."""

    def counts(of: Specialisation) -> Counts:
        apart, short = 1 if of.kind == "joint" else 2, BLOCK / of.rope_block
        rebuilt = of.fast_planes * of.kv_heads * of.width / 64
        return Counts(of.width * apart * of.rows / 8 * short + rebuilt, 3.0 * of.rows / 8)

    found = {of: counts(of) for of in bundled_table()}
    monkeypatch.setattr(instructions, "bundled_table", lambda: found)
    group_instructions.cache_clear()
    yield found
    group_instructions.cache_clear()


def test_the_uncompressed_layer_takes_its_bytes() -> None:
    """The design's 224 us, which are 112 instructions a key and KV head at 4 a cycle and SM, 42 at 1.5."""
    time = uncompressed_layer_time(LLAMA, H200, STEP)
    assert time.attention_s == pytest.approx(223.7e-6, rel=1e-3)
    a_key = STEP.keys * 8
    assert H200.issue_seconds(42 * a_key) == pytest.approx(time.attention_s, rel=0.01)
    assert replace(H200, instructions_per_cycle=4.0).issue_seconds(112 * a_key) == pytest.approx(224e-6, rel=0.01)
    weights = 2 * (32 + 8) * 128 * 4096 * 2
    assert time.projection_bytes == weights
    assert time.seconds == time.attention_s + weights / 4.8e12
    assert uncompressed_decode_seconds(LLAMA, H200, STEP) == 32 * time.seconds


def test_the_longer_of_reading_and_issuing(table) -> None:
    layout = joint(64)
    time = layer_time(layout, LLAMA, H200, STEP)
    absorbed = 2 * 4 * 64 * 2 / 64  # of four query heads, written and read, once a block
    assert time.cache_bytes == STEP.keys * 8 * (32 + absorbed)
    assert time.instructions == STEP.keys * 8 * (64 + 1.5)
    assert time.attention_s == H200.issue_seconds(time.instructions) > H200.read_seconds(time.cache_bytes)
    unknown = replace(H200, sms=None)
    assert layer_time(layout, LLAMA, unknown, STEP).attention_s == H200.read_seconds(time.cache_bytes)
    assert decode_seconds([layout] * 32, LLAMA, H200, STEP) == pytest.approx(32 * time.seconds)


def test_keys_that_are_rebuilt_in_memory_are_written_and_read(table) -> None:
    time = layer_time(joint(256, 4, pre_rope(LLAMA)), LLAMA, H200, STEP)
    assert time.instructions == 0
    assert time.cache_bytes == STEP.keys * (2 * 128 + 2 * 8 * 2 * 128 * 2)


def test_instructions_by_what_kernels_are_compiled_for(table) -> None:
    def of(layout: LayerLayout, shape: AttentionShape = LLAMA) -> float:
        return group_instructions(layout, layout.groups[0], shape)

    assert of(joint(64)) == 64 + 1.5  # 8 rows for 4 query heads, of which 4 are absorbed
    assert of(joint(80)) == of(joint(128)) == 128 + 1.5  # padded
    assert of(joint(1024)) == 1024 + 3  # as two of the widest
    assert of(joint(64, 8)) == 4 * 64 + 12  # 32 rows
    assert of(joint(64), replace(LLAMA, num_heads=8 * 64)) == 8 * 64 + 24  # as two of the most rows
    assert of(joint(64, form=KeyForm(16))) == 4 * 64 + 4 * 1.5  # four blocks for one
    assert of(joint(64, form=KeyForm(8))) == 8 * 64 + 8 * 1.5
    assert of(joint(64), replace(LLAMA, head_dim=64, rotary_dim=64)) == pytest.approx(64 + 0.7 * 1.5)
    assert of(joint(64, form=KeyForm(64))) == 64 + 16 + 1.5
    assert of(joint(64, form=KeyForm(64))) == 64 + 32 + 1.5  # padded
    apart = LayerLayout((GroupLayout((0,), CodedRow(n4=64), CodedRow(n4=128)),))
    assert of(apart) == 64 + 128 + 1.5  # the mean of both
    without_rope = replace(LLAMA, rotary_dim=0)
    assert of(LayerLayout((GroupLayout((0,), NumberRow(64), NumberRow(64)),)), without_rope) == 128


def test_what_the_table_does_not_have_follows_from_what_it_has(table) -> None:
    assert look_up(table, Specialisation("joint", 64, 16, 16, 3)).decode == pytest.approx(2 * 64 + 48)
    assert look_up(table, Specialisation("joint", 512, 32, 16, 8)).decode == pytest.approx(4 * 512 + 16 * 8 * 8)
    assert look_up(table, Specialisation("apart", 64, 8, 16, 1)).decode == 128 + 16
    assert look_up(table, Specialisation("apart", 512, 32)).decode == 4 * 1024
    assert look_up(table, Specialisation("joint", 64, 8, 0, 4)) == table["joint", 64, 8, 0, 1, 64, 0]


def test_the_bundled_table_is_whole() -> None:
    found = bundled_table()
    for of, counts in found.items():
        assert counts.decode > 0, of
        wider = of._replace(width=2 * of.width)
        assert wider not in found or found[wider].decode > counts.decode, of


def test_sizes_of_groups_by_time(table) -> None:
    assert group_sizes(LLAMA) == [1, 2, 4, 8]
    assert best_group_size(LLAMA, JOINT, True, H200, STEP) == 1  # all alike in attention; o_proj grows
    slow = replace(H200, bandwidth_bytes_per_s=1e10)  # where bytes decide, and absorbed queries with them
    assert best_group_size(LLAMA, JOINT, True, slow, STEP) == 2
    assert best_group_size(replace(LLAMA, num_heads=8), JOINT, True, slow, STEP) == 8
    layout = uniform_layout(LLAMA, JOINT, 0.125, True)
    assert layout.groups[0].key == Parted(CodedRow(n4=127))
    fast = uniform_layout(LLAMA, LayerForm(KeyForm(64), 2, joint=True), 0.125, True).groups[0].key
    assert fast == Parted(CodedRow(n4=191), (CodedRow(n4=32),) * 2)
    assert uniform_layout(LLAMA, LayerForm(POST_ROPE, 2), 0.5, False).groups[3].value == NumberRow(128)


def test_sizes_that_the_bundled_counts_give() -> None:
    """Two heads of an 8B with 8 KV heads and Llama 3's RoPE base, all three of SmolLM2-135M."""
    smollm2 = AttentionShape(30, 9, 3, 64, 576, rotary_dim=64)
    assert best_group_size(LLAMA, LayerForm(KeyForm(64), 1, joint=True), True, H200, STEP) == 2
    assert best_group_size(smollm2, LayerForm(KeyForm(64), 1, joint=True), True, H200, STEP) == 3


def test_times_of_an_8b(table) -> None:
    times = {(t.candidate, t.scenario): t for t in decode_times(LLAMA, H200, STEP)}
    found = times["joint, blocks of 64, 16 fast planes, 1 head", "0.875"]
    assert found.instructions_per_key == 128 + 32 + 1.5
    assert found.kv_bytes_per_token == 32 * 8 * 64
    assert found.share == pytest.approx(161.5 / 42, rel=0.01)
    assert times["joint, pre-RoPE, 8 heads", "0.94"].instructions_per_key == 0
    without = AttentionShape(12, 12, 12, 64, 768)
    assert {t.candidate.partition(",")[0] for t in decode_times(without, H200, STEP)} == {"joint", "apart"}


def test_bundled_devices_are_from_data_sheets() -> None:
    devices = bundled_devices()
    assert set(devices) == {"a100-80g", "h100-sxm", "h200", "b200", "l40s", "rtx-4090", "mi300x"}
    assert {device.source for device in devices.values()} == {"data-sheet"}
    h200 = devices["h200"]
    assert h200.bandwidth_bytes_per_s == 4.8e12
    assert (h200.sms, h200.clock_hz, h200.instructions_per_cycle) == (132, 1.98e9, 1.5)
    assert devices["mi300x"].issue_seconds(1e12) == 0


def test_an_unknown_device_names_the_nearest_and_lists_all() -> None:
    with pytest.raises(RecipeError, match="device 'h20' is not known; did you mean 'h200'") as error:
        find_device("h20")
    assert "rtx-4090" in error.value.hint
    assert error.value.exit_code == 2
