"""Tiles and launches that decoding and absorbing are tried with on a GPU: first compiled, all cores at work, then timed
one layer after another.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from math import isinf
from pathlib import Path

import torch
from torch import Tensor

from rotor.checkpoint.kernel_config import LayerKernels
from rotor.kernels.attention import ranges_of, starts_of_blocks
from rotor.kernels.decode_launch import DecodeLayer, decode_attention
from rotor.kernels.launch import capability_of, sm_count
from rotor.tools.bench.attention import TOLERANCE, Call, Problem, kernel, relative_error
from rotor.tools.bench.tuning import launches, search

from .absorbing import Absorbing, ways_to_absorb
from .loads import LOADS
from .plan import Record
from .subjects import gpu_subjects
from .times import cold_seconds, contiguous, copies, predictions

TUNED = ("8 x 32K", "1 x 32K")
"""Loads that tiles are timed at."""

COMPILED_KEYS = 256
"""Cached tokens at which a tile is compiled: the kernel is that of any length."""

REPLAYS = 5


class AbsorbingLayer(DecodeLayer):
    """Launch data of a layer with its own way to absorb."""

    absorbing: Absorbing

    def absorb_shape(self, many: bool) -> tuple[int, int, int]:
        return self.absorbing.blocks, self.absorbing.warps, self.absorbing.stages


def absorbing_layer(problem: Problem, absorbing: Absorbing) -> AbsorbingLayer:
    layer = AbsorbingLayer(problem.parameters, problem.query.dtype, problem.query.device)
    layer.absorbing = absorbing
    return layer


def absorbing_call(problem: Problem, layer: DecodeLayer, kernels: LayerKernels) -> Call:
    """`rows_attention` of one new token a sequence, by a layer of one's own."""
    device, batch_size, kv_len = problem.key.device, problem.key.shape[0], problem.kv_len
    query, rows = problem.query.transpose(1, 2).flatten(0, 1), (problem.key[:, 0], problem.value[:, 0])
    tile, programs = kernels.tile(capability_of(device)), sm_count(device) * kernels.slices_per_sm
    keys = ranges_of(None, (batch_size, 1, kv_len), device)
    starts = problem.rotation and starts_of_blocks(problem.rotation, problem.layout)

    def call() -> Tensor:
        found = decode_attention(query, *rows, layer, keys, starts, tiles=tile, programs=programs, max_kv_len=kv_len)
        return found.view(batch_size, 1, -1)

    return call


def compile_launch(name: str, index: int, device: str = "cuda") -> Iterator[Record]:
    """Run one of a layer's `launches` or `ways_to_absorb` once over few keys, so that Triton's cache has it."""
    where, subject = torch.device(device), gpu_subjects()[name]
    decoding = launches(subject.kernels, subject.layout, capability_of(where))
    absorbing = ways_to_absorb(subject.layout)
    if index >= len(decoding) + len(absorbing):
        return
    (problem,) = contiguous(subject, [COMPILED_KEYS], 1, where)
    start = time.perf_counter()
    if index < len(decoding):
        about: Record = {"tile": asdict(decoding[index].tile(capability_of(where)))}
        call = kernel(problem, decoding[index])
    else:
        chosen = absorbing[index - len(decoding)]
        about = {"absorbing": asdict(chosen)}
        call = absorbing_call(problem, absorbing_layer(problem, chosen), subject.kernels)
    yield {"layout": name, **about, **tried(call), "compile_s": round(time.perf_counter() - start, 2)}


