"""A model that is to be compressed: what it is, is looked at before its weights are opened, or fetched."""

from __future__ import annotations

from pathlib import Path

from ..errors import UnsupportedModelError
from ..format.json_files import read_json
from ..format.section import is_compressed
from ..runtime.families import find_family
from .checkpoint import config_of
from .hub import ModelSource, find_model

DEQUANTISE = "or load it with transformers in bfloat16, model.dequantize(), save_pretrained, and give that folder."


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
    if is_compressed(config):
        raise UnsupportedModelError(
            f"{folder}: `rotor export` wrote it: it is compressed already.",
            "Give the run or the model that it was made from (rotor.json names both), or use it as it is.",
        )
    if isinstance(section := config.get("quantization_config"), dict):
        raise UnsupportedModelError(
            f"{folder}: already quantised ({str(section.get('quant_method'))[:40]}).",
            f"Give the checkpoint that it was made from (README.md names it as base_model), {DEQUANTISE}",
        )
    find_family(config_of(folder))
