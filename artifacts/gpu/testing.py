"""The tests marked `gpu`, shared out over forked processes, and what each of them said.

A process runs pytest within itself: it has imported PyTorch, Triton and the kernels already, which would take pytest's
own workers longer than most tests.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from queue import Empty, Queue
from tempfile import TemporaryFile
from threading import Thread
from typing import TYPE_CHECKING

from .plan import ROOT, Record

if TYPE_CHECKING:
    import pytest

QUIET = [
    "-q",
    "--tb=short",
    "-m",
    "gpu",
    "--noconftest",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:xdist",
    "-p",
    "no:timeout",
]
"""Options of pytest: the tests need no fixture of tests/conftest.py, and the runner has time limits of its own."""


def run_tests(arguments: list[str], share: int = 0, shares: int = 1) -> Iterator[Record]:
    """A record for each test of a share as it ends, then how pytest did.

    Args:
        arguments: of pytest, beside QUIET. share, shares: of the tests in their order, every `shares`-th.
    """
    import pytest

    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT / "tests"))  # for `support`, without the conftest.py there
    said: Queue[Record] = Queue()
    done: list[int] = []
    with TemporaryFile("w+", encoding="utf-8") as output:

        def work() -> None:
            with redirect_stdout(output), redirect_stderr(output):
                done.append(int(pytest.main([*QUIET, *arguments], plugins=[Share(share, shares, said)])))

        thread = Thread(target=work, daemon=True)
        thread.start()
        while thread.is_alive() or not said.empty():
            try:
                yield said.get(timeout=0.1)
            except Empty:
                continue
        output.seek(0)
        if done not in ([int(pytest.ExitCode.OK)], [int(pytest.ExitCode.NO_TESTS_COLLECTED)]):
            yield {"pytest": done, "output": output.read()[-6000:]}


class Share:
    """A plugin of pytest: leaves every test out but a share, and says how each ended."""

    def __init__(self, share: int, shares: int, said: Queue[Record]) -> None:
        self.share, self.shares, self.said = share, shares, said

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """After pytest's own choice by -k and -m."""
        session.items[:] = session.items[self.share :: self.shares]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or (report.outcome != "passed" and report.when == "setup"):
            record = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 3)}
            if report.outcome != "passed":
                record["why"] = str(report.longrepr)[-3000:]
            self.said.put(record)