def tried(call: Call) -> Record:
    """Why something does not run, where it does not; an error of the device itself is raised."""
    try:
        with torch.inference_mode():
            call()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except torch.AcceleratorError:
        raise
    except Exception as error:  # the compiler has many
        return {"left_out": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
    return {}


def tune(
    name: str,
    compiled: str,
    stop_after_s: float = 20.0,
    device: str = "cuda",
    lengths: dict[str, list[int]] | None = None,
) -> Iterator[Record]:
    """Seconds of a step of a layer by tile and by how it absorbs, at each load; what does not run is left out.

    Args:
        compiled: file of results so far; only what it says `compile_launch` has compiled is timed.
        stop_after_s: no tile is tried at a load after so many seconds of it.
    """
    known = compiled_launches(Path(compiled), name)
    where, subject = torch.device(device), gpu_subjects()[name]
    capability = capability_of(where)
    for load in TUNED:
        own = (lengths or LOADS)[load]
        count = copies(predictions(subject, own, where)["cache_bytes"])
        timing, begun = Timing(contiguous(subject, own, count, where), subject.kernels, known), time.monotonic()
        about, best, least = {"layout": name, "load": load}, subject.kernels, float("inf")
        for kernels, seconds in search(subject.kernels, subject.layout, capability, timing.of_kernels):
            if seconds < least and not kernels.materialise:
                best, least = kernels, seconds
            yield {**about, **described(kernels, capability), **timing.said(seconds)}
            if time.monotonic() - begun > stop_after_s:
                yield {**about, "left_out": f"tiles that came after {stop_after_s:.0f} s"}
                break
        for absorbing in ways_to_absorb(subject.layout):
            seconds = timing.of_absorbing(absorbing, best)
            yield {**about, **described(best, capability), "absorbing": asdict(absorbing), **timing.said(seconds)}
        del timing


def compiled_launches(results: Path, name: str) -> list[Record]:
    """Tiles, and ways to absorb, of a layer that `compile_launch` said were compiled."""
    records = map(json.loads, results.read_text("utf-8").splitlines())
    mine = [each for each in records if each.get("layout") == name and "compile_s" in each and "left_out" not in each]
    return [{key: each[key]} for each in mine for key in ("tile", "absorbing") if key in each]


def described(kernels: LayerKernels, capability: int) -> Record:
    if kernels.materialise:
        return {"materialise": True}
    return {"tile": asdict(kernels.tile(capability)), "slices_per_sm": kernels.slices_per_sm}


class Timing:
    """Times steps over several caches; what differs from the result of the layer's own kernels is no time."""

    def __init__(self, problems: list[Problem], own: LayerKernels, known: list[Record]) -> None:
        self.problems, self.known, self.why = problems, known, ""
        self.device = problems[0].key.device
        self.capability = capability_of(self.device)
        with torch.inference_mode():
            self.expected = kernel(problems[0], own)().clone()

    def of_kernels(self, kernels: LayerKernels) -> float:
        if not kernels.materialise and {"tile": asdict(kernels.tile(self.capability))} not in self.known:
            return self._not_compiled()
        return self._seconds([kernel(problem, kernels) for problem in self.problems])

    def of_absorbing(self, absorbing: Absorbing, kernels: LayerKernels) -> float:
        if {"absorbing": asdict(absorbing)} not in self.known:
            return self._not_compiled()
        layer = absorbing_layer(self.problems[0], absorbing)
        return self._seconds([absorbing_call(problem, layer, kernels) for problem in self.problems])

    def _not_compiled(self) -> float:
        self.why = "it was not compiled"
        return float("inf")

    def said(self, seconds: float) -> Record:
        return {"left_out": self.why} if isinf(seconds) else {"seconds": {"median": seconds}}

    def _seconds(self, calls: list[Call]) -> float:
        """Infinite for what does not run or is wrong; `why` says which."""
        try:
            with torch.inference_mode():
                error = relative_error(calls[0](), self.expected)
            if not error <= TOLERANCE[self.problems[0].query.dtype]:
                self.why = f"wrong: {error:.2g} from the result of the layer's own kernels"
                return float("inf")
            return cold_seconds(calls, self.device, REPLAYS)["median"]
        except torch.AcceleratorError:
            raise
        except Exception as error:  # the compiler has many
            self.why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            return float("inf")
