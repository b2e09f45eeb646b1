"""What was launched once, launched again when lengths, masks and rows have changed: what a CUDA graph does.

Nothing but kernels may then stand between the inputs and the output, and nothing of the host's knowledge in their
arguments may depend on lengths.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from coded import MIXTURES, coded_layer, random_coded_case
from ragged import layer, random_case

from rotor.kernels import attention, masks  # noqa: F401
from rotor.kernels import launch as module
from rotor.kernels.launch import launch
from rotor.kernels.parameters import AttentionParameters

KV_LEN = 300


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The launches, with their arguments."""
    launches: list[tuple[Any, ...]] = []

    def record(*arguments: Any, **constants: Any) -> None:
        launches.append((arguments, constants))
        launch(*arguments, **constants)

    for name, loaded in list(sys.modules.items()):
        if name.startswith("rotor.kernels") and loaded is not module and getattr(loaded, "launch", None) is launch:
            monkeypatch.setattr(loaded, "launch", record)
    return launches


def of_lengths(*ends: int, seq_len: int) -> torch.Tensor:
    """The causal mask of sequences of these lengths in a static cache; the last one is padded on its left."""
    index, query = torch.arange(KV_LEN), torch.arange(seq_len)
    mask = index <= torch.tensor(ends)[:, None, None] - seq_len + query[:, None]
    mask[-1, :, :7] = False
    return mask.unsqueeze(1)


@pytest.mark.parametrize(
    ("domain", "coded", "seq_len"), [("none", False, 1), ("pre", True, 1), ("none", True, 3), ("pre", False, 3)]
)
def test_a_captured_step_replays_at_other_lengths(domain, coded, seq_len, recorded) -> None:
    cases: list[Any] = []
    for seed in (0, 1):
        if coded:
            layout = coded_layer(domain, 1, (MIXTURES[0], MIXTURES[4]))
            cases.append(random_coded_case(layout, 2, 32, 2, seq_len, KV_LEN, seed=seed))
        else:
            cases.append(random_case(layer(domain, 1, (16, 24)), 2, 32, 2, seq_len, KV_LEN, seed=seed))
    first, second = cases
    # What does not change from step to step.
    rotation = (first.floats if coded else first).key_rotation
    constant = first.constant_key if coded else None
    parameters = AttentionParameters(first.layout, 2, 0.2, first.query_basis, constant)
    inputs = [x.clone() for x in (first.query, first.key[:, None], first.value[:, None])]
    mask = of_lengths(290, 120, seq_len=seq_len)

    def attend(query: Any, key: Any, value: Any, mask: Any) -> torch.Tensor:
        keys = attention.ranges_of(mask, (2, seq_len, KV_LEN), mask.device)
        return attention.attend(query, key, value, parameters, 32, keys, rotation)

    with torch.inference_mode():
        output = attend(*inputs, mask)
        before, launches = output.clone(), list(recorded)
        assert len(launches) == 4
        changed = second.query, second.key[:, None], second.value[:, None], of_lengths(33, 299, seq_len=seq_len)
        expected = attend(*changed)
        for buffer, new in zip((*inputs, mask), changed, strict=True):
            buffer.copy_(new)
        for arguments, constants in launches:
            launch(*arguments, **constants)
    assert torch.equal(output, expected)
    assert not torch.equal(output, before)
