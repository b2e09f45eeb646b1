"""The part `squeeze`: how alike hidden states are before and after attention (SqueezeAttention figure 2).

rotor study MODEL --parts artifacts/studies/parts/squeeze.py:Squeeze -o STUDY
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from rotor.errors import UnsupportedModelError
from rotor.policies import EvictingLayer, PolicyLayer, Window, cache_policy
from rotor.policies.budgets import squeeze_shares, three_means, token_cosines
from rotor.tools.study.context import StudyContext
from rotor.tools.study.part import Part, Table, Task, number
from rotor.tools.study.store import Record, StudyStore

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLACES = 8
"""Runs of neighbouring positions, each with one number a layer."""

KEPT = 0.85
"""Share of its budget that the third group keeps: SqueezeAttention's text removes 0.1 to 0.2."""


class Squeeze(Part):
    name = "squeeze"

    def tasks(self, study: StudyContext) -> Iterator[Task]:
        yield Task(f"{self.name}/cosines", partial(_measure, study))

    def tables(self, store: StudyStore) -> Iterator[Table]:
        title = "Cosines of the layers (SqueezeAttention figure 2)"
        record = store.records.get(f"{self.name}/cosines", {})
        if "skipped" in record:
            yield Table((), (), title, f"Not measured: {record['skipped']}")
        elif record:
            means, places = record["means"], record["places"]
            groups, shares = three_means(means), squeeze_shares(means, KEPT)
            rows = [
                [str(layer), number(means[layer]), f"G{groups[layer] + 1}", number(shares[layer], 2)]
                + [number(value, 3) for value in places[layer]]
                for layer in range(len(means))
            ]
            starts = (f"from {start}" for start in record["starts"])
            yield Table(
                ["layer", "cosine", "group", "share of the budget", *starts],
                rows,
                title,
                "Cosine similarity of hidden states before and after a layer's attention: the mean over tokens and "
                f"over {record['sequences']} sequences of the report split, and by the tokens' positions. Groups and "
                f"shares are Algorithm 1's, where the third group keeps {KEPT:g} of its budget.",
            )

    def plots(self, store: StudyStore) -> dict[str, Callable[[Figure], None]]:
        record = store.records.get(f"{self.name}/cosines", {})
        return {self.name: partial(_draw, record)} if "places" in record else {}


@dataclass(frozen=True)
class _Watching(Window):
    """A cache that keeps every token, and in each layer the cosines of the prompt's states."""

    share: float = 1.0

    @property
    def needs_states(self) -> bool:
        return True

    def layers(self, count: int) -> list[PolicyLayer]:
        return [_WatchingLayer(self, index) for index in range(count)]


class _WatchingLayer(EvictingLayer):
    """cosines: [batch_size, seq_len] float64."""

    cosines: Tensor

    def observe_states(self, before: Tensor, after: Tensor) -> None:
        self.cosines = token_cosines(before, after)


@torch.no_grad()
def _measure(study: StudyContext) -> Record:
    """Cosines of every layer: `means` over all tokens, and `places` by runs of positions, which begin at `starts`."""
    study.check_in_memory()
    policy = _Watching()
    try:
        policy.check_config(study.network.config)
    except UnsupportedModelError as error:
        return {"skipped": error.message}
    sequences = study.data.report
    total = torch.zeros(study.network.shape.num_layers, sequences.shape[1], dtype=torch.float64)
    with study.network.uncompressed() as model, cache_policy(model, policy):
        for sequence in sequences.split(1):
            cache = DynamicCache(config=study.network.config)
            ids = sequence.to(study.network.device)
            model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            layers: list[Any] = list(cache.layers)
            total += torch.cat([layer.cosines for layer in layers]).cpu()
    cosines = total / len(sequences)
    runs = cosines.tensor_split(min(PLACES, cosines.shape[1]), dim=1)
    sizes = [run.shape[1] for run in runs]
    return {
        "sequences": len(sequences),
        "means": cosines.mean(1).tolist(),
        "places": torch.stack([run.mean(1) for run in runs], dim=1).tolist(),
        "starts": [sum(sizes[:index]) for index in range(len(sizes))],
    }


def _draw(record: Record, figure: Figure) -> None:
    """A row for each run of positions and a column for each layer, as in the paper."""
    figure.suptitle("cosine of hidden states before and after attention")
    axes = figure.subplots()
    image = axes.imshow(torch.tensor(record["places"]).T.numpy(), aspect="auto", cmap="viridis")
    axes.set(xlabel="layer", ylabel="position")
    axes.set_yticks(range(len(record["starts"])), [f"from {start}" for start in record["starts"]])
    figure.colorbar(image)
