"""The parts `quantise`, `evict`, `budgets` and `combine` of a study: policies of the cache, scored through it."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..calibration.run import Run
from ..evaluation.cached import PREFILL_SHARE
from ..format.atomic import write_text
from ..recipe import Recipe
from ..runtime.cache import Eviction, Policy
from ..runtime.cache.budgets import sensitivity_shares
from .cache_bench import PolicyModel
from .cache_plans import (
    BUDGET_SHARE,
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
from .peers_part import PeersPart, peer_rows
from .request import CACHE_PARTS

CSV = "caches.csv"
TARGETS = (0.99, 0.95, 0.90)
SENSITIVITY = "sensitivities"


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
        self._measure("budgets", budgeted())
        for name, policy in sensitive().items():
            shares = sensitivity_shares(self._sensitivities(name, policy), PROBE_SHARES, BUDGET_SHARE)
            by_layer = tuple(share / BUDGET_SHARE for share in shares)
            self._measure("budgets", {f"{name}, by sensitivity": replace(policy, layer_shares=by_layer)})

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
                if above is None:
                    self._keep("combine", bench.checkpoint(label, network.model))
                else:
                    self._keep("combine", bench.policy(label, PolicyModel(network, above, compressed=True)))

    def _measure(self, part: str, policies: Mapping[str, Policy]) -> None:
        """Records of the uncompressed model with each policy."""
        for name, policy in policies.items():
            if self.store.get(f"{part}/{name}") is None:
                model = PolicyModel(self._in_checkpoint_dtype(), policy, compressed=False)
                self._keep(part, self._bench().policy(name, model))

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


def evicted() -> dict[str, Policy]:
    """What `evict` measures, by name."""
    found: dict[str, Policy] = {EQUAL_BYTES: CONTROL}
    for share in SHARES:
        found |= {f"{name}, {share:g} of the tokens": policy for name, policy in evictions(share).items()}
    return found


def budgeted() -> dict[str, Policy]:
    """What `budgets` measures, by name, but for the budgets that have to be measured first."""
    found: dict[str, Policy] = {EQUAL_BYTES: CONTROL}
    for name, policy in budget_methods().items():
        found |= {f"{name}, alike": policy, f"{name}, SqueezeAttention": replace(policy, squeeze=SQUEEZE)}
    return found


def sensitive() -> dict[str, Eviction]:
    """The methods whose layers are probed for budgets of their own."""
    return {name: policy for name, policy in budget_methods().items() if name != "random"}


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
            plans[together if above.evicts else f"{name} at {each:.2f} and {label}"] = (each, above)
        found.append(plans)
    return found


def cache_records(store: Any, part: str) -> list[PeerRecord]:
    """The records of a part, in order of arrival."""
    return [PeerRecord(**record) for key, record in store.part(part).items() if not key.startswith(SENSITIVITY)]


def accuracy(record: PeerRecord) -> float:
    """The smallest ratio to the uncompressed model: next tokens, perplexity, and each task's answers."""
    return min(record.token_accuracy, record.ppl_ratio, *record.answers.values())


def best_mixtures(records: Sequence[PeerRecord]) -> list[list[str]]:
    """At each accuracy what takes fewest bytes a token, of a complete row and of a long context."""
    rows = []
    for target in TARGETS:
        fitting = [record for record in records if not record.skipped and accuracy(record) >= target]
        cells = [f"{target:g}"]
        for size in ("kv_bytes_per_token", "long_kv_bytes_per_token"):
            best = min(fitting, key=lambda record: getattr(record, size), default=None)
            cells += ["none measured", ""] if best is None else [best.name, f"{getattr(best, size):.1f}"]
        rows.append(cells)
    return rows


def cache_tables(store: Any) -> list[tuple[str, list[str], list[list[str]]]]:
    """Title, header and cells of a table for each of the four parts, and of the best mixtures over all of them."""
    titles = {
        "quantise": "Quantised caches (GEAR tables 1, 2, 8 to 10)",
        "evict": "Evicted tokens",
        "budgets": f"Budgets of layers, {BUDGET_SHARE:g} of the tokens in the mean (SqueezeAttention table 2)",
        "combine": "Compressed rows and a policy on top (FDC and ZACK: 1 - p = (1 - p_dim)(1 - p_tok))",
    }
    found = {part: records for part in CACHE_PARTS if (records := cache_records(store, part))}
    tables = [(titles[part], *peer_rows(records)) for part, records in found.items()]
    if found:
        header = ["accuracy", "fewest bytes, complete row", "bytes", "fewest bytes, 32K tokens", "bytes at 32K tokens"]
        every = [record for records in found.values() for record in records]
        title = "Of all these, the fewest bytes at an accuracy: the smallest of a row's ratios"
        tables.append((title, header, best_mixtures(every)))
    return tables


def write_caches_csv(store: Any) -> Path | None:
    """One row a record of the four parts; None without any."""
    parts = {part: cache_records(store, part) for part in CACHE_PARTS}
    tasks = list(dict.fromkeys(task for records in parts.values() for record in records for task in record.answers))
    if not any(parts.values()):
        return None
    plain = [name for name in asdict(PeerRecord("")) if name not in ("answers", "hits")]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["part", *plain, *(f"{task}_answers" for task in tasks)])
    for part, records in parts.items():
        for record in records:
            own = [getattr(record, name) for name in plain]
            writer.writerow([part, *own, *(record.answers.get(task, "") for task in tasks)])
    path = store.folder / CSV
    write_text(path, text.getvalue())
    return path
