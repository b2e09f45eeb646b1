"""What travels between processes: one collective, uneven and in bytes, counted, and with errors that say who waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import RotorError

Kind = Literal["queries", "rows", "outputs", "partial", "agreement", "hidden"]
"""What is sent: compressed queries, rows of the cache, compressed outputs; outputs and log-sum-exps over part of the
keys; what processes compare before a pass; hidden states or logits of a few tokens."""

Shape = tuple[int, ...]


class Wire:
    """The processes of a group, as one of them has them.

    sent: bytes sent to other processes so far, by kind.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank: int = dist.get_rank(group)
        self.count: int = dist.get_world_size(group)
        self.sent: Counter[Kind] = Counter()

    def exchange(
        self,
        what: str,
        kind: Kind,
        outgoing: Sequence[Sequence[Tensor]],
        shapes: Sequence[Sequence[Shape]],
        dtype: torch.dtype,
    ) -> list[list[Tensor]]:
        """Send tensors of one dtype to every process, and receive from every one.

        Args:
            what: for errors. outgoing: by process. shapes: of what each process sends to this one.
        Returns:
            By process, tensors of these shapes.
        Raises:
            RotorError: another process ended, or did not answer within the group's timeout.
        """
        flat = [tensor.contiguous().flatten().view(torch.uint8) for tensors in outgoing for tensor in tensors]
        send = torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8, device=self.device)
        send_sizes = [sum(tensor.nbytes for tensor in tensors) for tensors in outgoing]
        receive_sizes = [dtype.itemsize * sum(map(prod, own)) for own in shapes]
        received = torch.empty(sum(receive_sizes), dtype=torch.uint8, device=self.device)
        try:
            dist.all_to_all_single(received, send, receive_sizes, send_sizes, group=self.group)
        except RuntimeError as error:
            raise RotorError(
                f"process {self.rank} of {self.count}, {what}: another process ended or did not answer in time "
                f"({' '.join(str(error).split())[:200]}).",
                "The error of the process that ended first says why; all processes have to be started again.",
            ) from error
        self.sent[kind] += sum(send_sizes) - send_sizes[self.rank]
        parts = iter(received.view(dtype).split([prod(shape) for own in shapes for shape in own]))
        return [[next(parts).view(shape) for shape in own] for own in shapes]

    def gather(self, what: str, kind: Kind, tensor: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        """Every process's tensor, in every process; `shapes` are theirs."""
        found = self.exchange(what, kind, [[tensor]] * self.count, [[shape] for shape in shapes], tensor.dtype)
        return [own[0] for own in found]
