"""From a model folder to a run folder: tokens, capture, statistics, bases, layer by layer."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import safetensors
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from ..bases.layer import LayerBases, layer_bases
from ..bases.moments import LayerStatistics
from ..codes.layer import layer_codes
from ..data.documents import Document
from ..data.readiness import told
from ..data.repeats import with_repeats
from ..data.rows import CalibrationTokens
from ..data.splits import calibration_share, digests
from ..data.tokens import calibration_tokens, ordinary_tokens
from ..errors import DataError, NumericsError, system_errors
from ..format.atomic import write_json, write_text
from ..format.file_names import RECIPE
from ..format.hashes import file_sha256
from ..format.locks import exclusive
from ..format.publishing import check_space, recover
from ..logs import log_file
from ..models.hardware import fit_threads
from ..models.layerwise import LayerwiseModel
from ..models.loading import weights_of
from ..models.projections import read_attention
from ..models.weights import Weights
from ..progress import Progress, StageTimes
from ..recipe import Recipe, text_overrides
from ..recipe.settings import CalibrationSettings, Compute
from .candidates import wanted_gradients
from .collect import layer_statistics
from .gradients import LayerFisher, fisher_information
from .job import CalibrationJob
from .partial import PartialRun
from .processes import Processes
from .pruning import check_clusters, prune_rows
from .run import FISHER, INFO, Run, candidate_info, write_bases, write_codes, write_fisher, write_statistics
from .weight_information import weight_information

TOKENS = "tokens.safetensors"
"""Calibration tokens of an unfinished run, so that those that the model writes need not be written again."""


def calibrate(
    model: str | Path,
    out: str | Path,
    recipe: str | Recipe = "rotor",
    overrides: Iterable[str] = (),
    *,
    text: str | Path | None = None,
    revision: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    batch_tokens: int = 2048,
    offload: str = "auto",
    device_map: str | None = None,
    overwrite: bool = False,
    resume: bool = False,
    progress: Progress | None = None,
) -> Run:
    """Find the bases of a model's KV heads and write them, with their statistics, to a run folder.

    The folder `OUT.partial` holds what is done until everything is (where OUT is a mount point, one inside).
    Processes started by torchrun share the tokens.

    Args:
        model: folder of a transformers checkpoint with safetensors weights, only read; or a hub id.
        out: the run folder to write; it appears when everything is done.
        recipe: name of a bundled recipe, path of one, or a Recipe.
        overrides: `section.field=value` for the recipe.
        text: a UTF-8 file, or a folder of them, to calibrate on and to measure accuracy on: its documents are dealt to
            three splits that share none, of which one is calibrated on, one searches and one reports.
        revision: branch, tag or commit of a hub repository; the commit that it is now is kept in run.json.
        device, dtype: where and in what the forward passes run; `auto` is the GPU if there is one, and float32 on a
            CPU. Statistics are float64 in any case.
        batch_tokens: tokens in one forward pass.
        offload: `always` reads one layer of weights at a time, `never` loads all, `auto` does what fits.
        device_map: as in transformers' from_pretrained, e.g. `auto`: spread the model over several GPUs.
        resume: go on with an unfinished run, whose result is then the same as that of an uninterrupted one.
    Raises:
        RotorError: see rotor.errors. A run with a finished layer is kept for --resume, unless its numbers are bad.
    """
    compute = Compute(device, dtype, offload, device_map)
    settings = CalibrationSettings(
        model, out, recipe, (*text_overrides(text), *overrides), revision, compute, batch_tokens, overwrite, resume
    )
    return run_calibration(settings, progress)


@system_errors()
def run_calibration(settings: CalibrationSettings, progress: Progress | None = None) -> Run:
    """Calibrate, with the arguments in one object; raises likewise."""
    processes, times = Processes.from_environment(), StageTimes()
    progress = progress if progress is not None and processes.is_first else Progress()
    with processes.together():
        job = CalibrationJob.check(settings, processes)
        streamed, line = job.streams()
    fit_threads(job.checkpoint.total_bytes())
    partial = PartialRun(job.out)
    streamed = processes.from_first(streamed)
    with ExitStack() as held:
        with processes.together():
            if processes.is_first:
                held.enter_context(exclusive(job.out.path, "calibrate"))
                recover(job.out)
                job.check_out()  # again: who held it may have written
                partial.check(settings.resume, settings.overwrite)
                check_space(partial.folder, 0 if partial.exists else job.estimates()[streamed].disk_bytes)
                partial.open(settings.resume)
                held.enter_context(log_file(partial.folder, "calibrate"))
                progress.message(line)
                progress.message(told(job.recipe, job.checkpoint.tokenizer))
                chosen = max(candidate.group_size for candidate in job.candidates.values())
                if job.recipe.groups.size == "auto" and chosen < job.shape.num_kv_heads:
                    progress.message(
                        f"groups: {chosen} of {job.shape.num_kv_heads} KV heads share a latent: more are predicted to "
                        f"make attention slower than uncompressed on {job.recipe.objective.device}; "
                        "--set groups.size=all takes fewer bytes"
                    )
                if job.recipe.groups.domain == "block" and job.shape.rotary_dim and job.outline.frequencies is None:
                    progress.message(
                        "keys: compressed after RoPE as a whole: its frequencies depend on the length of a sequence, "
                        "so that no part of a rotation can be left for later (groups.domain)"
                    )
                if job.recipe.groups.joint and not any(candidate.joint for candidate in job.candidates.values()):
                    progress.message(f"latents: keys and values keep one each: {_not_joint(job)} (groups.joint)")
        try:
            Calibration(job, partial, streamed, times, progress).run()
        except (NumericsError, DataError):
            if processes.is_first:
                partial.remove()
            raise
        except (Exception, KeyboardInterrupt):
            if processes.is_first and not partial.finished_layers and not settings.resume:
                partial.remove()
            raise
    return Run.open(job.out.path)


def _not_joint(job: CalibrationJob) -> str:
    """Why no candidate has joint latents, though the recipe asks for them where they can be."""
    if not job.recipe.joins_latents:
        return "the recipe has no codes in bases by fisher without refit"
    return "keys are compressed after RoPE"


class Calibration:
    """The stages of one calibration. Every process runs all stages; only the first one writes."""

    def __init__(
        self, job: CalibrationJob, partial: PartialRun, streamed: bool, times: StageTimes, progress: Progress
    ) -> None:
        self.job, self.partial, self.streamed, self.times, self.progress = job, partial, streamed, times, progress
        self.processes, self.recipe = job.processes, job.recipe
        self._weights: Weights | None = None

    def run(self) -> None:
        hashes = self._check_model()
        rows, about_tokens = self._tokens()
        fingerprint = {
            "model": hashes,
            "recipe": self.recipe.to_dict(),
            "tokens": hashlib.sha256(rows.numpy().tobytes()).hexdigest(),
            "batch_tokens": self.job.settings.batch_tokens,
            "processes": self.processes.count,
            "threads": torch.get_num_threads(),
            "device": self.job.device.type,
            "dtype": str(self.job.dtype),
            "versions": versions(),
        }
        with self.processes.together():
            if self.processes.is_first:
                self.partial.agree(fingerprint)
        self._fisher(rows)
        self._gradients(rows)
        self._layers(rows)
        with self.processes.together():
            if self.processes.is_first:
                self._finish(hashes, about_tokens)

    def weights(self) -> Weights:
        """The model, loaded when it is first needed: errors in tokens need not wait for it."""
        if self._weights is None:
            job = self.job
            with self.times.stage("load model"), self.progress.task("load model", None, ""):
                device_map = job.settings.compute.device_map
                self._weights = weights_of(job.checkpoint, job.device, job.dtype, self.streamed, device_map)
        return self._weights

    def _check_model(self) -> dict[str, dict[str, str]]:
        """SHA-256 of each shard and of the other files, having looked through all tensors."""
        shards: dict[str, str] = {}
        others: dict[str, str] = {}
        job, checkpoint = self.job, self.job.checkpoint
        with self.times.stage("check model"), self.processes.together():
            if self.processes.is_first:
                others = checkpoint.other_hashes()
                with self.progress.task("check model", checkpoint.total_bytes(), "B") as advance:
                    for file in checkpoint.files:
                        shards[file] = file_sha256(checkpoint.folder / file)
                        for name in checkpoint.names_in(file):
                            checkpoint.tensor(name)  # raises on NaN or Inf
                        checkpoint.release()
                        advance((checkpoint.folder / file).stat().st_size)
                for layer in range(job.shape.num_layers):  # raises on other shapes
                    read_attention(job.family, layer, checkpoint.names, checkpoint.unchecked_tensor, job.shape)
        return self.processes.from_first({"shards": shards, "files": others})

    def _tokens(self) -> tuple[Tensor, dict[str, Any]]:
        """Rows of calibration tokens, and what run.json says of them."""
        found: tuple[Tensor, dict[str, Any]] | None = None
        if self.recipe.tokens.source == "synthetic":
            with self.processes.together():
                self.weights()
        with self.times.stage("tokens"), self.processes.together():
            if self.processes.is_first:
                found = self._sample()
        return self.processes.from_first(found)

    def _sample(self) -> tuple[Tensor, dict[str, Any]]:
        job, spec = self.job, self.recipe.tokens
        kept = self.partial.kept(TOKENS)
        if spec.source == "synthetic" and kept is not None:
            stored = load_file(kept)["rows"]
            sample = CalibrationTokens(stored, (spec.source,) * len(stored))
        else:
            model = self.weights().model if spec.source == "synthetic" else None
            sample = calibration_tokens(
                spec, job.checkpoint.config, job.checkpoint.tokenizer, model, self.progress, self._not_held_out
            )
        pruned = prune_rows(sample, self.recipe.prune)
        tokens, least = pruned.rows, job.group_size * job.shape.head_dim
        if tokens.numel() < least:
            raise DataError(
                f"{tokens.numel()} calibration tokens, fewer than the {least} dimensions of a group.",
                "Raise it with --set tokens.count=N; the papers use at least 8192.",
            )
        check_clusters(self.recipe.prune, tokens.numel())
        self.partial.keep(TOKENS, {"rows": sample.rows})
        return tokens, {
            "source": spec.source,
            "count": tokens.numel(),
            "rows": tokens.shape[0],
            "seq_len": tokens.shape[1],
            "topics": pruned.topic_counts(),
            "pruned_rows": sample.rows.shape[0] - tokens.shape[0],
            "kmeans": self.recipe.prune.kmeans,
            "documents_sha256": digests(sample.documents),
        }

    def _not_held_out(self, documents: list[Document]) -> list[Document]:
        """Without the documents that search and report."""
        if self.recipe.evaluation.source != "text":
            return documents
        return calibration_share(documents, self.recipe.evaluation)

    def _fisher(self, rows: Tensor) -> None:
        if "gradients" not in self.recipe.rank_needs:
            return
        with self.times.stage("gradients"), self.processes.together():
            if self.processes.is_first and not (self.partial.folder / FISHER).is_file():
                job, count = self.job, self.recipe.ranks.fisher_tokens
                model = self.weights().model
                write_fisher(
                    self.partial.folder,
                    weight_information(model, job.family, job.shape, rows, count, self.progress),
                )

    def _gradients(self, rows: Tensor) -> None:
        """Gradients by keys and values of every layer, kept until its bases and codes are computed.

        The last layer comes first: with the first one all are there.
        """
        job, partial = self.job, self.partial
        if not self.recipe.needs_gradients or self.processes.from_first(partial.kept(_gradients_of(0)) is not None):
            return
        with self.times.stage("gradients"), self.processes.together():
            if self.processes.is_first:
                network = LayerwiseModel(self.weights(), job.settings.batch_tokens, partial.work)
                spec, seed = self.recipe.codes, self.recipe.tokens.seed
                wanted = wanted_gradients(job.candidates)
                vocabulary = ordinary_tokens(job.checkpoint.config, job.checkpoint.tokenizer)
                rows = with_repeats(rows[: max(1, spec.tokens // rows.shape[1])], spec.repeats, seed, vocabulary)
                with self.progress.task("gradients", 3 * rows.numel() * job.shape.num_layers, "token layers") as done:
                    for layer, found in fisher_information(network, rows, job.group_size, wanted, advance=done):
                        partial.keep(_gradients_of(layer), found.to_tensors())

    def _layers(self, rows: Tensor) -> None:
        """Statistics and bases of every layer that has none yet."""
        job, partial, processes = self.job, self.partial, self.processes
        start, layers = processes.from_first(partial.finished_layers), job.shape.num_layers
        if start == layers:
            return
        with processes.together():
            mine = processes.share(rows, max(1, job.settings.batch_tokens // rows.shape[1]))
            network = LayerwiseModel(self.weights(), job.settings.batch_tokens)
        size = (*mine.shape, job.shape.hidden_size)
        with processes.together():
            if start == 0:
                states = partial.states(start, processes.rank, size, job.dtype)
                with self.times.stage("capture"):
                    network.embed(mine, states)
            else:
                states = partial.kept_states(start, processes.rank, size, job.dtype)
        with self.progress.task("calibrate", (layers - start) * mine.numel(), "token layers") as advance:
            for layer in range(start, layers):
                with self.times.stage("capture"):
                    with processes.together():
                        out = partial.states(layer + 1, processes.rank, size, job.dtype)
                        moments = layer_statistics(
                            network, layer, states, out, job.group_size, job.wanted, self.recipe.prune, advance
                        )
                        if layer + 1 < layers:
                            partial.keep_states(layer + 1, processes.rank)
                    processes.add_up(moments)
                with processes.together():
                    if processes.is_first:
                        self._commit(layer, moments)
                partial.drop_states(layer, processes.rank)
                states = out

    def _commit(self, layer: int, moments: LayerStatistics) -> None:
        job, read = self.job, self.job.checkpoint.unchecked_tensor
        with self.times.stage("bases"):
            moments.check_finite(f"layer {layer}")
            weights = read_attention(job.family, layer, job.checkpoint.names, read, job.shape)
            methods, gradients = (self.recipe.bases.qk, self.recipe.bases.vo), self._layer_gradients(layer)
            bases: dict[str, LayerBases] = {
                key: layer_bases(moments, weights, job.shape, candidate, *methods, gradients, f"layer {layer}, {key}")
                for key, candidate in job.candidates.items()
            }
        codes = None
        if gradients is not None:
            with self.times.stage("codes"):
                codes = {key: layer_codes(found, gradients) for key, found in bases.items()}
        with self.times.stage("write"):
            write_statistics(self.partial.folder, layer, moments)
            write_bases(self.partial.folder, layer, bases)
            if codes is not None:
                write_codes(self.partial.folder, layer, codes)
            self.partial.commit(layer + 1)

    def _layer_gradients(self, layer: int) -> LayerFisher | None:
        if not self.recipe.needs_gradients:
            return None
        kept = self.partial.kept(_gradients_of(layer))
        assert kept is not None
        return LayerFisher.from_tensors(load_file(kept), self.job.shape, self.job.group_size)

    def _finish(self, hashes: dict[str, dict[str, str]], about_tokens: dict[str, Any]) -> None:
        """Describe the run, and give the folder its name."""
        job, folder = self.job, self.partial.folder
        source, config = job.source, job.checkpoint.config
        info = {
            "model": {
                "path": str(source.folder.resolve()),
                "name": source.name,
                "hub_id": source.hub_id,
                "revision": source.revision,
                "model_type": config.model_type,
                **hashes,
            },
            "candidates": {key: candidate_info(candidate) for key, candidate in job.candidates.items()},
            "element_bytes": (config.dtype or torch.float32).itemsize,
            "shape": dataclasses.asdict(job.shape),
            "tokens": about_tokens,
            "device": str(job.device),
            "dtype": str(job.dtype).removeprefix("torch."),
            "versions": versions(),
            "stages": self.times.stages,
        }
        write_text(folder / RECIPE, self.recipe.to_yaml())
        write_json(folder / INFO, info)
        self.partial.publish()


def _gradients_of(layer: int) -> str:
    return f"gradients-{layer:04d}.safetensors"


def versions() -> dict[str, str]:
    from .. import __version__

    return {
        "rotor": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "safetensors": safetensors.__version__,
    }
