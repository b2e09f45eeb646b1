"""Joint groups: one latent of keys and values, and a scale a row, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.joint_truth import read_numbers
from support.random_layers import SHAPE, random_joint
from torch import Tensor

from rotor.calibration.allocation.bits import BitsPath
from rotor.calibration.bases.fisher import of_both
from rotor.calibration.bases.method import Inputs
from rotor.calibration.codes.layer import GroupChannels, LayerCodes, coded_bases, layer_codes
from rotor.calibration.information import LayerFisher, TokenSamples
from rotor.calibration.moments import LayerStatistics, stored_name
from rotor.checkpoint.bases import FoldedBasis, LayerBases
from rotor.checkpoint.folding import joint_basis, joint_side, reading_rounded
from rotor.checkpoint.layout import AttentionShape, GroupLayout, KeyForm, LayerForm, LayerLayout
from rotor.checkpoint.projections import AttentionWeights
from rotor.checkpoint.rows import CodedRow, NumberRow, RowScale, scale_nibble, scale_of
from rotor.errors import CheckpointError

ROWS = {
    "every width": CodedRow.of_bits([16, 12, 8, *[4] * 9, 6, 2, 2], scaled=True),
    "wide": CodedRow(n16=2, n8=4, n4=20, scaled=True),
    "crumbs": CodedRow(n8=1, n6=3, n2=5, scaled=True),
}
NUMBERS = 64


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=generator(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", ROWS)
def test_rows_are_latents_coded_by_their_scale(name: str) -> None:
    """Folded bases, packed and unpacked, equal codes of latents over the scale of their row."""
    row, pair = ROWS[name], random_joint(ROWS[name], NUMBERS, generator())
    basis, code = joint_basis(pair, 0, row)
    assert code is not None
    assert basis.shift is not None
    numbers = 2 * normal(300, NUMBERS, seed=1) * torch.linspace(-4, 4, 300).double().exp2()[:, None]
    put_out, scale = numbers @ basis.encode + basis.shift, RowScale(code.shift, code.length)
    rows = row.pack(put_out, scale)
    read = row.unpack(rows, torch.float64) @ basis.decode.T + basis.constant
    expected, scales = read_numbers(numbers, pair, 0)
    assert rows.shape == (300, row.row_bytes())
    _, nibble = row.codes(put_out, scale)
    assert nibble is not None
    torch.testing.assert_close(scale_of(nibble).double(), scales)
    assert len(scales.unique()) > 8
    torch.testing.assert_close(read, expected, rtol=1e-5, atol=1e-5)


def test_rows_with_latents_beyond_their_levels_take_the_next_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among rows of which a few latents are large by chance, those with the larger scale lose less by it."""
    row, rows = CodedRow(n8=8, n4=40, scaled=True), 4000
    size = torch.tensor([30.0] * 8 + [2.5] * 40)
    scale = RowScale(torch.zeros(48), size**-2 / 48)
    latents = normal(rows, 48) * size
    latents[:, 40:] *= torch.rand(rows, 8, generator=generator(1)).double().clamp(min=0.1).reciprocal()

    def lost() -> tuple[Tensor, Tensor]:
        codes, nibble = row.codes(latents, scale)
        assert nibble is not None
        half = torch.tensor([128.0] * 8 + [8.0] * 40)
        read = scale_of(nibble).double() * (codes + 0.5 - half)
        return nibble, (read - latents).square().sum(-1, keepdim=True)

    nibble, error = lost()
    monkeypatch.setattr("rotor.checkpoint.rows.chosen_nibble", lambda energy, lost: scale_nibble(energy))
    by_length, error_by_length = lost()
    larger = nibble > by_length
    assert torch.equal(nibble - by_length, larger.int())
    assert rows // 20 < larger.sum() < rows
    assert error[larger].sum() < 0.8 * error_by_length[larger].sum()
    assert (error[larger] < error_by_length[larger]).double().mean() > 0.9


