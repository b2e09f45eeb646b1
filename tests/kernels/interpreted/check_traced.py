"""The operators under torch.compile: one graph, and what the launches give."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.kernel_cases import (
    FORMS,
    MIXED,
    NumberRow,
    causal,
    exact_keys,
    layer,
    random_case,
    random_scale,
    shape_of,
    with_values,
)
from support.quick import mostly_nightly
from torch import library

from rotor.checkpoint.layout import ExactTokens, LayerLayout
from rotor.kernels import decoding, operators
from rotor.kernels.defaults import default_layer

CASES = {
    "codes": layer(FORMS["block"], 2, MIXED, MIXED),
    "numbers": layer(FORMS["long"], 1, (NumberRow(40), NumberRow(24)), (NumberRow(8), NumberRow(70))),
}


def tensors(layout: LayerLayout, shape, seq_len: int):
    generator = torch.Generator().manual_seed(0)
    key = torch.randn(2, seq_len, shape.num_kv_heads, shape.head_dim, generator=generator)
    query = torch.randn(2, seq_len, shape.num_heads, shape.head_dim, generator=generator)
    basis = torch.randn(layout.group_size * shape.head_dim, layout.key_rank, generator=generator)
    value = torch.randn(2, seq_len, layout.value_rank, generator=generator)
    shift = torch.randn(layout.key_rank, generator=generator) if layout.coded else None
    return query, key, value, basis, shift


@pytest.mark.parametrize("name", mostly_nightly(CASES, lambda name: name == "numbers"))
def test_a_layer_is_one_graph(name) -> None:
    layout = CASES[name]
    shape = shape_of(layout.group_size * len(layout.groups), 2, 16, 16, key_norm=True)
    kernels = default_layer(layout)
    text = operators.describe(layout, shape, kernels)
    assert operators.described(text) == (layout, shape, kernels)
    case = random_case(layout, shape, 2, 1, 50)
    query, key, value, basis, shift = tensors(layout, shape, 1)
    scale = random_scale(layout, torch.Generator().manual_seed(1))
    parameters = replace(case.parameters, key_basis=basis, key_shift=shift, scale=scale)
    mask, index = causal(2, 1, 50)[:, None].clone(), torch.tensor([50])
    rows = case.key.unsqueeze(1), case.value.unsqueeze(1)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def step(query, key, value, mask):
        query, *new = operators.append(parameters, text, query, key, value, case.rotation, index)[:3]
        output = operators.traced_attention(
            query, *rows, parameters, text, rotation=case.rotation, first=0, attention_mask=mask
        )
        return output, *new

    decoding._buffers.by_stream.clear()
    with torch.no_grad():
        got = torch.compile(step, fullgraph=True, backend=backend)(query, key, value, mask)
        launched = step(query, key, value, mask)
    assert not decoding._buffers.by_stream  # an operator's memory may be a CUDA graph's, which uses it again
    assert len(graphs) == 1
    for side, expected in zip(got, launched, strict=True):
        assert torch.equal(side, expected)


@pytest.mark.nightly
def test_fakes_say_what_the_operators_give() -> None:
    layout = CASES["codes"]
    shape = shape_of(4, 2, 16, 16, key_norm=True)
    text = operators.describe(layout, shape, default_layer(layout))
    case = random_case(layout, shape, 2, 1, 50)
    query, key, value, basis, shift = tensors(layout, shape, 1)
    p, checks = case.parameters, ("test_schema", "test_faketensor")
    scale = random_scale(layout, torch.Generator().manual_seed(1)) or (None, None, None)
    appended = (key, value, query, basis, shift, None, None, *scale, *case.rotation, torch.tensor([50]), text)
    library.opcheck(operators._append, appended, test_utils=checks)
    rows = case.key.unsqueeze(1), case.value.unsqueeze(1)
    attended = (
        case.query,
        *rows,
        None,
        p.query_basis,
        p.key_constant,
        *case.rotation,
        0,
        p.scaling,
        None,
        text,
        None,
        None,
        [],
    )
    library.opcheck(operators._attend, attended, test_utils=checks)


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_a_layer_with_exact_tokens_is_one_graph(name) -> None:
    layout = replace(CASES[name], exact=ExactTokens(4, 12))
    shape = shape_of(layout.group_size * len(layout.groups), 2, 16, 16, key_norm=True)
    text = operators.describe(layout, shape, default_layer(layout))
    case = with_values(random_case(layout, shape, 2, 1, 50))
    query, key, value, basis, shift = tensors(layout, shape, 1)
    value = torch.randn(key.shape, generator=torch.Generator().manual_seed(1))
    value_basis = torch.randn(layout.group_size * 16, layout.value_rank, generator=torch.Generator().manual_seed(2))
    scale = random_scale(layout, torch.Generator().manual_seed(1))
    parameters = replace(case.parameters, key_basis=basis, key_shift=shift, value_basis=value_basis, scale=scale)
    mask, index = causal(2, 1, 50)[:, None].clone(), torch.tensor([50])
    exact = exact_keys(case, [50, 50], [1, 1], [0, 0], 4, 12)
    rows, graphs = (case.key.unsqueeze(1), case.value.unsqueeze(1)), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def step(query, key, value, mask):
        made = operators.append(parameters, text, query, key, value, case.rotation, index)
        output = operators.traced_attention(
            made.query, *rows, parameters, text, rotation=case.rotation, first=0, attention_mask=mask, exact=exact
        )
        return output, made.key, made.value, made.exact_key, made.exact_value

    decoding._buffers.by_stream.clear()
    with torch.no_grad():
        got = torch.compile(step, fullgraph=True, backend=backend)(query, key, value, mask)
        launched = step(query, key, value, mask)
    assert not decoding._buffers.by_stream  # an operator's memory may be a CUDA graph's, which uses it again
    assert len(graphs) == 1
    assert got[0].shape == (2, 1, shape.num_heads * 16)
    for side, expected in zip(got, launched, strict=True):
        assert torch.equal(side, expected)
