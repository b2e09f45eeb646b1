"""Phases that run other programs: tests on the GPU, NVIDIA's sanitizer, an engine; a row is a program's outcome."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ...errors import RotorError
from .case import Case, Skipped

ROOT = Path(__file__).resolve().parents[3]
"""Of a checkout: tests/ and artifacts/ lie there."""

SANITIZERS = {"memcheck": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, "racecheck": {}}
"""Tools, with the environment of each: PyTorch's own memory pool hides what is read beyond a tensor."""

TINY = ("after RoPE", "one latent", "before RoPE", "full", "after RoPE, codes", "one latent, codes")
ERRORS_FOUND = 99
DEMO = "artifacts/demo-model"


def test_cases(dry: bool) -> Iterator[Case]:
    """`pytest -m gpu`, a file at a time, so that what has passed stays known; no failure stops it."""
    files = gpu_test_files(ROOT / "tests")
    if not files:
        yield Case("pytest -m gpu", partial(_absent, "no tests/ here: run it in a checkout of rotor"))
    for file in files[:1] if dry else files:
        yield Case(f"pytest -m gpu {file.name}", partial(_run_tests, file, dry))


def gpu_test_files(folder: Path) -> list[Path]:
    """Those that mark a test with `gpu`; the kernels' first."""
    found = [file for file in sorted(folder.glob("test_*.py")) if "mark.gpu" in file.read_text("utf-8")]
    return sorted(found, key=lambda file: "kernels" not in file.name)


def _absent(why: str) -> dict[str, Any]:
    raise Skipped(why)


def _run_tests(file: Path, dry: bool) -> dict[str, Any]:
    if importlib.util.find_spec("pytest") is None:
        raise Skipped("pytest is not installed")
    parallel = not dry and importlib.util.find_spec("xdist") is not None
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        call = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", str(file), f"--junitxml={report}", "--tb=line"]
        call += ["-p", "no:cacheprovider", *(["-n", str(min(8, os.cpu_count() or 1))] if parallel else [])]
        done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True)
        if not report.is_file():
            raise RotorError(f"pytest ended with {done.returncode}: {_end_of(done)}", "Run it by itself.")
        found = read_junit(report)
    if found["failed"]:
        raise RotorError(
            f"{found['failed']} of {found['passed'] + found['failed']} tests failed: {', '.join(found['names'][:20])}",
            f"pytest -m gpu tests/{file.name}",
        )
    return {name: found[name] for name in ("passed", "failed", "skipped")}


def read_junit(report: Path) -> dict[str, Any]:
    """Tests that passed, failed (errors among them) and were skipped, and the names of those that failed."""
    names, passed, skipped = [], 0, 0
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            names.append(str(case.get("name")))
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return {"passed": passed, "failed": len(names), "skipped": skipped, "names": names}


def sanitizer_cases(dry: bool) -> Iterator[Case]:
    """Every tool on tiny cases of every kind of layer; without the tool only dry, where the cases run as they are."""
    for tool in SANITIZERS:
        for name in TINY[:1] if dry else TINY:
            yield Case(f"{tool}, {name}", partial(_sanitize, tool, name, dry))


def find_sanitizer() -> str | None:
    """NVIDIA's compute-sanitizer, on the path or with the CUDA toolkit."""
    places = [Path(home) / "bin" for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if home]
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path=os.pathsep.join(str(place) for place in places)
    )


def _sanitize(tool: str, name: str, dry: bool) -> dict[str, Any]:
    program = find_sanitizer()
    if program is None and not dry:
        raise Skipped("compute-sanitizer is not installed (it comes with the CUDA toolkit)")
    call = [sys.executable, "-m", "rotor.bench.gpu.tiny", name, *(["--dry"] if dry else [])]
    if program is not None:
        call = [program, "--tool", tool, "--error-exitcode", str(ERRORS_FOUND), *call]
    done = subprocess.run(call, env=os.environ | SANITIZERS[tool], capture_output=True, text=True)
    if done.returncode == ERRORS_FOUND:
        found = [line for line in done.stdout.splitlines() if "=========" in line]
        raise RotorError(f"{tool} found errors: {' '.join(found)[:400]}", " ".join(call))
    if done.returncode:
        raise RotorError(f"ended with {done.returncode}: {_end_of(done)}", " ".join(call))
    return {"checked": done.stdout.strip().splitlines()[-1], "with_tool": program is not None}


def engine_cases(dry: bool, checkpoint: Path | None) -> Iterator[Case]:
    """A checkpoint beside its source in vLLM: the one that was given, or a quick one of the bundled model."""
    yield Case("rotor bench --engine vllm", partial(_serve, dry, checkpoint))


def _serve(dry: bool, checkpoint: Path | None) -> dict[str, Any]:
    if importlib.util.find_spec("vllm") is None:
        raise Skipped("vLLM is not installed here")
    if checkpoint is None and not (ROOT / DEMO).is_dir():
        raise Skipped("no checkpoint was given (--checkpoint), and the bundled model is not here")
    with tempfile.TemporaryDirectory() as folder:
        if checkpoint is None:
            run, checkpoint = Path(folder) / "run", Path(folder) / "out"
            quick = ["--recipe", "fdc", "--set", "tokens.count=4096"]
            _rotor("calibrate", str(ROOT / DEMO), "-o", str(run), *quick)
            _rotor("export", str(run), "-o", str(checkpoint), "--compression", "0.5")
        out = Path(folder) / "serving.json"
        small = ["--batch", "1", "--prefill", "8", "--new-tokens", "2", "--memory-gb", "0.1"] if dry else []
        _rotor("bench", str(checkpoint), "--engine", "vllm", "-o", str(out), *small)
        found = json.loads(out.read_text("utf-8"))
    return {name: found[name] for name in ("serving", "cache", "checks", "versions")}


def _rotor(*words: str) -> None:
    done = subprocess.run([sys.executable, "-m", "rotor", *words, "-q"], capture_output=True, text=True)
    if done.returncode:
        raise RotorError(f"rotor {words[0]} ended with {done.returncode}: {_end_of(done)}", " ".join(["rotor", *words]))


def _end_of(done: subprocess.CompletedProcess[str]) -> str:
    return " ".join((done.stderr.strip() or done.stdout.strip()).split())[-400:]
