"""Keys that RoPE turns within blocks of positions, in Triton's interpreter, against the float64 attention."""

from __future__ import annotations

import pytest
import torch
from coded import coded_layer, random_coded_case
from kernel_checks import check_decode, check_prefill
from ragged import layer, random_case

from rotor.format.columns import Columns
from rotor.kernels.decode.tile_sizes import decode_config
from rotor.kernels.layer_table import layer_parts
from rotor.kernels.truth import Sequence
from rotor.kernels.tuning import decode_constants

HEAD_DIM = 32
KEYS = 201
SEQUENCES = [Sequence(1, 0, KEYS), Sequence(1, 75, 163), Sequence(0, 0, 0)]
MIXED, NARROW = Columns(n16=8, n8=8, n4=16, n2=16), Columns(n8=8, n4=24)


@pytest.mark.parametrize(
    ("block", "size", "heads_per_kv", "page_size"),
    [(4, 1, 3, 16), (16, 1, 4, 0), (16, 2, 3, 16), (64, 1, 4, 16), (64, 4, 2, 0), (2, 2, 1, 0)],
)
def test_joint_codes(block: int, size: int, heads_per_kv: int, page_size: int) -> None:
    """Slices that begin inside a block, and inside what queries are absorbed for; poisoned keys, constant keys."""
    layout = coded_layer("pre", size, (MIXED, None), (NARROW, None), rope_block=block)
    case = random_coded_case(layout, heads_per_kv, HEAD_DIM, 3, 1, KEYS)
    check_decode(case, SEQUENCES, programs=5, page_size=page_size)


@pytest.mark.parametrize("schedule", ["lpt", "none"])
def test_codes_of_two_latents_with_holes_and_a_soft_cap(schedule: str) -> None:
    layout = coded_layer("pre", 1, (MIXED, NARROW), (NARROW, MIXED), rope_block=16)
    case = random_coded_case(layout, 2, HEAD_DIM, 2, 1, KEYS)
    mask = torch.rand(2, KEYS, generator=torch.Generator().manual_seed(0)) < 0.6
    sequences = [Sequence(1, 0, KEYS), Sequence(1, 66, 190)]
    check_decode(case, sequences, schedule=schedule, mask=mask, softcap=2.0)


@pytest.mark.parametrize(("block", "head_dim", "page_size"), [(4, 80, 16), (16, 64, 0), (64, 64, 64)])
def test_numbers_of_many_widths_and_a_table_with_a_factor(block: int, head_dim: int, page_size: int) -> None:
    layout = layer("pre", 2, (40, 24), (16, 32), rope_block=block)
    case = random_case(layout, 3, head_dim, 3, 1, KEYS, factor=1.3)
    check_decode(case, SEQUENCES, programs=3, page_size=page_size)


def test_chunks_of_keys_follow_each_other() -> None:
    """With chunks of one block of absorbed queries; slices begin and end inside of both."""
    layout = coded_layer("pre", 1, (MIXED, None), (NARROW, None), rope_block=16)
    case = random_coded_case(layout, 2, HEAD_DIM, 2, 1, 523)
    parts = layer_parts(layout, 2, HEAD_DIM)
    config = decode_config(parts, 2, 4, HEAD_DIM)
    assert config["CHUNK"] > config["BLOCK"]
    with decode_constants(CHUNK=config["BLOCK"]):
        check_decode(case, [Sequence(1, 0, 523), Sequence(1, 300, 409)], programs=3)


def test_float16_within_twice_the_error_of_pytorch() -> None:
    layout = layer("pre", 1, (40, 24), rope_block=16)
    case = random_case(layout, 4, 64, 1, 1, 300).to("cpu", torch.float16)
    check_decode(case, [Sequence(1, 0, 300)], programs=2)


def test_keys_are_rebuilt_where_blocks_are_small_or_latents_wide() -> None:
    """By the same stepped table: too few keys in a block, and more columns than registers hold."""
    for layout, heads_per_kv in (
        (layer("pre", 2, (24, 16), rope_block=4), 4),
        (layer("pre", 1, (264, 16), rope_block=16), 2),
    ):
        parts = layer_parts(layout, heads_per_kv, HEAD_DIM)
        assert (layout.rope_block > 1, parts.rope_block) == (True, 1)
        assert decode_config(parts, heads_per_kv, 4, HEAD_DIM)["STEP"] == 0
        check_decode(random_case(layout, heads_per_kv, HEAD_DIM, 2, 1, 75), [Sequence(1, 0, 75), Sequence(1, 20, 60)])


@pytest.mark.parametrize(
    ("block", "rebuilt", "page_size", "programs"),
    [(4, True, 0, None), (16, False, 16, None), (64, True, 16, 10), (16, False, 0, 10)],
)
def test_prompts_and_few_queries_rebuild_by_the_stepped_table(block, rebuilt, page_size, programs) -> None:
    """Keys rebuilt in memory and in registers, packed queries over pages, keys of few queries split."""
    layout = coded_layer("pre", 2, (MIXED, None), rope_block=block)
    case = random_coded_case(layout, 2, HEAD_DIM, 2, 7, 100)
    check_prefill(
        case, [Sequence(7, 0, 100), Sequence(2, 3, 37)], rebuilt=rebuilt, page_size=page_size, programs=programs
    )
