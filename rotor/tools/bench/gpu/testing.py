"""The tests marked `gpu`, by pytest in a process of its own, and what each of them said.

This module is also the plugin by which that pytest writes a line for each test as it ends: one that is stopped has
written those before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .plan import ROOT

Record = dict[str, Any]

OUTCOMES = "ROTOR_GPU_OUTCOMES"
"""The file that the plugin writes to."""

TEST_SECONDS = 120


def run_tests(arguments: list[str], workers: int, stop_after_s: float = 590.0) -> Iterator[Record]:
    """A record for each test that ended, then how pytest did.

    Args:
        arguments: of pytest, beside `-m gpu`. workers: processes, where pytest-xdist is installed.
    """
    with tempfile.TemporaryDirectory() as folder:
        outcomes = Path(folder) / "outcomes.jsonl"
        outcomes.touch()
        call = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-m", "gpu", *arguments]
        call += ["-p", "no:cacheprovider", "-p", __name__]
        if find_spec("xdist") is not None and workers > 1:
            call += ["-n", str(workers), "--dist", "worksteal"]
        if find_spec("pytest_timeout") is not None:
            call += [f"--timeout={TEST_SECONDS}"]
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, OUTCOMES: str(outcomes), "PYTHONPATH": os.pathsep.join(paths)}
        environment["OMP_NUM_THREADS"] = "1"
        start, done = time.monotonic(), None
        with outcomes.open(encoding="utf-8") as file, (Path(folder) / "output").open("w+", encoding="utf-8") as output:
            process = subprocess.Popen(call, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
            while done is None and time.monotonic() - start < stop_after_s:
                done = process.poll()
                yield from _lines(file)
                if done is None:
                    time.sleep(0.2)
            if done is None:
                process.kill()
            output.seek(0)
            said = output.read()
        if done not in (0, 5):
            yield {"pytest": done, "output": said[-6000:]}
        else:
            yield {"pytest": done, "output": said[-300:]}


def _lines(file: Any) -> Iterator[Record]:
    """Whole lines that are new."""
    while True:
        place = file.tell()
        line = file.readline()
        if not line.endswith("\n"):
            file.seek(place)
            return
        yield json.loads(line)


def pytest_runtest_logreport(report: Any) -> None:
    """pytest's hook, in the process that starts others: one line for each test, when it is done or fails."""
    if "PYTEST_XDIST_WORKER" in os.environ or OUTCOMES not in os.environ:
        return
    if report.when == "call" or (report.outcome != "passed" and report.when == "setup"):
        record = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 3)}
        if report.outcome != "passed":
            record["why"] = str(report.longrepr)[-3000:]
        with open(os.environ[OUTCOMES], "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
