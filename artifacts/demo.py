"""Run `make demo`: the bundled model calibrated, exported and validated in short, then both models side by side.

    python artifacts/demo.py     in the root of the sources

All commands run in this process: torch and transformers take longer to import than most of them to work.
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

from rotor.cli import main as rotor

SOURCE, RUN, OUT = "artifacts/demo-model", "runs/make-demo", "out/make-demo"
CALIBRATION = ("tokens.count=16384", "codes.tokens=8192")
MEASURES = (
    "evaluation.seq_len=512",  # as it was trained
    "evaluation.search_tokens=4096",
    "evaluation.report_tokens=8192",
    "evaluation.lookup_prompts=12",
    "evaluation.copy_prompts=8",
    "search.resolution=0.01",
)


def settings(assignments: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(word for assignment in assignments for word in ("--set", assignment))


COMMANDS = (
    ("calibrate", SOURCE, "-o", RUN, *settings(CALIBRATION), "--overwrite"),
    ("export", RUN, "-o", OUT, "--accuracy", "0.99", *settings(MEASURES), "--overwrite"),
    ("validate", OUT),
)
PROMPT, NEW_TOKENS, CONTEXT = "import unittest\n\n\nclass Test", 40, 32768


def continued(folder: Path) -> str:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    inputs = tokenizer(PROMPT, return_tensors="pt")
    return tokenizer.decode(model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)[0])


def run(command: tuple[str, ...]) -> None:
    """Run a command of rotor's; ends the process if it fails."""
    sys.argv = ["rotor", *command]
    print(f"$ {' '.join(sys.argv)}", flush=True)
    try:
        rotor()
    except SystemExit as end:
        if end.code:
            raise


def compare(out: Path) -> None:
    """Print sizes, accuracy and texts of a checkpoint beside those of its source, and what to do next."""
    report = json.loads((out / "rotor.json").read_text())
    source = out / report["source"]["path"]
    size, accuracy = report["kv_bytes_per_token"], report["accuracy"]
    low, high = accuracy["interval_95"]
    rows = {
        "KV cache, bytes a token": (f"{size['before']}", f"{size['after']}"),
        f"KV cache of {CONTEXT} tokens": tuple(f"{CONTEXT * size[key] / 1e6:.1f} MB" for key in ("before", "after")),
        "removed": ("0", f"{report['compression']['stored']:.3f}"),
        "accuracy": ("1", f"{accuracy['report']:.4f} [{low:.4f}, {high:.4f}]"),
        "text": (continued(source), continued(out)),
    }
    table = Table("", "uncompressed", f"compressed, target {accuracy['target']:g}", show_lines=True)
    for name, cells in rows.items():
        table.add_row(name, *map(Text, cells))
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    console.print(
        "Accuracy is the smallest of four ratios to the uncompressed model, on text that nothing was chosen by: next\n"
        "tokens, perplexity, looking values up, and copying. In brackets its 95 % interval.\n"
        f"Next: your own model. `rotor inspect MODEL` predicts memory, disk and time; then\n"
        f"  rotor calibrate MODEL -o runs/mine --text FILE\n"
        f"  rotor export runs/mine -o out/mine --accuracy 0.99\n"
        f"  rotor validate out/mine\n"
        f"{out}/report.html shows what was found here; `make demo-full` compares recipes and targets.",
        highlight=False,
        markup=False,
    )


if __name__ == "__main__":
    for command in COMMANDS:
        run(command)
    compare(Path(OUT))
