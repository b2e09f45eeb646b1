"""Attention scores by layer, and which tokens they make important: what layers have in common (ZDC section 3.3)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rotor.calibration.capture import observed_attention
from rotor.policies.agreement import in_common
from rotor.tools.study.context import StudyContext
from rotor.tools.study.part import Table
from rotor.tools.study.store import Record

SEQUENCES = 2
"""Sequences of the report split in which scores are looked at."""

SCORED = 0.35
"""Share of the tokens that are the least, or the most, important (ZDC section 3.3)."""

QUANTILES = (0.01, 0.25, 0.75, 0.99)
"""Quantiles of the scores, besides the least and the largest (ZDC figure 6)."""


@torch.no_grad()
def observe(study: StudyContext, sequence: Tensor, look: Callable[[int, dict[str, Tensor]], None]) -> None:
    """Let `look` see the layer, and queries, keys after RoPE and values of its attention, of one sequence."""
    study.check_in_memory()
    network = study.network
    with network.uncompressed() as model:
        layers = range(network.shape.num_layers)
        with observed_attention(model, network.family, network.shape, layers, lambda n, tensors, _: look(n, tensors)):
            model(input_ids=sequence.to(network.device), use_cache=False, logits_to_keep=1)


@dataclass(frozen=True)
class LayerScores:
    """Statistics of one layer's attention scores of a sequence.

    quantiles: the least, QUANTILES, and the largest score. worth: each token's, [tokens], by its mean score over the
    keys it sees, and by its softmax denominator over these; both summed over heads.
    """

    quantiles: Tensor
    worth: dict[str, Tensor]


def layer_scores(query: Tensor, key: Tensor, scaling: float, window: int | None = None) -> LayerScores:
    """Look at the scores of a causal layer.

    Args:
        query: [num_heads, tokens, head_dim]. key: [num_kv_heads, tokens, head_dim], after RoPE.
        window: the newest tokens that a query sees, itself among them; None: all.
    Source: ZDC sections 3.3 and 5.2.
    """
    scores = query.float() @ key.float().repeat_interleave(len(query) // len(key), dim=0).mT * scaling
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    seen = seen if window is None else seen.triu(1 - window)
    ordered = scores[:, seen].flatten().sort().values.cpu()
    places = [round(share * (len(ordered) - 1)) for share in (0.0, *QUANTILES, 1.0)]
    worth = {
        "mean scores": (scores.masked_fill(~seen, 0.0).sum((0, 2)) / seen.sum(-1)).cpu(),
        "denominators": scores.masked_fill(~seen, -torch.inf).logsumexp((0, 2)).cpu(),
    }
    return LayerScores(ordered[places], worth)


def choices(worth: Tensor, least: bool = False) -> Tensor:
    """Mark the SCORED of the tokens that are worth most, or least, in each layer: [layers, tokens], 1.0 or 0.0."""
    count = max(1, round(SCORED * worth.shape[1]))
    order = worth.argsort(dim=1, descending=not least, stable=True)
    return torch.zeros(worth.shape, dtype=torch.float64).scatter(1, order[:, :count], 1.0)


def measure_scores(study: StudyContext) -> Record:
    """Figure 6: `ranges`, quantiles of the scores by layer. Figures 7 and 8: `repeated`, what layers' choices of tokens
    have in common, by the distance of the layers, in the mean and at least."""
    network, quantiles = study.network, []
    common: dict[str, list[Tensor]] = {}
    for sequence in study.data.report[:SEQUENCES].split(1):
        layers: list[LayerScores] = []

        def look(index: int, tensors: dict[str, Tensor], layers: list[LayerScores] = layers) -> None:
            module = network.family.attention_module(network.model, index)
            scaling = getattr(module, "scaling", None) or network.shape.layer(index).head_dim ** -0.5
            window = network.shape.windows[index] if network.shape.windows else None
            layers.append(layer_scores(tensors["query"][0], tensors["key_post"][0], float(scaling), window))

        observe(study, sequence, look)
        quantiles.append(torch.stack([layer.quantiles for layer in layers]))
        for by in layers[0].worth:
            worth = torch.stack([layer.worth[by] for layer in layers])
            for name, least in ((f"important by {by}", False), (f"unimportant by {by}", True)):
                common.setdefault(name, []).append(in_common(choices(worth, least)))
    of_all = torch.stack(quantiles)
    ranges = of_all.mean(0)
    ranges[:, 0], ranges[:, -1] = of_all[..., 0].amin(0), of_all[..., -1].amax(0)
    repeated = {
        name: [[float(part(of.diagonal(d))) for part in (torch.mean, torch.amin)] for d in range(1, len(ranges))]
        for name, of in ((name, torch.stack(of).mean(0)) for name, of in common.items())
    }
    return {"ranges": ranges.tolist(), "repeated": repeated}


def tables_of_scores(record: Record) -> Iterator[Table]:
    """Tables of what `measure_scores` gives."""
    header = ["layer", "least", *(f"{100 * share:g} %" for share in QUANTILES), "largest"]
    rows = [[str(layer), *(f"{value:.1f}" for value in of)] for layer, of in enumerate(record["ranges"])]
    text = "Figure 6: quantiles of attention scores before the softmax."
    yield Table(header, rows, "Tokens and layers, bases and bytes (ZDC figures 4 to 9, 14 and 18)", text)
    repeated = record["repeated"]
    rows = [
        [name, *(f"{mean:.2f} ({least:.2f})" for mean, least in of_distance)] for name, of_distance in repeated.items()
    ]
    text = (
        f"Figures 7 and 8: what two layers have in common of the {SCORED:g} of the tokens that are the most and the "
        f"least important, by the distance of the layers: in the mean, and at least. {SCORED:g} is chance."
    )
    yield Table(["tokens", *(str(d) for d in range(1, len(record["ranges"])))], rows, text=text)
