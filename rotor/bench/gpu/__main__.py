"""A process of one phase or of several, as `rotor gpu` starts it: `python -m rotor.bench.gpu decode --out FILE`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(prog="rotor.bench.gpu")
    parser.add_argument("phases", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--run", default="by hand")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--dry", action="store_true")
    arguments = parser.parse_args()
    if arguments.dry:  # before Triton is imported
        os.environ |= {"TRITON_INTERPRET": "1", "ROTOR_ATTENTION": "triton"}

    from ..provenance import package_commit
    from ..report import describe_device
    from .case import run_cases
    from .device import measured_device
    from .phases import cases_of
    from .records import Setting

    name = str(describe_device(measured_device(arguments.dry))["name"])
    setting = Setting(arguments.run, name, package_commit(), arguments.dry)
    for phase in arguments.phases:
        run_cases(phase, cases_of(phase, arguments.dry, arguments.checkpoint), arguments.out, setting)


if __name__ == "__main__":
    main()
