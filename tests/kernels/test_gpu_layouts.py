"""Attention of layers of models in the named layouts on a GPU, at sizes that `python artifacts/gpu` measures."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from gpu.subjects import PAGE, named_subjects

from rotor.kernels.dispatch import default_layer
from rotor.tools.bench.attention import (
    TOLERANCE,
    Problem,
    kernel,
    random_problem,
    relative_error,
)

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
NAMED = named_subjects()
LOADS = [(8, 1, 32768), (1, 1, 131072), (1, 8192, 8192)]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def problem_of(name: str, *load: int) -> Problem:
    generator = torch.Generator(DEVICE).manual_seed(0)
    return random_problem(NAMED[name].layout, NAMED[name].shape, *load, DTYPE, generator)


def in_pages(problem: Problem, page: int) -> Callable[[], Tensor]:
    """The kernels over permuted pages, as a serving engine calls them."""
    from rotor.kernels.attention import attend_pages

    batch_size, count, seq_len = problem.key.shape[0], problem.kv_len // page, problem.seq_len
    order = torch.randperm(batch_size * count, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    pages = []
    for rows in (problem.key, problem.value):
        pages.append(torch.empty(batch_size * count, page, rows.shape[-1], dtype=rows.dtype, device=DEVICE))
        pages[-1][order] = rows.reshape(batch_size * count, page, -1)
    query = problem.query.transpose(1, 2).flatten(0, 1)
    options = {
        "block_table": order.view(batch_size, count).int(), "max_query_len": seq_len, "max_kv_len": problem.kv_len,
        "query_start_loc": torch.arange(0, batch_size * seq_len + 1, seq_len, dtype=torch.int32, device=DEVICE),
        "kv_lens": torch.full((batch_size,), problem.kv_len, dtype=torch.int32, device=DEVICE),
        "rotation": problem.rotation, "total_kv_len": batch_size * problem.kv_len,
    }  # fmt: skip
    launches = default_layer(problem.parameters.layout)
    return lambda: attend_pages(query, *pages, problem.parameters, launches, **options).view(batch_size, seq_len, -1)


@pytest.mark.parametrize("load", LOADS, ids=str)
@pytest.mark.parametrize("name", NAMED)
def test_the_kernels_are_right(name, load) -> None:
    """Contiguous and in pages, beside float64."""
    problem = problem_of(name, *load)
    for call in (kernel(problem), in_pages(problem, PAGE)):
        with torch.inference_mode():
            assert relative_error(call(), problem.unrounded()) <= TOLERANCE[DTYPE]
