"""The rows of the attention benchmark: what is compared with what, and where each can run."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import count
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from ..format.kernel_config import LayerKernels
from ..installing import pip_install
from ..kernels import reference
from ..kernels.defaults import default_layer
from ..kernels.dispatch import DTYPES, layer_served, triton_installed
from ..kernels.rotary import when_read
from .problem import Problem, paged_rows

Phase = Literal["decode", "prefill"]
Kind = Literal["compressed", "uncompressed", "rebuilt"]
"""What a row runs on: the checkpoint's ranks, full widths, or the same ranks with keys compressed before RoPE."""

Prepare = Callable[[Problem], Callable[[], Tensor]]
"""Makes the call that is timed, which gives [batch_size, seq_len, sum over query heads of v_rank]."""


@dataclass(frozen=True)
class Row:
    """One way to compute attention.

    why_not: of a problem, the reason that the row cannot run on it, or None.
    refusals: what it raises where it turns out that it cannot; anything else is a defect, and is not caught.
    """

    name: str
    kind: Kind
    phases: tuple[Phase, ...]
    prepare: Prepare
    why_not: Callable[[Problem], str | None]
    refusals: tuple[type[Exception], ...] = (torch.OutOfMemoryError,)


BOTH: tuple[Phase, ...] = ("decode", "prefill")
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


def attention_rows() -> list[Row]:
    """All rows, in the order of the table."""
    decode: tuple[Phase, ...] = ("decode",)
    rows = []
    for kind in ("compressed", "uncompressed"):
        named = f"rotor {kind}, "
        rows.append(Row(f"{named}kernel", kind, BOTH, kernel, no_kernel))
        rows.append(Row(f"{named}PyTorch path", kind, BOTH, pytorch_path, _always))
    refusals = (RuntimeError, NotImplementedError)  # PyTorch's way to say that a backend does not take such inputs
    for name, backend in BACKENDS.items():
        run, why_not = partial(sdpa, backend=backend), partial(no_sdpa, backend=backend)
        rows.append(Row(f"SDPA {name}", "uncompressed", BOTH, run, why_not, refusals))
    rows.append(Row("flex attention", "uncompressed", BOTH, flex, no_flex, refusals))
    rows.append(Row("FlashInfer", "uncompressed", decode, flashinfer_decode, no_flashinfer, refusals))
    rows.append(Row("keys rebuilt in memory, SDPA (Palu)", "rebuilt", BOTH, pytorch_path, _always))
    return rows


def _always(problem: Problem) -> None:
    return None


def no_kernel(problem: Problem) -> str | None:
    """Why the Triton kernels do not run; never timed in Triton's interpreter, which is no kernel's speed."""
    layout, device = problem.layout, problem.key.device
    if device.type != "cuda":
        return f"the Triton kernels need a CUDA device; this one is {device.type}"
    if not triton_installed():
        return f"Triton is not installed ({pip_install('kernels')})"
    if problem.dtype not in DTYPES:
        return f"the kernels have no {problem.dtype}"
    if not layer_served(layout, problem.shape, problem.dtype, device):
        return "the latents or heads are above the kernels' widest, or this GPU is not one that they are for"
    return None


_layers = count()
"""Each call is one more layer of a step: what is known of the mask holds from one to the next."""


def kernel(problem: Problem, kernels: LayerKernels | None = None) -> Callable[[], Tensor]:
    """The kernels as a layer of a model calls them: a step, some new tokens behind cached keys, or a prompt."""
    from ..kernels.attention import attend

    mask, launches = problem.mask, kernels or default_layer(problem.layout)
    return lambda: attend(
        problem.query,
        problem.key,
        problem.value,
        problem.parameters,
        launches,
        rotation=problem.rotation,
        attention_mask=mask,
        layer_idx=next(_layers),
    )


def kernel_in_pages(problem: Problem, page: int, kernels: LayerKernels | None = None) -> Callable[[], Tensor]:
    """The same over permuted pages of so many keys, as a serving engine calls them."""
    from ..kernels.attention import attend_pages

    device, batch_size, seq_len = problem.key.device, problem.batch_size, problem.seq_len
    launches = kernels or default_layer(problem.layout)
    key, value, table = paged_rows(problem, page, torch.Generator(device).manual_seed(0))
    query = (problem.query if problem.query.dim() == 3 else problem.query.transpose(1, 2)).flatten(0, 1)
    start = torch.arange(0, batch_size * seq_len + 1, seq_len, dtype=torch.int32, device=device)
    lengths = torch.full((batch_size,), problem.kv_len, dtype=torch.int32, device=device)

    def run() -> Tensor:
        output = attend_pages(
            query,
            key,
            value,
            problem.parameters,
            launches,
            block_table=table,
            query_start_loc=start,
            kv_lens=lengths,
            max_query_len=seq_len,
            max_kv_len=problem.kv_len,
            rotation=problem.rotation,
            total_kv_len=batch_size * problem.kv_len,
        )
        return output.view(batch_size, seq_len, -1)

    return run


