"""Choose the kernels of a loaded checkpoint: by its kernel_config.json, or by rule."""

from __future__ import annotations

from pathlib import Path

from ..checked import Reader
from ..errors import CheckpointError
from ..format.kernel_config import EDITED, KernelConfig
from ..format.layout import AttentionShape
from ..format.section import CompressedSection
from ..kernels.defaults import default_config


def kernels_of(section: CompressedSection, path: Path | None, shape: AttentionShape) -> KernelConfig:
    """Choose how the kernels run the model: what the file says, or the rule without a file.

    Args:
        path: of kernel_config.json, if there is one.
    Raises:
        CheckpointError: nonsense in the file, or it is of another model; names the field.
    """
    layouts = section.layouts(shape)
    if path is None:
        return default_config(layouts)
    config = KernelConfig.read(path)
    config.check(layouts, str(path))
    cache = getattr(section, "cache", None)
    if config.cache != cache:
        raise Reader(str(path), CheckpointError, EDITED).fail("cache", config.cache, f"what config.json has, {cache}")
    return config
