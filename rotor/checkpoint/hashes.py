"""SHA-256 of files and tensors."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def tensor_sha256(tensor: Tensor) -> str:
    """Hash of the elements in row-major order, as the safetensors file stores them."""
    import torch  # heavy, and not needed for files

    return hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy().data).hexdigest()
