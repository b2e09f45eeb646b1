"""Bits per channel: Fisher information, the quantiser, allocation, and folding."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from support.attention import attention_to_two_kinds
from support.compare import relative_error
from torch import Tensor

from rotor.calibration.allocation.channel_bits import bit_curve, bit_path
from rotor.calibration.bases.fisher import of_values
from rotor.calibration.bases.kq import closed_form
from rotor.calibration.bases.method import Inputs
from rotor.calibration.capture import EXACT_SHARE
from rotor.calibration.codes.layer import layer_codes
from rotor.calibration.codes.quantiser import ChannelFit, measure_channels
from rotor.calibration.gradient_sums import GradientClip, SampleKeeper
from rotor.calibration.gradients import fisher_information
from rotor.calibration.information import LayerFisher
from rotor.calibration.moments import LayerStatistics, stored_name
from rotor.checkpoint.bases import BasisPair, ChannelCode, FoldedBasis, LayerBases
from rotor.checkpoint.families import find_family
from rotor.checkpoint.folding import fold_code
from rotor.checkpoint.layout import POST_ROPE, PRE_ROPE, AttentionShape, ExactTokens, KeyForm
from rotor.checkpoint.rows import CodedRow
from rotor.errors import NumericsError
from rotor.models.layerwise import LayerwiseModel
from rotor.models.loading import load_model, weights_of
from rotor.models.source import Checkpoint

WIDTHS = (0, 2, 4, 6, 8, 12, 16)


def normal(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def code_of(fit: ChannelFit, *bits: int) -> ChannelCode:
    """Of a fit at WIDTHS."""
    index, channels = torch.tensor([WIDTHS.index(b) for b in bits]), torch.arange(len(bits))
    return ChannelCode(torch.tensor(bits), fit.mean[index, channels], fit.scale[index, channels])


def test_distortion_of_a_gaussian_is_that_of_the_best_uniform_quantiser():
    """Max, "Quantizing for minimum distortion" (1960), table II: equally spaced levels."""
    statistics = measure_channels(normal(200_000, 1), None, (0, 4))
    assert statistics.distortion[:, 0].tolist() == pytest.approx([1.0, 0.01154], rel=0.02)
    assert statistics.scale[1:, 0].tolist() == pytest.approx([0.3352], rel=0.03)


@pytest.mark.parametrize("outlier", [1.0, 100.0])
def test_more_bits_never_leave_more(outlier: float):
    latents = normal(4096, 8)
    latents[0] *= outlier
    weights = normal(4096, 8, seed=1).square()
    distortion = measure_channels(latents, weights, WIDTHS).distortion
    assert (distortion[1:] <= distortion[:-1] * (1 + 1e-3)).all()
    assert (distortion[4] < distortion[2] / 3).all()


def test_distortion_is_what_encode_and_decode_leave():
    latents = normal(1000, len(WIDTHS)) * torch.tensor([1.0, 2.0, 5.0, 3.0, 0.1, 30.0, 2.0]) + 4
    statistics = measure_channels(latents, None, WIDTHS)
    code = code_of(statistics, *WIDTHS)
    codes = code.encode(latents)
    expected = (statistics.distortion * statistics.variance).diagonal()
    left = (code.decode(codes) - latents).square().mean(0)
    assert relative_error(left[:5], expected[:5]) < 1e-9
    assert (left[5:] < expected[5:]).all()  # which count the rounding of a projection in bfloat16
    for channel, bits in enumerate(WIDTHS):
        assert set(codes[:, channel].tolist()) <= set(range(2**bits))


def test_a_constant_channel_costs_nothing_at_any_width_and_nan_is_refused():
    statistics = measure_channels(torch.full((64, 1), 3.0, dtype=torch.float64), None, WIDTHS)
    assert (statistics.distortion * statistics.variance).max() < 1e-12
    assert float(code_of(statistics, 0).decode(torch.zeros(1, 1))) == 3.0
    with pytest.raises(NumericsError, match="NaN or Inf"):
        measure_channels(torch.tensor([[1.0], [torch.nan]], dtype=torch.float64), None, (2,))


def test_a_sample_of_weight_two_is_two_samples():
    latents = normal(300, 2)
    twice = torch.randint(1, 4, latents.shape[:1], generator=torch.Generator().manual_seed(1))
    weighted = measure_channels(latents, twice.double().unsqueeze(1).expand_as(latents) / 7, WIDTHS)
    repeated = measure_channels(latents.repeat_interleave(twice, 0), None, WIDTHS)
    for name in ("variance", "mean", "scale", "distortion"):
        assert relative_error(getattr(weighted, name), getattr(repeated, name)) < 1e-6, name


def test_kept_tokens_are_the_heaviest_and_some_of_the_others():
    vectors, gradients = normal(100, 2, 3), normal(100, 2, 3, seed=1)
    vectors[17] *= 50
    gradients[80] *= 50
    found = []
    for batch in (100, 32, 7):
        keeper = SampleKeeper(100, 1, 20, seed=3)
        for x, g in zip(vectors.split(batch), gradients.split(batch), strict=True):
            keeper.add(x, g)
        found.append(keeper.samples())
    first = found[0]
    for other in found[1:]:
        assert all(
            torch.equal(getattr(other, name), getattr(first, name)) for name in ("vectors", "gradients", "share")
        )
    assert torch.equal(first.vectors[:2], vectors[[80, 17]].float()) or torch.equal(
        first.vectors[:2], vectors[[17, 80]].float()
    )
    scores = vectors.flatten(1).square().sum(1) * gradients.flatten(1).square().sum(1)
    assert torch.equal(first.vectors[:10], vectors[scores.topk(10).indices].float())
    assert torch.equal(first.gradients[:10], gradients[scores.topk(10).indices].float())
    assert 10 < len(first.share) <= 20
    assert float(first.share.sum()) == pytest.approx(1)
    assert first.share[:10].tolist() == pytest.approx([0.01] * 10)
    assert first.share[10:].tolist() == pytest.approx([0.9 / (len(first.share) - 10)] * (len(first.share) - 10))


def test_an_attention_sink_is_coded_without_error():
    """The first token of each row is the same and far out: it gets a channel, and levels that go through it."""
    x, g, sink = normal(64 * 32, 2, 4), normal(64 * 32, 2, 4, seed=1), 9 * normal(2, 4, seed=2)
    x[::32], g[::32] = sink, 30 * g[::32]
    shape = AttentionShape(1, 2, 2, 4, 8)
    found, information = LayerStatistics(shape, 2), LayerStatistics(shape, 2)
    found.add({"value": x, "key_post": x})
    information.add({"value": g, "key_post": g})
    keeper = SampleKeeper(64 * 32, 32, 1024, seed=0)
    keeper.add(x, g)
    fisher = LayerFisher(information, dict.fromkeys(("value", "key_post"), keeper.samples()), 0.0)
    assert relative_error(fisher.first("value")[0], sink.flatten()) < 1e-6
    pair = of_values(Inputs(found, None, POST_ROPE, fisher))
    codes = layer_codes(LayerBases(POST_ROPE, 2, (pair, pair)), fisher)
    order, code = codes.vo.code(0, CodedRow(n4=8))
    pair = pair.ordered(order[None])
    at = sink.flatten() @ pair.encode[0]
    read = code.decode(code.encode(at)) @ pair.decode[0].mT
    assert relative_error(read, sink.flatten()) < 1e-6
    others = x.flatten(1)[1::32]
    assert relative_error(code.decode(code.encode(others @ pair.encode[0])) @ pair.decode[0].mT, others) < 0.3


def test_loss_of_a_channel_counts_each_tokens_own_gradient():
    """Large latents with large gradients: half of the loss is the mean of g^2 e^2, not a product of means."""
    x, g = normal(512, 1, 4), normal(512, 1, 4, seed=1)
    x[:5], g[:5] = 20 * x[:5], 30 * g[:5]
    shape = AttentionShape(1, 1, 1, 4, 4)
    information = LayerStatistics(shape, 1)
    information.add({"value": g, "key_post": g})
    keeper = SampleKeeper(512, 64, 1024, seed=0)
    keeper.add(x, g)
    fisher = LayerFisher(information, dict.fromkeys(("value", "key_post"), keeper.samples()), 0.0)
    pair = BasisPair(*(torch.eye(4, dtype=torch.float64)[None],) * 2, torch.ones(1, 4, dtype=torch.float64))
    codes = layer_codes(LayerBases(POST_ROPE, 1, (pair, pair)), fisher)
    for bits in (4, 8):
        order, code = codes.vo.code(0, CodedRow(**{f"n{bits}": 4}))
        latents = x[:, 0, order]
        errors = code.decode(code.encode(latents)) - latents
        squares = g[:, 0, order].square()
        expected = ((squares + squares.mean(0)) / 2 * errors.square()).mean(0) / 2
        assert relative_error(codes.vo.losses(0, (bits,))[0, order], expected) < 1e-4
    assert codes.vo.losses(0, (0,)).sum() > 3 * float((g.square().mean(0) * x.square().mean(0)).sum() / 2)


def all_losses(losses: np.ndarray, widths: tuple[int, ...]) -> dict[int, float]:
    """The least loss for each number of crumbs, by trying every assignment."""
    best: dict[int, float] = {}
    for chosen in itertools.product(range(len(widths)), repeat=losses.shape[1]):
        crumbs = sum(widths[c] // 2 for c in chosen)
        best[crumbs] = min(best.get(crumbs, np.inf), sum(losses[c, i] for i, c in enumerate(chosen)))
    return best


@pytest.mark.parametrize("widths", [WIDTHS, (0, 4, 8, 12), (0, 8), (0, 4, 16)])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("scaled", [False, True])
def test_curve_is_the_best_of_all_assignments(seed: int, widths: tuple[int, ...], scaled: bool):
    """Of units of 3 nibbles, so that few channels fill some; one of the first may hold a scale."""
    energy = normal(6, seed=seed).square()
    left = torch.tensor([{0: 1.0, 2: 0.12, 4: 0.012, 6: 1e-3, 8: 1e-4, 12: 1e-6, 16: 1e-8}[bits] for bits in widths])
    losses = energy * left[:, None].double()
    curve = bit_curve(losses, widths, scaled, unit=3)
    expected = all_losses(losses.numpy(), widths)
    assert curve.loss[0] == np.inf
    assert len(curve.loss) == -(-(6 * max(widths) // 2 + 2 * scaled) // 6) + 1
    for units, loss in enumerate(curve.loss[1:], start=1):
        room = 6 * units - 2 * scaled
        least = min((x for crumbs, x in expected.items() if 0 < crumbs <= room), default=np.inf)
        assert loss == pytest.approx(least, rel=1e-9)
        if not np.isfinite(loss):
            continue
        bits = curve.channels(units).bits
        order = torch.argsort(losses[widths.index(0)], descending=True)
        got = losses[widths.index(0)].sum() - sum(
            losses[widths.index(0), i] - losses[widths.index(b), i] for b, i in zip(bits, order, strict=False)
        )
        assert float(got) == pytest.approx(loss, rel=1e-9, abs=1e-15)
        assert sum(bits) // 2 <= room


def test_path_splits_every_number_of_units_best():
    rng = np.random.default_rng(0)
    curves = [np.sort(rng.random(size))[::-1] for size in (4, 3, 5)]
    path = bit_path(curves)
    for units in range(sum(map(len, curves)) - 2):
        options = [c for c in itertools.product(*(range(len(c)) for c in curves)) if sum(c) == units]
        best = min(sum(curve[i] for curve, i in zip(curves, option, strict=True)) for option in options)
        assert path.loss[units] == pytest.approx(best)
        split = path.split(units)
        assert sum(split) == units
        assert sum(curve[i] for curve, i in zip(curves, split, strict=True)) == pytest.approx(best)


CHANNELS = CodedRow(n16=1, n12=2, n8=3, n6=2, n4=3, n2=1)
"""Of 16, with 4 left out: 21 nibbles and 3 crumbs, in a row of 32 places, 8 of which are split."""


def fitted(seed: int, dim: int = 16, samples: int = 256) -> tuple[Tensor, Tensor, Tensor, ChannelCode]:
    """Samples [samples, dim] with a mean, bases of all columns, and their code by CHANNELS."""
    x = normal(samples, dim, seed=seed) @ normal(dim, dim, seed=seed + 1) + 3 * normal(dim, seed=seed + 2)
    read = normal(64, dim, seed=seed + 3)
    pair = closed_form((read.T @ read)[None], (x.T @ x)[None])
    encode, decode = pair.encode[0], pair.decode[0]
    code = code_of(measure_channels(x @ encode, None, WIDTHS), *CHANNELS.bits, 0, 0, 0, 0)
    return x, encode, decode, code


def rows_of(folded: FoldedBasis, projected: Tensor) -> Tensor:
    """Numbers that attention reads of a projection's output: through the bytes of a row."""
    return CHANNELS.unpack(CHANNELS.pack(projected), torch.float64)


