"""The papers' schedules beside others, in steps and in prompts of an 8B's heads with random ranks: a Markdown table.

python artifacts/studies/schedules.py

FDC and ZACK section 5.3. Ranks are drawn from 16 to 128 in multiples of 16, anew for each layer and KV head. `rotor
schedule OUT` and `rotor schedule OUT --prompts` say the same of a checkpoint.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from rotor.calibration.prediction.devices import find_device
from rotor.checkpoint.layout import POST_ROPE, AttentionShape, GroupLayout, LayerLayout, ordered_by_class
from rotor.checkpoint.rows import NumberRow
from rotor.tools.bench.prompt_simulation import simulate_prompts
from rotor.tools.bench.simulation import Balance, simulate

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


def main() -> None:
    layouts = [ragged_layout(seed) for seed in range(SHAPE.num_layers)]
    device = find_device("h200")
    steps = {name: simulate(layouts, SHAPE, lengths, device, SMS) for name, lengths in STEPS.items()}
    show("steps, sequences x tokens", ("none", "lpt", "stream"), steps)
    for causal in (False, True):
        prompts = {name: simulate_prompts(layouts, SHAPE, lengths, SMS, causal) for name, lengths in PROMPTS.items()}
        keys = "causal" if causal else "all keys for each block"
        show(f"prompts, {keys}", ("rounds", "none", "rows", "papers", "stream"), prompts)


if __name__ == "__main__":
    main()
