"""Layers that share a workspace, whatever the one before left in it, find what they find in memory of their own."""

from __future__ import annotations

import pytest
import torch
from coded import MIXTURES, coded_layer, random_coded_case
from ragged import layer, random_case

from rotor.kernels import attention
from rotor.kernels.parameters import AttentionParameters
from rotor.kernels.workspace import workspace_on


@pytest.mark.parametrize("new_tokens", [1, 4])
@pytest.mark.parametrize("domain", ["none", "pre"])
def test_layers_of_a_step_share_memory_and_nothing_in_it(domain, new_tokens) -> None:
    """Of a step of decoding, and of a few queries whose keys are split."""
    wide, narrow = layer(domain, 2, (48, 56), (16, 24)), layer(domain, 2, (16, 8))
    batch_size, kv_len = (3, 70) if new_tokens == 1 else (1, 270)
    cases = [
        random_case(layout, 2, 32, batch_size, new_tokens, kv_len, seed=seed)
        for seed, layout in enumerate((narrow, wide, narrow))
    ]
    mask = torch.ones(batch_size, 1, new_tokens, kv_len, dtype=torch.bool)
    outputs = []
    with torch.inference_mode():
        for index, case in enumerate(cases):
            given = case.query, case.key[:, None], case.value[:, None], case.parameters(), 32
            keys = attention.ranges_of(mask, (batch_size, new_tokens, kv_len), case.key.device)
            shared = attention.packed_attention(*given, case.key_rotation, attention_mask=mask, layer_idx=index)
            own = attention.attend(*given, keys, case.key_rotation)
            assert torch.equal(shared, own)
            outputs.append((shared, own))
            workspace = workspace_on(case.key.device)
            assert workspace is not None
            assert workspace._memory is not None
            assert not workspace._memory.isnan().all()  # it was used
            workspace._memory.fill_(torch.nan)
    assert all(torch.equal(shared, own) for shared, own in outputs)  # no later layer wrote into them


def test_rows_of_codes_share_it_too() -> None:
    layout = coded_layer("pre", 2, (MIXTURES[0], MIXTURES[4]))
    case = random_coded_case(layout, 2, 32, 2, 1, 40)
    parameters = AttentionParameters(layout, 2, 0.2, case.query_basis, case.constant_key)
    given = case.query, case.key[:, None], case.value[:, None], parameters, 32
    with torch.inference_mode():
        shared = attention.packed_attention(*given, case.floats.key_rotation)
        keys = attention.ranges_of(None, (2, 1, 40), case.key.device)
        assert torch.equal(shared, attention.attend(*given, keys, case.floats.key_rotation))
