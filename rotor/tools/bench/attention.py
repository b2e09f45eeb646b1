"""Attention of compressed layers beside PyTorch's on the uncompressed cache: every row is checked, then timed.

Rows, on random inputs: rotor's kernel and its path in plain PyTorch, and PyTorch's SDPA on keys and values of full
width, by the back end that PyTorch chooses and by each that it may be told to take.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from timeit import Timer
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from ...checkpoint.kernel_config import LayerKernels
from ...checkpoint.layout import AttentionShape, ExactTokens, LayerLayout
from ...checkpoint.rows import RowScale
from ...checkpoint.tensors import BASES, FLOAT32, layer_tensors
from ...errors import NumericsError
from ...kernels.dispatch import default_layer, layer_served
from ...kernels.exact_slots import ExactSlots
from ...kernels.parameters import AttentionParameters, seq_len_of
from ...kernels.passes import Pass
from ...kernels.reference.attention import attention
from ...kernels.reference.exact import ExactKeys, RowKeys, attend_to_both
from ...kernels.rotary import Rotation, rotate, when_read
from .baselines import BASELINES, FP8_CAPABILITY, Call, random_baseline, widened
from .records import quartiles

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}
"""Relative error that a row may have against float64, by dtype."""

CHECKED_QUERIES = 32
"""The last ones of a prompt are compared: each needs logits against all keys in float64."""

FLUSH_BYTES = 1 << 27
"""Read before each timed call on a CPU, several times its caches."""

SDPA = "SDPA"

BACKENDS = {"SDPA flash": SDPBackend.FLASH_ATTENTION, "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION}
"""Back ends of SDPA that are measured beside the one that PyTorch chooses, which is not always the fastest."""

UNCOMPRESSED = SDPA, *BACKENDS, f"{BASELINES[16]}, Triton"
"""Rows of the uncompressed cache at 16 bits, beside the fastest of which all rows are set."""


@dataclass(frozen=True)
class Problem:
    """Attention of a layer, causal: a step of one token, or a prompt of all its keys (not with exact tokens).

    query: [batch_size, num_heads, seq_len, head_dim], rotated; in a model without RoPE [batch_size, seq_len, sum over
        query heads of width].
    key, value: rows, [batch_size, 1, kv_len, bytes] uint8, or of numbers [batch_size, 1, kv_len, width].
    rotation: of layers in blocks: cos and sin by index, [kv_len, rotary_dim], float32.
    slots: in a layer with exact tokens, these.
    """

    parameters: AttentionParameters
    query: Tensor
    key: Tensor
    value: Tensor
    rotation: Rotation | None = None
    slots: ExactSlots | None = None

    @property
    def layout(self) -> LayerLayout:
        return self.parameters.layout

    @property
    def seq_len(self) -> int:
        return seq_len_of(self.query)

    @property
    def kv_len(self) -> int:
        return self.key.shape[2]

    def unrounded(self) -> Tensor:
        """The float64 value of the last CHECKED_QUERIES queries."""
        count, p = min(self.seq_len, CHECKED_QUERIES), self.parameters

        def wide(x: Tensor | None) -> Any:
            return x if x is None or not x.is_floating_point() else x.double()

        names = ("query_basis", "key_constant", "output_basis", "value_constant")
        widened = replace(p, **{name: wide(getattr(p, name)) for name in names})
        query = wide(self.query).narrow(1 if self.query.dim() == 3 else 2, self.seq_len - count, count)
        rotation = self.rotation and when_read((wide(self.rotation[0]), wide(self.rotation[1])), self.layout.form)
        mask = torch.ones(count, self.kv_len, dtype=torch.bool, device=self.key.device).tril(self.kv_len - count)
        key, value, slots = wide(self.key), wide(self.value), self.slots
        if slots is None:
            return attention(query, key, value, widened, rotation, mask[None, None])
        held, coded = held_exactly(slots, self.kv_len)
        held = held._replace(key=wide(held.key), value=wide(held.value))
        return attend_to_both(query, held, RowKeys(query, key, value, rotation, coded), widened)


def held_exactly(slots: ExactSlots, kv_len: int) -> tuple[ExactKeys, Tensor]:
    """Exact keys and values, and the mask of the rows that a step reads beside it, [batch_size, 1, 1, kv_len]."""
    row = torch.arange(kv_len, device=slots.key.device)
    coded = (row >= slots.first[:, None]) & (row < slots.until[:, :1])
    return ExactKeys(slots.key, slots.value, (slots.index >= 0)[:, None, None]), coded[:, None, None]


def random_problem(
    layout: LayerLayout,
    shape: AttentionShape,
    batch_size: int,
    seq_len: int,
    kv_len: int,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> Problem:
    """Random inputs on the generator's device, with logits of a few units, rounded to dtype."""
    device = generator.device

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(size, generator=generator, device=device)

    read = layer_tensors(layout, shape, biases=())
    rotation = basis = constant = None
    of_values: dict[str, Tensor] = {}
    if shape.rotary_dim:
        frequency = 1e4 ** (-torch.arange(0, shape.rotary_dim, 2, dtype=torch.float64) / shape.rotary_dim)
        angle = torch.arange(kv_len, dtype=torch.float64)[:, None] * torch.cat([frequency, frequency])
        rotation = angle.cos().float().to(device), angle.sin().float().to(device)
        query = normal(batch_size, shape.num_heads, seq_len, shape.head_dim, scale=2.0)
        query = rotate(query, *(table[kv_len - seq_len :] for table in rotation))
        of_nibble = 4.6 if layout.coded else 1.0
        width = max(group.key.width for group in layout.groups)
        basis = normal(layout.group_size * shape.head_dim, layout.key_width, scale=width**-0.5 / of_nibble).to(dtype)
        if "key_constant" in read:
            constant = normal(shape.num_kv_heads, shape.head_dim, scale=0.5)
        if "output_basis" in read:
            values = max(group.values.width for group in layout.groups)
            rows_of_basis = layout.group_size * shape.head_dim
            of_values["output_basis"] = normal(rows_of_basis, layout.value_width, scale=values**-0.5 / of_nibble).to(
                dtype
            )
            if "value_constant" in read:
                of_values["value_constant"] = normal(shape.num_kv_heads, shape.head_dim, scale=0.5)
    else:
        query = normal(batch_size, seq_len, layout.group_size * shape.heads_per_kv * layout.key_width, scale=2.0)
    rows = []
    for size, width in zip(layout.row_bytes(dtype.itemsize), (layout.key_width, layout.value_width), strict=True):
        if layout.coded:
            row_shape = (batch_size, 1, kv_len, size)
            made = torch.randint(256, row_shape, generator=generator, device=device, dtype=torch.uint8)
            rows.append(with_scales(made, layout, generator) if size else made)
        else:
            rows.append(normal(batch_size, 1, kv_len, width if size else 0).to(dtype))
    parameters = AttentionParameters(layout, shape, shape.head_dim**-0.5, basis, constant, **of_values)
    slots = None if layout.exact is None else random_slots(layout.exact, shape, batch_size, kv_len, dtype, generator)
    return Problem(parameters, query.to(dtype), rows[0], rows[1], rotation if layout.in_blocks else None, slots)


