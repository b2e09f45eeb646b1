"""Decide whether the Triton kernels or plain PyTorch serve a layer, and by which launches. Imports no Triton.

The environment variable ROTOR_ATTENTION chooses: `auto` (the default: kernels on a CUDA device where Triton is
installed), `reference` (never), `triton` (always, an error where they cannot run at all; on a CPU they need Triton's
interpreter, TRITON_INTERPRET=1). With `auto` and with `triton`, plain PyTorch serves what the kernels cannot:

- masks that are added to the logits or differ between heads (bool masks of any pattern are served); empty inputs;
- calls outside of torch.no_grad() or inference_mode();
- latents read by more than MAX_WIDTH columns; heads above MAX_HEAD_DIM; float32 on a GPU, whose products take all
  registers and more;
- AMD's GPUs, and NVIDIA's below compute capability 8.0 (the logger `rotor` says so);

Where torch.compile traces a model (`generate` does so for static caches on CUDA), attention is left out of the graph.

Launches go by kernel_config.json. Of a model that nobody has tuned `rotor export` writes it by rule, and checkpoints
without the file run by the rule. Tiles go by counts of instructions (`python artifacts/gpu count`); `rotor tune OUT`
measures more.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from rotor.checkpoint.kernel_config import KernelConfig, LayerKernels, Tile, layout_class
from rotor.checkpoint.layout import AttentionShape, LayerLayout
from rotor.errors import UsageError
from rotor.logs import log
from rotor.versions import pip_install

VARIABLE = "ROTOR_ATTENTION"
CHOICES = ("auto", "triton", "reference")
DTYPES = (torch.float16, torch.bfloat16)
"""Dtypes of models that kernels serve; on a CPU, in Triton's interpreter, also float32."""

MAX_WIDTH = 1024
MAX_HEAD_DIM = 256
LEAST_CAPABILITY = (8, 0)

WARPS_PER_SM = 8
"""Warps of decoding programs on an SM: as many as fit with 255 registers a thread."""

HEADS_PER_KV = 4
"""Query heads of a KV head that the rule assumes, as in an 8B."""


@lru_cache(maxsize=1)
def triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@lru_cache(maxsize=16)
def gpu_serves(device: torch.device) -> bool:
    """Tell whether the kernels run on a CUDA device; logs once why they do not."""
    if torch.version.hip is not None:
        why = f"this PyTorch is built for AMD's (ROCm {torch.version.hip})"
    elif torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        why = "its compute capability is below 8.0"
    else:
        return True
    log.warning("plain PyTorch serves compressed attention on this GPU: rotor's kernels are for NVIDIA's, and %s", why)
    return False


def kernels_wanted(device: torch.device) -> bool:
    """Tell whether kernels run on a device, given what is installed and what the user chose.

    Raises:
        UsageError: ROTOR_ATTENTION has no such choice, or asks for Triton where it is not installed.
    """
    choice = os.environ.get(VARIABLE, "auto")
    if choice not in CHOICES:
        raise UsageError(f"{VARIABLE}={choice}: expected one of {', '.join(CHOICES)}.", f"Unset {VARIABLE}.")
    if choice == "triton" and not triton_installed():
        raise UsageError(f"{VARIABLE}=triton, but Triton is not installed.", pip_install("kernels"))
    if choice == "reference" or not triton_installed():
        return False
    return gpu_serves(device) if device.type == "cuda" else choice == "triton"


def layer_served(layout: LayerLayout, shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> bool:
    """Tell whether the kernels serve a layer at all, whatever a call asks of it."""
    widest = max(max(group.key.width, group.values.width) for group in layout.groups)
    return (
        kernels_wanted(device)
        and (dtype in DTYPES or (dtype == torch.float32 and device.type == "cpu"))
        and widest <= MAX_WIDTH
        and shape.head_dim <= MAX_HEAD_DIM
    )


def call_served(hidden_states: Tensor, attention_mask: Tensor | None) -> bool:
    """Tell whether the kernels serve these inputs, in a layer that they serve (`layer_served`).

    Args:
        hidden_states: the layer's input, [batch_size, seq_len, hidden_size]: device, dtype, and whether gradients are
            wanted.
        attention_mask: broadcastable to [batch_size, num_heads, seq_len, kv_len].
    """
    if torch.is_grad_enabled():
        return False
    fits = attention_mask is None or _mask_fits(attention_mask, *hidden_states.shape[:2])
    return fits and hidden_states.numel() > 0


def _mask_fits(mask: Tensor, batch_size: int, seq_len: int) -> bool:
    """Tell whether a mask is bool, the same for all heads, and of these sequences."""
    shape = mask.shape
    return (
        mask.dtype == torch.bool
        and mask.dim() == 4
        and shape[0] in (1, batch_size)
        and shape[1] == 1
        and shape[2] in (1, seq_len)
    )


def default_config(layouts: Sequence[LayerLayout]) -> KernelConfig:
    """The kernel configuration of a model, by rule."""
    return KernelConfig(tuple(default_layer(layout) for layout in layouts))


def config_of(path: Path | None, layouts: Sequence[LayerLayout]) -> KernelConfig:
    """Read kernel_config.json, or without one go by the rule; raises CheckpointError if it does not fit the model."""
    if path is None:
        return default_config(layouts)
    config = KernelConfig.read(path)
    config.check(layouts, str(path))
    return config


@lru_cache(maxsize=4096)
def default_layer(layout: LayerLayout) -> LayerKernels:
    """The launches of a layer, by rule."""
    tile = decode_tile(layout, layout.group_size * HEADS_PER_KV)
    return LayerKernels(layout_class(layout), tile, tile, slices_per_sm(layout, tile), layout.pre_rope)


def slices_per_sm(layout: LayerLayout, tile: Tile) -> int:
    """Programs an SM over which decoding splits its keys: twice as many of narrow latents as fit at a time, so that the
    last ones end together; half as many of wide ones, whose results are long to join."""
    widest = max(max(group.key.width, group.values.width) for group in layout.groups)
    warps = WARPS_PER_SM
    if layout.coded:
        warps = 2 * WARPS_PER_SM if widest < 128 else WARPS_PER_SM if widest <= 256 else WARPS_PER_SM // 2
    return max(1, warps // tile.warps)


def decode_tile(layout: LayerLayout, query_rows: int) -> Tile:
    """The tile of decoding on all architectures: one warp takes 64 keys; two share them where rows are wide and query
    rows many. Tiles are loaded two ahead where shared memory then still holds all programs that registers let in."""
    rows = max(8, _power(query_rows))
    widest = max(max(group.key.width, group.values.width) for group in layout.groups)
    work = widest // layout.operands * layout.word_nibbles * rows * (1 + layout.latents_per_group) // 2
    if not layout.coded:
        return Tile(64, 2, 2) if work <= 1024 else Tile(32, 4 if work <= 8192 else 8, 2)
    if work > 3072 or widest > 256:
        return Tile(64, 2, 2)
    return Tile(64, 1, 3 if widest <= 128 else 2) if layout.joint else Tile(32, 1, 2)


def _power(number: int) -> int:
    """The next power of two."""
    return 1 << max(0, number - 1).bit_length()
