"""Predicted time of attention in a decode step, by the bytes that it reads and the instructions that it issues.

Attention over the cache takes the longer of two limits, which overlap: bytes of the cache over the memory's bandwidth,
and warp instructions (`instructions`) over SMs x clock x instructions a cycle, 1.5 where no device file has measured
it. The projections (q, k, v, o and the bases) are read once for the whole batch, before and after. The uncompressed
model's attention is taken to be as fast as its bytes.

A layer that rebuilds keys in memory (`kernels.defaults`: more fast planes than a tile rebuilds) reads its rows, and
writes and reads keys and values of full width. Left out everywhere: norms, new tokens, launches, and what is outside
attention.

Source: the roofline model (Williams, Waterman and Patterson, 2009).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..format.layout import AttentionShape, LayerLayout, uncompressed_kv_bytes_per_token
from ..format.tensors import layer_tensors
from ..kernels.defaults import default_layer
from .devices import Device
from .instructions import group_instructions


@dataclass(frozen=True)
class DecodeStep:
    """The load of one decode step: sequences in the batch, tokens that each attends to, bytes of a stored number.

    In a layer with a sliding window, context_tokens is at most the window. Weights and cache have the same dtype.
    """

    context_tokens: int
    batch_size: int
    element_bytes: int = 2

    @property
    def keys(self) -> int:
        return self.context_tokens * self.batch_size


@dataclass(frozen=True)
class LayerTime:
    """Attention of one layer in a step.

    cache_bytes: read (and written, where keys are rebuilt in memory). instructions: warp instructions.
    projection_bytes: weights.
    """

    cache_bytes: float
    instructions: float
    projection_bytes: float
    attention_s: float
    projection_s: float

    @property
    def seconds(self) -> float:
        return self.attention_s + self.projection_s

    @classmethod
    def of(cls, cache_bytes: float, instructions: float, projection_bytes: float, device: Device) -> LayerTime:
        """By the limits of a device."""
        attention = max(device.read_seconds(cache_bytes), device.issue_seconds(instructions))
        return cls(cache_bytes, instructions, projection_bytes, attention, device.read_seconds(projection_bytes))


def layer_time(layout: LayerLayout, shape: AttentionShape, device: Device, step: DecodeStep) -> LayerTime:
    """Of a compressed layer."""
    tensors = layer_tensors(layout, shape, ())
    weights = sum(math.prod(spec.shape) * (4 if spec.float32 else step.element_bytes) for spec in tensors.values())
    instructions = 0.0
    if not default_layer(layout).materialise:
        instructions = sum(group_instructions(layout, group, shape) for group in layout.groups)
    read = layer_bytes(layout, shape, step.element_bytes)
    return LayerTime.of(step.keys * read, step.keys * instructions, weights, device)


def layer_bytes(layout: LayerLayout, shape: AttentionShape, element_bytes: int) -> int:
    """Bytes that attention reads, and writes where it rebuilds keys in memory, for a token in a compressed layer."""
    rebuilt = 2 * uncompressed_layer_bytes(shape, element_bytes) if default_layer(layout).materialise else 0
    return sum(layout.row_bytes(element_bytes)) + rebuilt


def uncompressed_layer_time(shape: AttentionShape, device: Device, step: DecodeStep) -> LayerTime:
    """Of a layer of the uncompressed model."""
    weights = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim * shape.hidden_size * step.element_bytes
    return LayerTime.of(step.keys * uncompressed_layer_bytes(shape, step.element_bytes), 0.0, weights, device)


def uncompressed_layer_bytes(shape: AttentionShape, element_bytes: int) -> int:
    """Bytes of keys and values of a token in one layer."""
    return uncompressed_kv_bytes_per_token(shape, element_bytes) // shape.num_layers


@dataclass(frozen=True)
class DecodeTime:
    """Of all layers of a model in a step."""

    layers: tuple[LayerTime, ...]

    @property
    def seconds(self) -> float:
        return sum(layer.seconds for layer in self.layers)

    @property
    def attention_s(self) -> float:
        return sum(layer.attention_s for layer in self.layers)

    @property
    def cache_bytes(self) -> float:
        return sum(layer.cache_bytes for layer in self.layers)

    @property
    def instructions(self) -> float:
        return sum(layer.instructions for layer in self.layers)


def decode_time(
    layouts: Sequence[LayerLayout], shape: AttentionShape, device: Device, batch_size: int, kv_len: int
) -> DecodeTime:
    """Of a compressed model of 16-bit numbers, or of codes, layer by layer."""
    step = DecodeStep(kv_len, batch_size)
    return DecodeTime(tuple(layer_time(layout, shape, device, step) for layout in layouts))


def uncompressed_decode_time(shape: AttentionShape, device: Device, batch_size: int, kv_len: int) -> DecodeTime:
    """Of the model before it is compressed."""
    layer = uncompressed_layer_time(shape, device, DecodeStep(kv_len, batch_size))
    return DecodeTime((layer,) * shape.num_layers)


def decode_seconds(layouts: Sequence[LayerLayout], shape: AttentionShape, device: Device, step: DecodeStep) -> float:
    """Of attention in all layers, projections among it."""
    return sum(layer_time(layout, shape, device, step).seconds for layout in layouts)


def uncompressed_decode_seconds(shape: AttentionShape, device: Device, step: DecodeStep) -> float:
    """Predict `decode_seconds` of the uncompressed model."""
    return shape.num_layers * uncompressed_layer_time(shape, device, step).seconds


@dataclass(frozen=True)
class Work:
    """The least that attention reads and multiplies, whatever computes it: what measured times are compared with."""

    cache_bytes: float
    flops: float

    def seconds(self, bandwidth_bytes_per_s: float, matmul_flops_per_s: float) -> float:
        return max(self.cache_bytes / bandwidth_bytes_per_s, self.flops / matmul_flops_per_s)


def least_work(
    layout: LayerLayout, shape: AttentionShape, seq_len: int, batch_size: int, element_bytes: int = 2, past: int = 0
) -> Work:
    """Attention of a layer over new tokens: the cache once, and products of each query with the keys up to its own.

    Keys whose planes are all fast are counted as rebuilt once; projections are not counted.

    Args:
        seq_len: new tokens of a sequence. past: cached ones before them.
    """
    pairs = batch_size * (seq_len * (seq_len + 1) / 2 + seq_len * past)
    tokens = batch_size * (seq_len + past)
    rebuilt = bool(shape.rotary_dim) and layout.fast_planes == shape.rotary_planes
    flops = 0.0
    for group in layout.groups:
        heads, width = len(group.kv_heads), shape.head_dim if rebuilt else group.key.width
        flops += 2 * heads * shape.heads_per_kv * (width + group.values.width) * pairs
        flops += 2 * heads * group.key.width * shape.head_dim * tokens if rebuilt else 0
    return Work(tokens * float(sum(layout.row_bytes(element_bytes))), flops)
