"""New queries, keys and values by the kernels: launched as they are, or as PyTorch's operators where a model is traced.

Imports Triton where it is first called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .attention import RotorAttention

Rotation = tuple[Tensor, Tensor]


def rotate_and_project(module: RotorAttention, query: Tensor, key: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
    """Domain `post`: as `kernels.projection.rotation.rotate_and_project`, for the layer `module`."""
    bases = module.query_basis, module.key_basis
    if torch.compiler.is_compiling():
        from ..kernels import operators

        return operators.rotate_and_project(query, key, *rotation, *bases, module.described)
    from ..kernels.projection import rotation as launched

    return launched.rotate_and_project(query, key, *rotation, module.layout, module.heads_per_kv, *bases)


def rotate_and_pack(
    module: RotorAttention, query: Tensor, key: Tensor, value: Tensor, rotation: Rotation
) -> tuple[Tensor, Tensor, Tensor]:
    """Domain `post` with codes: as `kernels.projection.coded.rotate_and_pack`, for the layer `module`."""
    bases = module.query_basis, module.key_basis, module.key_shift
    if torch.compiler.is_compiling():
        from ..kernels import operators

        return operators.rotate_and_pack(query, key, value, *rotation, *bases, module.described)
    from ..kernels.projection import coded

    return coded.rotate_and_pack(query, key, value, *rotation, module.layout, module.heads_per_kv, *bases)


def pack_rows(module: RotorAttention, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """As `kernels.projection.append.pack_rows`, for the layer `module`."""
    if torch.compiler.is_compiling():
        from ..kernels import operators

        return operators.pack_rows(key, value, module.described)
    from ..kernels.projection import append

    assert module.row_columns is not None
    return append.pack_rows(key, value, module.row_columns)
