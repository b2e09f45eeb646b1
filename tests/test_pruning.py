"""Dropped sequences, and K-means moments against exact ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import DEMO_MODEL, FAST_EVALUATION, relative_error

import rotor.calibration.pruning
from rotor.bases.moments import LayerStatistics
from rotor.calibration.calibrate import calibrate
from rotor.calibration.pruning import BATCH_VECTORS, EXACT, ClusteredStatistics, StreamingKMeans, prune_rows
from rotor.calibration.run import read_statistics
from rotor.data.rows import CalibrationTokens
from rotor.errors import DataError, NumericsError, RecipeError
from rotor.format.layout import AttentionShape
from rotor.recipe import Prune, load_recipe, parse_recipe

SHAPE = AttentionShape(num_layers=1, num_heads=8, num_kv_heads=4, head_dim=8, hidden_size=64)


def labelled(**topics: int) -> CalibrationTokens:
    names = tuple(name for name, count in topics.items() for _ in range(count))
    return CalibrationTokens(torch.arange(len(names))[:, None].expand(-1, 4).clone(), names)


def activations(tokens: int, distinct: int | None = None, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random queries, keys and values; of `distinct` tokens, each repeated, where it is given."""
    generator = torch.Generator().manual_seed(seed)
    pick = torch.arange(tokens) % (distinct or tokens)
    heads = {"query": 8, "key_post": 4, "value": 4}
    return {n: torch.randn(distinct or tokens, h, 8, generator=generator)[pick] for n, h in heads.items()}


def clustered(prune: Prune, group_size: int = 1) -> ClusteredStatistics:
    return ClusteredStatistics(SHAPE, group_size, prune=prune)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.9])
def test_the_share_is_dropped_within_each_topic(share: float) -> None:
    tokens = labelled(a=40, b=17, c=3, d=100)
    kept = prune_rows(tokens, Prune(share=share))
    assert len(kept.topics) == kept.rows.shape[0] == 160 - round(160 * share)
    for topic, count in tokens.topic_counts().items():
        assert abs(kept.topic_counts().get(topic, 0) - count * (1 - share)) < 1
    assert kept.rows[:, 0].diff().gt(0).all()  # the order is kept
    assert all(tokens.topics[i] == topic for i, topic in zip(kept.rows[:, 0].tolist(), kept.topics, strict=True))


def test_which_rows_are_dropped_follows_the_seed() -> None:
    tokens = labelled(a=40, b=40)
    chosen = [prune_rows(tokens, Prune(share=0.5, seed=seed)).rows for seed in (0, 0, 1)]
    assert torch.equal(chosen[0], chosen[1])
    assert not torch.equal(chosen[0], chosen[2])


def test_a_share_that_leaves_nothing() -> None:
    with pytest.raises(DataError, match=r"prune.share 0.9 leaves none of 1 rows(.|\n)*tokens.count=N"):
        prune_rows(labelled(a=1), Prune(share=0.9))


@pytest.mark.parametrize("group_size", [1, 2, 4])
def test_as_many_centroids_as_distinct_vectors_give_the_exact_moments(group_size: int) -> None:
    data = activations(1500, distinct=20)
    exact = LayerStatistics(SHAPE, group_size)
    exact.add(data)
    found = clustered(Prune(kmeans=48), group_size)  # 40 distinct queries a KV head
    for part in range(0, 1500, 100):
        found.add({name: tensor[part : part + 100] for name, tensor in data.items()})
    result = found.finish()
    assert type(result) is LayerStatistics
    assert result.tokens == 1500
    assert result.sums.keys() >= set(data)
    for name in data:
        assert result.sums[name].shape == exact.sums[name].shape
        assert relative_error(result.sums[name], exact.sums[name]) < 1e-12


