"""From a model folder to a run folder: tokens, capture, statistics, bases, layer by layer."""

from __future__ import annotations

import dataclasses
import hashlib
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from ..checkpoint.atomic import write_json, write_text
from ..checkpoint.file_names import RECIPE
from ..checkpoint.hashes import file_sha256
from ..checkpoint.locks import exclusive
from ..checkpoint.output_folder import OutputFolder
from ..checkpoint.projections import read_attention
from ..checkpoint.publishing import check_space, recover
from ..errors import DataError, system_errors
from ..logs import log_file
from ..models.device_plan import DevicePlan
from ..models.hardware import fit_threads
from ..models.hub import find_source
from ..models.layerwise import LayerwiseModel
from ..models.projections import context_tokens
from ..models.readiness import check_text, describe_text
from ..models.source import Checkpoint
from ..models.splits import digests
from ..models.tokenizer import chat_opening, text_start
from ..models.tokens import CalibrationTokens, calibration_tokens, ordinary_tokens, with_repeats
from ..models.weights import Weights
from ..options import with_fields_of
from ..progress import Advance, Progress, StageTimes
from ..recipe.requests import CalibrationRequest
from ..versions import versions
from .bases.information import LayerFisher
from .bases.layer import layer_bases
from .bases.moments import LayerStatistics
from .capture import layer_statistics
from .codes.layer import layer_codes
from .gradients import fisher_information, weight_information
from .partial import PartialRun
from .planning.form import wanted_gradients
from .planning.outline import ModelOutline, needs_whole_model, wanted_moments
from .pruning import prune_rows
from .run import (
    FISHER,
    INFO,
    Run,
    layer_path,
    read_bases,
    read_codes,
    write_bases,
    write_codes,
    write_distilled,
    write_fisher,
)

TOKENS = "tokens.safetensors"
"""Calibration tokens of an unfinished run, so that those that the model writes need not be written again."""


@system_errors()
def run_calibration(request: CalibrationRequest) -> Run:
    """Find the bases of a model's KV heads and write them to a run folder.

    The folder `OUT.partial` holds what is done until everything is. Statistics are float64 on any device.

    Raises:
        RotorError: see rotor.errors. A run with a finished layer is kept for --resume, unless its numbers are bad.
    """
    work = Calibration(request, request.progress or Progress())
    partial = work.partial
    with ExitStack() as held:
        held.enter_context(exclusive(work.out.path))
        recover(work.out)
        work.check_out()  # again: who held it may have written
        partial.check(request.resume, request.overwrite)
        check_space(partial.folder, 0 if partial.exists else work.disk_bytes)
        held.push(partial.ended)
        partial.open(request.resume)
        held.enter_context(log_file(partial.folder, "calibrate"))
        for line in (work.memory, describe_text(work.recipe, work.checkpoint.tokenizer)):
            work.progress.message(line)
        work.run()
    return Run.open(work.out.path)


calibrate = with_fields_of(CalibrationRequest, run_calibration, "calibrate")


