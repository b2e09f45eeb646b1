"""The join of slices in Triton's interpreter, against float64 sums over the pieces of every unit."""

from __future__ import annotations

import pytest
import torch
from ragged import layer

from rotor.kernels.decode.combine import combine_constants, combine_kernel
from rotor.kernels.launch import launch
from rotor.kernels.layer_table import Column, layer_parts, table_on
from rotor.kernels.widths import padded

CPU = torch.device("cpu")


def pieces_of(parts, tiles: list[int], programs: int) -> dict[int, list[int]]:
    """The programs that have a tile of each unit: a tile belongs to the slice in which it begins."""
    total = sum(tiles) * parts.total_work
    found, place = {}, 0
    for part, row in enumerate(parts.table):
        for sequence, count in enumerate(tiles):
            begins = [place + tile * row[Column.WORK] for tile in range(count)]
            place += count * row[Column.WORK]
            ends = [(program + 1) * total // programs for program in range(programs)]
            found[part * len(tiles) + sequence] = sorted(
                {next(p for p, end in enumerate(ends) if begin < end) for begin in begins}
            )
    return found


@pytest.mark.parametrize(
    ("ranks", "tiles", "programs"),
    [(((24, 72),), [700], 264), (((24, 40), (16, 8)), [90, 0, 3], 37), (((24, 40), (16, 8)), [1, 400], 100)],
    ids=["one latent, batch 1", "an empty sequence", "a short and a long one"],
)
def test_pieces_are_joined_whatever_lies_between_them(ranks, tiles, programs) -> None:
    parts = layer_parts(layer("none", 2, *ranks), 2, 32)
    batch_size, units = len(tiles), len(parts.table) * len(tiles)
    width = padded(max(v for _, v in ranks))
    pieces = pieces_of(parts, tiles, programs)
    assert max(map(len, pieces.values())) > 20
    generator = torch.Generator().manual_seed(0)
    partial = torch.full((programs + units, 16, width), torch.nan)
    partial_lse = torch.full((programs + units, 16), torch.nan)
    expected = torch.zeros(batch_size, parts.output_width, dtype=torch.float64)
    heads = parts.rows * len(parts.table)
    expected_lse = torch.full((batch_size, heads), -torch.inf, dtype=torch.float64)
    for unit, of_unit in pieces.items():
        row, sequence = parts.table[unit // batch_size], unit % batch_size
        slots = [program + unit for program in of_unit]
        if not slots:
            continue
        rank = row[Column.V_RANK]
        partial[slots, : parts.rows, :rank] = torch.randn(len(slots), parts.rows, rank, generator=generator)
        weights = 20 * torch.randn(len(slots), parts.rows, generator=generator)
        if len(slots) > 1:
            weights[0, 0] = -torch.inf  # a slice whose keys are all hidden
        partial_lse[slots, : parts.rows] = weights
        share = weights.double().mul(torch.log(torch.tensor(2.0, dtype=torch.float64)))
        joined = torch.einsum("pr,prv->rv", share.softmax(0), partial[slots, : parts.rows, :rank].double())
        first = row[Column.OUTPUT_OFFSET]
        expected[sequence, first : first + joined.numel()] = joined.flatten()
        head = row[Column.FIRST_HEAD]
        expected_lse[sequence, head : head + parts.rows] = share.logsumexp(0)
    output, lse = torch.full(expected.shape, torch.nan), torch.full(expected_lse.shape, torch.nan)
    prefix = torch.tensor([0, *tiles]).cumsum(0)
    constants = combine_constants(width, 16, 1 << (units - 1).bit_length())
    blocks = -(-width // constants["COLUMNS"])
    launch(
        combine_kernel, (units, parts.rows, blocks), partial, partial_lse, output, lse, table_on(parts, CPU), prefix,
        batch_size, parts.output_width, heads, programs, parts.total_work, **constants,
    )  # fmt: skip
    torch.testing.assert_close(output.double(), expected, atol=4e-6, rtol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-4, rtol=1e-6)


def test_one_latent_of_one_sequence_is_joined_in_few_steps_by_many_programs() -> None:
    """264 pieces on 132 SMs, which one program had gone through 16 at a time."""
    constants = combine_constants(256, 32, 1)
    assert -(-264 // constants["BLOCK"]) <= 3
    assert 256 // constants["COLUMNS"] == 8
