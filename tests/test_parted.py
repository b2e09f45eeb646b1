"""Joint groups: latents of fast planes and of the rest, and a scale a row, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.parted_truth import read_numbers
from support.random_layers import NO_ROPE, PARTIAL, SHAPE, random_parted
from torch import Tensor

from rotor.calibration.allocation.bits import BitsPath
from rotor.calibration.bases import parted
from rotor.calibration.bases.method import Inputs
from rotor.calibration.bases.parted import parted_bases
from rotor.calibration.codes.layer import GroupChannels, LayerCodes, by_latent, coded_bases, layer_codes
from rotor.calibration.codes.quantiser import measure_channels
from rotor.calibration.information import LayerFisher, TokenSamples
from rotor.calibration.moments import LayerStatistics, stored_name
from rotor.checkpoint.bases import BasisPair, ChannelCode, FoldedBasis, LayerBases, Parting, fast_numbers, other_numbers
from rotor.checkpoint.folding import joint_side, reading_rounded
from rotor.checkpoint.layout import POST_ROPE, AttentionShape, GroupLayout, KeyForm, LayerForm, LayerLayout
from rotor.checkpoint.parted import parted_basis
from rotor.checkpoint.projections import AttentionWeights
from rotor.checkpoint.rows import SPAN_WORDS, CodedRow, NumberRow, Parted
from rotor.errors import CheckpointError
from rotor.kernels.rows import CodeScales, pack_parted, parted_codes, scale_nibble, scale_of, unpack_parted

CASES: dict[str, tuple[AttentionShape, KeyForm, int, Parted]] = {
    "two heads": (
        SHAPE,
        KeyForm(8, 3),
        2,
        Parted(
            CodedRow.of_bits([16, 12, 8, *[4] * 9, 6, 2, 2]),
            (CodedRow.of_bits([8, 6, 4, 4]), CodedRow.of_bits([12] * 5 + [8])),
        ),
    ),
    "all planes": (SHAPE, KeyForm(64, 8), 1, Parted(CodedRow(n8=4, n4=9), (CodedRow(n12=1, n4=9, n2=3),))),
    "partial RoPE": (PARTIAL, KeyForm(16, 2), 4, Parted(CodedRow(n8=4, n4=30), (CodedRow(n8=1, n4=2),) * 4)),
    "no fast planes": (SHAPE, KeyForm(64, 0), 2, Parted(CodedRow(n16=2, n8=4, n4=20))),
    "no RoPE": (NO_ROPE, POST_ROPE, 4, Parted(CodedRow(n8=10, n6=3, n4=50))),
}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=generator(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", CASES)
def test_rows_are_latents_coded_one_after_another(name: str) -> None:
    """Folded bases, packed and unpacked, equal the chain of codes, errors and predictions; scales too."""
    shape, form, size, latent = CASES[name]
    bases = random_parted(latent, form, size, shape, generator())
    basis, code = parted_basis(bases, 0, latent, shape)
    assert code is not None
    numbers = 2 * normal(300, len(basis.encode), seed=1) * torch.linspace(-4, 4, 300).double().exp2()[:, None]
    scales = CodeScales(code.shift, code.length, code.errors)
    assert basis.shift is not None
    put_out = numbers @ basis.encode + basis.shift
    rows = pack_parted(put_out, latent, scales)
    read = unpack_parted(rows, latent, torch.float64) @ basis.decode.T + basis.constant
    expected, scale = read_numbers(numbers, bases, 0, shape)
    assert rows.shape == (300, latent.row_bytes())
    torch.testing.assert_close(scale_of(parted_codes(put_out, latent, scales)[1]).double(), scale)
    assert len(scale.unique()) > 8
    torch.testing.assert_close(read, expected, rtol=1e-5, atol=1e-5)


def test_rows_with_latents_beyond_their_levels_take_the_next_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among rows of which a few latents are large by chance, those with the larger scale lose less by it."""
    latent, rows = Parted(CodedRow(n8=8, n4=40)), 4000
    size = torch.tensor([30.0] * 8 + [2.5] * 40)
    scales = CodeScales(torch.zeros(48), size**-2 / 48, None)
    latents = normal(rows, 48) * size
    latents[:, 40:] *= torch.rand(rows, 8, generator=generator(1)).double().clamp(min=0.1).reciprocal()

    def lost() -> tuple[Tensor, Tensor]:
        codes, nibble = parted_codes(latents, latent, scales)
        half = torch.tensor([128.0] * 8 + [8.0] * 40)
        read = scale_of(nibble).double() * (codes + 0.5 - half)
        return nibble, (read - latents).square().sum(-1, keepdim=True)

    nibble, error = lost()
    monkeypatch.setattr("rotor.kernels.rows.chosen_nibble", lambda energy, lost: scale_nibble(energy))
    by_length, error_by_length = lost()
    larger = nibble > by_length
    assert torch.equal(nibble - by_length, larger.int())
    assert rows // 20 < larger.sum() < rows
    assert error[larger].sum() < 0.8 * error_by_length[larger].sum()
    assert (error[larger] < error_by_length[larger]).double().mean() > 0.9


