"""A checkpoint of 8 GB is calibrated within 3 GB of memory (ROTOR_SLOW=1; it takes minutes and 9 GB of disk)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from conftest import ROOT
from large_checkpoint import make_checkpoint

LIMIT_BYTES = 3_000_000_000


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("ROTOR_SLOW") != "1", reason="takes minutes; set ROTOR_SLOW=1")
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="reads memory from /proc")
def test_calibrating_more_than_fits(tmp_path: Path) -> None:
    """Under RLIMIT_DATA, which limits anonymous memory (also what is only reserved); its resident peak is watched."""
    model = tmp_path / "model"
    assert make_checkpoint(model, layers=14) > 8e9
    program = (
        "import resource; from rotor.cli import main; "
        f"resource.setrlimit(resource.RLIMIT_DATA, ({LIMIT_BYTES}, {LIMIT_BYTES})); main()"
    )
    command = [
        *(sys.executable, "-c", program, "calibrate", str(model), "-o", str(tmp_path / "run"), "--recipe", "rotor"),
        *("--set", "tokens.source=random", "--set", "tokens.count=2048", "--batch-tokens", "1024"),
        *("--dtype", "bfloat16", "--json"),
    ]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    ) as process:
        peaks = [0]
        watcher = threading.Thread(target=watch, args=(process.pid, peaks))
        watcher.start()
        out, err = process.communicate()
        watcher.join()
    assert process.returncode == 0, err[-3000:]
    assert "one layer of weights at a time" in err
    assert json.loads(out)["tokens"]["count"] == 2048
    assert peaks[0] < LIMIT_BYTES


def watch(pid: int, peaks: list[int]) -> None:
    """Peak of anonymous resident memory while the process lives; pages of mapped files can be dropped at any time."""
    while True:
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            return
        anonymous = [int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:")]
        if not anonymous:  # ended
            return
        peaks[0] = max(peaks[0], *anonymous)
        threading.Event().wait(0.2)
