"""Compute the bases of one layer by the methods that a recipe names."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...checkpoint.bases import BasisPair, LayerBases, latent_size
from ...checkpoint.layout import AttentionShape, LayerForm
from ...checkpoint.projections import AttentionWeights
from ...errors import NumericsError
from ...numerics import one_thread
from ...recipe.basis_methods import QK_METHODS, VO_METHODS
from ..information import LayerFisher
from ..moments import LayerStatistics, vector_names
from . import fisher, identity, kq, palu, svd
from .method import Inputs

Method = Callable[[Inputs], BasisPair]

KEY_BASES: dict[str, Method] = {
    "svd": svd.of_queries_and_keys,
    "whitened": svd.of_keys,
    "kq": kq.of_keys,
    "fisher": fisher.of_keys,
    "palu": palu.of_key_projection,
    "identity": identity.of_keys,
}
"""Functions of the methods of `bases.qk`, by the names of `recipe/basis_methods.py`, which says what they do."""

VALUE_BASES: dict[str, Method] = {
    "svd": svd.of_readers_and_values,
    "whitened": svd.of_values,
    "kq": kq.of_values,
    "kq-output": kq.of_outputs,
    "fisher": fisher.of_values,
    "palu": palu.of_value_projection,
    "identity": identity.of_values,
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


def bases_bytes(shape: AttentionShape, form: LayerForm) -> int:
    """Bytes of a layer's bases: encode and decode of each latent, float64."""
    count, columns = latent_size(form, shape)
    return 8 * len(form.latent_names) * 2 * count * columns**2


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
