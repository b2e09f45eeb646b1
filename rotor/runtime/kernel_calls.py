"""The Triton kernels as a layer calls them in place of plain PyTorch: as they are, or as operators where it is traced.

Imports Triton where a kernel is first called.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..format.kernel_config import LayerKernels
from ..kernels.parameters import AttentionParameters
from .rope import Rotations


def append(
    parameters: AttentionParameters,
    kernels: LayerKernels,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotations: Rotations,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `attention.plain_rows`."""
    p = parameters
    asked = None if p.query_basis is None else query
    bases = {"key_basis": p.key_basis, "key_shift": p.key_shift}
    options = {"query": asked, "rotation": rotations.table, "index": rotations.places, **bases}
    if torch.compiler.is_compiling():
        from ..kernels import operators

        made = operators.append(key, value, operators.describe(p.layout, p.shape, kernels), **options)
    else:
        from ..kernels import append as launched

        made = launched.append(key, value, p.layout, p.shape, **options)
    return query if made.query is None else made.query, made.key, made.value


def attend(
    parameters: AttentionParameters,
    kernels: LayerKernels,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    rotations: Rotations,
    layer_idx: int,
) -> Tensor:
    """As `steps.attend_to_rows`."""
    p = parameters
    rotation = rotations.table if p.layout.in_blocks else None
    options = {"rotation": rotation, "first": rotations.first, "attention_mask": mask}
    if torch.compiler.is_compiling():
        from ..kernels import operators

        return operators.attend(query, key, value, p, operators.describe(p.layout, p.shape, kernels), **options)
    from ..kernels import attention as launched

    return launched.attend(query, key, value, p, kernels, **options, layer_idx=layer_idx)
