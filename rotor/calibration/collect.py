"""Second moments of one layer at a time, from hidden states that pass through it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..bases.moments import LayerStatistics
from ..models.layerwise import LayerwiseModel
from ..progress import Advance
from ..recipe import Prune
from .capture import capture
from .pruning import ClusteredStatistics


def layer_statistics(
    network: LayerwiseModel,
    layer: int,
    states: Tensor,
    out: Tensor,
    group_size: int,
    wanted: frozenset[str],
    prune: Prune | None = None,
    advance: Advance = lambda done: None,
) -> LayerStatistics:
    """Put hidden states through a layer and sum the second moments of what its attention sees, on the CPU.

    Where `prune` asks for K-means, the moments are those of the centroids.

    Args:
        states, out: [rows, seq_len, hidden_size], what enters the layer and room for what leaves it.
        wanted: names of the moments (see LayerStatistics).
    """
    statistics: LayerStatistics
    if prune is None or prune.kmeans is None:
        statistics = LayerStatistics(network.shape, group_size)
    else:
        statistics = ClusteredStatistics(network.shape, group_size, prune=prune, layer=layer)

    def observe(seen_in: int, activations: dict[str, Tensor]) -> None:
        assert seen_in == layer
        statistics.add(activations)

    with torch.inference_mode(), network.layer(layer):
        with capture(network.model, network.family, network.shape, group_size, wanted, observe):
            network.run(layer, states, out, advance)
        if isinstance(statistics, ClusteredStatistics):
            statistics = statistics.finish()
    return statistics
