"""Parametrised cases of which the quick tests run a few, and `make test-slow` the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import pytest

Case = TypeVar("Case")


def mostly_nightly(cases: Iterable[Case], quick: Callable[[Case], bool]) -> list[object]:
    """Values of a parameter, or tuples of several ones'; those that are not `quick` have the mark nightly."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if quick(case) else pytest.mark.nightly,
        )
        for case in cases
    ]
