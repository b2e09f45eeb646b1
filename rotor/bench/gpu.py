"""What a GPU is asked first: the tests marked `gpu`, NVIDIA's sanitizer, and attention measured, joint latents first.

Each part is a process of its own with a time limit, so that what fails, hangs or ends the CUDA context is one red row;
a row is a line of JSON, on disk before the next begins.

    python -m rotor.bench.gpu measure joint-128x2-fast        # prints the rows of one layout
    python -m rotor.bench.gpu tiny joint-64                   # a small case of each kind of call, for the sanitizer
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError
from ..format.file_names import KERNEL_CONFIG
from ..format.kernel_config import KernelConfig, LayerKernels, Tile
from ..format.layout import AttentionShape, LayerLayout
from .attention import relative_error, truth_and_limit
from .graphs import capture, replayed
from .precompile import NAMED_SHAPE, named_layouts
from .problem import Problem, checked_output, random_problem, uncompressed_layout, without_rope
from .rows import BACKENDS as SDPA
from .rows import kernel, kernel_in_pages, no_sdpa, sdpa

ROOT = Path(__file__).resolve().parents[2]
"""Of a checkout: tests/ lies there."""

PARTS = ("tests", "sanitizer", "measure")
FULL = "uncompressed"
PAGE = 64
SANITIZERS = {"memcheck": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, "racecheck": {}}
"""Tools, with the environment of each: PyTorch's own memory pool hides what is read beyond a tensor."""

TUNED = {"keys": (16, 32, 64, 128), "warps": (1, 2, 4), "stages": (1, 2, 3), "slices": (2, 4, 8, 16)}


@dataclass(frozen=True)
class GpuSettings:
    """out: JSON lines. minutes: of everything. parts: of PARTS, run in that order. dry: toy sizes on a CPU, in Triton's
    interpreter: everything but the numbers.
    """

    out: Path
    minutes: float = 40.0
    parts: tuple[str, ...] = PARTS
    dry: bool = False

    def check(self) -> None:
        """Raises UsageError for a part that is none, a file that cannot be written, no GPU."""
        for name in self.parts:
            if name not in PARTS:
                raise UsageError(f"--parts: {name!r} is none of {', '.join(PARTS)}.", "Example: --parts tests,measure")
        try:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            self.out.open("a").close()
        except OSError as error:
            raise UsageError(f"{self.out}: {error.strerror or error}.", "Give another file with -o.") from error
        if not self.dry and not torch.cuda.is_available():
            raise UsageError("there is no CUDA device here.", "See that it would run: rotor gpu --dry")


@dataclass(frozen=True)
class Job:
    """One process: `part` and name of its row, the call, seconds that it may take, and its environment beside ours."""

    part: str
    name: str
    call: tuple[str, ...]
    limit_s: float
    environment: tuple[tuple[str, str], ...] = ()