def test_unweighted_centroids_count_alike_and_empty_ones_not_at_all() -> None:
    """20 distinct vectors, one three times as often as the others: its weight is theirs."""
    data = {name: torch.cat([x, x[:1], x[:1]]) for name, x in activations(20).items()}
    found = clustered(Prune(kmeans=22, weighted=False))
    found.add(data)
    distinct = LayerStatistics(SHAPE, 1)
    distinct.add({name: x[:20] for name, x in data.items() if name != "query"})
    for name, total in distinct.sums.items():
        assert relative_error(found.finish().sums[name], total) < 1e-12  # 22 tokens / 22 centroids: factor 1


def test_weighted_centroids_keep_the_mean_and_lose_the_spread_within_clusters() -> None:
    """Counts and running means are exact: sum_c n_c c = sum x, and the moment never exceeds the exact one."""
    vectors = np.random.default_rng(0).standard_normal((5000, 16)) + 1.0
    lost = []
    for k in (8, 64, 512):
        stream = StreamingKMeans(k, seed=0)
        for part in np.array_split(vectors, 7):
            stream.add(part)
        centroids, counts = stream.finish()
        assert counts.sum() == 5000
        assert centroids.shape == (k, 16)
        np.testing.assert_allclose(counts @ centroids, vectors.sum(0), rtol=1e-10)
        gap = vectors.T @ vectors - (centroids * counts[:, None]).T @ centroids
        assert np.linalg.eigvalsh(gap).min() > -1e-8 * np.trace(gap)
        lost.append(np.trace(gap))
    assert lost[0] > lost[1] > lost[2] > 0


def test_the_result_depends_on_the_seed_and_not_on_how_tokens_are_batched() -> None:
    data = activations(3000)
    results = []
    for size, seed in ((3000, 0), (113, 0), (3000, 1)):
        found = clustered(Prune(kmeans=32, seed=seed))
        for part in range(0, 3000, size):
            found.add({name: tensor[part : part + size] for name, tensor in data.items()})
        results.append(found.finish().sums)
    for name in data:
        assert torch.equal(results[0][name], results[1][name])
        assert not torch.equal(results[0][name], results[2][name])


def test_vectors_in_memory_do_not_grow_with_tokens() -> None:
    found = clustered(Prune(kmeans=500))
    most = []
    for batch in range(12):
        found.add(activations(1000, seed=batch))
        most.append(max(c.kept_vectors for blocks in found.clusters.values() for c in blocks))
    assert max(most) <= 3 * 500
    assert max(most[6:]) < 500 + BATCH_VECTORS


def test_other_moments_stay_exact_and_sums_of_keys_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotor.calibration.pruning, "EXACT", ("query",))
    data = activations(2000)
    found = clustered(Prune(kmeans=16), group_size=2)
    found.add(data)
    result = found.finish()
    exact = LayerStatistics(SHAPE, 2)
    exact.add(data)
    assert torch.equal(result.sums["query"], exact.sums["query"])
    assert not torch.allclose(result.sums["value"], exact.sums["value"])
    keys = data["key_post"].double().sum(0).reshape(2, 16)
    torch.testing.assert_close(result.sums["key_post_mean"], keys)
    assert result.tokens == 2000
    assert "output" in EXACT


def test_more_centroids_than_vectors() -> None:
    found = clustered(Prune(kmeans=50))
    found.add(activations(30))
    with pytest.raises(DataError, match=r"prune.kmeans: 50 centroids for 30 vectors(.|\n)*tokens.count"):
        found.finish()


