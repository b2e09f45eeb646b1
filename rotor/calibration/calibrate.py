"""Calibrate a model folder into a run folder: tokens, capture, statistics and bases, layer by layer."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections import Counter
from contextlib import ExitStack
from functools import cached_property

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from ..checked import JsonObject
from ..checkpoint.files import INFO, RECIPE, file_sha256, write_json, write_text
from ..checkpoint.locks import exclusive
from ..checkpoint.output_folder import OutputFolder
from ..checkpoint.projections import read_attention
from ..checkpoint.publishing import check_space, recover
from ..checkpoint.schemas import FORMAT_VERSION
from ..errors import DataError, system_errors
from ..logs import log_file
from ..models.hardware import DevicePlan, fit_threads
from ..models.hub import find_source
from ..models.layerwise import LayerwiseModel
from ..models.outline import ModelOutline, state_bytes
from ..models.readiness import check_text, describe_text
from ..models.sequences import context_tokens
from ..models.source import Checkpoint
from ..models.splits import digests
from ..models.tokenizer import chat_opening, text_start
from ..models.tokens import CalibrationTokens, WrittenText, calibration_tokens, ordinary_tokens, with_repeats
from ..models.weights import Weights
from ..options import with_fields_of
from ..progress import Advance, Progress, Stages, StageTimes
from ..recipe.requests import CalibrationRequest
from ..versions import versions
from .bases.layer import layer_bases
from .capture import layer_statistics
from .codes.layer import layer_codes
from .estimate import calibration_estimates, needs_whole_model, wanted_moments
from .form import length_warning, model_form, wanted_gradients
from .gradient_files import GradientFiles
from .gradients import fisher_information, weight_fisher
from .information import LayerFisher
from .moments import LayerStatistics
from .partial import BEGUN_TOKENS_FILE, TOKENS_FILE, PartialRun
from .pruning import prune_sequences
from .run import (
    WEIGHT_FISHER,
    Run,
    write_bases,
    write_codes,
    write_weight_fisher,
)

log = logging.getLogger("rotor")


@system_errors()
def run_calibration(request: CalibrationRequest) -> Run:
    """Find the bases of a model's KV heads and write them to a run folder.

    The folder `OUT.partial` holds the unfinished run. Statistics are always float64.

    Raises:
        RotorError: see rotor.errors. What took long is kept for --resume, unless its numbers are bad.
    """
    work = Calibration(request, request.progress or Progress())
    partial = work.partial
    with ExitStack() as held:
        held.enter_context(exclusive(work.out.path))
        recover(work.out)
        work.check_out()  # again, because the lock's previous holder may have written
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
    """One calibration: a request that is checked against the model before any work starts, and its stages.

    devices: where forward passes run.
    memory: the memory estimate as a line of text.
    disk_bytes: bytes of the unfinished run on disk.

    Raises:
        RotorError: the request cannot be carried out.
    """

    def __init__(self, request: CalibrationRequest, progress: Progress) -> None:
        self.request = request
        self.times = StageTimes()
        self.recipe = request.overridden_recipe
        self.progress: Progress = Stages(progress, self._stages())
        self.out = OutputFolder.at(request.out, "run")
        self.partial = PartialRun(self.out)
        self.source = find_source(request.model, request.revision)
        self.checkpoint = Checkpoint(self.source.folder)
        outline = ModelOutline.of(self.checkpoint)
        self.family = outline.family
        self.shape = outline.shape
        self.form = model_form(self.recipe, self.shape)
        devices = DevicePlan.choose(request, outline.dtype, averaged=True)
        self.check_out()
        check_text(self.recipe, self.checkpoint.config, self.checkpoint.tokenizer)  # refuses one that does not load
        fit_threads(self.checkpoint.total_bytes())
        sizes = self.recipe, devices.device, devices.dtype, request.batch_tokens
        estimates = calibration_estimates(outline, *sizes)
        whole = needs_whole_model(self.recipe)
        self.devices, self.memory = devices.within_memory(request.offload, estimates, whole)
        self.disk_bytes = estimates[self.devices.streamed].disk_bytes

    def check_out(self) -> None:
        """Raise UsageError if the run folder must not be written."""
        self.out.check(self.request.overwrite, [self.source.folder], list(self.recipe.tokens.paths))

    def _stages(self) -> list[str]:
        """Names of the tasks that take time, in order."""
        source = self.recipe.tokens.source
        before = {"synthetic": ["load model", "sample"], "dataset": ["read data set", "load model"]}
        weights = "gradients" in self.recipe.rank_needs or self.recipe.needs_gradients
        return ["check model", *before.get(source, ["load model"]), *(["gradients"] if weights else []), "calibrate"]

    def run(self) -> None:
        """Run all stages and publish the run folder; stages that an unfinished run has done are skipped."""
        hashes = self._check_model()
        if warning := length_warning(self.form, self.shape, self.recipe, context_tokens(self.checkpoint.config)):
            log.warning("%s", warning)
        begun_with = {
            "model": hashes,
            "recipe": self.recipe.to_dict(),
            "batch_tokens": self.request.batch_tokens,
            "threads": torch.get_num_threads(),
            "device": self.devices.device.type,
            "dtype": str(self.devices.dtype),
            "versions": versions(),
        }
        self.partial.agree(begun_with)
        with self.times.stage("tokens"):
            sequences, about_tokens = self._sample()
        self.partial.agree(begun_with | {"tokens": hashlib.sha256(sequences.numpy().tobytes()).hexdigest()})
        self._weight_fisher(sequences)
        self._gradients(sequences)
        self._layers(sequences)
        self._finish(hashes, about_tokens)

    @cached_property
    def weights(self) -> Weights:
        """The model's weights, loaded when they are first needed, so that errors in tokens show without waiting."""
        with self.times.stage("load model"), self.progress.task("load model", None, ""):
            return self.devices.weights(self.checkpoint)

    def _check_model(self) -> dict[str, dict[str, str]]:
        """Check the values and shapes of all tensors; returns the SHA-256 of each shard and of the other files."""
        shards = {}
        checkpoint = self.checkpoint
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

    def _sample(self) -> tuple[Tensor, JsonObject]:
        """Calibration sequences, and their description for run.json."""
        spec = self.recipe.tokens
        kept = self.partial.kept(TOKENS_FILE)
        if spec.source == "synthetic" and kept is not None:
            sample = CalibrationTokens(load_file(kept)["rows"])
        else:
            config, tokenizer = self.checkpoint.config, self.checkpoint.tokenizer
            writes = spec.source == "synthetic"
            opening = chat_opening(self.checkpoint.folder, tokenizer) if writes else []
            weights = self.weights if writes else None
            held_out = self.recipe.evaluation
            begun = self._begun_text() if writes else None
            sample = calibration_tokens(spec, config, tokenizer, weights, self.progress, held_out, opening, begun)
        if spec.source == "synthetic":
            self.partial.keep(TOKENS_FILE, {"rows": sample.sequences})
        sequences = prune_sequences(sample.sequences, self.recipe.prune, sample.topics)
        least = self.form.group_size * max(sizes.head_dim for sizes in self.shape.sizes)
        if sequences.numel() < least:
            raise DataError(
                f"{sequences.numel()} calibration tokens, fewer than the {least} dimensions of a group.",
                "Raise it with --set tokens.count=N; the papers use at least 8192.",
            )
        return sequences, {
            "source": spec.source,
            "count": sequences.numel(),
            "rows": sequences.shape[0],
            "seq_len": sequences.shape[1],
            "pruned_rows": len(sample.sequences) - len(sequences),
            "topics": len(set(sample.topics)),
            "documents_sha256": digests([unit.text for unit in sample.documents]),
            "documents": dict(Counter(f"{unit.kind}/{unit.name}" for unit in sample.documents)),
        }

    def _begun_text(self) -> WrittenText:
        """Text that the model wrote before the run was stopped; what it goes on to write is kept too."""
        kept = self.partial.kept(BEGUN_TOKENS_FILE)
        begun = {} if kept is None else load_file(kept)
        return WrittenText(
            begun.get("rows"),
            begun.get("generator"),
            lambda rows, state: self.partial.keep(BEGUN_TOKENS_FILE, {"rows": rows, "generator": state}),
        )

    def _weight_fisher(self, sequences: Tensor) -> None:
        """Compute the Fisher information of the projections' weights, for ranks.method fisher."""
        if "gradients" not in self.recipe.rank_needs or (self.partial.folder / WEIGHT_FISHER).is_file():
            return
        count, model = self.recipe.ranks.fisher_tokens, self.weights.model
        with self.times.stage("gradients"):
            information = weight_fisher(model, self.family, self.shape, sequences, count, self.progress)
            write_weight_fisher(self.partial.folder, information)

    def _gradients(self, sequences: Tensor) -> None:
        """Compute the gradients by keys and values of every layer, and keep them until bases and codes are computed.

        The last layer comes first, so all gradients are there when those of layer 0 are. A resumed run goes on at the
        batch that was kept last.
        """
        partial = self.partial
        if not self.recipe.needs_gradients or partial.kept(_gradients_of(0)) is not None:
            return
        network = LayerwiseModel(self.weights, self.request.batch_tokens, partial.work)
        with self.times.stage("gradients"):
            sequences = self._with_repeats(sequences[: max(1, self.recipe.codes.tokens // sequences.shape[1])], 0)
            wanted = [wanted_gradients(self.form.layer(layer)) for layer in range(self.shape.num_layers)]
            files = GradientFiles(partial.work)
            units = files.units_left(self.shape.num_layers) * sequences.numel()
            with self.progress.task("gradients", units, "token layers") as advance:
                layers = fisher_information(
                    network,
                    sequences,
                    self.form.group_size,
                    wanted,
                    advance=advance,
                    files=files,
                    exact=self.recipe.exact.tokens,
                )
                for layer, information in layers:
                    partial.keep(_gradients_of(layer), information.to_tensors())

    def _with_repeats(self, sequences: Tensor, draw: int) -> Tensor:
        """Sequences with repeated spans (see `with_repeats`); each `draw` repeats other spans."""
        tokenizer = self.checkpoint.tokenizer
        seed = self.recipe.tokens.seed ^ draw
        vocabulary = ordinary_tokens(self.checkpoint.config, tokenizer)
        return with_repeats(sequences, self.recipe.codes.repeats, seed, vocabulary, len(text_start(tokenizer)))

    def _layers(self, sequences: Tensor) -> None:
        """Compute statistics and bases of every layer that has none yet."""
        start, layers = self.partial.finished_layers, self.shape.num_layers
        if start == layers:
            return
        network = LayerwiseModel(self.weights, self.request.batch_tokens)
        with self.times.stage("capture"):
            states = self.partial.states(start, (*sequences.shape, self.shape.hidden_size), self.devices.dtype)
            if start == 0:
                network.embed(sequences, states)
        with self.progress.task("calibrate", (layers - start) * sequences.numel(), "token layers") as advance:
            for layer in range(start, layers):
                states = self._layer(network, layer, sequences, states, advance)

    def _layer(
        self, network: LayerwiseModel, layer: int, sequences: Tensor, states: Tensor, advance: Advance
    ) -> Tensor:
        """Put hidden states through a layer and write its bases and codes; returns the states that leave it."""
        partial, prune = self.partial, self.recipe.prune
        wanted = wanted_moments(self.recipe, self.form.layer(layer))
        with self.times.stage("capture"):
            out = partial.states(layer + 1, tuple(states.shape), self.devices.dtype)
            group_size = self.form.group_size
            moments = layer_statistics(network, layer, sequences, states, out, group_size, wanted, prune, advance)
        self._commit(layer, moments)
        return out

    def _commit(self, layer: int, moments: LayerStatistics) -> None:
        """Compute and write the bases and codes of a layer, and mark it as finished."""
        read = self.checkpoint.unchecked_tensor
        gradients = None
        with self.times.stage("bases"):
            moments.check_finite(f"layer {layer}")
            weights = read_attention(self.family, layer, self.checkpoint.names, read, self.shape)
            if self.recipe.needs_gradients:
                kept = self.partial.kept(_gradients_of(layer))
                assert kept is not None
                gradients = LayerFisher.from_tensors(load_file(kept), self.shape.layer(layer), self.form.group_size)
            methods = (self.recipe.bases.qk, self.recipe.bases.vo)
            bases = layer_bases(moments, weights, self.form.layer(layer), *methods, gradients, f"layer {layer}")
            if self.recipe.bases.refit:
                bases = dataclasses.replace(bases, outputs=moments.moment("output"))
        codes = None
        if gradients is not None:
            with self.times.stage("codes"):
                codes = layer_codes(bases, gradients, self.devices.device)
        with self.times.stage("write"):
            write_bases(self.partial.folder, layer, bases)
            if codes is not None:
                write_codes(self.partial.folder, layer, codes, self.form.layer(layer))
            self.partial.commit(layer + 1)

    def _finish(self, hashes: dict[str, dict[str, str]], about_tokens: JsonObject) -> None:
        """Write run.json and the recipe, and publish the folder."""
        folder = self.partial.folder
        source = self.source
        config = self.checkpoint.config
        info: JsonObject = {
            "model": {
                "path": str(source.folder.resolve()),
                "name": source.name,
                "hub_id": source.hub_id,
                "revision": source.revision,
                "model_type": config.model_type,
                "state_bytes": state_bytes(config),
                **hashes,
            },
            "form": self.form._asdict() | {"keys": [keys._asdict() for keys in self.form.keys]},
            "format_version": FORMAT_VERSION,
            "element_bytes": self.checkpoint.dtype.itemsize,
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
