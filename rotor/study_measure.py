"""What a study measures of one rank plan: the table's ratios, closeness of the logits, and degradation of attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from .bases import LayerBases
from .checkpoint import Checkpoint
from .comparison import relative_difference
from .compress import CompressibleModel, pick_device, pick_dtype
from .errors import DataError
from .evaluation import EvaluationData, batch_logits, batches, evaluation_data, row_kl_div
from .metrics import Recall
from .progress import Progress
from .ranks import LayerRanks, RankPlan
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

KEEP_BYTES = 1 << 30
"""Logits of the uncompressed model are kept between points up to this size, and computed again beyond it."""


class Bench:
    """The model in memory and the held-out data, loaded when first needed and shared by all points of a study."""

    def __init__(
        self, checkpoint: Checkpoint, evaluation: Evaluation, device: str, dtype: str, progress: Progress
    ) -> None:
        self.checkpoint, self.evaluation, self.progress = checkpoint, evaluation, progress
        self.device = pick_device(device)
        self.dtype = pick_dtype(dtype, checkpoint.config.dtype or torch.float32, self.device)
        self.measures = [
            self.fidelity,
            self.recall,
        ]  # each adds METRICS to a point: (bases, ranks, split) -> values by name
        self._kept: dict[str, list[Tensor]] = {}
        self._recall: dict[str, Recall | None] = {}

    @cached_property
    def network(self) -> CompressibleModel:
        return CompressibleModel(self.checkpoint, self.device, self.dtype)

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

    def recall(self, bases: list[LayerBases], ranks: list[LayerRanks], split: str) -> dict[str, float]:
        """Share of keys looked up, relative to the uncompressed model; nothing where that cannot do it."""
        if split not in self._recall:
            metric = Recall("recall", self.evaluation, self.checkpoint.tokenizer, self.checkpoint.config)
            try:
                metric.measure_base(self.network.restore(), split)
                self._recall[split] = metric
            except DataError:
                self._recall[split] = None
        known = self._recall[split]
        if known is None:
            return {}
        return {"recall": known.ratio(self.network.compress(bases, ranks), split)}

    @torch.inference_mode()
    def fidelity(self, bases: list[LayerBases], ranks: list[LayerRanks], split: str) -> dict[str, float]:
        """Mean KL divergence of the next-token distributions from the uncompressed model's, and share of equal argmax.

        Both models see the same batch one after the other, so that the logits of one batch are all that must fit.
        """
        rows = getattr(self.data, split)
        model = self.network.compress(bases, ranks)
        keep = rows.numel() * self.checkpoint.config.vocab_size * 4 <= KEEP_BYTES
        kept = self._kept.setdefault(split, []) if keep else []
        divergence, agreement, tokens = 0.0, 0, 0
        with self.progress.task(f"compare ({split})", rows.numel(), "tokens") as advance:
            for index, batch in enumerate(batches(self.network.model, rows)):
                if index < len(kept):
                    base = kept[index]
                else:
                    with self.network.uncompressed() as uncompressed:
                        base = batch_logits(uncompressed, batch)
                    if keep:
                        kept.append(base)
                other = batch_logits(model, batch)
                divergence += float(row_kl_div(base, other).sum())
                agreement += int((base.argmax(-1) == other.argmax(-1)).sum())
                tokens += base.shape[0] * base.shape[1]
                advance(batch.numel())
        return {"kl_div": round(divergence / tokens, 6), "top1_agreement": round(agreement / tokens, 6)}

    @torch.inference_mode()
    def degradation(self, bases: list[LayerBases], ranks: list[LayerRanks], rows: Tensor) -> float:
        """Relative difference that compression makes in the output of the attention layers, averaged over layers.

        Args:
            rows: [n, seq_len] tokens.
        Source: ZDC section 4.3 (D in figure 14). The paper averages |v - u| / |u| over elements, which those near zero
        dominate; here it is sum |v - u| / sum |u| over a layer's elements after o_proj.
        """
        model, total, count = self.network.compress(bases, ranks), 0.0, 0
        for batch in batches(self.network.model, rows):
            with self.network.uncompressed() as uncompressed:
                reference = self._attention_outputs(uncompressed, batch)
            other = self._attention_outputs(model, batch)
            layers = [relative_difference(a, b) for a, b in zip(reference, other, strict=True)]
            total += sum(layers) / len(layers) * batch.shape[0]
            count += batch.shape[0]
        return total / count

    def _attention_outputs(self, model: Any, batch: Tensor) -> list[Tensor]:
        network, outputs = self.network, []

        def keep(module: nn.Module, arguments: Any, output: Any) -> None:
            del module, arguments
            outputs.append(output[0] if isinstance(output, tuple) else output)

        with _hooks(network, model, keep):
            model.get_submodule(network.family.decoder)(batch.to(model.device), use_cache=False)
        return outputs


def uniform_ranks(bases: list[LayerBases], compression: float, side: str) -> list[LayerRanks]:
    """Every group of every layer loses the same share of one side's columns (`qk` or `vo`); the other side stays."""

    def rank(columns: int, cut: bool) -> int:
        return max(1, round(columns * (1 - compression))) if cut else columns

    ranks: list[LayerRanks] = []
    for layer in bases:
        (groups, qk), vo = layer.qk.singular_values.shape, layer.vo.singular_values.shape[-1]
        ranks.append([(rank(qk, side == "qk"), rank(vo, side == "vo"))] * groups)
    return ranks


@contextmanager
def _hooks(network: CompressibleModel, model: Any, hook: Callable[..., None]) -> Iterator[None]:
    modules = [network.family.attention_module(model, i) for i in range(network.shape.num_layers)]
    handles = [module.register_forward_hook(hook) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