def test_a_vector_that_is_not_finite_names_its_layer() -> None:
    data = activations(10)
    data["value"][3, 2, 1] = float("nan")
    found = ClusteredStatistics(SHAPE, 1, prune=Prune(kmeans=4), layer=7)
    with pytest.raises(NumericsError, match=r"layer 7: value is not finite(.|\n)*--dtype float32"):
        found.add(data)


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ("prune.share=1.0", "prune.share: got 1.0, expected a finite number of at least 0 and below 1"),
        ("prune.share=-0.1", "prune.share: got -0.1"),
        ("prune.kmeans=0", "prune.kmeans: got 0, expected a whole number from 1 to 1048576 or null"),
        ("prune.kmeans=many", "prune.kmeans: got 'many', expected a whole number from 1 to 1048576 or null"),
        ("prune.kmean=3", "unknown key 'prune.kmean'; did you mean 'kmeans'?"),
        ("tokens.source=dataset", "tokens.dataset: got None, expected a name on the hub or a folder"),
    ],
)
def test_recipe_ranges(item: str, text: str) -> None:
    with pytest.raises(RecipeError) as error:
        load_recipe("fdc", [item])
    assert text in str(error.value)


def test_recipe_round_trip() -> None:
    recipe = load_recipe("fdc", ["prune.share=0.5", "prune.kmeans=1024", "tokens.source=synthetic"])
    assert recipe.prune == Prune(0.5, 1024, True, 0)
    assert parse_recipe(recipe.to_yaml(), "x") == recipe
    assert load_recipe("fdc").prune == Prune()


SMALL = ["tokens.count=2048", "tokens.seq_len=64", *FAST_EVALUATION]


def test_calibrating_with_pruned_topics_and_centroids(tmp_path: Path) -> None:
    for topic in ("one", "two"):
        (tmp_path / "text" / topic).mkdir(parents=True)
        (tmp_path / "text" / topic / "a.txt").write_text(f"def {topic}(a, b):\n    return a + b\n" * 400)
    settings = [*SMALL, "tokens.source=text", f"tokens.path={tmp_path / 'text'}", "prune.share=0.5", "prune.kmeans=64"]
    runs = [
        calibrate(DEMO_MODEL, tmp_path / name, "fdc", settings, batch_tokens=n) for name, n in (("a", 64), ("b", 512))
    ]
    info = runs[0].info["tokens"]
    assert {key: info[key] for key in ("source", "count", "rows", "pruned_rows", "kmeans")} == {
        "source": "text",
        "count": 1024,
        "rows": 16,
        "pruned_rows": 16,
        "kmeans": 64,
    }
    assert info["topics"] == {"one": 8, "two": 8}
    exact = calibrate(DEMO_MODEL, tmp_path / "exact", "fdc", settings[:-1])
    for layer in (0, 4):
        sums = [read_statistics(run.folder, layer, run.shape).sums for run in (*runs, exact)]
        for name, total in sums[0].items():
            torch.testing.assert_close(total, sums[1][name], rtol=1e-3, atol=1e-2 * float(total.abs().max()))
            if name.endswith("_mean"):
                continue
            assert 0.5 * sums[2][name].diagonal(dim1=-2, dim2=-1).sum() < total.diagonal(dim1=-2, dim2=-1).sum()


def test_calibrating_on_synthetic_tokens(tmp_path: Path) -> None:
    run = calibrate(DEMO_MODEL, tmp_path / "run", "fdc", [*SMALL, "tokens.source=synthetic", "tokens.count=512"])
    assert run.info["tokens"]["topics"] == {"synthetic": 8}
    assert list(run.info["stages"])[:3] == ["check model", "load model", "tokens"]


def test_more_centroids_than_tokens_are_refused_before_the_model_runs(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"prune.kmeans: 4096 centroids for 2048 tokens(.|\n)*at most 2048"):
        calibrate(DEMO_MODEL, tmp_path / "run", "fdc", [*SMALL, "prune.kmeans=4096"])
    assert not (tmp_path / "run").exists()


def test_scikit_learn_is_imported_only_for_k_means() -> None:
    """Older versions of transformers import it themselves."""
    program = (
        "import sys, json; from transformers import GenerationMixin; before = 'sklearn' in sys.modules;"
        "import rotor.calibration.calibrate, rotor.calibration.pruning;"
        "print(json.dumps([before, 'sklearn' in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    before, after = json.loads(done.stdout)
    assert before == after
