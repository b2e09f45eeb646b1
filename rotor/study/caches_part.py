"""The parts `quantise`, `evict`, `budgets` and `combine` of a study: policies of the cache, scored through it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from torch import Tensor

from ..calibration.run import Run
from ..evaluation.cached import PREFILL_SHARE
from ..evaluation.fitting import FIT_TOKENS, attention_cosines, fit_cache_policy
from ..policies import Eviction, Policy
from ..policies.budgets import sensitivity_shares
from ..recipe import Recipe
from .cache_bench import PolicyModel
from .cache_plans import (
    BUDGET_SHARE,
    BUDGET_SHARES,
    CONTROL,
    EQUAL_BYTES,
    ON_TOP,
    PROBE_SHARES,
    SHARES,
    SQUEEZE,
    TOTALS,
    budget_methods,
    combined_policies,
    equal_contribution,
    evictions,
    quantisers,
)
from .peers import PeerRecord
from .peers_part import PeersPart

SENSITIVITY, COSINES = "sensitivities", "cosines"
"""Records of `budgets` that are no cache."""

COSINE_BLOCKS = 16
"""Runs of tokens of a prompt whose cosines are kept apart (SqueezeAttention figure 2)."""


class CachesPart(PeersPart):
    """Measures what the store does not have yet; raises as PeersPart."""

    def quantise(self) -> None:
        """Quantisers of the uncompressed model's cache."""
        self._measure("quantise", quantisers())

    def evict(self) -> None:
        """Evicting methods at shares of the prompt's tokens."""
        self._measure("evict", evicted())

    def budgets(self) -> None:
        """Budgets per layer: alike, by SqueezeAttention, and by measured sensitivity."""
        if self.store.get(f"budgets/{COSINES}") is None:
            self.store.put(f"budgets/{COSINES}", {"cosines": self._cosines()})
        self._measure("budgets", budgeted())
        for name, policy in sensitive().items():
            by_layer = shares_of_layers(self._sensitivities(name, policy))
            self._measure(
                "budgets", {of_budget(name, "by sensitivity", BUDGET_SHARE): replace(policy, layer_shares=by_layer)}
            )

    def combine(self, name: str, recipe: Recipe, run: Callable[[], Run]) -> None:
        """A recipe's rows with a policy on top, both removing as much (see equal_contribution), and each alone.

        Args:
            run: gives the recipe's calibration.
        """
        self._measure("combine", alone())
        for plans in combinations(name, recipe.coded):
            missing = {label: plan for label, plan in plans.items() if self.store.get(f"combine/{label}") is None}
            if not missing:
                continue
            measurer = self.subject.measurer(run(), recipe)
            path = measurer.path(recipe)
            for label, (share, above) in missing.items():
                plan = path.at_compression(share)
                if plan is None:
                    least = path.steps()[-1].stored
                    self._keep("combine", PeerRecord(label, skipped=f"out of reach: at most {least:.3f} is removed"))
                    continue
                bench, network = self._bench(), self._in_checkpoint_dtype()
                network.compress(plan.select(measurer.bases), plan.rounded)
                if above is not None:
                    above = self._fitted(above, network.model)
                if above is None:
                    self._keep("combine", bench.checkpoint(label, network.model))
                else:
                    self._keep("combine", bench.policy(label, PolicyModel(network, above, compressed=True)))

    def _measure(self, part: str, policies: Mapping[str, Policy]) -> None:
        """Records of the uncompressed model with each policy."""
        for name, policy in policies.items():
            if self.store.get(f"{part}/{name}") is None:
                network = self._in_checkpoint_dtype()
                with network.uncompressed() as plain:
                    policy = self._fitted(policy, plain)
                model = PolicyModel(network, policy, compressed=False)
                self._keep(part, self._bench().policy(name, model))

    def _fitted(self, policy: Policy, model: Any) -> Policy:
        """With what it finds of the model on the text that is kept for calibrations."""
        if not policy.needs_samples:
            return policy
        return fit_cache_policy(model, policy, self._calibration_rows(FIT_TOKENS))

    def _calibration_rows(self, tokens: int) -> Tensor:
        return self.subject.calibration_rows(max(1, tokens // self.subject.data.report.shape[1]))

    def _cosines(self) -> list[list[float]]:
        """Before and after the attention of each layer, over prompts of the calibration text: [layers][blocks]."""
        rows = self._calibration_rows(FIT_TOKENS)
        with self._in_checkpoint_dtype().uncompressed() as plain:
            found = attention_cosines(plain, rows)
        return [[float(part.mean()) for part in layer.tensor_split(COSINE_BLOCKS) if len(part)] for layer in found]

    def _sensitivities(self, name: str, policy: Eviction) -> list[list[float]]:
        """KL of each layer cut alone at PROBE_SHARES of the tokens, nats a token: [layers][shares]."""
        key = f"budgets/{SENSITIVITY}/{name}"
        known = self.store.get(key)
        if known is None:
            bench, network = self._bench(), self._in_checkpoint_dtype()
            layers, found = network.shape.num_layers, []
            everything = PREFILL_SHARE / BUDGET_SHARE  # of a budget: a row has as many tokens
            for layer in range(layers):
                row = []
                for share in PROBE_SHARES:
                    shares = [everything] * layers
                    shares[layer] = share / BUDGET_SHARE
                    cut = PolicyModel(network, replace(policy, layer_shares=tuple(shares)), compressed=False)
                    row.append(bench.divergence(f"{name}, layer {layer}", cut))
                found.append(row)
            known = self.store.put(key, {"shares": list(PROBE_SHARES), "kl_div": found})
        return [list(row) for row in known["kl_div"]]

    def _keep(self, part: str, record: PeerRecord) -> None:
        self.store.put(f"{part}/{record.name}", asdict(record))
        found = record.skipped or f"{record.mean_kv_bytes_per_token:.1f} bytes a token, KL {record.kl_div:.5f}"
        self.subject.progress.message(f"{part}: {record.name}: {found}")


def shares_of_layers(losses: list[list[float]]) -> tuple[float, ...]:
    """A policy's `layer_shares` at BUDGET_SHARE, by the KL of each layer cut alone at PROBE_SHARES."""
    return tuple(share / BUDGET_SHARE for share in sensitivity_shares(losses, PROBE_SHARES, BUDGET_SHARE))


def evicted() -> dict[str, Policy]:
    """What `evict` measures, by name."""
    found: dict[str, Policy] = {EQUAL_BYTES: CONTROL}
    for share in SHARES:
        found |= {of_share(name, share): policy for name, policy in evictions(share).items()}
    return found


def budgeted() -> dict[str, Policy]:
    """What `budgets` measures, by name, but for the budgets that have to be measured first."""
    found: dict[str, Policy] = {EQUAL_BYTES: CONTROL}
    for share in BUDGET_SHARES:
        for name, policy in budget_methods(share).items():
            found[of_budget(name, "alike", share)] = policy
            found[of_budget(name, "SqueezeAttention", share)] = replace(policy, squeeze=SQUEEZE)
    return found


def of_budget(name: str, how: str, share: float) -> str:
    """The name of a record of `budgets`."""
    return f"{name}, {how}, {share:g} of the tokens"


def of_share(name: str, share: float) -> str:
    """The name of a record of `evict`."""
    return f"{name}, {share:g} of the tokens"


def sensitive() -> dict[str, Eviction]:
    """The methods whose layers are probed for budgets of their own."""
    return {name: policy for name, policy in budget_methods(BUDGET_SHARE).items() if name != "random"}


def alone() -> dict[str, Policy]:
    """What `combine` measures of the uncompressed model, by name."""
    found: dict[str, Policy] = {EQUAL_BYTES: CONTROL}
    for total in TOTALS:
        kept = {name: policy for name, policy in evictions(1 - total).items() if name in ON_TOP}
        found |= {f"{name} alone, {total:g} removed": policy for name, policy in kept.items()}
    return found


def combinations(name: str, coded: bool) -> list[dict[str, tuple[float, Policy | None]]]:
    """What `combine` measures of a recipe at each of TOTALS: by name, the share that its rows remove and the policy on
    top."""
    found = []
    for total in TOTALS:
        each = equal_contribution(total)
        plans: dict[str, tuple[float, Policy | None]] = {f"{name} alone, {total:g} removed": (total, None)}
        for label, above in combined_policies(1 - each, coded).items():
            together = f"{name} and {label}, {total:g} removed"
            # What is coded removes more than the total.
            alike = isinstance(above, Eviction) and above.bits == 16
            plans[together if alike else f"{name} at {each:.2f} and {label}"] = (each, above)
        found.append(plans)
    return found
