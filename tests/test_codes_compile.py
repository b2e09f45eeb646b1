"""What the compiler makes of the kernels over rows of codes: wide loads of words, ahead of their use, and no spills."""

from __future__ import annotations

import pytest
import torch
from coded import coded_layer

pytest.importorskip("triton", reason="triton is not installed")

from rotor.format.columns import Columns
from rotor.kernels.ahead import Resources, Variant, compile_variant
from rotor.kernels.decode.tile_sizes import decode_shared_bytes
from rotor.kernels.decode.variants import decode_variants
from rotor.kernels.gpu import Gpu
from rotor.kernels.layer_table import layer_parts
from rotor.kernels.prefill.few_kernel import few_kernel
from rotor.kernels.prefill.kernel import prefill_kernel
from rotor.kernels.prefill.rebuild import rebuild_kernel
from rotor.kernels.prefill.tile_sizes import prefill_shared_bytes
from rotor.kernels.prefill.variants import prefill_variants
from rotor.kernels.projection.append import append_variant
from rotor.kernels.projection.coded import rotate_and_pack_variants
from rotor.kernels.rows import LayerColumns

HEADS_PER_KV, HEAD_DIM = 4, 128
MIXED = Columns(n8=16, n4=32, n2=64)
ALL = Columns(n16=4, n8=16, n4=24, n2=16)
MENU = {
    "none 4 bits": coded_layer("none", 1, (Columns(n4=64), Columns(n4=64))),
    "none mixed": coded_layer("none", 1, (MIXED, MIXED), (Columns(n16=8, n4=32), Columns(n8=16))),
    "none single words": coded_layer("none", 1, (Columns(n16=2, n8=12, n4=40, n2=48), Columns(n8=12, n4=24, n2=48))),
    "pre mixed": coded_layer("pre", 1, (MIXED, MIXED), (Columns(n8=16, n4=32), Columns(n8=16))),
    "pre one latent": coded_layer("pre", 8, (Columns(n8=16, n4=64, n2=64), Columns(n8=32, n4=128, n2=64))),
}
AT_ONCE = {"none 4 bits": 16}
"""Bytes that a thread copies at once; one word where a tile has no more of a segment than the program has threads."""


def check(variant: Variant, capability: int) -> Resources:
    resources = compile_variant(variant, capability)
    assert (resources.scalar_loads, resources.spill_bytes) == (0, 0)
    return resources


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", MENU)
def test_decode(name: str, capability: int) -> None:
    layout = MENU[name]
    parts = layer_parts(layout, HEADS_PER_KV, HEAD_DIM)
    settings = {"page": 16 if name == "none mixed" else 0, "gpu": Gpu.of_capability(capability)}
    variant = decode_variants(parts, HEADS_PER_KV, HEAD_DIM, torch.bfloat16, **settings)[0]
    resources = check(variant, capability)
    assert resources.matrix_products > 0
    assert resources.shared_bytes <= decode_shared_bytes(variant.constants | variant.options, 2)
    asynchronous = {name: resources.async_bytes.get(name) for name in ("key", "value")}
    # Where keys are rebuilt words are loaded into registers, a tile ahead.
    bytes_at_once = None if layout.domain == "pre" else AT_ONCE.get(name, 4)
    assert asynchronous == {"key": bytes_at_once, "value": bytes_at_once}
    assert variant.constants["AHEAD"] == (layout.domain == "pre")


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", ["none mixed", "pre mixed"])
@pytest.mark.parametrize("page", [0, 16])
def test_prefill(name: str, page: int, capability: int) -> None:
    """With a mask; and of packed queries over pages."""
    settings = {"page": page, "mask": not page, "gpu": Gpu.of_capability(capability)}
    for variant in prefill_variants(MENU[name], HEADS_PER_KV, HEAD_DIM, torch.bfloat16, **settings):
        if variant.kernel not in (prefill_kernel, rebuild_kernel):
            continue  # as in test_kernels_compile
        resources = check(variant, capability)
        assert resources.matrix_products > 0
        assert resources.async_bytes["key"] >= 4
        if variant.kernel is prefill_kernel:
            assert resources.shared_bytes <= prefill_shared_bytes(variant.constants | variant.options, 2)
            assert resources.async_bytes["value"] >= 4


