"""Whether the Triton kernels serve a call of attention, or plain PyTorch does. Imports neither Triton nor CUDA.

The environment variable ROTOR_ATTENTION chooses: `auto` (the default: kernels on a CUDA device where Triton is
installed), `reference` (never), `triton` (always, an error where they cannot run at all; on a CPU they need Triton's
interpreter, TRITON_INTERPRET=1). With `auto` and `triton` alike, plain PyTorch serves what the kernels do not express:

- masks that are added to the logits, or that differ between heads; bool masks of any pattern are served, and those of
  one row or one sequence for all; empty inputs;
- dropout, and calls outside of torch.no_grad() or inference_mode();
- widths above MAX_WIDTH (keys in domain `pre` above MAX_REBUILT_WIDTH; of codes there the sum over their widths in
  bits, each padded), and widths whose smallest tiles exceed the shared memory of the GPU at hand (the logger `rotor`
  says so);
- GPUs of AMD (the logger `rotor` says so): the kernels give options that only NVIDIA's compiler knows;
- keys of domain `pre` with partial rotary embeddings, or a RoPE whose frequencies change with the length.

Code that torch.compile traces (`generate` does so by itself for static caches on CUDA) has the kernels as operators of
PyTorch (`operators`); what was chosen while tracing stays so until it is traced again.
"""

from __future__ import annotations

import importlib.util
import os
from functools import lru_cache

import torch
from torch import Tensor

from rotor.errors import UsageError
from rotor.format.kernel_config import LayerKernels
from rotor.format.layout import LayerLayout
from rotor.installing import pip_install
from rotor.logs import log

from .decode.tile_sizes import decode_config, decode_shared_bytes
from .gpu import Gpu, gpu_of
from .layer_table import layer_parts
from .prefill.tile_sizes import prefill_constants, prefill_shared_bytes

VARIABLE = "ROTOR_ATTENTION"
CHOICES = ("auto", "triton", "reference")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_WIDTH = 512
MAX_REBUILT_WIDTH = 1024


@lru_cache(maxsize=1)
def triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def for_amd() -> bool:
    """Whether this PyTorch was built for AMD's GPUs, which it calls CUDA devices too."""
    return torch.version.hip is not None


@lru_cache(maxsize=1)
def _warn_of_amd() -> None:
    log.warning(
        "plain PyTorch serves compressed attention on this GPU: rotor's kernels are for NVIDIA's, and this PyTorch is "
        "built for AMD's (ROCm %s)",
        torch.version.hip,
    )


def kernels_wanted(device: torch.device) -> bool:
    """Whether kernels run on a device, by what is installed and what the user chose.

    Raises:
        UsageError: ROTOR_ATTENTION has no such choice, or asks for Triton where it is not installed.
    """
    choice = os.environ.get(VARIABLE, "auto")
    if choice not in CHOICES:
        raise UsageError(f"{VARIABLE}={choice}: expected one of {', '.join(CHOICES)}.", f"Unset {VARIABLE}.")
    if choice == "triton" and not triton_installed():
        raise UsageError(f"{VARIABLE}=triton, but Triton is not installed.", pip_install("kernels"))
    if device.type == "cuda" and choice != "reference" and triton_installed() and for_amd():
        _warn_of_amd()
        return False
    return choice == "triton" or (choice == "auto" and device.type == "cuda" and triton_installed())


def widths_fit(
    layout: LayerLayout,
    heads_per_kv: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    kernels: LayerKernels | None = None,
) -> bool:
    """Whether the kernels have tiles for a layer's widths on a device; `kernels` is by default by rule."""
    widest = max(group.qk_rank for group in layout.groups), max(group.v_rank for group in layout.groups)
    if layout.coded and layout.domain == "pre" and max(widest) <= MAX_REBUILT_WIDTH:
        widest = layer_parts(layout, heads_per_kv, head_dim, kernels, dtype.itemsize).widest
    if widest[0] > (MAX_REBUILT_WIDTH if layout.domain == "pre" else MAX_WIDTH) or widest[1] > MAX_WIDTH:
        return False
    return _fits_shared_memory(layout, heads_per_kv, head_dim, dtype, device, kernels)


