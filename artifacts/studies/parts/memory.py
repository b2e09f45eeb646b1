"""The part `memory` of a study: what fits into a GPU, and what it decodes a second at most, predicted from bytes alone.

In shape GEAR's figure 3 and tables 6 and 7, and SqueezeAttention's figure 4 and table 3.

    rotor study MODEL --parts artifacts/studies/parts/memory.py:Memory -o STUDY
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from rotor import fit_cache_policy
from rotor.calibration.prediction.devices import find_device
from rotor.tools.study.cache_part import StudiedCache
from rotor.tools.study.caches import cache_bytes
from rotor.tools.study.context import StudyContext
from rotor.tools.study.part import Part, Table, Task
from rotor.tools.study.parts.methods import Methods
from rotor.tools.study.store import StudyStore

GPU_BYTES = 16 << 30
"""Of the V100 in GEAR section 4.2."""

PROMPT, TOKENS = 1000, 1500
"""Of a sequence, with what is generated (GEAR section 4.2)."""


class Memory(Part):
    name = "memory"

    def tasks(self, study: StudyContext) -> Iterator[Task]:
        for name, case in Methods().caches(study).items():
            yield Task(f"{self.name}/{name}", partial(_measure, study, case))

    def tables(self, store: StudyStore) -> Iterator[Table]:
        rows = [
            [name, f"{r['row_bytes'] / TOKENS:.0f}", *map(str, what_fits(**r))]
            for name, r in store.part(self.name).items()
            if "skipped" not in r
        ]
        if rows:
            yield Table(
                ["cache", "bytes", "largest batch", "longest sequence", "tokens a second"],
                sorted(rows, key=lambda row: -int(row[1])),
                "What fits into 16 GB (GEAR tables 6 and 7, SqueezeAttention figure 4 and table 3, in shape)",
                f"Predicted, nothing measured: weights as stored and caches of {TOKENS} tokens, {PROMPT} of them the "
                "prompt, without activations; tokens a second of the largest batch, if weights and caches are read "
                "once a step at the bandwidth of `objective.device` and nothing else takes time. Bytes are of a token.",
            )


def what_fits(row_bytes: float, weight_bytes: float, bytes_per_s: float) -> tuple[int, int, int]:
    """The largest batch, the longest sequence, and tokens a second of that batch."""
    room = GPU_BYTES - weight_bytes
    batch = int(room // row_bytes)
    return batch, int(room * TOKENS // row_bytes), round(batch * bytes_per_s / (weight_bytes + batch * row_bytes))


def _measure(study: StudyContext, case: StudiedCache) -> dict[str, Any]:
    settings, folder = study.inputs.first.objective, study.checkpoint.folder
    if case.recipe:
        plan = study.path(case.recipe, study.inputs.recipes[case.recipe])[1].at_compression(case.removed)
        if plan is None:
            return {"skipped": "out of reach"}
        row = study.whole_bytes * TOKENS * (1 - plan.stored)
    else:
        with study.cache_network.uncompressed() as model:
            policy = case.policy
            if policy is not None and policy.needs_samples:
                policy = fit_cache_policy(model, policy, study.bench.samples())
            row = cache_bytes(study.cache_network, PROMPT, TOKENS, policy)[-1]
    weights = sum((folder / name).stat().st_size for name in study.checkpoint.files)
    device = find_device(settings.device)
    return {"row_bytes": row, "weight_bytes": weights, "bytes_per_s": device.bandwidth_bytes_per_s}
