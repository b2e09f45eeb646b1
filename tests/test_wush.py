"""The WUSH-like cache of artifacts/studies: its transform, and that it beats codes of the numbers as they are."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from rotor.policies import LayerSample, PerToken, find_policy

FILE = Path(__file__).parents[1] / "artifacts" / "studies" / "wush.py"


def error(code: object, rows: Tensor, weight: Tensor) -> float:
    """Mean squared error of [1, 2, tokens, 8] as the gradients weigh it."""
    seen = code.decode(code.encode(rows), 2, 8)  # type: ignore[attr-defined]
    return float(((seen - rows).transpose(1, 2).flatten(2) @ weight).square().mean())


def test_transform_is_inverted_and_makes_channels_alike() -> None:
    draw = torch.Generator().manual_seed(0)
    mixed, weight = torch.randn(16, 16, generator=draw), torch.randn(16, 16, generator=draw)
    numbers = (
        torch.randn(2, 200, 16, generator=draw) @ (mixed * torch.logspace(-1, 1, 16)) + 3
    )  # long channels and short
    weight /= torch.logspace(-1, 1, 16)[:, None]
    gradients = torch.randn(2, 200, 16, generator=draw) @ weight.mT
    policy = find_policy(f"{FILE}:WUSH")
    assert policy is not None
    fitted = policy.fitted([LayerSample(numbers, numbers, gradients, gradients)])
    code = fitted.levels[0][0]  # type: ignore[attr-defined]
    torch.testing.assert_close(code.to_code @ code.from_code, torch.eye(16), atol=1e-4, rtol=0)
    deviation = ((numbers.flatten(0, 1) - code.mean) @ code.to_code).std(0)
    assert deviation.max() < 1.01 * deviation.min()
    rows = numbers[:1].unflatten(-1, (2, 8)).transpose(1, 2)
    plain = PerToken(4, 16).streams()[0].codec
    assert error(code, rows, weight) < 0.2 * error(plain, rows, weight)