def test_folded_projection_puts_out_the_codes_and_reads_them_back():
    _, encode, decode, code = fitted(0)
    hidden, weight, bias = normal(256, 24, seed=9), normal(16, 24, seed=10), normal(16, seed=11)
    folded = fold_code(encode, decode, code, CHANNELS)
    assert folded.decode.shape == (16, 40)
    assert not folded.decode[:, [*range(21, 30), *range(32, 38)]].any()
    for own in (None, bias):
        keys = hidden @ weight.T + (0 if own is None else own)
        folded_bias = folded.shift + (0 if own is None else folded.encode.T @ own)
        projected = hidden @ (folded.encode.T @ weight).T + folded_bias
        expected = code.decode(code.encode(keys @ encode)) @ decode.T
        read = rows_of(folded, projected) @ folded.decode.T + folded.constant
        assert relative_error(read, expected) < 1e-6  # packing floors in float32: of 16 bits a step may differ
        nibbles = code.encode(keys @ encode)[:, 8:11] - 8  # channels of 4 bits, in places 18 to 20
        assert torch.equal(rows_of(folded, projected)[:, 18:21], nibbles)


def test_what_rounding_moved_a_projection_by_is_made_good():
    x, encode, decode, code = fitted(0)
    folded = fold_code(encode, decode, code, CHANNELS)
    steps = normal(CHANNELS.rank, seed=3)
    moved = folded.shifted(steps)
    exact, off = (rows_of(f, x @ f.encode + f.shift) @ f.decode.T + f.constant for f in (folded, moved))
    unaware = rows_of(moved, x @ moved.encode + moved.shift) @ folded.decode.T + folded.constant
    assert relative_error(off, x) < 1.2 * relative_error(exact, x) < relative_error(unaware, x)


