"""Other constants than the rules choose, for measurements: warps, stages and tiles of the decode kernel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_chosen: ContextVar[tuple[tuple[str, Any], ...]] = ContextVar("rotor_decode_constants", default=())


@contextmanager
def decode_constants(**constants: Any) -> Iterator[None]:
    """Within the block, `decode.tile_sizes.decode_config` gives these in place of what it would choose.

    Args:
        constants: of the decode kernel by name, as in num_warps=4, num_stages=2, TILE=64. That the GPU can hold them is
            not checked here; the compiler or the launch says it.
    """
    token = _chosen.set(tuple({**dict(_chosen.get()), **constants}.items()))
    try:
        yield
    finally:
        _chosen.reset(token)


def chosen_constants() -> tuple[tuple[str, Any], ...]:
    """What is chosen here and now: names and values."""
    return _chosen.get()
