"""What a calibration is asked to do, checked against the model before any work is done."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .candidates import candidates, wanted_moments
from .checkpoint import Checkpoint
from .compress import pick_device, pick_dtype
from .errors import UsageError
from .estimate import Estimate, calibration_estimate, feed_forward_width
from .families import Family, attention_shape, find_family
from .hub import ModelSource
from .layout import AttentionShape, Domain
from .memory import Offload, stream_weights
from .placement import model_sizes
from .processes import Processes
from .recipe import Recipe
from .tokens import longest_row


@dataclass(frozen=True)
class Job:
    """A calibration, with everything that is known before any work.

    chosen: domain and group size of each candidate by key. wanted: names of the moments. group_size: the largest.
    """

    source: ModelSource
    checkpoint: Checkpoint
    family: Family
    shape: AttentionShape
    recipe: Recipe
    chosen: dict[str, tuple[Domain, int]]
    wanted: frozenset[str]
    group_size: int
    device: torch.device
    dtype: torch.dtype
    batch_tokens: int
    device_map: str | None
    processes: Processes

    @classmethod
    def check(
        cls,
        source: ModelSource,
        recipe: Recipe,
        device: str,
        dtype: str,
        batch_tokens: int,
        device_map: str | None,
        processes: Processes,
    ) -> Job:
        """Raises RotorError where the request cannot be carried out on this model."""
        checkpoint = Checkpoint(source.folder)
        family, shape = find_family(checkpoint.config), attention_shape(checkpoint.config)
        chosen = candidates(recipe, family, shape)
        if processes.count > 1 and recipe.prune.kmeans is not None:
            raise UsageError(
                f"prune.kmeans with {processes.count} processes: centroids of parts are not those of the whole.",
                "Run it in one process, or give --set prune.kmeans=null.",
            )
        if device_map is not None and processes.count > 1:
            raise UsageError(
                f"--device-map with {processes.count} processes: each of them would spread the model over the GPUs.",
                "Choose one of the two.",
            )
        target = pick_device(processes.device(device))
        return cls(
            source,
            checkpoint,
            family,
            shape,
            recipe,
            chosen,
            wanted_moments(recipe, chosen),
            max(size for _, size in chosen.values()),
            target,
            pick_dtype(dtype, checkpoint.config.dtype or torch.float32, target),
            batch_tokens,
            device_map,
            processes,
        )

    def streams(self, offload: Offload) -> tuple[bool, str]:
        """Whether weights are read layer by layer, and the estimate in words; raises UsageError if they cannot be."""
        whole, instead = None, ""
        if self.recipe.tokens.source == "synthetic":
            whole = "tokens.source synthetic (text that the model writes)"
            instead = "Choose other tokens: --set tokens.source=text --set tokens.path=FILE, or tokens.source=random."
        elif self.recipe.ranks.method == "fisher":
            whole = "ranks.method fisher (gradients)"
            instead = "Choose another method, e.g. --set ranks.method=global."
        elif self.device_map is not None:
            whole, instead = f"--device-map {self.device_map}", "Leave it out."
        return stream_weights(
            offload,
            self.estimate(False),
            self.estimate(True),
            self.device,
            self.processes.local_count,
            whole,
            instead,
        )

    def estimate(self, streamed: bool) -> Estimate:
        return calibration_estimate(
            model_sizes(self.checkpoint),
            self.shape,
            self.recipe,
            self.chosen,
            self.wanted,
            feed_forward=feed_forward_width(self.checkpoint.config),
            compute_bytes=self.dtype.itemsize,
            streamed=streamed,
            batch_tokens=self.batch_tokens,
            seq_len=longest_row(self.recipe.tokens.seq_len, self.checkpoint.config),
            on_gpu=self.device.type == "cuda",
        )
