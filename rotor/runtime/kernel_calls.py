"""The Triton kernels as a layer calls them in place of plain PyTorch: as they are, or as operators where it is traced.

Imports Triton where a kernel is first called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernels.defaults import default_layer
from ..kernels.dispatch import kernels_serve
from .rope import Rotations

if TYPE_CHECKING:
    from .attention import RotorAttention


def serve(module: RotorAttention, hidden_states: Tensor, mask: Tensor | None, dropout: float) -> bool:
    """Whether the kernels serve a layer in this pass."""
    fits = module.rotation_fits_kernels
    return module.spread is None and kernels_serve(hidden_states, module.layout, module.shape, mask, dropout, fits)


def append(
    module: RotorAttention, query: Tensor, key: Tensor, value: Tensor, rotations: Rotations
) -> tuple[Tensor, Tensor, Tensor]:
    """As `attention.plain_rows`."""
    rotation, asked = rotations.table, None if module.query_basis is None else query
    bases = {"key_basis": module.key_basis, "key_shift": module.key_shift}
    options = {"query": asked, "rotation": rotation, "index": rotations.places, **bases}
    if torch.compiler.is_compiling():
        from ..kernels import operators

        made = operators.append(key, value, _described(module), **options)
    else:
        from ..kernels import append as launched

        made = launched.append(key, value, module.layout, module.shape, **options)
    return query if made.query is None else made.query, made.key, made.value


def attend(
    module: RotorAttention, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, rotations: Rotations
) -> Tensor:
    """As `RotorAttention.attend`."""
    parameters = module.parameters_of_attention()
    rotation = rotations.table if module.layout.in_blocks else None
    options = {"rotation": rotation, "first": rotations.first, "attention_mask": mask}
    if torch.compiler.is_compiling():
        from ..kernels import operators

        return operators.attend(query, key, value, parameters, _described(module), **options)
    from ..kernels import attention as launched

    kernels = module.kernels or default_layer(module.layout)
    return launched.attend(query, key, value, parameters, kernels, **options, layer_idx=module.layer_idx)


def _described(module: RotorAttention) -> str:
    from ..kernels.operators import describe

    return describe(module.layout, module.shape, module.kernels or default_layer(module.layout))
