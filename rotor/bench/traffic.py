"""Bytes that a long prompt over several processes sends, and what uncompressed rows would take.

Counted from layouts alone, as `Wire.sent` counts them: sums over the processes; what a process keeps for itself is not
sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..format.layout import AttentionShape, LayerLayout, kv_bytes_per_token, uncompressed_kv_bytes_per_token
from ..models.compressed import CompressedCheckpoint
from .records import provenance


def of_token(layouts: Sequence[LayerLayout], shape: AttentionShape, processes: int, element_bytes: int) -> int:
    """What all processes send to decode one token: outputs and log-sum-exps, float32 or wider, from each to each."""
    heads = [layout.group_size * shape.heads_per_kv for layout in layouts]
    numbers = sum(n * sum(g.values.width + 1 for g in layout.groups) for n, layout in zip(heads, layouts, strict=True))
    return processes * (processes - 1) * numbers * max(element_bytes, 4)


def count_traffic(folder: Path, processes: Sequence[int], tokens: int, command: str) -> dict[str, Any]:
    """Count what a prompt of one sequence sends, for each number of processes.

    Args:
        tokens: of the prompt.
    Returns:
        What is written as JSON: bytes of all processes together, over all layers.
    Raises:
        UsageError: fewer than two tokens a process.
    """
    if 2 * max(processes) > tokens:
        least = 2 * max(processes)
        raise UsageError(f"{tokens} tokens for {max(processes)} processes: expected {least}.", "Give more --tokens.")
    checkpoint = CompressedCheckpoint(folder)
    layouts, shape, size = checkpoint.layouts, checkpoint.shape, checkpoint.dtype.itemsize
    before, after = uncompressed_kv_bytes_per_token(shape, size), kv_bytes_per_token(layouts, size)
    counted = [
        {
            "processes": count,
            # As `sequence_parallel` sends a prompt: every process's rows to all the others.
            "bytes": (count - 1) * tokens * after,
            "bytes_uncompressed": (count - 1) * tokens * before,
            "decode_bytes_per_token": of_token(layouts, shape, count, size),
        }
        for count in processes
    ]
    return {
        **provenance(command),
        "checkpoint": folder.name,
        "dtype": str(checkpoint.dtype).removeprefix("torch."),
        "tokens": tokens,
        "layers": shape.num_layers,
        "kv_bytes_per_token": {"before": before, "after": after},
        "counted": counted,
    }
