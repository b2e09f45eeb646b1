"""Bases against definitions: scipy's SVD, the closed form's error and its inverse, block structure."""

import numpy as np
import pytest
import scipy.linalg
import torch

from rotor.calibration.bases import kq, palu, svd
from rotor.calibration.bases.method import Inputs, block_diagonal, output_moments, rotary_average
from rotor.calibration.information import LayerFisher, TokenSamples
from rotor.calibration.moments import LayerStatistics
from rotor.checkpoint.bases import LayerBases
from rotor.checkpoint.folding import fold_layer, layer_layout
from rotor.checkpoint.layout import POST_ROPE, AttentionShape
from rotor.checkpoint.projections import AttentionWeights
from rotor.kernels.rotary import rotate

DOUBLE = torch.float64


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def anisotropic(rows: int, dim: int, seed: int) -> torch.Tensor:
    return (
        random(rows, dim, seed=seed)
        @ torch.diag(torch.logspace(0, -3, dim, dtype=DOUBLE))
        @ random(dim, dim, seed=seed + 50)
    )


def test_svd_equals_scipy_on_the_stacked_matrix_up_to_sign() -> None:
    queries, keys = anisotropic(300, 16, 1), anisotropic(100, 16, 2)
    pair = svd.of_moment((queries.T @ queries + keys.T @ keys)[None])
    _, values, right = scipy.linalg.svd(np.concatenate([queries.numpy(), keys.numpy()]), full_matrices=False)
    np.testing.assert_allclose(pair.singular_values[0].numpy(), values, rtol=1e-6)
    alignment = np.abs(np.sum(pair.encode[0].numpy() * right.T, axis=0))
    np.testing.assert_allclose(alignment, 1.0, atol=1e-8)
    assert torch.equal(pair.encode, pair.decode)
    largest = pair.encode.abs().argmax(dim=1, keepdim=True)
    assert (pair.encode.gather(1, largest) > 0).all()


def test_palu_equals_scipy_on_the_weight() -> None:
    weight = random(2 * 8, 24)
    pair = palu.from_weight(weight, 8)
    for group in range(2):
        left, values, _ = scipy.linalg.svd(weight[group * 8 : group * 8 + 8].numpy())
        np.testing.assert_allclose(pair.singular_values[group].numpy(), values, rtol=1e-10)
        np.testing.assert_allclose(np.abs(np.sum(pair.encode[group].numpy() * left, axis=0)), 1.0, atol=1e-10)


@pytest.mark.parametrize("rank", [1, 8, 16])
def test_closed_form_error_is_the_sum_of_dropped_squares(rank: int) -> None:
    queries, keys = random(400, 16, seed=6) @ random(16, 16, seed=7), random(300, 16, seed=8) @ random(16, 16, seed=9)
    pair = kq.closed_form((queries.T @ queries)[None], (keys.T @ keys)[None])
    encode, decode = pair.encode[0, :, :rank], pair.decode[0, :, :rank]
    error = (queries @ keys.T - (queries @ decode) @ (keys @ encode).T).square().sum()
    dropped = pair.singular_values[0, rank:].square().sum()
    torch.testing.assert_close(error, dropped, rtol=1e-6, atol=1e-6)
    if rank == 16:
        torch.testing.assert_close(encode @ decode.T, torch.eye(16, dtype=DOUBLE), atol=1e-8, rtol=0)


def test_closed_form_of_blocks_is_that_of_the_whole() -> None:
    keys = anisotropic(300, 24, 5)
    queries = torch.stack([anisotropic(200, 8, seed) for seed in (6, 7, 8)])
    read, store = block_diagonal(queries.mT @ queries, 3), (keys.T @ keys)[None]
    whole, blocks = kq.closed_form(read, store), kq.closed_form(read, store, heads=3)
    torch.testing.assert_close(blocks.singular_values, whole.singular_values, rtol=1e-8, atol=1e-8)
    for rank in (2, 9, 24):
        product = [pair.encode[0, :, :rank] @ pair.decode[0, :, :rank].T for pair in (whole, blocks)]
        torch.testing.assert_close(product[1], product[0], rtol=1e-6, atol=1e-8)


def test_degenerate_moments_give_finite_bases() -> None:
    """A dead reader and a singular store; an unused direction has a singular value of exactly zero."""
    store = torch.zeros(2, 8, 8, dtype=DOUBLE)
    store[0, :3, :3] = torch.eye(3, dtype=DOUBLE)
    pair = kq.closed_form(torch.zeros(2, 8, 8, dtype=DOUBLE), store)
    for tensor in (pair.encode, pair.decode, pair.singular_values):
        assert torch.isfinite(tensor).all()
    rows = random(200, 8)
    rows[:, 5] = 0
    pair = svd.of_moment(2 * (rows.T @ rows)[None])
    assert pair.singular_values[0, -1] == 0
    assert (pair.singular_values[0, :-1] > 0).all()


