"""Compute the bases of one layer by the methods that a recipe names."""

from __future__ import annotations

import torch

from ...checkpoint.bases import LayerBases, Parting, latent_sizes
from ...checkpoint.layout import AttentionShape, LayerForm
from ...checkpoint.projections import AttentionWeights
from ...errors import NumericsError
from ...numerics import one_thread
from ...recipe.basis_methods import QK_METHODS, VO_METHODS
from .information import LayerFisher
from .method import Inputs
from .moments import LayerStatistics, vector_names
from .parted import parted_bases


def needed_statistics(qk_method: str, vo_method: str, form: LayerForm, refit: bool = False) -> frozenset[str]:
    """Names of the moments that the methods read, as capture names them; never empty."""
    key, *_ = vector_names(form)
    if form.joint:
        return frozenset({key})
    needed = QK_METHODS[qk_method].moments | VO_METHODS[vo_method].moments
    named = {key if name == "key" else name for name in needed}
    return frozenset(named | ({"output"} if refit else set()) or {"value"})


def bases_bytes(shape: AttentionShape, form: LayerForm) -> int:
    """Bytes of a layer's bases: encode and decode of each latent, and what ties those of joint groups, float64."""
    sizes = latent_sizes(form, shape)[1]
    fast = form.group_size * form.fast_columns
    tied = shape.num_kv_heads // form.group_size * fast * (fast + 3 * (form.columns(shape.head_dim) - fast))
    return 8 * (sum(2 * count * columns**2 for count, columns in sizes) + tied)


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
            parting: Parting | None = None
            if form.joint:
                latents, parting = parted_bases(inputs, form)
            else:
                latents = QK_METHODS[qk_method].compute(inputs), VO_METHODS[vo_method].compute(inputs)
    except torch.linalg.LinAlgError as error:
        raise NumericsError(
            f"{where}: the bases {qk_method} and {vo_method} cannot be computed from what was measured: "
            f"{' '.join(str(error).split())}",
            "Calibrate with --dtype float32, or with other bases.",
        ) from error
    bases = LayerBases(form.keys, form.group_size, latents, parting=parting)
    bases.check(statistics.shape, where)
    return bases
