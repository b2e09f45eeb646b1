"""Where forward passes of a model run: decided once a command, from the user's options and an estimate of memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ..options import DeviceOptions, MemoryOptions
from .hardware import pick_device, pick_dtype
from .memory import Estimates, stream_weights
from .source import Checkpoint

if TYPE_CHECKING:
    from .weights import Weights


@dataclass(frozen=True)
class DevicePlan:
    """Device and dtype of forward passes, and whether weights are read layer by layer."""

    device: torch.device
    dtype: torch.dtype
    streamed: bool = False

    @classmethod
    def choose(cls, options: DeviceOptions, checkpoint_dtype: torch.dtype, averaged: bool = False) -> DevicePlan:
        """The device and dtype that the user named; weights stay in memory unless they are always to be read.

        Args:
            averaged: means over many tokens are computed; see `pick_dtype`.

        Raises:
            UsageError: the device is not there.
        """
        device = pick_device(options.device)
        streamed = isinstance(options, MemoryOptions) and options.offload == "always"
        return cls(device, pick_dtype(options.dtype, checkpoint_dtype, device, averaged), streamed)

    def within_memory(
        self, offload: str, estimates: Estimates, whole: tuple[str, str] | None = None
    ) -> tuple[DevicePlan, str]:
        """The same with weights in memory where they fit, and one line with the estimate; see `stream_weights`."""
        streamed, line = stream_weights(offload, estimates, self.device, whole)
        return replace(self, streamed=streamed), line

    def weights(self, checkpoint: Checkpoint) -> Weights:
        """Open a checkpoint's weights there."""
        from .loading import weights_of  # imports the models of transformers

        return weights_of(checkpoint, self.device, self.dtype, self.streamed)
