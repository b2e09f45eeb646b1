"""Pruning of calibration data: dropped sequences, and K-means centroids in place of vectors.

The second moments of the centroids replace the exact ones; later stages do not differ. W_o is never clustered.
Source: ZDC section 5.1.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ..errors import DataError, NumericsError
from ..recipe import Prune
from .bases.moments import JOINT, UNCENTRED, LayerStatistics

NEVER_CLUSTERED = ("output", JOINT)
"""Prefixes of the names of moments that are never taken of centroids."""

BATCH_VECTORS = 1024
"""Vectors of a mini-batch; a constant, so that the result does not depend on how tokens are batched."""


def prune_sequences(sequences: Tensor, prune: Prune) -> Tensor:
    """Drop `prune.share` of the sequences at random, keeping the order of the others.

    Raises:
        DataError: no sequence would be left, or fewer tokens (and so keys of a head) than centroids.
    """
    order = torch.randperm(len(sequences), generator=torch.Generator().manual_seed(prune.seed))
    left = sequences[order[round(len(sequences) * prune.share) :].sort().values]
    hint = "Lower it, or ask for more tokens with --set tokens.count=N."
    if not len(left):
        raise DataError(f"prune.share {prune.share} leaves none of {len(sequences)} sequences.", hint)
    if prune.kmeans is not None and prune.kmeans > left.numel():
        raise DataError(f"prune.kmeans: {prune.kmeans} centroids for {left.numel()} tokens.", hint)
    return left


class StreamingKMeans:
    """Mini-batch k-means over a stream of vectors, in constant memory.

    Every vector is assigned once, in its mini-batch; a centroid is the mean of all vectors assigned to it. Centroids
    without vectors stay where they are: one that was moved would no longer be the mean of its vectors.
    Source: Sculley, Web-scale k-means clustering, WWW 2010, algorithm 1.
    """

    def __init__(self, clusters: int, seed: int) -> None:
        self._clusters = clusters
        self._generator = np.random.default_rng(seed)
        # The first centroids are chosen among three vectors per centroid.
        self._next_batch = max(BATCH_VECTORS, 3 * clusters)
        self._waiting = np.empty((0, 0))
        self._centroids: np.ndarray | None = None
        self._counts = np.zeros(clusters)

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
        assert self._centroids is not None
        return self._centroids, self._counts

    def _fit(self, batch: np.ndarray) -> None:
        if self._centroids is None:
            self._centroids = first_centroids(batch, self._clusters, self._generator)
        nearest = (np.square(self._centroids).sum(1) - 2 * batch @ self._centroids.T).argmin(1)
        own = np.bincount(nearest, minlength=self._clusters)
        sums = self._centroids * self._counts[:, None]
        np.add.at(sums, nearest, batch)
        self._counts = self._counts + own
        changed = own > 0
        self._centroids[changed] = sums[changed] / self._counts[changed, None]


def first_centroids(vectors: np.ndarray, count: int, generator: np.random.Generator) -> np.ndarray:
    """Choose `count` of the vectors [n, width], each with a probability proportional to its squared distance from the
    nearest one chosen before; of fewer distinct vectors the first choice is repeated.

    Source: k-means++ (Arthur and Vassilvitskii, SODA 2007, section 2.2).
    """
    chosen = [int(generator.integers(len(vectors)))]
    squared = np.full(len(vectors), np.inf)
    while len(chosen) < count:
        squared = np.minimum(squared, np.square(vectors - vectors[chosen[-1]]).sum(1))
        total = squared.sum()
        chosen.append(int(generator.choice(len(vectors), p=squared / total)) if total else chosen[0])
    return vectors[chosen]


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
        tokens = self.tokens + next(iter(activations.values())).shape[0]
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
