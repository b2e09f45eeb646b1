"""RoPE whose frequencies change with the length, where each process sees only some of the positions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..runtime.families import Family

if TYPE_CHECKING:
    from .sequence import SequenceParallel


@contextmanager
def whole_positions(state: SequenceParallel, model: Any, family: Family) -> Iterator[None]:
    """Let such an embedding (`dynamic`, `longrope`) see the positions of all tokens of a spread prompt.

    It takes its frequencies from the largest position that it is given, which must be the prompt's in every process.
    """
    tables = {layer.rotary for layer in state.layers if layer.rotary is not None}
    if family.rotary is None or not any(table.depends_on_length for table in tables):
        yield
        return
    turned: list[Tensor] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        now = state.now
        given = args[1] if len(args) > 1 else kwargs.get("position_ids")
        if now.runs is None or given is None or not torch.equal(given, now.own_positions):
            return None  # the table of an attention layer, by index over the whole prompt
        turned.append(now.indices)
        if len(args) > 1:
            return (args[0], now.positions, *args[2:]), kwargs
        return args, kwargs | {"position_ids": now.positions}

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        if not turned:
            return None
        indices = turned.pop()
        return tuple(table.index_select(1, indices) for table in output)

    rotary = model.get_submodule(family.rotary)
    with ExitStack() as stack:
        stack.callback(rotary.register_forward_pre_hook(before, with_kwargs=True).remove)
        stack.callback(rotary.register_forward_hook(after).remove)
        yield