def test_all_channels_as_numbers_lose_nothing() -> None:
    pair = random_joint(ROWS["wide"], NUMBERS, generator())
    basis, code = joint_basis(pair, 0, NumberRow(NUMBERS))
    assert code is None
    torch.testing.assert_close(basis.encode @ basis.decode.T, torch.eye(NUMBERS).double())


def test_a_layout_reads_back_and_wrong_ones_are_refused() -> None:
    groups = GroupLayout((0, 1), ROWS["crumbs"]), GroupLayout((2, 3), CodedRow(n4=9, scaled=True))
    layout = LayerLayout(groups, rope_block=64)
    data = layout.to_dict()
    assert LayerLayout.from_dict(data, "test") == layout
    assert {group.key.split for group in layout.groups} == {1}  # one kernel reads them
    del data["groups"][1]["key"]["scaled"]
    with pytest.raises(CheckpointError, match="a scale in coded rows of keys and values together"):
        LayerLayout.from_dict(data, "test")
    apart = {"groups": [{"kv_heads": [0], "key": {"4": 8, "scaled": 1}, "value": {"4": 8}}]}
    with pytest.raises(CheckpointError, match="a scale in coded rows of keys and values together"):
        LayerLayout.from_dict(apart, "test")


def statistics_of(
    shape: AttentionShape, form: LayerForm, tokens: int = 3000, seed: int = 0
) -> tuple[LayerStatistics, LayerFisher, Tensor, Tensor]:
    """Correlated numbers and gradients of a layer, [tokens, groups, n]: their moments, and all of them as samples."""
    name, size = stored_name(form.keys, joint=True), 2 * shape.head_dim
    groups, width = shape.num_kv_heads // form.group_size, form.group_size * size
    decay = torch.linspace(1, -4, width).double().exp()
    found = []
    for index in range(2):
        mix = torch.linalg.qr(normal(groups, width, width, seed=seed + 10 + index))[0] * decay.sqrt()
        found.append((normal(groups, tokens, width, seed=seed + 20 + index) @ mix.mT).transpose(0, 1))
    numbers, gradients = found[0] + 0.2 * normal(groups, width, seed=seed + 30), found[1]
    moments, information = (LayerStatistics(shape, form.group_size) for _ in range(2))
    moments.add({name: numbers.reshape(tokens, -1, size)})
    information.add({name: gradients.reshape(tokens, -1, size)})
    samples = TokenSamples(
        numbers.reshape(tokens, -1, size).float(),
        gradients.reshape(tokens, -1, size).float(),
        torch.full((tokens,), 1 / tokens).double(),
        numbers.mean(0).reshape(-1, size).float(),
    )
    return moments, LayerFisher(information, {name: samples}, 0.0), numbers, gradients


def layer_of(shape: AttentionShape, form: LayerForm) -> tuple[LayerBases, LayerFisher, Tensor, Tensor]:
    moments, fisher, numbers, gradients = statistics_of(shape, form)
    nothing = torch.zeros(1)
    inputs = Inputs(moments, AttentionWeights(nothing, nothing, nothing, nothing), form.keys, fisher)
    return LayerBases(form.keys, form.group_size, (of_both(inputs),)), fisher, numbers, gradients


def coded_loss(bases: LayerBases, codes: LayerCodes, plan: GroupChannels, numbers: Tensor, cost: Tensor) -> float:
    """Mean cost of the error of a plan's codes, in nats a token."""
    (pair,), total = coded_bases(bases, codes, plan).latents, 0.0
    for group in range(numbers.shape[1]):
        error = read_numbers(numbers[:, group], pair, group)[0] - numbers[:, group]
        total += float(torch.einsum("ti,ij,tj->t", error, cost[group], error).mean()) / 2
    return total


