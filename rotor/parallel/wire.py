"""What travels between processes: one collective, uneven and in bytes, counted, and with errors that say who waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import RotorError

Kind = Literal["queries", "rows", "outputs", "partial", "agreement", "hidden"]
"""What a parcel is: compressed queries, rows of the cache, compressed outputs; outputs and log-sum-exps over part of
the keys; what processes compare before a pass; hidden states or logits of a few tokens."""


@dataclass(frozen=True)
class Parcel:
    """A tensor for another process."""

    kind: Kind
    tensor: Tensor


@dataclass(frozen=True)
class Expected:
    """Shape and dtype of a parcel from another process; every process can tell them beforehand."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Wire:
    """The processes of a group, seen from one of them.

    sent: bytes sent to other processes so far, by kind. received: all bytes received from others.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank: int = dist.get_rank(group)
        self.count: int = dist.get_world_size(group)
        self.sent: Counter[Kind] = Counter()
        self.received = 0

    def exchange(
        self, what: str, outgoing: Sequence[Sequence[Parcel]], expected: Sequence[Sequence[Expected]]
    ) -> list[list[Tensor]]:
        """Send parcels to every process, and receive from every one.

        Args:
            what: for errors. outgoing: by process. expected: of what each process sends to this one.
        Returns:
            By process, tensors as expected.
        Raises:
            RotorError: another process ended, or did not answer within the group's timeout.
        """
        packed = [[_as_bytes(parcel.tensor) for parcel in parcels] for parcels in outgoing]
        send_sizes = [sum(len(part) for part in parts) for parts in packed]
        receive_sizes = [sum(one.size_bytes for one in parts) for parts in expected]
        flat = [part for parts in packed for part in parts]
        send = torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8, device=self.device)
        received = torch.empty(sum(receive_sizes), dtype=torch.uint8, device=self.device)
        try:
            dist.all_to_all_single(received, send, receive_sizes, send_sizes, group=self.group)
        except RuntimeError as error:
            raise RotorError(
                f"process {self.rank} of {self.count}, {what}: another process ended or did not answer in time "
                f"({' '.join(str(error).split())[:200]}).",
                "The error of the process that ended first says why; all processes have to be started again.",
            ) from error
        for process, parcels in enumerate(outgoing):
            if process != self.rank:
                for parcel in parcels:
                    self.sent[parcel.kind] += parcel.tensor.nbytes
        self.received += received.numel() - receive_sizes[self.rank]
        found = []
        for whole, parts in zip(received.split(receive_sizes), expected, strict=True):
            pieces = whole.split([one.size_bytes for one in parts])
            # A piece may begin at an odd byte, where it cannot be seen as numbers.
            found.append([p.clone().view(one.dtype).view(one.shape) for p, one in zip(pieces, parts, strict=True)])
        return found

    def gather(self, what: str, kind: Kind, tensor: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Every process's tensor, in every process; `shapes` are theirs."""
        expected = [[Expected(shape, tensor.dtype)] for shape in shapes]
        return [found[0] for found in self.exchange(what, [[Parcel(kind, tensor)]] * self.count, expected)]

    def from_first(self, what: str, kind: Kind, tensor: Tensor) -> Tensor:
        """The first process's tensor in all of them; each gives one of that shape and dtype."""
        outgoing = [[Parcel(kind, tensor)] if self.rank == 0 else []] * self.count
        expected = [[Expected(tuple(tensor.shape), tensor.dtype)] if p == 0 else [] for p in range(self.count)]
        return self.exchange(what, outgoing, expected)[0][0]


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
