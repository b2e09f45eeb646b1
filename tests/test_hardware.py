"""The dtype of forward passes, by the model, the CPU and what is computed."""

from __future__ import annotations

import pytest
import torch

from rotor.models.hardware import DevicePlan
from rotor.options import DeviceOptions


@pytest.mark.parametrize(
    ("checkpoint", "instructions", "averaged", "expected"),
    [
        (torch.bfloat16, ("avx512_bf16",), True, torch.bfloat16),
        (torch.bfloat16, ("sve_bf16",), True, torch.bfloat16),
        (torch.bfloat16, ("avx512_bf16",), False, torch.float32),
        (torch.bfloat16, ("avx2",), True, torch.float32),
        (torch.float16, ("avx512_bf16",), True, torch.float32),
        (torch.float32, ("avx512_bf16",), True, torch.float32),
    ],
)
def test_bfloat16_where_means_are_computed_and_the_cpu_multiplies_it(
    checkpoint: torch.dtype, instructions: tuple[str, ...], averaged: bool, expected: torch.dtype, monkeypatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(instructions, True))
    on_cpu = DeviceOptions(device="cpu")
    assert DevicePlan.choose(on_cpu, checkpoint, averaged=averaged).dtype == expected
    named = DeviceOptions(device="cpu", dtype="float16")
    assert DevicePlan.choose(named, checkpoint, averaged=averaged).dtype == torch.float16
