"""Count every size of the bundled table of instructions anew, on sm_90: python artifacts/count_instructions.py FILE."""

import argparse
import json
import sys
from pathlib import Path

import triton

from rotor.calibration.prediction.instructions import BLOCK, HEAD_DIM, Specialisation, bundled_table
from rotor.tools.bench.precompile import count_layers
from rotor.tools.bench.subjects import PAGE, subject_of


def count(wanted: Specialisation) -> dict[str, float]:
    """Warp instructions a key and group, and the most that a thread spills."""
    decode = absorb = spilled = 0.0
    (layer,) = count_layers([subject_of(str(wanted), wanted)], [90], step_alone=True)
    for kernel in layer.kernels:
        if kernel.error is not None:
            sys.exit(f"{wanted}, {kernel.name}: {kernel.error}")
        assert kernel.instructions_per_key is not None
        number = kernel.instructions_per_key * wanted.kv_heads
        spilled = max(spilled, kernel.spilled_bytes or 0)
        decode, absorb = (decode, absorb + number) if kernel.name.startswith("absorb") else (decode + number, absorb)
    return {"decode": round(decode, 2), "absorb": round(absorb, 2), "spilled_bytes": int(spilled)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    file = parser.parse_args().file
    entries = [wanted._asdict() | count(wanted) for wanted in sorted(bundled_table())]
    about = {"arch": "sm_90", "triton": triton.__version__, "page": PAGE, "block": BLOCK, "head_dim": HEAD_DIM}
    file.write_text(json.dumps({**about, "entries": entries}, indent=2) + "\n")
