"""Reads and writes out of bounds in small launches of every kernel, by NVIDIA's `compute-sanitizer`, which runs this
module as a program.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator

from .loads import PROMPT, RAGGED
from .plan import ROOT, Record

SMALL = {"8 x 32K": [200] * 3, RAGGED: [5, 130, 64], PROMPT: [80]}
"""Cached tokens, contiguous and in pages, and of a prompt."""


def check(names: list[str]) -> Iterator[Record]:
    """Errors in the launches of some subjects."""
    output = under("memcheck", __name__, *names)
    yield {"sanitizer": errors(output), "layouts": names, "output": _found(output)}


def under(tool: str, module: str, *arguments: str) -> str:
    """What a tool of compute-sanitizer says of a module that runs as a program. Tensors are allocated one by one, so
    that each has bounds."""
    call = ["compute-sanitizer", "--tool", tool, sys.executable, "-m", module, *arguments]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(call, capture_output=True, text=True, cwd=ROOT, env=environment)
    return done.stdout + done.stderr


def errors(text: str) -> int:
    """Count of errors.

    Raises:
        RuntimeError: it did not come to an end.
    """
    found = re.search(r"ERROR SUMMARY: (\d+) error", text)
    if found is None:
        raise RuntimeError(f"compute-sanitizer: {text[-3000:]}")
    return int(found[1])


def _found(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if line.startswith("========="))[:3000]


def launch(names: list[str], device: str = "cuda") -> None:
    """Launch what compute-sanitizer looks at."""
    from .times import compile_subject

    for name in names:
        for record in compile_subject(name, [*SMALL], device, SMALL):
            print(record["layout"], flush=True)


if __name__ == "__main__":
    launch(sys.argv[1:])
