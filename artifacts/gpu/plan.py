"""Plan of `python artifacts/gpu`: its parts in order, and the time that each may take.

First what would make other results worthless: rows that programs of a launch make together, by compute-sanitizer.
Then what nobody has timed: each layout beside float64, the study in CUDA C++ with racecheck, and times, among them
those of queries that are absorbed in parts of 24 MB. Then the tests; then tiles, whole models, and what may be left
out.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from rotor.checked import JsonObject
from rotor.checkpoint.kernel_config import ARCHITECTURES
from rotor.tools.bench.tuning import launches

from .absorbing import ways_to_absorb
from .loads import APPENDED_TOGETHER, CUDA_ROWS, FLASH_ROWS, LOADS, PROMPT
from .subjects import gpu_subjects, model_of

Record = JsonObject
"""A measurement, as a line of JSON."""

ROOT = Path(__file__).resolve().parents[2]
"""The checkout: tests/ lies there."""

CARRIED = ROOT / ".gpu-model"
"""Parts of a model that was carried here; git ignores it."""

CORES = max(1, min(16, len(os.sched_getaffinity(0))))
"""Processes that compile or test at once."""


DEVICE = "device"
"""The first job, without which there is no other."""


@dataclass(frozen=True)
class Task:
    """Part of a job, done by one process: a generator of records, "module:function", and its arguments."""

    name: str
    function: str
    arguments: JsonObject = field(default_factory=dict)
    limit_s: float = 60.0


@dataclass(frozen=True)
class Job:
    """Tasks of one kind, done in order by `at_once` processes.

    seconds: planned, on an H100 with 16 cores. flexible: fewer will do, since its tasks come most wanted first.
    missing: why the job cannot run here, or nothing.
    """

    name: str
    what: str
    seconds: float
    tasks: Callable[[], list[Task]]
    at_once: int = 1
    flexible: bool = False
    missing: Callable[[], str] = str


def jobs(out: Path, layouts: Sequence[str] = ()) -> list[Job]:
    """All jobs in order, the last of which takes what time is left.

    Args:
        out: the file of results; what programs write beside is named after it.
        layouts: names of those that are compiled, timed and tuned; none for all.
    """
    names = list(layouts or gpu_subjects())
    checkout = lambda: needs_checkout() or needs_module("pytest")  # noqa: E731
    return [
        Job(DEVICE, "clocks, versions; rates of memory and tensor cores", 2, _device),
        Job("arrivals", "rows that the last of several programs codes, hurried and by compute-sanitizer", 35,
            _arrivals, at_once=CORES),
        Job("compile", "every kernel that is timed, on all cores", 45, lambda: _compile(names), at_once=CORES),
        Job("correctness", "a step of each layout in bfloat16 beside float64", 25, _correctness, at_once=CORES,
            missing=checkout),
        Job("cuda", "the study in CUDA C++: hazards, and its decode beside Triton's", 40, _cuda, flexible=True,
            missing=lambda: needs_program("nvcc")),
        Job("times", "attention of each layout at each load beside SDPA, cold caches", 45, lambda: _times(names),
            flexible=True),
        Job("tests", "the other tests marked gpu", 60, _tests, at_once=CORES, flexible=True, missing=checkout),
        Job("tiles", "every tile that is tried, compiled on all cores", 65, lambda: _tiles(names), at_once=CORES,
            flexible=True),
        Job("tune", "steps of each layout by tile, programs on an SM, and how queries are absorbed", 45,
            lambda: _tune(out, names), flexible=True),
        Job("model", "an 8B with random weights, decoding, as a CUDA graph", 50, _model, flexible=True),
        Job("counters", "instructions, pipes and stalls of kernels", 35, lambda: _counters(out),
            missing=lambda: needs_program("ncu")),
        Job("sanitizer", "small launches of every kernel by compute-sanitizer", 60, _sanitizer,
            missing=lambda: needs_program("compute-sanitizer")),
        Job("carried", "a real model: calibrated, exported, generating", 150, lambda: _carried(out), flexible=True,
            missing=needs_carried),
        Job("compiled", "the 8B with fewer layers by torch.compile", 60, _compiled, flexible=True),
    ]  # fmt: skip


def needs_program(name: str) -> str:
    return "" if shutil.which(name) else f"{name} is not installed"


def needs_carried() -> str:
    return "" if (CARRIED / "parts.json").is_file() else "no model was carried: make gpu-bundle MODEL=FILE"


def needs_module(name: str) -> str:
    return "" if find_spec(name) else f"{name} is not installed"


def needs_checkout() -> str:
    return "" if (ROOT / "tests" / "kernels").is_dir() else "the tests are not here: it needs a checkout"


DESCRIBE = Task("describe", "device:describe", limit_s=90)
"""Says first whether there is a GPU at all."""


def _device() -> list[Task]:
    return [Task("rates", "device:rates")]


def _arrivals() -> list[Task]:
    """The tools of compute-sanitizer where it is, and launches without it."""
    tools = () if needs_program("compute-sanitizer") else ("memcheck", "synccheck")
    checked = [Task(tool, "arrived:sanitized", {"tool": tool}, 60) for tool in tools]
    return [*checked, Task("hurried", "arrived:hurried", {"names": [*APPENDED_TOGETHER]}, 60)]


def _compile(names: list[str]) -> list[Task]:
    """List compile tasks, the largest kernels first; a layout's loads share most kernels and so a process."""
    baselines = [
        Task(f"Triton, {bits} bits", "times:flash",
             {"name": "llama3-8b", "load": "1 x 32K", "bits": bits, "lengths": [1024]}, 120)
        for bits in FLASH_ROWS
    ]  # fmt: skip
    models = [
        Task(f"model, {name}", "model:compile_model", {"name": name}, 120)
        for name in reversed(MODELLED)
        if name in (UNCOMPRESSED, *names)
    ]
    return (
        models
        + baselines
        + [
            Task(name, "times:compile_subject", {"name": name, "loads": [*LOADS, PROMPT]}, 120)
            for name in reversed(names)
        ]
    )