@pytest.mark.parametrize("name", CASES)
def test_all_channels_as_numbers_lose_nothing(name: str) -> None:
    shape, form, size, latent = CASES[name]
    bases = random_parted(latent, form, size, shape, generator())
    basis, code = parted_basis(bases, 0, NumberRow(bases.full_ranks[0]), shape)
    assert code is None
    torch.testing.assert_close(basis.encode @ basis.decode.T, torch.eye(len(basis.encode)).double())


def test_a_layout_reads_back_and_wrong_ones_are_refused() -> None:
    _, form, _, latent = CASES["two heads"]
    layout = LayerLayout((GroupLayout((0, 1), latent), GroupLayout((2, 3), Parted(CodedRow(n4=9), latent.fast))), *form)
    data = layout.to_dict()
    assert LayerLayout.from_dict(data, "test") == layout
    keys = [group.key for group in layout.groups if isinstance(group.key, Parted)]
    assert {key.fast_words for key in keys} == {layout.fast_words} == {5}  # of 68 bits
    assert all(key.words % 4 == 0 and [part.words for part in key.fast] == [5, 5] for key in keys)
    del data["groups"][1]["key"]["fast"]
    with pytest.raises(CheckpointError, match="2 fast latents"):
        LayerLayout.from_dict(data, "test")
    with pytest.raises(CheckpointError, match="a rest and no value"):
        LayerLayout.from_dict({"groups": [{"kv_heads": [0], "key": {"4": 8}}]}, "test")


def test_predictions_are_from_the_codes_by_least_squares() -> None:
    """Of Gaussian numbers, as a regression on codes finds them; without losses that from the numbers themselves."""
    heads, fast, other = 2, 4, 9
    mix = normal(heads * fast + other, heads * fast + other, seed=2)
    x = normal(200_000, heads * fast + other, seed=3) @ mix
    f, r = x[:, : heads * fast], x[:, heads * fast :]
    spread, between = f.T @ f / len(x), f.T @ r / len(x)
    pair = decorrelated(spread, heads)
    feedback = 0.3 * normal(1, heads * fast, other, seed=4)
    parting = Parting(x.mean(0)[None], spread[None], between[None], between[None], feedback)
    none = torch.zeros(heads, fast).double()
    exact = parting.predicted_from(pair, none).prediction[0]
    torch.testing.assert_close(exact, torch.linalg.solve(spread, between), rtol=1e-5, atol=1e-5)

    read, lost = [], []
    for head in range(heads):
        own = slice(head * fast, (head + 1) * fast)
        z = f[:, own] @ pair.encode[head]
        fit = measure_channels(z[:20_000], None, (0, 2, 4))
        code = ChannelCode(
            torch.tensor([4, 2, 2, 0]), *(part[[2, 1, 1, 0], range(4)] for part in (fit.mean, fit.scale))
        )
        lost.append(fit.distortion[[2, 1, 1, 0], range(4)])
        read.append(code.decode(code.encode(z)) @ pair.decode[head].T)
    f_read = torch.cat(read, 1)
    target = r + (f_read - f) @ feedback[0]
    found = parting.predicted_from(pair, torch.stack(lost)).prediction[0]

    def left(prediction: Tensor) -> float:
        return float((target - f_read @ prediction).square().sum(1).mean())

    least = left(torch.linalg.lstsq(f_read, target).solution)
    assert least <= left(found) < 1.01 * least
    assert left(exact) > 1.02 * least


