"""Bytes that a long prompt over several processes sends, and what uncompressed rows would take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..format.layout import kv_bytes_per_token, uncompressed_kv_bytes_per_token
from ..models.compressed import CompressedCheckpoint
from ..parallel.traffic import of_prompt, of_token
from .records import provenance


def count_traffic(folder: Path, processes: Sequence[int], tokens: int, command: str = "") -> dict[str, Any]:
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
            "bytes": of_prompt(after, tokens, count),
            "bytes_uncompressed": of_prompt(before, tokens, count),
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
