"""Passes over whole rows in which layers with exact tokens read what decoding token by token reads.

A served prompt is exact: its tokens attend to each other's own keys and values, so that a pass over a text says nothing
of what compression costs. Accuracy is that of the tokens that come after.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from ..kernels.parameters import shown_by
from ..kernels.passes import TokenSpan
from ..kernels.reference.whole_rows import decoded_attention
from .attention import RotorAttention
from .steps import Attend, AttentionCall, CacheRows, RowStore

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel


@dataclass(frozen=True)
class DecodedRows(RowStore):
    """The store of passes over whole rows, whose tokens behind a prompt came one by one; nothing is kept.

    prompt: tokens that came at once. A pass with a cache keeps its rows there, as ever.
    """

    prompt: int = 1
    in_pytorch = True

    def token_span(self, cache: Cache | None, layer_idx: int, seq_len: int) -> TokenSpan:
        return CacheRows().token_span(cache, layer_idx, seq_len)

    def row_store(self, cache: Cache | None, layer_idx: int) -> RowStore:
        return self if cache is None else CacheRows().row_store(cache, layer_idx)

    def stored(self, call: AttentionCall) -> Attend:
        return self.store_and_attend

    def store_and_attend(self, call: AttentionCall) -> Tensor:
        assert call.exact is not None
        begin = None if call.mask is None else first_seen(call.mask)
        return decoded_attention(
            call.query,
            call.key,
            call.value,
            exact=(call.exact.key, call.exact.value),
            parameters=call.parameters,
            key_rotation=call.rotations.read,
            attention_mask=call.mask,
            prompt=self.prompt,
            begin=begin,
        )


def first_seen(mask: Tensor) -> Tensor:
    """Index of the first token of each sequence that is no padding, [batch_size or 1]: such a token sees itself.

    Args:
        mask: [batch_size or 1, heads or 1, seq_len, seq_len], bool (True: attend) or added to the logits.
    """
    return shown_by(mask.diagonal(dim1=-2, dim2=-1)).any(1).int().argmax(-1)


@contextmanager
def decoding(modules: Iterable[nn.Module], prompt: int = 1) -> Iterator[None]:
    """Let those of the modules that keep tokens exactly attend as if the tokens behind a prompt came one by one.

    Args:
        modules: attention modules of a model, compressed or not.
        prompt: tokens that come at once, of passes without a cache.
    """
    chosen = [m for m in modules if isinstance(m, RotorAttention) and m.layout.exact is not None]
    stores = [module.store for module in chosen]
    try:
        decoded = DecodedRows(prompt)
        for module in chosen:
            module.store = decoded
        yield
    finally:
        for module, store in zip(chosen, stores, strict=True):
            module.store = store


@contextmanager
def decoding_without_cache(model: PreTrainedModel) -> Iterator[None]:
    """Let passes of a model of transformers that are not asked for a cache have none, and be as `decoding` has them.

    `generate` asks for a cache, so that its prompts are exact as they are served.
    """
    config = model.config.get_text_config()
    use_cache, config.use_cache = config.use_cache, False
    try:
        with decoding(model.modules()):
            yield
    finally:
        config.use_cache = use_cache