BEFORE = PRE_ROPE
"""Of the tiny models, whose heads have 16 dimensions."""


def every(network: LayerwiseModel) -> frozenset[str]:
    """All that gradients can be taken by."""
    forms = [POST_ROPE] if network.family.rotary is None else [POST_ROPE, BEFORE, KeyForm(8)]
    return frozenset({"value"} | {stored_name(form, joint) for form in forms for joint in (False, True)})


def test_the_longest_gradients_are_shortened_whatever_the_batches():
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(1000, 2, 4, generator=generator)
    gradients[[17, 404]] *= 1000
    squares = gradients.flatten(1).double().square().sum(1)
    bound = squares.sort(descending=True).values[9]  # one in a hundred is longer, or as long
    expected = gradients.flatten(1).double() * (bound / squares).clamp(max=1).sqrt()[:, None]
    for size in (7, 1000):
        clip = GradientClip(len(gradients))
        for part in gradients.split(size):
            clip.add(part)
        assert relative_error(clip.shortened(gradients).flatten(1).double(), expected) < 1e-6
        whole, excess = gradients.flatten(1).double(), clip.excess().flatten(1).double()
        assert relative_error(whole.T @ whole - excess.T @ excess, expected.T @ expected) < 1e-4
    few = GradientClip(99)
    few.add(gradients[:99])
    assert torch.equal(few.shortened(gradients[:99]), gradients[:99])


