"""Facts about a model: its attention, its cache, the form that a recipe gives it, and the resources that this takes.

Only the configuration and the headers of the shards are read, never weights. Without shards, and for models on the hub,
the configuration says what they would hold.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ..calibration.estimate import calibration_estimates, calibration_flops, needs_whole_model
from ..calibration.form import block_warning, length_warning, model_form
from ..calibration.prediction.cost import DecodeStep
from ..calibration.prediction.decode_times import COMPARED_COMPRESSION, DecodeTime, decode_times, slower
from ..calibration.prediction.devices import find_device
from ..checked import JsonObject
from ..checkpoint.layout import AttentionShape
from ..checkpoint.sizes import (
    CacheSize,
    uncompressed_kv_bytes_of_sequence,
    uncompressed_kv_bytes_per_token,
    uncompressed_row_bytes,
)
from ..errors import MissingError
from ..models.hardware import DevicePlan, matmul_rate
from ..models.hub import find_source
from ..models.memory import Estimate, available_device_bytes, available_host_bytes, stream_weights, usable_host_bytes
from ..models.outline import ModelOutline, state_bytes
from ..models.sequences import bounded_seq_len, context_tokens
from ..models.source import Checkpoint, config_of
from ..models.tokenizer import load_tokenizer, text_start
from ..options import with_fields_of
from ..recipe.reading import override, quick_overrides
from ..recipe.recipe import Recipe
from ..recipe.requests import InspectionRequest
from ..recipe.sections import ObjectiveSettings
from ..search.evaluation.estimate import evaluation_estimates, evaluation_flops

WEIGHT_FILES = re.compile(r"\.(safetensors(\.index\.json)?|bin|pt|pth|ckpt|pkl|gguf)$|adapter_config\.json$")
"""Names of weight files in any format. In a folder without one, config.json alone describes the model."""

CONTEXTS = (8192, 32768, 131072)
"""Sequence lengths in tokens for which the size of the cache is shown, where the model has them."""

REMOVED = (0.81, 0.90)
"""Shares of the rows' bytes that the recipe `rotor` removed of real models at 0.99, the least and the most
(docs/large-models.md); what it removes of others is not predicted."""

COMMANDS = ("calibrate", "export")

SERVER = "h100-sxm"
"""Device whose time is shown beside this machine's."""

SHARE_OF_PEAK = 0.4
"""Share of a data sheet's peak that large matrix products reach, an assumption."""


@dataclass(frozen=True)
class ResourceEstimate:
    """Memory and disk of a command in bytes, and the seconds of its matrix products alone.

    streamed: whether one layer of weights is in memory at a time.
    host_bytes, device_bytes: memory by purpose.
    disk_bytes: size of the output folder while it is written, of which kept_disk_bytes stay.
    product_seconds: seconds by stage.
    available_host_bytes: memory that the process may take, of which usable_host_bytes may be filled with weights.
    """

    streamed: bool
    host_bytes: dict[str, int]
    device_bytes: dict[str, int]
    disk_bytes: int
    kept_disk_bytes: int
    product_seconds: dict[str, float]
    available_host_bytes: int
    usable_host_bytes: int
    free_disk_bytes: int

    @classmethod
    def of(
        cls, estimate: Estimate, streamed: bool, disk: int, kept: int, seconds: dict[str, float]
    ) -> ResourceEstimate:
        there = available_host_bytes(), usable_host_bytes(), shutil.disk_usage(Path.cwd()).free
        return cls(streamed, estimate.host, estimate.device, disk, kept, seconds, *there)


