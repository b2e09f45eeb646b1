"""Both bases of one layer, computed by the methods that a recipe names, or read from a run folder."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...checkpoint.layout import AttentionShape, KeyForm, LayerForm
from ...checkpoint.projections import AttentionWeights
from ...errors import CheckpointError, NumericsError
from ...numerics import one_thread
from ...recipe.basis_methods import QK_METHODS, VO_METHODS
from . import fisher
from .information import LayerFisher
from .method import Inputs
from .moments import LayerStatistics, stored_name
from .pair import BasisPair, stacked_pair


@dataclass(frozen=True)
class LayerBases:
    """Bases of one layer, batched over its groups [num_groups, ...].

    form: of the keys that are stored.
    qk: encode is applied to keys, decode to queries or to key latents to rebuild keys.
    vo: encode is folded into W_v, decode into W_o.
    outputs: [num_heads, n, n], second moments of each query head's attention output over its group's stacked values
        (n = group_size * head_dim), to refit each head's slice of W_o at the rank it gets; None keeps decode as it is.
    joint: keys and values share a latent, of twice as many columns, which is what both put out together.
    """

    form: KeyForm
    group_size: int
    qk: BasisPair
    vo: BasisPair
    outputs: Tensor | None = None
    joint: bool = False

    @property
    def stored_name(self) -> str:
        """Name of the moments of what the key latents are of."""
        return stored_name(self.form, self.joint)

    @property
    def latents(self) -> dict[str, BasisPair]:
        """The bases of each latent: `qk` and `vo`, or where these are joint, one over both stacked, `joint`."""
        if self.joint:
            return {"joint": stacked_pair(self.qk, self.vo, self.group_size)}
        return {"qk": self.qk, "vo": self.vo}

    def check(self, shape: AttentionShape, where: str) -> None:
        """Check bases that were computed, or read from a file.

        Args:
            where: names the file or layer in errors.
        Raises:
            CheckpointError: shapes that are not of such a layer. NumericsError: a NaN or Inf; names the tensor.
        """
        groups, width = shape.num_kv_heads // self.group_size, self.group_size * shape.head_dim
        columns = 2 * width if self.joint else width
        for side, pair in (("qk", self.qk), ("vo", self.vo)):
            for name in ("encode", "decode"):
                check_stored(getattr(pair, name), (groups, width, columns), f"{where}: {side}.{name}")
            check_stored(pair.singular_values, (groups, columns), f"{where}: {side}.singular_values")
            for name, size in (("shift", columns), ("constant", width)):
                if getattr(pair, name) is not None:
                    check_stored(getattr(pair, name), (groups, size), f"{where}: {side}.{name}")
        if self.outputs is not None:
            check_stored(self.outputs, (shape.num_heads, width, width), f"{where}: outputs")


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


def needed_statistics(qk_method: str, vo_method: str, form: LayerForm, refit: bool = False) -> frozenset[str]:
    """Names of the moments that the methods read, as capture reports them; never empty."""
    key = stored_name(form.keys, form.joint)
    if form.joint:
        return frozenset({key})
    needed = QK_METHODS[qk_method].moments | VO_METHODS[vo_method].moments
    named = {key if name == "key" else name for name in needed}
    return frozenset(named | ({"output"} if refit else set()) or {"value"})


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
        gradients: for methods that read them.
        form: joint latents are by Fisher information.
        where: names the layer in errors.
    Raises:
        NumericsError: a factorisation fails or its result is not finite.
    Source: that of each method, beside it.
    """
    inputs = Inputs(statistics, weights, form.keys, gradients)
    try:
        with one_thread():
            if form.joint:
                qk, vo = fisher.of_both(inputs)
            else:
                qk, vo = QK_METHODS[qk_method].compute(inputs), VO_METHODS[vo_method].compute(inputs)
    except torch.linalg.LinAlgError as error:
        raise NumericsError(
            f"{where}: the bases {qk_method} and {vo_method} cannot be computed from what was measured: "
            f"{' '.join(str(error).split())}",
            "Calibrate with --dtype float32, or with other bases.",
        ) from error
    bases = LayerBases(form.keys, form.group_size, qk, vo, joint=form.joint)
    bases.check(statistics.shape, where)
    return bases
