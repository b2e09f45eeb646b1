"""Times of attention in a decode step and of a prompt, with caches that no L2 holds, and of PyTorch's beside them.

A step is captured into a CUDA graph together with more of its kind, each over a cache of its own, so that none finds
its rows in L2. The parts of a step are timed apart by PyTorch's profiler.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from rotor.calibration.prediction.cost import DecodeStep, layer_bytes, layer_time, uncompressed_layer_time
from rotor.calibration.prediction.devices import Device, bundled_devices
from rotor.kernels import absorb_launch
from rotor.kernels.append import append
from rotor.kernels.attention import attend_pages, ranges_of_pages, rows_attention, step_ahead
from rotor.kernels.dispatch import default_layer
from rotor.kernels.launch import capability_of
from rotor.kernels.passes import Pass
from rotor.tools.bench.attention import (
    BACKENDS,
    TOLERANCE,
    Call,
    Problem,
    by_backend,
    kernel,
    random_problem,
    relative_error,
    sdpa,
    step_tensors,
    uncompressed_heads,
    zero_scale,
)
from rotor.tools.bench.baselines import FP8_CAPABILITY, random_baseline
from rotor.tools.bench.flash import flash_decoding
from rotor.tools.bench.records import quartiles

from .loads import FLASH_ROWS, LOADS, PROMPT, PROMPT_TOKENS, RAGGED
from .plan import Record
from .subjects import MODELS, PAGE, Subject, gpu_subjects

DTYPE = torch.bfloat16
"""Dtype of uncompressed caches."""

COLD_BYTES = 256 << 20
"""Bytes that the caches of one graph take together at least: several times the L2 of an H100 or H200."""

COPIES = 4, 32
"""Caches of one graph, at least and at most."""

L2_BYTES = 24 << 20
"""Absorbed queries of a part of a batch that may stay in L2 until they are read."""

REPLAYS = 12

CHECKED = ("1 x 32K", "1 x 128K")
"""Loads at which attention is compared with float64."""

DEVICES = {"H100 PCIe": None, "H100": "h100-sxm", "H200": "h200", "A100": "a100-80g", "B200": "b200", "L40S": "l40s"}
"""Device whose rates predictions take, by what is in the name of the GPU."""


def predicted_for(name: str) -> Device | None:
    """Rates of a GPU by its name; None for an unknown one."""
    found = next((device for part, device in DEVICES.items() if part in name), None)
    return None if found is None else bundled_devices()[found]


def cold_seconds(calls: list[Call], device: torch.device, replays: int = REPLAYS) -> dict[str, float]:
    """Seconds of a call: median and quartiles over replays of a graph of all of them, each over memory of its own."""
    with torch.inference_mode():
        for call in calls:
            call()
        if device.type != "cuda":  # a trial of this code; its times mean nothing
            return quartiles([_on_host(calls) for _ in range(2)])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        for _ in range(3):
            graph.replay()
        found = []
        for _ in range(replays):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            found.append(1e-3 * begin.elapsed_time(end) / len(calls))
    return quartiles(found)


def _on_host(calls: list[Call]) -> float:
    start = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - start) / len(calls)


def part_seconds(calls: list[Call], device: torch.device) -> dict[str, float]:
    """Seconds of each kernel in a call, by its name without `_kernel`; all others together are `other`.

    They are launches times their median; the others, which are not alike, are added up.
    """
    if device.type != "cuda":
        return {}
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.inference_mode(), torch.profiler.profile(activities=activities) as profile:
        for call in calls:
            call()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = defaultdict(list)
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            own = event.name.removesuffix("_kernel") if event.name in OWN_KERNELS else "other"
            found[own].append(1e-6 * event.time_range.elapsed_us())
    return {
        name: (sum(times) if name == "other" else median(times) * len(times)) / len(calls)
        for name, times in sorted(found.items())
    }


OWN_KERNELS = (
    "append_kernel", "absorb_kernel", "decode_kernel", "join_kernel", "finish_kernel",
    "expand_kernel", "nibble_decode",
)  # fmt: skip


def copies(cache_bytes: float) -> int:
    """Number of caches of one size that a graph needs."""
    least, most = COPIES
    return int(min(most, max(least, -(-COLD_BYTES // max(1, int(cache_bytes))))))


def contiguous(subject: Subject, lengths: list[int], count: int, device: torch.device) -> list[Problem]:
    """Problems of one new token a sequence that differ in their rows alone."""
    generator = torch.Generator(device).manual_seed(0)
    size = len(lengths), 1, lengths[0]
    first = random_problem(subject.layout, subject.shape, *size, subject.dtype, generator)

    def another() -> Problem:
        slots = first.slots
        if slots is not None:
            slots = replace(slots, key=_like(slots.key, generator), value=_like(slots.value, generator))
        return replace(first, key=_like(first.key, generator), value=_like(first.value, generator), slots=slots)

    return [first, *(another() for _ in range(count - 1))]


def _like(rows: Tensor, generator: torch.Generator) -> Tensor:
    if rows.dtype == torch.uint8:
        return torch.randint(256, rows.shape, generator=generator, device=rows.device, dtype=torch.uint8)
    return torch.randn(rows.shape, generator=generator, device=rows.device).to(rows.dtype)


def paged(subject: Subject, lengths: list[int], count: int, device: torch.device) -> list[Call]:
    """One new token a sequence over permuted pages, as a serving engine calls the kernels."""
    generator = torch.Generator(device).manual_seed(0)
    few = random_problem(subject.layout, subject.shape, 1, 1, PAGE, subject.dtype, generator)
    pages_each = [-(-length // PAGE) for length in lengths]
    total, longest = sum(pages_each), max(lengths)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(0)).int()
    table = torch.zeros(len(lengths), max(pages_each), dtype=torch.int32)
    taken = 0
    for row, pages in enumerate(pages_each):
        table[row, :pages] = order[taken : taken + pages]
        taken += pages
    kv_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    start = torch.arange(len(lengths) + 1, dtype=torch.int32, device=device)
    size = (len(lengths), subject.shape.num_heads, subject.shape.head_dim)
    query = (2 * torch.randn(size, generator=generator, device=device)).to(subject.dtype)
    options: dict[str, Any] = {
        "block_table": table.to(device), "query_start_loc": start, "kv_lens": kv_lens, "max_query_len": 1,
        "max_kv_len": longest, "keys": ranges_of_pages(start, kv_lens, len(lengths), 1),
        "rotation": rotation_table(longest, subject, device) if subject.layout.in_blocks else None,
    }  # fmt: skip
    launches = default_layer(subject.layout)

    def call(key: Tensor, value: Tensor) -> Call:
        return lambda: attend_pages(query, key, value, few.parameters, launches, **options)

    shapes = [(total, PAGE, rows.shape[-1]) for rows in (few.key, few.value)]
    kind = few.key.dtype
    return [
        call(*(_like(torch.empty(shape, dtype=kind, device=device), generator) for shape in shapes))
        for _ in range(count)
    ]


def rotation_table(positions: int, subject: Subject, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin by position, [positions, rotary_dim], float32."""
    size = subject.shape.rotary_dim
    frequency = 1e4 ** (-torch.arange(0, size, 2, dtype=torch.float64, device=device) / size)
    angle = torch.arange(positions, dtype=torch.float64, device=device)[:, None] * torch.cat([frequency, frequency])
    return angle.cos().float(), angle.sin().float()


