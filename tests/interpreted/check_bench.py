"""The benchmark's calls of the kernels, in Triton's interpreter: they compute what the rows they stand beside do."""

from __future__ import annotations

import pytest
import torch
from ragged import layer

from rotor.bench.problem import checked_output, compressed_layout, random_problem, truth, uncompressed_layout
from rotor.bench.rows import SCHEDULES, kernel_decode, kernel_prefill
from rotor.format.layout import AttentionShape

SHAPE = AttentionShape(num_layers=1, num_heads=6, num_kv_heads=2, head_dim=16, hidden_size=96)
LAYOUTS = {
    "post": compressed_layout(layer("post", 1, (24, 16), (8, 8))),
    "pre": compressed_layout(layer("pre", 2, (24, 16))),
    "uncompressed": uncompressed_layout(SHAPE),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_kernels_of_the_benchmark(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    problem = random_problem(LAYOUTS[name], SHAPE, 2, 1, 70, torch.float32, generator)
    for schedule in SCHEDULES:
        torch.testing.assert_close(
            checked_output(problem, kernel_decode(problem, schedule)()), truth(problem), atol=1e-5, rtol=1e-5
        )
    problem = random_problem(LAYOUTS[name], SHAPE, 1, 40, 40, torch.float32, generator)
    torch.testing.assert_close(checked_output(problem, kernel_prefill(problem)()), truth(problem), atol=1e-5, rtol=1e-5)