@lru_cache(maxsize=4096)
def fits_shared_memory(
    layout: LayerLayout,
    heads_per_kv: int,
    head_dim: int,
    element_bytes: int,
    gpu: Gpu,
    kernels: LayerKernels | None = None,
) -> bool:
    """Whether decoding and prefill, in their smallest tiles, fit into the shared memory that a program may have."""
    parts = layer_parts(layout, heads_per_kv, head_dim, kernels, element_bytes)
    config = decode_config(parts, heads_per_kv, element_bytes, head_dim if layout.domain == "pre" else 0, gpu)
    prefills = prefill_constants(layout, heads_per_kv, element_bytes, head_dim, False, gpu, kernels)
    needed = [decode_shared_bytes(config, element_bytes)]
    needed += [prefill_shared_bytes(constants, element_bytes) for _, constants in prefills]
    return max(needed) <= gpu.shared_bytes


@lru_cache(maxsize=4096)
def _fits_shared_memory(
    layout: LayerLayout,
    heads_per_kv: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    kernels: LayerKernels | None,
) -> bool:
    gpu = gpu_of(device)
    fits = fits_shared_memory(layout, heads_per_kv, head_dim, dtype.itemsize, gpu, kernels)
    if not fits:
        log.warning(
            "plain PyTorch serves layers of ranks up to %d + %d in %s: their tiles exceed the %d KB of shared memory "
            "that a program may have on this GPU",
            max(group.qk_rank for group in layout.groups),
            max(group.v_rank for group in layout.groups),
            dtype,
            gpu.shared_bytes >> 10,
        )
    return fits


@torch.compiler.assume_constant_result
def layer_served(
    layout: LayerLayout,
    heads_per_kv: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    rotation_fits: bool,
    kernels: LayerKernels | None = None,
) -> bool:
    """Whether the kernels serve a layer at all, whatever is asked of it in a call.

    Args:
        heads_per_kv, head_dim: of the uncompressed model.
        rotation_fits: cos and sin are of the whole head, and in domain `pre` by index in the cache.
        kernels: the launches of the layer; by default by rule.
    """
    return (
        kernels_wanted(device)
        and rotation_fits
        and dtype in DTYPES
        and widths_fit(layout, heads_per_kv, head_dim, dtype, device, kernels)
    )


def kernels_serve(
    hidden_states: Tensor,
    layout: LayerLayout,
    heads_per_kv: int,
    head_dim: int,
    attention_mask: Tensor | None,
    dropout: float,
    rotation_fits: bool,
    kernels: LayerKernels | None = None,
) -> bool:
    """Whether the kernels serve a layer's attention for these inputs; else plain PyTorch does.

    Args:
        hidden_states: the layer's input, [batch_size, seq_len, hidden_size]: device, dtype, and whether gradients are
            wanted.
        heads_per_kv, head_dim: of the uncompressed model.
        attention_mask: broadcastable to [batch_size, num_heads, seq_len, kv_len].
        rotation_fits: cos and sin are of the whole head, and in domain `pre` by index in the cache.
        kernels: the launches of the layer; by default by rule.
    """
    if torch.is_grad_enabled():
        return False
    dtype, device = hidden_states.dtype, hidden_states.device
    return (
        dropout == 0.0
        and layer_served(layout, heads_per_kv, head_dim, dtype, device, rotation_fits, kernels)
        and (attention_mask is None or _mask_fits(attention_mask, *hidden_states.shape[:2]))
        and hidden_states.numel() > 0
    )


def _mask_fits(mask: Tensor, batch_size: int, seq_len: int) -> bool:
    """Whether a mask is bool, the same for all heads, and broadcasts to the batch; what it hides does not matter."""
    if mask.dtype != torch.bool or mask.dim() != 4 or mask.numel() == 0:
        return False
    sequences, heads, rows, _ = mask.shape
    return heads == 1 and sequences in (1, batch_size) and rows in (1, seq_len)
