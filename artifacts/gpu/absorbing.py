"""Ways to launch `absorb` that are tried."""

from __future__ import annotations

from dataclasses import dataclass

from rotor.checkpoint.layout import LayerLayout


@dataclass(frozen=True)
class Absorbing:
    """Launch of `absorb`: blocks that a program takes at a time, its warps, stages of its copies."""

    blocks: int
    warps: int
    stages: int = 1


ABSORBING = [
    Absorbing(32, 2, 2), Absorbing(64, 4), Absorbing(32, 4), Absorbing(64, 2), Absorbing(32, 2), Absorbing(16, 1),
    Absorbing(128, 8), Absorbing(32, 1),
]  # fmt: skip


def ways_to_absorb(layout: LayerLayout) -> list[Absorbing]:
    """Ways that a layer is tried with; none where keys are not in blocks."""
    return ABSORBING if layout.in_blocks else []
