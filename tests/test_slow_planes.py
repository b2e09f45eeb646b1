"""Which rotary planes decoding interpolates: nodes and their error, what is predicted of it, what is written of it."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from coded import coded_layer
from ragged import layer
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, LlamaConfig, Phi3Config

from rotor.format.columns import Columns
from rotor.format.kernel_config import MOST_NODES, KernelConfig, SlowPlanes
from rotor.format.layout import AttentionShape
from rotor.kernels.decode.tile_sizes import decode_config, rebuilding_steps
from rotor.kernels.layer_table import layer_parts, rebuilding_all
from rotor.kernels.slow_planes import TOLERANCE, choices, node_places, node_weights, turn_error
from rotor.prediction.cost import DecodeStep, key_work, layer_work
from rotor.prediction.devices import find_device
from rotor.prediction.slow_planes import LEAST_GAIN, fastest, planned_config
from rotor.prediction.tiling import Tiling
from rotor.runtime.rotary_frequencies import rotary_frequencies

SHAPE = AttentionShape(num_layers=1, num_heads=32, num_kv_heads=8, head_dim=128, hidden_size=4096)
LLAMA = tuple(500000.0 ** (-plane / 64) for plane in range(64))
ONE_LATENT = layer("pre", 8, (256, 256))


@pytest.mark.parametrize("block", [128, 512])
@pytest.mark.parametrize("nodes", range(1, MOST_NODES + 1))
def test_weights_of_nodes_are_lagranges(nodes: int, block: int) -> None:
    """They sum to one, are the identity at the nodes, and give back every polynomial of a lower degree."""
    places, weights = list(node_places(nodes, block)), node_weights(nodes, block)
    assert places == sorted(set(places))
    assert 0 <= places[0] <= places[-1] < block
    torch.testing.assert_close(weights[places], torch.eye(nodes, dtype=torch.float64))
    place = torch.arange(block, dtype=torch.float64) / block
    for degree in range(nodes):
        torch.testing.assert_close(weights @ place[places] ** degree, place**degree, rtol=0, atol=1e-11)


def test_the_error_is_the_largest_of_any_turn() -> None:
    slow = SlowPlanes(32, 128, 3)
    weights, worst = node_weights(3, 128), 0.0
    for frequency in LLAMA[32:]:
        for place in range(128):
            for turn in (math.cos, math.sin):
                nodes = [turn(frequency * node) for node in node_places(3, 128)]
                found = sum(float(w) * t for w, t in zip(weights[place], nodes, strict=True))
                worst = max(worst, abs(found - turn(frequency * place)))
    assert turn_error(LLAMA, slow) == pytest.approx(worst, abs=1e-12)
    # That of interpolation at Chebyshev's nodes, theta^3 / (3! 2^2), but for nodes being places of keys.
    theta = LLAMA[32] * 127 / 2
    assert worst == pytest.approx(theta**3 / 24, rel=0.2)
    assert turn_error(LLAMA, SlowPlanes(64, 128, 1)) == 0.0


def test_choices_have_the_fewest_nodes_within_the_tolerance() -> None:
    found = list(choices(LLAMA, TOLERANCE[2]))
    assert SlowPlanes(32, 256, 3) in found
    assert len({(slow.rebuilt, slow.block) for slow in found}) == len(found)
    for slow in found:
        assert turn_error(LLAMA, slow) <= TOLERANCE[2]
        if slow.nodes > 1:
            assert turn_error(LLAMA, dataclasses.replace(slow, nodes=slow.nodes - 1)) > TOLERANCE[2]
    assert not list(choices(LLAMA[::-1], TOLERANCE[2]))  # planes in another order than by their speed
    assert not list(choices(LLAMA[:16], TOLERANCE[2]))


def test_planes_that_are_all_rebuilt_leave_the_kernel_as_it_is() -> None:
    layout = layer("pre", 2, (64, 48))
    (kernels,) = planned_config([layout], SHAPE, [None], 2).layers
    assert kernels.slow_planes is None
    parts = layer_parts(layout, 4, 64, dataclasses.replace(kernels, slow_planes=SlowPlanes(32, 128, 2)))
    assert parts.slow is None  # a head has no more planes
    slow = layer_parts(layout, 4, 128, dataclasses.replace(kernels, slow_planes=SlowPlanes(32, 128, 2)))
    assert rebuilding_all(slow) == layer_parts(layout, 4, 128, kernels)
    whole, some = decode_config(rebuilding_all(slow), 4, 2, 128), decode_config(slow, 4, 2, 128)
    assert (whole["FAST"], whole["NODES"], some["FAST"], some["NODES"]) == (64, (), 32, node_places(2, 128))
    assert rebuilding_steps(slow, some) * some["FREQUENCIES"] == 2 * 32


def test_work_of_planes_that_are_interpolated() -> None:
    """One latent of 256 for 8 KV heads of 4 query heads: 32 of 64 planes rebuilt, 3 nodes a block of 256 keys."""
    slow = SlowPlanes(32, 256, 3)
    tiling, step = Tiling.of("pre", 8, 4, 256, 256, 128, slow), DecodeStep(1, 1)
    assert (tiling.slow, tiling.keys, tiling.rows, tiling.node_rows) == (slow, 128, 32, 16)
    work = key_work("pre", True, 8, 256, SHAPE, step, tiling)
    rebuilt = 2 * 64 * (8 * 256 + 32)  # 64 rows of a head's basis, and their products with its 4 query rows
    met = 2 * 3 * 32 * 256
    assert work.cache_flops == rebuilt + met * (1 + 64 / 256)
    every_row = 2 * 64 * (8 * 256 + 8 * 32)  # of a tile, for each head
    absorbed = 2 * 8 * 16 * 64 * 256 / 256  # 12 rows in 16
    assert work.cache_flops + work.tile_flops == every_row + met + absorbed
    fast_basis, slow_basis = 8 * 64 * 256 * 2 / 128, 8 * 64 * 256 * 2 / 256
    cosines, queries, latents = 4 * 64, 3 * 32 * 256 * 2 / 128, 512 * (8 + 1)
    assert work.l2_bytes == pytest.approx(fast_basis + cosines + slow_basis + queries + latents)
    assert work.cache_bytes == key_work("pre", True, 8, 256, SHAPE, step).cache_bytes


def test_slow_planes_are_planned_where_they_are_predicted_to_pay() -> None:
    device = find_device("h100-sxm")
    chosen = fastest(ONE_LATENT, SHAPE, LLAMA, device)
    assert chosen is not None
    assert turn_error(LLAMA, chosen) <= TOLERANCE[2]
    step = DecodeStep(32768, 1)
    work = {slow: layer_work(ONE_LATENT, SHAPE, step, slow) for slow in (None, chosen)}
    assert LEAST_GAIN * work[chosen].cache_seconds(device) <= work[None].cache_seconds(device)
    codes = coded_layer("pre", 8, (Columns(n4=256), Columns(n4=256)))
    narrow, two_widths = layer("pre", 1, *[(48, 56)] * 8), layer("pre", 4, (256, 256), (128, 64))
    for layout in (codes, narrow, two_widths, layer("post", 8, (256, 256))):
        assert fastest(layout, SHAPE, LLAMA, device) is None
    layouts = [ONE_LATENT, narrow, ONE_LATENT]
    config = planned_config(layouts, SHAPE, [LLAMA, LLAMA, None], 2)
    assert [kernels.slow_planes for kernels in config.layers] == [chosen, None, None]
    assert KernelConfig.from_dict(config.to_dict()) == config
    config.check(layouts)
    in_float32 = planned_config(layouts, SHAPE, [LLAMA] * 3, 4)
    assert all(kernels.slow_planes is None for kernels in in_float32.layers)


SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 32,
    "max_position_embeddings": 2048,
    "head_dim": 32,
}
SCALED = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 512},
}


@pytest.mark.parametrize("kind", ["default", *SCALED])
def test_frequencies_are_those_of_the_model(kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 500000.0, **SCALED.get(kind, {})}
    config = LlamaConfig(**SIZES, rope_parameters=rope)
    exact = AutoModelForCausalLM.from_config(config).model.rotary_emb.inv_freq.double()
    found = rotary_frequencies(config, 1)
    assert found is not None
    torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), exact, rtol=1e-6, atol=0)


def test_frequencies_by_the_type_of_a_layer() -> None:
    config = Gemma3TextConfig(**SIZES, layer_types=["sliding_attention", "full_attention"])
    local, whole = (rotary_frequencies(config, layer) for layer in (0, 1))
    assert local is not None
    assert whole is not None
    assert (local[1], whole[1]) == pytest.approx((10000.0 ** (-1 / 16), 1000000.0 ** (-1 / 16)))


def test_no_frequencies_that_follow_the_length_or_turn_a_part_of_a_head() -> None:
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    assert rotary_frequencies(LlamaConfig(**SIZES, rope_parameters=dynamic), 0) is None
    partial = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    sizes = {name: size for name, size in SIZES.items() if name != "head_dim"}
    assert rotary_frequencies(Phi3Config(**sizes, pad_token_id=0, rope_parameters=partial), 0) is None
    assert rotary_frequencies(GPT2Config(), 0) is None
