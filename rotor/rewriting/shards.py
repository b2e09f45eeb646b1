"""Contents of each shard of a compressed checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ..bases.layer import LayerBases
from ..format.layout import AttentionShape, LayerLayout, LayerRanks
from ..models.checkpoint import Checkpoint
from ..models.projections import read_attention
from ..runtime.families import Family
from .rewrite import layer_layout, rewrite_layer


class ShardContents:
    """The tensors of a compressed checkpoint, shard by shard, without building the model.

    The new tensors of a layer's attention go where its value projection (or fused projection) was.

    Args:
        bases, ranks: of each layer; ranks in the order of the bases.
        read: reads a tensor of the source by its name. `Checkpoint.meta_tensor`, with bases on the meta device too
            (see `on_meta`), gives shapes and dtypes alone.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        family: Family,
        shape: AttentionShape,
        bases: Sequence[LayerBases],
        planned: list[tuple[LayerLayout, tuple[int, ...]]],
        read: Callable[[str], Tensor],
    ) -> None:
        self.checkpoint, self.family, self.shape = checkpoint, family, shape
        self.bases, self.planned, self.read = bases, planned, read
        self._replaced: set[str] = set()
        self._layers_in: dict[str, list[int]] = {}
        for layer in range(shape.num_layers):
            prefix = family.stored_prefix(layer, checkpoint.names)
            present = [prefix + name for name in family.consumed if prefix + name in checkpoint.names]
            self._replaced.update(present)
            home = next((n for n in present if n.endswith(family.value_weight)), None)
            if home is not None:
                self._layers_in.setdefault(checkpoint.file_of[home], []).append(layer)

    def tensors(self, file: str) -> dict[str, Tensor]:
        """List what a shard of the source becomes, by name; those that stay as they are come from its memory map."""
        names, checkpoint = self.checkpoint.names, self.checkpoint
        tensors = {name: self.read(name) for name in checkpoint.names_in(file) if name not in self._replaced}
        for layer in self._layers_in.get(file, []):
            weights = read_attention(self.family, layer, names, self.read, self.shape)
            layout, order = self.planned[layer]
            for name, tensor in rewrite_layer(weights, self.bases[layer], layout, order, self.shape).items():
                tensors[self.family.stored_prefix(layer, names) + name] = tensor
        return tensors


def planned_layouts(
    bases: Sequence[LayerBases], ranks: Sequence[LayerRanks]
) -> list[tuple[LayerLayout, tuple[int, ...]]]:
    """Lay out every layer; see `layer_layout`."""
    return [layer_layout(layer, layer_ranks) for layer, layer_ranks in zip(bases, ranks, strict=True)]
