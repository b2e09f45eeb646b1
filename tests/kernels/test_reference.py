"""The plain path on a CPU against the formulas in float64."""

from __future__ import annotations

import pytest
import torch
from support.kernel_cases import LAYERS, MIXED, case_of, causal, layer, random_case, shape_of
from torch.nn import functional

from rotor.checkpoint.layout import POST_ROPE, KeyForm
from rotor.checkpoint.rows import NumberRow
from rotor.kernels.reference.attention import attention
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


@pytest.mark.parametrize("block", [64, 128])
def test_attended_keys_begin_within_a_block(block: int) -> None:
    """Of so few queries that they are absorbed for each block."""
    of = layer(KeyForm(block), 1, MIXED)
    case = random_case(of, shape_of(1, 2, 24, 16), 2, 1, 300)
    allowed = causal(2, 1, 300, window=100)
    assert case.rotation is not None
    rotation = tuple(table[:300] for table in when_read(case.rotation, of.form))
    got = attention(case.query, case.key[:, None], case.value[:, None], case.parameters, rotation, allowed[:, None])
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


def test_prompts_meet_latents_of_numbers_at_one_width(monkeypatch) -> None:
    """All groups of a class in one call, keys and values alike, padded to a multiple of 8."""
    of, shapes = layer(POST_ROPE, 1, (NumberRow(20), NumberRow(13)), (NumberRow(20), NumberRow(13))), []
    case, attend = random_case(of, shape_of(2, 3, 24, 16), 2, 37, 37), functional.scaled_dot_product_attention

    def watched(query, key, value, **rest):
        shapes.append([tuple(side.shape[1:]) for side in (query, key, value)])
        return attend(query, key, value, **rest)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", watched)
    got = attention(case.query, case.key.unsqueeze(1), case.value.unsqueeze(1), case.parameters)
    torch.testing.assert_close(got.double(), case.exact(causal(2, 37, 37))[0], atol=3e-4, rtol=1e-4)
    assert shapes == [[(6, 37, 24), (2, 37, 24), (2, 37, 24)]]