class Calibration:
    """One calibration: its request, checked against the model before any work is done, and its stages.

    devices: where forward passes run. memory: the estimate in words. disk_bytes: of the unfinished run.

    Raises:
        RotorError: the request cannot be carried out.
    """

    def __init__(self, request: CalibrationRequest, progress: Progress) -> None:
        self.request, self.progress, self.times = request, progress, StageTimes()
        self.recipe, self.out = request.overridden_recipe, OutputFolder.at(request.out, "run")
        self.partial = PartialRun(self.out)
        self.source = find_source(request.model, request.revision)
        self.checkpoint = Checkpoint(self.source.folder)
        outline = ModelOutline.of(self.checkpoint)
        self.family, self.shape, self.form = outline.family, outline.shape, outline.form(self.recipe)
        devices = DevicePlan.choose(request, outline.dtype)
        self.check_out()
        check_text(self.recipe, self.checkpoint.config, self.checkpoint.tokenizer)  # refuses one that does not load
        fit_threads(self.checkpoint.total_bytes())
        estimates = outline.calibration(self.recipe, devices.device, devices.dtype, request.batch_tokens)
        whole = needs_whole_model(self.recipe)
        self.devices, self.memory = devices.within_memory(request.offload, estimates, whole)
        self.disk_bytes = estimates[self.devices.streamed].disk_bytes

    def check_out(self) -> None:
        """Raises UsageError where the run folder must not be written."""
        text = self.recipe.tokens.path
        self.out.check(self.request.overwrite, [self.source.folder], [] if text is None else [Path(text)])

    def run(self) -> None:
        hashes = self._check_model()
        with self.times.stage("tokens"):
            rows, about_tokens = self._sample()
        fingerprint = {
            "model": hashes,
            "recipe": self.recipe.to_dict(),
            "tokens": hashlib.sha256(rows.numpy().tobytes()).hexdigest(),
            "batch_tokens": self.request.batch_tokens,
            "threads": torch.get_num_threads(),
            "device": self.devices.device.type,
            "dtype": str(self.devices.dtype),
            "versions": versions(),
        }
        self.partial.agree(fingerprint)
        self._fisher(rows)
        self._gradients(rows)
        self._layers(rows)
        self._distil(rows)
        self._finish(hashes, about_tokens)

    @cached_property
    def weights(self) -> Weights:
        """The model, loaded when it is first needed: errors in tokens need not wait for it."""
        with self.times.stage("load model"), self.progress.task("load model", None, ""):
            return self.devices.weights(self.checkpoint)

    def _check_model(self) -> dict[str, dict[str, str]]:
        """SHA-256 of each shard and of the other files, having looked through all tensors."""
        shards, checkpoint = {}, self.checkpoint
        with self.times.stage("check model"):
            with self.progress.task("check model", checkpoint.total_bytes(), "B") as advance:
                for file in checkpoint.files:
                    shards[file] = file_sha256(checkpoint.folder / file)
                    for name in checkpoint.names_in(file):
                        checkpoint.tensor(name)  # raises on NaN or Inf
                    checkpoint.release()
                    advance((checkpoint.folder / file).stat().st_size)
            for layer in range(self.shape.num_layers):  # raises on other shapes
                read_attention(self.family, layer, checkpoint.names, checkpoint.unchecked_tensor, self.shape)
        return {"shards": shards, "files": checkpoint.other_hashes()}

    def _sample(self) -> tuple[Tensor, dict[str, Any]]:
        """Rows of calibration tokens, and what run.json says of them."""
        spec = self.recipe.tokens
        kept = self.partial.kept(TOKENS)
        if spec.source == "synthetic" and kept is not None:
            sample = CalibrationTokens(load_file(kept)["rows"])
        else:
            config, tokenizer, writes = self.checkpoint.config, self.checkpoint.tokenizer, spec.source == "synthetic"
            opening = chat_opening(self.checkpoint.folder, tokenizer) if writes else []
            weights, held_out = self.weights if writes else None, self.recipe.evaluation
            sample = calibration_tokens(spec, config, tokenizer, weights, self.progress, held_out, opening)
        rows, least = prune_rows(sample.rows, self.recipe.prune), self.form.group_size * self.shape.head_dim
        if rows.numel() < least:
            raise DataError(
                f"{rows.numel()} calibration tokens, fewer than the {least} dimensions of a group.",
                "Raise it with --set tokens.count=N; the papers use at least 8192.",
            )
        self.partial.keep(TOKENS, {"rows": sample.rows})
        return rows, {
            "source": spec.source,
            "count": rows.numel(),
            "rows": rows.shape[0],
            "seq_len": rows.shape[1],
            "pruned_rows": len(sample.rows) - len(rows),
            "documents_sha256": digests(sample.documents),
        }

    def _fisher(self, rows: Tensor) -> None:
        """Information of the projections' weights, for ranks.method fisher."""
        if "gradients" not in self.recipe.rank_needs or (self.partial.folder / FISHER).is_file():
            return
        count, model = self.recipe.ranks.fisher_tokens, self.weights.model
        with self.times.stage("gradients"):
            found = weight_information(model, self.family, self.shape, rows, count, self.progress)
            write_fisher(self.partial.folder, found)

    def _gradients(self, rows: Tensor) -> None:
        """Gradients by keys and values of every layer, kept until its bases and codes are computed.

        The last layer comes first: with the first one all are there.
        """
        partial = self.partial
        if not self.recipe.needs_gradients or partial.kept(_gradients_of(0)) is not None:
            return
        network = LayerwiseModel(self.weights, self.request.batch_tokens, partial.work)
        with self.times.stage("gradients"):
            rows = self._with_repeats(rows[: max(1, self.recipe.codes.tokens // rows.shape[1])], 0)
            wanted = [wanted_gradients(self.form.layer(layer)) for layer in range(self.shape.num_layers)]
            with self.progress.task("gradients", 3 * rows.numel() * self.shape.num_layers, "token layers") as advance:
                for layer, found in fisher_information(network, rows, self.form.group_size, wanted, advance=advance):
                    partial.keep(_gradients_of(layer), found.to_tensors())

    def _with_repeats(self, rows: Tensor, draw: int) -> Tensor:
        """The rows with spans stated again; each `draw` has others."""
        tokenizer, seed = self.checkpoint.tokenizer, self.recipe.tokens.seed ^ draw
        vocabulary = ordinary_tokens(self.checkpoint.config, tokenizer)
        return with_repeats(rows, self.recipe.codes.repeats, seed, vocabulary, len(text_start(tokenizer)))

    def _distil(self, rows: Tensor) -> None:
        """Train the bases and codes of all layers, where the recipe asks for it; they are written beside those."""
        spec, folder, layers = self.recipe.distil, self.partial.folder, range(self.shape.num_layers)
        if not spec.steps:
            return
        from .allocation.bits import BitsPath
        from .distil import DistilledModel

        bases = [
            read_bases(layer_path(folder, "bases", n), self.form.layer(n), self.shape, self.recipe.bases.refit)
            for n in layers
        ]
        codes = [read_codes(layer_path(folder, "codes", n), self.form.layer(n), self.shape) for n in layers]
        element_bytes = (self.checkpoint.config.dtype or torch.float32).itemsize
        context = context_tokens(self.checkpoint.config)
        path = BitsPath(codes, self.shape, self.recipe.codes.bits, element_bytes, context)
        network = LayerwiseModel(self.weights, self.request.batch_tokens, self.partial.work)
        model = DistilledModel(network, self.form, bases, codes, path)
        with self.times.stage("distil"):
            count = spec.steps * max(1, min(len(rows), spec.tokens // rows.shape[1])) * rows.shape[1]
            with self.progress.task("distil", count, "tokens") as advance:
                model.train(self._with_repeats(rows, 1), spec.steps, spec.tokens, self.recipe.tokens.seed, advance)
            for layer, trained in zip(layers, model.trained(), strict=True):
                write_distilled(folder, layer, *trained)

    def _layers(self, rows: Tensor) -> None:
        """Statistics and bases of every layer that has none yet."""
        start, layers = self.partial.finished_layers, self.shape.num_layers
        if start == layers:
            return
        network = LayerwiseModel(self.weights, self.request.batch_tokens)
        with self.times.stage("capture"):
            states = self.partial.states(start, (*rows.shape, self.shape.hidden_size), self.devices.dtype)
            if start == 0:
                network.embed(rows, states)
        with self.progress.task("calibrate", (layers - start) * rows.numel(), "token layers") as advance:
            for layer in range(start, layers):
                states = self._layer(network, layer, states, advance)

    def _layer(self, network: LayerwiseModel, layer: int, states: Tensor, advance: Advance) -> Tensor:
        """Put hidden states through a layer, and write what it yields; returns the states that leave it."""
        partial, prune = self.partial, self.recipe.prune
        wanted = wanted_moments(self.recipe, self.form.layer(layer))
        with self.times.stage("capture"):
            out = partial.states(layer + 1, tuple(states.shape), self.devices.dtype)
            moments = layer_statistics(network, layer, states, out, self.form.group_size, wanted, prune, advance)
        self._commit(layer, moments)
        return out

    def _commit(self, layer: int, moments: LayerStatistics) -> None:
        read = self.checkpoint.unchecked_tensor
        gradients = None
        with self.times.stage("bases"):
            moments.check_finite(f"layer {layer}")
            weights = read_attention(self.family, layer, self.checkpoint.names, read, self.shape)
            if self.recipe.needs_gradients:
                kept = self.partial.kept(_gradients_of(layer))
                assert kept is not None
                gradients = LayerFisher.from_tensors(load_file(kept), self.shape, self.form.group_size)
            methods = (self.recipe.bases.qk, self.recipe.bases.vo)
            bases = layer_bases(moments, weights, self.form.layer(layer), *methods, gradients, f"layer {layer}")
            if self.recipe.bases.refit:
                bases = dataclasses.replace(bases, outputs=moments.moment("output"))
        codes = None
        if gradients is not None:
            with self.times.stage("codes"):
                codes = layer_codes(bases, gradients)
        with self.times.stage("write"):
            write_bases(self.partial.folder, layer, bases)
            if codes is not None:
                write_codes(self.partial.folder, layer, codes)
            self.partial.commit(layer + 1)

    def _finish(self, hashes: dict[str, dict[str, str]], about_tokens: dict[str, Any]) -> None:
        """Describe the run, and give the folder its name."""
        folder, source, config = self.partial.folder, self.source, self.checkpoint.config
        info: dict[str, Any] = {
            "model": {
                "path": str(source.folder.resolve()),
                "name": source.name,
                "hub_id": source.hub_id,
                "revision": source.revision,
                "model_type": config.model_type,
                **hashes,
            },
            "form": self.form._asdict() | {"keys": [keys._asdict() for keys in self.form.keys]},
            "element_bytes": (config.dtype or torch.float32).itemsize,
            "shape": dataclasses.asdict(self.shape),
            "tokens": about_tokens,
            "device": str(self.devices.device),
            "dtype": str(self.devices.dtype).removeprefix("torch."),
            "versions": versions(),
            "stages": self.times.stages,
        }
        if self.recipe.needs_gradients:
            info["fisher_top_share"] = []
            for layer in range(self.shape.num_layers):
                with safe_open(self.partial.work / _gradients_of(layer), framework="pt") as file:
                    info["fisher_top_share"].append(float(file.get_tensor("top_share")))
        write_text(folder / RECIPE, self.recipe.to_yaml())
        write_json(folder / INFO, info)
        self.partial.publish()


def _gradients_of(layer: int) -> str:
    return f"gradients-{layer:04d}.safetensors"
