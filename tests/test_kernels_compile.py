"""What the compiler makes of the kernels for sm_80 and sm_90, with no GPU: copies in flight, wide loads, no spills."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from ragged import layer

pytest.importorskip("triton", reason="triton is not installed")

from rotor.format.kernel_config import SlowPlanes
from rotor.format.layout import AttentionShape
from rotor.kernels.ahead import Resources, Variant, compile_variant
from rotor.kernels.decode.kernel import decode_kernel
from rotor.kernels.decode.longest_first import assign_variant
from rotor.kernels.decode.tile_sizes import decode_shared_bytes
from rotor.kernels.decode.variants import decode_variants
from rotor.kernels.defaults import default_config, default_layer, with_slow_planes
from rotor.kernels.gpu import Gpu
from rotor.kernels.layer_table import layer_parts
from rotor.kernels.prefill.few_kernel import few_kernel
from rotor.kernels.prefill.few_tile_sizes import few_shared_bytes
from rotor.kernels.prefill.kernel import prefill_kernel
from rotor.kernels.prefill.rebuild import rebuild_kernel
from rotor.kernels.prefill.tile_sizes import prefill_shared_bytes
from rotor.kernels.prefill.variants import prefill_variants
from rotor.kernels.projection.rotation import rotation_variants
from rotor.kernels.specialise import model_variants
from rotor.kernels.widths import chunks, padded

HEADS_PER_KV, HEAD_DIM = 4, 128
MENU = {
    "none 64+64": layer("none", 1, (64, 64)),
    "none 96+96": layer("none", 1, (96, 96)),
    "none ragged": layer("none", 1, (112, 80), (80, 48), (48, 64), (16, 16), (8, 24)),
    "none one latent": layer("none", 8, (256, 256)),
    "pre 80+48": layer("pre", 1, (80, 48)),
    "pre ragged": layer("pre", 1, (128, 96), (64, 128), (16, 16)),
    "pre pairs": layer("pre", 2, (128, 128)),
    "pre one latent": layer("pre", 8, (256, 256)),
    "pre wide": layer("pre", 8, (512, 512)),
}


def check(variant: Variant, capability: int, copies: bool = True) -> Resources:
    """Wide loads and no spills; copies in flight where latents are read."""
    resources = compile_variant(variant, capability)
    assert (resources.scalar_loads, resources.spill_bytes) == (0, 0)
    assert resources.async_copies > 0 or not copies
    return resources


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", MENU)
def test_decode(name: str, capability: int) -> None:
    page = 16 if "ragged" in name else 0
    parts = layer_parts(MENU[name], HEADS_PER_KV, HEAD_DIM)
    settings = {"page": page, "mask": True, "gpu": Gpu.of_capability(capability)}
    attention, combine, *ranges = decode_variants(parts, HEADS_PER_KV, HEAD_DIM, torch.bfloat16, **settings)
    for variant in ranges:
        check(variant, capability, copies=False)
    resources = check(attention, capability)
    assert resources.matrix_products > 0
    assert resources.shared_bytes <= decode_shared_bytes(attention.constants | attention.options, 2)
    check(combine, capability, copies=False)
    if attention.constants["COLUMNS"]:
        assert {"key", "basis"} <= resources.async_bytes.keys()
        assert resources.async_bytes["key"] == (16 if capability == 90 else 8)


def test_one_latent_reads_its_basis_for_64_keys_on_hopper() -> None:
    """Of 129 columns and more, whose tile of 64 keys would not stay in registers."""
    parts = layer_parts(MENU["pre one latent"], HEADS_PER_KV, HEAD_DIM)
    found = [
        decode_variants(parts, HEADS_PER_KV, HEAD_DIM, torch.bfloat16, gpu=Gpu.of_capability(c))[0] for c in (80, 90)
    ]
    assert [(v.constants["TILE"], v.constants["COLUMNS"]) for v in found] == [(16, 0), (64, 64)]


def test_slow_planes_are_interpolated_on_hopper() -> None:
    """Without spills, with the queries that are absorbed copied asynchronously; beside the kernel of short caches."""
    kernels = with_slow_planes(default_layer(MENU["pre one latent"], HEAD_DIM), SlowPlanes(32, 256, 3))
    parts = layer_parts(MENU["pre one latent"], HEADS_PER_KV, HEAD_DIM, kernels)
    by_gpu = {}
    for capability in (80, 90):
        variants = decode_variants(parts, HEADS_PER_KV, HEAD_DIM, torch.bfloat16, gpu=Gpu.of_capability(capability))
        by_gpu[capability] = [v for v in variants if v.kernel is decode_kernel]
    assert [len(v.constants["NODES"]) for v in by_gpu[80]] == [0]
    assert [len(v.constants["NODES"]) for v in by_gpu[90]] == [3, 0]
    variant = by_gpu[90][0]
    assert (variant.constants["TILE"], variant.constants["FAST"], variant.constants["FREQUENCIES"]) == (128, 32, 32)
    resources = compile_variant(variant, 90)
    assert resources.spill_bytes == 0
    assert resources.scalar_loads == 4  # of queries that are absorbed: both halves, twice 16 planes, one a thread
    assert {"key", "basis", "absorbed"} <= resources.async_bytes.keys()
    assert resources.shared_bytes <= decode_shared_bytes(variant.constants | variant.options, 2)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    "name", ["none 64+64", "none 96+96", "none one latent", "pre 80+48", "pre one latent", "pre wide"]
)
@pytest.mark.parametrize("page", [0, 16])
def test_prefill(name: str, page: int, capability: int) -> None:
    """With a mask; and of packed queries over pages."""
    settings = {"page": page, "mask": not page, "gpu": Gpu.of_capability(capability)}
    for variant in prefill_variants(MENU[name], HEADS_PER_KV, HEAD_DIM, torch.bfloat16, **settings):
        attends = variant.kernel in (few_kernel, prefill_kernel, rebuild_kernel)
        resources = check(variant, capability, copies=attends)
        assert (resources.matrix_products > 0) == attends
        if variant.kernel is prefill_kernel:
            assert resources.shared_bytes <= prefill_shared_bytes(variant.constants | variant.options, 2)
        elif variant.kernel is few_kernel:
            assert resources.shared_bytes <= few_shared_bytes(variant.constants | variant.options, 2)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", ["none ragged", "pre ragged"])
def test_groups_of_all_widths_are_served_by_one_kernel_of_few_queries(name: str, capability: int) -> None:
    """With as many bodies as decoding has, without spills: for the fewest rows, and for more."""
    settings = {"mask": True, "gpu": Gpu.of_capability(capability)}
    found = [
        v
        for v in prefill_variants(MENU[name], HEADS_PER_KV, HEAD_DIM, torch.bfloat16, **settings)
        if v.kernel is few_kernel and not v.constants["REBUILT"]
    ]
    bodies = layer_parts(MENU[name], HEADS_PER_KV, HEAD_DIM).bodies
    assert [(v.constants["BODIES"], v.constants["ROWS"]) for v in found] == [
        (bodies, 16),
        (bodies, 32 if capability == 80 and name == "pre ragged" else 64),
    ]
    for variant in found:
        resources = check(variant, capability)
        assert resources.shared_bytes <= few_shared_bytes(variant.constants | variant.options, 2)


def test_the_greedy_assignment() -> None:
    check(assign_variant(5, 3), 90, copies=False)


@pytest.mark.parametrize("capability", [80, 90])
def test_rotation(capability: int) -> None:
    for variant in rotation_variants(layer("post", 1, (80, 48), (64, 64)), HEADS_PER_KV, HEAD_DIM, torch.bfloat16):
        assert check(variant, capability, copies=False).matrix_products > 0


def test_every_kernel_of_a_configuration_is_listed_once() -> None:
    shape = AttentionShape(num_layers=3, num_heads=8, num_kv_heads=2, head_dim=64, hidden_size=512)
    post, pre = layer("post", 1, (32, 16), (16, 16)), layer("pre", 2, (64, 48))
    layouts = [post, pre, post]
    config = default_config(layouts, shape)
    names = [v.name for v in model_variants(config, layouts, shape, torch.float16, masks=(False,))]
    assert sorted(names) == [
        "combine 16 rows 16",
        "combine 16 rows 64",
        "decode post 1x4 rows 32+16 16+16 stream",
        "decode pre 2x4 rows 64+64 stream",
        "few post 1x4 rows 32+16 16+16, 16 at a time",
        "few post 1x4 rows 32+16 16+16, 64 at a time",
        "few pre 2x4 rows 64+64 rebuilt, 16 at a time",
        "few pre 2x4 rows 64+64 rebuilt, 64 at a time",
        "few pre 2x4 rows 64+64, 16 at a time",
        "few pre 2x4 rows 64+64, 64 at a time",
        "join 16/4 rows 16",
        "join 16/4 rows 64",
        "join 64/4 rows 16",
        "join 64/4 rows 64",
        "plan 16/4 rows, 32 keys",
        "plan 16/4 rows, 64 keys",
        "plan 64/4 rows, 32 keys",
        "plan 64/4 rows, 64 keys",
        "prefill post 1x4 rows 16+16",
        "prefill post 1x4 rows 16+16, pieces",
        "prefill post 1x4 rows 32+16",
        "prefill post 1x4 rows 32+16, pieces",
        "prefill pre 2x4 rows 64 rebuilt+48",
        "prefill pre 2x4 rows 64 rebuilt+48, pieces",
        "prefill pre 2x4 rows 64+48",
        "rebuild 2 heads of 64",
        "rotation 1x4 rows, decode",
        "rotation 1x4 rows, prefill",
        "tiles of 128 keys",
        "tiles of 64 keys",
    ]


def test_widths_as_powers_of_two() -> None:
    assert [chunks(w) for w in (8, 16, 24, 48, 80, 96, 112, 128, 160, 512)] == [
        (16, 0),
        (16, 0),
        (32, 0),
        (32, 16),
        (64, 16),
        (64, 32),
        (128, 0),
        (128, 0),
        (128, 32),
        (512, 0),
    ]
    assert [padded(w) for w in (1, 16, 17, 80, 128, 129)] == [16, 16, 32, 128, 128, 256]


def test_spills_and_narrow_loads_would_be_seen() -> None:
    """The same decode kernel with what it must not have: widths not known to be aligned, and too few warps."""
    parts = layer_parts(MENU["pre one latent"], HEADS_PER_KV, HEAD_DIM)
    variant = decode_variants(parts, HEADS_PER_KV, HEAD_DIM, torch.bfloat16)[0]
    worse = SimpleNamespace(
        source=lambda: type(variant)(
            variant.name,
            variant.kernel,
            variant.pointers,
            {**variant.constants, "ALIGN": 1, "TILE": 64, "COLUMNS": 0},
            variant.reals,
        ).source(),
        options={"num_warps": 4, "num_stages": 2},
    )
    resources = compile_variant(worse, 80)  # type: ignore[arg-type]
    assert resources.scalar_loads > 0
    assert resources.spill_bytes > 0
