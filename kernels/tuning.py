"""Other constants than the rules choose, for measurements: warps, stages and tiles of the decode kernel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

_chosen: ContextVar[Mapping[str, Any]] = ContextVar("rotor_decode_constants", default=MappingProxyType({}))


@contextmanager
def decode_constants(**constants: Any) -> Iterator[None]:
    """Within the block, `tile_sizes.decode_config` gives these in place of what it would choose.

    Args:
        constants: of the decode kernel by name, as in num_warps=4, num_stages=2, TILE=64. That the GPU can hold them is
            not checked here; the compiler or the launch says it.
    """
    token = _chosen.set({**_chosen.get(), **constants})
    try:
        yield
    finally:
        _chosen.reset(token)


def chosen_constants() -> Mapping[str, Any]:
    """What is chosen here and now."""
    return _chosen.get()
