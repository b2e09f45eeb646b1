"""Compute the bases of one layer by the methods that a recipe names."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from ...checkpoint.bases import BasisPair, LayerBases
from ...checkpoint.layout import AttentionShape, LayerForm
from ...checkpoint.projections import AttentionWeights
from ...errors import NumericsError
from ...numerics import one_thread
from ...recipe.basis_methods import QK_METHODS, VO_METHODS
from ..information import LayerFisher
from ..moments import LayerStatistics, moments_bytes, vector_names
from . import fisher, kq, palu, svd
from .method import Inputs

Method = Callable[[Inputs], BasisPair]

KEY_BASES: dict[str, Method] = {
    "svd": svd.of_queries_and_keys,
    "whitened": svd.of_keys,
    "kq": kq.of_keys,
    "fisher": fisher.of_keys,
    "palu": palu.of_key_projection,
}
"""Functions of the methods of `bases.qk`, by the names of `recipe/basis_methods.py`, which says what they do."""

VALUE_BASES: dict[str, Method] = {
    "svd": svd.of_readers_and_values,
    "whitened": svd.of_values,
    "kq": kq.of_values,
    "kq-output": kq.of_outputs,
    "fisher": fisher.of_values,
    "palu": palu.of_value_projection,
}
"""Functions of the methods of `bases.vo`."""


def needed_statistics(qk_method: str, vo_method: str, form: LayerForm, refit: bool = False) -> frozenset[str]:
    """Names of the moments that the methods read, as capture names them; never empty."""
    key, *_ = vector_names(form)
    if form.joint:
        return frozenset({key})
    needed = QK_METHODS[qk_method].moments | VO_METHODS[vo_method].moments
    named = {key if name == "key" else name for name in needed}
    return frozenset(named | ({"output"} if refit else set()) or {"value"})


def solving_bytes(shape: AttentionShape, form: LayerForm, moments: Iterable[str], vectors: Iterable[int]) -> int:
    """Memory of computing a layer's bases, beside its moments.

    A symmetrised copy of the largest moment, the matrices of the closed forms (twelve float64 of a group's width), and
    the projections. Fisher information of one latent at a time is unpacked to float64 and copied: about nine times
    what is stored of it.

    Args:
        moments: names of those that are read. vectors: bytes of what is stored of each latent's Fisher information.
    """
    groups, width = shape.num_kv_heads // form.group_size, form.group_size * shape.head_dim
    copied = max(moments_bytes(shape, form.group_size, [name]) for name in moments)
    projections = 8 * (shape.query_width + shape.kv_width) * shape.hidden_size
    return copied + 96 * groups * width**2 + projections + 9 * max(vectors, default=0)


def layer_bases(
    statistics: LayerStatistics,
    weights: AttentionWeights,
    form: LayerForm,
    qk_method: str,
    vo_method: str,
    gradients: LayerFisher | None = None,
    where: str = "a layer",
) -> LayerBases:
    """Compute both bases of one layer by the methods that a recipe names.

    Args:
        form: joint latents always use Fisher information.
        gradients: Fisher information, for methods that read it.
        where: name of the layer for errors.
    Raises:
        NumericsError: a factorisation fails or its result is not finite.
    Source: see each method.
    """
    inputs = Inputs(statistics, weights, form.keys, gradients)
    try:
        with one_thread():
            latents = (
                (fisher.of_both(inputs),)
                if form.joint
                else (KEY_BASES[qk_method](inputs), VALUE_BASES[vo_method](inputs))
            )
    except torch.linalg.LinAlgError as error:
        raise NumericsError(
            f"{where}: the bases {qk_method} and {vo_method} cannot be computed from what was measured: "
            f"{' '.join(str(error).split())}",
            "Calibrate with --dtype float32, or with other bases.",
        ) from error
    bases = LayerBases(form.keys, form.group_size, latents)
    bases.check(statistics.shape, where)
    return bases
