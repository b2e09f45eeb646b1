"""Tiers: which tokens are important, what is cut of the others, and attention to both against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from coded import MIXTURES, coded_layer, random_coded_case
from ragged import layer, random_case
from torch import Tensor

from rotor.errors import UsageError
from rotor.format.columns import Columns
from rotor.format.layout import GroupLayout, LayerLayout
from rotor.kernels.code_reference import partial_attention
from rotor.kernels.parameters import AttentionParameters
from rotor.kernels.rows import key_columns, pack_layer, unpack_layer, value_columns
from rotor.runtime.cache import Tiers
from rotor.runtime.cache.tier_bits import BitCut, narrowed
from rotor.runtime.cache.tier_index import HIGH, LOW, right_aligned
from rotor.runtime.cache.tier_rows import cut_layout, tier_rows
from rotor.runtime.cache.tiered_layer import TieredLayer
from rotor.runtime.tiered_attention import attend_to_tiers

HPK, HEAD_DIM, TOKENS, PADS = 2, 16, 26, (5, 0)
STEPS = [12, *[1] * 6, 3, *[1] * 5]
LAYOUTS = {
    "post": layer("post", 1, (16, 8), (8, 8), (8, 6)),
    "pre": layer("pre", 2, (24, 12), (10, 12)),
    "none": layer("none", 2, (12, 8), (12, 8)),
    "codes": coded_layer("pre", 2, (MIXTURES[0], MIXTURES[2]), (MIXTURES[3], MIXTURES[4])),
    "codes after RoPE": coded_layer("post", 2, (MIXTURES[0], MIXTURES[2]), (MIXTURES[3], MIXTURES[4])),
    "codes joint": coded_layer("pre", 2, (MIXTURES[0], None), (MIXTURES[6], None)),
    "codes without RoPE": coded_layer("none", 1, (MIXTURES[7], MIXTURES[0]), (MIXTURES[6], MIXTURES[7])),
}
CODED = [kind for kind in LAYOUTS if kind.startswith("codes")]
POLICIES = [
    Tiers(important=0.4, qk_unimportant=0.5, v_unimportant=0.25),
    Tiers(important=0.3, qk_important=0.2, qk_unimportant=0.7, v_important=0.1, v_unimportant=0.6, importance="mean"),
    Tiers(important=0.0, qk_unimportant=0.4, v_unimportant=0.4),
    Tiers(important=1.0),
]
BITS = [
    Tiers(important=0.4, qk_unimportant=0.5, v_unimportant=0.4, cut="bits"),
    Tiers(0.3, (), qk_important=0.2, qk_unimportant=0.7, v_important=0.3, v_unimportant=0.6, cut="bits"),
    Tiers(important=0.0, qk_unimportant=0.8, v_unimportant=0.9, cut="bits"),
]
CASES = [(kind, policy) for kind in LAYOUTS for policy in POLICIES]
CASES += [(kind, policy) for kind in CODED for policy in BITS]


class Case:
    """A layer's rows and queries over a whole sequence, in float64 where it is not coded."""

    def __init__(self, kind: str) -> None:
        self.layout = layout = LAYOUTS[kind]
        self.dtype = torch.float32 if layout.coded else torch.float64
        if layout.coded:
            coded = random_coded_case(layout, HPK, HEAD_DIM, 2, TOKENS, TOKENS)
            self.rotation, constant, basis = coded.floats.key_rotation, coded.constant_key, coded.query_basis
            self.key, self.value, self.query = coded.key, coded.value, coded.query
        else:
            plain = random_case(layout, HPK, HEAD_DIM, 2, TOKENS, TOKENS).to("cpu", self.dtype)
            self.rotation, constant, basis = plain.key_rotation, None, plain.query_basis
            self.key, self.value, self.query = plain.key, plain.value, plain.query
        self.parameters = AttentionParameters(layout, HPK, 0.25, basis, constant)
        real = torch.arange(TOKENS) >= torch.tensor(PADS)[:, None]
        self.mask = (torch.ones(TOKENS, TOKENS).tril().bool() & real[:, None])[:, None]

    def queries(self, tokens: slice) -> Tensor:
        return self.query[:, tokens] if self.layout.domain == "none" else self.query[:, :, tokens]

    def tables(self, end: int) -> Any:
        return None if self.rotation is None else tuple(table[:end].to(self.dtype) for table in self.rotation)

    def expected(self, policy: Tiers, tokens: slice, tiers: np.ndarray) -> tuple[Tensor, Tensor]:
        """Attention to whole rows of numbers, each read as its tier has it; tiers [rows, tokens so far]."""
        sides, layout = [], self.layout
        value = self.key if layout.joint else self.value
        numbers = self.key[:, : tokens.stop], value[:, : tokens.stop]
        columns = key_columns(layout), key_columns(layout) if layout.joint else value_columns(layout)
        for side, rows in enumerate(numbers):
            found = unpack_layer(rows, columns[side], self.dtype) if layout.coded else rows.clone()
            found = found.double()
            for tier, cut in zip((HIGH, LOW), policy.layouts(layout), strict=True):
                own = key_columns(cut) if side == 0 or layout.joint else value_columns(cut)
                read = found.clone()
                offset = 0
                for index, (whole, part) in enumerate(zip(layout.groups, cut.groups, strict=True)):
                    rank, kept = (whole.qk_rank, part.qk_rank) if side == 0 else (whole.v_rank, part.v_rank)
                    if layout.coded:
                        for column, bits in enumerate(widths(columns[side][index])):
                            left = widths(own[index])[column] if column < kept else 0
                            of_column = read[..., offset + column]
                            read[..., offset + column] = torch.tensor(shortened(of_column.numpy(), bits, left))
                    else:
                        read[..., offset + kept : offset + rank] = 0.0
                    offset += rank
                of_tier = torch.tensor(tiers == tier)[..., None]
                found = torch.where(of_tier, read, found)
            sides.append(found)
        plain = LayerLayout(
            layout.domain,
            layout.folded_keys,
            tuple(GroupLayout(group.kv_heads, group.qk_rank, group.v_rank) for group in layout.groups),
        )
        of_layer = self.parameters
        basis, constant = (None if x is None else x.double() for x in (of_layer.query_basis, of_layer.constant_key))
        tables = self.tables(tokens.stop)
        return partial_attention(
            self.queries(tokens).double(),
            sides[0][:, None],
            sides[1][:, None],
            AttentionParameters(plain, HPK, of_layer.scaling, basis, constant),
            None if tables is None else tuple(table.double() for table in tables),
            self.mask[:, :, tokens, : tokens.stop],
        )


