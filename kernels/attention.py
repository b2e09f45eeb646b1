"""Attention over the rows of a layer by the kernels, for callers from transformers and serving engines."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from rotor.checkpoint.kernel_config import LayerKernels
from rotor.checkpoint.layout import AttentionShape, LayerLayout

from .absorb_launch import Absorbing, block_starts, sequences_at_once
from .decode_launch import MOST_ROWS, DecodeLayer, blocks_of, decode_attention
from .exact_slots import ExactSlots
from .expand import PagesOf
from .launch import capability_of, sm_count
from .parameters import AttentionParameters, seq_len_of
from .passes import Pass, capturing, version_of
from .ranges import KeyRanges, ranges_of_codes
from .rotary import Rotation
from .stock import (
    Varlen,
    packed_attention,
    packed_with_exact,
    prompt_attention,
    prompt_with_exact,
    prompts_alone,
)

Made = TypeVar("Made")


class StepAhead(NamedTuple):
    """A step of one new token a sequence as far as it is known before its rows are made, so that the launch which makes
    them absorbs its queries too.

    prepared: arguments of `decode_attention`. kv_len: keys of a sequence, the new one among them.
    """

    prepared: dict[str, Any]
    kv_len: int
    absorbing: Absorbing


def step_ahead(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    parameters: AttentionParameters,
    kernels: LayerKernels,
    *,
    rotation: Rotation,
    first: int,
    attention_mask: Tensor | None,
    exact: ExactSlots | None,
    now: Pass,
) -> StepAhead | None:
    """Prepare a step whose queries the launch of its rows can absorb, those of layers with keys in blocks; None of
    others.

    Args:
        shape: batch_size, 1, keys of a sequence with the new one. dtype: of the queries. The others are as of
            `rows_attention`.
    """
    few = parameters.heads_per_group <= MOST_ROWS and not kernels.materialise and first == 0
    if not few or not parameters.layout.in_blocks or parameters.query_basis is None:
        return None
    batch_size, _, kv_len = shape
    keys = _ranges_of_step(attention_mask, shape, device, now)
    prepared = _prepared(parameters, kernels, keys, rotation, dtype, device, now, exact)
    layer, starts = prepared["layer"], prepared["starts_of_blocks"]
    most = blocks_of(layer, kv_len)
    if sequences_at_once(layer, batch_size, most, 1) < batch_size:
        return None
    absorbing = Absorbing.of(layer, prepared["ranges"], slice(0, batch_size), most, starts)
    return StepAhead(prepared | {"absorbing": absorbing}, kv_len, absorbing)


def rows_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parameters: AttentionParameters,
    kernels: LayerKernels,
    *,
    rotation: Rotation | None = None,
    first: int = 0,
    attention_mask: Tensor | None = None,
    exact: ExactSlots | None = None,
    now: Pass | None = None,
    ahead: StepAhead | None = None,
) -> Tensor:
    """Attention as `reference.attention` computes it, by the kernels.

    Up to 64 query rows of a group decode; more are a prompt, which stock attention serves (see `stock`).

    Args:
        query: [batch_size, num_heads, seq_len, head_dim], rotated, KV heads in the order of the layout; in a model
            without RoPE [batch_size, seq_len, sum over query heads of width].
        key, value: rows, [batch_size, 1, kv_len, bytes] uint8, or of numbers [batch_size, 1, kv_len, width].
        kernels: how the layer is launched (kernel_config.json, or `defaults.default_layer`).
        rotation: of layers in blocks: cos and sin by index, [at least first + kv_len, rotary_dim], float32; row 0 is at
            the beginning of a block. Not `rotary.when_read`: the kernels compose rotations themselves. Or of the
            beginnings of blocks alone, of each sequence, [batch_size or 1, blocks, rotary_dim].
        first: positions from the first of `rotation` to the first row of the cache, which a window has dropped.
        attention_mask: [batch_size or 1, 1, seq_len or 1, kv_len or 1], bool; None is causal: a prefill into an empty
            cache, or one token that attends to all keys.
        exact: in a layer with exact tokens, these; rows of the tokens that they hold are not read.
        now: the pass, which has this mask: the keys that queries see are found once for its layers.
        ahead: of a step that `step_ahead` has prepared and whose queries are absorbed.
    Returns:
        [batch_size, seq_len, sum over query heads of value width], dtype of query, groups in the order of the layout;
        in a layer with exact tokens [batch_size, seq_len, num_heads * head_dim].
    """
    seq_len = seq_len_of(query)
    stock = seq_len * parameters.heads_per_group > MOST_ROWS or kernels.materialise or first > 0
    if stock and exact is not None:
        return prompt_with_exact(query, key, value, parameters, rotation, first, attention_mask, exact)
    if stock:
        return prompt_attention(query, key, value, parameters, rotation, first, attention_mask)
    shape = key.shape[0], seq_len, key.shape[2]
    packed = (query if query.dim() == 3 else query.transpose(1, 2)).flatten(0, 1)
    if ahead is not None:
        assert ahead.kv_len == key.shape[2]
        prepared = ahead.prepared
    else:
        now = now or Pass()
        keys = _ranges_of_step(attention_mask, shape, key.device, now)
        prepared = _prepared(parameters, kernels, keys, rotation, query.dtype, key.device, now, exact)
    output = decode_attention(packed, key[:, 0], value[:, 0], **prepared, max_kv_len=key.shape[2])
    return output.view(*shape[:2], -1)


def attend_pages(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parameters: AttentionParameters,
    kernels: LayerKernels,
    *,
    block_table: Tensor,
    query_start_loc: Tensor,
    kv_lens: Tensor,
    max_query_len: int,
    max_kv_len: int,
    rotation: Rotation | None = None,
    window: int | None = None,
    keys: KeyRanges | None = None,
    total_kv_len: int | None = None,
    varlen: Varlen | None = None,
    out: Tensor | None = None,
    exact: ExactSlots | None = None,
    new: tuple[Tensor, Tensor] | None = None,
    now: Pass | None = None,
) -> Tensor:
    """Causal attention of packed queries over pages, which hold the rows of the new tokens already.

    If a group has at most MOST_ROWS query rows (by max_query_len), the sequences decode; otherwise all are prompts. An
    engine with both kinds calls once for each.

    Args:
        query: [tokens, num_heads, head_dim], rotated, or of a model without RoPE [tokens, sum over heads of width].
        key, value: pages, [num_pages, page_size, bytes] uint8, or of numbers [num_pages, page_size, width].
        block_table: [batch_size, pages of a sequence], int32.
        query_start_loc: [batch_size + 1], int32. kv_lens: [batch_size], int32, the new tokens among them.
        max_query_len, max_kv_len: upper bounds for a sequence, known to the host; in a CUDA graph those that it was
            captured for.
        rotation: of layers in blocks: cos and sin by position, [positions, rotary_dim], float32.
        window: a query attends to itself and the window - 1 keys before it.
        keys: for decoding, what `ranges_of_pages` makes of these lengths, once a step for all layers of one window;
            computed here by default.
        total_kv_len: for prompts, an upper bound of all keys together; None asks the device and waits for it.
        varlen: for prompts, an engine's attention over packed sequences, see `stock.Varlen`.
        out: [tokens, sum over query heads of value width] to write into.
        exact: in a layer with exact tokens, of sequences that decode these with the new ones; of prompts those before,
            which all new tokens then attend to exactly, None where nothing lies before.
        new: there, keys after RoPE and values of the new tokens, [tokens, num_kv_heads, head_dim].
        now: the engine's step, for what layers share.
    Returns:
        [tokens, sum over query heads of value width], dtype of query; in a layer with exact tokens [tokens, num_heads *
        head_dim]. Undefined for tokens of no sequence.
    """
    if max_query_len * parameters.heads_per_group <= MOST_ROWS and not kernels.materialise:
        if keys is None:
            keys = ranges_of_pages(query_start_loc, kv_lens, len(query), max_query_len, window)
        prepared = _prepared(parameters, kernels, keys, rotation, query.dtype, key.device, now or Pass(), exact)
        return decode_attention(query, key, value, **prepared, block_table=block_table, max_kv_len=max_kv_len, out=out)
    if new is not None and exact is None:
        output = prompts_alone(query, *new, parameters, query_start_loc, max_query_len, window, varlen)
        return output if out is None else out.copy_(output)
    start = torch.zeros(len(kv_lens) + 1, dtype=torch.int32, device=kv_lens.device)
    torch.cumsum(kv_lens, 0, dtype=torch.int32, out=start[1:])
    total = total_kv_len
    if total is None:
        total = len(kv_lens) * max_kv_len if capturing(key.device) else int(start[-1])
    pages = PagesOf(block_table, kv_lens, start, total, max_kv_len)
    around = query_start_loc, max_query_len, window, varlen
    if exact is not None and new is not None:
        output = packed_with_exact(query, key, value, parameters, rotation, pages, *around, exact, new)
    else:
        output = packed_attention(query, key, value, parameters, rotation, pages, *around)
    return output if out is None else out.copy_(output)


def _ranges_of_step(mask: Tensor | None, shape: tuple[int, int, int], device: torch.device, now: Pass) -> KeyRanges:
    """`ranges_of`, found once for the layers of a pass."""
    return now.once(("ranges", shape), lambda: ranges_of(mask, shape, device))


def _prepared(
    parameters: AttentionParameters,
    kernels: LayerKernels,
    keys: KeyRanges,
    rotation: Rotation | None,
    dtype: torch.dtype,
    device: torch.device,
    now: Pass,
    exact: ExactSlots | None = None,
) -> dict[str, Any]:
    """Arguments of `decode_attention` that do not change from step to step."""
    tiles, most_programs = None, None
    if keys.longest == 1:  # with more new tokens a group has more query rows, for which the file names no tile
        tiles = kernels.tile(capability_of(device))
        most_programs = sm_count(device) * kernels.slices_per_sm
    starts = None
    if rotation is not None and parameters.layout.in_blocks:
        starts = starts_of_blocks(rotation, parameters.layout)
    prepared = {
        "layer": decode_layer(parameters, dtype, device),
        "ranges": keys,
        "starts_of_blocks": starts,
        "tiles": tiles,
        "most_programs": most_programs,
    }
    if exact is None:
        return prepared
    # Made once for layers with the same bounds. These are kept beside the result, so that no others get their ids.
    bounds = keys, exact.first, exact.until
    made = now.once(("codes", *map(id, bounds), capturing(device)), lambda: (bounds, ranges_of_codes(keys, exact)))
    return prepared | {"ranges": made[-1], "exact": exact, "attended": keys}


class Remembered(Generic[Made]):
    """Results by the tensor that they were made of. They must not hold that tensor itself, or it lives for ever.

    most: results that are kept of a tensor; the oldest goes.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._made: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def get(self, tensor: Tensor, key: tuple[object, ...], make: Callable[[], Made], keep: bool = True) -> Made:
        """The result for a tensor and a key; made if it is not known.

        Args:
            keep: remember what is made.
        """
        version = version_of(tensor)
        of_version, results = self._made.get(tensor, (version, {}))
        if of_version == version and key in results:
            known: Made = results[key]
            return known
        made = make()
        if keep:
            kept = results if of_version == version else {}
            while len(kept) >= self.most:
                del kept[next(iter(kept))]
            kept[key] = made
            self._made[tensor] = version, kept
        return made


