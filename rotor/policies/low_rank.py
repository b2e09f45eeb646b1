"""Low-rank approximation by power iteration."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def low_rank(matrix: Tensor, rank: int, loops: int) -> tuple[Tensor, Tensor]:
    """A and B, matrix ~ A B^T, by power iteration from a fixed start with orthonormal factors in the last loop.

    Args:
        matrix: [..., n, width], float32. rank: at most n and width are used; 0 gives empty factors.
    Returns:
        [..., n, rank] orthonormal, [..., width, rank].
    Limits: columns are made orthogonal in the last loop only, so that with many loops they become too alike for it.
    Source: GEAR algorithm 2 (PowerSGD's iteration).
    """
    rank = min(rank, *matrix.shape[-2:])
    right = torch.randn(matrix.shape[-1], rank, generator=torch.Generator().manual_seed(0)).to(matrix)
    for _ in range(loops - 1):
        right = functional.normalize(
            matrix.mT @ (matrix @ right), dim=-2
        )  # against overflow; what it spans is the same
    left = torch.linalg.qr(matrix @ torch.linalg.qr(right).Q).Q
    return left, matrix.mT @ left
