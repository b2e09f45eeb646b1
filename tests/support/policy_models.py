"""Models for the tests of cache policies: uncompressed, and compressed to rows of every kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rotor import calibrate, export
from support.runs import FAST_EVALUATION, SHORT_TEXT, calibrated

COMPRESSED = ("pre", "post", "codes")


class PolicyModels:
    """Checkpoints of rows of numbers before and after RoPE in two groups, and of codes; each is made once."""

    def __init__(self, tiny: Callable[[str], Path], factory: pytest.TempPathFactory) -> None:
        self.tiny, self.factory = tiny, factory
        self.built: dict[str, Path] = {}
        self.loaded: dict[str, Any] = {}

    def checkpoint(self, kind: str) -> Path:
        """The folder of `pre`, `post` or `codes`."""
        if kind not in self.built:
            folder = self.factory.mktemp(kind)
            domain = "post" if kind == "post" else "pre"
            if kind == "codes":
                more = ["codes.bits=[0,4,8,16]", "codes.tokens=512", "tokens.count=1024", "tokens.seq_len=64"]
                more += ["exact.first=0", "exact.newest=0"]  # no policy keeps tokens exactly
                overrides = [f"groups.domain={domain}", "groups.size=2", *more, *FAST_EVALUATION, *SHORT_TEXT]
                run = calibrate(self.tiny("llama"), folder / "run", "rotor", overrides)
            else:
                run = calibrated(self.tiny("llama"), folder / "run", domain, 2)
            export(run.folder, folder / "out", compression=0.4, measure=False)
            self.built[kind] = folder / "out"
        return self.built[kind]

    def model(self, kind: str) -> Any:
        """The model `plain`, of another family, or compressed."""
        if kind not in self.loaded:
            uncompressed = "llama" if kind == "plain" else kind
            folder = self.checkpoint(kind) if kind in COMPRESSED else self.tiny(uncompressed)
            self.loaded[kind] = AutoModelForCausalLM.from_pretrained(folder).eval()
        return self.loaded[kind]


def prompts(batch: int, length: int) -> Tensor:
    return torch.randint(1, 4096, (batch, length), generator=torch.Generator().manual_seed(3))


def left_padded(rows: Tensor, pads: list[int]) -> Tensor:
    mask = torch.ones_like(rows)
    for row, count in enumerate(pads):
        mask[row, :count] = 0
    return mask
