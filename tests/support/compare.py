"""Comparison of numbers that rounding may move."""

from __future__ import annotations

import pytest
import torch


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((got - expected).norm() / expected.norm()).detach())


def close(got: object, expected: object) -> bool:
    """Tell whether two values are equal but for rounding: products are summed by where weights lie in memory."""
    if isinstance(got, dict) and isinstance(expected, dict):
        return got.keys() == expected.keys() and all(close(got[key], expected[key]) for key in got)
    if isinstance(got, (list, tuple)) and isinstance(expected, (list, tuple)):
        return len(got) == len(expected) and all(map(close, got, expected))
    if isinstance(got, float) and isinstance(expected, float):
        return got == pytest.approx(expected, rel=1e-4, abs=1e-5)
    return got == expected
