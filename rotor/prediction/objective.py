"""The objective that ranks and bits are chosen by: bytes of cache, predicted time, or a mixture of both."""

from __future__ import annotations

from dataclasses import dataclass

from ..format.layout import AttentionShape, Domain
from ..recipe import ObjectiveSettings
from .cost import (
    DecodeStep,
    group_bytes_per_token,
    group_work,
    key_work,
    latent_bytes,
    uncompressed_group_work,
    value_work,
)
from .devices import Device
from .roofline import Residency, Work
from .tiling import Latent, Tiling


@dataclass(frozen=True)
class Objective:
    """Cost of a group of KV heads, by which ranks, domains and group sizes are compared.

    The cost of a group is a share of the uncompressed layer's: the KV heads of an uncompressed layer cost 1 together.
    It adds up over groups and layers and rises with the columns of both sides.

    - memory: bytes of cache.
    - latency: predicted seconds of a decode step, with each group's roofline by itself, so that costs add up. The
      layer's own roofline (`decode_seconds`) is at most their sum, and the same where all groups have the same limit.

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

    def group_cost(
        self, domain: Domain, folded_keys: bool, group_size: int, qk: Latent, v: Latent | None, rope_block: int = 1
    ) -> float:
        """The cost of one group; for comparing domains and group sizes. v is None for values in the key latent."""
        work = group_work(domain, folded_keys, group_size, qk, v, self.shape, self.step, rope_block=rope_block)
        seconds = work.seconds(self.device, self._residency(domain, group_size, qk, v, rope_block))
        return self._mixed(group_bytes_per_token(qk, v, self.step.element_bytes), seconds)

    def key_cost(self, domain: Domain, folded_keys: bool, group_size: int, qk: Latent, rope_block: int = 1) -> float:
        """The key side of a group's cost, rising with its columns; for allocating them side by side.

        For memory, key_cost + value_cost is group_cost exactly. A roofline does not split into sides, so latency takes
        its limits one after the other instead, and values of as many columns as keys for the tiles: key_cost +
        value_cost then lies between group_cost and a few times as much, nearest where one limit dominates.
        """
        seconds = self._key_seconds(domain, folded_keys, group_size, qk, rope_block)[1]
        return self._mixed(latent_bytes(qk, self.step.element_bytes), seconds)

    def value_cost(self, group_size: int, v: Latent) -> float:
        """The value side of a group's cost, rising with its columns; see `key_cost`."""
        return self._mixed(latent_bytes(v, self.step.element_bytes), self._value_seconds(group_size, v)[1])

    def key_parts(
        self, domain: Domain, folded_keys: bool, group_size: int, qk: Latent, rope_block: int = 1
    ) -> tuple[float, float]:
        """Predicted time of the key side of a group, whatever the weight: reading the cache, and all else after it."""
        return self._parts(*self._key_seconds(domain, folded_keys, group_size, qk, rope_block))

    def value_parts(self, group_size: int, v: Latent, joint: bool = False) -> tuple[float, float]:
        """The same of the value side; `joint` as in `value_work`."""
        return self._parts(*self._value_seconds(group_size, v, joint))

    def _residency(
        self, domain: Domain, group_size: int, qk: Latent, v: Latent | None, rope_block: int = 1
    ) -> Residency:
        heads_per_kv, values = self.shape.heads_per_kv, qk if v is None else v
        sizes = qk, values, self.shape.head_dim, None
        tiling = Tiling.of(domain, group_size, heads_per_kv, *sizes, rope_block, v is None)
        return tiling.residency(*(latent_bytes(side, self.step.element_bytes) for side in (qk, values)))

    def _key_seconds(
        self, domain: Domain, folded_keys: bool, group_size: int, qk: Latent, rope_block: int
    ) -> tuple[float, float]:
        """Seconds of reading the cache, and of all of the key side one after the other."""
        sizes = qk, qk, self.shape.head_dim, None, rope_block
        tiling = Tiling.of(domain, group_size, self.shape.heads_per_kv, *sizes)
        work = key_work(domain, folded_keys, group_size, qk, self.shape, self.step, tiling)
        return self._serial(work, self._residency(domain, group_size, qk, qk, rope_block))

    def _value_seconds(self, group_size: int, v: Latent, joint: bool = False) -> tuple[float, float]:
        """The same of the value side."""
        tiling = Tiling.of("post", group_size, self.shape.heads_per_kv, v, v, self.shape.head_dim)
        work = value_work(group_size, v, self.shape, self.step, tiling, joint)
        return self._serial(work, self._residency("post", group_size, v, v))

    def _serial(self, work: Work, residency: Residency) -> tuple[float, float]:
        return work.cache_bytes / self.device.bandwidth_bytes_per_s, work.serial_seconds(self.device, residency)

    def _parts(self, reading: float, all_of_it: float) -> tuple[float, float]:
        return reading / self._uncompressed_seconds, (all_of_it - reading) / self._uncompressed_seconds

    @property
    def _uncompressed_seconds(self) -> float:
        """Of a layer."""
        return self.shape.num_kv_heads * uncompressed_group_work(self.shape, self.step).seconds(self.device)

    def _mixed(self, size: float, seconds: float) -> float:
        memory = size / (self.shape.num_kv_heads * 2 * self.shape.head_dim * self.step.element_bytes)
        latency = seconds / self._uncompressed_seconds
        return (1 - self.latency_weight) * memory + self.latency_weight * latency