def random_slots(
    exact: ExactTokens,
    shape: AttentionShape,
    batch_size: int,
    kv_len: int,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> ExactSlots:
    """Exact tokens of a step of one new token, the last of kv_len."""
    device, last = generator.device, kv_len - 1
    size = 2, batch_size, shape.num_kv_heads, exact.slots, shape.head_dim
    key, value = torch.randn(size, generator=generator, device=device).to(dtype)
    first = torch.arange(exact.first, device=device)
    newest = last - (last - torch.arange(exact.newest, device=device)) % exact.newest
    index = torch.cat([first.where(first < kv_len, -1), newest.where(newest >= exact.first, -1)]).int()
    codes = torch.tensor([[exact.first], [max(0, kv_len - exact.newest)]], device=device).int().expand(2, batch_size)
    return ExactSlots(key, value, index.repeat(batch_size, 1), codes[0].contiguous(), codes[1][:, None].contiguous())


def with_scales(rows: Tensor, layout: LayerLayout, generator: torch.Generator) -> Tensor:
    """Random rows, [..., bytes], with scales of 1/2 to 2 where they have some: others make logits that no model has."""
    for (first, _), group in zip(layout.byte_offsets(2), layout.groups, strict=True):
        if group.key.scaled:
            nibble = torch.randint(6, 11, rows.shape[:-1], generator=generator, device=rows.device, dtype=torch.uint8)
            rows[..., first] = rows[..., first] & 0xF0 | nibble
    return rows


def step_tensors(
    layout: LayerLayout, shape: AttentionShape, dtype: torch.dtype, make: Callable[..., Tensor]
) -> dict[str, Tensor]:
    """The bases, shifts and constants that a step of a layer reads, by name, see `checkpoint.layer_tensors`.

    Args:
        make: is called with the sizes of each.
    """
    specs = layer_tensors(layout, shape, biases=())
    kept = [name for name in (*BASES, *FLOAT32) if name in specs]
    return {name: make(*specs[name].shape).to(torch.float32 if specs[name].float32 else dtype) for name in kept}


def zero_scale(layout: LayerLayout, device: torch.device) -> RowScale | None:
    """Scales and codes of latents of joint groups, all zeros: for times and compilers."""
    return RowScale(*torch.zeros(2, layout.key_rank, device=device)) if layout.scaled else None


def kernel(problem: Problem, kernels: LayerKernels | None = None) -> Call:
    """The kernels as a layer of a model calls them."""
    from ...kernels.attention import rows_attention

    p = problem
    launches = kernels or default_layer(p.parameters.layout)
    options: dict[str, Any] = {"rotation": p.rotation, "exact": p.slots, "now": Pass()}
    return lambda: rows_attention(p.query, p.key, p.value, p.parameters, launches, **options)


def pytorch_path(problem: Problem) -> Call:
    """rotor's own path where no kernel serves: keys rebuilt or queries absorbed, a block at a time."""
    p, rotation = problem, None
    if p.rotation is not None:
        cos, sin = when_read(p.rotation, p.parameters.layout.form)
        rotation = cos.to(p.query.dtype), sin.to(p.query.dtype)
    if p.slots is not None:
        held, coded = held_exactly(p.slots, p.kv_len)
        rows = RowKeys(p.query, p.key, p.value, rotation, coded)
        return lambda: attend_to_both(p.query, held, rows, p.parameters)
    return lambda: attention(p.query, p.key, p.value, p.parameters, rotation)


def sdpa(query: Tensor, key: Tensor, value: Tensor) -> Call:
    """PyTorch's attention over [batch_size, heads, tokens, head_dim], causal to the lower right."""
    batch_size, _, seq_len, head_dim = query.shape
    if seq_len == 1:  # query heads that share keys as rows of one query: the keys are read once
        query = query.reshape(batch_size, key.shape[1], -1, head_dim)
    mask = causal_lower_right(seq_len, key.shape[2]) if 1 < seq_len < key.shape[2] else None
    options: dict[str, Any] = {"attn_mask": mask, "is_causal": 1 < seq_len == key.shape[2]}
    options["enable_gqa"] = query.shape[1] != key.shape[1]

    def run() -> Tensor:
        output = functional.scaled_dot_product_attention(query, key, value, **options)
        return output.reshape(batch_size, 1, -1) if seq_len == 1 else output.transpose(1, 2).flatten(2)

    return run


def by_backend(call: Call, backend: SDPBackend) -> Call:
    """A call in which SDPA takes this back end, and no other: a RuntimeError where that has no kernel for the call."""

    def run() -> Tensor:
        with sdpa_kernel(backend):
            return call()

    return run


def other_backends(chosen: Call, phase: str, left_out: dict[str, str]) -> dict[str, Call]:
    """The same attention by each of BACKENDS that runs; why the others do not is in `left_out`."""
    rows = {}
    for name, backend in BACKENDS.items():
        call = by_backend(chosen, backend)
        try:
            call()
        except (torch.AcceleratorError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            reason = str(error).strip().partition(". ")[0]
            left_out[f"{name}, {phase}"] = f"PyTorch has none for this device, dtype or size ({reason})"
        else:
            rows[name] = call
    return rows


def uncompressed_heads(
    shape: AttentionShape, batch_size: int, seq_len: int, kv_len: int, dtype: torch.dtype, generator: torch.Generator
) -> list[Tensor]:
    """Query, key and value [batch_size, heads, tokens, head_dim], as an uncompressed model has them."""
    sizes = (shape.num_heads, seq_len), (shape.num_kv_heads, kv_len), (shape.num_kv_heads, kv_len)
    size = {"generator": generator, "device": generator.device}
    return [torch.randn(batch_size, *of, shape.head_dim, **size).to(dtype) for of in sizes]  # type: ignore[call-overload]


def bench_layer(
    layout: LayerLayout, shape: AttentionShape, load: tuple[int, int, int], dtype: torch.dtype,
    generator: torch.Generator, repetitions: int, left_out: dict[str, str],
) -> dict[str, dict[str, float]]:  # fmt: skip
    """Seconds and error of every row for one layer.

    Args:
        load: batch_size, seq_len, kv_len. left_out: gets the reason of each row that is not measured.
    Raises:
        NumericsError: a row computes something wrong.
    """
    device = generator.device
    query, key, value = uncompressed_heads(shape, *load, dtype, generator)
    last = query[:, :, -CHECKED_QUERIES:].double(), key.double(), value.double()
    rows: dict[str, tuple[Call, Tensor]] = {}
    if layout.exact is not None and load[1] > 1:
        left_out["rotor, prompts"] = "a prompt reads no row: it is SDPA over the keys and values that the model made"
    else:
        problem = random_problem(layout, shape, *load, dtype, generator)
        compressed = problem.unrounded()
        if device.type == "cuda" and layer_served(layout, shape, dtype, device):
            rows["rotor, kernel"] = kernel(problem), compressed
        else:
            left_out["rotor, kernel"] = "the Triton kernels need a CUDA device, and sizes and a dtype that they have"
        rows["rotor, PyTorch path"] = pytorch_path(problem), compressed
    stock, expected = sdpa(query, key, value), sdpa(*last)()
    rows[SDPA] = stock, expected
    for name, call in other_backends(stock, "decode" if load[1] == 1 else "prefill", left_out).items():
        rows[name] = call, expected
    rows |= _baselines(shape, load, dtype, generator, left_out)
    errors = {}
    for name, (call, unrounded) in rows.items():
        errors[name] = relative_error(call(), unrounded)
        if not errors[name] <= TOLERANCE[dtype]:  # NaN is no number below it
            raise NumericsError(
                f"benchmark row {name!r}, {load[1]} of {load[2]} tokens: relative error {errors[name]:.3g} against "
                f"float64, allowed is {TOLERANCE[dtype]:.3g}; nothing is reported.",
                "The row computes something wrong: a defect of rotor, of PyTorch or of the driver; report it.",
            )
    return {name: {**timed(call, device, repetitions), "error": errors[name]} for name, (call, _) in rows.items()}


def _baselines(
    shape: AttentionShape,
    load: tuple[int, int, int],
    dtype: torch.dtype,
    generator: torch.Generator,
    left_out: dict[str, str],
) -> dict[str, tuple[Call, Tensor]]:
    """Steps over other caches, see `baselines`; on a CPU, where no kernel reads these, widened by PyTorch at each step.

    None of a prompt, which attends to the keys and values that the model just made.
    """
    (batch_size, seq_len, kv_len), device = load, generator.device
    on_gpu, rows = device.type == "cuda", dict[str, tuple[Call, Tensor]]()
    if seq_len > 1:
        return rows
    for bits, name in BASELINES.items():
        if not on_gpu and bits == 16:  # that is SDPA
            continue
        if on_gpu and (why := _not_served(shape, dtype, bits, device)):
            left_out[name] = why
            continue
        sizes = shape.num_heads, shape.num_kv_heads, shape.head_dim
        problem = random_baseline(sizes, [kv_len] * batch_size, bits, dtype, generator)
        call = widened(problem)
        if on_gpu:
            from .flash import flash_decoding  # imports Triton

            call = flash_decoding(problem)
        rows[f"{name}, Triton" if on_gpu else f"{name}, widened by PyTorch"] = call, problem.unrounded()
    return rows


def _not_served(shape: AttentionShape, dtype: torch.dtype, bits: int, device: torch.device) -> str:
    """Why Triton's kernel over another cache does not run on a GPU, or nothing."""
    if dtype.itemsize != 2:
        return "the Triton kernels over uncompressed caches compute in 16 bits"
    if shape.head_dim & (shape.head_dim - 1):
        return f"the Triton kernels over uncompressed caches have no heads of {shape.head_dim}"
    if bits == 8 and torch.cuda.get_device_capability(device) < divmod(FP8_CAPABILITY, 10):
        return "this GPU has no e4m3"
    return ""


def relative_error(output: Tensor, unrounded: Tensor) -> float:
    """Relative error of the last queries, those that `unrounded` has; NaN where `output` has one."""
    got = output[:, -unrounded.shape[1] :].double()
    return float((got - unrounded).norm() / unrounded.norm().clamp(min=1e-30))


def timed(call: Call, device: torch.device, repetitions: int) -> dict[str, float]:
    """Median and quartiles in seconds, with cold caches: on a GPU by triton.testing, on a CPU by timeit."""
    if device.type == "cuda":
        from triton.testing import do_bench

        return quartiles([1e-3 * of for of in do_bench(call, rep=10 * repetitions, return_mode="all")])
    flush = torch.ones(FLUSH_BYTES // 4)
    call()
    return quartiles(Timer(call, setup=flush.sum).repeat(repetitions, 1))
