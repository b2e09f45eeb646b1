"""The papers' schedules beside others, simulated: arithmetic on predicted costs, nothing is run and no GPU is needed.

    python artifacts/studies/schedules.py                                      # an 8B's heads with random ranks
    python artifacts/studies/schedules.py OUT --sms 132 --lengths 8x32768,200  # a decode step of a checkpoint
    python artifacts/studies/schedules.py OUT --prompts                        # its prompts

FDC and ZACK section 5.3. In a decode step the papers' schedule is the longest task first. In prompts it is blocks of
B_r query rows by a head's ranks (rows), and these with the last round's tasks cut for all SMs (papers). Random ranks
are drawn from 16 to 128 in multiples of 16, anew for each layer and KV head.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from prompt_simulation import simulate_prompts
from simulation import Balance, simulate

from rotor import RotorError
from rotor.calibration.prediction.devices import find_device
from rotor.checkpoint.layout import POST_ROPE, AttentionShape, GroupLayout, LayerLayout, ordered_by_class
from rotor.checkpoint.rows import NumberRow
from rotor.errors import UsageError
from rotor.models.compressed import CompressedCheckpoint

SHAPE = AttentionShape(num_layers=8, num_heads=32, num_kv_heads=8, head_dim=128, hidden_size=4096, rotary_dim=128)
SMS = 132
STEPS = {
    "1 x 32768": [32768],
    "64, from 512 to 32768": [512] * 32 + [2048] * 16 + [8192] * 8 + [32768] * 8,
    "128 x 4096": [4096] * 128,
    "256 of random lengths": [random.Random(i).randrange(512, 32768) for i in range(256)],
}
PROMPTS = {"1 x 512": [512], "1 x 2048": [2048], "1 x 8192": [8192], "16 x 300": [300] * 16}


def ragged_layout(seed: int) -> LayerLayout:
    """A layer whose KV heads have ranks of keys and of values by chance."""
    draw = random.Random(seed)
    ranks = [(draw.randrange(16, 129, 16), draw.randrange(16, 129, 16)) for _ in range(SHAPE.num_kv_heads)]
    groups = [GroupLayout((head,), NumberRow(key), NumberRow(value)) for head, (key, value) in enumerate(ranks)]
    return ordered_by_class(groups, POST_ROPE)


def show(title: str, names: Sequence[str], rows: dict[str, list[Balance]]) -> None:
    print(f"| {title} | {' | '.join(names)} |\n|---{'|---' * len(names)}|")
    for name, balances in rows.items():
        found = {b.schedule: f"{b.largest_over_mean:.2f}" for b in balances}
        print(f"| {name} | {' | '.join(found[schedule] for schedule in names)} |")
    print()


def random_ranks() -> None:
    layouts = [ragged_layout(seed) for seed in range(SHAPE.num_layers)]
    device = find_device("h200")
    steps = {name: simulate(layouts, SHAPE, lengths, device, SMS) for name, lengths in STEPS.items()}
    show("steps, sequences x tokens", ("none", "lpt", "stream"), steps)
    for causal in (False, True):
        prompts = {name: simulate_prompts(layouts, SHAPE, lengths, SMS, causal) for name, lengths in PROMPTS.items()}
        keys = "causal" if causal else "all keys for each block"
        show(f"prompts, {keys}", ("rounds", "none", "rows", "papers", "stream"), prompts)


def parse_lengths(text: str) -> list[int]:
    """`32768`, `200,16000`, `8x32768,64x100`: keys of each sequence; raises UsageError for anything else."""
    lengths: list[int] = []
    for item in text.split(","):
        count, times, length = item.strip().rpartition("x")
        if not length.isdigit() or (times and not count.isdigit()):
            raise UsageError(f"--lengths {text}: {item.strip()!r} is not a number of tokens.", "Example: 8x32768,200")
        lengths += [int(length)] * int(count or 1)
    return lengths


def of_checkpoint(folder: Path, lengths: list[int], sms: int, target_device: str, prompts: bool) -> None:
    """Largest over mean load of the SMs, by schedule."""
    checkpoint = CompressedCheckpoint(folder)
    layouts, shape = checkpoint.layouts, checkpoint.shape
    if not prompts:
        balances = simulate(layouts, shape, lengths, find_device(target_device), sms, checkpoint.dtype.itemsize)
        show(f"step, {sms} SMs", [b.schedule for b in balances], {str(folder): balances})
        return
    for causal in (False, True):
        balances = simulate_prompts(layouts, shape, lengths, sms, causal)
        keys = "causal" if causal else "all keys for each block"
        show(f"prompts, {keys}, {sms} SMs", [b.schedule for b in balances], {str(folder): balances})


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", metavar="OUT", help="a checkpoint that `rotor export` wrote")
    parser.add_argument("--sms", type=int, default=SMS, help="streaming multiprocessors of the GPU")
    parser.add_argument("--lengths", default="32768", help="cached tokens of each sequence, or tokens of each prompt")
    parser.add_argument("--target-device", default="h200")
    parser.add_argument("--prompts", action="store_true", help="prompts of these lengths in place of a decode step")
    asked = parser.parse_args()
    if asked.folder is None:
        random_ranks()
        return
    try:
        of_checkpoint(asked.folder, parse_lengths(asked.lengths), asked.sms, asked.target_device, asked.prompts)
    except RotorError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
