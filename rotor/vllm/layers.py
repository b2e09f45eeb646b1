"""The layers of a compressed checkpoint and their parameters, as vLLM's options ask for them.

Imports nothing of vLLM; it changes vLLM's KVTransferConfig.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..checkpoint.families import Family, attention_shape, family_of
from ..checkpoint.files import KERNEL_CONFIG, file_sha256
from ..checkpoint.kernel_config import KernelConfig
from ..checkpoint.layout import AttentionShape, LayerLayout
from ..checkpoint.manifest import MANIFEST
from ..checkpoint.rewritten import BASES, open_rewritten
from ..checkpoint.section import CompressedSection
from ..errors import CheckpointError, UsageError
from ..kernels.dispatch import config_of, default_layer, layer_served
from ..kernels.parameters import AttentionParameters, row_scale
from .attention import RotorSelfAttention
from .pages import PagedLayer
from .shards import Shard, check_size, padded_rows, row_bytes, shard_of
from .stores import keep_apart, prefix_mark

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Plan:
    """A checkpoint and how vLLM is to run it, from which layers are made.

    config: config.json, with `section` in it. model: a folder, or a name on the hub with a `revision`. ranks: of tensor
    parallelism.
    """

    config: PreTrainedConfig
    section: CompressedSection
    model: str
    revision: str | None
    dtype: torch.dtype
    max_model_len: int
    ranks: int

    @cached_property
    def shape(self) -> AttentionShape:
        return attention_shape(self.config)

    @cached_property
    def family(self) -> Family:
        return family_of(self.config)

    @cached_property
    def layouts(self) -> list[LayerLayout]:
        """Layouts of whole layers."""
        return self.section.layouts(self.shape)

    @cached_property
    def kernels(self) -> KernelConfig:
        """Kernel configuration of whole layers."""
        return config_of(self.file(KERNEL_CONFIG), self.layouts)

    @property
    def kinds(self) -> list[str] | None:
        """Kinds of the layers (sliding windows and full attention), or None."""
        return getattr(self.config, "layer_types", None)

    @property
    def keeps_exact(self) -> bool:
        """Tell whether layers keep their newest tokens exactly beside their rows."""
        return any(layout.exact is not None for layout in self.layouts)

    @cached_property
    def row_bytes(self) -> list[int]:
        """Bytes of a token in the cache of each layer."""
        return padded_rows([row_bytes(layout, self.ranks, self.dtype.itemsize) for layout in self.layouts], self.kinds)

    def file(self, name: str) -> Path | None:
        """A file of the checkpoint's folder; None if it is missing or the hub cannot be asked."""
        from transformers.utils import cached_file

        try:
            cached = cached_file(self.model, name, revision=self.revision)
        except OSError:
            return None
        return None if cached is None else Path(cached)

    def check(self, cache_dtype: str, lora: bool, context_parallel: int) -> None:
        """Check that the checkpoint can do what vLLM is asked for; raises UsageError if not."""
        check_size(self.layouts, self.shape, self.ranks)
        if self.shape.wide_norms and self.ranks > 1:
            raise UsageError(
                f"tensor parallel size {self.ranks}: norms of this model are of all heads together, which ranks "
                "divide.",
                "Choose 1.",
            )
        policy = getattr(self.section, "cache", None)
        if policy is not None:
            raise UsageError(
                f"{self.model}: exported with a cache policy ({policy.get('method', policy)}), which vLLM's cache "
                "cannot keep.",
                "Export it without --cache, or serve with transformers.",
            )
        if cache_dtype != "auto":
            raise UsageError(
                f"--kv-cache-dtype {cache_dtype}: what a compressed checkpoint caches has its own bits per channel.",
                "Leave it out, or export with fewer bits.",
            )
        if lora:
            raise UsageError(
                "LoRA: adapters are trained on projections that compression has rewritten.",
                "Merge the adapter into the source model and compress that.",
            )
        if context_parallel > 1:
            raise UsageError(
                "--decode-context-parallel-size: not supported for compressed checkpoints.", "Use tensor parallelism."
            )

    def tensors(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """The checkpoint's tensors, rewritten from the source's if it has no weights; see checkpoint.rewritten.

        Args:
            weights: what its safetensors files hold.
        """
        if self.section.source is None:
            return weights
        path = self.file(BASES)
        if path is None:
            raise CheckpointError(f"{self.model}: {BASES} is missing.", "Get the checkpoint again.")
        return open_rewritten(path, self.config, self.section).items()

    def separate_stores(self, transfer: Any) -> None:
        """Keep prefixes in external stores apart by checkpoint and dtype; see stores.keep_apart.

        Args:
            transfer: vLLM's KVTransferConfig, or None.
        Raises:
            UsageError: the checkpoint has no manifest; also as `keep_apart` does.
        """
        if transfer is None or transfer.kv_connector is None:
            return
        path = self.file(MANIFEST)
        if path is None:
            raise UsageError(
                f"--kv-transfer-config: {self.model} has no {MANIFEST}, by whose digest prefixes are kept apart.",
                "Serve the folder as `rotor export` wrote it.",
            )
        keep_apart(transfer, prefix_mark(file_sha256(path), str(self.dtype).removeprefix("torch.")))

    def shard(self, index: int, rank: int) -> Shard:
        return shard_of(self.layouts[index], self.shape.layer(index), self.section.biases, rank, self.ranks)

    def rotary_type(self, index: int) -> str | None:
        """See Family.rotary_type."""
        return self.family.rotary_type(self.config, index)

    def query_scale(self, index: int) -> Callable[[Tensor], Tensor | None] | None:
        """The factor of a layer's queries by their positions, see Family.query_scale."""
        scale = self.family.query_scale
        return None if scale is None else partial(scale, self.config.get_text_config(), self.family.placed[index])

    def paged_layer(
        self, module: RotorSelfAttention, scaling: float, softcap: float | None, device: torch.device
    ) -> PagedLayer:
        """Make the layer that attends for a module, over its parameters, by the kernels where they serve it."""
        layout, shape = module.shard.layout, module.shard.shape
        served = module.sinks is None and layer_served(layout, shape, self.dtype, device)
        # The file describes whole layers.
        kernels = self.kernels.layers[module.index] if self.ranks == 1 else default_layer(layout)
        return PagedLayer(
            module.shard,
            self.dtype,
            AttentionParameters(
                layout,
                shape,
                scaling,
                module.query_basis,
                module.key_constant,
                softcap,
                module.key_basis,
                module.key_shift,
                module.value_basis,
                module.value_shift,
                module.output_basis,
                module.value_constant,
                row_scale(module),
                module.sinks,
            ),
            (module.cos, module.sin) if layout.in_blocks else None,
            self.shape.windows[module.index] if self.shape.windows else None,
            kernels if served else None,
        )


class Loading:
    """Tensors of attention on their way from the checkpoint to the modules of this process."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.family = plan, plan.family
        full = {self.family.attention_prefix(index): index for index in range(plan.shape.num_layers)}
        self.prefixes = {name.partition(".")[2]: index for name, index in full.items()} | full  # the original GPT-2's
        self.modules: dict[int, RotorSelfAttention] = {}
        self.held: dict[int, dict[str, Tensor]] = {}

    def others(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Hold the tensors of attention, pass on the rest."""
        for name, tensor in weights:
            prefix = next((p for p in self.prefixes if name.startswith(p)), None)
            if prefix is None:
                yield name, tensor
            elif self.prefixes[prefix] in self.modules:  # otherwise another pipeline stage has the layer
                self.held.setdefault(self.prefixes[prefix], {})[name[len(prefix) :]] = tensor

    def finish(self) -> None:
        """Fill the modules.

        Raises:
            CheckpointError: a layer's tensors are not all there.
        """
        for index, module in self.modules.items():
            module.load(self.held.pop(index, {}))
