"""The plain path on a CPU against the formulas in float64."""

from __future__ import annotations

import pytest
import torch
from support.kernel_cases import LAYERS, case_of, causal

from rotor.kernels.reference import attention
from rotor.kernels.rotary import when_read


@pytest.mark.parametrize(("seq_len", "softcap"), [(1, 2.0), (5, None)])
@pytest.mark.parametrize("name", LAYERS)
def test_masks_and_caps(name, seq_len, softcap) -> None:
    case = case_of(name, 2, seq_len, 90, softcap=softcap)
    allowed = causal(2, seq_len, 90, window=40).clone()
    allowed[1, :, 60:70] = False
    rotation = None if case.rotation is None else tuple(t[:90] for t in when_read(case.rotation, LAYERS[name].form))
    rows = case.key.unsqueeze(1), case.value.unsqueeze(1)
    got = attention(case.query, *rows, case.parameters, rotation, allowed[:, None])
    torch.testing.assert_close(got.double(), case.exact(allowed)[0], atol=3e-4, rtol=1e-4)


@pytest.mark.parametrize("name", LAYERS)
def test_no_queries(name) -> None:
    case = case_of(name, 2, 1, 90)
    query = case.query[:, :0] if case.query.dim() == 3 else case.query[:, :, :0]
    rotation = None if case.rotation is None else tuple(t[:90] for t in when_read(case.rotation, LAYERS[name].form))
    rows = case.key.unsqueeze(1), case.value.unsqueeze(1)
    for mask in (None, torch.ones(2, 1, 0, 90, dtype=torch.bool)):
        width = case.parameters.heads_per_group * LAYERS[name].value_width
        assert attention(query, *rows, case.parameters, rotation, mask).shape == (2, 0, width)
