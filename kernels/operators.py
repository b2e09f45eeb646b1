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

from .append import append as append_rows
from .append import prepare
from .attention import rows_attention
from .parameters import AttentionParameters, seq_len_of
from .rotary import Rotation
from .rows import CodeScales, row_dtype


@torch.compiler.assume_constant_result
def describe(layout: LayerLayout, shape: AttentionShape, kernels: LayerKernels) -> str:
    """Write a layer as a text, which an operator can take; `described` reads it."""
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
    scale_shift: Tensor | None,
    scale_length: Tensor | None,
    scale_errors: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    index: Tensor | None,
    layer: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """`append.append` into new rows; the first result is empty where there are no queries."""
    layout, shape, _ = described(layer)
    rotation = None if cos is None or sin is None else (cos, sin)
    scales = None
    if scale_shift is not None and scale_length is not None:
        scales = CodeScales(scale_shift, scale_length, scale_errors)
    made = append_rows(
        key, value, layout, shape, query=query, key_basis=key_basis, key_shift=key_shift, rotation=rotation,
        index=index, scales=scales,
    )  # fmt: skip
    rotated = key.new_empty(0) if made.query is None else made.query.transpose(1, 2)
    inputs = {side.untyped_storage().data_ptr() for side in (key, value) if side is not None}
    # An operator must not return its inputs, and rows of numbers may be the outputs of k_proj and v_proj.
    rows = [row.clone() if row.untyped_storage().data_ptr() in inputs else row for row in (made.key, made.value)]
    return rotated, rows[0], rows[1]


@_append.register_fake
def _(  # type: ignore[no-untyped-def]
    key, value, query, key_basis, key_shift, scale_shift, scale_length, scale_errors, cos, sin, index, layer
):  # fmt: skip
    layout, shape, _ = described(layer)
    if key.device.type != "cuda" or torch.cuda.is_available():
        with unset_fake_temporarily():
            prepare(layout, shape, key.dtype, key.device)
    dtype = row_dtype(layout, key.dtype)
    widths = layout.row_elements(key.element_size())
    sides = [key.new_empty(key.shape[0], 1, key.shape[1], width, dtype=dtype) for width in widths]
    return key.new_empty(0) if query is None else query.new_empty(query.shape), *sides


def append(
    parameters: AttentionParameters,
    kernels: LayerKernels,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotation: Rotation | None,
    index: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Make the queries of new tokens as attention takes them, and their rows; see `append.append`.

    Args:
        query, key, value: as projections and norms put them out.
    """
    p = parameters
    asked = None if p.query_basis is None else query
    if not torch.compiler.is_compiling():
        made = append_rows(
            key, value, p.layout, p.shape, query=asked, key_basis=p.key_basis, key_shift=p.key_shift,
            rotation=rotation, index=index, scales=p.scales,
        )  # fmt: skip
        return query if made.query is None else made.query, made.key, made.value
    cos, sin = rotation or (None, None)
    text = describe(p.layout, p.shape, kernels)
    scales = p.scales or (None, None, None)
    rotated, *rows = _append(key, value, asked, p.key_basis, p.key_shift, *scales, cos, sin, index, text)
    return query if asked is None else rotated.transpose(1, 2), rows[0], rows[1]


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
) -> Tensor:
    """`attention.rows_attention`, which remembers nothing of the mask."""
    layout, shape, kernels = described(layer)
    parameters = AttentionParameters(layout, shape, scaling, query_basis, key_constant, softcap)
    rotation = None if cos is None or sin is None else (cos, sin)
    return rows_attention(
        query, key, value, parameters, kernels, rotation=rotation, first=first, attention_mask=mask, remember=False
    )


@_attend.register_fake
def _(query, key, value, mask, query_basis, key_constant, cos, sin, first, scaling, softcap, layer):  # type: ignore[no-untyped-def]
    layout, shape, _ = described(layer)
    heads = layout.group_size * shape.heads_per_kv
    return query.new_empty(query.shape[0], seq_len_of(query), heads * layout.value_width)


def traced_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parameters: AttentionParameters,
    kernels: LayerKernels,
    *,
    rotation: Rotation | None,
    first: int,
    attention_mask: Tensor | None,
) -> Tensor:
    """`attention.rows_attention` as an operator, for code that torch.compile traces."""
    p, mask = parameters, attention_mask
    cos, sin = rotation or (None, None)
    text = describe(p.layout, p.shape, kernels)
    return _attend(query, key, value, mask, p.query_basis, p.key_constant, cos, sin, first, p.scaling, p.softcap, text)
