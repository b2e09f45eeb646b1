"""Sums of attention's columns in float64, by loops, for the tests of PyTorch's path and of the kernel."""

from __future__ import annotations

from typing import Any

import torch
from ragged import RaggedCase
from torch import Tensor

from rotor.kernels.reference import rotate
from rotor.kernels.scores.column_sums import Softening, column_sums

TOLERANCE = 2e-5
"""Of the largest sum, in float32."""


def logits_of_heads(case: RaggedCase, sequence: int) -> list[Tensor]:
    """Unscaled logits [query heads of a group, seq_len, kv_len] of each group of one sequence, float64."""
    layout, found, first = case.layout, [], 0
    of_group = layout.group_size * case.heads_per_kv
    for index, (group, (offset, _)) in enumerate(zip(layout.groups, layout.offsets(), strict=True)):
        columns = slice(offset, offset + group.qk_rank)
        latents, heads = case.key[sequence, :, columns].double(), []
        for head in range(of_group):
            keys = latents
            if layout.domain == "none":
                queries = case.query[sequence, :, first : first + group.qk_rank].double()
                first += group.qk_rank
            else:
                assert case.query_basis is not None
                rows = slice(head // case.heads_per_kv * case.head_dim, (head // case.heads_per_kv + 1) * case.head_dim)
                basis = case.query_basis[rows, columns].double()
                queries = case.query[sequence, index * of_group + head].double()
                if layout.domain == "pre":
                    assert case.key_rotation is not None
                    keys = rotate(latents @ basis.T, *(table.double() for table in case.key_rotation))
                else:
                    queries = queries @ basis
            heads.append(queries @ keys.T)
        found.append(torch.stack(heads))
    return found


def true_sums(
    case: RaggedCase,
    mask: Tensor | None = None,
    softcap: float | None = None,
    softening: Softening | None = None,
    counted: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What `column_sums` gives, and the log-sum-exp of unsoftened logits [batch_size, seq_len, num_heads], float64.

    Args:
        mask: [batch_size, num_heads, seq_len, kv_len] bool, heads in the order of the layout; None is causal.
    """
    sums, log_sums = [], []
    for sequence in range(len(case.key)):
        groups, of_heads, first = [], [], 0
        for index, products in enumerate(logits_of_heads(case, sequence)):
            logits = products * case.scaling
            logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
            seen = torch.ones(logits.shape, dtype=torch.bool).tril()
            if mask is not None:
                seen = mask[sequence, first : first + len(logits)]
            first += len(logits)
            logits = logits.masked_fill(~seen, -torch.inf)
            of_heads += list(logits.logsumexp(-1))
            if softening is not None:
                assert softening.bias is not None
                bias = softening.bias[sequence, index % softening.bias.shape[1]].double()
                logits = (logits + bias) / softening.temperature
            weights = logits.softmax(-1).nan_to_num()
            if counted is not None:
                weights = weights * counted[sequence][None, :, None]
            groups.append(weights.sum(1).mean(0))
        sums.append(torch.stack(groups))
        log_sums.append(torch.stack(of_heads, dim=-1))
    return torch.stack(sums), torch.stack(log_sums)


def model_order(mask: Tensor, case: RaggedCase) -> Tensor:
    """A mask with heads in the order of the layout, with heads in the order of the model."""
    order = torch.tensor(case.layout.kv_head_order)[:, None] * case.heads_per_kv + torch.arange(case.heads_per_kv)
    result = torch.empty_like(mask)
    result[:, order.flatten()] = mask
    return result


def got_sums(case: RaggedCase, mask: Tensor | None = None, softcap: float | None = None, **more: Any) -> Tensor:
    given = None if mask is None else model_order(mask, case)
    parameters = case.parameters(softcap)
    return column_sums(case.query, case.key.unsqueeze(1), parameters, case.key_rotation, given, **more)


def check_sums(case: RaggedCase, every: bool = True) -> None:
    """Causal, masked, capped, softened, with and without attention's own log-sum-exp, and with padding left out.

    Args:
        every: all of the first four together; otherwise each once.
    """
    batch_size, kv_len = case.key.shape[:2]
    seq_len = case.query.shape[1 if case.query.dim() == 3 else 2]
    heads = len(case.layout.groups) * case.layout.group_size * case.heads_per_kv
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(batch_size, heads, seq_len, kv_len, generator=generator) < 0.6
    mask[0, :, 2] = False  # a query that attends to nothing
    counted = torch.rand(batch_size, seq_len, generator=generator) < 0.7
    bias = 2 * torch.randn(batch_size, len(case.layout.groups), kv_len, generator=generator)
    whole = [(given, softcap, known) for given in (None, mask) for softcap in (None, 1.5) for known in (True, False)]
    for given, softcap, known in whole if every else [(None, None, False), (mask, 1.5, True)]:
        expected, log_sums = true_sums(case, given, softcap)
        more = {"log_sums": log_sums.to(torch.float32)} if known else {}
        assert_close(got_sums(case, given, softcap, **more), expected, TOLERANCE)
        if given is None:
            assert_close(expected.sum(-1), torch.full_like(expected[..., 0], seq_len), 1e-9)
    for of_groups in (bias, bias[:, :1]) if every else (bias,):
        softening = Softening(of_groups, 1.7)
        expected, log_sums = true_sums(case, mask, None, softening, counted)
        got = got_sums(case, mask, softening=softening, counted=counted, log_sums=log_sums.float())
        assert_close(got, expected, TOLERANCE)


def assert_close(got: Tensor, expected: Tensor, tolerance: float) -> None:
    assert got.shape == expected.shape
    assert float((got.double() - expected).abs().max()) <= tolerance * float(expected.abs().max())
