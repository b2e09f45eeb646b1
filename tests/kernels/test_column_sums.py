"""Sums of attention's columns against float64: every form of keys, blocks of queries, masks, softmax."""

from __future__ import annotations

import pytest
import torch
from support.kernel_cases import FORMS, MIXED, CodedRow, NumberRow, causal, layer, random_case, shape_of

from rotor.checkpoint.layout import KeyForm
from rotor.kernels.reference.logits import products
from rotor.kernels.rotary import when_read
from rotor.policies import column_sums as sums

WIDE = CodedRow(n8=20, n4=60)
LAYOUTS = {
    "post": layer(FORMS["post"], 2, (MIXED, WIDE), (WIDE, MIXED)),
    "block": layer(FORMS["block"], 2, WIDE, MIXED),
    "numbers": layer(
        FORMS["pre"], 1, (NumberRow(16), NumberRow(8)), (NumberRow(16), NumberRow(8)), (NumberRow(8), NumberRow(8))
    ),
    "none": layer(KeyForm(), 2, (MIXED, WIDE)),
}


@pytest.mark.parametrize("tokens", [21, 600])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("name", LAYOUTS)
def test_sums_are_those_of_all_weights(name, softcap, tokens) -> None:
    """Of a few tokens, and of as many as are summed in blocks of queries."""
    layout = LAYOUTS[name]
    heads = layout.group_size * len(layout.groups)
    case = random_case(layout, shape_of(heads, 2, 24, 0 if name == "none" else 16), 2, tokens, tokens, softcap=softcap)
    rotation = None if case.rotation is None else tuple(t[:tokens] for t in when_read(case.rotation, layout.form))
    assert (2 * 2 * heads * tokens**2 > 2 * sums.BLOCK_ELEMENTS_CPU) == (tokens == 600)
    bias = torch.randn(2, len(layout.groups), tokens, generator=torch.Generator().manual_seed(1))
    counted = torch.arange(tokens).expand(2, -1) > torch.tensor([[-1], [4]])
    for score_softmax in (None, sums.ScoreSoftmax(bias, 1.5)):
        for mask in (None, causal(2, tokens, tokens)[:, None]):
            got = sums.column_sums(
                case.query, case.key.unsqueeze(1), case.parameters, rotation, mask, score_softmax, counted
            )
            expected = _all_weights(case, rotation, causal(2, tokens, tokens), score_softmax, counted)
            torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


def _all_weights(case, rotation, allowed, score_softmax, counted):
    found = []
    for cls in case.parameters.layout.classes(4):
        queries, keys, extra = products(case.query, case.key.unsqueeze(1), case.parameters, cls, rotation)
        logits = torch.einsum("bnmhsw,bnmlw->bnmhsl", queries.double(), keys.double())
        logits = (logits if extra is None else logits + extra) * case.parameters.scaling
        if case.parameters.softcap is not None:
            logits = case.parameters.softcap * torch.tanh(logits / case.parameters.softcap)
        if score_softmax is not None:
            bias = score_softmax.bias[:, cls.start : cls.start + cls.count, None, None, None]
            logits = (logits + bias) / score_softmax.temperature
        logits = logits.masked_fill(~allowed[:, None, None, None], -torch.inf)
        weights = logits.softmax(-1) * counted[:, None, None, None, :, None]
        found.append(weights.sum(4).flatten(2, 3).mean(2))
    return torch.cat(found, dim=1)