def decorrelated(spread: Tensor, heads: int) -> BasisPair:
    """Eigenvectors of each head's numbers."""
    size = len(spread) // heads
    vectors = torch.stack(
        [torch.linalg.eigh(spread[i : i + size, i : i + size])[1].flip(-1) for i in range(0, len(spread), size)]
    )
    return BasisPair(vectors, vectors, torch.ones(heads, size))


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
    latents, parting = parted_bases(inputs, form)
    return LayerBases(form.keys, form.group_size, latents, None, parting), fisher, numbers, gradients


def test_determinants_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one KV head a group the latents of fast planes and of the rest hold what one latent of both would, where
    codes of the fast planes leave small errors."""
    monkeypatch.setattr(parted, "NOMINAL_BITS", 8.0)
    form = LayerForm(KeyForm(64, 3), 1, joint=True)
    bases, fisher, _, _ = layer_of(SHAPE, form)
    moments = statistics_of(SHAPE, form)[0]
    name = stored_name(form.keys, joint=True)
    inputs = Inputs(moments, AttentionWeights(*[torch.zeros(1)] * 4), form.keys, fisher)
    both = inputs.spread(name), inputs.information(name)
    expected = sum(torch.linalg.slogdet(moment).logabsdet for moment in both)
    got = sum(2 * pair.singular_values.log().sum(-1) for pair in bases.latents)
    assert isinstance(got, Tensor)
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=0.05)


def test_feedback_leaves_the_least_cost() -> None:
    """No other change of the rest costs less, given an error of the fast planes; the cost is the Schur complement's."""
    form = LayerForm(KeyForm(64, 3), 2, joint=True)
    bases, fisher, _, _ = layer_of(SHAPE, form)
    parting = bases.parting
    assert parting is not None
    fast, other = fast_numbers(form.keys, 2, SHAPE).flatten(), other_numbers(form.keys, 2, SHAPE)
    cost = fisher.per_token(stored_name(form.keys, joint=True))[0]
    error = normal(len(fast), seed=5)

    def costs(moved: Tensor) -> float:
        whole = torch.zeros(len(cost)).double()
        whole[fast], whole[other] = error, moved
        return float(whole @ cost @ whole)

    best = error @ parting.feedback[0]
    assert costs(best) < costs(torch.zeros_like(best))
    assert all(costs(best) <= costs(best + 0.1 * normal(len(other), seed=seed)) + 1e-9 for seed in range(20))


def coded_loss(
    bases: LayerBases, codes: LayerCodes, plan: GroupChannels, numbers: Tensor, cost: Tensor, shape: AttentionShape
) -> float:
    """Mean cost of the error of a plan's codes, in nats a token."""
    coded, total = coded_bases(bases, codes, plan), 0.0
    for group in range(numbers.shape[1]):
        error = read_numbers(numbers[:, group], coded, group, shape)[0] - numbers[:, group]
        total += float(torch.einsum("ti,ij,tj->t", error, cost[group], error).mean()) / 2
    return total