_layers: Remembered[DecodeLayer] = Remembered(most=1)
_starts: Remembered[Tensor] = Remembered(most=64)


def decode_layer(parameters: AttentionParameters, dtype: torch.dtype, device: torch.device) -> DecodeLayer:
    """The tables and constants of a layer's launches, made once for its query basis (or without one its layout)."""
    p, basis = parameters, parameters.query_basis
    if basis is None:
        return _layer_without_basis(p.layout, p.shape, p.scaling, p.softcap, dtype, device)
    tensors = basis, p.key_constant, p.output_basis, p.value_constant
    pointers = tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)
    key = p.layout, p.shape, p.scaling, p.softcap, dtype, device, *pointers

    def make() -> DecodeLayer:
        with torch.inference_mode(False), torch.no_grad():
            return DecodeLayer(parameters, dtype, device)

    return _layers.get(basis, key, make)


@lru_cache(maxsize=4096)
def _layer_without_basis(
    layout: LayerLayout,
    shape: AttentionShape,
    scaling: float,
    softcap: float | None,
    dtype: torch.dtype,
    device: torch.device,
) -> DecodeLayer:
    return DecodeLayer(AttentionParameters(layout, shape, scaling, softcap=softcap), dtype, device)


def starts_of_blocks(rotation: Rotation, layout: LayerLayout) -> Tensor:
    """`decode_launch.block_starts`, made once for all layers and steps that go by a table."""
    cos = rotation[0]
    keep = not capturing(cos.device)
    return _starts.get(cos, (layout.rope_block,), lambda: block_starts(rotation, layout), keep=keep)