@dataclass(frozen=True)
class Inspection:
    """Results of `rotor inspect`.

    kv_cache_bytes: bytes of one sequence, by its tokens.
    state_bytes: of one sequence beside the cache, see rotor.models.outline.
    context_tokens: length of the sequence whose bytes an export counts.
    row_start: beginning of every text sequence, as text; None without a tokenizer.
    bits: bits that a channel may have.
    form: form of the layers, in words. warning: what is wrong with it, or nothing.
    objective, instructions_per_cycle: device and load that decode_times are predicted for.
    slower: the form of the recipe, where it is predicted to be slower than no compression at COMPARED_COMPRESSION, and
        one that is not.
    calibrate, export, validate: resources that the commands take on this machine; `export` with --accuracy, whose
        search measures the usual number of points, see recipe.Search.points.
    after: bytes of a sequence's cache, exact tokens among them, where the most and the least of REMOVED are removed, by
        its tokens; empty for recipes without codes. smaller_from: tokens from which on such a cache is smaller, see
        `CacheSize.smaller_from`.
    quick_seconds, server_seconds: seconds of the matrix products of calibrate and export with --quick on this machine,
        and as given on SERVER at SHARE_OF_PEAK, by command.
    """

    name: str
    revision: str | None
    model_type: str
    dtype: str
    weight_bytes: int
    parameters: int
    shape: AttentionShape
    kv_bytes_per_token: int
    kv_cache_bytes: dict[int, int]
    state_bytes: int
    context_tokens: int
    row_start: str | None
    recipe: str
    bits: tuple[int, ...]
    tokens: JsonObject
    form: str
    warning: str
    objective: ObjectiveSettings
    instructions_per_cycle: float
    decode_times: list[DecodeTime]
    slower: tuple[DecodeTime, DecodeTime | None] | None
    calibrate: ResourceEstimate
    export: ResourceEstimate
    validate: ResourceEstimate
    available_device_bytes: int | None
    after: dict[int, list[int]]
    smaller_from: list[int | None]
    quick_seconds: dict[str, float]
    server_seconds: dict[str, float]

    def to_dict(self) -> JsonObject:
        return asdict(self)


