"""Attention of one layer of an 8B on the GPU: decoding replayed from graphs, its constants, few queries, prompts.

Every row is compared with float64 before it is timed. Caches are copied until they are together larger than three L2
caches, and the copies take turns, as the layers of a model do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...errors import NumericsError
from ...format.columns import Columns
from ...format.layout import AttentionShape, GroupLayout, LayerLayout
from ...kernels.gpu import sm_count
from ...kernels.tuning import decode_constants
from ..attention import relative_error, truth_and_limit
from ..graphs import replayed
from ..problem import Problem, checked_output, compressed_layout, copied, random_problem, uncompressed_layout
from ..rows import BACKENDS, flashinfer_decode, kernel_decode, kernel_prefill, no_flashinfer, no_kernel, sdpa
from .case import Case, Refused, Skipped

Prepare = Callable[[Problem], Callable[[], Tensor]]

COLD = 3
"""The caches of a graph are together so many times the L2 cache."""


DRY = ("after RoPE", "one latent", "full", "after RoPE, codes")
"""The layouts of a dry run."""


@dataclass(frozen=True)
class AttentionSizes:
    """What is measured: an 8B's attention on a GPU, or toys of it in Triton's interpreter.

    layouts: by name, the uncompressed one as `full`. tokens: cached, by sequences in the batch. swept, swept_layouts:
    batch sizes and layouts of the sweeps. sweeps: by name, values of each constant; programs are those of an SM.
    queries: new tokens against a long cache, `queries_batch` sequences. prompt: tokens. launches: in a graph, at least.
    """

    shape: AttentionShape
    layouts: dict[str, LayerLayout]
    tokens: dict[int, int]
    swept: tuple[int, ...]
    swept_layouts: tuple[str, ...]
    sweeps: dict[str, tuple[int, ...]]
    queries: tuple[int, ...]
    queries_batch: tuple[int, ...]
    prompt: int
    dtype: torch.dtype
    device: torch.device
    launches: int
    repetitions: int

    @classmethod
    def of(cls, dry: bool) -> AttentionSizes:
        if dry:
            layouts = _layouts(2, 16, 16, 32, Columns(n4=8, n2=16))
            return cls(
                shape=AttentionShape(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, hidden_size=64),
                layouts={name: layouts[name] for name in DRY},
                tokens={2: 16},
                swept=(2,),
                swept_layouts=("one latent",),
                sweeps={"programs": (1,), "TILE": (32,), "page": (16,)},
                queries=(4,),
                queries_batch=(1,),
                prompt=16,
                dtype=torch.float32,  # the interpreter computes bfloat16 wrongly
                device=torch.device("cpu"),
                launches=1,
                repetitions=1,
            )
        return cls(
            shape=AttentionShape(num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, hidden_size=4096),
            layouts=_layouts(8, 128, 64, 256, Columns(n8=16, n4=32, n2=16)),
            tokens={1: 32768, 8: 32768, 64: 8192},
            swept=(8, 1),
            swept_layouts=("after RoPE", "one latent", "before RoPE", "full"),
            sweeps={
                "programs": (1, 2, 3, 4, 6),
                "num_stages": (2, 3, 4, 5),
                "num_warps": (2, 4, 8),
                "TILE": (16, 32, 64, 128),
                "page": (16, 64, 256),
            },
            queries=(4, 16, 64),
            queries_batch=(1, 8),
            prompt=8192,
            dtype=torch.bfloat16,
            device=torch.device("cuda"),
            launches=24,
            repetitions=15,
        )


def _layouts(kv_heads: int, head_dim: int, rank: int, wide: int, codes: Columns) -> dict[str, LayerLayout]:
    """By name: a head after RoPE, one latent of all heads before RoPE, a head before RoPE, each in numbers and codes.

    rank: of a head's latents. wide: of one latent. codes: of a head; one latent has four times as many columns.
    """
    four = Columns(4 * codes.n16, 4 * codes.n8, 4 * codes.n4, 4 * codes.n2)
    heads, every = [(h,) for h in range(kv_heads)], tuple(range(kv_heads))
    narrow = max(8, rank * 3 // 4 // 8 * 8), max(8, rank * 7 // 8 // 8 * 8)
    shape = AttentionShape(1, kv_heads, kv_heads, head_dim, kv_heads * head_dim)
    return {
        "after RoPE": LayerLayout("none", True, tuple(GroupLayout(h, rank, rank) for h in heads)),
        "one latent": LayerLayout("pre", True, (GroupLayout(every, wide, wide),)),
        "before RoPE": LayerLayout("pre", True, tuple(GroupLayout(h, *narrow) for h in heads)),
        "full": uncompressed_layout(shape),
        "after RoPE, codes": LayerLayout("none", True, tuple(GroupLayout.coded(h, codes, codes) for h in heads)),
        "one latent, codes": LayerLayout("pre", True, (GroupLayout.coded(every, four, four),)),
        "before RoPE, codes": LayerLayout("pre", True, tuple(GroupLayout.coded(h, codes, codes) for h in heads)),
    }


class Problems:
    """Random problems by name and load; the last one is kept, with its value in float64."""

    def __init__(self, sizes: AttentionSizes) -> None:
        self.sizes = sizes
        self._key: tuple[Any, ...] | None = None
        self._found: tuple[Problem, Tensor, float] | None = None

    def __call__(self, name: str, batch_size: int, seq_len: int, kv_len: int) -> tuple[Problem, Tensor, float]:
        """The problem, what of it is compared, and the relative error that a row may have."""
        key = name, batch_size, seq_len, kv_len
        if key != self._key or self._found is None:
            self._key = self._found = None  # the memory of the last one
            sizes = self.sizes
            problem = random_problem(
                compressed_layout(sizes.layouts[name]),
                sizes.shape,
                batch_size,
                seq_len,
                kv_len,
                sizes.dtype,
                torch.Generator(sizes.device).manual_seed(0),
            )
            with torch.inference_mode():
                self._key, self._found = key, (problem, *truth_and_limit(problem))
        return self._found


def decode_cases(sizes: AttentionSizes) -> Iterator[Case]:
    """Every layout at every batch size, and what others have for the uncompressed one."""
    problems = Problems(sizes)
    for batch_size, tokens in sizes.tokens.items():
        for name in sizes.layouts:
            rows: dict[str, Prepare] = {"rotor": kernel_decode}
            if name == "full":
                rows |= {f"SDPA {b}": partial(sdpa, backend=BACKENDS[b]) for b in ("flash", "cudnn")}
                rows["FlashInfer"] = flashinfer_decode
            for row, prepare in rows.items():
                yield _case(problems, f"{row}, {name}", name, prepare, batch_size, 1, tokens)


def sweep_cases(sizes: AttentionSizes) -> Iterator[Case]:
    """One constant of the decode kernel at a time, for what is stored in numbers."""
    problems = Problems(sizes)
    for batch_size in sizes.swept:
        for name in sizes.swept_layouts:
            for constant, values in sizes.sweeps.items():
                for value in values:
                    prepare = partial(_with_constant, constant=constant, value=value)
                    row = f"rotor, {name}, {constant} {value}"
                    case = _case(problems, row, name, prepare, batch_size, 1, sizes.tokens[batch_size])
                    yield replace(case, about={**case.about, "constant": constant, "value": value})


def query_cases(sizes: AttentionSizes) -> Iterator[Case]:
    """Some new tokens behind a long cache: a step of speculative decoding, a small chunk of a prompt."""
    problems = Problems(sizes)
    for batch_size in sizes.queries_batch:
        tokens = sizes.tokens.get(batch_size, next(iter(sizes.tokens.values())))
        for queries in sizes.queries:
            for name in sizes.layouts:
                rows: dict[str, Prepare] = {"rotor": kernel_prefill}
                if name == "full":
                    rows["SDPA flash"] = partial(sdpa, backend=BACKENDS["flash"])
                for row, prepare in rows.items():
                    yield _case(problems, f"{row}, {name}", name, prepare, batch_size, queries, tokens)


def prefill_cases(sizes: AttentionSizes) -> Iterator[Case]:
    """A prompt of one sequence."""
    problems = Problems(sizes)
    for name in sizes.layouts:
        rows: dict[str, Prepare] = {"rotor": kernel_prefill}
        if name == "full":
            rows |= {f"SDPA {b}": partial(sdpa, backend=BACKENDS[b]) for b in ("flash", "cudnn")}
        for row, prepare in rows.items():
            yield _case(problems, f"{row}, {name}", name, prepare, 1, sizes.prompt, sizes.prompt)


def _with_constant(problem: Problem, constant: str, value: int) -> Callable[[], Tensor]:
    """The decode kernel with another constant, number of programs or pages."""
    if constant == "programs":
        return kernel_decode(problem, programs=value * sm_count(problem.key.device))
    if constant == "page":
        return kernel_decode(problem, page=value)
    run = kernel_decode(problem)

    def with_constant() -> Tensor:
        with decode_constants(**{constant: value}):
            return run()

    return with_constant


def _case(
    problems: Problems, row: str, name: str, prepare: Prepare, batch_size: int, seq_len: int, kv_len: int
) -> Case:
    about = {"layout": name, "batch_size": batch_size, "new_tokens": seq_len, "tokens": kv_len}
    load = f"{batch_size} x {kv_len}" if seq_len in (1, kv_len) else f"{batch_size} x {kv_len}, {seq_len} new"
    run = partial(_measured, problems, row, name, prepare, batch_size, seq_len, kv_len)
    return Case(f"{row}, {load}", run, about)


def _measured(
    problems: Problems, row: str, name: str, prepare: Prepare, batch_size: int, seq_len: int, kv_len: int
) -> dict[str, Any]:
    """Compare a row with float64, then time it over enough copies of the cache."""
    sizes = problems.sizes
    if prepare is flashinfer_decode and (why := no_flashinfer_here(sizes)) is not None:
        raise Skipped(why)
    problem, exact, limit = problems(name, batch_size, seq_len, kv_len)
    ours = row.startswith("rotor")
    if ours and sizes.device.type == "cuda" and (why := no_kernel(problem)) is not None:
        raise Refused(why)
    with torch.inference_mode():
        try:
            error = relative_error(checked_output(problem, prepare(problem)()), exact)
        except (RuntimeError, NotImplementedError) as refusal:
            if ours or "CUDA error" in str(refusal):
                raise
            raise Refused(str(refusal)) from refusal
        if not error <= limit:
            raise NumericsError(
                f"{row}: relative error {error:.3g} against float64, allowed is {limit:.3g}.", "It is not timed."
            )
        calls = [prepare(copied(problem)) for _ in range(copies_for(problem, l2_bytes(sizes.device)))]
        repeated = [calls[i % len(calls)] for i in range(max(len(calls), sizes.launches))]
        seconds = replayed(repeated, sizes.device, sizes.repetitions)
    work = problem.work
    return {
        "seconds": vars(seconds),
        "bytes": work.cache_bytes,
        "flops": work.cache_flops,
        "bytes_per_s": work.cache_bytes / seconds.median,
        "flops_per_s": work.cache_flops / seconds.median,
        "error": error,
        "limit": limit,
        "caches": len(calls),
        "calls_in_graph": len(repeated),
    }


def no_flashinfer_here(sizes: AttentionSizes) -> str | None:
    """Why FlashInfer cannot run, before a problem is made."""
    layout = sizes.layouts["full"]
    probe = random_problem(layout, sizes.shape, 1, 1, 1, sizes.dtype, torch.Generator(sizes.device))
    return no_flashinfer(probe)


def copies_for(problem: Problem, cache_bytes: int) -> int:
    """How many caches are together larger than COLD times an L2 cache of so many bytes."""
    each = problem.key.nbytes + problem.value.nbytes
    return max(1, math.ceil(COLD * cache_bytes / each))


def l2_bytes(device: torch.device) -> int:
    """Of the L2 cache; of a CPU nothing is asked."""
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