def pytorch_path(problem: Problem) -> Callable[[], Tensor]:
    """rotor's own path where no kernel serves: keys materialised a block at a time. Over keys of numbers before RoPE it
    is what Palu does where it has no kernel.
    """
    rotation = None
    if problem.rotation is not None:
        rotation = when_read(problem.rotation, problem.layout.form)
        rotation = rotation[0].to(problem.dtype), rotation[1].to(problem.dtype)
    mask = problem.mask
    return lambda: reference.attention(problem.query, problem.key, problem.value, problem.parameters, rotation, mask)


def uncompressed_heads(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value [batch_size, heads, seq_len, head_dim], contiguous, as an uncompressed model has them."""
    head_dim = problem.shape.head_dim
    query = problem.query.unflatten(-1, (-1, head_dim)).transpose(1, 2).contiguous()
    rows = (x[:, 0].unflatten(-1, (-1, head_dim)).transpose(1, 2).contiguous() for x in (problem.key, problem.value))
    return query, *rows  # type: ignore[return-value]


def sdpa(problem: Problem, backend: SDPBackend) -> Callable[[], Tensor]:
    """PyTorch's attention with one backend. Decoding, query heads that share keys are rows of one query, which every
    backend takes, and which reads the keys once.
    """
    query, key, value = uncompressed_heads(problem)
    causal, behind = problem.seq_len > 1, 1 < problem.seq_len < problem.kv_len
    if not causal:
        query = query.reshape(query.shape[0], key.shape[1], -1, query.shape[-1])
    mask = causal_lower_right(problem.seq_len, problem.kv_len) if behind else None

    def run() -> Tensor:
        with sdpa_kernel(backend):
            output = functional.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                is_causal=causal and not behind,
                scale=problem.scaling,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        return output.transpose(1, 2).flatten(2) if causal else output.reshape(output.shape[0], 1, -1)

    return run


def no_sdpa(problem: Problem, backend: SDPBackend) -> str | None:
    """Whether PyTorch has the backend for this device; it says itself what is wrong where it refuses the inputs."""
    if problem.key.device.type == "cpu" and backend in (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        return "this backend is for GPUs"
    return None


FLASHINFER_PAGE = 16
FLASHINFER_WORKSPACE_BYTES = 128 << 20


def no_flashinfer(problem: Problem) -> str | None:
    if problem.key.device.type != "cuda":
        return "FlashInfer needs a CUDA device"
    return (
        None
        if importlib.util.find_spec("flashinfer")
        else "FlashInfer is not installed (pip install flashinfer-python)"
    )


def flashinfer_decode(problem: Problem) -> Callable[[], Tensor]:
    """FlashInfer's decoding over pages of 16 keys, planned once, as a serving engine's captured step runs it."""
    import flashinfer

    head_dim, num_heads = problem.shape.head_dim, problem.shape.num_heads
    device, batch_size = problem.key.device, problem.batch_size
    key, value, table = paged_rows(problem, FLASHINFER_PAGE, torch.Generator(device).manual_seed(0))
    pages = tuple(rows.unflatten(-1, (-1, head_dim)) for rows in (key, value))  # [pages, page, heads, head_dim]: NHD
    indices = table.flatten()
    starts = torch.arange(batch_size + 1, dtype=torch.int32, device=device) * table.shape[1]
    last = torch.full((batch_size,), FLASHINFER_PAGE, dtype=torch.int32, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=device),
        "NHD",
        use_cuda_graph=True,
        use_tensor_cores=problem.shape.heads_per_kv >= 4,
        paged_kv_indptr_buffer=starts.clone(),
        paged_kv_indices_buffer=indices.clone(),
        paged_kv_last_page_len_buffer=last.clone(),
    )
    wrapper.plan(
        starts,
        indices,
        last,
        num_heads,
        problem.shape.num_kv_heads,
        head_dim,
        FLASHINFER_PAGE,
        q_data_type=problem.dtype,
        kv_data_type=problem.dtype,
        sm_scale=problem.scaling,
    )
    query = problem.query[:, 0].unflatten(-1, (num_heads, head_dim)).contiguous()
    return lambda: wrapper.run(query, pages).flatten(1).unsqueeze(1)


@lru_cache(maxsize=1)
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def flex(problem: Problem) -> Callable[[], Tensor]:
    """FlexAttention, compiled."""
    from torch.nn.attention.flex_attention import create_block_mask

    query, key, value = uncompressed_heads(problem)
    mask = None
    if problem.seq_len > 1:
        mask = create_block_mask(
            lambda b, h, q, k: q >= k, None, None, problem.seq_len, problem.kv_len, device=str(query.device)
        )
    attention = _compiled_flex()

    def run() -> Tensor:
        output = attention(query, key, value, block_mask=mask, scale=problem.scaling, enable_gqa=True)
        return output.transpose(1, 2).flatten(2)

    return run


def no_flex(problem: Problem) -> str | None:
    if problem.key.device.type != "cuda":
        return "measured where torch.compile makes a Triton kernel of it, on a CUDA device"
    return None if triton_installed() else "Triton is not installed"
