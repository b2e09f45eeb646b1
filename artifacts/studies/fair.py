"""The part `fair` of a study: quantisers as their authors set them, and recipes at a list of bytes.

    rotor study MODEL --recipes rotor --parts artifacts/studies/fair.py:Fair -o STUDY

`--parts methods` has every cache policy; this one takes minutes.
"""

from __future__ import annotations

from pathlib import Path

from rotor.policies import KIVI, KVTC, KVQuant, PerToken, find_policy
from rotor.tools.study.cache_part import CachePart, StudiedCache, at_bytes
from rotor.tools.study.context import StudyContext

WUSH = type(find_policy(f"{Path(__file__).with_name('wush.py')}:WUSH"))

QUANTISERS = {
    "KIVI-4": KIVI(4, 32, 128),
    "KIVI-2": KIVI(2, 32, 128),
    "KVQuant-4": KVQuant(4),
    "KVQuant-3": KVQuant(3),
    **{name: find_policy(name.lower()) for name in ("GEAR-4", "GEAR-2", "KVTC-4", "KVTC-2")},
    **{f"KVTC-{bits}, no window": KVTC(bits, window=0) for bits in (4, 2)},
    **{f"WUSH-{bits}": WUSH(bits) for bits in (4, 3, 2)},
    "per token, 4 bits": PerToken(4, 64),
    "per token, 3 bits": PerToken(3, 64),
}
"""KIVI with its authors' groups of 32 and 128 exact tokens; KVQuant with its outliers and the first token exact; GEAR
on KIVI; KVTC also without its window of exact tokens, a quarter of a row of 512; WUSH with one scale and zero a token,
and no token exact."""

SHARES = (0.3125, 0.125, 0.1)
"""Of the uncompressed bytes, where no list of bytes is given; the first is what KIVI-4 takes at 32 K tokens."""


class Fair(CachePart):
    name = "fair"
    title = "Caches at their bytes"

    def caches(self, study: StudyContext) -> dict[str, StudiedCache]:
        found = {name: StudiedCache(policy.method, policy) for name, policy in QUANTISERS.items()}
        return found | at_bytes(study, SHARES)
