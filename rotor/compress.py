"""A model whose attention can be compressed by any rank plan and put back, without writing anything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.utils import is_accelerate_available

from .bases import LayerBases
from .checkpoint import Checkpoint
from .compressed import CompressedCheckpoint
from .errors import CheckpointError, RotorError, UsageError
from .families import FAMILIES, AttentionWeights, find_family, read_attention
from .fit import check_fit
from .integration import replace_attention
from .layerwise import LayerwiseModel
from .layout import LayerRanks
from .numerics import check_parameters
from .rewrite import layer_layout, rewrite_layer
from .weights import ResidentWeights, StreamedWeights, Weights, keep_softcap

EVALUATION_TOKENS = (2048, 16384)
"""Tokens that go through a layer together when accuracy is measured, on a CPU and on a GPU."""


def load_model(
    folder: Any,
    device: torch.device,
    dtype: torch.dtype,
    config_changes: dict[str, Any] | None = None,
    device_map: str | None = None,
) -> Any:
    """Load a causal model for evaluation, from a local folder, without running code from it.

    Args:
        device_map: as in transformers' from_pretrained; it then decides in place of `device`.
    Raises:
        UsageError: a device map without accelerate, or one that leaves weights outside of the GPUs.
        CheckpointError: the folder cannot be loaded.
    """
    check_fit(Checkpoint(folder))
    if device_map is not None:
        if not is_accelerate_available():
            raise UsageError(
                f"--device-map {device_map}: the package accelerate is not installed.",
                "Install it: pip install accelerate",
            )
        config_changes = {**(config_changes or {}), "device_map": device_map}
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            **(config_changes or {}),
        )
    except RotorError:
        raise
    except Exception as error:  # the loaders and models of transformers have errors of their own
        raise CheckpointError(f"{folder}: transformers cannot load it: {' '.join(str(error).split())[:300]}") from error
    model, report = loaded
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report.get(kind):
            raise CheckpointError(
                f"{folder}: {kind.replace('_', ' ')} on loading: {', '.join(map(str, sorted(report[kind])))[:300]}.",
                "Check that config.json belongs to these weights.",
            )
    check_parameters(model, str(folder))
    keep_softcap(model)
    if device_map is None:
        return model.eval().to(device)
    places = {str(place) for place in getattr(model, "hf_device_map", {}).values()}
    if "disk" in places or ("cpu" in places and len(places) > 1):
        raise UsageError(
            f"--device-map {device_map}: the GPUs do not hold the model (it would lie on {', '.join(sorted(places))}).",
            "Leave --device-map out: rotor then reads one layer of weights at a time.",
        )
    return model.eval()


def weights_of(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, streamed: bool, device_map: str | None = None
) -> Weights:
    """Open a checkpoint's weights, all in memory or one layer at a time."""
    if streamed:
        check_fit(checkpoint)
        return StreamedWeights(checkpoint, find_family(checkpoint.config), device, dtype)
    return ResidentWeights(load_model(checkpoint.folder, device, dtype, device_map=device_map))


def compressed_weights(
    checkpoint: CompressedCheckpoint, device: torch.device, dtype: torch.dtype, streamed: bool
) -> Weights:
    """Open the weights of a checkpoint that rotor wrote, as `weights_of` does.

    Raises:
        UsageError: an elastic checkpoint one layer at a time: it is cut to its profile when all of it is loaded.
    """
    if not streamed:
        return weights_of(checkpoint, device, dtype, False)
    if checkpoint.elastic:
        raise UsageError(
            f"{checkpoint.folder}: an elastic checkpoint is loaded as a whole.", "Give --offload never, if it fits."
        )
    family, layouts = FAMILIES[checkpoint.config.model_type], dict(enumerate(checkpoint.layouts))

    def prepare(model: Any) -> None:
        replace_attention(model, family, checkpoint.shape, layouts, frozenset(checkpoint.section.biases))

    return StreamedWeights(checkpoint, family, device, dtype, prepare)


