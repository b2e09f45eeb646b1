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

HEAD_DIM = 32
KEYS = 201
SEQUENCES = [Sequence(1, 0, KEYS), Sequence(1, 75, 163), Sequence(0, 0, 0)]
MIXED, NARROW = Columns(n16=8, n8=8, n4=16, n2=16), Columns(n8=8, n4=24)


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize(
    ("block", "size", "heads_per_kv"), [(4, 1, 3), (16, 1, 4), (16, 2, 3), (64, 1, 4), (64, 4, 2), (2, 2, 1)]
)
def test_joint_codes(block: int, size: int, heads_per_kv: int, page_size: int) -> None:
    """Slices that begin inside a block, and inside what queries are absorbed for; poisoned keys, constant keys."""
    layout = coded_layer("pre", size, (MIXED, None), (NARROW, None), rope_block=block)
    case = random_coded_case(layout, heads_per_kv, HEAD_DIM, 3, 1, KEYS)
    check_decode(case, SEQUENCES, programs=5, page_size=page_size)
