"""Bytes that a long prompt over several processes sends, beside uncompressed Ulysses and ring attention."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..format.layout import kv_bytes_per_token, uncompressed_kv_bytes_per_token
from ..models.compressed import CompressedCheckpoint
from ..parallel.traffic import of_prompt, of_ring, of_token, uncompressed
from ..prediction.devices import Device
from .records import provenance

LABELS = {
    "auto": "rotor, the lesser",
    "heads": "rotor, Ulysses (ZDC)",
    "ulysses": "Ulysses",
    "ring": "ring attention",
}


def count_traffic(
    folder: Path,
    processes: Sequence[int],
    tokens: int,
    device_name: str,
    device: Device,
    ethernet_bytes_per_s: float,
    command: str = "",
) -> dict[str, Any]:
    """Count what a prompt of one sequence sends, for each number of processes.

    Args:
        tokens: of the prompt. device: whose links' rate the prediction takes. ethernet_bytes_per_s: of one process.
    Returns:
        What is written as JSON: bytes of all processes together, over all layers; and predicted seconds, which are the
        busiest process's bytes over the rate, with no latency and nothing overlapped.
    Raises:
        UsageError: fewer than two tokens a process; the device file has no rate of the device's links.
    """
    if 2 * max(processes) > tokens:
        least = 2 * max(processes)
        raise UsageError(f"{tokens} tokens for {max(processes)} processes: expected {least}.", "Give more --tokens.")
    if device.link_bytes_per_s is None:
        raise UsageError(
            f"device {device_name}: link_bytes_per_s is not known.", "Add it in a device file, or name another device."
        )
    checkpoint = CompressedCheckpoint(folder)
    layouts, shape, size = checkpoint.layouts, checkpoint.shape, checkpoint.dtype.itemsize
    links, before = {"link": device.link_bytes_per_s, "ethernet": ethernet_bytes_per_s}, uncompressed(shape)
    row_bytes = uncompressed_kv_bytes_per_token(shape, size)
    entries = []
    for count in processes:
        entry: dict[str, Any] = {"processes": count}
        found = {
            "auto": of_prompt(layouts, shape, tokens, count, size),
            "heads": of_prompt(layouts, shape, tokens, count, size, "heads"),
            "ulysses": of_prompt(before, shape, tokens, count, size, "heads"),
            "ring": of_ring(row_bytes, tokens, count),
        }
        for name, sent in found.items():
            parts = {"queries": sent.queries, "rows": sent.rows, "outputs": sent.outputs, "busiest_bytes": sent.busiest}
            predicted = {link: sent.busiest / rate for link, rate in links.items()}
            entry[name] = {"bytes": sent.total, **parts, "predicted_s": predicted}
        entries.append(entry | {"decode_bytes_per_token": of_token(layouts, shape, count, size)})
    return {
        **provenance(command),
        "checkpoint": folder.name,
        "dtype": str(checkpoint.dtype).removeprefix("torch."),
        "tokens": tokens,
        "layers": shape.num_layers,
        "kv_bytes_per_token": {"before": row_bytes, "after": kv_bytes_per_token(layouts, size)},
        "rates": {"device": device_name, **{f"{name}_bytes_per_s": rate for name, rate in links.items()}},
        "counted": entries,
    }