def test_block_diagonal_puts_each_head_in_its_own_block() -> None:
    moments = random(4, 3, 3)
    blocks = block_diagonal(moments, 2)
    assert blocks.shape == (2, 6, 6)
    torch.testing.assert_close(blocks[1, :3, :3], moments[2])
    torch.testing.assert_close(blocks[1, 3:, 3:], moments[3])
    assert (blocks[:, :3, 3:] == 0).all()


@pytest.mark.parametrize("rotary_dim", [8, 4])
def test_rotary_average_is_the_average_over_rotations(rotary_dim: int) -> None:
    """Averaging R m R^T over many positions tends to what rotary_average gives: a diagonal, where RoPE turns."""
    dim = 8
    queries = random(50, dim)
    moment = queries.T @ queries
    positions = torch.arange(20000, dtype=DOUBLE)
    frequencies = 1.0 / (10.0 ** (torch.arange(0, rotary_dim, 2, dtype=DOUBLE) / rotary_dim))
    angles = torch.cat([positions[:, None] * frequencies] * 2, dim=-1)
    total = torch.zeros(dim, dim, dtype=DOUBLE)
    for query in queries:
        rotated = rotate(query.expand(len(positions), dim), angles.cos(), angles.sin())
        total += rotated.T @ rotated / len(positions)
    torch.testing.assert_close(
        rotary_average(moment[None], rotary_dim)[0], total, rtol=0, atol=0.02 * float(moment.diagonal().mean())
    )


def test_output_moments_sum_over_the_query_heads_of_a_kv_head() -> None:
    shape = AttentionShape(num_layers=1, num_heads=4, num_kv_heads=2, head_dim=3, hidden_size=5)
    weight = random(5, 12)
    expected = weight[:, 6:9].T @ weight[:, 6:9] + weight[:, 9:12].T @ weight[:, 9:12]
    torch.testing.assert_close(output_moments(weight, shape)[1], expected)


def test_spread_is_about_the_mean_and_first_tokens_count_as_a_tenth() -> None:
    shape = AttentionShape(num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4, hidden_size=4)
    keys = random(50, 1, 4) + 7
    statistics = LayerStatistics(shape, 1)
    statistics.add({"key_post": keys, "query": random(50, 2, 4, seed=3)})
    weights = AttentionWeights(random(8, 4), random(4, 4), random(4, 4), random(4, 8))
    first = random(1, 4, seed=4).float()
    samples = TokenSamples(keys.float(), keys.float(), torch.full((50,), 0.02), first)
    fisher = LayerFisher(statistics, {"key_post": samples}, 0.0)
    spread = Inputs(statistics, weights, POST_ROPE, fisher).spread("key_post")[0]
    rows, far = keys[:, 0] - keys[:, 0].mean(0), first[0].double() - keys[:, 0].mean(0)
    torch.testing.assert_close(spread, rows.T @ rows + 0.1 * 50 * torch.outer(far, far))


@pytest.mark.parametrize("group_size", [1, 2])
def test_refit_is_exact_at_full_rank_and_never_worse_below(group_size: int) -> None:
    """The refitted W_o has the least squared error on the outputs that its moments are of."""
    shape = AttentionShape(num_layers=1, num_heads=4, num_kv_heads=2, head_dim=4, hidden_size=6)
    width = group_size * 4
    outputs = random(200, 4, width) @ random(width, width, seed=5)
    weights = AttentionWeights(*(random(n, 6, seed=i) for i, n in enumerate((16, 8, 8))), random(6, 16, seed=9))
    values = random(2 // group_size, 300, width, seed=4) @ random(width, width, seed=6)
    readers = block_diagonal(output_moments(weights.o_weight, shape), group_size)
    pair = kq.closed_form(readers, values.mT @ values)
    moments = torch.einsum("nhd,nhe->hde", outputs, outputs)
    errors = {}
    for rank in (1, 2, width):
        for refit in (False, True):
            bases = LayerBases(POST_ROPE, group_size, (pair, pair), moments if refit else None)
            layout = layer_layout(bases, [(rank, rank)] * (2 // group_size))
            o_weight = fold_layer(weights, bases, layout, shape)["o_proj.weight"].unflatten(1, (4, rank))
            total = 0.0
            for position in range(4):
                kv_head = layout.kv_head_order[position // 2]
                head = kv_head * 2 + position % 2
                own = slice(kv_head % group_size * 4, kv_head % group_size * 4 + 4)
                encode = pair.encode[kv_head // group_size][:, :rank]
                wanted = outputs[:, head, own] @ weights.o_weight[:, head * 4 : head * 4 + 4].T
                got = outputs[:, head] @ encode @ o_weight[:, position].T
                total += float((wanted - got).square().sum())
            errors[rank, refit] = total
    assert errors[width, True] < 1e-12 * errors[1, True]
    for rank in (1, 2):
        assert errors[rank, True] <= errors[rank, False] * (1 + 1e-9)
    assert errors[1, True] < 0.999 * errors[1, False]
