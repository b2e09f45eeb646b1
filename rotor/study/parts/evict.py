"""`evict`: methods that drop tokens, at shares of a whole row's tokens."""

from __future__ import annotations

from ..cache_part import CONTROL, CachePart, StudiedCache, evictions
from ..context import StudyContext


class Evict(CachePart):
    name = "evict"
    title = "Evicted tokens"
    text = "Budgets are shares of all tokens of a row, prompt and what follows it (`--set study.budgets=[0.2,0.5]`)."

    def caches(self, study: StudyContext) -> dict[str, StudiedCache]:
        return CONTROL | {
            f"{name}, {share:g} of the tokens": StudiedCache(name, policy)
            for share in study.plan.settings.budgets
            for name, policy in evictions(share).items()
        }
