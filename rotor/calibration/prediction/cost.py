"""Predicted time of attention in a decode step, by the bytes that it reads and the instructions that it issues.

Attention over the cache takes the longer of two limits, which overlap: bytes of the cache over the memory's bandwidth,
and warp instructions (`instructions.py`) over SMs x clock x instructions per cycle, 1.5 unless the device was measured.
The projections (q, k, v, o and the bases) are read once for the whole batch, before and after attention. The
uncompressed model's attention is assumed to be limited by bytes alone.

Queries that are absorbed once a block of positions are written and read again: as many bytes as the rows, where two KV
heads share a latent. A layer that expands keys in memory (`kernels.dispatch`: those stored before RoPE) reads its rows,
and writes and reads keys and values of full width. Norms, new tokens, launches and everything outside
attention are left out.

Source: the roofline model (Williams, Waterman and Patterson, 2009).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...checkpoint.layout import AttentionShape, LayerLayout
from ...checkpoint.tensors import layer_tensors
from ...kernels.dispatch import default_layer
from .devices import Device
from .instructions import group_instructions


@dataclass(frozen=True)
class DecodeStep:
    """Load of one decode step: tokens that each sequence attends to, number of sequences, bytes of a stored number."""

    context_tokens: int
    batch_size: int
    element_bytes: int = 2

    @property
    def keys(self) -> int:
        return self.context_tokens * self.batch_size


@dataclass(frozen=True)
class LayerTime:
    """Predicted attention of one layer in a decode step.

    cache_bytes: bytes of the cache that are read, and written if keys are expanded in memory.
    instructions: warp instructions.
    projection_bytes: bytes of weights.
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
        """Predict the time on a device: the slower of reading and issuing."""
        attention = max(device.read_seconds(cache_bytes), device.issue_seconds(instructions))
        return cls(cache_bytes, instructions, projection_bytes, attention, device.read_seconds(projection_bytes))


def layer_time(layout: LayerLayout, shape: AttentionShape, device: Device, step: DecodeStep) -> LayerTime:
    """Predict the time of a compressed layer in a decode step."""
    tensors = layer_tensors(layout, shape, ())
    weights = sum(math.prod(spec.shape) * (4 if spec.float32 else step.element_bytes) for spec in tensors.values())
    instructions = 0.0
    if not default_layer(layout).materialise:
        instructions = sum(group_instructions(layout, group, shape) for group in layout.groups)
    read = layer_bytes(layout, shape, step.element_bytes)
    return LayerTime.of(step.keys * read, step.keys * instructions, weights, device)


def layer_bytes(layout: LayerLayout, shape: AttentionShape, element_bytes: int) -> int:
    """Bytes per token that attention of a compressed layer reads and writes: rows, and absorbed queries or, if it
    expands keys in memory, these."""
    rows = sum(layout.row_bytes(element_bytes))
    if default_layer(layout).materialise:
        return rows + 2 * uncompressed_layer_bytes(shape, element_bytes)
    if layout.rope_block is None:
        return rows
    absorbed = layout.group_size * shape.heads_per_kv * layout.key_width * element_bytes
    return rows + round(2 * absorbed / layout.rope_block)


def uncompressed_layer_time(shape: AttentionShape, device: Device, step: DecodeStep) -> LayerTime:
    """Predict the time of a layer of the uncompressed model in a decode step."""
    weights = shape.projection_elements * step.element_bytes
    return LayerTime.of(step.keys * uncompressed_layer_bytes(shape, step.element_bytes), 0.0, weights, device)


def uncompressed_layer_bytes(shape: AttentionShape, element_bytes: int) -> int:
    """Bytes of a token's uncompressed keys and values in one layer."""
    return element_bytes * 2 * shape.kv_width


def decode_seconds(layouts: Sequence[LayerLayout], shape: AttentionShape, device: Device, step: DecodeStep) -> float:
    """Predict the seconds of a decode step: attention in all layers, with their projections."""
    return sum(layer_time(layout, shape.layer(n), device, step).seconds for n, layout in enumerate(layouts))


def uncompressed_decode_seconds(shape: AttentionShape, device: Device, step: DecodeStep) -> float:
    """Predict the seconds of a decode step of the uncompressed model."""
    return sum(count * uncompressed_layer_time(sizes, device, step).seconds for sizes, count in shape.sizes.items())
