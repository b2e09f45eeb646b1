"""Test and measure the kernels on this GPU within some minutes, or count what they issue without one.

python artifacts/gpu -o gpu.jsonl --minutes 9
python artifacts/gpu count --named --arch sm_80,sm_90
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ARTIFACTS = Path(__file__).resolve().parents[1]
PATHS = [str(ARTIFACTS.parent), str(ARTIFACTS)]
"""The checkout, for a rotor that is not installed, and this package's folder."""


def main() -> None:
    sys.path[:1] = PATHS  # the first was this folder, as of any script
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*PATHS, os.environ.get("PYTHONPATH")]))
    from gpu.arguments import run_command
    from rotor.errors import RotorError

    try:
        sys.exit(run_command(sys.argv[1:]))
    except RotorError as error:
        print(f"error: {error.message}\n  {error.hint}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
