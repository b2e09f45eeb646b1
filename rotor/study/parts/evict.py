"""`evict`: methods that drop tokens, at shares of a prompt's tokens."""

from __future__ import annotations

from collections.abc import Iterator

from ...policies import Policy
from ..cache_part import CONTROL, CachePart, evictions
from ..context import StudyContext
from ..part import Task

SHARES = (0.5, 0.25, 0.125)
"""Of a prompt's tokens that are kept."""


class Evict(CachePart):
    name = "evict"
    title = "Evicted tokens"

    def tasks(self, study: StudyContext) -> Iterator[Task]:
        found: dict[str, Policy] = dict(CONTROL)
        for share in SHARES:
            found |= {f"{name}, {share:g} of the tokens": policy for name, policy in evictions(share).items()}
        return self.of_policies(study, found)
