"""Bytes that a long prompt over several processes sends, beside uncompressed Ulysses and ring attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..format.layout import kv_bytes_per_token, uncompressed_kv_bytes_per_token
from ..models.compressed import CompressedCheckpoint
from ..parallel.traffic import of_heads, of_rows, of_token, uncompressed
from .records import provenance

LABELS = {
    "rotor": "rotor",
    "zdc": "Ulysses, compressed (ZDC)",
    "ulysses": "Ulysses",
    "ring": "ring attention",
}


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
    row_bytes, own_bytes = uncompressed_kv_bytes_per_token(shape, size), kv_bytes_per_token(layouts, size)
    counted = []
    for count in processes:
        found = {
            "rotor": of_rows(own_bytes, tokens, count),
            "zdc": of_heads(layouts, shape, tokens, count, size),
            "ulysses": of_heads(uncompressed(shape), shape, tokens, count, size),
            "ring": of_rows(row_bytes, tokens, count),
        }
        entry = {name: {"bytes": sent.total, **asdict(sent)} for name, sent in found.items()}
        counted.append({"processes": count, **entry, "decode_bytes_per_token": of_token(layouts, shape, count, size)})
    return {
        **provenance(command),
        "checkpoint": folder.name,
        "dtype": str(checkpoint.dtype).removeprefix("torch."),
        "tokens": tokens,
        "layers": shape.num_layers,
        "kv_bytes_per_token": {"before": row_bytes, "after": own_bytes},
        "counted": counted,
    }