@pytest.mark.parametrize("planes", [0, 3])
def test_bits_of_joint_layers_are_the_best(planes: int) -> None:
    """The predicted loss falls with bytes and is near what codes cost; neighbours of a plan that take no more bytes
    are predicted no better; fast latents have as many words."""
    shape = replace(SHAPE, head_dim=16)
    form = LayerForm(KeyForm(64, planes), 2, joint=True)
    bases, fisher, numbers, _ = layer_of(shape, form)
    codes = layer_codes(bases, fisher)
    path = BitsPath([codes], shape, (0, 2, 4, 6, 8), 2)
    cost = fisher.per_token(stored_name(form.keys, joint=True))
    measured = []
    for compression in (0.4, 0.6, 0.75):
        plan = path.at_compression(compression)
        assert plan is not None
        assert plan.channels is not None
        (layer,) = plan.channels
        parted = [key for key, _ in layer if isinstance(key, Parted)]
        assert len({key.fast_words for key in parted}) == 1
        assert [len(key.fast) for key in parted] == [2 if planes else 0] * 2
        predicted = predicted_loss(codes, layer)
        measured.append(coded_loss(bases, codes, layer, numbers, cost, shape))
        assert measured[-1] == pytest.approx(predicted, rel=0.35)
    assert measured == sorted(measured)


def test_fast_latents_within_a_plane_take_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """With few bytes, plans are predicted to lose less than those of whole planes, and no plan is to lose more; fast
    latents that are no whole planes lie in the first span of a row."""
    form = LayerForm(KeyForm(64, 3), 2, joint=True)
    bases, fisher, _, _ = layer_of(SHAPE, form)
    codes, widths = layer_codes(bases, fisher), (0, 2, 4, 6, 8)
    path = BitsPath([codes], SHAPE, widths, 2)
    monkeypatch.setattr("rotor.calibration.allocation.bits._is_tried", lambda fast, size, words: words % 4 == 0)
    whole = BitsPath([codes], SHAPE, widths, 2)
    found = set()
    for plan in whole.plans():
        finer = path.at_compression(plan.stored)
        assert finer is not None
        assert finer.stored == plan.stored
        assert finer.loss <= plan.loss * (1 + 1e-9)
        assert finer.channels is not None
        words = {key.fast_words for layer in finer.channels for key, _ in layer if isinstance(key, Parted)}
        assert all(count % 4 == 0 or 2 * count <= SPAN_WORDS for count in words)
        found |= {(count, finer.loss < 0.98 * plan.loss) for count in words}
    assert any(count % 4 and better for count, better in found)


def predicted_loss(codes: LayerCodes, layer: GroupChannels) -> float:
    total = 0.0
    for side, latents in zip(codes.sides, by_latent(layer), strict=True):
        for index, channels in enumerate(latents):
            order = side.order(index)
            bits = channels.bits + (0,) * (len(order) - channels.rank)
            losses = {width: side.losses(index, (width,))[0, order] for width in set(bits)}
            total += float(sum(losses[width][place] for place, width in enumerate(bits)))
    return total


def test_with_a_scale_a_row_all_lengths_are_alike() -> None:
    """Tokens of lengths from a quarter to four lose in proportion to the square of their length."""
    form = LayerForm(KeyForm(64, 3), 2, joint=True)
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
        loss = coded_loss(bases, codes, plan.channels[0], part, cost, SHAPE)
        relative.append(loss / float(length.square().mean()))
    assert max(relative) < 2 * min(relative)


def test_reading_makes_up_for_the_rounding_of_what_encodes() -> None:
    """All channels at 16 bits, keys far from 0, the bases that encode in bfloat16: read as if they were not rounded."""
    shape, form, size = SHAPE, KeyForm(8, 3), 2
    latent = Parted(CodedRow.of_bits([16] * 52), (CodedRow.of_bits([16] * 6),) * 2)
    bases = random_parted(latent, form, size, shape, generator(), mean=20.0)
    basis, _ = parted_basis(bases, 0, latent, shape)
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
