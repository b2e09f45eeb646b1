"""A model whose attention can be compressed by any rank plan and put back, without writing anything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..checkpoint.bases import LayerBases
from ..checkpoint.families import find_family
from ..checkpoint.folding import fold_layer, layer_layout
from ..checkpoint.layout import ExactTokens, LayerRanks
from ..checkpoint.projections import AttentionWeights, read_attention
from ..checkpoint.tensors import FLOAT32
from ..errors import RecipeError
from ..numerics import check_parameters
from ..runtime.replacement import replace_attention
from .hardware import DevicePlan
from .layerwise import LayerwiseModel
from .memory import EVALUATION_TOKENS
from .source import Checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class CompressibleModel(LayerwiseModel):
    """The source model with its attention swapped for compressed modules and back.

    Weights are rewritten in the checkpoint's dtype, as on export, and computed with in that of `devices`. With all
    weights in memory the whole model is compressed at once; otherwise each layer when it is its turn, and each time
    again.

    Args:
        rewrite_dtype: rewrite in this dtype instead of the checkpoint's.
        workspace: see LayerwiseModel.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        devices: DevicePlan,
        rewrite_dtype: torch.dtype | None = None,
        *,
        workspace: Path | None = None,
    ) -> None:
        find_family(checkpoint.config)  # raises on what is not supported
        source = devices.weights(checkpoint)
        super().__init__(source, EVALUATION_TOKENS[devices.device.type], workspace)
        self.checkpoint = checkpoint
        self._rewrite_dtype = rewrite_dtype
        self._attention_implementation = self.config._attn_implementation
        self._originals: list[nn.Module] = [
            self.family.attention_module(self.model, i) for i in range(self.shape.num_layers)
        ]
        self._compressed: tuple[Sequence[LayerBases], list[LayerRanks], ExactTokens | None] | None = None

    def attention_weights(self, layer: int) -> AttentionWeights:
        """The projections of a layer, in the dtype in which they are rewritten."""
        read = self.checkpoint.unchecked_tensor
        dtype = self._rewrite_dtype
        return read_attention(self.family, layer, self.checkpoint.names, lambda n: read(n).to(dtype), self.shape)

    def restore(self) -> PreTrainedModel:
        """Put all original modules back, and return the uncompressed model."""
        self._compressed = None
        for index, module in enumerate(self._originals):
            self.family.replace_attention(self.model, index, module)
        self.config._attn_implementation = self._attention_implementation
        return self.model

    @contextmanager
    def uncompressed(self) -> Iterator[PreTrainedModel]:
        """Give the uncompressed model within a `with`; the modules in use before are put back after it."""
        with self._put_back(range(self.shape.num_layers)):
            yield self.restore()

    @contextmanager
    def _put_back(self, layers: Iterable[int]) -> Iterator[None]:
        """Put the attention of these layers back after a `with`."""
        modules = {index: self.family.attention_module(self.model, index) for index in layers}
        implementation = self.config._attn_implementation
        compressed = self._compressed
        try:
            yield
        finally:
            for index, module in modules.items():
                self.family.replace_attention(self.model, index, module)
            self.config._attn_implementation = implementation
            self._compressed = compressed

    def compress(
        self, bases: Sequence[LayerBases], ranks: list[LayerRanks], exact: ExactTokens | None = None
    ) -> PreTrainedModel:
        """Compress the model by `bases` at `ranks` (of each layer, in the order of the bases), and return it.

        Args:
            exact: tokens that are kept exactly beside the rows.
        """
        self.restore()
        if self.source.streamed:
            self._compressed = bases, ranks, exact
        else:
            for index, layer_ranks in enumerate(ranks):
                self._put_compressed(index, bases[index], layer_ranks, exact)
        return self.model

    @contextmanager
    def layer(self, index: int) -> Iterator[nn.Module]:
        with super().layer(index) as layer, ExitStack() as compressed:
            if self._compressed is not None:
                bases, ranks, exact = self._compressed
                for place in self.layers_at(index):
                    compressed.enter_context(self.compressed_layer(place, bases[place], ranks[place], exact))
            yield layer

    @contextmanager
    def compressed_layer(
        self, index: int, bases: LayerBases, ranks: LayerRanks, exact: ExactTokens | None = None
    ) -> Iterator[None]:
        """Compress one layer, whose weights must be loaded, for the length of a `with`, whatever the others are."""
        with self._put_back([index]):
            self.family.replace_attention(self.model, index, self._originals[index])
            self._put_compressed(index, bases, ranks, exact)
            yield

    def _put_compressed(
        self, index: int, bases: LayerBases, ranks: LayerRanks, exact: ExactTokens | None = None
    ) -> None:
        weights = self.attention_weights(index)
        device = next(self._originals[index].parameters()).device
        if exact is None and self.shape.needs_exact:
            raise RecipeError(
                f"a layer is measured without exact tokens, which this model needs: {self.shape.needs_exact}.",
                "Take the recipe rotor, or another whose ranks.method measures no layer alone.",
            )
        layout = layer_layout(bases, ranks, exact)
        rewritten = fold_layer(weights, bases, layout, self.shape.layer(index))
        with torch.device("meta"):
            layouts = {index: layout}
            (module,) = replace_attention(self.model, self.family, self.shape, layouts, weights.bias_names)
        on_device = {
            name: tensor.to(device, tensor.dtype if name in FLOAT32 else self.dtype)
            for name, tensor in rewritten.items()
        }
        module.load_state_dict(on_device, strict=False, assign=True)
        check_parameters(module, "the rewritten weights", self.family.attention_prefix(index))
        module.eval()