@pytest.mark.parametrize("capability", [80, 90])
def test_all_widths_of_codes_at_once_spill_nothing_where_keys_are_rebuilt(capability: int) -> None:
    """With tiles of as many keys as fewer widths have, 8 to 104 bytes of each thread did."""
    gpu, layout = Gpu.of_capability(capability), coded_layer("pre", 2, (ALL, ALL))
    decode = decode_variants(layer_parts(layout, 3, 64), 3, 64, torch.bfloat16, gpu=gpu)[0]
    prefills = prefill_variants(layout, 3, 64, torch.bfloat16, gpu=gpu)
    itself = [v for v in prefills if v.kernel is prefill_kernel and v.constants["PRE"]]
    assert len(itself) == 1
    for variant in (decode, *itself):
        assert variant.constants["TILE"] == 16
        assert compile_variant(variant, capability).spill_bytes == 0


TURNED = {
    "three query heads": (coded_layer("pre", 2, (Columns(n16=4, n8=24, n4=40, n2=32), None), rope_block=16), 3, 64),
    "8B": (coded_layer("pre", 1, *[(Columns(n4=48), None)] * 8, rope_block=16), 4, 128),
    "8B, two latents": (coded_layer("pre", 1, *[(Columns(n4=32), Columns(n4=32))] * 8, rope_block=16), 4, 128),
}
"""Of keys turned within blocks: layouts, query heads of a KV head, and head_dim."""


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", TURNED)
def test_keys_turned_within_blocks_are_not_rebuilt(name: str, capability: int) -> None:
    """Without spills, with words copied ahead; values of joint latents are not read again."""
    layout, heads_per_kv, head_dim = TURNED[name]
    parts = layer_parts(layout, heads_per_kv, head_dim)
    variant = decode_variants(parts, heads_per_kv, head_dim, torch.bfloat16, gpu=Gpu.of_capability(capability))[0]
    assert (variant.constants["STEP"], variant.constants["TILE_ROWS"]) == (16, 16)
    resources = check(variant, capability)
    assert resources.shared_bytes <= decode_shared_bytes(variant.constants | variant.options, 2)
    assert {"key", "absorbed"} <= resources.async_bytes.keys()
    assert ("value" in resources.async_bytes) == (not layout.joint)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("columns", [Columns(n16=4, n8=24, n4=24, n2=16), Columns(n8=24, n4=8, n2=16)], ids=str)
def test_few_queries_and_pieces_of_codes_of_many_widths_spill_nothing(columns: Columns, capability: int) -> None:
    """Joint latents, of which values are read too. With 16 rows on Hopper 24 to 48 bytes of each thread did, and pieces
    in two stages 8 and 16.
    """
    settings = {"mask": True, "gpu": Gpu.of_capability(capability)}
    prefills = prefill_variants(coded_layer("pre", 2, (columns, None)), 3, 64, torch.bfloat16, **settings)
    checked = [v for v in prefills if v.kernel is few_kernel or v.constants.get("SPLIT", 1) > 1]
    assert len(checked) >= 3  # pieces, and of few queries keys that are rebuilt first and here
    for variant in checked:
        resources = compile_variant(variant, capability)
        assert (resources.spill_bytes, resources.scalar_loads) == (0, 0)


@pytest.mark.parametrize("capability", [80, 90])
def test_rotation_with_packing(capability: int) -> None:
    layout = coded_layer("post", 2, (MIXED, MIXED), (Columns(n16=8, n4=32), Columns(n8=16)))
    for variant in rotate_and_pack_variants(layout, HEADS_PER_KV, HEAD_DIM, torch.bfloat16):
        assert check(variant, capability).matrix_products > 0


def test_append() -> None:
    for slots, page in ((False, 0), (True, 0), (True, 16)):
        check(append_variant(LayerColumns((MIXED, MIXED), (MIXED,)), torch.bfloat16, slots, page), 90)
    numbers = LayerColumns((Columns(n16=64),), (Columns(n16=48),))
    check(append_variant(numbers, torch.bfloat16, True, 16), 90)