def run_inspection(request: InspectionRequest) -> Inspection:
    """Inspect a model without reading its weights; from the hub only its configuration is fetched.

    Raises:
        UsageError: the context has more tokens than the model has positions.
        UnsupportedModelError: rotor cannot compress the model.
        RotorError: see rotor.errors.
    """
    model = request.model
    if Path(model).is_file():
        if Path(model).name != "config.json":
            raise MissingError(f"{model}: is a file.", "Give a model's folder, its config.json, or a hub id.")
        model = Path(model).parent
    spec = request.overridden_recipe
    source = find_source(model, request.revision, weights=False)
    if source.hub_id is None and any(WEIGHT_FILES.search(path.name) for path in source.folder.iterdir()):
        outline = ModelOutline.of(Checkpoint(source.folder))
    else:
        config = config_of(source.folder)
        from ..models.loading import config_model  # imports the models of transformers

        implied = config_model(config)
        shapes = {name: list(parameter.shape) for name, parameter in implied.named_parameters()}
        elements = sum(parameter.numel() for parameter in implied.parameters())
        dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
        outline = ModelOutline.of_headers(config, shapes, elements * dtype.itemsize, dtype)
    shape, stored = outline.shape, outline.stored_bytes
    tokenizer = load_tokenizer(source.folder, outline.text_config.vocab_size)
    devices = DevicePlan.choose(request, outline.dtype)
    target, compute_dtype = devices.device, devices.dtype
    calibrating_dtype = DevicePlan.choose(request, outline.dtype, averaged=True).dtype
    element_bytes = outline.dtype.itemsize
    per_token = uncompressed_kv_bytes_per_token(shape, element_bytes)
    served = context_tokens(outline.config, request.context)
    form = model_form(spec, shape)
    load = spec.objective
    device_rates = find_device(load.device)
    step = DecodeStep(load.context_tokens, load.batch_size, outline.dtype.itemsize)
    times = decode_times(shape, device_rates, step, form.distinct)
    calibrating = calibration_estimates(outline, spec, target, calibrating_dtype, request.batch_tokens)
    streamed, _ = stream_weights("never" if needs_whole_model(spec) else "auto", calibrating, target)
    taken = calibrating[streamed]
    rate = matmul_rate(target, compute_dtype)
    calibrating_rate = rate if calibrating_dtype == compute_dtype else matmul_rate(target, calibrating_dtype)
    rates = {"statistics": matmul_rate(torch.device("cpu"), torch.float64)}

    def seconds_of(recipe: Recipe) -> tuple[dict[str, float], dict[str, float]]:
        """Seconds of calibrate and of export, by stage."""
        flops = calibration_flops(outline, recipe).items()
        calibrate = {name: round(count / rates.get(name, calibrating_rate), 1) for name, count in flops}
        return calibrate, {name: round(count / rate, 1) for name, count in evaluation_flops(outline, recipe).items()}

    seconds, measured = seconds_of(spec)
    quick = seconds_of(override(spec, quick_overrides(spec)))
    commands = calibration_flops(outline, spec), evaluation_flops(outline, spec)
    peak = find_device(SERVER).matmul_flops_per_s
    assert peak is not None
    sizes_after = _sizes_after(shape, element_bytes, spec)
    sizes = {n: uncompressed_kv_bytes_of_sequence(shape, element_bytes, n) for n in _contexts(outline, served)}
    validated = {name: seconds for name, seconds in measured.items() if name == "report"}
    measuring = evaluation_estimates(outline, spec, target, compute_dtype)
    grown = int(stored * 1.1)
    layerwise, _ = stream_weights("auto", measuring, target)
    return Inspection(
        name=source.name,
        revision=source.revision,
        model_type=outline.config.model_type,
        dtype=str(outline.dtype).removeprefix("torch."),
        weight_bytes=stored,
        parameters=outline.parameters,
        shape=shape,
        kv_bytes_per_token=per_token,
        kv_cache_bytes=sizes,
        state_bytes=state_bytes(outline.config),
        context_tokens=served,
        row_start=None if tokenizer is None else tokenizer.decode(text_start(tokenizer)),
        recipe=spec.name,
        bits=spec.codes.bits,
        tokens={"source": spec.tokens.source, "count": spec.tokens.count},
        form=form.in_words(shape),
        warning=block_warning(form, spec.exact.tokens) or length_warning(form, shape, spec, served),
        objective=load,
        instructions_per_cycle=device_rates.instructions_per_cycle,
        decode_times=times,
        slower=slower(times, f"{COMPARED_COMPRESSION:g}"),
        calibrate=ResourceEstimate.of(taken, streamed, taken.disk_bytes, taken.kept_disk_bytes, seconds),
        export=ResourceEstimate.of(measuring[layerwise], layerwise, grown, grown, measured),
        validate=ResourceEstimate.of(measuring[layerwise], layerwise, 0, 0, validated),
        available_device_bytes=available_device_bytes(target),
        after={n: [size.of_sequence(n)["after"] for size in sizes_after] for n in sizes if sizes_after},
        smaller_from=[size.smaller_from(served) for size in sizes_after],
        quick_seconds=dict(zip(COMMANDS, (round(sum(one.values()), 1) for one in quick), strict=True)),
        server_seconds=dict(
            zip(COMMANDS, (round(sum(one.values()) / (SHARE_OF_PEAK * peak), 1) for one in commands), strict=True)
        ),
    )


def _contexts(outline: ModelOutline, served: int) -> list[int]:
    """Lengths that are shown: what is served, and those of CONTEXTS that the model has positions for."""
    return sorted({served, *(n for n in CONTEXTS if bounded_seq_len(n, outline.config) == n)})


def _sizes_after(shape: AttentionShape, element_bytes: int, recipe: Recipe) -> list[CacheSize]:
    """Sizes of a cache where the most and the least of REMOVED are removed of its rows; empty for recipes without
    codes."""
    before, exact = uncompressed_row_bytes(shape, element_bytes), [recipe.exact.tokens] * shape.num_layers
    rows = [[(1 - removed) * row for row in before] for removed in reversed(REMOVED) if recipe.coded]
    return [CacheSize.of_rows(row_bytes, shape, element_bytes, exact) for row_bytes in rows]


inspect = with_fields_of(InspectionRequest, run_inspection, "inspect")
