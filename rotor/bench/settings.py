"""What a benchmark measures, and what it found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .clock import Rates


@dataclass(frozen=True)
class BenchSettings:
    """What is measured.

    decode_lengths: cached tokens of each sequence. prefill_lengths: of prompts. layers: at most so many, evenly spread
    over the depth; times are their sum. new_tokens: of the whole model, 0 to leave it out. memory_bytes: for the
    largest batch; None is all that the device has. cache: the policy, by name, that the cache of the compressed model
    follows as a whole; None is its own.
    """

    decode_lengths: tuple[int, ...]
    prefill_lengths: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    layers: int = 4
    repetitions: int = 20
    new_tokens: int = 32
    memory_bytes: int | None = None
    seed: int = 0
    cache: str | None = None

    @classmethod
    def of(
        cls,
        device: torch.device,
        decode: Sequence[int] | None,
        prefill: Sequence[int] | None,
        batch: Sequence[int] | None,
        **others: Any,
    ) -> BenchSettings:
        """Lengths and batch sizes as given, or such as the device takes in minutes."""
        default = GPU_LOADS if device.type == "cuda" else CPU_LOADS
        lengths, prompts, batches = (
            default[i] if g is None else tuple(g) for i, g in enumerate((decode, prefill, batch))
        )
        return cls(lengths, prompts, batches, **others)


GPU_LOADS = (32768,), (8192,), (1, 8)
CPU_LOADS = (2048,), (512,), (1,)
"""Cached tokens, tokens of a prompt, and sequences in a batch, where nothing is asked for."""


@dataclass
class BenchResult:
    """Everything that a run measured, checked, and did not measure, with the reason."""

    rates: Rates
    layers: list[int]
    attention: list[dict[str, Any]] = field(default_factory=list)
    model: list[dict[str, Any]] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)
    not_measured: list[dict[str, Any]] = field(default_factory=list)

    def skip(self, row: str, why: str, **load: Any) -> None:
        self.not_measured.append({"row": row, **load, "why": why})
