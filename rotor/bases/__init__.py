"""Bases of a group of KV heads: what turns keys and values into latents, and what reads the latents back.

One method a file. Every method returns a BasisPair of all columns in descending order of singular value; the first r
columns serve rank r. The methods take second moments or weights, batched over the groups of a layer, in float64.
QK_METHODS and VO_METHODS say where each method applies and which statistics it reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import CheckpointError, NumericsError
from ..families import AttentionWeights
from ..layout import AttentionShape, Domain
from ..numerics import one_thread
from ..statistics import LayerStatistics
from . import kq, palu, rope_pairs, svd
from .pair import BasisPair

__all__ = ["QK_METHODS", "VO_METHODS", "BasisPair", "LayerBases", "Method", "layer_bases", "needed_statistics"]


@dataclass(frozen=True)
class LayerBases:
    """Bases of one layer, batched over its groups [num_groups, ...].

    qk: encode is applied to keys, decode to queries (post) or to key latents to rebuild keys (pre).
    vo: encode is folded into W_v, decode into W_o.
    outputs: [num_heads, n, n], second moments of each query head's attention output over its group's stacked values
        (n = group_size * head_dim), to refit each head's slice of W_o at the rank it gets; None keeps decode as it is.
    whole_planes: the columns of qk are unit vectors that take whole rotary planes, by method `rope-pairs`.
    """

    domain: Domain
    group_size: int
    qk: BasisPair
    vo: BasisPair
    outputs: Tensor | None = None
    whole_planes: bool = False

    @property
    def planes(self) -> Tensor | None:
        """The rotary planes that the key latents consist of, [num_groups, columns / 2], or None if they do not."""
        if not self.whole_planes:
            return None
        return rope_pairs.planes(self.qk.encode, self.qk.encode.shape[-2] // self.group_size)

    def check(self, shape: AttentionShape, where: str) -> None:
        """Check bases that were computed, or read from a file.

        Args:
            where: names the file, layer and candidate in errors.
        Raises:
            CheckpointError: shapes that are not of such a layer. NumericsError: a NaN or Inf; names the tensor.
        """
        groups, width = shape.num_kv_heads // self.group_size, self.group_size * shape.head_dim
        for side, pair in (("qk", self.qk), ("vo", self.vo)):
            for name in ("encode", "decode"):
                check_stored(getattr(pair, name), (groups, width, width), f"{where}: {side}.{name}")
            check_stored(pair.singular_values, (groups, width), f"{where}: {side}.singular_values")


def check_stored(tensor: Tensor, expected: tuple[int, ...], where: str) -> None:
    """Check a tensor of a run folder.

    Raises:
        CheckpointError: not float64 of the expected shape. NumericsError: a NaN or Inf. Both name `where`.
    """
    if tuple(tensor.shape) != expected or tensor.dtype != torch.float64:
        raise CheckpointError(
            f"{where} is {tensor.dtype} of shape {list(tensor.shape)}, expected float64 of {list(expected)}.",
            "Run `rotor calibrate` again.",
        )
    if not torch.isfinite(tensor).all():
        raise NumericsError(f"{where} has elements that are NaN or Inf.", "Run `rotor calibrate` again.")


@dataclass(frozen=True)
class Inputs:
    """What a method may read of one layer."""

    statistics: LayerStatistics
    weights: AttentionWeights
    shape: AttentionShape
    domain: Domain
    group_size: int

    def keys(self) -> Tensor:
        """[num_groups, n, n], where n = group_size * head_dim; before or after RoPE, as the domain says."""
        return self.statistics.moment("key_pre" if self.domain == "pre" else "key_post", self.group_size)

    def centred_keys(self) -> Tensor:
        """The same after RoPE, less the mean: softmax does not see what is added to a whole row of logits."""
        if self.domain == "pre":
            return self.keys()
        mean = self.statistics.mean(self.group_size)
        return self.keys() - mean.unsqueeze(-1) * mean.unsqueeze(-2) / self.statistics.tokens

    def queries(self) -> Tensor:
        """[num_groups, n, n], block-diagonal; before RoPE averaged over relative positions."""
        queries = self.statistics.moment("query", self.group_size)
        if self.domain == "pre":
            queries = rotary_average(queries, self.shape.turned)
        return block_diagonal(queries, self.group_size)

    def values(self) -> Tensor:
        return self.statistics.moment("value", self.group_size)

    def outputs(self) -> Tensor:
        """[num_groups, n, n], summed over the query heads of each group."""
        outputs = self.statistics.moment("output", self.group_size)
        return outputs.unflatten(0, (-1, self.group_size * self.shape.heads_per_kv)).sum(1)

    def readers(self) -> Tensor:
        """Second moment of the rows of W_o that read each head's values, block-diagonal [num_groups, n, n]."""
        return block_diagonal(output_moments(self.weights.o_weight, self.shape), self.group_size)

    @property
    def width(self) -> int:
        return self.group_size * self.shape.head_dim


@dataclass(frozen=True)
class Method:
    """A basis method: in which domains it works, which moments it reads, and the function."""

    domains: tuple[Domain, ...]
    statistics: frozenset[str]
    compute: Callable[[Inputs], BasisPair]


def _reads(*names: str) -> frozenset[str]:
    return frozenset(names)


