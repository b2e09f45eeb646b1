"""The plain path on a CPU against the formulas in float64."""

from __future__ import annotations

import pytest
import torch
from cases import FORMS, MIXED, Channels, Numbers, causal, layer, random_case, shape_of

from rotor.format.layout import KeyForm
from rotor.kernels.reference import attention
from rotor.kernels.rotary import when_read

WIDE = Channels(n8=20, n4=250)
CASES = {
    "post": layer(FORMS["post"], 2, MIXED, MIXED),
    "apart": layer(FORMS["block"], 1, (MIXED, WIDE), (MIXED, WIDE)),
    "fast": layer(FORMS["fast"], 2, WIDE, MIXED, MIXED),
    "pre": layer(FORMS["pre"], 4, MIXED),
    "numbers": layer(FORMS["long"], 2, (Numbers(40), Numbers(24)), (Numbers(8), Numbers(70))),
    "no rope": layer(KeyForm(), 2, (MIXED, WIDE), (MIXED, WIDE), (WIDE, MIXED)),
}


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("seq_len", [1, 5])
@pytest.mark.parametrize("name", CASES)
def test_masks_and_caps(name, seq_len, softcap) -> None:
    layout, size = CASES[name], CASES[name].group_size * len(CASES[name].groups)
    case = random_case(layout, shape_of(size, 3, 24, 0 if name == "no rope" else 16), 2, seq_len, 90, softcap=softcap)
    allowed = causal(2, seq_len, 90, window=40).clone()
    allowed[1, :, 60:70] = False
    rotation = None if case.rotation is None else tuple(t[:90] for t in when_read(case.rotation, layout.form))
    rows = case.key.unsqueeze(1), case.value.unsqueeze(1)
    got = attention(case.query, *rows, case.parameters, rotation, allowed[:, None])
    torch.testing.assert_close(got.double(), case.exact(allowed)[0], atol=3e-4, rtol=1e-4)
