"""`rows_attention` in Triton's interpreter against float64: steps, few queries, prompts, pages."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch
from support import kernel_truth as truth
from support.kernel_cases import LAYERS, Case, case_of, causal, exact_keys, in_pages, packed_queries, with_values
from support.quick import mostly_nightly

from rotor.kernels.attention import attend_pages, ranges_of_pages, rows_attention
from rotor.kernels.dispatch import default_layer
from rotor.kernels.passes import Pass


def check(got: torch.Tensor, exact: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), exact, atol=5e-4, rtol=2e-4)


def attended(case: Case, mask: torch.Tensor | None = None, materialise: bool = False, **rest) -> torch.Tensor:
    kernels = replace(default_layer(case.parameters.layout), materialise=materialise)
    rows = case.key.unsqueeze(1), case.value.unsqueeze(1)
    rest |= {"rotation": case.rotation, "first": case.first, "attention_mask": mask}
    return rows_attention(case.query, *rows, case.parameters, kernels, **rest)


@pytest.mark.parametrize("name", mostly_nightly(LAYERS, lambda name: name == "pre"))
def test_a_step_with_padding_a_window_and_holes(name) -> None:
    case = case_of(name, 3, 1, 150, heads_per_kv={"block": 7, "apart": 1}.get(name, 3))
    check(attended(case, materialise=name == "pre"), case.exact(causal(3, 1, 150))[0])
    allowed = causal(3, 1, 150, window=100).clone()
    allowed[1, :, :70] = False
    allowed[2, :, 80:97] = False
    check(attended(case, allowed[:, None]), case.exact(allowed)[0])


@pytest.mark.parametrize("seq_len", mostly_nightly([3, 40], lambda seq_len: seq_len == 40))
def test_a_short_prompt_and_a_long_one(seq_len) -> None:
    case = case_of("block", 2, seq_len, seq_len)
    check(attended(case), case.exact(causal(2, seq_len, seq_len))[0])


def test_a_basis_that_is_changed_and_one_that_is_pickled() -> None:
    """Data of launches is kept with the basis, noticed to be old, and no part of what is saved."""
    case = case_of("post", 1, 1, 40)
    before = attended(case)
    case.parameters.query_basis.mul_(0.5)
    check(attended(case), case.exact(causal(1, 1, 40))[0])
    again = pickle.loads(pickle.dumps(case.parameters.query_basis))
    assert torch.equal(again, case.parameters.query_basis)
    assert not torch.equal(before, attended(case))


def test_a_table_shorter_than_a_block() -> None:
    case = case_of("long", 2, 1, 20)
    case.rotation = tuple(table[:20] for table in case.rotation)
    check(attended(case), case.exact(causal(2, 1, 20))[0])


def test_rows_that_begin_within_a_block() -> None:
    """A window let go of the first keys of a block."""
    case = case_of("block", 2, 1, 75, first=7)
    check(attended(case), case.exact(causal(2, 1, 75))[0])


@pytest.mark.parametrize(
    ("name", "news", "window", "materialise"),
    mostly_nightly(
        [("block", [1, 1, 1], 21, False), ("numbers", [3, 1, 2], None, False), ("no rope", [3, 1, 2], 21, True)],
        lambda case: case[0] == "numbers",
    ),
)
def test_pages(name, news, window, materialise) -> None:
    """Permuted and poisoned pages; the block table ends where the longest sequence does."""
    lengths = [37, 16, 90]
    case = case_of(name, 3, 90, 90)
    pages = in_pages(case, lengths, 16)
    query, exact = packed_queries(case, lengths, news, window)
    out = torch.full(exact.shape, float("nan"))
    got = attend_pages(
        query, pages.key, pages.value, case.parameters,
        replace(default_layer(case.parameters.layout), materialise=materialise), block_table=pages.block_table,
        query_start_loc=torch.tensor([0, *news]).cumsum(0).int(), kv_lens=pages.kv_lens, max_query_len=max(news),
        max_kv_len=90, rotation=case.rotation, window=window, out=out,
    )  # fmt: skip
    assert got.data_ptr() == out.data_ptr()
    check(got, exact)


def test_ranges_of_a_mask_are_found_once_a_pass() -> None:
    class Counted(Pass):
        def once(self, key, make):
            return super().once(key, lambda: made.append(key[0]) or make())

    made: list[str] = []
    case, mask, now = case_of("post", 1, 1, 40), causal(1, 1, 40).clone()[:, None], Counted()
    for _ in range(3):
        check(attended(case, mask, now=now), case.exact(mask[:, 0])[0])
    assert made.count("ranges") == 1


@pytest.mark.parametrize(
    ("name", "news", "window"),
    mostly_nightly(
        [("block", [1, 1, 1], 41), ("apart", [3, 1, 2], None), ("block", [37, 5, 40], 41)],
        lambda case: case[0] == "apart",
    ),
)
def test_pages_of_a_layer_with_exact_tokens(name, news, window) -> None:
    """Requests that decode, and prompts, whose new tokens all see the same exact ones before them."""
    lengths, newest = [37, 16, 90], 12
    case = with_values(case_of(name, 3, 90, 90))
    pages = in_pages(case, lengths, 16)
    prompts = max(news) > 16
    counts = [new if prompts else max(news) for new in news]
    exact = exact_keys(case, lengths, counts, [0, 0, 0], 0, newest)
    shape, packed, found, new, until = case.parameters.shape, [], [], [], []
    for b, (length, count) in enumerate(zip(lengths, news, strict=True)):
        old, at = length - count, slice(b, b + 1)
        token = torch.arange(count)
        own = (torch.zeros_like(token) if prompts else token) + old - newest + 1
        until.append(own.clamp(min=0).int())
        query = case.query[at, :, old:length]
        slots = replace(exact, key=exact.key[at], value=exact.value[at], index=exact.index[at], first=exact.first[at],
                        until=until[b][None])  # fmt: skip
        args = query, case.key[at, :length], case.value[at, :length], case.parameters, causal(1, count, length, window)
        found.append(truth.with_exact(*args, slots, case.rotation)[0])
        packed.append(query[0].transpose(0, 1))
        place = torch.stack([(exact.index[b] == row).int().argmax() for row in range(old, length)])
        new.append(torch.stack([side[b][:, place].transpose(0, 1) for side in (exact.key, exact.value)]))
        if prompts:
            exact.index[b][exact.index[b] >= old] = -1
    assert shape.num_kv_heads == exact.key.shape[1]
    starts = torch.tensor([0, *news]).cumsum(0).int()
    options = dict(
        query=torch.cat(packed), key=pages.key, value=pages.value, parameters=case.parameters,
        kernels=default_layer(case.parameters.layout),
        block_table=pages.block_table, query_start_loc=starts,
        kv_lens=pages.kv_lens, max_query_len=max(news), max_kv_len=90, rotation=case.rotation, window=window,
        exact=replace(exact, until=torch.cat(until)), new=tuple(torch.cat(new, 1)), now=Pass(),
        keys=None if prompts else ranges_of_pages(starts, pages.kv_lens, sum(news), max(news), window),
    )  # fmt: skip
    for _ in range(2):  # layers of a step
        check(attend_pages(**options), torch.cat(found))
    made = options["now"]._made
    assert [name for name, *_ in made] == ([] if prompts else ["codes"])
    if not prompts:  # other bounds in the same step
        fewer = replace(options["exact"], until=options["exact"].until - 1)
        attend_pages(**options | {"exact": fewer})
        assert len(made) == 2