def test_bits_of_joint_layers_are_the_best() -> None:
    """The predicted loss falls with bytes and is near what codes cost."""
    form = LayerForm(KeyForm(64), 2, joint=True)
    bases, fisher, numbers, _ = layer_of(SHAPE, form)
    codes = layer_codes(bases, fisher)
    path = BitsPath([codes], SHAPE, (0, 2, 4, 6, 8), 2)
    cost = fisher.per_token(stored_name(form.keys, joint=True))
    measured = []
    for compression in (0.4, 0.6, 0.75):
        plan = path.at_compression(compression)
        assert plan is not None
        assert plan.channels is not None
        (layer,) = plan.channels
        assert all(row.scaled for rows in layer for row in rows)
        measured.append(coded_loss(bases, codes, layer, numbers, cost))
        assert measured[-1] == pytest.approx(predicted_loss(codes, layer), rel=0.35)
    assert measured == sorted(measured)


def predicted_loss(codes: LayerCodes, layer: GroupChannels) -> float:
    total = 0.0
    for side, rows in zip(codes.sides, zip(*layer, strict=True), strict=True):
        for index, row in enumerate(rows):
            order = side.order(index)
            bits = row.bits + (0,) * (len(order) - row.rank)
            losses = {width: side.losses(index, (width,))[0, order] for width in set(bits)}
            total += float(sum(losses[width][place] for place, width in enumerate(bits)))
    return total


def test_with_a_scale_a_row_all_lengths_are_alike() -> None:
    """Tokens of lengths from a quarter to four lose in proportion to the square of their length."""
    form = LayerForm(KeyForm(64), 2, joint=True)
    bases, fisher, numbers, _ = layer_of(SHAPE, form)
    name = stored_name(form.keys, joint=True)
    mean = numbers.mean(0)
    lengths = torch.linspace(-2, 2, len(numbers)).double().exp2()[:, None, None]
    stretched = (numbers - mean) * lengths + mean
    samples = replace(fisher.samples[name], vectors=stretched.reshape(len(numbers), -1, 2 * SHAPE.head_dim).float())
    fisher = replace(fisher, samples={name: samples})
    codes = layer_codes(bases, fisher)
    plan = BitsPath([codes], SHAPE, (0, 4, 8), 2).at_compression(0.75)
    assert plan is not None
    assert plan.channels is not None
    cost = fisher.per_token(name)
    relative = []
    for part, length in zip(stretched.split(1000), lengths.split(1000), strict=True):
        loss = coded_loss(bases, codes, plan.channels[0], part, cost)
        relative.append(loss / float(length.square().mean()))
    assert max(relative) < 2 * min(relative)


def test_reading_makes_up_for_the_rounding_of_what_encodes() -> None:
    """All channels at 16 bits, keys far from 0, the bases that encode in bfloat16: read as if they were not rounded."""
    row, size = CodedRow.of_bits([16] * NUMBERS, scaled=True), 2
    pair = random_joint(row, NUMBERS, generator(), mean=20.0)
    basis, _ = joint_basis(pair, 0, row)
    sides = [joint_side(basis, side, size) for side in (0, 1)]
    keys, values = reading_rounded([sides[0]], [sides[1]], torch.bfloat16, folds_values=False)
    assert basis.mean is not None
    numbers = [own.mean + normal(200, len(own.encode), seed=7) for own in sides if own.mean is not None]

    def errors(key: FoldedBasis, value: FoldedBasis) -> float:
        """Of the numbers as read from what rounded bases put out, before codes."""
        assert key.shift is not None
        put_out = key.shift + sum(
            x @ own.encode.bfloat16().double() for x, own in zip(numbers, (key, value), strict=True)
        )
        read = [put_out @ own.read.T + own.mean for own in (key, value) if own.mean is not None]
        return max(float((a - b).abs().max()) for a, b in zip(read, numbers, strict=True))

    assert errors(keys[0], values[0]) < 1e-9
    assert errors(*sides) > 1e-2
