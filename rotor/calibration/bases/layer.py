"""Compute the bases of one layer by the methods that a recipe names."""

from __future__ import annotations

import torch

from ...checkpoint.bases import BasisPair, LayerBases
from ...checkpoint.layout import AttentionShape, LayerForm
from ...checkpoint.projections import AttentionWeights
from ...errors import NumericsError
from ...numerics import one_thread
from ...recipe.basis_methods import QK_METHODS, VO_METHODS
from . import fisher
from .information import LayerFisher
from .method import Inputs
from .moments import LayerStatistics, stored_name


def needed_statistics(qk_method: str, vo_method: str, form: LayerForm, refit: bool = False) -> frozenset[str]:
    """Names of the moments that the methods read, as capture names them; never empty."""
    key = stored_name(form.keys, form.joint)
    if form.joint:
        return frozenset({key})
    needed = QK_METHODS[qk_method].moments | VO_METHODS[vo_method].moments
    named = {key if name == "key" else name for name in needed}
    return frozenset(named | ({"output"} if refit else set()) or {"value"})


def bases_bytes(shape: AttentionShape, form: LayerForm) -> int:
    """Bytes of a layer's bases: encode and decode of each latent, float64."""
    groups, columns = shape.num_kv_heads // form.group_size, form.columns(shape.head_dim)
    return form.latents_per_group * 2 * groups * columns**2 * 8


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
            if form.joint:
                latents: tuple[BasisPair, ...] = (fisher.of_both(inputs),)
            else:
                latents = QK_METHODS[qk_method].compute(inputs), VO_METHODS[vo_method].compute(inputs)
    except torch.linalg.LinAlgError as error:
        raise NumericsError(
            f"{where}: the bases {qk_method} and {vo_method} cannot be computed from what was measured: "
            f"{' '.join(str(error).split())}",
            "Calibrate with --dtype float32, or with other bases.",
        ) from error
    bases = LayerBases(form.keys, form.group_size, latents)
    bases.check(statistics.shape, where)
    return bases