@pytest.mark.parametrize(
    ("family", "tokens"),
    [
        *((family, None) for family in ("llama", "qwen3", "gpt2", "falcon", "phi3")),
        ("llama", ExactTokens(2, 3)),
        ("gpt2", ExactTokens(1, 100)),
    ],
)
def test_fisher_information_is_that_of_the_whole_models_gradients(family: str, tokens: ExactTokens | None, tiny):
    """Against autograd through the model in one go; with exact tokens, by keys and values of two kinds.

    Of rows of 16 tokens no more than the 4 newest count as exact.
    """
    from transformers import AttentionInterface

    from rotor.kernels.reference.attention import dense_attention

    model = load_model(tiny(family), torch.device("cpu"), torch.float32)
    network = LayerwiseModel.of(model, batch_tokens=32)
    shape = network.shape
    rows = torch.randint(5, 4000, (3, 16), generator=torch.Generator().manual_seed(0))
    wanted = every(network)
    every_layer = [wanted] * shape.num_layers
    found = dict(fisher_information(network, rows, shape.num_kv_heads, every_layer, samples=7, exact=tokens))
    # What is taken by both together holds what is taken by each, head by head.
    for joint in (name for name in wanted if name.startswith("joint")):
        heads = (shape.num_kv_heads, 2, -1)
        both = found[0].information.moment(joint)[0].unflatten(0, heads).unflatten(3, heads)
        for side, name in enumerate((joint.replace("joint", "key"), "value")):
            own = both[:, side, :, :, side].flatten(0, 1).flatten(1, 2)
            assert relative_error(own, found[0].information.moment(name)[0]) < 1e-12
        assert found[0].samples[joint].vectors.shape[1:] == (shape.num_kv_heads, 2 * shape.head_dim)
    if network.family.bypasses_interface:
        assert set(found[0].samples) == wanted
        assert found[0].information.tokens == rows.numel()
        return
    moved: dict[tuple[int, str], Tensor] = {}

    def attention(module, query, key, value, mask, scaling=None, softcap=None, **kwargs):
        coded = (key, value) if tokens is None else (key.clone(), value.clone())
        moved[module.layer_idx, "key_post"], moved[module.layer_idx, "value"] = coded
        if tokens is None:
            output = dense_attention(query, key, value, scaling, mask, softcap=softcap)
        else:
            counted = ExactTokens(tokens.first, min(tokens.newest, 4))
            scaling = scaling or key.shape[-1] ** -0.5
            output = attention_to_two_kinds(query, (key, value), coded, counted, scaling, share=EXACT_SHARE)
        return output.unflatten(-1, (shape.num_heads, -1)), None

    AttentionInterface.register("rotor_test_fisher", attention)
    model.config._attn_implementation = "rotor_test_fisher"
    totals: dict[tuple[int, str], Tensor] = {}
    of_tokens: dict[int, list[Tensor]] = {layer: [] for layer in found}
    for row in rows.split(1):
        logits = model(
            inputs_embeds=model.get_input_embeddings()(row).detach().requires_grad_(), use_cache=False
        ).logits
        loss = torch.nn.functional.cross_entropy(logits[0, :-1], row[0, 1:], reduction="sum")
        for key, g in zip(moved, torch.autograd.grad(loss, list(moved.values())), strict=True):
            stacked = g[0].transpose(0, 1).flatten(1).double()
            totals[key] = totals.get(key, 0) + stacked.T @ stacked
            of_tokens[key[0]].append(stacked.square().sum(1))
    for layer, squares in of_tokens.items():  # keys and values of each row; 0.1 % of so few tokens is one
        by_token = torch.stack(squares).unflatten(0, (-1, 2)).sum(1)
        assert found[layer].top_share == pytest.approx(float(by_token.max() / by_token.sum()), rel=1e-3)
    for (layer, name), expected in totals.items():
        got = found[layer].information.moment(name)[0]
        assert relative_error(got, expected) < 1e-3, (layer, name)
        kept = found[layer].samples[name]
        assert 4 <= len(kept.vectors) <= 7
        assert kept.vectors.shape == kept.gradients.shape == (len(kept.share), shape.num_kv_heads, shape.head_dim)