def jobs(settings: GpuSettings) -> Iterator[Job]:
    """In the order in which they tell most."""
    own, names = (sys.executable, "-m", "rotor.bench.gpu"), list(named_layouts())
    flags = ("--dry",) if settings.dry else ()
    around = (("TRITON_INTERPRET", "1"), ("ROTOR_ATTENTION", "triton")) if settings.dry else ()
    if "tests" in settings.parts:
        files = [f for f in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in f.read_text("utf-8")]
        for file in sorted(files, key=lambda f: "kernels" not in f.parts):
            pytest = (sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--tb=line", "-p", "no:cacheprovider")
            yield Job("tests", file.name, (*pytest, str(file)), 600)
    if "sanitizer" in settings.parts:
        tool = shutil.which("compute-sanitizer") or "compute-sanitizer"
        for name in names[:1] if settings.dry else names:
            for kind, variables in SANITIZERS.items():
                watched = () if settings.dry else (tool, "--tool", kind, "--error-exitcode", "99")
                yield Job("sanitizer", f"{kind} {name}", (*watched, *own, "tiny", name, *flags), 300,
                          (*variables.items(), *around))  # fmt: skip
    if "measure" in settings.parts:
        for name in (*names[:2], FULL) if settings.dry else (*names, FULL):
            yield Job("measure", name, (*own, "measure", name, *flags), 300, around)


def run(settings: GpuSettings, told: Callable[[str], object]) -> list[dict[str, Any]]:
    """Run the parts within the time; every row goes to `settings.out` as it comes, and is returned.

    A row has part, name, status (ok, failed or skipped), and why it failed or what was measured.
    """
    settings.check()
    end, rows = time.monotonic() + 60 * settings.minutes, []
    for job in jobs(settings):
        for row in _of_job(job, end - time.monotonic()):
            rows.append({**row, "dry": settings.dry})
            with settings.out.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            told(f"{row['part']} {row['name']}: {row['status']} {row.get('why', '')}"[:200])
    return rows


def _of_job(job: Job, left_s: float) -> list[dict[str, Any]]:
    about = {"part": job.part, "name": job.name}
    if left_s < 5:
        return [{**about, "status": "skipped", "why": "no time was left for it"}]
    if not shutil.which(job.call[0]):
        return [{**about, "status": "skipped", "why": f"{job.call[0]} is not installed"}]
    limit = min(job.limit_s, left_s)
    environment = {**os.environ, **dict(job.environment)}
    try:
        done = subprocess.run(job.call, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return [{**about, "status": "failed", "why": f"took longer than {limit:.0f} s"}]
    found = [{**about, **json.loads(line)} for line in done.stdout.splitlines() if line.startswith('{"')]
    if job.part == "tests" and done.returncode == 5:
        return [{**about, "status": "skipped", "why": "no test of it is for this device"}]
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines()
        text = [line for line in lines if not line.startswith('{"')]
        found.append({**about, "status": "failed", "why": " / ".join(text[-4:])[-1000:]})
    return found or [{**about, "status": "ok"}]


@dataclass(frozen=True)
class Sizes:
    """What is measured: an 8B's attention on a GPU, or toys of it in the interpreter. tokens: cached, by batch size."""

    shape: AttentionShape
    tokens: dict[int, int]
    prompt: int
    dtype: torch.dtype
    device: torch.device
    repetitions: int

    @classmethod
    def of(cls, dry: bool) -> Sizes:
        if dry:
            return cls(NAMED_SHAPE, {1: 130}, 70, torch.float32, torch.device("cpu"), 1)
        return cls(NAMED_SHAPE, {8: 32768, 1: 131072}, 8192, torch.bfloat16, torch.device("cuda"), 20)

    def problem(self, name: str, batch_size: int, seq_len: int, kv_len: int) -> Problem:
        layout, shape = (uncompressed_layout(self.shape), without_rope(self.shape)) if name == FULL else (
            named_layouts()[name], self.shape
        )  # fmt: skip
        generator = torch.Generator(self.device).manual_seed(0)
        return random_problem(layout, shape, batch_size, seq_len, kv_len, self.dtype, generator)


def checked(problem: Problem, call: Callable[[], Tensor]) -> dict[str, Any]:
    """Whether a call's output is right, by float64; plain PyTorch in the same dtype may be half as far off."""
    with torch.inference_mode():
        exact, limit = truth_and_limit(problem)
        error = relative_error(checked_output(problem, call()), exact)
    return {"status": "ok" if error <= limit else "failed", "error": error, "limit": limit}


def measure(name: str, dry: bool) -> Iterator[dict[str, Any]]:
    """Decoding in pages and contiguous, from a graph, and a prompt: each right, and its time."""
    sizes = Sizes.of(dry)
    for batch_size, tokens in sizes.tokens.items():
        yield from _rows(name, sizes, sizes.problem(name, batch_size, 1, tokens), f"decode {batch_size} x {tokens}")
    yield from _rows(name, sizes, sizes.problem(name, 1, sizes.prompt, sizes.prompt), f"prompt {sizes.prompt}")


def _rows(name: str, sizes: Sizes, problem: Problem, load: str) -> Iterator[dict[str, Any]]:
    calls: dict[str, Callable[[], Tensor]] = {}
    if name == FULL:
        backends = [key for key, backend in SDPA.items() if no_sdpa(problem, backend) is None and key != "math"]
        calls = {f"SDPA {key}": sdpa(problem, SDPA[key]) for key in backends}
    calls["kernel"] = kernel(problem)
    if problem.kv_len % PAGE == 0:
        calls[f"kernel, pages of {PAGE}"] = kernel_in_pages(problem, PAGE)
    for way, call in calls.items():
        row = {"name": f"{name}, {load}, {way}"}
        try:
            row |= checked(problem, call)
        except (RuntimeError, NotImplementedError) as error:
            refused = way.startswith("SDPA")  # PyTorch's way to say that a backend does not take such inputs
            yield {**row, "status": "skipped" if refused else "failed", "why": f"{type(error).__name__}: {error}"[:500]}
            continue
        with torch.inference_mode():
            seconds = replayed([call] if problem.seq_len > 1 else [call] * 2, sizes.device, sizes.repetitions)
        least = problem.work.cache_bytes
        yield {**row, "seconds": asdict(seconds), "bytes": least, "bytes_per_s": least / seconds.median}


def tiny(name: str, dry: bool) -> Iterator[dict[str, Any]]:
    """A step, some queries behind a cache, a prompt, and a graph that is replayed: what NVIDIA's sanitizer watches."""
    sizes = replace(Sizes.of(dry), dtype=torch.float32 if dry else torch.bfloat16)
    for seq_len, kv_len in ((1, 101), (5, 101), (67, 67)) if not dry else ((1, 20),):
        problem = sizes.problem(name, 2, seq_len, kv_len)
        yield {"name": f"{name}, {seq_len} queries, {kv_len} keys", **checked(problem, kernel(problem))}
        whole = sizes.problem(name, 2, seq_len, 128)
        yield {"name": f"{name}, {seq_len} queries, pages", **checked(whole, kernel_in_pages(whole, 16))}
    if not dry:
        problem = sizes.problem(name, 2, 1, 101)
        call = kernel(problem)
        with torch.inference_mode():
            graph = capture([call])
            graph.replay()
        yield {"name": f"{name}, a graph", "status": "ok"}


def tune(folder: Path, batch_size: int = 8, tokens: int = 32768, dry: bool = False) -> list[dict[str, Any]]:
    """Measure tiles, warps, stages and slices of decoding for every kind of layer, and write the fastest into the
    checkpoint's kernel_config.json, for this GPU's architecture.

    Returns:
        Of each kind of layer: its name, the seconds before and after, and what was chosen.
    """
    from ..kernels.launch import capability_of
    from ..models.compressed import CompressedCheckpoint

    checkpoint, sizes = CompressedCheckpoint(folder), Sizes.of(dry)
    if not dry and not torch.cuda.is_available():
        raise UsageError("there is no CUDA device here to measure on.", "Run it on the GPU that is to serve.")
    config = checkpoint.kernel_config
    name = "sm_90" if capability_of(sizes.device) >= 90 else "sm_80"
    chosen: dict[tuple[LayerLayout, LayerKernels], LayerKernels] = {}
    records = []
    load = (1, 70) if dry else (batch_size, tokens)
    for layout, own in dict.fromkeys(zip(checkpoint.layouts, config.layers, strict=True)):
        generator = torch.Generator(sizes.device).manual_seed(0)
        problem = random_problem(layout, checkpoint.shape, load[0], 1, load[1], sizes.dtype, generator)
        times = {own: _seconds(problem, own, sizes)}
        for candidate in _candidates(own, layout, name, dry):
            times.setdefault(candidate, _seconds(problem, candidate, sizes))
        best = min(times, key=lambda kernels: times[kernels])
        chosen[layout, own] = best
        records.append({"layer": own.layout, "before_s": times[own], "after_s": times[best], "kernels": best.to_dict()})
    layers = tuple(chosen[pair] for pair in zip(checkpoint.layouts, config.layers, strict=True))
    tuned = KernelConfig(layers, config.cache)
    tuned.check(checkpoint.layouts)
    path = folder / KERNEL_CONFIG
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(tuned.to_dict(), indent=2) + "\n", "utf-8")
    beside.replace(path)
    return records


def _candidates(own: LayerKernels, layout: LayerLayout, architecture: str, dry: bool) -> Iterator[LayerKernels]:
    most = layout.rope_block or max(TUNED["keys"])
    for keys in (k for k in TUNED["keys"] if k <= max(16, most)):
        for warps in TUNED["warps"]:
            for stages in TUNED["stages"]:
                for slices in TUNED["slices"]:
                    if dry and (warps, stages, slices) != (1, 1, 2):
                        continue
                    tile: Any = {architecture: Tile(keys, warps, stages)}
                    yield replace(own, slices_per_sm=slices, materialise=False, **tile)
    yield replace(own, materialise=True)


def _seconds(problem: Problem, kernels: LayerKernels, sizes: Sizes) -> float:
    """Of a step from a graph; infinite for a tile that does not compile or is wrong."""
    call = kernel(problem, kernels)
    try:
        if checked(problem, call)["status"] != "ok":
            return float("inf")
        with torch.inference_mode():
            return replayed([call] * 2, sizes.device, sizes.repetitions).median
    except Exception as error:  # the compiler has many
        if isinstance(error, torch.AcceleratorError):
            raise
        return float("inf")


def verdict(rows: list[dict[str, Any]], command: str) -> dict[str, Any]:
    """Counts, what failed, and of each layout's steps the time over the fastest uncompressed one."""
    from .provenance import provenance

    steps = [row for row in rows if row["part"] == "measure" and "decode" in row["name"] and "seconds" in row]
    full: dict[str, float] = {}
    for row in steps:
        layout, load, _ = row["name"].split(", ", 2)
        if layout == FULL:
            full[load] = min(full.get(load, float("inf")), row["seconds"]["median"])
    over = {}
    for row in steps:
        layout, load, _ = row["name"].split(", ", 2)
        if layout != FULL and load in full:
            over[row["name"]] = row["seconds"]["median"] / full[load]
    counts = {s: sum(row["status"] == s for row in rows) for s in ("ok", "failed", "skipped")}
    failed = [row for row in rows if row["status"] == "failed"]
    return {**provenance(command), "rows": counts, "failed": failed, "time_over_uncompressed": over}


def main() -> None:
    """What a job's process runs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("measure", "tiny"))
    parser.add_argument("name")
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    for row in (measure if options.what == "measure" else tiny)(options.name, options.dry):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