def widths(columns: Columns) -> list[int]:
    """Bits of each column."""
    return [bits for bits, count in zip((16, 8, 4, 2), columns.counts, strict=True) for _ in range(count)]


def shortened(numbers: np.ndarray, bits: int, left: int) -> np.ndarray:
    """What is read of a column of `bits` of which `left` are kept: the middle of the codes that begin alike."""
    if bits == 16:
        return numbers if left == 16 else 0.0 * numbers
    if left == 0:
        return np.full_like(numbers, -0.5)
    step, least = 2.0 ** (bits - left), 2.0 ** (bits - 1)
    middle: np.ndarray = np.floor((numbers + least) / step) * step + (step - 1) / 2 - least
    return middle


def settle(policy: Tiers, tiers: np.ndarray, scores: np.ndarray) -> None:
    """Of n tokens of a row the round(g n) best stay important, of those that are; in place."""
    for row, marks in enumerate(tiers):
        budget = round(policy.important * int((marks > 0).sum()))
        pool = sorted(np.flatnonzero(marks == HIGH), key=lambda place: (-scores[row, place], place))
        marks[pool[budget:]] = LOW


def same(got: Tensor, expected: Tensor, real: Tensor, dtype: torch.dtype) -> None:
    """Equal where a query is no padding."""
    rtol = 1e-9 if dtype == torch.float64 else 2e-4
    torch.testing.assert_close(got[real].double(), expected[real].double(), rtol=rtol, atol=rtol)


