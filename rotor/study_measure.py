"""What a study measures of one rank plan: the table's ratios, closeness of the logits, and degradation of attention."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .bases import LayerBases
from .checkpoint import Checkpoint
from .comparison import relative_difference
from .compress import CompressibleModel
from .errors import DataError
from .evaluation import EvaluationData, Scores, evaluation_data, score
from .layout import LayerRanks
from .metrics import Recall
from .placement import Placement
from .progress import Progress
from .ranks import RankPlan
from .recipe import Evaluation
from .search import Measurer

SPLITS = ("search", "report")
METRICS = {
    "accuracy": "accuracy (ratio to the model)",
    "token_accuracy": "next-token accuracy ratio",
    "ppl_ratio": "perplexity ratio (base over compressed)",
    "kl_div": "KL divergence (nats per token)",
    "top1_agreement": "top-1 agreement",
    "recall": "look-up accuracy (ratio to the model)",
}
"""Columns of a measured point in each split, with their labels; one that a point does not have stays empty."""


class Bench:
    """The model in memory and the held-out data, loaded when first needed and shared by all points of a study."""

    def __init__(
        self, checkpoint: Checkpoint, evaluation: Evaluation, placement: Placement, workspace: Path, progress: Progress
    ) -> None:
        self.checkpoint, self.evaluation, self.progress = checkpoint, evaluation, progress
        self.placement, self.workspace = placement, workspace
        self.measures = [
            self.fidelity,
            self.recall,
        ]  # each adds METRICS to a point: (bases, ranks, split) -> values by name
        self._base: dict[str, tuple[Tensor, Scores]] = {}
        self._recall: dict[str, Recall | None] = {}

    @cached_property
    def network(self) -> CompressibleModel:
        return self.placement.model(self.checkpoint, self.workspace)

    @cached_property
    def data(self) -> EvaluationData:
        return evaluation_data(self.evaluation, self.checkpoint.config, self.checkpoint.tokenizer)

    def point(self, measurer: Measurer, plan: RankPlan) -> dict[str, Any]:
        """Everything about one plan: its compression, and in each split the METRICS that there are.

        Ratios and their interval are those of the run's table, where the point is added if it is not there yet.
        """
        measured, bases = measurer.measure(plan), plan.select(measurer.bases)
        point: dict[str, Any] = {"planned": measured["compression"]["planned"], "stored": round(plan.stored, 6)}
        for split in SPLITS:
            point[split] = {"accuracy": measurer.table.accuracy(measured, split)}
            for measure in self.measures:
                point[split].update(measure(bases, plan.rounded, split))
            point[split].update({name: measured[split][name] for name in METRICS if name in measured[split]})
        point["interval"] = measured["report"].get("interval")
        return point

    def recall(self, bases: Sequence[LayerBases], ranks: list[LayerRanks], split: str) -> dict[str, float]:
        """Share of keys looked up, relative to the uncompressed model; nothing where that cannot do it."""
        if split not in self._recall:
            metric = Recall("recall", self.evaluation, self.checkpoint.tokenizer, self.checkpoint.config)
            try:
                self.network.restore()
                metric.measure_base(self.network, split)
                self._recall[split] = metric
            except DataError:
                self._recall[split] = None
        known = self._recall[split]
        if known is None:
            return {}
        self.network.compress(bases, ranks)
        return {"recall": known.ratio(self.network, split)}

    def fidelity(self, bases: Sequence[LayerBases], ranks: list[LayerRanks], split: str) -> dict[str, float]:
        """Mean KL divergence of the next-token distributions from the uncompressed model's, and share of equal argmax.

        The uncompressed model's final hidden states are kept between points.
        """
        rows, network = getattr(self.data, split), self.network
        with self.progress.task(f"compare ({split})", rows.numel(), "tokens") as advance:
            if split not in self._base:
                network.restore()
                states = network.final_states(rows)
                self._base[split] = states, score(network, rows, states=states)
            reference, base = self._base[split]
            network.compress(bases, ranks)
            scores = score(network, rows, advance, reference)
        assert scores.kl_div is not None
        assert scores.top1 is not None
        assert base.top1 is not None
        divergence, agreement = scores.kl_div.sum(), (base.top1 == scores.top1).sum()
        tokens = base.top1.size
        return {"kl_div": round(float(divergence / tokens), 6), "top1_agreement": round(float(agreement / tokens), 6)}

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


def uniform_ranks(bases: Sequence[LayerBases], compression: float, side: str) -> list[LayerRanks]:
    """Every group of every layer loses the same share of one side's columns (`qk` or `vo`); the other side stays."""

    def rank(columns: int, cut: bool) -> int:
        return max(1, round(columns * (1 - compression))) if cut else columns

    ranks: list[LayerRanks] = []
    for layer in bases:
        (groups, qk), vo = layer.qk.singular_values.shape, layer.vo.singular_values.shape[-1]
        ranks.append([(rank(qk, side == "qk"), rank(vo, side == "vo"))] * groups)
    return ranks
