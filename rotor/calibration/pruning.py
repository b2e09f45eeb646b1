"""Pruning of calibration data: sequences dropped within each topic, and K-means centroids in place of vectors.

The centroids of a stream of vectors are found in one pass, mini-batch by mini-batch, so that what is kept in memory
depends on the number of centroids and not on the number of tokens. Second moments of the centroids then stand where the
exact ones would, and nothing after them is different. W_o is never clustered.
"""

from __future__ import annotations

import warnings
import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..bases.moments import JOINT, UNCENTRED, LayerStatistics
from ..data.rows import CalibrationTokens
from ..errors import DataError, NumericsError
from ..recipe import Prune

EXACT = ("output", JOINT)
"""Moments that begin so are not taken of centroids."""

INIT_VECTORS_PER_CLUSTER = 3
"""Vectors from which the first centroids are chosen, per centroid (scikit-learn's own default)."""

BATCH_VECTORS = 1024
"""Vectors of a mini-batch after that; fixed, so that the result does not depend on how tokens are batched."""


def prune_rows(tokens: CalibrationTokens, prune: Prune) -> CalibrationTokens:
    """Drop `prune.share` of the rows of each topic at random, keeping the order of the others.

    The number dropped is `share` of all rows to the nearest whole one; in each topic it is less than one row off.

    Raises:
        DataError: nothing would be left.
    Source: ZDC section 5.1 (50 %).
    """
    generator = torch.Generator().manual_seed(prune.seed)
    keep = torch.ones(len(tokens.topics), dtype=torch.bool)
    seen = 0
    for topic in tokens.topic_counts():
        rows = torch.tensor([i for i, name in enumerate(tokens.topics) if name == topic])
        dropped = round((seen + len(rows)) * prune.share) - round(seen * prune.share)
        seen += len(rows)
        keep[rows[torch.randperm(len(rows), generator=generator)[:dropped]]] = False
    if not keep.any():
        raise DataError(
            f"prune.share {prune.share} leaves none of {len(tokens.topics)} rows.",
            "Lower it, or ask for more tokens with --set tokens.count=N.",
        )
    return CalibrationTokens(tokens.rows[keep], tuple(tokens.topics[i] for i in keep.nonzero().flatten().tolist()))


def check_clusters(prune: Prune, tokens: int) -> None:
    """Raises DataError if there are fewer tokens, and so fewer keys of a head, than centroids."""
    if prune.kmeans is not None and prune.kmeans > tokens:
        raise DataError(
            f"prune.kmeans: {prune.kmeans} centroids for {tokens} tokens.",
            f"Lower it to at most {tokens}, or raise tokens.count.",
        )