Appending = Callable[..., Tensor]
"""Puts the new token of each sequence into a cache's last row and rotates its query; takes `absorb` of `append`."""


def appending(subject: Subject, problems: list[Problem], device: torch.device) -> list[Appending]:
    """The new token of each sequence into the last row of each cache, and its query rotated."""
    layout, shape, dtype = subject.layout, subject.shape, subject.dtype
    generator = torch.Generator(device).manual_seed(1)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device).to(dtype)

    batch_size, length = problems[0].key.shape[0], problems[0].kv_len
    key = normal(batch_size, 1, shape.num_kv_heads, shape.head_dim)
    query = normal(batch_size, 1, shape.num_heads, shape.head_dim)
    value = normal(batch_size, 1, layout.value_rank) if layout.folds_values else normal(*key.shape)
    stored = step_tensors(layout, shape, dtype, normal)
    options: dict[str, Any] = {
        **{name: stored.get(name) for name in ("key_basis", "key_shift", "value_basis", "value_shift")},
        "query": query, "rotation": rotation_table(length, subject, device),
        "index": torch.full((batch_size, 1), length - 1, device=device), "scale": zero_scale(layout, device),
    }  # fmt: skip

    def call(problem: Problem) -> Appending:
        last = problem.key[:, :, -1:], problem.value[:, :, -1:]
        return lambda **absorb: append(key, value, layout, shape, out=last, **options, **absorb).key

    return [call(problem) for problem in problems]


