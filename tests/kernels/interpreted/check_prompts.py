"""Prompts: stock attention over what is expanded of rows and pages, in Triton's interpreter, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import kernel_truth as truth
from support.kernel_cases import (
    LAYERS,
    Case,
    case_of,
    causal,
    exact_keys,
    in_pages,
    layer,
    packed_queries,
    random_case,
    shape_of,
    with_values,
)
from support.quick import mostly_nightly
from torch.nn import functional

from rotor.checkpoint.layout import POST_ROPE
from rotor.checkpoint.rows import NumberRow
from rotor.kernels import stock
from rotor.kernels.attention import rows_attention
from rotor.kernels.dispatch import default_layer
from rotor.kernels.exact_slots import ExactSlots
from rotor.kernels.expand import PagesOf


def check(got: torch.Tensor, exact: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), exact, atol=3e-4, rtol=1e-4)


def prompt(case: Case, mask: torch.Tensor | None = None) -> torch.Tensor:
    rows = case.key.unsqueeze(1), case.value.unsqueeze(1)
    return stock.prompt_attention(case.query, *rows, case.parameters, case.rotation, case.first, mask)


@pytest.mark.parametrize("name", mostly_nightly(LAYERS, lambda name: name in ("block", "numbers")))
def test_causal_prompts(name) -> None:
    """A prefill into a static cache: behind the new keys lies anything."""
    case = case_of(name, 2, 37, 37, softcap=2.0 if name in ("block", "no rope") else None, factor=1.2)
    exact, _ = case.exact(causal(2, 37, 37))
    check(prompt(case), exact)
    rest = [torch.cat([side, side[:, :9]], 1) for side in (case.key, case.value)]
    check(prompt(Case(case.parameters, case.query, *rest, case.rotation)), exact)


@pytest.mark.parametrize(("name", "seq_len"), mostly_nightly([("block", 37), ("block", 1)], lambda case: case[1] == 37))
def test_values_wider_than_fused_kernels_take(name, seq_len, monkeypatch) -> None:
    """They are attended to in parts."""
    case, widths, attend = case_of(name, 2, seq_len, 37), [], stock.dense_attention
    (cls, *_) = case.parameters.layout.classes()
    most = max(case.parameters.shape.head_dim, cls.value.width - 8)
    monkeypatch.setattr(stock, "FUSED_WIDTH", most)

    def watched(query, key, value, *rest):
        widths.append((key.shape[-1], value.shape[-1]))
        return attend(query, key, value, *rest)

    monkeypatch.setattr(stock, "dense_attention", watched)
    exact, _ = case.exact(causal(2, seq_len, 37))
    check(prompt(case), exact)
    assert cls.value.width > most
    assert all(value <= most for _, value in widths)
    assert seq_len == 1 or all(key == value for key, value in widths)


@pytest.mark.parametrize(
    ("name", "window"),
    mostly_nightly([("block", 11), ("numbers", 11), ("no rope", None)], lambda case: case[0] == "block"),
)
def test_chunks_behind_a_cache_and_padding(name, window, monkeypatch) -> None:
    case = case_of(name, 2, 19, 70, first=5 if name == "block" else 0)
    allowed = causal(2, 19, 70, window).clone()
    allowed[1, :, :30] = False
    allowed[0, 3] = False  # a query that attends to nothing
    exact, _ = case.exact(allowed)
    check(prompt(case, allowed[:, None]), exact)
    monkeypatch.setattr(stock, "MOST_BYTES", 1)  # sequences one after another
    check(prompt(case, allowed[:, None]), exact)


@pytest.mark.parametrize(
    ("name", "window", "page_size"),
    mostly_nightly(
        [("apart", 11, 16), ("block", None, 48), ("numbers", None, 16), ("no rope", 11, 48)],
        lambda case: case[0] in ("apart", "no rope"),
    ),
)
def test_packed_prompts_over_pages(name, window, page_size) -> None:
    """Sequences of several lengths and new tokens, one with none."""
    lengths, news = [37, 16, 90, 8], [37, 0, 20, 1]
    case = case_of(name, 4, 90, 90)
    pages = in_pages(case, lengths, page_size)
    bounds = [torch.tensor([0, *of]).cumsum(0).int() for of in (news, lengths)]
    of = PagesOf(pages.block_table, pages.kv_lens, bounds[1], sum(lengths), max(lengths))
    query, exact = packed_queries(case, lengths, news, window)
    got = stock.packed_attention(
        query, pages.key, pages.value, case.parameters, case.rotation, of, bounds[0], max(news), window
    )
    check(got, exact)


def latents_case(kind: str, batch_size: int, seq_len: int, kv_len: int) -> Case:
    """Numbers after RoPE: of two classes of groups, of a group of two heads, and of joint latents."""
    of = {
        "apart": layer(
            POST_ROPE, 1, (NumberRow(20), NumberRow(13)), (NumberRow(20), NumberRow(13)), (NumberRow(9), NumberRow(24))
        ),
        "group": layer(POST_ROPE, 2, (NumberRow(16), NumberRow(30)), (NumberRow(16), NumberRow(30))),
        "joint": layer(POST_ROPE, 2, NumberRow(22), NumberRow(22)),
    }[kind]
    return random_case(of, shape_of(of.group_size * len(of.groups), 3, 24, 16), batch_size, seq_len, kv_len)


@pytest.mark.parametrize("kind", mostly_nightly(["apart", "group", "joint"], lambda kind: kind == "apart"))
def test_prompts_meet_latents_of_numbers_as_they_are_stored(kind: str, monkeypatch) -> None:
    """No key is expanded: SDPA has the width of latents, one call for all groups of a class."""
    widths, attend = [], functional.scaled_dot_product_attention

    def watched(query, key, value, **rest):
        widths.append((key.shape[1], *(side.shape[-1] for side in (query, key, value))))
        return attend(query, key, value, **rest)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", watched)
    monkeypatch.setattr(stock, "expand", None)
    case = latents_case(kind, 2, 37, 37)
    check(prompt(case), case.exact(causal(2, 37, 37))[0])
    expected = {"apart": [(2, 24, 24, 24), (1, 24, 24, 24)], "group": [(2, 32, 32, 32)], "joint": [(2, 24, 24, 24)]}
    assert widths == expected[kind]
    behind = latents_case(kind, 2, 19, 70)
    allowed = causal(2, 19, 70, 40).clone()
    allowed[1, :, :30] = False
    check(prompt(behind, allowed[:, None]), behind.exact(allowed)[0])


def test_latents_wider_than_heads_are_expanded() -> None:
    """Attention over them would be more work than over keys."""
    of = layer(POST_ROPE, 2, (NumberRow(40), NumberRow(30)))
    case = random_case(of, shape_of(2, 3, 24, 16), 2, 37, 37)
    assert not case.parameters.meets_latents(next(iter(of.classes())))
    check(prompt(case), case.exact(causal(2, 37, 37))[0])


@pytest.mark.parametrize("kind", mostly_nightly(["apart", "group", "joint"], lambda kind: kind == "apart"))
def test_packed_prompts_meet_latents_in_pages(kind: str) -> None:
    lengths, news, widths = [37, 16, 90], [37, 0, 20], []
    case = latents_case(kind, 3, 90, 90)
    pages = in_pages(case, lengths, 16)
    bounds = [torch.tensor([0, *of]).cumsum(0).int() for of in (news, lengths)]
    of = PagesOf(pages.block_table, pages.kv_lens, bounds[1], sum(lengths), max(lengths))
    query, exact = packed_queries(case, lengths, news, 11)

    def watched(query, key, value, *rest):
        widths.append([side.shape[-1] for side in (query, key, value)])
        return stock._one_by_one(query, key, value, *rest)

    around = bounds[0], max(news), 11, watched
    got = stock.packed_attention(query, pages.key, pages.value, case.parameters, None, of, *around)
    check(got, exact)
    widest = 32 if kind == "group" else 24
    assert all(set(of) == {widest} for of in widths)


def with_exact(case: Case, exact: ExactSlots, mask: torch.Tensor | None, materialise: bool = False) -> torch.Tensor:
    kernels = replace(default_layer(case.parameters.layout), materialise=materialise)
    rows = case.key.unsqueeze(1), case.value.unsqueeze(1)
    rest = {"rotation": case.rotation, "first": case.first, "attention_mask": mask, "exact": exact}
    return rows_attention(case.query, *rows, case.parameters, kernels, **rest)


@pytest.mark.parametrize(
    ("name", "seq_len", "window"),
    mostly_nightly(
        [("post", 1, None), ("apart", 3, 15), ("block", 19, None), ("numbers", 19, 25), ("block", 1, 25)],
        lambda case: case in (("apart", 3, 15), ("numbers", 19, 25)),
    ),
)
def test_exact_tokens_behind_rows(name, seq_len, window, monkeypatch) -> None:
    """Steps, of materialised layers too, a few tokens, and a chunk: among padding, each key in one way."""
    case = with_values(case_of(name, 2, seq_len, 70, softcap=2.0 if name == "block" else None))
    exact, allowed = exact_keys(case, [70, 70], [seq_len] * 2, [0, 31], 4, 12), causal(2, seq_len, 70, window).clone()
    allowed[1, :, :31] = False
    found = truth.with_exact(case.query, case.key, case.value, case.parameters, allowed, exact, case.rotation)
    check(with_exact(case, exact, allowed[:, None]), found)
    monkeypatch.setattr(stock, "MOST_BYTES", 1)  # sequences one after another
    check(with_exact(case, exact, allowed[:, None], materialise=True), found)
