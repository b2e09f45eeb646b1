"""The part `budgets` of a study: methods that drop tokens, with budgets of layers alike, by SqueezeAttention, and by
measured sensitivity.

    rotor study MODEL --parts artifacts/studies/parts/budgets.py:Budgets -o STUDY
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rotor.policies import H2O, Eviction, Random, Streaming, Window
from rotor.study.cache_part import CONTROL, CachePart, StudiedCache
from rotor.study.caches import CacheRecord
from rotor.study.context import StudyContext
from rotor.study.part import Table, Task
from rotor.study.store import StudyStore

BUDGETS = (0.1, 0.2, 0.3, 0.5, 0.7)
"""Shares of a whole row's tokens that are kept (SqueezeAttention figure 3: 0.1 to 1)."""

SQUEEZE = (0.85, 0.15)
"""What the least important layers keep of their budget: by SqueezeAttention's text, which removes 0.1 to 0.2, and by
its Algorithm 1 with that p."""

SHARE = 0.2
"""Of a row's tokens, where budgets by measured sensitivity are tried (SqueezeAttention section 4, 20 %)."""

PROBE_SHARES = (0.05, 0.2, 0.6)
"""Of a row's tokens that one layer keeps, the others all, where its sensitivity is measured."""

METHODS: dict[str, type[Eviction]] = {"window": Window, "StreamingLLM": Streaming, "H2O": H2O, "random": Random}
"""Those of SqueezeAttention's table 2, and the control, whose layers are not probed."""

SENSITIVITY = "sensitivities"
"""Begins the keys of records that are no cache."""


class Budgets(CachePart):
    name = "budgets"
    title = "Budgets of layers (SqueezeAttention figure 3)"
    text = (
        "Shares of all tokens of a row. SqueezeAttention's number is what the layers of its third group keep of their "
        "budget: 0.8 to 0.9 by its text, which removes 0.1 to 0.2; 0.1 to 0.2 by its Algorithm 1, which multiplies by "
        "p."
    )

    def caches(self, study: StudyContext) -> dict[str, StudiedCache]:
        found = dict(CONTROL)
        for share in BUDGETS:
            for name, policy in _methods(share).items():
                found[of_budget(name, "alike", share)] = StudiedCache(name, policy)
                for p in SQUEEZE:
                    how = f"SqueezeAttention {p:g}"
                    found[of_budget(name, how, share)] = StudiedCache(name, replace(policy, squeeze=p))
        return found

    def tasks(self, study: StudyContext) -> Iterator[Task]:
        yield from super().tasks(study)
        for name, policy in _methods(SHARE).items():
            if name != "random":
                key, label = f"{self.name}/{SENSITIVITY}/{name}", of_budget(name, "by sensitivity", SHARE)
                points = study.checkpoint.config.get_text_config().num_hidden_layers * len(PROBE_SHARES)
                yield Task(key, partial(_sensitivities, study, name, policy), points=points)
                yield Task(f"{self.name}/{label}", partial(_by_sensitivity, study, key, label, name, policy))

    def tables(self, store: StudyStore) -> Iterator[Table]:
        yield from super().tables(store)
        rows = [
            [name, f"[{', '.join(f'{share:.3f}' for share in shares_of_layers(record['kl_div']))}]"]
            for name, record in store.part(f"{self.name}/{SENSITIVITY}").items()
        ]
        if rows:
            yield Table(["method", "`layer_shares`"], rows, "Budgets by measured sensitivity")


def of_budget(name: str, how: str, share: float) -> str:
    """The name of a record."""
    return f"{name}, {how}, {share:g} of the tokens"


def shares_of_layers(losses: list[list[float]]) -> tuple[float, ...]:
    """A policy's `layer_shares` at SHARE, by the KL of each layer cut alone at PROBE_SHARES."""
    return tuple(share / SHARE for share in sensitivity_shares(losses, PROBE_SHARES, SHARE))


def sensitivity_shares(losses: Sequence[Sequence[float]], shares: Sequence[float], mean: float) -> list[float]:
    """The share of its tokens that each layer keeps so that the losses add up to least, at most `mean` in the mean.

    From the smallest shares on, the step is taken that gains most per share, of any length, which goes along the lower
    convex hull of each layer's losses.

    Args:
        losses: of each layer, cut by itself, at each of `shares`, in nats. shares: ascending. mean: at least the first.
    Source: rotor's own; the greedy choice is the best there is for convex losses.
    """
    at, left = [0] * len(losses), (mean - shares[0]) * len(losses)
    while True:
        steps = []
        for index, (layer, now) in enumerate(zip(losses, at, strict=True)):
            gains = [((layer[now] - layer[i]) / (shares[i] - shares[now]), i) for i in range(now + 1, len(shares))]
            if gains and shares[max(gains)[1]] - shares[now] <= left + 1e-9:
                steps.append((max(gains)[0], -index, max(gains)[1]))
        if not steps or max(steps)[0] <= 0:
            return [shares[now] for now in at]
        _, index, to = max(steps)
        left -= shares[to] - shares[at[-index]]
        at[-index] = to


def _methods(share: float) -> dict[str, Eviction]:
    return {name: method(share) for name, method in METHODS.items()}


def _sensitivities(study: StudyContext, name: str, policy: Eviction) -> dict[str, Any]:
    """KL of each layer cut alone at PROBE_SHARES of the tokens, nats a token: [layers][shares]."""
    bench, layers = study.bench_on(study.data.report), study.cache_network.shape.num_layers

    def loss(layer: int, share: float) -> float:
        shares = [1 / SHARE] * layers
        shares[layer] = share / SHARE
        return bench.of_policy(name, replace(policy, layer_shares=tuple(shares))).kl_div

    return {"shares": list(PROBE_SHARES), "kl_div": [[loss(layer, s) for s in PROBE_SHARES] for layer in range(layers)]}


def _by_sensitivity(study: StudyContext, key: str, label: str, family: str, policy: Eviction) -> CacheRecord:
    shares = shares_of_layers(study.store.records[key]["kl_div"])
    return StudiedCache(family, replace(policy, layer_shares=shares)).measure(study, label)
