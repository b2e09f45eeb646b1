"""Keys rebuilt from latents wider than registers hold, some columns at a time, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from coded import coded_layer, random_coded_case
from kernel_checks import check_decode, check_prefill
from ragged import layer, random_case

from rotor.format.columns import Columns
from rotor.kernels.decode.tile_sizes import decode_config
from rotor.kernels.layer_table import layer_parts
from rotor.kernels.prefill.tile_sizes import prefill_constants
from rotor.kernels.truth import Sequence

HEAD_DIM, HEADS_PER_KV = 32, 2
LAYERS = {
    "keys": layer("pre", 2, (328, 24)),
    "values": layer("pre", 2, (24, 264)),
    "between": layer("pre", 2, (136, 40)),
    "two widths": layer("pre", 1, (328, 24), (64, 16)),
}
WIDE = Columns(n16=8, n8=36, n4=72, n2=144)
CODED = coded_layer("pre", 2, (WIDE, Columns(n8=16, n4=8)))
SEQUENCES = [Sequence(1, 0, 70), Sequence(1, 13, 66), Sequence(0, 0, 0)]


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("name", LAYERS)
def test_decode(name: str, page_size: int) -> None:
    parts = layer_parts(LAYERS[name], HEADS_PER_KV, HEAD_DIM)
    assert decode_config(parts, HEADS_PER_KV, 4, HEAD_DIM)["COLUMNS"] == 64
    case = random_case(LAYERS[name], HEADS_PER_KV, HEAD_DIM, 3, 1, 70)
    check_decode(case, SEQUENCES, programs=3, page_size=page_size)


def test_decode_with_holes_and_a_soft_cap() -> None:
    case = random_case(LAYERS["keys"], HEADS_PER_KV, HEAD_DIM, 2, 1, 70)
    mask = torch.rand(2, 70, generator=torch.Generator().manual_seed(0)) < 0.6
    check_decode(case, [Sequence(1, 0, 70)] * 2, mask=mask, softcap=2.0, schedule="none")


@pytest.mark.parametrize("page_size", [0, 16])
def test_decode_of_codes(page_size: int) -> None:
    case = random_coded_case(CODED, HEADS_PER_KV, HEAD_DIM, 3, 1, 70)
    assert decode_config(layer_parts(CODED, HEADS_PER_KV, HEAD_DIM), HEADS_PER_KV, 4, HEAD_DIM)["COLUMNS"] == 64
    check_decode(case, SEQUENCES, page_size=page_size)


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("name", ["keys", "values", "codes"])
def test_prefill_that_rebuilds_for_itself(name: str, page_size: int) -> None:
    sequences = [Sequence(5, 0, 40), Sequence(3, 11, 37)]
    layout = CODED if name == "codes" else LAYERS[name]
    assert prefill_constants(layout, HEADS_PER_KV, 4, HEAD_DIM, False)[0][1]["COLUMNS"] == 64
    if name == "codes":
        case = random_coded_case(layout, HEADS_PER_KV, HEAD_DIM, 2, 5, 40)
        check_prefill(case, sequences, page_size=page_size, rebuilt=False)
    else:
        check_prefill(
            random_case(layout, HEADS_PER_KV, HEAD_DIM, 2, 5, 40), sequences, page_size=page_size, rebuilt=False
        )
