"""Counters by which the last program of several goes on, in Triton's interpreter."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import triton
import triton.language as tl

from rotor.kernels import arrivals
from rotor.kernels.arrivals import counters, last_of

CPU = torch.device("cpu")


@triton.jit
def sum_kernel(parts, sums, arrived, programs):
    """Grid: programs, sums. The last program of a sum adds what all have stored."""
    of_sum = parts + tl.program_id(1) * programs
    tl.store(of_sum + tl.program_id(0), tl.program_id(0) + 1)
    if last_of(arrived + tl.program_id(1), programs):
        total = 0
        for program in range(programs):
            total += tl.load(of_sum + program)
        tl.store(sums + tl.program_id(1), total)


def test_the_last_program_sees_all_and_leaves_zeros() -> None:
    for programs in (1, 5, 3):
        arrived = counters(4, CPU)
        parts, sums = torch.zeros(4, programs, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
        sum_kernel[programs, 4](parts, sums, arrived, programs)
        assert sums.tolist() == [programs * (programs + 1) // 2] * 4
        assert not arrived.any()


def test_launches_that_may_run_at_once_have_counters_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread keeps its own; a graph takes others each time, until all are taken."""
    own = counters(4, CPU)
    assert counters(3, CPU).data_ptr() == own.data_ptr()
    with ThreadPoolExecutor(1) as other:
        assert other.submit(counters, 4, CPU).result().data_ptr() != own.data_ptr()
    monkeypatch.setattr(arrivals, "OF_GRAPHS", 10)
    monkeypatch.setattr(arrivals, "_of_graphs", {})
    arrivals.prepare_counters(CPU)
    monkeypatch.setattr(arrivals, "capturing", lambda device: True)
    first, second, third = (counters(4, CPU) for _ in range(3))
    assert (second.data_ptr() - first.data_ptr(), len(second)) == (4 * 4, 4)
    assert third.data_ptr() == first.data_ptr()
