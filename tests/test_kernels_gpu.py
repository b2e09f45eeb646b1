"""The kernels on a GPU at real sizes: `pytest -m gpu`. The same checks as in the interpreter, in every dtype."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from coded import coded_layer, random_coded_case, steps_of
from coded_models import write_pair
from kernel_checks import check_decode, check_prefill, relative_error
from ragged import layer, random_case

from rotor.format.columns import Columns
from rotor.kernels.decode.launch import decode_attention
from rotor.kernels.key_ranges import DecodeKeys
from rotor.kernels.layer_table import layer_parts
from rotor.kernels.projection.append import pack_rows
from rotor.kernels.projection.rotation import rotate_and_project
from rotor.kernels.reference import project_keys, rotate
from rotor.kernels.rows import LayerColumns, key_columns, pack_layer, unpack_layer
from rotor.kernels.truth import Sequence

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
HEAD_DIM = 128
LAYERS = {
    "none per head": (layer("none", 1, *[(96, 80)] * 2, *[(64, 64)] * 3, (48, 40), (32, 16), (8, 24)), 4),
    "none one latent": (layer("none", 8, (256, 256)), 4),
    "none seven rows": (layer("none", 1, *[(64, 48)] * 4), 7),
    "pre per head": (layer("pre", 1, *[(64, 64)] * 4, (48, 40), (32, 16)), 4),
    "pre pairs": (layer("pre", 2, (128, 96), (64, 64)), 4),
    "pre one latent": (layer("pre", 8, (256, 256)), 4),
}

MIXED, FOUR = Columns(n16=8, n8=16, n4=32, n2=64), Columns(n4=64)
CODED = {
    "none per head": (coded_layer("none", 1, (MIXED, FOUR), (FOUR, FOUR), (Columns(n8=12), Columns(n2=48))), 4),
    "none one latent": (coded_layer("none", 8, (Columns(n8=32, n4=128, n2=64), Columns(n8=16, n4=64, n2=128))), 4),
    "pre per head": (coded_layer("pre", 1, (MIXED, FOUR), (FOUR, MIXED), (Columns(n8=12), Columns(n2=48))), 4),
    "pre one latent": (coded_layer("pre", 8, (Columns(n8=16, n4=64, n2=64), Columns(n8=32, n4=128, n2=64))), 4),
}


def coded_case_of(name: str, dtype: torch.dtype, batch_size: int, seq_len: int, kv_len: int):
    layout, heads_per_kv = CODED[name]
    return random_coded_case(layout, heads_per_kv, HEAD_DIM, batch_size, seq_len, kv_len, dtype).to("cuda")


def case_of(name: str, dtype: torch.dtype, batch_size: int, seq_len: int, kv_len: int):
    layout, heads_per_kv = LAYERS[name]
    return random_case(layout, heads_per_kv, HEAD_DIM, batch_size, seq_len, kv_len).to("cuda", dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("schedule", ["stream", "lpt", "none"])
@pytest.mark.parametrize("name", LAYERS)
def test_decode_of_different_lengths(name, schedule, dtype) -> None:
    lengths = (1, 63, 64, 65, 0, 257, 1000, 4096)
    case = case_of(name, dtype, len(lengths), 1, max(lengths))
    check_decode(case, [Sequence(1 if n else 0, 0, n) for n in lengths], schedule=schedule)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_size", [16, 64, 256])
@pytest.mark.parametrize("name", ["none per head", "pre per head"])
def test_decode_of_poisoned_pages_with_padding(name, page_size, dtype) -> None:
    case = case_of(name, dtype, 3, 1, 2000)
    sequences = [Sequence(1, 0, 2000), Sequence(1, 777, 2000), Sequence(1, 5, 1234)]
    check_decode(case, sequences, page_size=page_size)


@pytest.mark.parametrize("programs", [1, 3, 1000])
@pytest.mark.parametrize("name", LAYERS)
def test_decode_in_forced_slices(name, programs) -> None:
    check_decode(case_of(name, torch.float16, 1, 1, 1500), [Sequence(1, 0, 1500)], programs=programs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["none per head", "pre per head"])
def test_decode_with_masks_and_softcap(name, dtype) -> None:
    case = case_of(name, dtype, 2, 1, 900)
    mask = torch.rand(2, 900, generator=torch.Generator().manual_seed(0)) < 0.5
    check_decode(case, [Sequence(1, 0, 900)] * 2, mask=mask)
    check_decode(case, [Sequence(1, 0, 900)] * 2, softcap=3.0)


@pytest.mark.parametrize("name", ["none per head", "pre pairs"])
def test_decode_at_131072_tokens(name) -> None:
    check_decode(case_of(name, torch.bfloat16, 1, 1, 131072), [Sequence(1, 0, 131072)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_prefill_of_different_lengths_against_a_cache(name, dtype) -> None:
    case = case_of(name, dtype, 3, 300, 1100)
    for rebuilt in (False, True) if name.startswith("pre") else (False,):
        check_prefill(case, [Sequence(300, 0, 1100), Sequence(129, 50, 900), Sequence(1, 0, 64)], rebuilt=rebuilt)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["none per head", "pre per head"])
def test_prefill_with_pages_windows_masks_and_softcap(name, dtype) -> None:
    case = case_of(name, dtype, 2, 500, 500)
    sequences = [Sequence(500, 0, 500), Sequence(500, 123, 500)]
    check_prefill(case, sequences, page_size=16)
    check_prefill(case, sequences, window=100)
    check_prefill(case, sequences, softcap=3.0)
    mask = torch.rand(2, 500, 500, generator=torch.Generator().manual_seed(0)) < 0.5
    for rebuilt in (False, True) if name.startswith("pre") else (False,):
        check_prefill(case, sequences, mask=mask, rebuilt=rebuilt)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seq_len", [1, 300])
def test_rotation(seq_len, dtype) -> None:
    layout = layer("post", 2, (128, 8), (80, 8))
    case = random_case(layout, 4, HEAD_DIM, 3, seq_len, 400)
    generator = torch.Generator().manual_seed(0)
    key = torch.randn(3, 4, seq_len, HEAD_DIM, generator=generator)
    angle = torch.randn(3, seq_len, HEAD_DIM // 2, generator=generator).repeat(1, 1, 2)
    exact = [x.to(dtype).double() for x in (case.query, key, angle.cos(), angle.sin(), case.query_basis)]
    query, key, cos, sin, basis = (x.to("cuda", dtype) for x in exact)
    _, got = rotate_and_project(query.transpose(1, 2), key.transpose(1, 2), cos, sin, layout, 4, basis, basis)
    turned = rotate(exact[1], exact[2].unsqueeze(1), exact[3].unsqueeze(1))
    expected = project_keys(turned, exact[4], layout)[:, 0]
    plain = project_keys(rotate(key, cos.unsqueeze(1), sin.unsqueeze(1)), basis, layout)[:, 0]
    assert relative_error(got, expected) <= max(2 * relative_error(plain, expected), 4e-6)


@pytest.mark.parametrize("schedule", ["stream", "lpt", "none"])
@pytest.mark.parametrize("name", ["none per head", "pre pairs"])
def test_a_captured_step_follows_lengths_that_change(name, schedule) -> None:
    """Slices are computed on the device, inside of the graph, from lengths that change between replays."""
    case = case_of(name, torch.float16, 2, 1, 3000)
    layout = case.layout
    parts = layer_parts(layout, case.heads_per_kv, HEAD_DIM)
    first = torch.zeros(2, dtype=torch.int32, device="cuda")
    end = torch.tensor([3000, 100], dtype=torch.int32, device="cuda")
    query = case.query[:, 0] if layout.domain == "none" else case.query[:, :, 0]

    def step() -> torch.Tensor:
        return decode_attention(
            query,
            case.key,
            case.value,
            parts,
            DecodeKeys(first, end),
            case.heads_per_kv,
            case.scaling,
            query_basis=case.query_basis,
            key_rotation=case.key_rotation,
            schedule=schedule,
        )[0]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for lengths in ([3000, 100], [1, 2999], [700, 0], [64, 65]):
        end.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        assert torch.equal(captured, step())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("schedule", ["stream", "lpt", "none"])
@pytest.mark.parametrize("name", CODED)
def test_decode_of_rows_of_codes(name, schedule, dtype) -> None:
    lengths = (1, 63, 64, 65, 0, 257, 1000, 4096)
    case = coded_case_of(name, dtype, len(lengths), 1, max(lengths))
    check_decode(case, [Sequence(1 if n else 0, 0, n) for n in lengths], schedule=schedule)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CODED)
def test_decode_of_codes_in_poisoned_pages_with_masks_and_softcap(name, dtype) -> None:
    case = coded_case_of(name, dtype, 3, 1, 2000)
    sequences = [Sequence(1, 0, 2000), Sequence(1, 777, 2000), Sequence(1, 5, 1234)]
    for page_size in (16, 256):
        check_decode(case, sequences, page_size=page_size)
    mask = torch.rand(3, 2000, generator=torch.Generator().manual_seed(0)) < 0.5
    check_decode(case, sequences, mask=mask)
    check_decode(case, sequences, softcap=3.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CODED)
def test_prefill_against_a_cache_of_codes(name, dtype) -> None:
    case = coded_case_of(name, dtype, 3, 300, 1100)
    sequences = [Sequence(300, 0, 1100), Sequence(129, 50, 900), Sequence(1, 0, 64)]
    mask = torch.rand(3, 300, 1100, generator=torch.Generator().manual_seed(0)) < 0.5
    for rebuilt in (False, True) if name.startswith("pre") else (False,):
        check_prefill(case, sequences, rebuilt=rebuilt)
        check_prefill(case, sequences, rebuilt=rebuilt, mask=mask)
    check_prefill(case, sequences, page_size=16)
    check_prefill(case, sequences, window=100)
    check_prefill(case, sequences, softcap=3.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CODED)
def test_rows_are_packed_as_pytorch_packs_them(name, dtype) -> None:
    columns = LayerColumns.of(CODED[name][0])
    generator, latents = torch.Generator().manual_seed(0), []
    for side in (columns.key, columns.value):
        steps = steps_of(list(side))
        latents.append((1.5 * torch.randn(3, 333, len(steps), generator=generator) * steps).to(dtype))
    got = pack_rows(latents[0].cuda(), latents[1].cuda(), columns)
    assert torch.equal(got[0].cpu(), pack_layer(latents[0], columns.key))
    assert torch.equal(got[1].cpu(), pack_layer(latents[1], columns.value))


@pytest.mark.parametrize("cache", [None, "static", "offloaded"])
@pytest.mark.parametrize("case", [("llama", "post", 1), ("llama", "pre", 2), ("gpt2", "none", 1)], ids=str)
def test_a_model_with_rows_of_codes(case, cache, tiny, tmp_path, monkeypatch) -> None:
    pair = write_pair(tiny(case[0]), tmp_path, *case[1:])
    model = pair.load().cuda()
    prompt = torch.randint(1, 4096, (2, 40), generator=torch.Generator().manual_seed(5)).cuda()
    mask = torch.ones_like(prompt)
    mask[0, :7] = 0
    logits, stored = {}, {}
    for choice in ("reference", "triton"):
        monkeypatch.setenv("ROTOR_ATTENTION", choice)
        output = model.generate(
            prompt,
            attention_mask=mask,
            min_new_tokens=5,
            max_new_tokens=5,
            do_sample=False,
            pad_token_id=0,
            cache_implementation=cache,
            disable_compile=True,
            output_logits=True,
            return_dict_in_generate=True,
        )
        logits[choice] = output.logits[0]  # later ones follow the tokens chosen
        rows = output.past_key_values.layers[0].keys[:, :, 7:40]
        stored[choice] = unpack_layer(rows.cpu(), key_columns(pair.layouts[0]), torch.float32)
    assert relative_error(logits["triton"], logits["reference"].double().cpu()) < 0.05
    difference = (stored["triton"] - stored["reference"]).abs()
    assert (difference > 0.5).float().mean() < 0.01  # a number on the edge of two codes
