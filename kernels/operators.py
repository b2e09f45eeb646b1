"""The kernels as operators of PyTorch, so that torch.compile traces through a layer that they serve.

What the compiler sees is one operator a call with tensors, numbers and one text (`describe`) as arguments; what it
stands for, tables of a layer and the sizes of tiles included, is looked up when the operator runs. While a model is
traced, an operator's fake implementation says the shapes, and puts the tables of its layer on the device: a CUDA graph
under capture could not copy them there. Nothing is remembered of a mask, since compiled code uses memory again without
a word: the ranges of its keys are computed by each layer, on the device.

Outside of torch.compile the launches are called as they are: an operator would cost time on the host and bring nothing.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, library
from torch._subclasses.fake_tensor import unset_fake_temporarily

from rotor.format.kernel_config import LayerKernels
from rotor.format.layout import AttentionShape, LayerLayout

from .append import Appended, prepare
from .append import append as append_rows
from .attention import attend as attend_to_rows
from .parameters import AttentionParameters, seq_len_of
from .rotary import Rotation


class Described(NamedTuple):
    """A layer as its text says: what it stores, sizes of the uncompressed model, and how the kernels run it."""

    layout: LayerLayout
    shape: AttentionShape
    kernels: LayerKernels


@torch.compiler.assume_constant_result
def describe(layout: LayerLayout, shape: AttentionShape, kernels: LayerKernels) -> str:
    """A layer as an operator's argument, which `described` reads."""
    return json.dumps([layout.to_dict(), asdict(shape), kernels.to_dict()], separators=(",", ":"))


@lru_cache(maxsize=4096)
def described(text: str) -> Described:
    """What `describe` wrote."""
    layout, shape, kernels = json.loads(text)
    where = "a layer's text"
    return Described(
        LayerLayout.from_dict(layout, where), AttentionShape(**shape), LayerKernels.from_dict(kernels, where)
    )


@library.custom_op("rotor::append", mutates_args=())
def _append(
    key: Tensor,
    value: Tensor | None,
    query: Tensor | None,
    key_basis: Tensor | None,
    key_shift: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    index: Tensor | None,
    layer: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `append.append` into new rows; without queries the first is empty."""
    of = described(layer)
    rotation = None if cos is None or sin is None else (cos, sin)
    made = append_rows(
        key, value, of.layout, of.shape, query=query, key_basis=key_basis, key_shift=key_shift, rotation=rotation,
        index=index,
    )  # fmt: skip
    rotated = key.new_empty(0) if made.query is None else made.query.transpose(1, 2)
    inputs = {side.untyped_storage().data_ptr() for side in (key, value) if side is not None}
    # An operator's outputs are memory of their own; rows of numbers may be what k_proj and v_proj put out.
    rows = [row.clone() if row.untyped_storage().data_ptr() in inputs else row for row in (made.key, made.value)]
    return rotated, rows[0], rows[1]


@_append.register_fake
def _(key, value, query, key_basis, key_shift, cos, sin, index, layer):  # type: ignore[no-untyped-def]
    of, size = described(layer), key.element_size()
    _on_device(key.device, lambda device: prepare(of.layout, of.shape, key.dtype, device))
    unit, dtype = (1, torch.uint8) if of.layout.coded else (size, key.dtype)
    sides = [key.new_empty(key.shape[0], 1, key.shape[1], n // unit, dtype=dtype) for n in of.layout.row_bytes(size)]
    return key.new_empty(0) if query is None else query.new_empty(query.shape), *sides


def append(
    key: Tensor,
    value: Tensor | None,
    layer: str,
    *,
    query: Tensor | None = None,
    key_basis: Tensor | None = None,
    key_shift: Tensor | None = None,
    rotation: Rotation | None = None,
    index: Tensor | None = None,
) -> Appended:
    """As `append.append` into new rows, for the layer that `describe` described."""
    cos, sin = (None, None) if rotation is None else rotation
    rotated, *rows = _append(key, value, query, key_basis, key_shift, cos, sin, index, layer)
    return Appended(None if query is None else rotated.transpose(1, 2), *rows)


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
    """As `attention.attend`, remembering nothing of the mask."""
    of = described(layer)
    parameters = AttentionParameters(of.layout, of.shape, scaling, query_basis, key_constant, softcap)
    rotation = None if cos is None or sin is None else (cos, sin)
    return attend_to_rows(
        query, key, value, parameters, of.kernels, rotation=rotation, first=first, attention_mask=mask, remember=False
    )


@_attend.register_fake
def _(query, key, value, mask, query_basis, key_constant, cos, sin, first, scaling, softcap, layer):  # type: ignore[no-untyped-def]
    of = described(layer)
    heads = of.layout.group_size * of.shape.heads_per_kv
    return query.new_empty(query.shape[0], seq_len_of(query), heads * of.layout.value_width)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parameters: AttentionParameters,
    layer: str,
    *,
    rotation: Rotation | None = None,
    first: int = 0,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """As `attention.attend`, for the layer that `describe` described."""
    cos, sin = (None, None) if rotation is None else rotation
    p = parameters
    return _attend(
        query, key, value, attention_mask, p.query_basis, p.key_constant, cos, sin, first, p.scaling, p.softcap, layer
    )


def _on_device(device, make) -> None:  # type: ignore[no-untyped-def]
    """Make a table where operators will look for it, on a real device, unless there is none but a fake one."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return
    with unset_fake_temporarily():
        make(device)
