"""A model in memory whose attention can be compressed by any rank plan and put back, without writing anything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from .bases import LayerBases
from .checkpoint import Checkpoint
from .errors import CheckpointError, RotorError, UsageError
from .families import AttentionWeights, Family, attention_shape, find_family, read_attention
from .fit import check_fit
from .integration import replace_attention
from .layout import LayerLayout
from .numerics import check_parameters
from .ranks import LayerRanks
from .rewrite import layer_layout, rewrite_layer


def pick_device(name: str) -> torch.device:
    """`auto` is the GPU if there is one; raises UsageError for a device that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"--device {name}: no such device type.", "Give auto, cpu or cuda.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--device {name}: no CUDA device is available.", "Give --device cpu.")
    return device


def pick_dtype(name: str, checkpoint_dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """`auto` is float32 on a CPU and the checkpoint's dtype elsewhere."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else checkpoint_dtype
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise UsageError(f"--dtype {name}: expected auto, {', '.join(known)}.")
    return known[name]


def load_model(
    folder: Any, device: torch.device, dtype: torch.dtype, config_changes: dict[str, Any] | None = None
) -> Any:
    """Load a causal model for evaluation, from a local folder, without running code from it."""
    check_fit(Checkpoint(folder))
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
    return model.eval().to(device)


class CompressibleModel:
    """The source model with its attention swapped for compressed modules and back.

    Weights are rewritten in the checkpoint's dtype, as on export, and computed with in `dtype`.

    Args:
        rewrite_dtype: rewrite in this dtype instead of the checkpoint's.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        rewrite_dtype: torch.dtype | None = None,
    ) -> None:
        config = checkpoint.config
        self.checkpoint = checkpoint
        self.family: Family = find_family(config)
        self.shape = attention_shape(config)
        self.weights: list[AttentionWeights] = [
            read_attention(
                self.family, i, checkpoint.names, lambda n: checkpoint.tensor(n).to(rewrite_dtype), self.shape
            )
            for i in range(self.shape.num_layers)
        ]
        self.model = load_model(checkpoint.folder, device, dtype)
        self.dtype, self.device = dtype, device
        self._attention_implementation = self.model.config._attn_implementation
        self._originals: list[nn.Module] = [
            self.family.attention_module(self.model, i) for i in range(self.shape.num_layers)
        ]

    def restore(self) -> Any:
        """The uncompressed model."""
        for index, module in enumerate(self._originals):
            self.family.replace_attention(self.model, index, module)
        self.model.config._attn_implementation = self._attention_implementation
        return self.model

    @contextmanager
    def uncompressed(self) -> Iterator[Any]:
        """The uncompressed model for the length of a `with`; the modules in use before are put back after it."""
        modules = [self.family.attention_module(self.model, i) for i in range(self.shape.num_layers)]
        implementation = self.model.config._attn_implementation
        try:
            yield self.restore()
        finally:
            for index, module in enumerate(modules):
                self.family.replace_attention(self.model, index, module)
            self.model.config._attn_implementation = implementation

    def compress(self, bases: list[LayerBases], ranks: list[LayerRanks]) -> Any:
        """The model compressed by `bases` at `ranks` (of each layer, in the order of the bases)."""
        self.restore()
        layouts: list[LayerLayout] = []
        rewritten: list[dict[str, Tensor]] = []
        for weights, layer_basis, layer_ranks in zip(self.weights, bases, ranks, strict=True):
            layout, order = layer_layout(layer_basis, layer_ranks, self.family.has_key_norm)
            layouts.append(layout)
            rewritten.append(rewrite_layer(weights, layer_basis, layout, order, self.shape))
        with torch.device("meta"):
            modules = replace_attention(self.model, self.family, self.shape, layouts, bias_names(self.weights[0]))
        for index, (module, tensors) in enumerate(zip(modules, rewritten, strict=True)):
            on_device = {name: tensor.to(self.device, self.dtype) for name, tensor in tensors.items()}
            module.load_state_dict(on_device, strict=False, assign=True)
            check_parameters(module, "the rewritten weights", self.family.attention_prefix(index))
            module.eval()
        return self.model


def bias_names(weights: AttentionWeights) -> frozenset[str]:
    """Which of q, k, v, o have a bias."""
    return frozenset(p for p in "qkvo" if getattr(weights, f"{p}_bias") is not None)
