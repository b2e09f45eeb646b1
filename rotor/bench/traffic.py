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
from ..prediction.devices import Device
from .records import provenance

LABELS = {
    "rotor": "rotor",
    "zdc": "Ulysses, compressed (ZDC)",
    "ulysses": "Ulysses",
    "ring": "ring attention",
}


ETHERNET_BYTES_PER_S = 12.5e9
"""Of each process's network."""


def count_traffic(
    folder: Path, processes: Sequence[int], tokens: int, device: Device, command: str = ""
) -> dict[str, Any]:
    """Count what a prompt of one sequence sends, for each number of processes.

    Args:
        tokens: of the prompt. device: whose links' rate the prediction takes.
    Returns:
        What is written as JSON: bytes of all processes together, over all layers; and predicted seconds, which are the
        busiest process's bytes over the rate, with no latency and nothing overlapped.
    Raises:
        UsageError: fewer than two tokens a process; the rate of the device's links is not known.
    """
    if 2 * max(processes) > tokens:
        least = 2 * max(processes)
        raise UsageError(f"{tokens} tokens for {max(processes)} processes: expected {least}.", "Give more --tokens.")
    if device.link_bytes_per_s is None:
        raise UsageError("--target-device: the rate of its links is not known.", "Choose another.")
    checkpoint = CompressedCheckpoint(folder)
    layouts, shape, size = checkpoint.layouts, checkpoint.shape, checkpoint.dtype.itemsize
    rates = {"link": device.link_bytes_per_s, "ethernet": ETHERNET_BYTES_PER_S}
    row_bytes, own_bytes = uncompressed_kv_bytes_per_token(shape, size), kv_bytes_per_token(layouts, size)
    counted = []
    for count in processes:
        found = {
            "rotor": of_rows(own_bytes, tokens, count),
            "zdc": of_heads(layouts, shape, tokens, count, size),
            "ulysses": of_heads(uncompressed(shape), shape, tokens, count, size),
            "ring": of_rows(row_bytes, tokens, count),
        }
        entry = {
            name: {"bytes": sent.total, **asdict(sent)}
            | {"predicted_s": {link: sent.busiest_bytes / rate for link, rate in rates.items()}}
            for name, sent in found.items()
        }
        counted.append({"processes": count, **entry, "decode_bytes_per_token": of_token(layouts, shape, count, size)})
    return {
        **provenance(command),
        "checkpoint": folder.name,
        "dtype": str(checkpoint.dtype).removeprefix("torch."),
        "tokens": tokens,
        "layers": shape.num_layers,
        "kv_bytes_per_token": {"before": row_bytes, "after": own_bytes},
        "rates": {f"{name}_bytes_per_s": rate for name, rate in rates.items()},
        "counted": counted,
    }
