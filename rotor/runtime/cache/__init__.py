"""Caches that need a history: a policy, and the cache layer that follows it. One file a method.

They replace the cache of any causal model of transformers with full attention, and of a compressed checkpoint whose
columns have 16 bits; `generate` needs no patch:

    model.generate(**inputs, past_key_values=make_cache(KIVI(bits=2), model.config, inputs["attention_mask"]))
"""

from __future__ import annotations

from .fp8 import FP8
from .gear import GEAR
from .kcvt import KCVT
from .kivi import KIVI
from .layer import CodedLayer
from .per_token import PerToken
from .policy import Policy, make_cache, read_policy, stored_bytes

METHODS: dict[str, type[Policy]] = {policy.method: policy for policy in (PerToken, KCVT, KIVI, FP8, GEAR)}

__all__ = [
    "FP8",
    "GEAR",
    "KCVT",
    "KIVI",
    "METHODS",
    "CodedLayer",
    "PerToken",
    "Policy",
    "make_cache",
    "read_policy",
    "stored_bytes",
]
