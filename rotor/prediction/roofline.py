"""The one rule by which time is predicted: what a kernel reads, multiplies and has in flight, over a device's rates.

Attention over the cache has four limits, which overlap fully: bytes of the cache over the memory's bandwidth; matrix
products; what goes through the L2 cache; and what is computed beside the matrix products. A fifth follows from what is
on an SM at a time (`Residency`): by Little's law so many bytes arrive in the latency of the memory as are in flight,
and a program that waits for its own loads does not compute meanwhile; only the others on its SM do.

`rotor.prediction.cost` counts the work of groups by it, before anything is compiled; `rotor.prediction.kernels` that of
every compiled kernel, with the residency that its registers and shared memory allow.

Source: the roofline model (Williams, Waterman and Patterson, 2009); Little's law, as in Volkov, "Understanding Latency
Hiding on GPUs", 2016, chapter 4.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from .devices import Device

MEMORY_LATENCY_S = 700e-9
"""From asking for bytes of a busy GPU's memory to having them: of an H100; others were taken to be alike."""


@dataclass(frozen=True)
class Residency:
    """What of a kernel is on an SM at a time.

    programs: of the kernel. flight_bytes: of the memory, that a program has asked for while it waits. overlapped:
    whether it computes meanwhile, as its copies run ahead; else it waits for its own loads.
    """

    programs: int
    flight_bytes: float
    overlapped: bool

    @classmethod
    def in_turn(cls, programs: int, sides: list[tuple[float, float]]) -> Residency:
        """Of a program that waits for its own loads, those of one side after those of the other.

        Args:
            sides: of keys and of values, bytes of a key, and bytes that it asks for at once.
        """
        waits = sum(size / flight for size, flight in sides if size)
        return cls(programs, sum(size for size, _ in sides) / waits, False)

    def waiting_seconds(self, memory_bytes: float, sms: int) -> float:
        """That so many bytes take, as far as they are waited for."""
        return memory_bytes * MEMORY_LATENCY_S / (sms * self.programs * self.flight_bytes)


@dataclass(frozen=True)
class Work:
    """Bytes and FLOPs of a decode step in its two stages: attention over the cache, and the projections' weights.

    cache_bytes, cache_flops: the least that attention over the cache reads and multiplies. tile_flops: matrix products
    beyond that. l2_bytes: read from the L2 cache alone. vector_flops: beside the matrix products.
    """

    cache_bytes: float = 0.0
    cache_flops: float = 0.0
    weight_bytes: float = 0.0
    weight_flops: float = 0.0
    tile_flops: float = 0.0
    l2_bytes: float = 0.0
    vector_flops: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Work)))

    def limits(self, device: Device) -> dict[str, float]:
        """Seconds of attention over the cache by what limits it: `memory`, `matrix`, `l2` or `vector`."""
        return {
            "memory": self.cache_bytes / device.bandwidth_bytes_per_s,
            "matrix": (self.cache_flops + self.tile_flops) / device.matmul_flops_per_s,
            "l2": (self.cache_bytes + self.l2_bytes) / device.l2_rate,
            "vector": self.vector_flops / device.vector_rate,
        }

    def floor_seconds(self, device: Device) -> float:
        """The least that attention over the cache takes, whatever the kernel: its bytes once, its products once."""
        return max(self.cache_bytes / device.bandwidth_bytes_per_s, self.cache_flops / device.matmul_flops_per_s)

    def cache_seconds(self, device: Device, residency: Residency | None = None) -> float:
        """Of attention over the cache; what is waited for only where the residency and the device's SMs are known."""
        limits = self.limits(device)
        longest = max(limits.values())
        if residency is None or device.sms is None or not self.cache_bytes:
            return longest
        waiting = residency.waiting_seconds(self.cache_bytes, device.sms)
        if not residency.overlapped:
            waiting += max(seconds for name, seconds in limits.items() if name != "memory") / residency.programs
        return max(longest, waiting)

    def share_of_floor(self, device: Device, residency: Residency | None = None) -> float:
        """Of what is predicted for attention over the cache, 1 where nothing but the least work is done."""
        return self.floor_seconds(device) / max(self.cache_seconds(device, residency), 1e-30)

    def weight_seconds(self, device: Device) -> float:
        """Roofline of the projections."""
        return max(self.weight_bytes / device.bandwidth_bytes_per_s, self.weight_flops / device.matmul_flops_per_s)

    def seconds(self, device: Device, residency: Residency | None = None) -> float:
        """Both stages, one after the other."""
        return self.cache_seconds(device, residency) + self.weight_seconds(device)

    def serial_seconds(self, device: Device, residency: Residency | None = None) -> float:
        """Seconds if nothing ever overlapped: linear in the work, from 1 to 6 times `seconds`, 4 without waiting."""
        weights = self.weight_bytes / device.bandwidth_bytes_per_s + self.weight_flops / device.matmul_flops_per_s
        matmul = (self.cache_flops + self.tile_flops) / device.matmul_flops_per_s
        beside = self.l2_bytes / device.l2_rate + self.vector_flops / device.vector_rate
        waiting = 0.0
        if residency is not None and device.sms is not None:
            waiting = residency.waiting_seconds(self.cache_bytes, device.sms)
        return self.cache_bytes / device.bandwidth_bytes_per_s + matmul + beside + weights + waiting
