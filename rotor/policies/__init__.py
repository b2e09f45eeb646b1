"""Caches that need a history: a policy, and the cache layer that follows it. One file a method.

They replace the cache of any causal model that rotor knows, with full attention, and of a compressed checkpoint:
policies that evict serve every row, those that quantise rows of 16-bit columns. Tiers are for compressed checkpoints
alone. `generate` needs no patch:

    use_cache_policy(model, KIVI(bits=2))
    model.generate(**inputs)
"""

from __future__ import annotations

from .adoption import attach_stored, cache_policy, make_cache, policy_of, use_cache_policy
from .bundled import METHODS, bundled_policies, find_policy, read_stored
from .evicting_layer import EvictingLayer
from .eviction import Eviction
from .fp8 import FP8
from .gear import GEAR
from .h2o import H2O
from .kcvt import KCVT
from .keyformer import Keyformer
from .kivi import KIVI
from .kvquant import KVQuant
from .layer import PolicyLayer
from .nuq import NUQ
from .per_token import PerToken
from .policy import LayerSample, Policy, read_policy, stored_bytes
from .quantiser import CodedLayer, Quantiser
from .random_eviction import Random
from .sizes import LONG_TOKENS, packed_bytes_per_token
from .streaming import Streaming
from .tiered_layer import TieredLayer
from .tiers import Tiers
from .window import Window

__all__ = [
    "FP8",
    "GEAR",
    "H2O",
    "KCVT",
    "KIVI",
    "LONG_TOKENS",
    "METHODS",
    "NUQ",
    "CodedLayer",
    "EvictingLayer",
    "Eviction",
    "KVQuant",
    "Keyformer",
    "LayerSample",
    "PerToken",
    "Policy",
    "PolicyLayer",
    "Quantiser",
    "Random",
    "Streaming",
    "TieredLayer",
    "Tiers",
    "Window",
    "attach_stored",
    "bundled_policies",
    "cache_policy",
    "find_policy",
    "make_cache",
    "packed_bytes_per_token",
    "policy_of",
    "read_policy",
    "read_stored",
    "stored_bytes",
    "use_cache_policy",
]
