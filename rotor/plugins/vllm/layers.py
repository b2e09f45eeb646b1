"""From what a compressed checkpoint says to the layers of a model, and from its tensors to their parameters.

Plain tensors, nothing of vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...format.file_names import KERNEL_CONFIG
from ...format.kernel_config import LayerKernels
from ...format.layout import AttentionShape, LayerLayout
from ...format.section import CompressedSection
from ...kernels.defaults import default_layer
from ...kernels.dispatch import layer_served
from ...kernels.parameters import AttentionParameters
from ...kernels.rotary import Rotation
from ...runtime.families import FAMILIES, Family, attention_shape
from ...runtime.kernel_choice import kernels_of
from .attention import RotorSelfAttention
from .pages import KeyProjection, LayerPages, PagedLayer
from .requests import Request
from .shards import Shard, padded_rows, row_bytes, shard_of


@dataclass(frozen=True)
class LayerPlan:
    """What a layer is to become.

    layout, kernels: of the whole layer. row_bytes: of a token in the cache. mixed: the model mixes sliding windows and
    full attention.
    """

    index: int
    family: Family
    shape: AttentionShape
    layout: LayerLayout
    biases: frozenset[str]
    row_bytes: int
    mixed: bool
    kernels: LayerKernels
    request: Request

    def shard(self, rank: int, size: int) -> Shard:
        return shard_of(self.layout, self.shape, self.biases, rank, size)


@dataclass(frozen=True)
class Plans:
    """Of all layers of a checkpoint."""

    request: Request
    family: Family
    shape: AttentionShape
    biases: frozenset[str]
    layouts: list[LayerLayout]
    row_bytes: list[int]
    mixed: bool
    kernels: tuple[LayerKernels, ...]

    @classmethod
    def of(cls, request: Request, section: CompressedSection) -> Plans:
        config = request.hf_config
        shape = attention_shape(config)
        layouts = section.layouts(shape)
        kinds = getattr(config, "layer_types", None)
        own = [row_bytes(layout, request.tensor_parallel_size, request.dtype.itemsize) for layout in layouts]
        kernels = kernels_of(section, request.file(KERNEL_CONFIG), shape)
        mixed = len(set(kinds or ())) > 1
        family, biases = FAMILIES[config.model_type], frozenset(section.biases)
        return cls(request, family, shape, biases, layouts, padded_rows(own, kinds), mixed, kernels.layers)

    def layer(self, index: int) -> LayerPlan:
        return LayerPlan(
            index,
            self.family,
            self.shape,
            self.layouts[index],
            self.biases,
            self.row_bytes[index],
            self.mixed,
            self.kernels[index],
            self.request,
        )


def paged_layer(
    module: RotorSelfAttention,
    plan: LayerPlan,
    scaling: float,
    softcap: float | None,
    rotation: Rotation | None,
    window: int | None,
    device: torch.device,
) -> PagedLayer:
    """What attends for a module: over its parameters, by the kernels where they serve the layer."""
    shard, dtype = module.shard, plan.request.dtype
    # What the file says is of the whole layer.
    kernels = plan.kernels if plan.request.tensor_parallel_size == 1 else default_layer(shard.layout)
    parameters = AttentionParameters(
        shard.layout, shard.shape, scaling, module.tensor("query_basis"), module.tensor("key_constant"), softcap
    )
    return PagedLayer(
        LayerPages(shard.layout, dtype),
        parameters,
        KeyProjection(shard.key_layout, shard.key_shape, module.tensor("key_basis"), module.tensor("key_shift")),
        rotation if shard.layout.in_blocks else None,
        window,
        kernels if layer_served(shard.layout, shard.shape, dtype, device) else None,
    )


class Loading:
    """Tensors of attention on their way from the checkpoint to the modules of this process."""

    def __init__(self, family: Family, shape: AttentionShape) -> None:
        self.family, self.shape = family, shape
        self.modules: dict[int, RotorSelfAttention] = {}
        self.held: dict[int, dict[str, Tensor]] = {}

    def others(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Hold what is attention's, pass on the rest."""
        full = {self.family.attention_prefix(index): index for index in range(self.shape.num_layers)}
        bare = {name.partition(".")[2]: index for name, index in full.items()}  # the original GPT-2
        prefixes = bare | full
        for name, tensor in weights:
            prefix = next((p for p in prefixes if name.startswith(p)), None)
            if prefix is None:
                yield name, tensor
            elif prefixes[prefix] in self.modules:  # else another pipeline stage's
                self.held.setdefault(prefixes[prefix], {})[name[len(prefix) :]] = tensor

    def finish(self) -> set[str]:
        """Fill the modules; the names of their parameters in the model.

        Raises:
            CheckpointError: a layer's tensors are not all there.
        """
        missing = sorted(set(self.modules) - set(self.held))
        if missing:
            raise CheckpointError(f"no attention weights of layers {missing}.", "Run `rotor validate`.")
        names = set()
        for index, tensors in self.held.items():
            self.modules[index].load(tensors)
            names |= {f"{self.family.attention_prefix(index)}{name}" for name in tensors}
        self.held.clear()
        return names