def ranges_of_pages(
    query_start_loc: Tensor, kv_lens: Tensor, tokens: int, max_query_len: int, window: int | None = None
) -> KeyRanges:
    """The keys that packed queries attend to, causally; arguments as in `attend_pages`."""
    if max_query_len == 1 and tokens == len(kv_lens):
        return KeyRanges.of_lengths(kv_lens, window=window)
    return KeyRanges.packed(query_start_loc, kv_lens, tokens, max_query_len, window)


def ranges_of(mask: Tensor | None, shape: tuple[int, int, int], device: torch.device) -> KeyRanges:
    """The keys that queries attend to: those of a mask, or without one causally.

    Args:
        mask: broadcastable to [batch_size, 1, seq_len, kv_len], bool.
        shape: batch_size, seq_len, kv_len.
    """
    batch_size, seq_len, kv_len = shape
    if mask is not None:
        return KeyRanges.of_mask(mask[:, 0].expand(shape))
    if seq_len == 1:
        return KeyRanges.of_lengths(torch.full((batch_size,), kv_len, dtype=torch.int32, device=device))
    # Without a mask several tokens are a prompt: nothing lies before them, and behind them a static cache is empty.
    lengths = torch.full((batch_size,), seq_len, dtype=torch.int32, device=device)
    start = torch.arange(0, batch_size * seq_len + 1, seq_len, dtype=torch.int32, device=device)
    return KeyRanges.packed(start, lengths, batch_size * seq_len, seq_len)
