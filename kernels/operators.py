"""The kernels as operators of PyTorch, for code that torch.compile traces.

The compiler sees one operator a call, whose arguments are tensors, numbers and one text (`describe`). The text stands
for the layer; its tables and tiles are looked up when the operator runs. While a model is traced, an operator's fake
implementation gives the shapes and puts the tables of its layer on the device, since a CUDA graph under capture could
not copy them there. Nothing is remembered of a mask, as compiled code writes into its memory again: each layer computes
the ranges of its keys on the device.

Outside of torch.compile an operator would only cost time on the host.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import lru_cache

import torch
from torch import Tensor, library
from torch._subclasses.fake_tensor import unset_fake_temporarily

from rotor.checked import Reader
from rotor.checkpoint.kernel_config import LayerKernels
from rotor.checkpoint.layout import AttentionShape, LayerLayout
from rotor.checkpoint.rows import RowScale

from .append import Appended, prepare
from .append import append as append_rows
from .attention import rows_attention
from .parameters import AttentionParameters, seq_len_of
from .rotary import Rotation
from .rows import row_dtype
from .slots import ExactSlots, SlotsToFill


def describe(layout: LayerLayout, shape: AttentionShape, kernels: LayerKernels) -> str:
    """Write a layer as a text, which an operator can take; `described` reads it. Not while a compiler traces."""
    return json.dumps([layout.to_dict(), asdict(shape), asdict(kernels)], separators=(",", ":"))


@lru_cache(maxsize=4096)
def described(text: str) -> tuple[LayerLayout, AttentionShape, LayerKernels]:
    """Read what `describe` wrote."""
    layout, shape, kernels = json.loads(text)
    where = "a layer's text"
    return LayerLayout.from_dict(layout, where), AttentionShape(**shape), Reader(where).read(LayerKernels, kernels)


@library.custom_op("rotor::append", mutates_args=())
def _append(
    key: Tensor,
    value: Tensor | None,
    query: Tensor | None,
    key_basis: Tensor | None,
    key_shift: Tensor | None,
    value_basis: Tensor | None,
    value_shift: Tensor | None,
    scale_shift: Tensor | None,
    scale_length: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    index: Tensor | None,
    layer: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """`append.append` into new rows; the first result is what it rotated, or empty."""
    layout, shape, _ = described(layer)
    rotation = None if cos is None or sin is None else (cos, sin)
    scale = None
    if scale_shift is not None and scale_length is not None:
        scale = RowScale(scale_shift, scale_length)
    made = append_rows(
        key, value, layout, shape, query=query, key_basis=key_basis, key_shift=key_shift, value_basis=value_basis,
        value_shift=value_shift, rotation=rotation, index=index, scale=scale, remember=False,
    )  # fmt: skip
    rotated = key.new_empty(0) if made.rotated is None else made.rotated
    inputs = {side.untyped_storage().data_ptr() for side in (key, value) if side is not None}
    # An operator must not return its inputs, and rows of numbers may be the outputs of k_proj and v_proj.
    rows = [row.clone() if row.untyped_storage().data_ptr() in inputs else row for row in (made.key, made.value)]
    return rotated, rows[0], rows[1]


@_append.register_fake
def _(  # type: ignore[no-untyped-def]
    key, value, query, key_basis, key_shift, value_basis, value_shift, scale_shift, scale_length,
    cos, sin, index, layer,
):  # fmt: skip
    layout, shape, _ = described(layer)
    if key.device.type != "cuda" or torch.cuda.is_available():
        with unset_fake_temporarily():
            prepare(layout, shape, key.dtype, key.device)
    dtype = row_dtype(layout, key.dtype)
    widths = layout.row_elements(key.element_size())
    sides = [key.new_empty(key.shape[0], 1, key.shape[1], width, dtype=dtype) for width in widths]
    if query is None:
        return key.new_empty(0), *sides
    heads = shape.num_heads + (0 if value_basis is None else shape.num_kv_heads)
    return query.new_empty(*query.shape[:2], heads, shape.head_dim), *sides


def append(
    parameters: AttentionParameters,
    text: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotation: Rotation | None,
    index: Tensor | None,
    fill: SlotsToFill | None = None,
) -> Appended:
    """Make the queries of new tokens as attention takes them, and their rows; see `append.append`.

    Args:
        text: the layer by `describe`, while a compiler traces.
        query, key, value: as projections and norms put them out. fill: not while a compiler traces.
    Returns:
        With queries always.
    """
    p = parameters
    asked = None if p.query_basis is None or rotation is None else query
    bases = p.key_basis, p.key_shift, p.value_basis, p.value_shift
    if not torch.compiler.is_compiling():
        names = ("key_basis", "key_shift", "value_basis", "value_shift")
        made = append_rows(
            key, value, p.layout, p.shape, query=asked, rotation=rotation, index=index, scale=p.scale, fill=fill,
            **dict(zip(names, bases, strict=True)),
        )  # fmt: skip
        return made if made.query is not None else made._replace(query=_as_attended(query))
    cos, sin = rotation or (None, None)
    scale = p.scale or (None, None)
    rotated, *rows = _append(key, value, asked, *bases, *scale, cos, sin, index, text)
    if asked is not None:
        query = rotated[:, :, : p.shape.num_heads]
        key = rotated[:, :, p.shape.num_heads :] if p.value_basis is not None else key
    query = _as_attended(query)
    if p.value_basis is None:
        return Appended(query, rows[0], rows[1])
    return Appended(query, rows[0], rows[1], key.transpose(1, 2), value.transpose(1, 2))


def _as_attended(query: Tensor) -> Tensor:
    """Heads side by side as [batch_size, num_heads, seq_len, head_dim]; absorbed queries as they are."""
    return query.transpose(1, 2) if query.dim() == 4 else query


@library.custom_op("rotor::attend", mutates_args=())
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    query_basis: Tensor | None,
    key_constant: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    first: int,
    scaling: float,
    softcap: float | None,
    layer: str,
    output_basis: Tensor | None,
    value_constant: Tensor | None,
    exact: list[Tensor],
) -> Tensor:
    """`attention.rows_attention`, which remembers nothing of the mask.

    exact: the tensors of `slots.ExactSlots`, in their order; none in a layer without exact tokens.
    """
    layout, shape, kernels = described(layer)
    parameters = AttentionParameters(
        layout, shape, scaling, query_basis, key_constant, softcap, output_basis=output_basis,
        value_constant=value_constant,
    )  # fmt: skip
    return rows_attention(
        query, key, value, parameters, kernels, rotation=None if cos is None or sin is None else (cos, sin),
        first=first, attention_mask=mask, remember=False, exact=ExactSlots(*exact) if exact else None,
    )  # fmt: skip


@_attend.register_fake
def _(
    query, key, value, mask, query_basis, key_constant, cos, sin, first, scaling, softcap, layer, output_basis,
    value_constant, exact,
):  # type: ignore[no-untyped-def]  # fmt: skip
    layout, shape, _ = described(layer)
    if exact:
        return query.new_empty(query.shape[0], seq_len_of(query), shape.num_heads * shape.head_dim)
    heads = layout.group_size * shape.heads_per_kv
    return query.new_empty(query.shape[0], seq_len_of(query), heads * layout.value_width)


def traced_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parameters: AttentionParameters,
    text: str,
    *,
    rotation: Rotation | None,
    first: int,
    attention_mask: Tensor | None,
    exact: ExactSlots | None = None,
) -> Tensor:
    """`attention.rows_attention` as an operator, for code that torch.compile traces; `text` is by `describe`."""
    p, mask = parameters, attention_mask
    cos, sin = rotation or (None, None)
    tensors = [] if exact is None else [exact.key, exact.value, exact.index, exact.first, exact.until]
    return _attend(
        query, key, value, mask, p.query_basis, p.key_constant, cos, sin, first, p.scaling, p.softcap, text,
        p.output_basis, p.value_constant, tensors,
    )  # fmt: skip
