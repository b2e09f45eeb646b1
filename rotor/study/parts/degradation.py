"""`degradation`: what compressing one side does to the attention outputs, on text calibrated on and on other text.

Source: ZDC figure 14.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...bases.layer import LayerBases
from ...format.layout import LayerRanks
from ...recipe import Recipe
from ...rewriting.compressible import CompressibleModel
from ...search.probe import full_ranks
from ..bases import SIDE_LABELS
from ..context import StudyContext
from ..part import Part, Task
from ..plots import draw_legend, draw_line
from ..records import first_candidates
from ..store import StudyStore
from ..tables import Table
from ..variants import from_source, variant_folder, variant_run
from . import curves

HELD_OUT_TOKENS = 2048
"""Tokens of each part of the held-out data on which degradation is measured (ZDC section 4.3)."""


class Degradation(Part):
    name = "degradation"

    def tasks(self, study: StudyContext) -> Iterator[Task]:
        for name in study.plan.focus:
            recipe = study.plan.recipes[name]
            needs = {variant_folder(name, "text"): from_source(study, recipe, "text")}
            for side in SIDE_LABELS:
                for p in curves.COMPRESSIONS:
                    measure = partial(_measure, study, name, recipe, side, p)
                    yield Task(f"{self.name}/{name}/{side}/p{p:.2f}", measure, needs)

    def tables(self, store: StudyStore) -> Iterator[Table]:
        rows = []
        for key, record in store.part(self.name).items():
            others = f"{min(record['held_out']):.4f} to {max(record['held_out']):.4f}"
            start = [f"`{key.split('/')[0]}`", SIDE_LABELS[record["side"]], f"{record['p']:g}"]
            rows.append([*start, f"{record['calibration']:.4f}", others])
        if rows:
            yield Table(
                ["recipe", "side", "p", "text calibrated on", "other text, by part"],
                rows,
                "Degradation of the attention outputs (ZDC figure 14)",
                "Relative difference of the outputs of the attention layers, one side compressed by the same share "
                "everywhere, with bases from text.",
            )

    def plots(self, store: StudyStore) -> dict[str, Callable[[Any], None]]:
        return {self.name: partial(_draw, store)} if store.part(self.name) else {}


def _draw(store: StudyStore, figure: Any) -> None:
    figure.suptitle("degradation of the attention outputs, one side compressed (ZDC figure 14)")
    recipes = dict.fromkeys(key.split("/")[0] for key in store.part(Degradation.name))
    for axes, (side, label) in zip(figure.subplots(1, 2, sharey=True), SIDE_LABELS.items(), strict=True):
        for index, recipe in enumerate(recipes):
            found = store.part(f"{Degradation.name}/{recipe}/{side}").values()
            draw_line(axes, index, [(r["p"], r["calibration"]) for r in found], f"{recipe}, text calibrated on")
            other = [(r["p"], sum(r["held_out"]) / len(r["held_out"])) for r in found]
            draw_line(axes, index, other, f"{recipe}, other text", linestyle="--", fillstyle="none")
        axes.set(title=label, xlabel="p of this side (share of the channels removed)")
    figure.axes[0].set_ylabel("relative difference of the outputs")
    draw_legend(figure.axes[0])


def _measure(study: StudyContext, name: str, recipe: Recipe, side: str, p: float) -> dict[str, Any]:
    bases = first_candidates(variant_run(study, name, recipe, "text"))
    report = study.data.report
    rows = max(1, HELD_OUT_TOKENS // report.shape[1])
    of = partial(degradation, study.network, bases, uniform_ranks(bases, p, side))
    held_out = [of(part) for part in report[: 2 * rows].split(rows)]
    return {"p": p, "side": side, "calibration": of(study.calibration_rows(2 * rows)), "held_out": held_out}


def uniform_ranks(bases: Sequence[LayerBases], compression: float, side: str) -> list[LayerRanks]:
    """Every group of every layer loses the same share of one side's channels (`qk` or `vo`); the other side stays."""
    ranks: list[LayerRanks] = []
    for layer in bases:
        kept = dict(zip(SIDE_LABELS, full_ranks(layer), strict=True))
        kept[side] = max(1, round(kept[side] * (1 - compression)))
        ranks.append([(kept["qk"], kept["vo"])] * len(layer.qk.encode))
    return ranks


@torch.inference_mode()
def degradation(
    network: CompressibleModel, bases: Sequence[LayerBases], ranks: list[LayerRanks], rows: Tensor
) -> float:
    """Relative difference that compression makes in the output of the attention layers, averaged over layers.

    Args:
        rows: [n, seq_len] tokens.
    Source: ZDC section 4.3 (D in figure 14). The paper averages |v - u| / |u| over elements, which those near zero
    dominate; here it is sum |v - u| / sum |u| over a layer's elements after o_proj.
    """
    total = 0.0
    network.restore()
    states = [network.embed(rows)]
    states.append(states[0].clone())
    for index in range(network.shape.num_layers):
        with network.layer(index):
            reference = _attention_outputs(network, index, states[0])
            with network.compressed_layer(index, bases[index], ranks[index]):
                other = _attention_outputs(network, index, states[1])
        for before, after, part in zip(reference, other, network.batches(rows), strict=True):
            total += relative_difference(before, after) * len(rows[part])
    return total / (network.shape.num_layers * len(rows))


def relative_difference(reference: Tensor, other: Tensor) -> float:
    """Sum of absolute differences over the sum of absolute entries of `reference`; 0 if that is 0."""
    size = reference.abs().sum(dtype=torch.float64)
    return float((reference - other).abs().sum(dtype=torch.float64) / size) if size else 0.0


def _attention_outputs(network: CompressibleModel, index: int, states: Tensor) -> list[Tensor]:
    """Of one layer, batch by batch; `states` becomes what leaves the layer."""
    outputs = []

    def keep(module: nn.Module, arguments: Any, output: Any) -> None:
        del module, arguments
        outputs.append((output[0] if isinstance(output, tuple) else output).cpu())

    handle = network.family.attention_module(network.model, index).register_forward_hook(keep)
    try:
        network.run(index, states, states)
    finally:
        handle.remove()
    return outputs
