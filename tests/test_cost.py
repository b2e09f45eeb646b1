"""Predicted decode time: bytes, counted instructions, devices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rotor.calibration.form import best_group_size, group_sizes
from rotor.calibration.prediction.cost import (
    DecodeStep,
    decode_seconds,
    layer_time,
    uncompressed_decode_seconds,
    uncompressed_layer_time,
)
from rotor.calibration.prediction.decode_times import decode_times, too_wide, uniform_layout
from rotor.calibration.prediction.devices import bundled_devices, find_device
from rotor.calibration.prediction.instructions import ABSORBING, DECODING, MORE_ROWS, SPLIT_LANE, group_instructions
from rotor.checkpoint.layout import POST_ROPE, PRE_ROPE, AttentionShape, GroupLayout, KeyForm, LayerForm, LayerLayout
from rotor.checkpoint.rows import CodedRow, NumberRow
from rotor.errors import RecipeError

LLAMA = AttentionShape(num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, hidden_size=4096, rotary_dim=128)
STEP = DecodeStep(context_tokens=32768, batch_size=8)
H200 = find_device("h200")
BLOCKS = KeyForm(64)
JOINT = LayerForm(BLOCKS, 1, joint=True)


def joint(places: int, heads: int = 1, form: KeyForm = BLOCKS) -> LayerLayout:
    """Rows of so many nibbles."""
    row = CodedRow(n4=places - 1, scaled=True)
    groups = (GroupLayout(tuple(range(i, i + heads)), row) for i in range(0, 8, heads))
    return LayerLayout(tuple(groups), *form)


def test_rows_of_too_many_heads_are_named() -> None:
    """128 nibbles a head for four heads of an 8B are, 256 for two are not; a tenth of the time is what tells."""
    times = decode_times(LLAMA, H200, STEP)
    share = {(t.candidate, t.scenario): t.share for t in times}
    wide = too_wide(times)
    four, two = (f"joint, blocks of 64, {n} heads" for n in (4, 2))
    assert wide[four] == ["0.75", "0.875"]
    assert share[four, "0.94"] > share[two, "0.94"] > 0.9 * share[four, "0.94"]
    assert share[two, "0.875"] < 0.9 * share[four, "0.875"]
    assert two not in wide
    assert not any(name.endswith("1 head") for name in wide)


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


def test_the_longer_of_reading_and_issuing() -> None:
    layout = joint(64)
    time = layer_time(layout, LLAMA, H200, STEP)
    absorbed = 2 * 4 * 64 * 2 / 64  # of four query heads, written and read, once a block
    assert time.cache_bytes == STEP.keys * 8 * (32 + absorbed)
    assert time.instructions == pytest.approx(STEP.keys * 8 * (DECODING[64] + 4 * ABSORBING[64]))
    assert time.attention_s == H200.issue_seconds(time.instructions) > H200.read_seconds(time.cache_bytes)
    unknown = replace(H200, sms=None)
    assert layer_time(layout, LLAMA, unknown, STEP).attention_s == H200.read_seconds(time.cache_bytes)
    assert decode_seconds([layout] * 32, LLAMA, H200, STEP) == pytest.approx(32 * time.seconds)


def test_keys_before_rope_are_written_and_read() -> None:
    time = layer_time(joint(256, 4, PRE_ROPE), LLAMA, H200, STEP)
    assert time.instructions == 0
    assert time.cache_bytes == STEP.keys * (2 * 128 + 2 * 8 * 2 * 128 * 2)


def test_instructions_by_width_and_query_rows() -> None:
    def of(layout: LayerLayout, shape: AttentionShape = LLAMA) -> float:
        return group_instructions(layout, layout.groups[0], shape)

    assert of(joint(80)) == of(joint(128)) == pytest.approx(DECODING[128] + 4 * ABSORBING[128])
    assert of(joint(1024)) == pytest.approx(2 * (DECODING[512] + 4 * ABSORBING[512]))  # as two of the widest
    assert of(joint(64, 8)) == pytest.approx(DECODING[64] * (1 + 3 * MORE_ROWS) + 32 * ABSORBING[64])  # 32 query rows
    assert of(joint(64, form=KeyForm(16))) == pytest.approx(DECODING[64] + 4 * 4 * ABSORBING[64])  # four blocks for one
    apart = LayerLayout((GroupLayout((0,), CodedRow(n4=64), CodedRow(n4=128)),))
    assert of(apart) == pytest.approx((DECODING[64] + DECODING[128]) / 2)
    split = LayerLayout((GroupLayout((0,), CodedRow(n4=64, split=1), CodedRow(n4=64)),))
    assert of(split) == pytest.approx(DECODING[64] * (1 + SPLIT_LANE))
    assert of(LayerLayout((GroupLayout((0,), NumberRow(64), NumberRow(64)),))) == DECODING[64]


def test_sizes_of_groups() -> None:
    """Two heads of an 8B, all three of SmolLM2-135M, both of Qwen2.5-0.5B, one of 256."""
    assert group_sizes(LLAMA) == [1, 2, 4, 8]
    assert best_group_size(LLAMA) == 2
    assert best_group_size(AttentionShape(30, 9, 3, 64, 576, rotary_dim=64)) == 3
    assert best_group_size(AttentionShape(24, 14, 2, 64, 896, rotary_dim=64)) == 2
    assert best_group_size(AttentionShape(26, 8, 4, 256, 2304, rotary_dim=256)) == 1
    assert best_group_size(AttentionShape(32, 8, 8, 512, 4096, rotary_dim=512)) == 1


def test_uniform_layouts() -> None:
    assert uniform_layout(LLAMA, JOINT, 0.125, True).groups[0].key == CodedRow(n4=127, scaled=True)
    assert uniform_layout(LLAMA, LayerForm(POST_ROPE, 2), 0.5, False).groups[3].value == NumberRow(128)


def test_times_of_an_8b() -> None:
    times = {(t.candidate, t.scenario): t for t in decode_times(LLAMA, H200, STEP)}
    found = times["joint, blocks of 64, 1 head", "0.875"]
    assert found.instructions_per_key == pytest.approx(DECODING[128] + 4 * ABSORBING[128])
    assert found.kv_bytes_per_token == 32 * 8 * 64
    assert found.share == pytest.approx(found.instructions_per_key / 42, rel=0.01)
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