def absorbed_with_rows(subject: Subject, problem: Problem, append_row: Appending) -> Call:
    """A step as transformers' caches take it: what makes the row of its token absorbs its query."""
    p, sizes = problem, (len(problem.key), 1, problem.kv_len)
    assert p.rotation is not None
    options: dict[str, Any] = {"rotation": p.rotation, "attention_mask": None, "exact": p.slots, "now": Pass()}
    ahead = step_ahead(sizes, p.query.dtype, p.key.device, p.parameters, subject.kernels, first=0, **options)
    assert ahead is not None

    def call() -> Tensor:
        append_row(absorb=ahead.absorbing)
        return rows_attention(p.query, p.key, p.value, p.parameters, subject.kernels, **options, ahead=ahead)

    return call


def decoding(name: str, load: str, device: str = "cuda", lengths: list[int] | None = None) -> Iterator[Record]:
    """A step of one subject at one load: contiguous where all lengths are alike, in pages, and its parts.

    A layer with exact tokens is not measured in pages.
    """
    where, subject = torch.device(device), gpu_subjects()[name]
    lengths = lengths or LOADS[load]
    about = {"layout": name, "load": load, **predictions(subject, lengths, where)}
    count = copies(about["cache_bytes"])
    if load != RAGGED:
        problems = contiguous(subject, lengths, count, where)
        calls = [kernel(problem, subject.kernels) for problem in problems]
        error = {}
        if load in CHECKED:
            with torch.inference_mode():
                error = {"error": relative_error(calls[0](), problems[0].unrounded())}
            error["right"] = error["error"] <= TOLERANCE[subject.dtype]
        seconds = cold_seconds(calls, where)
        yield {**about, "row": "rotor", "cache": "contiguous", "seconds": seconds, **error}
        rows = appending(subject, problems, where)
        steps = [*map(_after, rows, calls)]
        seconds, parts = cold_seconds(steps, where), part_seconds(steps, where)
        yield {**about, "row": "rotor, with append", "cache": "contiguous", "seconds": seconds, "parts": parts}
        if subject.layout.in_blocks:
            steps = [absorbed_with_rows(subject, *each) for each in zip(problems, rows, strict=True)]
            seconds, parts = cold_seconds(steps, where), part_seconds(steps, where)
            row = "rotor, absorbed by append"
            yield {**about, "row": row, "cache": "contiguous", "seconds": seconds, "parts": parts}
        if subject.layout.in_blocks and len(lengths) > 1:
            with patch.object(absorb_launch, "ABSORBED_BYTES", L2_BYTES):
                seconds, parts = cold_seconds(calls, where), part_seconds(calls, where)
            row = f"rotor, absorbed in parts of {L2_BYTES >> 20} MiB"
            yield {**about, "row": row, "cache": "contiguous", "seconds": seconds, "parts": parts}
        del problems, calls, steps
    if load in (RAGGED, "8 x 32K") and subject.layout.exact is None:
        calls = paged(subject, lengths, count, where)
        seconds, parts = cold_seconds(calls, where), part_seconds(calls, where)
        yield {**about, "row": "rotor", "cache": f"pages of {PAGE}", "seconds": seconds, "parts": parts}


def _after(first: Call, then: Call) -> Call:
    def call() -> Tensor:
        first()
        return then()

    return call


