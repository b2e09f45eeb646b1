"""What `make demo` ends with: the bundled model and its compressed checkpoint side by side, and what to do next.

python artifacts/demo.py OUT
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the fastest for a model this small

from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import AutoModelForCausalLM, AutoTokenizer

import rotor  # noqa: F401  (lets transformers load OUT)

PROMPT, NEW_TOKENS, CONTEXT = "import unittest\n\n\nclass Test", 40, 32768


def continued(folder: Path) -> str:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    inputs = tokenizer(PROMPT, return_tensors="pt")
    return tokenizer.decode(model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)[0])


def main(out: Path) -> None:
    report = json.loads((out / "rotor.json").read_text())
    source = out / report["source"]["path"]
    size, accuracy = report["kv_bytes_per_token"], report["accuracy"]
    low, high = accuracy["interval_95"]
    rows = {
        "KV cache, bytes a token": (f"{size['before']}", f"{size['after']}"),
        f"KV cache of {CONTEXT} tokens": tuple(f"{CONTEXT * size[key] / 1e6:.1f} MB" for key in ("before", "after")),
        "removed": ("0", f"{report['compression']['stored']:.3f}"),
        "accuracy on held-out text": ("1", f"{accuracy['report']:.4f} [{low:.4f}, {high:.4f}]"),
        "text": (continued(source), continued(out)),
    }
    table = Table("", "uncompressed", f"compressed, target {accuracy['target']:g}", show_lines=True)
    for name, cells in rows.items():
        table.add_row(name, *map(Text, cells))
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    console.print(
        f"Next: your own model. `rotor inspect MODEL` predicts memory, disk and time; then\n"
        f"  rotor calibrate MODEL -o runs/mine --text FILE\n"
        f"  rotor export runs/mine -o out/mine --accuracy 0.99\n"
        f"  rotor validate out/mine\n"
        f"{out}/report.html shows what was found here; `make demo-full` compares recipes and targets.",
        highlight=False,
        markup=False,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
