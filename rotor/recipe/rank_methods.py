"""The methods that turn spectra into ranks, as data: what recipes, help and tables say of them.

A new method is a class in a file of rotor.calibration.allocation, with an entry here and one in `paths.py` there.
Naming a method needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Need = Literal["gradients", "sensitivities"]
"""gradients: squared, of W_k and W_v, summed in calibration. sensitivities: from probes of each layer and side."""


@dataclass(frozen=True)
class RankMethod:
    """A way from singular values to ranks, under the name that `ranks.method` gives it.

    summary: one line, for help and tables; papers by their short names (docs/design.md, Sources).
    needs: what has to be measured beside the spectra.
    """

    name: str
    summary: str
    needs: frozenset[Need] = frozenset()


_METHODS = (
    RankMethod(
        "removal-rate",
        "one rate for all groups, both sides: the largest tail of at most that share of the spectrum goes (FDC "
        "equation 1)",
    ),
    RankMethod(
        "uniform",
        "the same share of columns everywhere (FDC section 6.6, /AC)",
    ),
    RankMethod(
        "fisher",
        "in proportion to squared gradients of W_k and W_v (Palu section 3.2)",
        frozenset({"gradients"}),
    ),
    RankMethod(
        "global",
        "water-filling over all layers by probed sensitivities",
        frozenset({"sensitivities"}),
    ),
)

RANK_METHODS = {method.name: method for method in _METHODS}
"""Methods by the names that `ranks.method` may have."""
