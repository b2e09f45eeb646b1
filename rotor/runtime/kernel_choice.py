"""Choose the kernels of a loaded checkpoint: by its kernel_config.json, or by rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..format.kernel_config import EDITED, KernelConfig
from ..format.layout import AttentionShape
from ..format.section import CompressedSection
from ..kernels.defaults import default_config
from ..typed import Reader


def kernels_of(section: CompressedSection, path: Path | None, shape: AttentionShape, profile: Any) -> KernelConfig:
    """Choose how the kernels run the model: what the file says, or the rule without a file.

    The file of an elastic checkpoint is of one of its profiles; the others are run by rule.

    Args:
        path: of kernel_config.json, if there is one.
        profile: the chosen one of an elastic checkpoint.
    Raises:
        CheckpointError: nonsense in the file, or it is of another model; names the field.
    """
    layouts = section.cut_layouts(shape, profile)
    if path is None:
        return default_config(layouts, shape)
    config = KernelConfig.read(path)
    others = getattr(section, "profiles", {})
    if not config.describes(layouts) and any(config.describes(section.cut_layouts(shape, name)) for name in others):
        return default_config(layouts, shape)
    config.check(layouts, str(path))
    cache = getattr(section, "cache", None)
    if config.cache != cache:
        raise Reader(str(path), CheckpointError, EDITED).fail("cache", config.cache, f"what config.json has, {cache}")
    return config
