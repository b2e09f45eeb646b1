"""Bytes on the wire of a long prompt over several processes: counted from layouts, measured from the calls, and beside
what uncompressed Ulysses and ring attention send. Seconds are a prediction.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers.utils.logging import disable_progress_bar

from ..errors import NumericsError, RotorError, UsageError
from ..format.layout import kv_bytes_per_token, uncompressed_kv_bytes_per_token
from ..models.compressed import CompressedCheckpoint
from ..models.loading import load_model
from ..parallel import sequence_parallel
from ..parallel.sequence import Exchange
from ..parallel.traffic import Traffic, of_prompt, of_ring, of_token, uncompressed
from ..prediction.devices import Device
from .provenance import provenance

VERSION = 1
TIMEOUT = timedelta(minutes=5)
EXCHANGES: tuple[Exchange, ...] = ("auto", "heads")
LABELS = {
    "auto": "rotor, the lesser",
    "heads": "rotor, Ulysses (ZDC)",
    "ulysses": "Ulysses",
    "ring": "ring attention",
}


def measure_traffic(
    folder: Path,
    processes: Sequence[int],
    tokens: int,
    measured: Sequence[int],
    device: Device,
    device_name: str,
    ethernet_bytes_per_s: float,
    command: str = "",
) -> dict[str, Any]:
    """Count what a prompt of one sequence sends, for each number of processes.

    Args:
        tokens: of the prompt. measured: numbers of processes that are started here, on CPUs, to count the bytes of
            their calls; every one must be what the layouts say.
        device: whose links' rate the prediction takes. ethernet_bytes_per_s: of one process's connection.
    Returns:
        What is written as JSON: bytes of all processes together, over all layers; and predicted seconds, which are the
        busiest process's bytes over the rate, with no latency and nothing overlapped.
    Raises:
        NumericsError: the calls sent other bytes than the layouts say.
        UsageError: fewer than two tokens a process; the device file has no rate of the device's links.
    """
    most = max([*processes, *measured])
    if 2 * most > tokens:
        raise UsageError(f"{tokens} tokens for {most} processes: expected at least {2 * most}.", "Give more --tokens.")
    if device.link_bytes_per_s is None:
        raise UsageError(
            f"device {device_name}: link_bytes_per_s is not known.", "Add it in a device file, or name another device."
        )
    checkpoint = CompressedCheckpoint(folder)
    layouts, shape, size = checkpoint.layouts, checkpoint.shape, checkpoint.dtype.itemsize
    links = {"link": device.link_bytes_per_s, "ethernet": ethernet_bytes_per_s}
    entries = []
    for count in processes:
        found = {
            "auto": of_prompt(layouts, shape, tokens, count, size),
            "heads": of_prompt(layouts, shape, tokens, count, size, "heads"),
            "ulysses": of_prompt(uncompressed(shape), shape, tokens, count, size, "heads"),
            "ring": of_ring(uncompressed_kv_bytes_per_token(shape, size), tokens, count),
        }
        entries.append(
            {
                "processes": count,
                **{name: _entry(traffic, links) for name, traffic in found.items()},
                "decode_bytes_per_token": of_token(layouts, shape, count, size),
            }
        )
    calls = [entry for count in measured for entry in _measure(checkpoint, count, tokens)]
    for entry in calls:
        count, sent = entry["processes"], entry["sent_bytes"]
        expected = of_prompt(layouts, shape, tokens, count, size, entry["exchange"])
        got = [sent.get(name, 0) for name in ("queries", "rows", "outputs", "partial")]
        wanted = [expected.queries, expected.rows, expected.outputs, of_token(layouts, shape, count, size)]
        if got != wanted:
            raise NumericsError(
                f"{count} processes sent {got} bytes of queries, rows, outputs and, decoding, partial results: "
                f"expected {wanted} by the layouts.",
                "A defect of rotor's: please report it.",
            )
    return {
        "version": VERSION,
        **provenance(command),
        "checkpoint": folder.name,
        "dtype": str(checkpoint.dtype).removeprefix("torch."),
        "tokens": tokens,
        "layers": shape.num_layers,
        "kv_bytes_per_token": {
            "before": uncompressed_kv_bytes_per_token(shape, size),
            "after": kv_bytes_per_token(layouts, size),
        },
        "rates": {"device": device_name, **{f"{name}_bytes_per_s": rate for name, rate in links.items()}},
        "labels": LABELS,
        "counted": entries,
        "measured": calls,
    }


def _entry(traffic: Traffic, links: dict[str, float]) -> dict[str, Any]:
    return {
        "bytes": traffic.total,
        "queries": traffic.queries,
        "rows": traffic.rows,
        "outputs": traffic.outputs,
        "busiest_bytes": traffic.busiest,
        "predicted_s": {name: traffic.busiest / rate for name, rate in links.items()},
    }


def _measure(checkpoint: CompressedCheckpoint, count: int, tokens: int) -> list[dict[str, Any]]:
    """Run a prompt of random tokens and one step of decoding in so many processes here; what they sent, by kind."""
    with tempfile.TemporaryDirectory() as place:
        results = Path(place)
        try:
            mp.spawn(_run, (count, str(checkpoint.folder), tokens, place), nprocs=count)
        except (mp.ProcessExitedException, mp.ProcessRaisedException) as error:
            last = str(error).strip().splitlines()[-1]
            raise RotorError(f"one of {count} processes failed: {last}", "Give fewer with --measure.") from error
        found = [torch.load(results / f"{rank}.pt", weights_only=True) for rank in range(count)]
    entries = []
    for exchange in EXCHANGES:
        of_each = [sent[exchange] for sent in found]
        kinds = sorted({kind for sent in of_each for kind in sent})
        sums = {kind: sum(sent.get(kind, 0) for sent in of_each) for kind in kinds}
        entries.append({"processes": count, "exchange": exchange, "sent_bytes": sums})
    return entries


def _run(rank: int, count: int, folder: str, tokens: int, place: str) -> None:
    torch.set_num_threads(1)
    disable_progress_bar()
    dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=count, timeout=TIMEOUT)
    checkpoint = CompressedCheckpoint(folder)
    model = load_model(folder, torch.device("cpu"), checkpoint.dtype)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, tokens + 1), generator=generator)
    sent = {}
    for exchange in EXCHANGES:
        with sequence_parallel(model, exchange=exchange) as parallel:
            cache = model(ids[:, :-1], use_cache=True, logits_to_keep=1).past_key_values
            model(ids[:, -1:], past_key_values=cache)
        sent[exchange] = dict(parallel.wire.sent)
    torch.save(sent, Path(place) / f"{rank}.pt")
    dist.destroy_process_group()
