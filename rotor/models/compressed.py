"""Open a checkpoint that rotor wrote; each of its JSON files is read when it is first asked for.

What rewrites weights and what kernels are told is imported where it is asked for: source models have neither.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..checkpoint.families import attention_shape
from ..checkpoint.files import KERNEL_CONFIG, ROTOR_JSON
from ..checkpoint.layout import AttentionShape, LayerLayout
from ..checkpoint.schemas import CheckpointInfo, read_file
from ..checkpoint.section import CompressedSection, is_compressed
from ..errors import CheckpointError
from .source import Checkpoint

if TYPE_CHECKING:
    from ..checkpoint.kernel_config import KernelConfig
    from ..checkpoint.rewritten import RewrittenTensors

HINT = "Give a folder that `rotor export` wrote."


def read_report(folder: Path) -> CheckpointInfo:
    """Read the rotor.json of a folder; raises CheckpointError if it is missing or malformed."""
    copied = "What save_pretrained writes of a loaded model cannot be validated: copy the folder in its place."
    return read_file(folder / ROTOR_JSON, CheckpointInfo, f"{HINT} {copied}")


class CompressedCheckpoint(Checkpoint):
    """A folder that `rotor export` wrote, opened read-only; unreadable parts raise CheckpointError."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        if not is_compressed(self.config_dict):
            raise CheckpointError(f"{folder}: not a compressed checkpoint.", HINT)

    @cached_property
    def rewritten(self) -> RewrittenTensors | None:
        """Tensors rewritten from the source, for a checkpoint without weights; None if it has weights.

        Raises:
            MissingError: the source model is not available.
        """
        if self.section.source is None:
            return None
        from ..checkpoint.rewritten import BASES, open_rewritten

        return open_rewritten(self.folder / BASES, self.config, self.section)

    @property
    def file_of(self) -> dict[str, str]:
        return super().file_of if self.rewritten is None else self.rewritten.file_of

    def unchecked_tensor(self, name: str) -> Tensor:
        return super().unchecked_tensor(name) if self.rewritten is None else self.rewritten.tensor(name)

    def shape_of(self, name: str) -> list[int]:
        return super().shape_of(name) if self.rewritten is None else self.rewritten.shape_of(name)

    def bytes_of(self, file: str) -> int:
        """Bytes of a shard file, or of its tensors if the checkpoint has no weights."""
        if self.rewritten is None:
            return super().bytes_of(file)
        return self.dtype.itemsize * sum(torch.Size(self.shape_of(name)).numel() for name in self.names_in(file))

    def release(self) -> None:
        super().release()
        self.__dict__.pop("rewritten", None)  # is opened again when it is needed

    @cached_property
    def section(self) -> CompressedSection:
        """The `quantization_config` of config.json, checked field by field."""
        return CompressedSection(**self.config_dict["quantization_config"])

    @cached_property
    def shape(self) -> AttentionShape:
        """Sizes of the attention layers before compression."""
        return attention_shape(self.config)

    @cached_property
    def layouts(self) -> list[LayerLayout]:
        return self.section.layouts(self.shape)

    @cached_property
    def report(self) -> CheckpointInfo:
        return read_report(self.folder)

    @cached_property
    def kernel_config(self) -> KernelConfig:
        """kernel_config.json, checked against the layouts; without the file as the kernels go by rule."""
        from ..kernels.dispatch import config_of

        path = self.folder / KERNEL_CONFIG
        return config_of(path if path.exists() else None, self.layouts)

    @property
    def source_folder(self) -> Path:
        """Folder of the source model by rotor.json, which may be gone; of a folder without weights, where it is now."""
        if self.section.source is not None:
            from ..checkpoint.rewritten import find_source

            return find_source(self.section.source, self.folder)
        return self.folder.resolve() / self.report["source"]["path"]

    @property
    def run_folder(self) -> Path:
        """Folder of the run according to rotor.json; it may be gone."""
        return self.folder.resolve() / self.report["run"]


def open_model(folder: str | Path) -> Checkpoint:
    """Open a model's folder, as a CompressedCheckpoint if rotor wrote it; raises CheckpointError if unreadable."""
    checkpoint = Checkpoint(folder)
    return CompressedCheckpoint(folder) if is_compressed(checkpoint.config_dict) else checkpoint
