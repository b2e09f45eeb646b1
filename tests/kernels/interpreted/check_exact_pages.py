"""Storing exact tokens in pages, in Triton's interpreter."""

from __future__ import annotations

import torch

from rotor.kernels.exact_pages import store_exactly


def test_tokens_are_stored_in_their_slots() -> None:
    """In any order, of views with strides of their own; slots below zero are no place."""
    generator = torch.Generator().manual_seed(0)
    tokens, heads, dim, page_size = 9, 3, 24, 4
    key, value = torch.randn(2, tokens, heads + 1, dim + 8, generator=generator)[:, :, 1:, :dim].half()
    pages = torch.full((6, page_size, 2 * heads * dim + 5), 9.0).half()[..., : 2 * heads * dim]
    slots = torch.randperm(6 * page_size, generator=generator)[:tokens]
    slots[4] = -1
    expected = pages.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            both = torch.cat([key[token].flatten(), value[token].flatten()])
            expected[slot // page_size, slot % page_size] = both
    store_exactly(key, value, pages, slots)
    assert torch.equal(pages, expected)
