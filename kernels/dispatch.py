"""Decide whether the Triton kernels or plain PyTorch serve a layer. Imports neither Triton nor CUDA.

The environment variable ROTOR_ATTENTION chooses: `auto` (the default: kernels on a CUDA device where Triton is
installed), `reference` (never), `triton` (always, an error where they cannot run at all; on a CPU they need Triton's
interpreter, TRITON_INTERPRET=1). With `auto` and with `triton`, plain PyTorch serves what the kernels cannot:

- masks that are added to the logits or differ between heads (bool masks of any pattern are served); empty inputs;
- calls outside of torch.no_grad() or inference_mode();
- latents read by more than MAX_WIDTH columns; heads above MAX_HEAD_DIM; float32 on a GPU, whose products take all
  registers and more;
- AMD's GPUs, and NVIDIA's below compute capability 8.0 (the logger `rotor` says so);

Where torch.compile traces a model (`generate` does so for static caches on CUDA), attention is left out of the graph.
"""

from __future__ import annotations

import importlib.util
import os
from functools import lru_cache

import torch
from torch import Tensor

from rotor.checkpoint.layout import AttentionShape, LayerLayout
from rotor.errors import UsageError
from rotor.installing import pip_install
from rotor.logs import log

VARIABLE = "ROTOR_ATTENTION"
CHOICES = ("auto", "triton", "reference")
DTYPES = (torch.float16, torch.bfloat16)
"""Dtypes of models that kernels serve; on a CPU, in Triton's interpreter, also float32."""

MAX_WIDTH = 1024
MAX_HEAD_DIM = 256
LEAST_CAPABILITY = (8, 0)


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
