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
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, library
from torch._subclasses.fake_tensor import unset_fake_temporarily

from rotor.format.kernel_config import KernelConfig, LayerKernels, Schedule
from rotor.format.layout import LayerLayout

from .attention import attend, ranges_of
from .layer_table import layer_parts, table_on
from .parameters import AttentionParameters, seq_len_of
from .prefill.rebuild import rebuilt_groups
from .projection import append, coded, rotation
from .rows import LayerColumns


class Described(NamedTuple):
    """A layer as its text says: what it stores, how the kernels run it, and sizes of the uncompressed model."""

    layout: LayerLayout
    schedule: Schedule
    kernels: LayerKernels
    heads_per_kv: int
    head_dim: int


@torch.compiler.assume_constant_result
def describe(layout: LayerLayout, schedule: Schedule, kernels: LayerKernels, heads_per_kv: int, head_dim: int) -> str:
    """A layer as an operator's argument, which `described` reads."""
    config = KernelConfig(schedule, (kernels,)).to_dict()
    return json.dumps([layout.to_dict(), config, heads_per_kv, head_dim], separators=(",", ":"))


@lru_cache(maxsize=4096)
def described(text: str) -> Described:
    """What `describe` wrote."""
    layout, config, heads_per_kv, head_dim = json.loads(text)
    read = KernelConfig.from_dict(config, "a layer's text")
    return Described(
        LayerLayout.from_dict(layout, "a layer's text"), read.schedule, read.layers[0], heads_per_kv, head_dim
    )


@library.custom_op("rotor::rotate_and_project", mutates_args=())
def rotate_and_project(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_basis: Tensor,
    key_basis: Tensor,
    layer: str,
) -> tuple[Tensor, Tensor]:
    """As `projection.rotation.rotate_and_project`; `layer` as `describe` gives it."""
    of = described(layer)
    return rotation.rotate_and_project(query, key, cos, sin, of.layout, of.heads_per_kv, query_basis, key_basis)


@rotate_and_project.register_fake
def _(query, key, cos, sin, query_basis, key_basis, layer):  # type: ignore[no-untyped-def]
    of = described(layer)
    _on_device(query.device, lambda device: rotation.group_table(of.layout, device))
    batch_size, seq_len = query.shape[:2]
    rows = of.layout.group_size * of.heads_per_kv
    return (
        query.new_empty(batch_size, seq_len, rows * of.layout.qk_width),
        query.new_empty(batch_size, seq_len, of.layout.qk_width),
    )


@library.custom_op("rotor::rotate_and_pack", mutates_args=())
def rotate_and_pack(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_basis: Tensor,
    key_basis: Tensor,
    key_shift: Tensor,
    layer: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `projection.coded.rotate_and_pack`."""
    of = described(layer)
    return coded.rotate_and_pack(
        query, key, value, cos, sin, of.layout, of.heads_per_kv, query_basis, key_basis, key_shift
    )


@rotate_and_pack.register_fake
def _(query, key, value, cos, sin, query_basis, key_basis, key_shift, layer):  # type: ignore[no-untyped-def]
    of, size = described(layer), query.element_size()
    _on_device(query.device, lambda device: rotation.group_table(of.layout, device))
    _on_device(query.device, lambda device: append.segments_on(LayerColumns.of(of.layout), size, device))
    batch_size, seq_len = query.shape[:2]
    qk_bytes, v_bytes = of.layout.row_bytes(size)
    rows = of.layout.group_size * of.heads_per_kv
    return (
        query.new_empty(batch_size, seq_len, rows * of.layout.qk_width),
        query.new_empty(batch_size, seq_len, qk_bytes, dtype=torch.uint8),
        query.new_empty(batch_size, seq_len, v_bytes, dtype=torch.uint8),
    )


@library.custom_op("rotor::pack_rows", mutates_args=())
def pack_rows(key: Tensor, value: Tensor, layer: str) -> tuple[Tensor, Tensor]:
    """As `projection.append.pack_rows`, of the keys and of the values of a layer."""
    return append.pack_rows(key, value, LayerColumns.of(described(layer).layout))


@pack_rows.register_fake
def _(key, value, layer):  # type: ignore[no-untyped-def]
    layout, size = described(layer).layout, key.element_size()
    _on_device(key.device, lambda device: append.segments_on(LayerColumns.of(layout), size, device))
    qk_bytes, v_bytes = layout.row_bytes(size)
    return (
        key.new_empty(*key.shape[:-1], qk_bytes, dtype=torch.uint8),
        value.new_empty(*value.shape[:-1], v_bytes, dtype=torch.uint8),
    )


@library.custom_op("rotor::attention", mutates_args=())
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    query_basis: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    constant_key: Tensor | None,
    scaling: float,
    softcap: float | None,
    layer: str,
) -> Tensor:
    """As `attention.packed_attention`; cos and sin are its key_rotation, `layer` is as `describe` gives it."""
    of = described(layer)
    parameters = AttentionParameters(of.layout, of.heads_per_kv, scaling, query_basis, constant_key, softcap)
    key_rotation = None if cos is None or sin is None else (cos, sin)
    keys = ranges_of(mask, (key.shape[0], seq_len_of(query), key.shape[2]), key.device)
    return attend(query, key, value, parameters, of.head_dim, keys, key_rotation, of.schedule, of.kernels)


@attention.register_fake
def _(query, key, value, mask, query_basis, cos, sin, constant_key, scaling, softcap, layer):  # type: ignore[no-untyped-def]
    of, size = described(layer), query.element_size()
    parts = layer_parts(of.layout, of.heads_per_kv, of.head_dim, of.kernels, size)
    _on_device(key.device, lambda device: table_on(parts, device))
    if of.layout.domain == "pre":
        _on_device(key.device, lambda device: rebuilt_groups(of.layout, size, device))
    width = of.layout.group_size * of.heads_per_kv * of.layout.v_width
    return query.new_empty(query.shape[0], seq_len_of(query), width)


def _on_device(device, make) -> None:  # type: ignore[no-untyped-def]
    """Make a table where operators will look for it, on a real device, unless there is none but a fake one."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return
    with unset_fake_temporarily():
        make(device)
