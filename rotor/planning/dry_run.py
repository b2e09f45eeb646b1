"""Plans of what calibrate and export would do and take, made without writing anything or reading weights.

Ranks and sizes come from the same code that writes them, on the meta device.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from ..allocation.plan import RankPlan
from ..bases.layer import LayerBases
from ..calibration.job import CalibrationJob
from ..calibration.outline import ModelOutline
from ..calibration.partial import PartialRun
from ..evaluation.placement import Placement
from ..format.layout import kv_bytes_per_token, uncompressed_kv_bytes_per_token
from ..format.publishing import check_space
from ..models.memory import Estimate
from ..progress import Progress, StageTimes
from ..recipe.settings import CalibrationSettings, ExportSettings
from ..rewriting.rewrite import folded_bases, planned_layouts, rewritten_tensors
from ..search.export_job import ExportJob
from ..search.point import channels_json
from ..search.rank_search import RankSearch
from ..search.search import most_points
from .needs import Needs


@dataclass(frozen=True)
class CalibrationPlan:
    """What a calibration would do; finished_layers are of an unfinished run that would be continued."""

    model: str
    run: str
    recipe: str
    form: str
    tokens: dict[str, Any]
    num_layers: int
    finished_layers: int
    device: str
    dtype: str
    needs: Needs

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class ExportPlan:
    """What an export would do.

    ranks to tensors: None where they depend on what has to be measured first. ranks: [key rank, value rank] by layer
        and group; channels: where they are codes, those by bits. tensors: bytes of each that changes.
    probed_layers: to probe first. points: about how many would be measured; known_points: are in the table.
    unmeasured: why accuracy is not measured, or nothing.
    """

    run: str
    out: str
    recipe: str
    goal: dict[str, float]
    ranks: list[list[list[int]]] | None
    channels: list[list[list[dict[str, int]]]] | None
    compression: float | None
    kv_bytes_per_token: dict[str, int | None]
    tensors: dict[str, dict[str, int]] | None
    checkpoint_bytes: dict[str, int | None]
    probed_layers: int
    points: int
    known_points: int
    unmeasured: str
    needs: Needs

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def plan_calibration(settings: CalibrationSettings) -> CalibrationPlan:
    """What a calibration would do.

    Raises:
        RotorError: as calibrate would at its start. UsageError: the weights of a hub id are not in the hub's cache.
    """
    job = CalibrationJob.check(settings, fetch=False)
    out, partial, resume = job.out.path, PartialRun(job.out), settings.resume
    partial.check(resume, settings.overwrite)
    streamed, _ = job.streams()
    estimate, spec = job.estimates()[streamed], job.recipe
    check_space(partial.folder, 0 if partial.exists else estimate.disk_bytes)
    finished = partial.finished_layers if resume else 0
    return CalibrationPlan(
        model=job.source.name,
        run=str(out),
        recipe=spec.name,
        form=job.form.in_words(job.shape),
        tokens={"source": spec.tokens.source, "count": spec.tokens.count, "seq_len": spec.tokens.seq_len},
        num_layers=job.shape.num_layers,
        finished_layers=finished,
        device=str(job.device),
        dtype=str(job.dtype).removeprefix("torch."),
        needs=Needs.of_calibration(
            job.outline, spec, job.device, job.dtype, estimate, streamed, out, 1 - finished / job.shape.num_layers
        ),
    )


def plan_export(settings: ExportSettings) -> ExportPlan:
    """What an export would do: its ranks and sizes, or how much has to be measured for them.

    Raises:
        RotorError: as export would before it measures anything.
    """
    job, silent = ExportJob.check(settings), Progress()
    search = RankSearch(job, StageTimes(), silent)
    shape, element_bytes = job.run.shape, int(job.run.info["element_bytes"])
    found = search.known()
    tensors, after, cache = (None, None, None) if found is None else _sizes(job, search, found, element_bytes)
    points, probed = _to_measure(search, found)
    place = Placement.choose(job.checkpoint, job.recipe, settings.compute, silent)
    estimate = Estimate({}, {})  # where nothing runs: the shards are rewritten one by one
    if points or probed:
        estimate = ModelOutline.of(job.checkpoint).evaluation(job.recipe, place.device, place.dtype)[place.streamed]
    return ExportPlan(
        run=str(job.run.folder),
        out=str(job.out.path),
        recipe=job.recipe.name,
        goal={name: value for name, value in asdict(job.goal).items() if value is not None},
        ranks=None if found is None else [[list(pair) for pair in layer] for layer in found.rounded],
        channels=None if found is None or found.channels is None else channels_json(found.channels),
        compression=None if found is None else found.stored,
        kv_bytes_per_token={"before": uncompressed_kv_bytes_per_token(shape, element_bytes), "after": cache},
        tensors=tensors,
        checkpoint_bytes={"before": _stored_bytes(job), "after": after},
        probed_layers=probed,
        points=points,
        known_points=0 if job.unmeasured else len(search.table.points),
        unmeasured=job.unmeasured,
        needs=Needs.of(estimate, place.streamed, job.out.path, job.needed_bytes, after or job.needed_bytes, {}),
    )


def _to_measure(search: RankSearch, found: RankPlan | None) -> tuple[int, int]:
    """About how many points, and how many layers, would be measured."""
    job = search.job
    probed = job.run.shape.num_layers - len(search.probes.sensitivities) if search.needs_probes else 0
    if job.unmeasured:
        return 0, probed
    if found is not None:
        point = search.table.find(found)
        measured = point is not None and point.has("search") and point.has("report")
        return int(not measured), probed
    if job.goal.accuracy is None:
        return 1, probed
    about, path = most_points(job.recipe.search.resolution), None if search.needs_probes else search.path
    return (about if path is None else min(about, len(path.steps()))), probed


def _sizes(
    job: ExportJob, search: RankSearch, plan: RankPlan, element_bytes: int
) -> tuple[dict[str, dict[str, int]], int, int]:
    """Bytes of each tensor that changes, of all tensors together, and of the cache per token."""
    checkpoint = job.checkpoint
    chosen = job.run.bases(plan.channels)
    planned = planned_layouts(chosen, plan.rounded)

    def plain(layer: int) -> LayerBases:
        return replace(chosen[layer], outputs=None)  # these are for the refit of W_o, which changes no shape

    after = dict(rewritten_tensors(checkpoint, job.run.shape, plain, planned, checkpoint.meta_tensor).items())
    before = {name: checkpoint.meta_tensor(name) for name in checkpoint.names}
    changed = {
        name: {"before": _bytes(before.get(name)), "after": _bytes(after.get(name))}
        for name in sorted({*before, *after})
        if name not in before or name not in after or before[name].shape != after[name].shape
    }
    cache, size_bytes = (
        kv_bytes_per_token([layout for layout, _ in planned], element_bytes),
        sum(map(_bytes, after.values())),
    )
    if job.settings.without_weights:
        folded = (folded_bases(plain(i), *planned[i], job.run.shape) for i in range(len(planned)))
        size_bytes = sum(_bytes(tensor) for layer in folded for tensor in layer.tensors().values())
    return changed, size_bytes, cache


def _bytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.element_size()


def _stored_bytes(job: ExportJob) -> int:
    return sum(_bytes(job.checkpoint.meta_tensor(name)) for name in job.checkpoint.names)
