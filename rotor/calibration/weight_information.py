"""Fisher information of the weights of key and value projections, which the rank method `fisher` reads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..format.layout import AttentionShape
from ..models.projections import kv_parameters
from ..progress import Progress
from ..runtime.families import Family


def weight_information(
    model: Any, family: Family, shape: AttentionShape, tokens: Tensor, count: int, progress: Progress
) -> Tensor:
    """Sum of squared gradients of the next-token loss with respect to W_k and W_v of each KV head.

    The gradient is taken row by row of tokens and squared before it is summed.

    Returns:
        [num_layers, 2, num_kv_heads], float64: for keys and for values.
    Source: Palu, arXiv 2407.21118, section 3.2.
    """
    rows = tokens[: max(1, count // tokens.shape[1])]
    totals = torch.zeros(shape.num_layers, 2, shape.num_kv_heads, dtype=torch.float64)
    parameters = [kv_parameters(family, model, layer) for layer in range(shape.num_layers)]
    distinct = {id(parameter): parameter for pair in parameters for parameter, _ in pair}
    with progress.task("gradients", rows.numel(), "tokens") as advance:
        for row in rows.split(1):
            ids = row.to(model.device)
            loss = model(ids, labels=ids, use_cache=False).loss
            gradients = dict(zip(distinct, torch.autograd.grad(loss, list(distinct.values())), strict=True))
            for layer, pair in enumerate(parameters):
                for side, (parameter, part) in enumerate(pair):
                    squared = part(gradients[id(parameter)]).double().square()
                    totals[layer, side] += squared.reshape(shape.num_kv_heads, -1).sum(-1).cpu()
            advance(row.numel())
    return totals
