"""Caches that need a history: a policy, and the cache layer that follows it. A method is a file in `methods`.

They replace the cache of any causal model that rotor knows, with full attention, and of a compressed checkpoint:
policies that evict serve every row, those that quantise rows of 16-bit numbers. Tiers are for compressed checkpoints
alone. `generate` needs no patch:

    use_cache_policy(model, KIVI(bits=2))
    model.generate(**inputs)
"""

from __future__ import annotations

from .adoption import attach_stored, cache_policy, policy_of, use_cache_policy
from .eviction import EvictingLayer, Eviction
from .layer import PolicyLayer
from .methods.fp8 import FP8
from .methods.gear import GEAR
from .methods.h2o import H2O
from .methods.kcvt import KCVT
from .methods.keyformer import Keyformer
from .methods.kivi import KIVI
from .methods.kvquant import KVQuant
from .methods.kvtc import KVTC
from .methods.per_token import PerToken
from .methods.streaming import Streaming
from .methods.tiers import Tiers
from .methods.window import Window
from .policy import LONG_TOKENS, LayerSample, Policy, packed_bytes_per_token, random_rows, stored_bytes
from .quantiser import CodedLayer, Quantiser
from .registry import bundled_policies, describe_policy, find_policy, read_stored
