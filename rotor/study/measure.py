"""What a study measures of one rank plan: the table's ratios, closeness of the logits, and degradation of attention."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..allocation.plan import RankPlan
from ..bases.layer import LayerBases
from ..calibration.run import Run
from ..data.rows import spread_rows, text_rows
from ..data.splits import SPLITS, EvaluationData, evaluation_data, held_out_documents
from ..evaluation.fidelity import Fidelity, FidelityMeter
from ..evaluation.metrics import EvaluationContext
from ..evaluation.placement import Placement
from ..format.layout import LayerRanks
from ..models.checkpoint import Checkpoint
from ..progress import Progress
from ..recipe import Evaluation, Recipe
from ..recipe.metric_registry import METRICS
from ..rewriting.compressible import CompressibleModel
from ..search.point import Point
from ..search.search import Measurer, probe_rows
from ..search.table import Context, ProbeTable, RankTable
from .comparison import relative_difference

COLUMNS = {
    "accuracy": "accuracy (ratio to the model)",
    **{name: info.label for name, info in METRICS.items() if not info.parts},
}
"""Columns of a measured point in each split, with their labels; one that a point does not have stays empty."""


class StudySubject:
    """The model in memory and the held-out data, loaded when first needed and shared by all points of a study."""

    def __init__(
        self, checkpoint: Checkpoint, evaluation: Evaluation, placement: Placement, workspace: Path, progress: Progress
    ) -> None:
        self.checkpoint, self.evaluation, self.progress = checkpoint, evaluation, progress
        self.placement, self.workspace = placement, workspace

    @cached_property
    def network(self) -> CompressibleModel:
        return self.placement.model(self.checkpoint, self.workspace)

    @cached_property
    def data(self) -> EvaluationData:
        """Held-out text."""
        return evaluation_data(self.evaluation, self.checkpoint.config, self.checkpoint.tokenizer)

    def calibration_rows(self, count: int) -> Tensor:
        """Rows [count, seq_len] of the text that is kept for calibrations."""
        found = held_out_documents(self.evaluation)
        rows = text_rows(found.calibration, self.checkpoint.tokenizer, self.data.report.shape[1])
        return spread_rows(rows, count, f"study, calibration part of {found.description}")

    @cached_property
    def meter(self) -> FidelityMeter:
        """Measures all points, so that the uncompressed model runs once a split."""
        context = EvaluationContext(self.evaluation, self.data.rows, self.checkpoint.tokenizer, self.checkpoint.config)
        return FidelityMeter(context, self.progress)

    def measurer(self, run: Run, recipe: Recipe) -> Measurer:
        """What measures points of a run into its tables."""
        place = self.placement
        table = RankTable.open(run, Context.of(self.evaluation, self.data, place.dtype, place.device))
        rows = probe_rows(recipe.ranks, self.data.search)
        probes = ProbeTable.open(run, recipe.ranks, rows, place.dtype, place.device)
        return Measurer(table, probes, self.network, run.bases(), self.meter, self.progress)

    def point(self, measurer: Measurer, plan: RankPlan) -> dict[str, Any]:
        """A record of one plan: its compression, and in each split the COLUMNS that there are."""
        return point_record(measurer.measure(plan))

    @torch.inference_mode()
    def degradation(self, bases: Sequence[LayerBases], ranks: list[LayerRanks], rows: Tensor) -> float:
        """Relative difference that compression makes in the output of the attention layers, averaged over layers.

        Args:
            rows: [n, seq_len] tokens.
        Source: ZDC section 4.3 (D in figure 14). The paper averages |v - u| / |u| over elements, which those near zero
        dominate; here it is sum |v - u| / sum |u| over a layer's elements after o_proj.
        """
        network, total = self.network, 0.0
        network.restore()
        states = [network.embed(rows)]
        states.append(states[0].clone())
        for index in range(network.shape.num_layers):
            with network.layer(index):
                reference = self._attention_outputs(index, states[0])
                with network.compressed_layer(index, bases[index], ranks[index]):
                    other = self._attention_outputs(index, states[1])
            for before, after, part in zip(reference, other, network.batches(rows), strict=True):
                total += relative_difference(before, after) * len(rows[part])
        return total / (network.shape.num_layers * len(rows))

    def _attention_outputs(self, index: int, states: Tensor) -> list[Tensor]:
        """Of one layer, batch by batch; `states` becomes what leaves the layer."""
        network, outputs = self.network, []

        def keep(module: nn.Module, arguments: Any, output: Any) -> None:
            del module, arguments
            outputs.append((output[0] if isinstance(output, tuple) else output).cpu())

        handle = network.family.attention_module(network.model, index).register_forward_hook(keep)
        try:
            network.run(index, states, states)
        finally:
            handle.remove()
        return outputs


def point_record(point: Point) -> dict[str, Any]:
    """Compression, accuracy and every ratio of a point on both splits, and the report split's intervals."""
    record: dict[str, Any] = point.compression_json
    for split in SPLITS:
        found = point.fidelity(split)
        values = {name: found.values[name] for name in COLUMNS if name in found.values}
        record[split] = {"accuracy": found.accuracy, **values}
    return record | _intervals(point.fidelity("report"))


def target_record(point: Point) -> dict[str, Any]:
    """The point that a target led to: compression, accuracy on both splits, KL and intervals on the report split."""
    report = point.fidelity("report")
    values = {split: point.fidelity(split).accuracy for split in SPLITS}
    return {**point.compression_json, **values, "kl_div": report.values.get("kl_div"), **_intervals(report)}


def _intervals(report: Fidelity) -> dict[str, list[float] | None]:
    """95 % intervals of a measurement: of the accuracy, and of the KL in nats."""
    bounds = [report.values.get(f"kl_div_{end}") for end in ("low", "high")]
    known = [bound for bound in bounds if bound is not None]
    return {
        "interval": None if report.interval is None else list(report.interval),
        "kl_interval": known if len(known) == 2 else None,
    }


def uniform_ranks(bases: Sequence[LayerBases], compression: float, side: str) -> list[LayerRanks]:
    """Every group of every layer loses the same share of one side's columns (`qk` or `vo`); the other side stays."""

    def rank(columns: int, cut: bool) -> int:
        return max(1, round(columns * (1 - compression))) if cut else columns

    ranks: list[LayerRanks] = []
    for layer in bases:
        (groups, qk), vo = layer.qk.singular_values.shape, layer.vo.singular_values.shape[-1]
        ranks.append([(rank(qk, side == "qk"), rank(vo, side == "vo"))] * groups)
    return ranks
