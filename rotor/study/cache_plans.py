"""What the parts of a study about caches measure: policies by name, and the rule that combines two ways to compress."""

from __future__ import annotations

from dataclasses import replace

from ..policies import (
    FP8,
    GEAR,
    H2O,
    KCVT,
    KIVI,
    NUQ,
    Eviction,
    Keyformer,
    KVQuant,
    PerToken,
    Policy,
    Random,
    Streaming,
    Window,
)

SHARES = (0.5, 0.25, 0.125)
"""Of a prompt's tokens that evicting policies keep."""

BUDGET_SHARE = 0.2
"""Of a prompt's tokens, where budgets by measured sensitivity are tried (SqueezeAttention section 4, 20 %)."""

BUDGET_SHARES = (BUDGET_SHARE, 0.4, 0.7)
"""Of a prompt's tokens, where budgets of layers are compared (SqueezeAttention figure 3)."""

SQUEEZE = 0.3
"""p of SqueezeAttention where it is compared."""

PROBE_SHARES = (0.05, 0.2, 0.6)
"""Of a prompt's tokens that one layer keeps, the others all, where its sensitivity is measured."""

ON_TOP = ("Keyformer", "H2O", "random")
"""What evicts on top of compressed rows."""

TOTALS = (0.5, 0.75)
"""Shares of the cache removed by two ways together."""

EQUAL_BYTES = "per token, 4 bits"
CONTROL = PerToken(4, 64)
"""What every part measures beside its own: plain codes of four bits, the control for bytes."""


ABLATED = "GEAR KCVT-2"
"""What GEAR's ablations change."""


def quantisers() -> dict[str, Policy]:
    """What GEAR's tables 1, 2 and 8 compare, and KVQuant, at 4 and 2 bits; at 2 GEAR's ablations."""
    found: dict[str, Policy] = {}
    for bits in (4, 2):
        found |= {
            f"per token, {bits} bits": PerToken(bits, 64),
            f"KCVT-{bits}": KCVT(bits),
            f"KIVI-{bits}": KIVI(bits, 64, 64),
            f"NUQ-{bits}": NUQ(bits),
            f"KVQuant-{bits}": KVQuant(bits),
            f"GEAR-L KCVT-{bits}": GEAR(bits, sparsity=0.0),
            f"GEAR KCVT-{bits}": GEAR(bits),
            f"GEAR-L KIVI-{bits}": GEAR(bits, backbone="kivi", buffer=64, sparsity=0.0),
            f"GEAR KIVI-{bits}": GEAR(bits, backbone="kivi", buffer=64),
        }
    found["Outlier-A. KIVI-2"] = GEAR(2, backbone="kivi", buffer=64, rank=0, new_rank=0)
    found["GEAR-L prefill KCVT-2"] = GEAR(2, sparsity=0.0, new_rank=0)
    found["fp8"] = FP8("token")
    return found | {name: policy for of_name in ablations().values() for name, policy in of_name.items()}


def ablations() -> dict[str, dict[str, Policy]]:
    """By parameter, GEAR of 2 bits with other values of it, by name (GEAR figure 4a)."""
    values = {"sparsity": (0.01, 0.05, 0.1), "rank": (0, 2, 8), "buffer": (10, 40), "loops": (1, 4)}
    return {
        name: {f"{ABLATED}, {name} {value:g}": replace(GEAR(2), **{name: value}) for value in of_name}  # type: ignore[arg-type]
        for name, of_name in values.items()
    }


def evictions(share: float) -> dict[str, Eviction]:
    """Every evicting method at a share of the prompt's tokens, the control among them."""
    return {
        "window": Window(share),
        "StreamingLLM": Streaming(share),
        "H2O": H2O(share),
        "H2O, a layer alike": H2O(share, scope="layer"),
        "Keyformer": Keyformer(share),
        "random": Random(share),
    }


def budget_methods(share: float) -> dict[str, Eviction]:
    """What budgets of layers are compared for: those of SqueezeAttention's table 2, and the control."""
    found = evictions(share)
    return {name: found[name] for name in ("window", "StreamingLLM", "H2O", "random")}


def combined_policies(share: float, coded: bool) -> dict[str, Policy]:
    """What goes on top of a recipe's rows: tokens kept by a share, and where rows are numbers, codes, or both at once.

    Args:
        share: of the prompt's tokens that is kept.
    """
    kept = evictions(share)
    found: dict[str, Policy] = {name: kept[name] for name in ON_TOP}
    if not coded:
        found |= {f"{name} at {1 - share:.2f} with 4 bits": replace(kept[name], bits=4) for name in ON_TOP}
        found |= {EQUAL_BYTES: CONTROL, "KIVI-4": KIVI(4, 64, 64), "GEAR KCVT-4": GEAR(4), "KVQuant-4": KVQuant(4)}
    return found


def equal_contribution(total: float) -> float:
    """What each of two ways removes to remove `total` together: 1 - p = (1 - p_dim)(1 - p_tok) with p_dim = p_tok.

    Source: FDC section 6.3 and ZACK section 8.3 ("contribute equally to the overall compression rate").
    """
    return 1 - (1 - total) ** 0.5