@pytest.mark.parametrize(
    "kind, policy", CASES, ids=lambda x: x if isinstance(x, str) else f"{x.cut}-{x.important:g}-{x.importance}"
)
def test_attention_to_tiers_is_that_to_whole_rows_cut_in_place(policy: Tiers, kind: str) -> None:
    case, start = Case(kind), 0
    size = case.dtype.itemsize
    chooser, _ = layers = Tiers(**{**vars(policy), "leaders": (0, 0)}).layers(2)
    tiers, scores = np.zeros((2, 0), int), np.zeros((2, 0))
    for length in STEPS:
        tokens = slice(start, start + length)
        mask, real = (
            case.mask[:, :, tokens, : tokens.stop],
            torch.arange(start, tokens.stop) >= torch.tensor(PADS)[:, None],
        )
        tiers = np.concatenate([tiers, np.where(real, HIGH, 0)], axis=1)
        for layer_ in layers:
            assert isinstance(layer_, TieredLayer)
            layer_.follow(case.layout, HPK, case.dtype)
            layer_.begin(mask, 2, length, torch.device("cpu"))
            layer_.update(case.key[:, None, tokens], case.value[:, None, tokens])
            got, log_sum = attend_to_tiers(
                case.parameters, layer_, case.queries(tokens), mask, case.tables(tokens.stop)
            )  # type: ignore[arg-type]
            expected, expected_sum = case.expected(policy, tokens, tiers)
            same(got, expected, real, case.dtype)
            same(log_sum, expected_sum, real, case.dtype)
            layer_.finish_step(log_sum)
            if layer_ is chooser:
                found = torch.logsumexp(expected_sum.float(), -1)
                if policy.importance == "mean":
                    keys = torch.arange(start, tokens.stop) + 1 - torch.tensor(PADS)[:, None]
                    found = found - keys.clamp(min=1).log()
                scores = np.concatenate([scores, found.numpy()], axis=1)
                settle(policy, tiers, scores)
        start += length
        for row, marks in enumerate(tiers):
            assert chooser.index.tiers is not None
            assert chooser.index.tiers[row].tolist() == marks.tolist()
    counts = {tier: max(int((marks == tier).sum()) for marks in tiers) for tier in (HIGH, LOW)}
    high, low = policy.layouts(case.layout)
    unit = 1 if case.layout.coded else size
    for layer_ in layers:
        held = [layer_.keys, layer_.values, layer_.low_keys, layer_.low_values]
        sizes = [width // unit for layout in (high, low) for width in layout.row_bytes(size)]
        assert [(t.shape[2], t.shape[3]) for t in held] == [
            (counts[tier], width) for tier, width in zip((HIGH, HIGH, LOW, LOW), sizes, strict=True)
        ]
        own = sum(t.nbytes for t in held)
        assert layer_.stored_bytes() == own + (2 * TOKENS + 4 * 2 * counts[HIGH] if layer_ is chooser else 0)


def test_cropped_rows_stay_as_they_were_cut() -> None:
    case, policy = Case("post"), POLICIES[0]
    (kept,) = policy.layers(1)
    assert isinstance(kept, TieredLayer)

    def step(tokens: slice) -> Tensor:
        mask = case.mask[:, :, tokens, : tokens.stop]
        kept.follow(case.layout, HPK, torch.float64)
        kept.begin(mask, 2, tokens.stop - tokens.start, torch.device("cpu"))
        kept.update(case.key[:, None, tokens], case.value[:, None, tokens])
        got, log_sum = attend_to_tiers(case.parameters, kept, case.queries(tokens), mask, None)  # type: ignore[arg-type]
        kept.finish_step(log_sum)
        return got

    step(slice(0, 18))
    assert kept.index.tiers is not None
    tiers = kept.index.tiers[:, :15].clone()
    kept.crop(-3)
    assert kept.get_seq_length() == 15
    assert torch.equal(kept.index.tiers, tiers)
    for name, tier in (("keys", HIGH), ("low_keys", LOW)):
        rows = getattr(kept, name)
        places = kept.index.places(tier, rows.shape[2])
        width = rows.shape[3]
        assert rows.shape[2] == int((tiers == tier).sum(-1).amax())
        if tier == HIGH:
            expected = case.key[:, None].gather(2, places.clamp(min=0)[:, None, :, None].expand(-1, 1, -1, width))
            assert torch.equal(rows[:, 0][places >= 0], expected[:, 0][places >= 0])
    got = step(slice(15, 16))
    expected, _ = case.expected(policy, slice(15, 16), np.concatenate([tiers.numpy(), [[HIGH], [HIGH]]], axis=1))
    torch.testing.assert_close(got, expected)
    kept.reset()
    assert kept.get_seq_length() == kept.stored_bytes() == 0


@pytest.mark.parametrize("kind", list(LAYOUTS))
def test_a_tier_is_a_prefix_of_each_group(kind: str) -> None:
    layout = LAYOUTS[kind]
    outer, inner = cut_layout(layout, 0.2, 0.1), cut_layout(layout, 0.6, 0.5)
    rows = tier_rows(layout, outer, inner, HPK, torch.bfloat16, torch.device("cpu"))
    unit = 1 if layout.coded else 2
    starts = np.cumsum([0, *(group.row_bytes(2)[0] // unit for group in outer.groups)])
    sizes = [group.row_bytes(2)[0] // unit for group in inner.groups]
    expected = [start + i for start, size in zip(starts, sizes, strict=False) for i in range(size)]
    marked = torch.arange(int(starts[-1]), dtype=torch.int16)[None, :]
    assert rows.cut_key(marked)[0].tolist() == expected
    assert inner.qk_width < outer.qk_width < layout.qk_width
    assert len(rows.basis) == inner.qk_width
    assert len(rows.output) == layout.group_size * HPK * inner.v_width
    for before, after in zip(layout.groups, cut_layout(layout, 0.0, 0.0).groups, strict=True):
        assert before == after


def test_shares_are_of_bytes_and_at_least_one_column_stays() -> None:
    columns = Columns(n16=4, n8=8, n4=16, n2=32)  # 2 + 2 + 2 + 2 words
    layout = LayerLayout("post", False, (GroupLayout.coded((0,), columns, columns),))
    cut = cut_layout(layout, 0.375, 0.99).groups[0]
    assert cut.qk_columns == Columns(n16=4, n8=8, n4=8)
    assert cut.v_columns == Columns(n16=2)
    planes = LayerLayout("none", True, (GroupLayout((0,), 12, 8, (0, 3, 1, 5, 2, 4)),))
    group = cut_layout(planes, 0.6, 0.9).groups[0]
    assert (group.qk_rank, group.planes, group.v_rank) == (4, (0, 3), 1)


SPREAD = Columns(n16=2, n8=12, n4=32, n2=64)


def test_bits_are_those_of_a_column_some_places_behind() -> None:
    """Eight places: each end of a segment is eight columns before; 24: those of 8 bits are gone."""
    assert narrowed(SPREAD, SPREAD.row_bytes()) == SPREAD
    assert narrowed(SPREAD, 40) == Columns(n16=2, n8=4, n4=32, n2=64)
    assert narrowed(SPREAD, 31) == Columns(n16=2, n4=24, n2=64)
    assert narrowed(SPREAD, 4) == Columns(n16=2)
    for mixture in (*MIXTURES, SPREAD):
        sizes = range(mixture.row_bytes(), 0, -1)
        for wider, narrower in zip(sizes, list(sizes)[1:], strict=False):
            outer, inner = narrowed(mixture, wider), narrowed(mixture, narrower)
            pairs = list(zip(widths(inner), widths(outer), strict=False))
            assert len(widths(inner)) <= len(widths(outer))
            assert all(own <= bits and (bits < 16 or own == 16) for own, bits in pairs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_shortened_codes_are_the_first_bits(dtype: torch.dtype) -> None:
    outer, inner = (SPREAD, MIXTURES[1]), (narrowed(SPREAD, 30), MIXTURES[1])
    numbers = torch.randn(3, 5, 112, generator=torch.Generator().manual_seed(0)) * 8
    rows = pack_layer(numbers.to(dtype), outer)
    cut = BitCut.of(outer, inner, dtype, torch.device("cpu"))(rows)
    before, after = unpack_layer(rows, outer, dtype), unpack_layer(cut, inner, dtype)
    bits = [(wide, own) for wide, own in zip(widths(SPREAD), widths(inner[0]), strict=False)]
    for column, (wide, own) in enumerate(bits):
        if wide == 16:
            assert torch.equal(after[..., column], before[..., column])
            continue
        codes = (before[..., column].long() + 2 ** (wide - 1)) >> (wide - own)
        assert torch.equal(after[..., column].long() + 2 ** (own - 1), codes)
    assert torch.equal(after[..., -2:], before[..., -2:])


def test_equal_ratios_make_one_kind_of_row() -> None:
    for kind in CODED:
        policy = Tiers(important=0.5, qk_important=0.4, qk_unimportant=0.4, v_unimportant=0.0, cut="bits")
        high, low = policy.layouts(LAYOUTS[kind])
        assert high == low
        assert high.row_bytes(2)[0] < LAYOUTS[kind].row_bytes(2)[0]
        assert high.row_bytes(2)[1] == LAYOUTS[kind].row_bytes(2)[1]
        assert high.joint == LAYOUTS[kind].joint


def test_a_soft_cap_lets_no_bits_be_cut_after_rope() -> None:
    policy = Tiers(cut="bits")
    policy.check_layer(LAYOUTS["codes"], 30.0)
    policy.check_layer(LAYOUTS["codes after RoPE"], None)
    with pytest.raises(UsageError, match="cut: bits: the logits have a soft cap"):
        policy.check_layer(LAYOUTS["codes after RoPE"], 30.0)
    Tiers().check_layer(LAYOUTS["codes after RoPE"], 30.0)


def test_right_aligned() -> None:
    chosen = torch.tensor([[True, False, True, True], [False, False, False, True]])
    assert right_aligned(chosen, 3).tolist() == [[0, 2, 3], [-1, -1, 3]]
    assert right_aligned(chosen & False, 0).shape == (2, 0)


@pytest.mark.parametrize(
    "fields, text",
    [
        ({"important": 1.5}, "important: got 1.5, expected a share from 0 to 1"),
        ({"qk_important": 0.6}, r"qk_unimportant: got 0.5, expected a share from qk_important \(0.6\)"),
        ({"v_unimportant": 1.0}, "v_unimportant: got 1.0"),
        ({"layer_important": (0.5, -1.0)}, "layer_important"),
        ({"leaders": (0, 2, 2)}, "leaders: got .* expected for each layer itself, or an earlier one"),
        ({"leaders": (0, 0, 1)}, "leaders"),
        ({"importance": "luck"}, "importance"),
        ({"cut": "rows"}, "cut: got 'rows', expected columns or bits"),
    ],
)
def test_what_does_not_fit_is_said(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        Tiers(**fields)


def test_the_choice_by_chance_is_a_tokens_own() -> None:
    def tiers(scale: float) -> list[list[int]]:
        (kept,) = Tiers(important=0.5, importance="random", seed=3).layers(1)
        assert isinstance(kept, TieredLayer)
        kept.index.append(None, 1, 20, torch.device("cpu"))
        kept.index.choose(scale * torch.arange(20.0)[None, :, None])
        assert kept.index.tiers is not None
        return kept.index.tiers.tolist()

    assert tiers(1.0) == tiers(-1.0)
    assert tiers(1.0)[0].count(HIGH) == 10


def test_layers_run_in_order() -> None:
    _, follower = Tiers(leaders=(0, 0)).layers(2)
    follower.follow(LAYOUTS["post"], HPK, torch.float32)
    follower.begin(None, 1, 2, torch.device("cpu"))
    with pytest.raises(UsageError, match="does not know that its cache has tiers"):
        follower.update(torch.zeros(1, 1, 2, 32), torch.zeros(1, 1, 2, 22))
