"""Cache policies, which look back at earlier tokens, and the cache layers that follow them; one method a file.

A policy replaces the cache of any causal model that rotor supports, with full attention, or of a compressed checkpoint.
Policies that evict serve every kind of row, those that quantise serve rows of 16-bit numbers, and tiers serve
compressed checkpoints alone. `generate` needs no patch:

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
from .policy import LONG_TOKENS, LayerSample, Policy, packed_bytes_per_token, packed_size, random_rows, stored_bytes
from .quantiser import CodedLayer, Quantiser
from .registry import bundled_policies, describe_policy, find_policy, read_stored
