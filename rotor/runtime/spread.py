"""What attention of a sequence that lies on several processes gives to a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from .attention import RotorAttention


class Spread(Protocol):
    """How queries meet rows where a sequence lies on several processes: what `rotor.parallel` puts into `spread`."""

    @property
    def indices(self) -> Tensor:
        """Indices in the whole sequence of the tokens that this process was given, [seq_len]."""

    @property
    def length(self) -> int:
        """Tokens of the whole sequence, those of this pass among them."""

    def attend(
        self,
        module: RotorAttention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        past_key_values: Any,
        key_rotation: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """Store the rows, and let all queries attend to all rows that they see, wherever these are.

        Args:
            query, key, value: as in `reference.attention`, of this process's tokens.
            key_rotation: in blocks, of all indices of the whole sequence.
        Returns:
            [batch_size, seq_len, sum over query heads of value width] of this process's tokens.
        """
