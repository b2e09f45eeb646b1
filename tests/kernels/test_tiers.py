"""Tiers: which tokens are important, what is cut of the others, and attention to both against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support import kernel_truth as truth
from support.kernel_cases import FORMS, MIXED, CodedRow, NumberRow, layer, random_case, shape_of
from torch import Tensor

from rotor.checkpoint.layout import GroupLayout, KeyForm, LayerLayout
from rotor.kernels.rotary import when_read
from rotor.policies import Tiers
from rotor.policies.methods.tiers import TieredLayer, cut_latent, cut_layout

LOW, HIGH = 1, 2
HPK, HEAD_DIM, TOKENS, PADS = 2, 24, 26, (5, 0)
STEPS = [12, *[1] * 6, 3, *[1] * 5]
WIDE = CodedRow(n8=20, n4=60)
LAYOUTS = {
    "post": layer(
        FORMS["post"], 1, (NumberRow(16), NumberRow(8)), (NumberRow(8), NumberRow(8)), (NumberRow(8), NumberRow(6))
    ),
    "pre": layer(FORMS["pre"], 2, (NumberRow(24), NumberRow(12)), (NumberRow(10), NumberRow(12))),
    "none": layer(KeyForm(), 2, (NumberRow(12), NumberRow(8)), (NumberRow(12), NumberRow(8))),
    "codes": layer(FORMS["block"], 2, (MIXED, WIDE), (WIDE, MIXED)),
    "codes after RoPE": layer(FORMS["post"], 2, (MIXED, WIDE), (WIDE, MIXED)),
    "codes joint": layer(FORMS["pre"], 2, WIDE, MIXED),
    "codes without RoPE": layer(KeyForm(), 1, (MIXED, WIDE), (WIDE, WIDE)),
}
POLICIES = [
    Tiers(important=0.4, qk_unimportant=0.5, v_unimportant=0.25),
    Tiers(important=0.3, qk_important=0.2, qk_unimportant=0.7, v_important=0.1, v_unimportant=0.6),
    Tiers(important=0.0, qk_unimportant=0.4, v_unimportant=0.4),
    Tiers(important=1.0),
]
EVERY = [(kind, (i + more) % len(POLICIES)) for i, kind in enumerate(LAYOUTS) for more in (0, 1)]
QUICK = {(kind, i % len(POLICIES)) for i, kind in enumerate(LAYOUTS)}
CASES = [pytest.param(kind, POLICIES[i], marks=() if (kind, i) in QUICK else pytest.mark.nightly) for kind, i in EVERY]


class Case:
    """A layer's rows and queries over a whole sequence."""

    def __init__(self, kind: str) -> None:
        self.layout = layout = LAYOUTS[kind]
        heads = layout.group_size * len(layout.groups)
        case = random_case(layout, shape_of(heads, HPK, HEAD_DIM, 0 if "out" in kind or kind == "none" else 16), 2,
                           TOKENS, TOKENS)  # fmt: skip
        self.rotation, self.key, self.value, self.query = case.rotation, case.key, case.value, case.query
        # After RoPE constant keys change no weight, and are left out of log-sum-exps.
        constant = case.parameters.key_constant if layout.in_blocks else None
        self.parameters = replace(case.parameters, key_constant=constant)
        real = torch.arange(TOKENS) >= torch.tensor(PADS)[:, None]
        self.mask = (torch.ones(TOKENS, TOKENS).tril().bool() & real[:, None])[:, None]

    def queries(self, tokens: slice) -> Tensor:
        return self.query[:, tokens] if self.query.dim() == 3 else self.query[:, :, tokens]

    def tables(self, end: int) -> Any:
        if self.rotation is None:
            return None
        return tuple(table[:end] for table in when_read(self.rotation, self.layout.form))

    def expected(self, policy: Tiers, tokens: slice, tiers: np.ndarray) -> tuple[Tensor, Tensor]:
        """Attention to whole rows of numbers, zero where a token's tier has none; tiers [rows, tokens so far]."""
        sides = []
        for keys in (True, False):
            rows = self.key if keys or self.layout.joint else self.value
            of_tier = [self._numbers(rows[:, : tokens.stop], keys, cut) for cut in policy.layouts(self.layout)]
            marks = [torch.tensor(tiers == tier)[..., None] for tier in (HIGH, LOW)]
            sides.append(sum(numbers * mark for numbers, mark in zip(of_tier, marks, strict=True)))
        groups = tuple(
            GroupLayout(g.kv_heads, NumberRow(g.key.width), NumberRow(g.values.width)) for g in self.layout.groups
        )
        parameters = replace(self.parameters, layout=replace(self.layout, groups=groups))
        mask = self.mask[:, 0, tokens, : tokens.stop]
        return truth.attention(self.queries(tokens), *sides, parameters, mask, self.rotation)

    def _numbers(self, rows: Tensor, keys: bool, cut: LayerLayout) -> Tensor:
        """Numbers read of rows whose channels behind those of `cut` are codes in the middle, or zeros."""
        found = []
        for group, part, starts in zip(self.layout.groups, cut.groups, self.layout.byte_offsets(4), strict=True):
            whole, kept, first = (group.key, part.key, starts[0]) if keys else (group.values, part.values, starts[1])
            if isinstance(whole, CodedRow):
                own = rows[..., first : first + whole.row_bytes()]
                if cut != self.layout:
                    codes, scale = whole.unpack_codes(own)
                    codes[..., kept.rank :] = torch.tensor([2 ** (bits - 1) for bits in whole.bits[kept.rank :]])
                    own = whole.pack_codes(codes, scale)
                found.append(whole.unpack(own, torch.float64))
            else:
                own = rows[..., first // 4 : first // 4 + whole.rank].double()
                found.append(own * (torch.arange(whole.rank) < kept.rank))
        return torch.cat(found, dim=-1)


def settle(policy: Tiers, tiers: np.ndarray, scores: np.ndarray) -> None:
    """Of n tokens of a row the round(g n) best stay important, of those that are; in place."""
    for row, marks in enumerate(tiers):
        budget = round(policy.important * int((marks > 0).sum()))
        pool = sorted(np.flatnonzero(marks == HIGH), key=lambda place: (-scores[row, place], place))
        marks[pool[budget:]] = LOW


def same(got: Tensor, expected: Tensor, real: Tensor) -> None:
    """Equal where a query is no padding."""
    torch.testing.assert_close(got[real].double(), expected[real].double(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind, policy", CASES, ids=lambda x: x if isinstance(x, str) else f"{x.important:g}")
def test_attention_to_tiers_is_that_to_whole_rows_cut_in_place(policy: Tiers, kind: str) -> None:
    case, start = Case(kind), 0
    size = 4
    (layer_,) = policy.layers(1)
    assert isinstance(layer_, TieredLayer)
    layer_.follow(case.layout, torch.float32)
    tiers, scores = np.zeros((2, 0), int), np.zeros((2, 0))
    for length in STEPS:
        tokens = slice(start, start + length)
        mask = case.mask[:, :, tokens, : tokens.stop]
        real = torch.arange(start, tokens.stop) >= torch.tensor(PADS)[:, None]
        tiers = np.concatenate([tiers, np.where(real, HIGH, 0)], axis=1)
        layer_.begin(mask, 2, length, torch.device("cpu"))
        layer_.update(case.key[:, None, tokens], case.value[:, None, tokens])
        got, log_sum = layer_.attend(case.queries(tokens), case.parameters, case.tables(tokens.stop), mask)
        expected, expected_sum = case.expected(policy, tokens, tiers)
        same(got, expected, real)
        same(log_sum, expected_sum, real)
        layer_.choose(log_sum)
        scores = np.concatenate([scores, torch.logsumexp(expected_sum.float(), -1).numpy()], axis=1)
        settle(policy, tiers, scores)
        start += length
        assert [row.important.tolist() for row in layer_.sequences] == [
            (marks[marks > 0] == HIGH).tolist() for marks in tiers
        ]
    unit = 1 if case.layout.coded else size
    sizes = [[width // unit for width in layout.row_bytes(size)] for layout in policy.layouts(case.layout)]
    total = 0
    for row, marks in zip(layer_.sequences, tiers, strict=True):
        counts = [int((marks == tier).sum()) for tier in (HIGH, LOW)]
        for rows, count, widths in zip((row.high, row.low), counts, sizes, strict=True):
            assert [side.shape[2:] for side in rows] == [(count, width) for width in widths]
            total += sum(side.nbytes for side in rows)
        total += sum(counts) + 4 * counts[0]
    assert layer_.stored_bytes() == total


def test_shares_are_of_units_and_at_least_one_stays() -> None:
    wide = CodedRow(n16=4, n8=8, n4=32)  # 16 + 16 + 32 nibbles
    assert cut_latent(wide, 0.25) == CodedRow(n16=4, n8=8, n4=16)
    assert cut_latent(wide, 0.99) == CodedRow(n16=4)
    assert cut_latent(CodedRow(n12=7, n4=3), 0.3) == CodedRow(n12=5)  # a nibble of the sixth stays, uncounted
    assert cut_latent(NumberRow(10), 0.55) == NumberRow(5)
    for layout in LAYOUTS.values():
        assert cut_layout(layout, 0.0, 0.0) == layout
        for before, after in zip(layout.groups, cut_layout(layout, 0.5, 0.3).groups, strict=True):
            assert after.key.width < before.key.width
