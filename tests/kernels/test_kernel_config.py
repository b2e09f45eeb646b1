"""kernel_config.json: what is written, what may be edited, and what is refused by name."""

from __future__ import annotations

import json

import pytest
from support.kernel_cases import FORMS, MIXED, CodedRow, NumberRow, layer

from rotor.checkpoint.kernel_config import KernelConfig, layout_class
from rotor.errors import CheckpointError
from rotor.kernels.dispatch import default_config, default_layer

LAYOUTS = [
    layer(FORMS["long"], 2, MIXED, CodedRow(n4=128)),
    layer(FORMS["post"], 1, (NumberRow(40), NumberRow(24))),
    layer(FORMS["block"], 1, (MIXED, CodedRow(n4=16))),
]


def written() -> dict:
    return json.loads(json.dumps(default_config(LAYOUTS).to_dict()))


def test_what_is_written_is_read_again() -> None:
    config = KernelConfig.from_dict(written())
    assert config == default_config(LAYOUTS)
    config.check(LAYOUTS)
    assert [layout_class(layout) for layout in LAYOUTS] == [
        "joint 64x2 (1), 144x2 (1), T 64, split 1", "numbers 40+24x1", "apart 64+16x1, T 16, split 1"
    ]  # fmt: skip


def test_edits_that_can_be_served_are_consumed() -> None:
    data = written()
    data["layers"][0] |= {"slices_per_sm": 3, "materialise": True, "sm_80": {"keys": 16, "warps": 4, "stages": 1}}
    config = KernelConfig.from_dict(data)
    config.check(LAYOUTS)
    first = config.layers[0]
    assert (first.slices_per_sm, first.materialise, first.tile(86).warps) == (3, True, 4)
    assert first.tile(90) == first.tile(120) == default_layer(LAYOUTS[0]).sm_90


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("slices_per_sm", 0, r"layers\[0\].slices_per_sm: got 0, expected a whole number from 1 to 64"),
        ("sm_90", {"keys": 48, "warps": 1, "stages": 1}, r"sm_90.keys: got 48, expected one of 16, 32, 64, 128"),
        ("schedule", "lpt", "schedule"),
    ],
)
def test_nonsense_is_refused_by_name(field, value, message) -> None:
    data = written()
    data["layers"][0][field] = value
    with pytest.raises(CheckpointError, match=message):
        KernelConfig.from_dict(data)


def test_the_file_of_another_model_is_refused() -> None:
    with pytest.raises(CheckpointError, match="expected 2, as in config"):
        default_config(LAYOUTS).check(LAYOUTS[:2])
    with pytest.raises(CheckpointError, match=r"layers\[0\].layout: .* expected the layer of config.json, 'apart"):
        default_config(LAYOUTS).check(LAYOUTS[::-1])
    with pytest.raises(CheckpointError, match="version: got 3, expected 4"):
        KernelConfig.from_dict(written() | {"version": 3})
