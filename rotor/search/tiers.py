"""Ratios per token that cost at most so much quality, found by measuring.

Source: ZDC section 5.2, whose constraints on ratios are, by its text, p^u >= p^i and p_QK >= p_VW, and g that rises
with the layers.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from math import expm1

import numpy as np
from torch import Tensor

from ..errors import AccuracyError, UsageError
from ..evaluation.cached import final_states_through_cache
from ..evaluation.fidelity import PROMPT_SHARE
from ..evaluation.scoring import score
from ..policies import Policy, Tiers
from ..progress import Progress
from ..rewriting.compressible import CompressibleModel
from ..runtime.attention import RotorAttention

LAST_SHARE = 0.8
"""g of the last layer: it rises evenly from 0, as deeper layers want more important tokens."""

STEP, MOST = 0.1, 0.8
"""By what a ratio is raised, and the largest."""

PROBE_TOKENS = 32
"""Tokens of a step while ratios are compared: they see each other's whole rows, which hardly changes the order."""

KNOBS = (("qk_unimportant", "qk_important"), ("v_unimportant", "v_important"))
"""Ratios of keys and of values: of unimportant tokens, and of important ones."""


def choose_tiers(network: CompressibleModel, rows: Tensor, limit: float, progress: Progress) -> tuple[Tiers, float]:
    """Ratios per token for a compressed model, and the loss of quality that they were measured to cost.

    From nothing removed on, the ratio is raised that removes most for what it adds to the loss.

    Args:
        network: its layers compressed. rows: [n, seq_len] text to measure on.
        limit: of Q_d = (perplexity' - perplexity) / perplexity.
    Raises:
        AccuracyError: nothing that removes anything costs so little.
    """
    modules = [network.family.attention_module(network.model, i) for i in range(network.shape.num_layers)]
    sizes = np.array([module.layout.row_bytes(2) for module in modules if isinstance(module, RotorAttention)])
    shares = tuple(round(float(share), 6) for share in np.linspace(0.0, LAST_SHARE, len(sizes)))
    base = {step: _loss(network, rows, None, step) for step in (PROBE_TOKENS, 1)}

    def cost(policy: Tiers, step: int) -> float:
        return expm1(_loss(network, rows, policy, step) - base[step])

    chosen = [Tiers(layer_important=shares, qk_unimportant=0.0, v_unimportant=0.0)]
    with progress.task("tiers", None, "") as advance:
        while True:
            tried = []
            for policy in _raised(chosen[-1]):
                found = cost(policy, PROBE_TOKENS)
                gain = removed(policy, sizes) - removed(chosen[-1], sizes)
                if gain > 0 and found <= limit:
                    tried.append((max(found, 1e-6) / removed(policy, sizes), policy))
                advance(1)
            if not tried:
                break
            chosen.append(min(tried, key=lambda pair: pair[0])[1])
    for policy in reversed(chosen[1:]):
        found = cost(policy, 1)
        progress.message(f"tiers: {removed(policy, sizes):.3f} of the rows removed, Q_d {found:.4f}")
        if found <= limit:
            return policy, found
    raise AccuracyError(
        f"cache.tiers {limit:g}: no ratios per token that remove anything cost at most so much perplexity.",
        "Allow more, or export without tiers.",
    )


def _raised(policy: Tiers) -> list[Tiers]:
    """The policies with one ratio more."""
    found = []
    for name in (name for pair in KNOBS for name in pair):
        value = round(getattr(policy, name) + STEP, 6)
        with suppress(UsageError):  # not of ZDC's order
            found += [replace(policy, **{name: value})] if value <= MOST else []
    return found


def removed(policy: Tiers, sizes: np.ndarray) -> float:
    """The share of the rows' bytes that is removed: ZDC equation 5, layers and sides by their bytes [layers, 2]."""
    shares = np.array(policy.layer_important)
    ratios = [getattr(policy, inner) * shares + getattr(policy, outer) * (1 - shares) for outer, inner in KNOBS]
    return float((np.stack(ratios, 1) * sizes).sum() / sizes.sum())


def _loss(network: CompressibleModel, rows: Tensor, policy: Policy | None, step: int) -> float:
    """Nats a token, read through the cache in steps of so many tokens."""
    prefill = max(1, int(rows.shape[1] * PROMPT_SHARE))
    states = final_states_through_cache(network, rows, prefill, policy, step=step)
    return float(score(network, rows[:, prefill:], states=states[:, prefill:]).nll.mean())
