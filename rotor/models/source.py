"""A model that is to be compressed: what it is, is looked at before its weights are opened, or fetched."""

from __future__ import annotations

from pathlib import Path

from ..errors import UnsupportedModelError
from ..format.json_files import read_json
from ..format.section import is_compressed
from ..runtime.families import find_family
from .checkpoint import config_of
from .hub import ModelSource, find_model

ORIGINAL = "Give the checkpoint that it was made from; its README.md usually names it as base_model"
DEQUANTISE = "; or load it with transformers in bfloat16 ({}), save_pretrained, and give that folder"
QUANTISED = {
    "awq": ("integers of AWQ", ""),
    "gptq": ("integers of GPTQ", ""),
    "fp8": ("numbers of 8 bits (FP8)", DEQUANTISE.format("quantization_config=FineGrainedFP8Config(dequantize=True)")),
    "bitsandbytes": ("quantised by bitsandbytes", DEQUANTISE.format("then model.dequantize()")),
}
"""What weights are by `quant_method`, and what else to do."""


def find_source(model: str | Path, revision: str | None = None, *, weights: bool = True) -> ModelSource:
    """The folder of a model that rotor can compress; one from the hub is fetched once that is known.

    Args: as for find_model.
    Raises:
        UnsupportedModelError: its family, or the form of its weights, is not supported. Otherwise as find_model.
    """
    source = find_model(model, revision, weights=False)
    if (source.folder / "config.json").is_file():  # without, what it is instead is said where it is opened
        _check(source.folder)
    return source if source.hub_id is None or not weights else find_model(model, source.revision)


def _check(folder: Path) -> None:
    config = read_json(folder / "config.json")
    section = config.get("quantization_config")
    if is_compressed(config):
        raise UnsupportedModelError(
            f"{folder}: `rotor export` wrote it: it is compressed already.",
            "Give the run or the model that it was made from (rotor.json names both), or use it as it is.",
        )
    if isinstance(section, dict):
        method = str(section.get("quant_method"))
        what, else_ = QUANTISED.get(method, (f"quantised ({method[:40]})", ""))
        raise UnsupportedModelError(f"{folder}: already quantised: its weights are {what}.", f"{ORIGINAL}{else_}.")
    find_family(config_of(folder))
