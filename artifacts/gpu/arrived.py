"""Rows that the last of several programs codes (`rotor.kernels.arrivals`), which reads what the others stored.

It is the first thing that a run looks at: a program that goes on too early spoils a row now and then, and no other test
would say why. compute-sanitizer runs this module as a program.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rotor.checkpoint.rows import RowScale
from rotor.errors import NumericsError
from rotor.kernels.append import append
from rotor.tools.bench.attention import Call, step_tensors
from rotor.tools.bench.precompile import Subject

from .loads import APPENDED_TOGETHER
from .plan import Record
from .sanitizer import errors, under
from .subjects import gpu_subjects
from .times import rotation_table

LAUNCHES, TOKENS = 400, 512
"""Launches one right behind another, and tokens of each: more programs than a GPU holds at a time."""

INPUTS = 3
"""Inputs that launches take in turn, so that what one left in memory is wrong for the next."""


def hurried(names: list[str], launches: int = LAUNCHES, tokens: int = TOKENS, device: str = "cuda") -> Iterator[Record]:
    """Compare launches of each layout's append with the same ones alone."""
    for name in names:
        yield from compared(name, appends(gpu_subjects()[name], tokens, torch.device(device)), launches)


def compared(name: str, calls: list[Call], launches: int) -> Iterator[Record]:
    """Count launches, of all calls in turn, whose rows are not those of the same call alone.

    Raises:
        NumericsError: there are some.
    """
    alone = []
    for call in calls:
        alone.append(call())
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    found = [calls[i % len(calls)]() for i in range(launches)]
    different = sum(not torch.equal(rows, alone[i % len(calls)]) for i, rows in enumerate(found))
    yield {"layout": name, "row": "coded by the last program", "launches": launches, "different": different}
    if different:
        raise NumericsError(
            f"{name}: {different} of {launches} launches wrote other rows than one alone.",
            "The last program of a group reads too early, see rotor.kernels.arrivals.",
        )


def appends(subject: Subject, tokens: int, device: torch.device) -> list[Call]:
    """Appends of so many tokens, each call with other ones, to rows of their own."""
    layout, shape, dtype = subject.layout, subject.shape, subject.dtype
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device).to(dtype)

    stored, rotation = step_tensors(layout, shape, dtype, normal), rotation_table(tokens, subject, device)
    bases = {name: stored.get(name) for name in ("key_basis", "key_shift", "value_basis", "value_shift")}
    shift, length = torch.randn(2, layout.key_rank, generator=generator, device=device)
    scale = RowScale(shift, length.abs() / 300)
    heads = 1, tokens, shape.num_kv_heads, shape.head_dim

    def call() -> Call:
        key, value = normal(*heads), normal(1, tokens, layout.value_rank) if layout.folds_values else normal(*heads)
        return lambda: append(key, value, layout, shape, rotation=rotation, scale=scale, **bases).key

    return [call() for _ in range(INPUTS)]


def sanitized(tool: str) -> Iterator[Record]:
    """What a tool of compute-sanitizer finds in a few such launches: memcheck, or synccheck for barriers."""
    yield {"sanitizer": errors(under(tool, __name__)), "tool": tool, "layouts": [APPENDED_TOGETHER[0]]}


if __name__ == "__main__":
    for record in hurried([APPENDED_TOGETHER[0]], 2 * INPUTS, 64):
        print(record)
