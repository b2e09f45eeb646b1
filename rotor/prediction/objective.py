"""The objective that ranks and bits are chosen by: bytes of cache, predicted time, or a mixture of both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..format.channels import Latent
from ..format.layout import AttentionShape, Candidate, GroupLayout, LayerLayout
from .cost import DecodeStep, layer_time, uncompressed_layer_bytes, uncompressed_layer_time
from .devices import Device, find_device

if TYPE_CHECKING:
    from ..recipe import ObjectiveSettings


@dataclass(frozen=True)
class Objective:
    """Cost of a group of KV heads, by which ranks, forms of keys and group sizes are compared.

    The cost of a group is a share of the uncompressed layer's: the KV heads of an uncompressed layer cost 1 together.
    It adds up over groups and layers and rises with the width of both sides.

    - memory: bytes of cache.
    - latency: predicted seconds of a decode step, as if all groups of the layer were like this one.

    latency_weight: from 0 (memory alone) to 1 (latency alone).
    """

    latency_weight: float
    device: Device
    shape: AttentionShape
    step: DecodeStep

    @classmethod
    def of(cls, settings: ObjectiveSettings, shape: AttentionShape, element_bytes: int) -> Objective:
        """The objective that a recipe asks for; raises RecipeError if its device is not known."""
        device = find_device(settings.device, settings.device_file)
        return cls(
            settings.weight, device, shape, DecodeStep(settings.context_tokens, settings.batch_size, element_bytes)
        )

    def group_cost(self, candidate: Candidate, keys: Latent, values: Latent | None) -> float:
        """The cost of one group; for comparing candidates. values is None where they are in the key latent."""
        groups = self.shape.num_kv_heads // candidate.group_size
        heads = range(self.shape.num_kv_heads)
        layout = LayerLayout(
            tuple(
                GroupLayout(tuple(heads[first : first + candidate.group_size]), keys, values)
                for first in heads[:: candidate.group_size]
            ),
            *candidate.form,
        )
        size = self.step.element_bytes
        memory = sum(layout.row_bytes(size)) / uncompressed_layer_bytes(self.shape, size)
        latency = 0.0
        if self.latency_weight:
            base = uncompressed_layer_time(self.shape, self.device, self.step).seconds
            latency = layer_time(layout, self.shape, self.device, self.step).seconds / base
        return ((1 - self.latency_weight) * memory + self.latency_weight * latency) / groups
