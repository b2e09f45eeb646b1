"""Exchange between processes: one collective on bytes, which counts them and says in errors who waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import RotorError

Kind = Literal["rows", "heads", "partial", "agreement", "hidden"]
"""Kinds of messages: rows of the cache; queries, latents and outputs of some heads; outputs and log-sum-exps over part
of the keys; inputs that processes compare before a pass; hidden states of a few tokens."""

Shape = tuple[int, ...]


class Wire:
    """The processes of a group, as one of them has them.

    sent: bytes sent to other processes so far, by kind.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank: int = dist.get_rank(group)
        self.count: int = dist.get_world_size(group)
        self.sent: Counter[Kind] = Counter()

    def gather(
        self, what: str, kind: Kind, tensors: Sequence[Tensor], shapes: Sequence[Sequence[Shape]]
    ) -> list[list[Tensor]]:
        """Exchange tensors of one dtype, so that every process has those of all.

        Args:
            what: names the exchange in errors. shapes: of the tensors that each process sends.
        Returns:
            By process, tensors of these shapes.
        Raises:
            RotorError: another process ended, or did not answer within the group's timeout.
        """
        return self.exchange(what, kind, [tensors] * self.count, shapes)

    def exchange(
        self, what: str, kind: Kind, tensors: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[Shape]]
    ) -> list[list[Tensor]]:
        """Exchange tensors of one dtype, other ones with each process.

        Args:
            tensors: to each process. shapes: of the tensors that each process sends to this one.
        Returns:
            By process, tensors of these shapes.
        Raises:
            RotorError: see `gather`.
        """
        dtype = tensors[0][0].dtype
        parts_sent = [torch.cat([tensor.contiguous().flatten().view(torch.uint8) for tensor in of]) for of in tensors]
        sizes = [dtype.itemsize * sum(map(prod, process)) for process in shapes]
        received = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        counts = [len(part) for part in parts_sent]
        try:
            dist.all_to_all_single(received, torch.cat(parts_sent), sizes, counts, group=self.group)
        except RuntimeError as error:
            raise RotorError(
                f"process {self.rank} of {self.count}, {what}: another process ended or did not answer in time "
                f"({' '.join(str(error).split())[:200]}).",
                "The error of the process that ended first says why; all processes have to be started again.",
            ) from error
        self.sent[kind] += sum(counts) - counts[self.rank]
        parts = iter(received.view(dtype).split([prod(shape) for process in shapes for shape in process]))
        return [[next(parts).view(shape) for shape in process] for process in shapes]
