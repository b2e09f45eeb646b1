"""`peers`: quantisers of the cache, and recipes at a list of bytes, each scored through its cache."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from transformers.cache_utils import Cache, QuantizedCache

from ...policies import FP8, GEAR, KCVT, KIVI, PerToken, Policy
from ..cache_part import GROUP, CachePart
from ..caches import CachedModel, CacheRecord
from ..context import StudyContext
from ..part import Task

SHARES = (0.5, 0.375, 0.28, 0.2, 0.15, 0.125, 0.1, 0.075, 0.05, 0.0375)
"""Of the uncompressed cache's bytes, at which recipes are measured where no list of bytes is given."""

Baseline = Any
"""A policy, what makes a cache of transformers from the model's config, or the plain cache."""


class Peers(CachePart):
    name = "peers"
    csv = "peers.csv"
    size = "mean_kv_bytes_per_token"
    title = "Caches against quantisers, at their bytes"
    text = (
        "Every cache is used: a prompt, then the rest of each row in steps through it (report split, dtype of the "
        "checkpoint). Bytes per token count scales, zero points, buffers, tokens that wait: of a complete row, their "
        "mean over the lengths that are scored, and of a long context. KL in nats a token; the others are ratios to "
        "the uncompressed model, of tasks the mean probability of the right answers. `rotor, 320 bytes` is that "
        "recipe's mildest plan at that size or below."
    )

    def tasks(self, study: StudyContext) -> Iterator[Task]:
        for name, baseline in baselines().items():
            yield Task(f"{self.name}/{name}", partial(_baseline, study, name, baseline), retried=True)
        whole = study.whole_bytes
        for name, recipe in study.plan.recipes.items():
            for size in study.plan.sizes or [round(share * whole) for share in SHARES]:
                label = f"{name}, {size} bytes"
                measure = partial(self.of_recipe, study, label, recipe, 1 - size / whole)
                yield Task(f"{self.name}/{label}", measure, {name: recipe})


def baselines() -> dict[str, Baseline]:
    """The caches of uncompressed models that rotor is compared with: the exact one, transformers' own, and policies."""
    found: dict[str, Baseline] = {"uncompressed": None}
    for backend, axis in (("quanto", 0), ("hqq", 1)):  # along which each groups neighbouring numbers of a token
        for bits in (8, 4, 2):
            found[f"transformers {backend}, {bits} bits"] = partial(_quantised, backend, bits, axis)
    return found | {
        **{f"KIVI-{bits}": KIVI(bits) for bits in (4, 3, 2)},
        **{f"KIVI as in GEAR-{bits}": KIVI(bits, GROUP, GROUP) for bits in (4, 3, 2)},
        "KCVT-4": KCVT(4),
        "GEAR-4": GEAR(4),
        "GEAR-2": GEAR(2, "kivi", buffer=GROUP),
        **{f"per token, {bits} bits": PerToken(bits, GROUP) for bits in (4, 2)},
        "fp8, scale a token": FP8("token"),
        "fp8, one scale": FP8("tensor"),
    }


def _quantised(backend: str, bits: int, axis: int, config: Any) -> Cache:
    sizes: Any = {"nbits": bits, "q_group_size": GROUP, "residual_length": GROUP}
    return QuantizedCache(backend, config, axis_key=axis, axis_value=axis, **sizes)


def _baseline(study: StudyContext, name: str, baseline: Baseline) -> CacheRecord:
    bench = study.caches
    if baseline is None or isinstance(baseline, Policy):
        return bench.of_policy(name, baseline)
    make = partial(baseline, bench.network.config)
    try:
        make()
    except (ImportError, ValueError) as error:  # transformers' own: not installed, or not for this model
        return CacheRecord(name, skipped=" ".join(str(error).split()))
    # The prompt leaves no residual, and GROUP tokens later all is coded again.
    return bench.record(name, CachedModel(bench.network, make=make, step=GROUP))
