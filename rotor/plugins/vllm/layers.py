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
from ...runtime.families import FAMILIES, Family, attention_shape
from ...runtime.kernel_choice import kernels_of
from .attention import RotorSelfAttention
from .pages import PagedLayer
from .requests import Request
from .shards import Shard, padded_rows, row_bytes, shard_of


@dataclass(frozen=True)
class Plan:
    """What the layers of a checkpoint are to become.

    layouts, kernels: of whole layers. row_bytes: of a token in the cache. mixed: the model mixes sliding windows and
    full attention.
    """

    request: Request
    family: Family
    shape: AttentionShape
    biases: list[str]
    layouts: list[LayerLayout]
    kernels: tuple[LayerKernels, ...]
    row_bytes: list[int]
    mixed: bool

    @classmethod
    def of(cls, request: Request, section: CompressedSection) -> Plan:
        config, size = request.hf_config, request.tensor_parallel_size
        shape = attention_shape(config)
        layouts = section.layouts(shape)
        kinds = getattr(config, "layer_types", None)
        rows = padded_rows([row_bytes(layout, size, request.dtype.itemsize) for layout in layouts], kinds)
        kernels = kernels_of(section, request.file(KERNEL_CONFIG), shape).layers
        family, mixed = FAMILIES[config.model_type], len(set(kinds or ())) > 1
        return cls(request, family, shape, section.biases, layouts, kernels, rows, mixed)

    def shard(self, index: int, rank: int) -> Shard:
        return shard_of(self.layouts[index], self.shape, self.biases, rank, self.request.tensor_parallel_size)

    def paged_layer(
        self,
        module: RotorSelfAttention,
        scaling: float,
        softcap: float | None,
        window: int | None,
        device: torch.device,
    ) -> PagedLayer:
        """What attends for a module: over its parameters, by the kernels where they serve the layer."""
        shard, dtype = module.shard, self.request.dtype
        layout, shape = shard.layout, shard.shape
        # What the file says is of the whole layer.
        kernels = self.kernels[module.index] if self.request.tensor_parallel_size == 1 else default_layer(layout)
        return PagedLayer(
            shard,
            dtype,
            AttentionParameters(layout, shape, scaling, module.query_basis, module.key_constant, softcap),
            module.key_basis,
            module.key_shift,
            (module.cos, module.sin) if layout.in_blocks else None,
            window,
            kernels if layer_served(layout, shape, dtype, device) else None,
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