class CompressibleModel(LayerwiseModel):
    """The source model with its attention swapped for compressed modules and back.

    Weights are rewritten in the checkpoint's dtype, as on export, and computed with in `dtype`. With all weights in
    memory the whole model is compressed at once; otherwise each layer when it is its turn, and each time again.

    Args:
        rewrite_dtype: rewrite in this dtype instead of the checkpoint's.
        streamed, device_map: see rotor.memory and load_model.
        workspace: see LayerwiseModel.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        rewrite_dtype: torch.dtype | None = None,
        *,
        streamed: bool = False,
        device_map: str | None = None,
        workspace: Path | None = None,
    ) -> None:
        find_family(checkpoint.config)  # raises on what is not supported
        source = weights_of(checkpoint, device, dtype, streamed, device_map)
        super().__init__(source, EVALUATION_TOKENS[device.type == "cuda"], workspace)
        self.checkpoint, self._rewrite_dtype = checkpoint, rewrite_dtype
        self._attention_implementation = self.config._attn_implementation
        self._originals: list[nn.Module] = [
            self.family.attention_module(self.model, i) for i in range(self.shape.num_layers)
        ]
        self._compressed: tuple[Sequence[LayerBases], list[LayerRanks]] | None = None

    def attention_weights(self, layer: int) -> AttentionWeights:
        """The projections of a layer, as they are rewritten."""
        read, dtype = self.checkpoint.unchecked_tensor, self._rewrite_dtype
        return read_attention(self.family, layer, self.checkpoint.names, lambda n: read(n).to(dtype), self.shape)

    def restore(self) -> Any:
        """The uncompressed model."""
        self._compressed = None
        for index, module in enumerate(self._originals):
            self.family.replace_attention(self.model, index, module)
        self.config._attn_implementation = self._attention_implementation
        return self.model

    @contextmanager
    def uncompressed(self) -> Iterator[Any]:
        """The uncompressed model for the length of a `with`; the modules in use before are put back after it."""
        modules = [self.family.attention_module(self.model, i) for i in range(self.shape.num_layers)]
        implementation, compressed = self.config._attn_implementation, self._compressed
        try:
            yield self.restore()
        finally:
            for index, module in enumerate(modules):
                self.family.replace_attention(self.model, index, module)
            self.config._attn_implementation, self._compressed = implementation, compressed

    def compress(self, bases: Sequence[LayerBases], ranks: list[LayerRanks]) -> Any:
        """The model compressed by `bases` at `ranks` (of each layer, in the order of the bases)."""
        self.restore()
        if self.source.streamed:
            self._compressed = bases, ranks
        else:
            for index, layer_ranks in enumerate(ranks):
                self._put_compressed(index, bases[index], layer_ranks)
        return self.model

    @contextmanager
    def layer(self, index: int) -> Iterator[nn.Module]:
        with super().layer(index) as layer:
            if self._compressed is None:
                yield layer
                return
            bases, ranks = self._compressed
            with self.compressed_layer(index, bases[index], ranks[index]):
                yield layer

    @contextmanager
    def compressed_layer(self, index: int, bases: LayerBases, ranks: LayerRanks) -> Iterator[None]:
        """Compress one layer, whose weights must be loaded, for the length of a `with`, whatever the others are."""
        before, implementation = self.family.attention_module(self.model, index), self.config._attn_implementation
        try:
            self.family.replace_attention(self.model, index, self._originals[index])
            self._put_compressed(index, bases, ranks)
            yield
        finally:
            self.family.replace_attention(self.model, index, before)
            self.config._attn_implementation = implementation

    def _put_compressed(self, index: int, bases: LayerBases, ranks: LayerRanks) -> None:
        weights = self.attention_weights(index)
        device = next(self._originals[index].parameters()).device
        layout, order = layer_layout(bases, ranks, self.family.has_key_norm)
        rewritten = rewrite_layer(weights, bases, layout, order, self.shape)
        with torch.device("meta"):
            layouts = {index: layout}
            (module,) = replace_attention(self.model, self.family, self.shape, layouts, bias_names(weights))
        on_device = {name: tensor.to(device, self.dtype) for name, tensor in rewritten.items()}
        module.load_state_dict(on_device, strict=False, assign=True)
        check_parameters(module, "the rewritten weights", self.family.attention_prefix(index))
        module.eval()


def bias_names(weights: AttentionWeights) -> frozenset[str]:
    """Names of those of q, k, v, o that have a bias."""
    return frozenset(p for p in "qkvo" if getattr(weights, f"{p}_bias") is not None)