def _times(names: list[str]) -> list[Task]:
    """Load by load: PyTorch's attention of each model, then every layout; prompts last."""
    found = []
    models = dict.fromkeys(map(model_of, names))
    for load in (*LOADS, PROMPT):
        for name in models:
            found.append(Task(f"SDPA, {name}, {load}", "times:stock", {"name": name, "load": load}))
        for bits in FLASH_ROWS if load != PROMPT else ():
            arguments = {"name": "llama3-8b", "load": load, "bits": bits}
            found.append(Task(f"Triton, {bits} bits, {load}", "times:flash", arguments))
        for name in names:
            if load == PROMPT and gpu_subjects()[name].layout.exact is not None:
                continue  # stock attention over its own keys and values
            function = "times:prompt" if load == PROMPT else "times:decoding"
            arguments = {"name": name} if load == PROMPT else {"name": name, "load": load}
            found.append(Task(f"{name}, {load}", function, arguments))
    return found


def _tiles(names: list[str]) -> list[Task]:
    """Most wanted first: the first tile of every layer, then the second."""
    found = []
    for name in names:
        subject = gpu_subjects()[name]
        if name not in LIKE_OTHERS and subject.layout.exact is None:
            own, layout = subject.kernels, subject.layout
            count = max(len(launches(own, layout, each)) for each in ARCHITECTURES) + len(ways_to_absorb(layout))
            found += [
                (index, Task(f"{name}, {index}", "tiles:compile_launch", {"name": name, "index": index}))
                for index in range(count)
            ]
    return [task for _, task in sorted(found, key=lambda pair: pair[0])]


def _tune(out: Path, names: list[str]) -> list[Task]:
    return [
        Task(name, "tiles:tune", {"name": name, "compiled": str(out)}, 60)
        for name in names
        if name not in LIKE_OTHERS and gpu_subjects()[name].layout.exact is None
    ]


LIKE_OTHERS = ("qwen3-8b-128x2", "llama3-8b-128x2-blocks128", "llama3-8b-128x4-blocks128")
"""Layers that are tuned with another's, as those with exact tokens are."""

UNCOMPRESSED = "uncompressed"

MODELLED = (UNCOMPRESSED, "llama3-8b-64x2", "llama3-8b-128x2")
"""Kinds of all layers of the 8B: uncompressed, and layouts."""


def _model() -> list[Task]:
    loads = ["1 x 32K", "8 x 32K", "32 x 8K"]
    return [Task(name, "model:decoding", {"name": name, "loads": loads}, 60) for name in MODELLED]


def _carried(out: Path) -> list[Task]:
    return [Task("rotor", "carried:run", {"parts": str(CARRIED), "work": str(out.with_suffix(".model"))}, 600)]


def _compiled() -> list[Task]:
    arguments = {"load": "8 x 32K", "layers": 4}
    return [Task(name, "model:compiled", {"name": name, **arguments}, 90) for name in MODELLED[:2]]


def _sanitizer() -> list[Task]:
    return [Task("memcheck", "sanitizer:check", {"names": [*gpu_subjects()]}, 150)]


def _cuda() -> list[Task]:
    """Its hazards, where compute-sanitizer is, and its times."""
    found = [] if needs_program("compute-sanitizer") else [Task("racecheck", "cuda_decode:races", limit_s=90)]
    timed = [(name, load) for load in ("8 x 32K", "1 x 32K") for name in CUDA_ROWS]
    return found + [Task(f"{n}, {load}", "cuda_decode:timed", {"name": n, "load": load}, 60) for n, load in timed]


def _counters(out: Path) -> list[Task]:
    arguments = {
        "names": ["llama3-8b-128x2", "llama3-8b-64x2", "smollm2-64x3"],
        "raw": str(out.with_suffix(".ncu.csv")),
    }
    return [Task("ncu", "counters:count", arguments, 120)]


FIRST_TESTS = "test_masks_of_any_pattern and 1-dtype0 or test_pages and news0-None or nan or unseen"
"""Names of the tests, as pytest chooses them, that go first: a step of each layout in bfloat16, contiguous and in
pages, and what could be NaN."""


def _correctness() -> list[Task]:
    return _shares(FIRST_TESTS, 60)


def _tests() -> list[Task]:
    return _shares(f"not ({FIRST_TESTS})", 300)


def _shares(expression: str, limit_s: float) -> list[Task]:
    """The tests that pytest chooses by an expression, a share for each process."""
    arguments = [*gpu_tests(), "-k", expression]
    return [
        Task(f"{share + 1} of {CORES}", "testing:run_tests",
             {"arguments": arguments, "share": share, "shares": CORES}, limit_s)
        for share in range(CORES)
    ]  # fmt: skip


def gpu_tests() -> list[str]:
    """Files with tests marked gpu: collecting the others takes longer than running these."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(file.relative_to(ROOT)) for file in files if "mark.gpu" in file.read_text("utf-8")]
