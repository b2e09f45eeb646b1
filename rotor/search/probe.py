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

CandidateBases = Sequence[dict[str, LayerBases]]
"""The bases of each layer's candidates, by key."""


@dataclass(frozen=True)
class Probe:
    """A probe: one side (`qk` or `vo`) of one candidate of a layer at a rank, everything else whole.

    rank: of the side. ranks: of the layer. dropped: energy (squared singular values) beyond the rank.
    """

    key: str
    side: str
    rank: int
    ranks: LayerRanks
    dropped: float


def probes_of(layer: dict[str, LayerBases], settings: Ranks) -> list[Probe]:
    """The probes of one layer: each candidate with one side at each of `probe_shares` of its columns."""
    probes = []
    for key, bases in layer.items():
        full = full_ranks(bases)
        for index, (side, pair) in enumerate((("qk", bases.qk), ("vo", bases.vo))):
            width = full[index]
            shares = settings.probe_shares
            for rank in sorted({round_rank(int(width * share), settings.multiple_of, width) for share in shares}):
                ranks = (rank, full[1]) if side == "qk" else (full[0], rank)
                dropped = float(pair.singular_values[:, rank:].square().sum())
                if dropped > 0:
                    probes.append(Probe(key, side, rank, [ranks] * len(pair.singular_values), dropped))
    return probes


def full_ranks(bases: LayerBases) -> tuple[int, int]:
    """Ranks of the key side and of the value side that remove nothing: all columns."""
    return bases.qk.singular_values.shape[-1], bases.vo.singular_values.shape[-1]


class Prober:
    """Probes the layers of a model in order.

    Args:
        rows: [n, seq_len] tokens.
        start: layers whose sensitivities are known.
    """

    def __init__(
        self,
        network: CompressibleModel,
        bases: CandidateBases,
        settings: Ranks,
        rows: Tensor,
        start: int,
        advance: Advance,
    ) -> None:
        self.network, self.bases, self.settings, self.rows = network, bases, settings, rows
        self.start, self.advance = start, advance

    def sensitivities(self) -> Iterator[list[Sensitivity]]:
        """Those of the layers from `start` on, some layers at a time."""
        network, layers = self.network, self.network.shape.num_layers
        network.restore()
        reference = network.final_states(self.rows)
        entering = network.embed(self.rows)
        for index in range(self.start):
            self._advance(index, [entering])
        first = self.start
        while first < layers:
            last = min(layers, first + self._together())
            yield self._chunk(first, last, entering, reference)
            first = last

    def _together(self) -> int:
        """Layers that are probed together: more than one only where that saves reading weights."""
        if not self.network.source.streamed:
            return 1
        states = self.rows.numel() * self.network.shape.hidden_size * self.network.dtype.itemsize
        probes = 2 * len(self.settings.probe_shares) * len(self.bases[0])
        return max(1, int(PROBE_STATES_BYTES // (states * probes)))

    def _chunk(self, first: int, last: int, entering: Tensor, reference: Tensor) -> list[Sensitivity]:
        """Sensitivities of the layers first ... last - 1; `entering` is brought from the first to `last`."""
        begun: list[tuple[int, Probe, Tensor]] = []
        for index in range(first, self.network.shape.num_layers):
            with self.network.layer(index):
                for _, _, states in begun:
                    self.network.run(index, states, states)
                if index < last:
                    begun += self._begin(index, entering)
                    self.network.run(index, entering, entering)
        found: list[Sensitivity] = [{key: ([], []) for key in self.bases[index]} for index in range(first, last)]
        for layer, probe, states in begun:
            scores = score(self.network, self.rows, reference=reference, states=states)
            assert scores.kl_div is not None
            loss = max(float(scores.kl_div.sum()) / (scores.tokens * len(scores.kl_div)), KL_NOISE)
            found[layer - first][probe.key][0 if probe.side == "qk" else 1].append((probe.rank, loss / probe.dropped))
        self.advance(last - first)
        return found

    def _begin(self, index: int, entering: Tensor) -> list[tuple[int, Probe, Tensor]]:
        """What leaves a layer, whose weights are loaded, under each of its probes."""
        begun, bases = [], self.bases[index]
        for probe in probes_of(bases, self.settings):
            states = self.network.states_like(self.rows)
            with self.network.compressed_layer(index, bases[probe.key], probe.ranks):
                self.network.run(index, entering, states)
            begun.append((index, probe, states))
        return begun

    def _advance(self, index: int, several: list[Tensor]) -> None:
        with self.network.layer(index):
            for states in several:
                self.network.run(index, states, states)