class StreamingKMeans:
    """K-means over a stream of vectors by scikit-learn's MiniBatchKMeans.

    Every vector is assigned once, when its mini-batch comes; a centroid is the mean of all vectors assigned to it, and
    `counts` are their numbers, so that sum_c n_c c is exactly the sum of the vectors.

    Kept: until the first choice of centroids INIT_VECTORS_PER_CLUSTER * k vectors (at least BATCH_VECTORS); after it
    the k centroids and less than BATCH_VECTORS vectors.

    Args:
        clusters: k, the number of centroids.
        seed: of the choice of the first centroids (k-means++).
    """

    def __init__(self, clusters: int, seed: int) -> None:
        from sklearn.cluster import MiniBatchKMeans

        self.clusters = clusters
        self.waiting: list[np.ndarray] = []
        self.started = False
        self.model: Any = MiniBatchKMeans(
            clusters,
            init_size=self._wanted(),
            n_init=1,
            compute_labels=False,
            reassignment_ratio=0,  # moving a centroid elsewhere would break its mean and its count
            random_state=seed,
        )

    @property
    def kept_vectors(self) -> int:
        """Vectors in memory, waiting ones and centroids."""
        return sum(map(len, self.waiting)) + (self.clusters if self.started else 0)

    def add(self, vectors: np.ndarray) -> None:
        """Add vectors [n, width], float64."""
        position = 0
        while position < len(vectors):
            missing = self._wanted() - sum(map(len, self.waiting))
            self.waiting.append(np.array(vectors[position : position + missing]))
            position += missing
            if sum(map(len, self.waiting)) == self._wanted():
                self._fit()

    def finish(self) -> tuple[np.ndarray, np.ndarray]:
        """Centroids [k, width] and how many vectors each stands for [k], float64; a centroid of none counts 0.

        Raises:
            DataError: fewer vectors than centroids.
        """
        if self.waiting:
            self._fit()
        # The number is private in scikit-learn; with no reassignment it is exact (a test).
        return self.model.cluster_centers_, self.model._counts

    def _wanted(self) -> int:
        return BATCH_VECTORS if self.started else max(BATCH_VECTORS, INIT_VECTORS_PER_CLUSTER * self.clusters)

    def _fit(self) -> None:
        batch = np.concatenate(self.waiting)
        self.waiting = []
        if not self.started and len(batch) < self.clusters:
            raise DataError(
                f"prune.kmeans: {self.clusters} centroids for {len(batch)} vectors.",
                "Lower it, or raise tokens.count.",
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # fewer distinct vectors than centroids is what finish() counts as 0
            self.model.partial_fit(batch)
        self.started = True


@dataclass
class ClusteredStatistics(LayerStatistics):
    """Second moments of one layer with K-means centroids in place of queries, keys and values.

    Queries of a KV head are clustered together; keys and values of a group as its heads' vectors side by side, apart
    from each other and from the queries. Memory: a few times `prune.kmeans` vectors for each of these.

    Source: ZDC section 5.1.
    """

    prune: Prune = field(default_factory=Prune)
    layer: int = 0
    clusters: dict[str, list[StreamingKMeans]] = field(default_factory=dict)

    def add(self, activations: dict[str, Tensor]) -> None:
        """Add one batch, as LayerStatistics does; those of EXACT are summed exactly.

        Raises:
            NumericsError: a vector is not finite; names the layer and the moment.
        """
        others = {name: tensor for name, tensor in activations.items() if name.startswith(EXACT)}
        tokens = self.tokens + next(iter(activations.values())).shape[0]
        if others:
            super().add(others)
        self.tokens = tokens
        for name in activations.keys() - others.keys():
            blocks = self._blocks(name, activations[name]).to("cpu", torch.float64)
            if not torch.isfinite(blocks).all():
                raise NumericsError(
                    f"layer {self.layer}: {name} is not finite within the first {tokens} tokens.",
                    "The model overflows on the calibration tokens; calibrate with --dtype float32.",
                )
            if name not in self.clusters:
                self.clusters[name] = [self._new_clusters(name, block) for block in range(len(blocks))]
            for clusters, block in zip(self.clusters[name], blocks, strict=True):
                clusters.add(block.numpy())

    def _new_clusters(self, name: str, block: int) -> StreamingKMeans:
        assert self.prune.kmeans is not None
        seed = zlib.crc32(f"{self.prune.seed}/{self.layer}/{name}/{block}".encode())
        return StreamingKMeans(self.prune.kmeans, seed)

    def finish(self) -> LayerStatistics:
        """The moments of the centroids, as ordinary statistics.

        Weighted, a moment is sum_c n_c c c^T. Otherwise all centroids that stand for any vector count alike, tokens / k
        each: one factor for queries, keys and values, which keeps sums on the scale of the number of tokens.

        Raises:
            DataError: fewer vectors than centroids.
        """
        result = LayerStatistics(self.shape, self.group_size, dict(self.sums), self.tokens)
        for name, blocks in self.clusters.items():
            moments, totals = [], []
            for clusters in blocks:
                centroids, counts = clusters.finish()
                weights = counts if self.prune.weighted else (counts > 0) * (self.tokens / clusters.clusters)
                moments.append(torch.from_numpy((centroids * weights[:, None]).T @ centroids))
                totals.append(torch.from_numpy(weights @ centroids))
            result.sums[name] = torch.stack(moments)
            if name not in UNCENTRED:
                result.sums[f"{name}_mean"] = torch.stack(totals)
        return result