QK_METHODS: dict[str, Method] = {
    "svd": Method(("post", "none"), _reads("query", "key"), lambda i: svd.from_moments(i.queries(), i.keys())),
    "kq": Method(
        ("post", "pre", "none"), _reads("query", "key"), lambda i: kq.closed_form(i.queries(), i.keys(), i.group_size)
    ),
    # Before RoPE a constant key is no constant in the logits: there nothing is centred.
    "kq-centred": Method(
        ("post", "pre", "none"),
        _reads("query", "key"),
        lambda i: kq.closed_form(i.queries(), i.centred_keys(), i.group_size),
    ),
    "rope-pairs": Method(
        ("post",),
        _reads("query", "key"),
        lambda i: rope_pairs.from_moments(i.queries(), i.keys(), i.shape.head_dim, i.shape.turned),
    ),
    "palu": Method(("pre", "none"), _reads(), lambda i: palu.from_weight(i.weights.k_weight, i.width)),
    "whitened": Method(("pre", "none"), _reads("key"), lambda i: svd.of_moment(i.keys())),
}
VO_METHODS: dict[str, Method] = {
    "palu": Method(("post", "pre", "none"), _reads(), lambda i: palu.from_weight(i.weights.v_weight, i.width)),
    "whitened": Method(("post", "pre", "none"), _reads("value"), lambda i: svd.of_moment(i.values())),
    "svd": Method(("post", "pre", "none"), _reads("value"), lambda i: svd.from_moments(i.readers(), i.values())),
    "kq": Method(
        ("post", "pre", "none"), _reads("value"), lambda i: kq.closed_form(i.readers(), i.values(), i.group_size)
    ),
    "kq-output": Method(
        ("post", "pre", "none"), _reads("output"), lambda i: kq.closed_form(i.readers(), i.outputs(), i.group_size)
    ),
}


def needed_statistics(qk_method: str, vo_method: str, domain: Domain, refit: bool = False) -> frozenset[str]:
    """Names of the moments that the methods read, as capture reports them; never empty."""
    needed = QK_METHODS[qk_method].statistics | VO_METHODS[vo_method].statistics
    key = "key_pre" if domain == "pre" else "key_post"
    named = {key if name == "key" else name for name in needed}
    return frozenset(named | ({"output"} if refit else set()) or {"value"})


def layer_bases(
    statistics: LayerStatistics,
    weights: AttentionWeights,
    shape: AttentionShape,
    domain: Domain,
    group_size: int,
    qk_method: str,
    vo_method: str,
    where: str = "a layer",
) -> LayerBases:
    """Compute both bases of one layer by the methods that a recipe names.

    Args:
        where: names the layer in errors.
    Raises:
        NumericsError: a factorisation fails or its result is not finite.
    Source: FDC section 5.1 (svd), ZACK section 5.1, Palu (palu), KQ-SVD, arXiv 2512.05916 (kq).
    """
    inputs = Inputs(statistics, weights, shape, domain, group_size)
    try:
        with one_thread():
            qk, vo = QK_METHODS[qk_method].compute(inputs), VO_METHODS[vo_method].compute(inputs)
    except torch.linalg.LinAlgError as error:
        raise NumericsError(
            f"{where}: the bases {qk_method} and {vo_method} cannot be computed from what was measured: "
            f"{' '.join(str(error).split())}",
            "Calibrate with --dtype float32, or with other bases.",
        ) from error
    bases = LayerBases(domain, group_size, qk, vo, whole_planes=takes_whole_planes(qk_method, shape))
    bases.check(shape, where)
    return bases


def takes_whole_planes(qk_method: str, shape: AttentionShape) -> bool:
    """Whether a method's key latents are whole rotary planes; with partial rotary some dimensions are in none."""
    return qk_method == "rope-pairs" and shape.rotary_dim is None


def block_diagonal(moments: Tensor, group_size: int) -> Tensor:
    """[num_kv_heads, d, d] -> [num_groups, group_size * d, group_size * d], zero between heads.

    A query (or a column block of W_o) of one head touches only that head's block of the group's stacked keys.
    """
    heads, dim, _ = moments.shape
    groups = moments.new_zeros(heads // group_size, group_size, dim, group_size, dim)
    index = torch.arange(group_size)
    groups[:, index, :, index, :] = moments.reshape(-1, group_size, dim, dim).transpose(0, 1)
    return groups.reshape(-1, group_size * dim, group_size * dim)


def rotary_average(moments: Tensor, rotary_dim: int | None = None) -> Tensor:
    """Second moments of queries averaged over all relative rotations: one weight per rotary frequency.

    Averaged over spread-out distances, the rotation between a query and a key leaves of the query's moment in each
    rotary plane only its mean square, and nothing between planes. Rotations do not change that mean square, so
    queries after RoPE serve as well as before it. Planes pair dimension i with i + rotary_dim/2, as in transformers;
    the dimensions after them are not turned and keep their moment.

    Args:
        moments: [num_kv_heads, d, d].
        rotary_dim: dimensions that RoPE turns, the first ones; None for all.
    """
    rotary_dim = moments.shape[-1] if rotary_dim is None else rotary_dim
    half = rotary_dim // 2
    squares = moments.diagonal(dim1=-2, dim2=-1)
    planes = (squares[..., :half] + squares[..., half:rotary_dim]) / 2
    average = torch.zeros_like(moments)
    average[..., :rotary_dim, :rotary_dim] = torch.diag_embed(torch.cat([planes, planes], dim=-1))
    average[..., rotary_dim:, rotary_dim:] = moments[..., rotary_dim:, rotary_dim:]
    return average


def output_moments(o_weight: Tensor, shape: AttentionShape) -> Tensor:
    """Per KV head the sum over its query heads of W_o,h^T W_o,h: [num_kv_heads, d, d], float64."""
    blocks = o_weight.to(torch.float64).reshape(-1, shape.num_kv_heads, shape.heads_per_kv, shape.head_dim)
    return torch.einsum("ohrd,ohre->hde", blocks, blocks)
