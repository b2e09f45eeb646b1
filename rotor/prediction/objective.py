"""The objective that ranks and bits are chosen by: bytes of cache, predicted time, or a mixture of both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..format.channels import Latent
from ..format.layout import AttentionShape, Candidate, GroupLayout, LayerLayout
from .cost import DecodeStep, layer_time, uncompressed_layer_bytes, uncompressed_layer_time
from .devices import Device

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
    def from_settings(
        cls, settings: ObjectiveSettings, device: Device, shape: AttentionShape, element_bytes: int
    ) -> Objective:
        """The objective that a recipe asks for; `device` is what `find_device` gives for its names."""
        step = DecodeStep(settings.context_tokens, settings.batch_size, element_bytes)
        return cls(settings.weight, device, shape, step)

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

    def key_cost(self, candidate: Candidate, keys: Latent) -> float:
        """The key side of a group's cost, for allocating side by side: half of a group whose values are as wide.

        For memory, key_cost + value_cost is group_cost exactly.
        """
        return self.group_cost(candidate, keys, keys) / 2

    def value_cost(self, candidate: Candidate, values: Latent) -> float:
        """The value side of a group's cost; see `key_cost`."""
        return self.group_cost(candidate, values, values) / 2
