"""A tiny case of one kind of layer, decoding and a prompt, compared with float64: what NVIDIA's sanitizer watches.

python -m rotor.bench.gpu.tiny "after RoPE"
"""

from __future__ import annotations

import argparse

import torch

from ..attention import relative_error, truth_and_limit
from ..problem import checked_output, compressed_layout, random_problem
from ..rows import kernel_decode, kernel_prefill
from .attention import AttentionSizes

BATCH_SIZE, TOKENS, QUERIES = 2, 100, 5
"""An odd length, so that the last tile is not full."""


def check(name: str, dry: bool) -> list[float]:
    """The relative errors of decoding, of some queries behind a cache, and of a prompt, each within its limit."""
    sizes = AttentionSizes.of(dry)
    tokens = 20 if dry else TOKENS
    errors = []
    for seq_len in (1, QUERIES, tokens):
        problem = random_problem(
            compressed_layout(sizes.layouts[name]),
            sizes.shape,
            BATCH_SIZE,
            seq_len,
            tokens,
            sizes.dtype,
            torch.Generator(sizes.device).manual_seed(0),
        )
        with torch.inference_mode():
            exact, limit = truth_and_limit(problem)
            run = kernel_decode(problem) if seq_len == 1 else kernel_prefill(problem)
            errors.append(relative_error(checked_output(problem, run()), exact))
        if not errors[-1] <= limit:
            raise SystemExit(f"{name}, {seq_len} queries: relative error {errors[-1]:.3g}, allowed is {limit:.3g}")
    return errors


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--dry", action="store_true")
    arguments = parser.parse_args()
    found = check(arguments.name, arguments.dry)
    print(f"{arguments.name}: relative errors {', '.join(f'{error:.2g}' for error in found)}")
