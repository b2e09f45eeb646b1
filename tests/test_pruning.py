"""Dropped sequences, and K-means moments against exact ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support.compare import relative_error
from support.paths import DEMO_MODEL
from support.runs import FAST_EVALUATION

from rotor import calibrate
from rotor.calibration.moments import LayerStatistics
from rotor.calibration.pruning import ClusteredStatistics, StreamingKMeans, prune_sequences
from rotor.checkpoint.layout import AttentionShape
from rotor.errors import DataError, NumericsError
from rotor.recipe.sections import Prune

SHAPE = AttentionShape(num_layers=1, num_heads=8, num_kv_heads=4, head_dim=8, hidden_size=64)


def activations(tokens: int, distinct: int | None = None) -> dict[str, torch.Tensor]:
    """Random queries, keys and values; of `distinct` tokens, each repeated, where it is given."""
    generator = torch.Generator().manual_seed(0)
    pick = torch.arange(tokens) % (distinct or tokens)
    heads = {"query": 8, "key_post": 4, "value": 4}
    return {n: torch.randn(distinct or tokens, h, 8, generator=generator)[pick] for n, h in heads.items()}


def clustered(prune: Prune, data: dict[str, torch.Tensor], batch: int, group_size: int = 1) -> LayerStatistics:
    found = ClusteredStatistics(SHAPE, group_size, prune=prune, layer=7)
    for start in range(0, len(data["value"]), batch):
        found.add({name: tensor[start : start + batch] for name, tensor in data.items()})
    return found.finish()


def exact(data: dict[str, torch.Tensor], group_size: int = 1) -> LayerStatistics:
    found = LayerStatistics(SHAPE, group_size)
    found.add(data)
    return found


def test_the_share_is_dropped() -> None:
    rows = torch.arange(160)[:, None].expand(-1, 4)
    for share in (0.0, 0.25, 0.9):
        kept, again, other = (prune_sequences(rows, Prune(share=share, seed=seed)) for seed in (0, 0, 1))
        assert len(kept) == 160 - round(160 * share)
        assert kept[:, 0].diff().gt(0).all()  # the order is kept
        assert torch.equal(kept, again)
        assert torch.equal(kept, other) == (share == 0)
    with pytest.raises(DataError, match=r"prune.share 0.9 leaves none of 1 sequences(.|\n)*tokens.count=N"):
        prune_sequences(rows[:1], Prune(share=0.9))
    with pytest.raises(DataError, match=r"prune.kmeans: 9 centroids for 8 tokens"):
        prune_sequences(rows[:4], Prune(share=0.5, kmeans=9))


@pytest.mark.parametrize("group_size", [1, 4])
def test_as_many_centroids_as_distinct_vectors_give_the_exact_moments(group_size: int) -> None:
    data = activations(1500, distinct=20)
    expected = exact(data, group_size)
    found = clustered(Prune(kmeans=48), data, 100, group_size)  # 40 distinct queries a KV head
    assert type(found) is LayerStatistics
    assert found.tokens == 1500
    assert found.sums.keys() == expected.sums.keys()
    for name, total in expected.sums.items():
        assert relative_error(found.sums[name], total) < 1e-12


def test_weighted_centroids_keep_the_mean_and_lose_the_variance_within_clusters() -> None:
    """Counts and running means are exact: sum_c n_c c = sum x, and the moment never exceeds the exact one."""
    vectors = np.random.default_rng(0).standard_normal((5000, 16)) + 1.0
    lost = []
    for k in (8, 64, 512):
        stream = StreamingKMeans(k, seed=0)
        for part in np.array_split(vectors, 7):
            stream.add(part)
        centroids, counts = stream.finish()
        assert counts.sum() == 5000
        np.testing.assert_allclose(counts @ centroids, vectors.sum(0), rtol=1e-10)
        gap = vectors.T @ vectors - (centroids * counts[:, None]).T @ centroids
        assert np.linalg.eigvalsh(gap).min() > -1e-8 * np.trace(gap)
        lost.append(np.trace(gap))
    assert lost[0] > lost[1] > lost[2] > 0


def test_the_result_depends_on_the_seed_and_not_on_how_tokens_are_batched() -> None:
    data = activations(3000)
    whole, parts, other = (
        clustered(Prune(kmeans=32, seed=seed), data, size).sums for size, seed in ((3000, 0), (113, 0), (3000, 1))
    )
    for name in data:
        assert torch.equal(whole[name], parts[name])
        assert not torch.equal(whole[name], other[name])


def test_what_o_proj_receives_stays_exact() -> None:
    data = activations(1100) | {"output": torch.randn(1100, 8, 16, generator=torch.Generator().manual_seed(1))}
    found, expected = clustered(Prune(kmeans=16), data, 1100, 2), exact(data, 2)
    assert torch.equal(found.sums["output"], expected.sums["output"])
    assert not torch.allclose(found.sums["value"], expected.sums["value"])
    torch.testing.assert_close(found.sums["key_post_mean"], expected.sums["key_post_mean"])


def test_a_vector_that_is_not_finite_names_its_layer() -> None:
    data = activations(10)
    data["value"][3, 2, 1] = float("nan")
    with pytest.raises(NumericsError, match=r"layer 7: value is not finite(.|\n)*--dtype float32"):
        clustered(Prune(kmeans=4), data, 10)


def test_calibrating_on_half_of_the_rows_with_centroids(tmp_path: Path) -> None:
    settings = ["tokens.count=2048", "tokens.seq_len=64", "tokens.source=random", "prune.kmeans=64"]
    info = calibrate(DEMO_MODEL, tmp_path / "run", "zdc", settings).info["tokens"]
    assert (info["count"], info["rows"], info["pruned_rows"]) == (1024, 16, 16)


def test_the_share_is_dropped_within_each_topic() -> None:
    """Topics of 100, 40 and 7 sequences, mixed, and 13 of one each: ZDC section 5.1."""
    topics = ["large"] * 100 + ["middle"] * 40 + ["small"] * 7 + [f"one {i}" for i in range(13)]
    order = torch.randperm(160, generator=torch.Generator().manual_seed(4)).tolist()
    topics = [topics[place] for place in order]
    rows = torch.arange(160)[:, None].expand(-1, 4)
    for share in (0.25, 0.5, 0.9):
        for seed in range(3):
            kept = prune_sequences(rows, Prune(share=share, seed=seed), topics)[:, 0].tolist()
            assert kept == sorted(set(kept))
            assert len(kept) == 160 - round(160 * share)
            for topic, count in (("large", 100), ("middle", 40), ("small", 7)):
                left = sum(topics[place] == topic for place in kept)
                assert abs(left - (1 - share) * count) <= 1
    one_topic = prune_sequences(rows, Prune(share=0.5), ["same"] * 160)
    assert torch.equal(one_topic, prune_sequences(rows, Prune(share=0.5)))


def test_topics_are_files_or_what_lines_say(tiny, tmp_path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for name in ("a", "b"):
        (text / f"{name}.txt").write_text(f"{name} is a letter of the alphabet. " * 120)
    lines = [{"text": f"line {i} of a file. " * 100, "topic": f"topic {i % 2}"} for i in range(4)]
    (text / "c.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    spec = ["tokens.source=text", f"tokens.path={text}", "tokens.count=2048", "tokens.seq_len=64", "prune.share=0.5"]
    run = calibrate(tiny("llama"), tmp_path / "run", "fdc", [*spec, *FAST_EVALUATION])
    about = run.info["tokens"]
    assert (about["topics"], about["pruned_rows"], about["rows"]) == (4, 16, 16)
