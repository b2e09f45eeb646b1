"""Sensitivities: what compressing one side of one layer alone does to the final logits, per unit of dropped energy.

What enters a layer of the uncompressed model is computed once and shared by all probes of the layer; the hidden states
of probes that have begun go through the later layers together, so that a layer whose weights are read from disk is read
once for many probes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..allocation.plan import Sensitivity, round_rank
from ..bases.layer import LayerBases
from ..evaluation.scoring import score
from ..format.layout import LayerRanks
from ..progress import Advance
from ..recipe import Ranks
from ..rewriting.compressible import CompressibleModel

PROBE_STATES_BYTES = 16 << 30
"""Hidden states that are kept at once where weights are read from disk; on disk, as they are larger than what is kept
in memory."""

KL_NOISE = 1e-9
"""A KL divergence, in nats per token, that is as good as none; positive, so that it has a logarithm."""


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
    """The probes of one layer: one side at each of `probe_shares` of its columns."""
    probes, full = [], full_ranks(bases)
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


def full_ranks(bases: LayerBases) -> tuple[int, int]:
    """Ranks of the key side and of the value side that remove nothing: all columns."""
    return bases.qk.singular_values.shape[-1], bases.vo.singular_values.shape[-1]


def probe(
    network: CompressibleModel, bases: Sequence[LayerBases], settings: Ranks, rows: Tensor, start: int, advance: Advance
) -> Iterator[list[Sensitivity]]:
    """Sensitivities of the layers from `start` on, in order, some layers at a time.

    Args:
        rows: [n, seq_len] tokens. start: layers whose sensitivities are known.
    """
    layers = network.shape.num_layers
    network.restore()
    reference, entering = network.final_states(rows), network.embed(rows)
    for index in range(start):
        with network.layer(index):
            network.run(index, entering, entering)
    together = _together(network, settings, rows)
    for first in range(start, layers, together):
        last = min(layers, first + together)
        yield _probe_layers(network, bases, settings, rows, range(first, last), entering, reference)
        advance(last - first)


def _together(network: CompressibleModel, settings: Ranks, rows: Tensor) -> int:
    """Layers that are probed together: more than one only where that saves reading weights."""
    if not network.source.streamed:
        return 1
    states = rows.numel() * network.shape.hidden_size * network.dtype.itemsize
    return max(1, int(PROBE_STATES_BYTES // (states * 2 * len(settings.probe_shares))))


def _probe_layers(
    network: CompressibleModel,
    bases: Sequence[LayerBases],
    settings: Ranks,
    rows: Tensor,
    layers: range,
    entering: Tensor,
    reference: Tensor,
) -> list[Sensitivity]:
    """Sensitivities of some layers; `entering` is brought from the first of them to the one behind the last."""
    begun: list[tuple[int, Probe, Tensor]] = []
    for index in range(layers.start, network.shape.num_layers):
        with network.layer(index):
            for _, _, states in begun:
                network.run(index, states, states)
            if index in layers:
                layer = bases[index]
                for one in probes_of(layer, settings):
                    states = network.states_like(rows)
                    with network.compressed_layer(index, layer, one.ranks):
                        network.run(index, entering, states)
                    begun.append((index, one, states))
                network.run(index, entering, entering)
    found: list[Sensitivity] = [([], []) for _ in layers]
    for index, one, states in begun:
        scores = score(network, rows, reference=reference, states=states)
        assert scores.kl_div is not None
        loss = max(float(scores.kl_div.mean()), KL_NOISE)
        found[index - layers.start][one.side].append((one.rank, loss / one.dropped))
    return found
