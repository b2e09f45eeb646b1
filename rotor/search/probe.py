"""Sensitivities: the effect of compressing one side of one layer alone on the final logits, per unit of dropped energy.

What enters a layer of the uncompressed model is computed once and shared by all probes of the layer, whose hidden
states go through the later layers together: weights that are read from disk are read once for all probes of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..calibration.allocation.plan import Sensitivity, round_rank
from ..checkpoint.bases import LayerBases
from ..checkpoint.layout import LayerRanks
from ..models.compressible import CompressibleModel
from ..progress import Advance
from ..recipe.sections import Ranks
from .evaluation.scoring import score

KL_NOISE = 1e-9
"""Least KL divergence, in nats per token, of a sensitivity; positive, so that it has a logarithm."""


@dataclass(frozen=True)
class Probe:
    """A probe: one side (0: keys, 1: values) of a layer at a rank, everything else whole.

    rank: of the side. ranks: of the layer. dropped: energy (squared singular values) beyond the rank.
    """

    side: int
    rank: int
    ranks: LayerRanks
    dropped: float


def probes_of(bases: LayerBases, settings: Ranks) -> list[Probe]:
    """List the probes of one layer: each side at each of `probe_shares` of its columns."""
    probes = []
    full = bases.full_ranks
    for side, pair in enumerate((bases.qk, bases.vo)):
        shares = [
            round_rank(int(full[side] * share), settings.multiple_of, full[side]) for share in settings.probe_shares
        ]
        for rank in sorted(set(shares)):
            ranks = (full[0], rank) if side else (rank, full[1])
            dropped = float(pair.singular_values[:, rank:].square().sum())
            if dropped > 0:
                probes.append(Probe(side, rank, [ranks] * len(pair.singular_values), dropped))
    return probes


def probe(
    network: CompressibleModel, bases: Sequence[LayerBases], settings: Ranks, rows: Tensor, start: int, advance: Advance
) -> Iterator[Sensitivity]:
    """Sensitivities of the layers from `start` on, in order, one layer at a time.

    Args:
        rows: [n, seq_len] tokens. start: layers whose sensitivities are known.
    """
    network.restore()
    reference = network.final_states(rows)
    entering = network.embed(rows)
    for index in range(network.shape.num_layers):
        if index >= start:
            yield _probe_layer(network, bases[index], settings, rows, index, entering, reference)
            advance(1)
        with network.layer(index):
            network.run(index, rows, entering, entering)


def _probe_layer(
    network: CompressibleModel,
    bases: LayerBases,
    settings: Ranks,
    rows: Tensor,
    index: int,
    entering: Tensor,
    reference: Tensor,
) -> Sensitivity:
    """Sensitivities of a layer; the hidden states of its probes go through the later layers together."""
    probes = [(one, network.states_like(rows)) for one in probes_of(bases, settings)]
    with network.layer(index):
        for one, states in probes:
            with network.compressed_layer(index, bases, one.ranks):
                network.run(index, rows, entering, states)
    for later in range(index + 1, network.shape.num_layers):
        with network.layer(later):
            for _, states in probes:
                network.run(later, rows, states, states)
    sensitivity: Sensitivity = ([], [])
    for one, states in probes:
        scores = score(network, rows, reference=reference, states=states)
        assert scores.kl_div is not None
        loss = max(float(scores.kl_div.mean()), KL_NOISE)
        sensitivity[one.side].append((one.rank, loss / one.dropped))
    return sensitivity
