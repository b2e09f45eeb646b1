"""A loaded checkpoint: registration with transformers, attention over rows.

Others import from here; a module is loaded when one of its names is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..facade import lazy

if TYPE_CHECKING:
    from .attention import RotorAttention as RotorAttention
    from .exact import ExactRows as ExactRows
    from .exact import WithExactRows as WithExactRows
    from .integration import replace_attention as replace_attention
    from .positions import PositionCheck as PositionCheck
    from .registration import register_with_transformers as register_with_transformers
    from .rope import BlocksAsGiven as BlocksAsGiven
    from .rope import RotaryTable as RotaryTable
    from .rope import Rotations as Rotations
    from .rope import TokenSpan as TokenSpan
    from .rope import rotary_tables as rotary_tables
    from .rope import rows_of as rows_of
    from .steps import AttentionCall as AttentionCall
    from .steps import CacheRows as CacheRows
    from .steps import RowStore as RowStore
    from .steps import attend_to_rows as attend_to_rows

_MODULES = {
    "attention": "RotorAttention",
    "exact": "ExactRows WithExactRows",
    "integration": "replace_attention",
    "positions": "PositionCheck",
    "registration": "register_with_transformers",
    "rope": "BlocksAsGiven RotaryTable Rotations TokenSpan rotary_tables rows_of",
    "steps": "AttentionCall CacheRows RowStore attend_to_rows",
}
__getattr__ = lazy(__name__, _MODULES)
