"""Attention of whole rows as decoding has it against the formulas in float64, query by query."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.kernel_cases import LAYERS, Case, case_of, causal
from torch import Tensor

from rotor.checkpoint.layout import ExactTokens
from rotor.kernels.reference.whole_rows import QUERY_BLOCK, decoded_attention
from rotor.kernels.rotary import when_read

ROTATED = [name for name in LAYERS if name != "no rope"]


def with_exact(case: Case, exact: ExactTokens) -> tuple[Case, tuple[Tensor, Tensor]]:
    """The case as a layer with exact tokens, and its tokens' keys and values."""
    p, generator = case.parameters, torch.Generator().manual_seed(5)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    layout, shape, (batch_size, seq_len) = p.layout, p.shape, case.key.shape[:2]
    basis = random(layout.group_size * shape.head_dim, layout.value_width) / 8
    constant = random(shape.num_kv_heads, shape.head_dim)
    layout = replace(layout, exact=exact)
    parameters = replace(p, layout=layout, output_basis=basis, value_constant=constant)
    size = batch_size, shape.num_kv_heads, seq_len, shape.head_dim
    return replace(case, parameters=parameters), (random(*size), random(*size))


def expected(case: Case, states: tuple[Tensor, Tensor], allowed: Tensor, exact: Tensor) -> Tensor:
    """One softmax over both kinds of keys, head by head, [batch_size, seq_len, heads * head_dim] in float64.

    Args:
        allowed, exact: [batch_size, seq_len, kv_len], what each query attends to, and what it reads exactly.
    """
    p = case.parameters
    of_kv, heads = p.shape.heads_per_kv, p.shape.num_heads
    latents, log_sums = case.exact(allowed & ~exact)
    outputs, start = [], 0
    for head in range(heads):
        group, within = divmod(head // of_kv, p.layout.group_size)
        before, width = sum(g.values.width for g in p.layout.groups[:group]), p.layout.groups[group].values.width
        basis = p.output_basis.unflatten(0, (p.layout.group_size, -1))[within][:, before : before + width].double()
        coded = latents[..., start : start + width] @ basis.T + p.value_constant[head // of_kv].double()
        start += width
        query, key, value = (x.double() for x in (case.query[:, head], *(s[:, head // of_kv] for s in states)))
        logits = query @ key.mT * p.scaling
        if p.softcap is not None:
            logits = p.softcap * torch.tanh(logits / p.softcap)
        logits = logits.masked_fill(~(allowed & exact), -torch.inf)
        both = torch.stack([log_sums[..., head], logits.logsumexp(-1)]).softmax(0).nan_to_num()
        outputs.append(both[0, ..., None] * coded + both[1, ..., None] * (logits.softmax(-1).nan_to_num() @ value))
    return torch.cat(outputs, dim=-1)


CASES = {
    "plain": {},
    "prompt": {"prompt": 40},
    "window": {"window": 30},
    "window shorter than the newest": {"window": 10, "prompt": 7},
    "padding": {"padding": (0, 13), "window": 50},
    "padding, prompt": {"padding": (0, 13), "prompt": 50},
    "soft cap": {"softcap": 2.0},
    "newest alone": {"exact": ExactTokens(0, 8)},
    "shorter than the newest": {"exact": ExactTokens(4, 128)},
}


@pytest.mark.parametrize("what", CASES)
@pytest.mark.parametrize("name", ROTATED)
def test_one_pass_is_decoding(name: str, what: str) -> None:
    given = {"prompt": 1, "window": None, "padding": (0, 0), "softcap": None, "exact": ExactTokens(3, 16)} | CASES[what]
    length, prompt, tokens = 90, given["prompt"], given["exact"]
    case, states = with_exact(case_of(name, 2, length, length, softcap=given["softcap"]), tokens)
    begin = torch.tensor(given["padding"])
    index = torch.arange(length)
    allowed = causal(2, length, length, given["window"]) & (index >= begin[:, None, None])
    masked = given["window"] is not None or any(given["padding"])
    age = index[:, None] - index
    exact = (age < tokens.newest) | (index - begin[:, None, None] < tokens.first) | (index < prompt)[:, None]
    rotation = None if case.rotation is None else tuple(t[:length] for t in when_read(case.rotation, LAYERS[name].form))
    rows = case.query, case.key.unsqueeze(1), case.value.unsqueeze(1), states, case.parameters, rotation
    got = decoded_attention(*rows, allowed[:, None] if masked else None, prompt=prompt, begin=begin)
    real = index >= begin[:, None]
    wanted = expected(case, states, allowed, exact)
    torch.testing.assert_close(got.double()[real], wanted[real], atol=3e-4, rtol=1e-4)


def test_blocks_of_queries_and_an_added_mask() -> None:
    """Rows of several blocks; a mask that is added to the logits is as good as one of bools."""
    length, tokens = 2 * QUERY_BLOCK + 30, ExactTokens(4, 100)
    case, states = with_exact(case_of("long", 1, length, length), tokens)
    allowed = causal(1, length, length)
    index = torch.arange(length)
    exact = (index[:, None] - index < tokens.newest) | (index < tokens.first)
    rotation = tuple(t[:length] for t in when_read(case.rotation, LAYERS["long"].form))
    rows = case.query, case.key.unsqueeze(1), case.value.unsqueeze(1), states, case.parameters, rotation
    wanted = expected(case, states, allowed, exact.expand(1, -1, -1))
    added = torch.zeros(1, 1, length, length).masked_fill(~allowed[:, None], torch.finfo(torch.float32).min)
    for mask in (None, added):
        torch.testing.assert_close(decoded_attention(*rows, mask).double(), wanted, atol=3e-4, rtol=1e-4)
