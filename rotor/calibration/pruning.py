"""Pruning of calibration data: sequences dropped, and K-means centroids in place of vectors.

The second moments of the centroids stand where the exact ones would; nothing after them differs. W_o is never
clustered. Source: ZDC section 5.1.
"""

from __future__ import annotations

import warnings
import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import DataError, NumericsError
from ..recipe import Prune
from .bases.moments import JOINT, UNCENTRED, LayerStatistics

EXACT = ("output", JOINT)
"""Moments that begin so are not taken of centroids."""

BATCH_VECTORS = 1024
"""Vectors of a mini-batch; fixed, so that the result does not depend on how tokens are batched."""


def prune_rows(rows: Tensor, prune: Prune) -> Tensor:
    """Drop `prune.share` of the rows at random, keeping the order of the others.

    Raises:
        DataError: nothing would be left, or fewer tokens, and so fewer keys of a head, than centroids.
    """
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(prune.seed))
    left = rows[order[round(len(rows) * prune.share) :].sort().values]
    hint = "Lower it, or ask for more tokens with --set tokens.count=N."
    if not len(left):
        raise DataError(f"prune.share {prune.share} leaves none of {len(rows)} rows.", hint)
    if prune.kmeans is not None and prune.kmeans > left.numel():
        raise DataError(f"prune.kmeans: {prune.kmeans} centroids for {left.numel()} tokens.", hint)
    return left


class StreamingKMeans:
    """K-means over a stream of vectors by scikit-learn's MiniBatchKMeans, in memory that does not grow with it.

    Every vector is assigned once, when its mini-batch comes; a centroid is the mean of all vectors assigned to it.
    """

    def __init__(self, clusters: int, seed: int) -> None:
        from sklearn.cluster import MiniBatchKMeans  # slow to import

        # The first centroids are chosen by k-means++ among three vectors a centroid, as is scikit-learn's default.
        self._next_batch, self._waiting = max(BATCH_VECTORS, 3 * clusters), np.empty((0, 0))
        options = {"n_init": 1, "compute_labels": False, "init_size": self._next_batch, "random_state": seed}
        # No reassignment: moving a centroid elsewhere would break its mean and its count.
        self._model: Any = MiniBatchKMeans(clusters, reassignment_ratio=0, **options)

    def add(self, vectors: np.ndarray) -> None:
        """Add vectors [n, width], float64."""
        waiting = np.concatenate([self._waiting, vectors]) if len(self._waiting) else vectors
        while len(waiting) >= self._next_batch:
            self._fit(waiting[: self._next_batch])
            waiting, self._next_batch = waiting[self._next_batch :], BATCH_VECTORS
        self._waiting = waiting.copy()

    def finish(self) -> tuple[np.ndarray, np.ndarray]:
        """Centroids [k, width] and how many vectors each stands for [k], float64; a centroid may stand for none."""
        if len(self._waiting):
            self._fit(self._waiting)
        return self._model.cluster_centers_, self._model._counts  # private there; a test holds it to be exact

    def _fit(self, batch: np.ndarray) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of fewer distinct vectors than centroids
            self._model.partial_fit(batch)


@dataclass
class ClusteredStatistics(LayerStatistics):
    """Second moments of one layer with `prune.kmeans` centroids in place of queries, keys and values.

    Queries of a KV head are clustered together; keys and values of a group as its heads' vectors side by side.
    """

    prune: Prune = field(default_factory=Prune)
    layer: int = 0
    clusters: dict[str, list[StreamingKMeans]] = field(default_factory=dict)

    def add(self, activations: dict[str, Tensor]) -> None:
        """Add one batch; raises NumericsError that names the layer where a vector is not finite."""
        tokens = self.tokens + next(iter(activations.values())).shape[0]
        super().add({name: tensor for name, tensor in activations.items() if name.startswith(EXACT)})
        self.tokens = tokens
        for name in (name for name in activations if not name.startswith(EXACT)):
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
        """The moments of the centroids, sum_c n_c c c^T, for n_c vectors that a centroid c stands for."""
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
