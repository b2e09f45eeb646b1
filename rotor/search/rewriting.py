"""The tensors of a compressed checkpoint, from a source model and a run's bases."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..checkpoint.bases import FoldedBases, LayerBases
from ..checkpoint.families import find_family
from ..checkpoint.folding import fold_bases
from ..checkpoint.layout import AttentionShape, LayerLayout
from ..checkpoint.projections import GetTensor, read_attention
from ..checkpoint.rewritten import RewrittenTensors
from ..models.source import Checkpoint


def rewritten_tensors(
    checkpoint: Checkpoint,
    shape: AttentionShape,
    bases: Callable[[int], LayerBases],
    layouts: Sequence[LayerLayout],
    read: GetTensor,
) -> RewrittenTensors:
    """The tensors that a source becomes by a run's bases, of which one layer's are in memory at a time.

    Args:
        bases: gives those of a layer. layouts: from `model_layouts`.
        read: `checkpoint.tensor`, or for shapes and dtypes alone `checkpoint.meta_tensor`.
    """
    family = find_family(checkpoint.config)
    first = read_attention(family, 0, checkpoint.names, checkpoint.meta_tensor, shape)

    def folded(layer: int) -> FoldedBases:
        return fold_bases(bases(layer), layouts[layer], shape.layer(layer))

    return RewrittenTensors(family, shape, layouts, first.bias_names, checkpoint.file_of, read, folded)
