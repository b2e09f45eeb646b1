"""One pass over whole sequences with keys of two kinds: what steps through a cache with exact tokens must equal.

Written for reading, in float64: a mask says of every query and key which kind it is, and one loop goes over the heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rotor.kernels.parameters import AttentionParameters
from rotor.kernels.passes import TokenSpan
from rotor.runtime.attention import RotorAttention
from rotor.runtime.steps import AttentionCall, RowStore
from support import kernel_truth


def kinds(length: int, passes: Sequence[int], begin: Sequence[int], first: int, newest: int) -> Tensor:
    """Which keys each query sees exactly, [batch_size, length, length].

    Args:
        passes: number of tokens of each pass. begin: index of the first token of each sequence behind padding.
    """
    place = torch.arange(length)
    query, key = place[:, None], place
    of_pass = torch.repeat_interleave(torch.arange(len(passes)), torch.tensor(passes))
    near = (query - key < newest) | (of_pass[:, None] == of_pass)
    return torch.stack([near | (key - start < first) for start in begin])


class InOnePass(RowStore):
    """Attends to rows and exact keys as `kinds` says, in place of a layer's store."""

    in_pytorch = True

    def __init__(self, exactly: Tensor, window: int | None) -> None:
        self.exactly, self.window = exactly, window

    def row_store(self, cache: Any, layer_idx: int) -> RowStore:
        return self

    def token_span(self, cache: Any, layer_idx: int, seq_len: int) -> TokenSpan:
        return TokenSpan(0, seq_len, 0, seq_len)

    def store_and_attend(self, call: AttentionCall) -> Tensor:
        length = call.key.shape[2]
        place = torch.arange(length)
        allowed = place <= place[:, None]
        if self.window is not None:
            allowed &= place[:, None] - place < self.window
        if call.mask is not None:
            allowed = call.mask[:, 0]
        allowed = allowed.expand_as(self.exactly)
        return attention(call, allowed & ~self.exactly, allowed & self.exactly)


def attention(call: AttentionCall, by_row: Tensor, exactly: Tensor) -> Tensor:
    """Attention of a layer where each query sees some keys by their rows and others exactly.

    Args:
        by_row, exactly: [batch_size, seq_len, kv_len], bool.
    Returns:
        [batch_size, seq_len, num_heads * head_dim].
    """
    p, new = call.parameters, call.exact
    assert new is not None
    rotation = call.rotations.table if p.layout.in_blocks else None
    latents, of_rows = kernel_truth.attention(call.query, call.key[:, 0], call.value[:, 0], p, by_row, rotation)
    outputs = []
    for head, (own, values) in enumerate(zip(heads_of(latents, p), constants_of(p), strict=True)):
        kv_head = head // p.shape.heads_per_kv
        logits = new.query[:, head] @ new.key[:, kv_head].mT * p.scaling
        if p.softcap is not None:
            logits = p.softcap * torch.tanh(logits / p.softcap)
        logits = logits.masked_fill(~exactly, -torch.inf)
        sums = torch.stack([of_rows[..., head], torch.logsumexp(logits, -1)])
        share = torch.softmax(sums, 0).nan_to_num().unsqueeze(-1)
        exact = torch.softmax(logits, -1).nan_to_num() @ new.value[:, kv_head]
        outputs.append(share[0] * (own + values) + share[1] * exact)
    return torch.cat(outputs, -1)


def heads_of(latents: Tensor, p: AttentionParameters) -> Iterator[Tensor]:
    """Output of attention over rows, as values of each query head, [batch_size, seq_len, head_dim]."""
    assert p.output_basis is not None
    start = column = 0
    for group in p.layout.groups:
        width = group.values.width
        for head in range(p.heads_per_group):
            of_head = p.output_basis.unflatten(0, (p.layout.group_size, -1))[head // p.shape.heads_per_kv]
            yield latents[..., start : start + width] @ of_head[:, column : column + width].T
            start += width
        column += width


def constants_of(p: AttentionParameters) -> Iterator[Tensor | float]:
    """Constant that codes add to the values of each query head."""
    for head in range(p.shape.num_heads):
        yield 0.0 if p.value_constant is None else p.value_constant[head // p.shape.heads_per_kv].double()


@contextmanager
def in_one_pass(model: Any, passes: Sequence[int], begin: Sequence[int]) -> Iterator[None]:
    """Within a `with` a model of layers with exact tokens computes whole sequences as if they came in these passes."""
    layers = [module for module in model.modules() if isinstance(module, RotorAttention)]
    stores = [layer.store for layer in layers]
    for layer in layers:
        windows, exact = layer.shape.windows, layer.layout.exact
        assert exact is not None
        exactly = kinds(sum(passes), passes, begin, exact.first, exact.newest)
        layer.store = InOnePass(exactly, windows[layer.layer_idx] if windows else None)
    try:
        yield
    finally:
        for layer, store in zip(layers, stores, strict=True):
            layer.store = store