def test_fisher_information_is_the_same_with_weights_read_layer_by_layer(tiny):
    rows = torch.randint(5, 4000, (2, 24), generator=torch.Generator().manual_seed(0))
    checkpoint = Checkpoint(tiny("llama"))
    assert find_family(checkpoint.config).rotary is not None
    results = []
    for streamed in (False, True):
        weights = weights_of(checkpoint, torch.device("cpu"), torch.float32, streamed)
        network = LayerwiseModel(weights)
        results.append(
            dict(fisher_information(network, rows, 2, [every(network)] * network.shape.num_layers, samples=9))
        )
    for layer, whole in results[0].items():
        for name in every(network):
            got = results[1][layer].per_token(name)
            assert relative_error(got, whole.per_token(name)) < 1e-5
            got, expected = results[1][layer].samples[name], whole.samples[name]
            assert relative_error(got.vectors, expected.vectors) < 1e-5
            assert relative_error(got.gradients, expected.gradients) < 1e-4
            assert torch.equal(got.share, expected.share)


def test_quadratic_form_predicts_a_small_change_of_the_loss(tiny):
    """KL of a small error of the values is e^T F e / 2 on average over text that the model wrote itself."""
    from rotor.models.tokens import calibration_tokens
    from rotor.models.weights import Weights
    from rotor.recipe.sections import Tokens

    checkpoint = Checkpoint(tiny("gpt2"))
    model = load_model(tiny("gpt2"), torch.device("cpu"), torch.float32)
    spec = Tokens("synthetic", count=1024, seq_len=64)
    rows = calibration_tokens(spec, checkpoint.config, None, Weights(model)).sequences
    network = LayerwiseModel.of(model)
    found = dict(
        fisher_information(network, rows, network.shape.num_kv_heads, [every(network)] * network.shape.num_layers)
    )
    width = network.shape.num_kv_heads * network.shape.head_dim
    error = 0.02 * torch.randn(rows.shape[0], rows.shape[1], width, generator=torch.Generator().manual_seed(3))
    expected = 0.5 * 0.02**2 * float(found[0].per_token("value")[0].trace())

    def shifted(module, inputs, output):
        return torch.cat([output[..., :-width], output[..., -width:] + error], dim=-1)

    with torch.inference_mode():
        before = model(rows, use_cache=False).logits.double().log_softmax(-1)
        handle = model.transformer.h[0].attn.c_attn.register_forward_hook(shifted)
        after = model(rows, use_cache=False).logits.double().log_softmax(-1)
        handle.remove()
    kl = float((before.exp() * (before - after)).sum(-1)[:, :-1].sum() / rows.numel())
    assert kl == pytest.approx(expected, rel=0.15)
