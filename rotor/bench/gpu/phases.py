"""The phases in their order, what tells most first, with their limits: forty minutes together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .case import Case


@dataclass(frozen=True)
class Phase:
    """limit_s: of all its rows. row_limit_s: of one; a kernel that hangs is one red row."""

    name: str
    limit_s: float
    row_limit_s: float
    about: str


PHASES = (
    Phase("device", 60, 60, "what the device is, and the rates that floors are counted by"),
    Phase("tests", 480, 300, "pytest -m gpu, a file at a time"),
    Phase("sanitizer", 240, 120, "memcheck and racecheck of tiny cases"),
    Phase("decode", 420, 90, "a layer's decoding from CUDA graphs, beside SDPA and FlashInfer"),
    Phase("sweep", 360, 60, "the decode kernel's programs, stages, warps, tiles and pages"),
    Phase("queries", 150, 60, "4, 16 and 64 new tokens behind a long cache"),
    Phase("prefill", 120, 60, "a prompt of 8192 tokens"),
    Phase("model", 420, 180, "an 8B of random weights: eager, from a CUDA graph, compiled"),
    Phase("vllm", 150, 150, "a checkpoint beside its source in vLLM"),
)
NAMES = tuple(phase.name for phase in PHASES)


def cases_of(name: str, dry: bool, checkpoint: Path | None) -> Iterator[Case]:
    """The rows of a phase, made as they are asked for; imports what the phase needs alone."""
    if name == "device":
        from .device import device_cases

        yield from device_cases(dry)
    elif name in ("tests", "sanitizer", "vllm"):
        from .programs import engine_cases, sanitizer_cases, test_cases

        if name == "vllm":
            yield from engine_cases(dry, checkpoint)
        else:
            yield from (test_cases if name == "tests" else sanitizer_cases)(dry)
    elif name == "model":
        from .model import ModelSizes, model_cases

        yield from model_cases(ModelSizes.of(dry))
    else:
        from .attention import AttentionSizes, decode_cases, prefill_cases, query_cases, sweep_cases

        makers = {"decode": decode_cases, "sweep": sweep_cases, "queries": query_cases, "prefill": prefill_cases}
        yield from makers[name](AttentionSizes.of(dry))
