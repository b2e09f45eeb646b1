"""Write the weights of a checkpoint that was exported without them."""

from __future__ import annotations

import logging
import os.path
import shutil
from pathlib import Path
from typing import cast

from ...calibration.run import Run
from ...checked import Reader
from ...checkpoint.families import family_of
from ...checkpoint.files import CARD, ROTOR_JSON, read_json, write_json, write_text
from ...checkpoint.locks import exclusive
from ...checkpoint.manifest import Manifest, write_manifest
from ...checkpoint.output_folder import OutputFolder
from ...checkpoint.publishing import staged_folder
from ...checkpoint.rewritten import BASES, find_source, source_at
from ...checkpoint.schemas import CheckpointInfo, TensorInfo
from ...errors import CheckpointError, RotorError, UsageError, system_errors
from ...models.compressed import CompressedCheckpoint, read_report
from ...models.source import Checkpoint
from ...options import with_fields_of
from ...progress import Progress
from ...recipe.reading import load_stored_recipe
from ...recipe.requests import MaterialisationRequest
from ..evaluation.accuracy import Accuracy
from ..report.report import NAME as REPORT
from ..report.report import write_with_checkpoint
from .export import write_shards
from .model_card import model_card

log = logging.getLogger("rotor")

GET_AGAIN = "Get the checkpoint again, with every file that `rotor export` wrote."


@system_errors()
def run_materialisation(request: MaterialisationRequest) -> str:
    """Write a checkpoint without weights with them: every file as `export` writes it.

    Returns:
        The digest of the folder: SHA-256 of its manifest.json.
    Raises:
        UsageError: the checkpoint has its weights. MissingError: the source is not to be had. CheckpointError: a file
            of it, or of the checkpoint, is not what it was.
    """
    folder, overwrite = Path(request.folder), request.overwrite
    progress = request.progress or Progress()
    place = OutputFolder.at(request.out, "checkpoint")
    place.check(overwrite, [folder])  # before anything is written there: the lock too
    with source_at(request.source), exclusive(place.path):
        checkpoint = CompressedCheckpoint(folder)
        if checkpoint.section.source is None or checkpoint.rewritten is None:
            raise UsageError(f"{folder}: has its weights.", "Copy the folder.")
        manifest = Manifest.read(folder, GET_AGAIN)
        for name, problem in manifest.problems().items():
            raise CheckpointError(f"{folder / name}: {problem}.", GET_AGAIN)
        model = Checkpoint(find_source(checkpoint.section.source, folder))
        sources = [folder, model.folder, checkpoint.run_folder]
        needed = int(model.total_bytes() * 1.1) + (1 << 20)
        with staged_folder(place, overwrite, sources, needed) as staging:
            for name in manifest.files:
                if name not in (BASES, "config.json", ROTOR_JSON, CARD):
                    (staging / name).parent.mkdir(exist_ok=True)
                    shutil.copyfile(folder / name, staging / name)
            tensors = write_shards(staging, model, checkpoint.rewritten, lambda file: None, progress)
            write_json(staging / "config.json", _config(checkpoint, model))
            _describe(staging, place.path, checkpoint, model, tensors)
            return write_manifest(staging, "checkpoint")


materialise = with_fields_of(MaterialisationRequest, run_materialisation, "materialise")


def _config(checkpoint: CompressedCheckpoint, model: Checkpoint) -> dict[str, object]:
    """The config.json of a checkpoint with weights."""
    config = dict(checkpoint.config_dict)
    config["quantization_config"] = {k: v for k, v in config["quantization_config"].items() if k != "source"}
    if not {"dtype", "torch_dtype"} & model.config_dict.keys():
        config.pop("dtype", None)
    return config


def _describe(
    staging: Path, out: Path, checkpoint: CompressedCheckpoint, model: Checkpoint, tensors: dict[str, TensorInfo]
) -> None:
    """rotor.json, README.md and report.html, with paths from where the folder will be."""
    report = cast(CheckpointInfo, read_json(checkpoint.folder / ROTOR_JSON))
    differing = sum(report["tensors"].get(name) != entry for name, entry in tensors.items())
    if differing:
        log.warning(
            "%d of %d tensors differ from those of the export in their last bits: this machine sums in another order.",
            differing,
            len(tensors),
        )
    place = out.resolve()
    report["run"] = os.path.relpath(checkpoint.run_folder.resolve(), place)
    report["source"]["path"] = os.path.relpath(model.folder.resolve(), place)
    report["tensors"] = dict(sorted(tensors.items()))
    write_json(staging / ROTOR_JSON, report)
    recipe = load_stored_recipe(staging)
    accuracy = Accuracy.read(
        checkpoint.report["accuracy"], Reader(str(checkpoint.folder / ROTOR_JSON), CheckpointError)
    )
    write_text(staging / CARD, model_card(report, accuracy, recipe, family_of(checkpoint.config), checkpoint.shape))
    try:
        run = Run.open(checkpoint.run_folder)
    except RotorError as error:
        log.info("%s stays that of %s: %s", REPORT, checkpoint.folder, error.message)
    else:
        write_with_checkpoint(staging, out, read_report(staging), recipe, run)
