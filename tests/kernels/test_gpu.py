"""The kernels on a GPU: bfloat16 by value against float64, pages, graphs, launches and memory of a step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.kernel_cases import (
    Case,
    CodedRow,
    NumberRow,
    causal,
    in_pages,
    layer,
    random_case,
    random_scale,
    rotation_table,
    shape_of,
)

from rotor.checkpoint.layout import POST_ROPE, PRE_ROPE, AttentionShape, KeyForm, LayerLayout
from rotor.checkpoint.rows import RowScale
from rotor.kernels.dispatch import default_layer
from rotor.kernels.parameters import pack_layer, read_class
from rotor.kernels.reference import attention as reference
from rotor.kernels.rotary import when_read

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MIXED = CodedRow(n16=1, n12=1, n8=5, n6=4, n4=37, n2=5)
CASES = {
    "joint, blocks": layer(KeyForm(64), 1, MIXED, MIXED, CodedRow(n4=64)),
    "joint, two heads": layer(KeyForm(64), 2, CodedRow(n4=128), CodedRow(n4=96)),
    "joint, after RoPE": layer(POST_ROPE, 2, MIXED, MIXED),
    "joint, before RoPE": layer(PRE_ROPE, 1, MIXED, MIXED),
    "apart, blocks of 16": layer(KeyForm(16), 1, (MIXED, CodedRow(n4=32)), (MIXED, CodedRow(n4=32))),
    "apart": layer(POST_ROPE, 1, (MIXED, CodedRow(n4=32)), (MIXED, CodedRow(n4=32))),
    "numbers": layer(POST_ROPE, 1, (NumberRow(40), NumberRow(24)), (NumberRow(8), NumberRow(64))),
    "numbers, blocks": layer(KeyForm(64), 2, (NumberRow(40), NumberRow(24)), (NumberRow(8), NumberRow(64))),
    "no RoPE": layer(POST_ROPE, 2, MIXED, MIXED),
}
DTYPES = (torch.bfloat16, torch.float16)


def shape_for(name: str, heads_per_kv: int = 4, head_dim: int = 64) -> AttentionShape:
    layout = CASES[name]
    rotary = 0 if name == "no RoPE" else 64
    return shape_of(layout.group_size * len(layout.groups), heads_per_kv, head_dim, rotary)


def on_gpu(name: str, seq_len: int, kv_len: int, dtype: torch.dtype, batch_size: int = 3, **rest) -> tuple[Case, Case]:
    """The case on the GPU, and the same rounded numbers on the CPU for float64."""
    case = random_case(CASES[name], shape_for(name), batch_size, seq_len, kv_len, **rest)
    rounded = case.to("cpu", dtype)
    return rounded.to("cuda", dtype), rounded


def within(got: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor, dtype: torch.dtype) -> None:
    """By the worst row: at most twice plain PyTorch's error in the same dtype, or a few of its roundings."""
    floor = {torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    scale = exact.norm(dim=-1).clamp(min=1e-6)
    error, allowed = ((x.cpu().double() - exact).norm(dim=-1) / scale for x in (got, plain))
    assert not got.isnan().any()
    assert float(error.max()) <= max(2 * float(allowed.max()), floor)


def in_pytorch(case: Case, mask: torch.Tensor | None) -> torch.Tensor:
    rotation = None
    if case.rotation is not None:
        rotation = tuple(t[: case.key.shape[1]] for t in when_read(case.rotation, case.parameters.layout.form))
    rows = case.key.unsqueeze(1), case.value.unsqueeze(1)
    return reference.attention(case.query, *rows, case.parameters, rotation, mask)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seq_len", [1, 5, 70])
@pytest.mark.parametrize("name", CASES)
def test_masks_of_any_pattern(name, seq_len, dtype) -> None:
    from rotor.kernels.attention import rows_attention

    gpu, cpu = on_gpu(name, seq_len, 1003, dtype)
    allowed = causal(3, seq_len, 1003, window=900).clone()
    allowed[1, :, :333] = False
    allowed[2, :, 200:217] = False
    mask = allowed[:, None].cuda()
    kernels = default_layer(CASES[name])
    rows = gpu.key.unsqueeze(1), gpu.value.unsqueeze(1)
    got = rows_attention(gpu.query, *rows, gpu.parameters, kernels, rotation=gpu.rotation, attention_mask=mask)
    within(got, cpu.exact(allowed)[0], in_pytorch(gpu, mask), dtype)


@pytest.mark.parametrize("seq_len", [1, 3])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", ["joint, blocks", "joint, two heads", "joint, after RoPE"])
def test_tiles_and_slices_in_which_a_row_sees_no_key(name, head_dim, seq_len) -> None:
    """A hole of whole tiles; a window whose last queries see nothing of the first tile."""
    from rotor.kernels.attention import rows_attention

    layout, shape = CASES[name], shape_for(name, 2, head_dim)
    cpu = random_case(layout, shape, 2, seq_len, 1003).to("cpu", torch.bfloat16)
    gpu, kernels = cpu.to("cuda", torch.bfloat16), default_layer(layout)
    rows = gpu.key.unsqueeze(1), gpu.value.unsqueeze(1)
    hole = causal(2, seq_len, 1003).clone()
    hole[:, :, 4:960] = False
    for allowed in (hole, causal(2, seq_len, 1003, window=42)):
        mask = allowed[:, None].cuda()
        got = rows_attention(gpu.query, *rows, gpu.parameters, kernels, rotation=gpu.rotation, attention_mask=mask)
        within(got, cpu.exact(allowed)[0], in_pytorch(gpu, mask), torch.bfloat16)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("name", ["joint, two heads", "numbers", "no RoPE"])
def test_prompts(name, softcap) -> None:
    from rotor.kernels.attention import rows_attention

    gpu, cpu = on_gpu(name, 301, 301, torch.bfloat16, softcap=softcap)
    rows = gpu.key.unsqueeze(1), gpu.value.unsqueeze(1)
    got = rows_attention(gpu.query, *rows, gpu.parameters, default_layer(CASES[name]), rotation=gpu.rotation)
    within(got, cpu.exact(causal(3, 301, 301))[0], in_pytorch(gpu, None), torch.bfloat16)


def paged(gpu: Case, kv_lens: list[int], page_size: int) -> dict:
    pages = in_pages(gpu.to("cpu", gpu.query.dtype), kv_lens, page_size)
    return {
        "key": pages.key.cuda(), "value": pages.value.cuda(), "block_table": pages.block_table.cuda(),
        "kv_lens": pages.kv_lens.cuda(),
    }  # fmt: skip


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("news", [(1, 1, 1), (3, 1, 2), (70, 0, 300)])
@pytest.mark.parametrize("name", CASES)
def test_pages(name, news, window) -> None:
    """Permuted and poisoned pages; the block table ends where the longest sequence does."""
    from rotor.kernels.attention import attend_pages

    lengths = [500, 64, 1003]
    gpu, cpu = on_gpu(name, 1003, 1003, torch.bfloat16)
    packed, exact, plain = [], [], []
    for b, (length, new) in enumerate(zip(lengths, news, strict=True)):
        for side, found in ((gpu, plain), (cpu, exact)):
            at = slice(length - new, length)
            own = side.query[b : b + 1, at] if side.query.dim() == 3 else side.query[b : b + 1, :, at]
            rows = side.key[b : b + 1, :length], side.value[b : b + 1, :length]
            part = Case(side.parameters, own, *rows, side.rotation)
            allowed = causal(1, new, length, window)
            if side is gpu:
                packed.append(own[0] if own.dim() == 3 else own[0].transpose(0, 1))
                found.append(in_pytorch(part, allowed[:, None].cuda())[0])
            else:
                found.append(part.exact(allowed)[0][0])
    got = attend_pages(
        torch.cat(packed), parameters=gpu.parameters, kernels=default_layer(CASES[name]), max_query_len=max(news),
        query_start_loc=torch.tensor([0, *news]).cumsum(0).int().cuda(), max_kv_len=1003, rotation=gpu.rotation,
        window=window, **paged(gpu, lengths, 16),
    )  # fmt: skip
    within(got, torch.cat(exact), torch.cat(plain), torch.bfloat16)


@pytest.mark.parametrize("name", CASES)
def test_a_graph_serves_other_lengths_and_fewer_sequences(name) -> None:
    """A graph captured for 4 sequences of up to 1003 keys: replayed without recapture."""
    from rotor.kernels.attention import attend_pages

    gpu, _ = on_gpu(name, 1, 1003, torch.bfloat16, batch_size=4)
    inputs = paged(gpu, [1003] * 4, 16)
    query = (gpu.query if gpu.query.dim() == 3 else gpu.query.transpose(1, 2)).flatten(0, 1).contiguous()
    start = torch.arange(5, dtype=torch.int32, device="cuda")
    options = {"parameters": gpu.parameters, "kernels": default_layer(CASES[name]), "max_query_len": 1}
    options |= {"query_start_loc": start, "max_kv_len": 1003, "rotation": gpu.rotation}
    with torch.inference_mode():
        attend_pages(query, **inputs, **options)  # compiles, and makes tables
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = attend_pages(query, **inputs, **options)
        for lengths in ([1003] * 4, [1, 700, 64, 65], [40, 2, 0, 0]):
            inputs["kv_lens"].copy_(torch.tensor(lengths))
            graph.replay()
            expected = attend_pages(query, **inputs, **options)
            live = [b for b, length in enumerate(lengths) if length]
            torch.testing.assert_close(output[live], expected[live], atol=2e-2, rtol=2e-2)


def on_device(scale: RowScale | None, device: str) -> RowScale | None:
    """On a device, all in float32."""
    return scale and RowScale(*(None if own is None else own.to(device) for own in scale))


def step(layout: LayerLayout, shape: AttentionShape) -> tuple:
    """One step of a layer, and the names and tensors that it takes."""
    from rotor.kernels.append import append
    from rotor.kernels.attention import attend_pages

    case = random_case(layout, shape, 2, 1, 640).to("cuda", torch.bfloat16)
    pages, kernels = paged(case, [640, 333], 64), default_layer(layout)
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device="cuda").bfloat16()

    key, query = normal(2, 1, shape.num_kv_heads, shape.head_dim), normal(2, 1, shape.num_heads, shape.head_dim)
    value, basis = normal(2, 1, layout.value_rank), normal(layout.group_size * shape.head_dim, layout.key_rank)
    shift = torch.zeros(layout.key_rank, device="cuda")
    table = pages["block_table"]
    last = pages["kv_lens"].long() - 1
    slots = table.gather(1, (last // 64)[:, None])[:, 0].long() * 64 + last % 64
    start = torch.arange(3, dtype=torch.int32, device="cuda")
    rotation = tuple(t.cuda() for t in rotation_table(800, shape.rotary_dim))
    scale = on_device(random_scale(layout, torch.Generator().manual_seed(1)), "cuda")

    def call() -> torch.Tensor:
        made = append(
            key, value, layout, shape, query=query, key_basis=basis, key_shift=shift, rotation=rotation,
            index=last[:, None], out=(pages["key"], pages["value"]), slots=slots, scale=scale,
        )  # fmt: skip
        rotated = made.query.transpose(1, 2).flatten(0, 1)
        return attend_pages(
            rotated, parameters=case.parameters, kernels=kernels, query_start_loc=start, max_query_len=1,
            max_kv_len=640, rotation=case.rotation, **pages,
        )  # fmt: skip

    return call


@pytest.mark.parametrize("name", ["joint, two heads", "joint, blocks", "apart"])
def test_a_step_is_few_launches_and_allocates_its_outputs(name) -> None:
    call = step(CASES[name], replace(shape_for(name), key_norm=True))
    with torch.inference_mode():
        call()
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            output = call()
            torch.cuda.synchronize()
        made = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    names = [event.name for event in profile.events() if event.name.endswith("_kernel")]
    assert len(names) <= (5 if CASES[name].scaled else 4), names
    assert made <= 4  # the rotated queries, latents, the output, and ranges that a step's layers share
    assert output.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["joint, two heads", "joint, after RoPE", "apart, blocks of 16", "numbers, blocks"])
def test_append(name, dtype) -> None:
    """Rows by the numbers that they stand for: at most twice plain PyTorch's error."""
    from rotor.kernels.append import append
    from rotor.kernels.rotary import rotate, within_blocks

    layout, shape = CASES[name], replace(shape_for(name), key_norm=True)
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    key, value = normal(2, 77, shape.num_kv_heads, shape.head_dim), normal(2, 77, layout.value_rank)
    basis = normal(layout.group_size * shape.head_dim, layout.key_rank)
    shift = torch.randn(layout.key_rank, generator=generator) if layout.coded else None
    rotation, index = rotation_table(200, 64), torch.arange(100, 177)
    scale = random_scale(layout, generator)

    def rows(exact: bool) -> torch.Tensor:
        kind = torch.float64 if exact else dtype
        tables = tuple(t.to(torch.float64 if exact else torch.float32) for t in rotation)
        cos, sin = (
            (tables[0][index], tables[1][index])
            if layout.rope_block is None
            else within_blocks(tables, index, layout.form)
        )
        stored = rotate(key.to(kind).transpose(1, 2), cos.to(kind), sin.to(kind))
        part = value.to(kind).unsqueeze(1) if layout.joint else None
        moved = None if shift is None else shift.to(torch.float64 if exact else torch.float32)
        latents = reference.project_keys(stored, basis.to(kind), layout, moved, part)
        return pack_layer(latents, layout, True, scale)

    got = append(
        key.cuda(), value.cuda(), layout, shape, key_basis=basis.cuda(),
        key_shift=None if shift is None else shift.cuda(), rotation=tuple(t.cuda() for t in rotation),
        index=index.cuda(), scale=on_device(scale, "cuda"),
    ).key.cpu()  # fmt: skip
    sides = [got, rows(True), rows(False)]
    for cls in layout.classes(dtype.itemsize):
        of_class = [read_class(x, cls.key, cls.key_byte, cls.key_stride, cls.count, torch.float64) for x in sides] if (
            layout.coded
        ) else [x[..., cls.key_rank : cls.key_rank + cls.count * cls.key.rank].double() for x in sides]  # fmt: skip
        error, allowed = (float((x - of_class[1]).norm() / of_class[1].norm()) for x in (of_class[0], of_class[2]))
        assert error <= max(2 * allowed, 2e-2 if layout.coded else 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["joint, blocks", "joint, two heads", "apart, blocks of 16", "numbers, blocks"])
def test_queries_are_absorbed_beside_rows(name, dtype) -> None:
    """By programs of the launch that makes the rows of a step, as by one of their own."""
    from support.absorbed import check_absorbing

    check_absorbing(CASES[name], shape_for(name), dtype, torch.device("cuda"))