def predictions(subject: Subject, lengths: list[int], device: torch.device) -> Record:
    """Bytes that a step reads, and its seconds as predicted for this GPU, compressed and not."""
    step = DecodeStep(sum(lengths) // len(lengths), len(lengths))
    found: Record = {"cache_bytes": step.keys * layer_bytes(subject.layout, subject.shape, 2)}
    rates = predicted_for(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if rates is not None:
        found["predicted_s"] = layer_time(subject.layout, subject.shape, rates, step).attention_s
        found["predicted_uncompressed_s"] = uncompressed_layer_time(subject.shape, rates, step).attention_s
    return found


def stock(name: str, load: str, device: str = "cuda", size: tuple[int, int, int] | None = None) -> Iterator[Record]:
    """PyTorch's attention over a model's uncompressed cache, by back end; not of ragged batches."""
    where, shape = torch.device(device), MODELS[name]
    if size is None:
        if load == RAGGED:
            return
        new = PROMPT_TOKENS if load == PROMPT else 1
        size = (1, new, PROMPT_TOKENS) if load == PROMPT else (len(LOADS[load]), new, LOADS[load][0])
    cache_bytes = 4 * size[0] * size[2] * shape.num_kv_heads * shape.head_dim
    count = 2 if load == PROMPT else copies(cache_bytes)
    generator = torch.Generator(where).manual_seed(0)
    heads = [uncompressed_heads(shape, *size, DTYPE, generator) for _ in range(count)]
    calls = [sdpa(*own) for own in heads]
    for row, backend in BACKENDS.items():
        about = {"layout": f"{name}, uncompressed", "load": load, "row": row, "cache_bytes": cache_bytes}
        try:
            yield {**about, "seconds": cold_seconds([by_backend(call, backend) for call in calls], where)}
        except RuntimeError as error:  # a back end that does not take this problem
            yield {**about, "error": " ".join(str(error).split())[:300]}
            if isinstance(error, torch.AcceleratorError):
                raise


def flash(name: str, load: str, bits: int, device: str = "cuda", lengths: list[int] | None = None) -> Iterator[Record]:
    """Flash-decoding in Triton over full heads, see FLASH_ROWS; of 8 bits only where the GPU has them."""
    where, shape, lengths = torch.device(device), MODELS[name], lengths or LOADS[load]
    sizes = shape.num_heads, shape.num_kv_heads, shape.head_dim
    if bits == 8 and capability_of(where) < FP8_CAPABILITY:
        return
    generator = torch.Generator(where).manual_seed(0)
    first = random_baseline(sizes, lengths, bits, DTYPE, generator)
    count = copies(first.cache_bytes)
    others = [random_baseline(sizes, lengths, bits, DTYPE, generator) for _ in range(count - 1)]
    calls = [flash_decoding(problem) for problem in (first, *others)]
    about = {"layout": f"{name}, uncompressed", "load": load, "row": FLASH_ROWS[bits], "cache_bytes": first.cache_bytes}
    error = {}
    if load in CHECKED:
        with torch.inference_mode():
            error = {"error": relative_error(calls[0](), first.unrounded())}
        error["right"] = error["error"] <= TOLERANCE[DTYPE]
    yield {**about, "seconds": cold_seconds(calls, where), **error}


def prompt(name: str, device: str = "cuda", tokens: int = PROMPT_TOKENS) -> Iterator[Record]:
    """A prompt of one subject into an empty cache."""
    where, subject = torch.device(device), gpu_subjects()[name]
    generator = torch.Generator(where).manual_seed(0)
    problem = random_problem(subject.layout, subject.shape, 1, tokens, tokens, subject.dtype, generator)
    call = kernel(problem, subject.kernels)
    with torch.inference_mode():
        error = relative_error(call(), problem.unrounded())
    seconds, parts = cold_seconds([call, call], where), part_seconds([call, call], where)
    about = {"layout": name, "load": PROMPT, "row": "rotor", "cache": "contiguous", "error": error}
    yield {**about, "right": error <= TOLERANCE[subject.dtype], "seconds": seconds, "parts": parts}


def compile_subject(
    name: str, loads: list[str], device: str = "cuda", lengths: dict[str, list[int]] | None = None
) -> Iterator[Record]:
    """Every kernel that is timed of a subject, launched once at each load: Triton's cache keeps what it compiles."""
    where, subject = torch.device(device), gpu_subjects()[name]
    start = time.perf_counter()
    with torch.inference_mode():
        for load in loads:
            own = {**LOADS, **(lengths or {})}.get(load, [PROMPT_TOKENS])
            if load == PROMPT and subject.layout.exact is not None:
                continue  # stock attention
            if load == PROMPT:
                generator = torch.Generator(where).manual_seed(0)
                size = 1, own[0], own[0]
                kernel(
                    random_problem(subject.layout, subject.shape, *size, subject.dtype, generator), subject.kernels
                )()
                continue
            if load != RAGGED:
                problems = contiguous(subject, own, 1, where)
                appending(subject, problems, where)[0]()
                kernel(problems[0], subject.kernels)()
            if load in (RAGGED, "8 x 32K") and subject.layout.exact is None:
                paged(subject, own, 1, where)[0]()
            if where.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
    yield {"layout": name, "compile_s": time.perf_counter() - start}
