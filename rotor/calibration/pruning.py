"""Pruning of calibration data: dropped sequences, and K-means centroids in place of vectors.

The second moments of the centroids replace the exact ones; later stages do not differ. W_o is never clustered.
Source: ZDC section 5.1.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import DataError, NumericsError
from ..recipe.sections import Prune
from .moments import JOINT, UNCENTRED, LayerStatistics, counted_tokens

NEVER_CLUSTERED = ("output", JOINT)
"""Prefixes of the names of moments that are never taken of centroids."""

BATCH_VECTORS = 1024
"""Vectors of a mini-batch; a constant, so that the result does not depend on how tokens are batched."""


def prune_sequences(sequences: Tensor, prune: Prune, topics: Sequence[str] = ()) -> Tensor:
    """Drop `prune.share` of the sequences at random, keeping the order of the others.

    Args:
        topics: of each sequence; the share is then dropped of each topic, to within one sequence, and of all.
    Raises:
        DataError: no sequence would be left, or fewer tokens (and so keys of a head) than centroids.
    """
    order = torch.randperm(len(sequences), generator=torch.Generator().manual_seed(prune.seed))
    left = sequences[_kept(order, prune.share, topics).sort().values]
    hint = "Lower it, or ask for more tokens with --set tokens.count=N."
    if not len(left):
        raise DataError(f"prune.share {prune.share} leaves none of {len(sequences)} sequences.", hint)
    if prune.kmeans is not None and prune.kmeans > left.numel():
        raise DataError(f"prune.kmeans: {prune.kmeans} centroids for {left.numel()} tokens.", hint)
    return left


def _kept(order: Tensor, share: float, topics: Sequence[str]) -> Tensor:
    """The sequences that stay, given all in random order."""
    dropped = round(len(order) * share)
    if len(set(topics)) < 2:
        return order[dropped:]
    number = {topic: place for place, topic in enumerate(sorted(set(topics)))}
    by_topic = order[torch.tensor([number[topics[place]] for place in order.tolist()]).argsort(stable=True)]
    # Every so many in the line of all topics, so that topics of one sequence are dropped as often as others.
    places = (torch.arange(dropped, dtype=torch.float64) + 0.5) * len(order) / max(dropped, 1)
    stays = torch.ones(len(order), dtype=torch.bool)
    stays[places.long()] = False
    return by_topic[stays]


class StreamingKMeans:
    """K-means over a stream of vectors with scikit-learn's MiniBatchKMeans, in constant memory.

    Every vector is assigned once, in its mini-batch; a centroid is the mean of all vectors assigned to it.
    """

    def __init__(self, clusters: int, seed: int) -> None:
        from sklearn.cluster import MiniBatchKMeans  # slow to import

        # k-means++ chooses the first centroids among three vectors per centroid, scikit-learn's default.
        self._next_batch = max(BATCH_VECTORS, 3 * clusters)
        self._waiting = np.empty((0, 0))
        options = {"n_init": 1, "compute_labels": False, "init_size": self._next_batch, "random_state": seed}
        # No reassignment, because a moved centroid would no longer be the mean of its vectors.
        self._model: Any = MiniBatchKMeans(clusters, reassignment_ratio=0, **options)

    def add(self, vectors: np.ndarray) -> None:
        """Add vectors [n, width], float64."""
        waiting = np.concatenate([self._waiting, vectors]) if len(self._waiting) else vectors
        while len(waiting) >= self._next_batch:
            self._fit(waiting[: self._next_batch])
            waiting = waiting[self._next_batch :]
            self._next_batch = BATCH_VECTORS
        self._waiting = waiting.copy()

    def finish(self) -> tuple[np.ndarray, np.ndarray]:
        """Centroids [k, width] and the number of vectors of each [k], float64; the number may be 0."""
        if len(self._waiting):
            self._fit(self._waiting)
        return self._model.cluster_centers_, self._model._counts  # _counts is private; a test checks that it is exact

    def _fit(self, batch: np.ndarray) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # scikit-learn warns of fewer distinct vectors than centroids
            self._model.partial_fit(batch)


def kmeans_bytes(clusters: int, width: int) -> int:
    """Bytes of clustering a layer's queries, keys and values, each `width` numbers wide.

    Vectors of a batch and centroids are float64, in about three copies.
    """
    return 3 * 8 * (max(BATCH_VECTORS, 3 * clusters) + clusters) * 3 * width


@dataclass
class ClusteredStatistics(LayerStatistics):
    """Second moments of one layer with `prune.kmeans` centroids in place of queries, keys and values.

    All queries of a KV head are clustered together. Keys and values of a group are clustered as one vector per token,
    the heads side by side.
    """

    prune: Prune = field(default_factory=Prune)
    layer: int = 0
    clusters: dict[str, list[StreamingKMeans]] = field(default_factory=dict)

    def add(self, activations: dict[str, Tensor]) -> None:
        """Add one batch; raises NumericsError that names the layer if a vector is not finite."""
        tokens = self.tokens + counted_tokens(activations)
        super().add({name: tensor for name, tensor in activations.items() if name.startswith(NEVER_CLUSTERED)})
        self.tokens = tokens
        for name in (name for name in activations if not name.startswith(NEVER_CLUSTERED)):
            blocks = self._blocks(name, activations[name]).to("cpu", torch.float64)
            if not torch.isfinite(blocks).all():
                raise NumericsError(
                    f"layer {self.layer}: {name} is not finite within the first {tokens} tokens.",
                    "The model overflows on the calibration tokens; calibrate with --dtype float32.",
                )
            if name not in self.clusters:
                self.clusters[name] = [self._stream(name, block) for block in range(len(blocks))]
            for stream, block in zip(self.clusters[name], blocks, strict=True):
                stream.add(block.numpy())

    def _stream(self, name: str, block: int) -> StreamingKMeans:
        assert self.prune.kmeans is not None
        seed = zlib.crc32(f"{self.prune.seed}/{self.layer}/{name}/{block}".encode())
        return StreamingKMeans(self.prune.kmeans, seed)

    def finish(self) -> LayerStatistics:
        """Moments of the centroids, sum_c n_c c c^T, where n_c is the number of vectors assigned to centroid c."""
        result = LayerStatistics(self.shape, self.group_size, self.sums, self.tokens).finish()
        for name, streams in self.clusters.items():
            moments, totals = [], []
            for centroids, counts in (stream.finish() for stream in streams):
                moments.append(torch.from_numpy((centroids * counts[:, None]).T @ centroids))
                totals.append(torch.from_numpy(counts @ centroids))
            result.sums[name] = torch.stack(moments)
            if name not in UNCENTRED:
                result.sums[f"{name}_mean"] = torch.stack(totals)
        return result
