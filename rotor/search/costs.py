"""What the groups of a run's candidates cost under a recipe's objective, as shares of the uncompressed attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..calibration.run import Run
from ..format.channels import Channels, Latent, Numbers
from ..format.layout import Candidate
from ..recipe import Recipe

if TYPE_CHECKING:
    from ..prediction.objective import Objective


@dataclass(frozen=True)
class RunCosts:
    """Costs of one group of a candidate, by sides for allocating and whole for counting what a plan saves.

    layers: all alike.
    """

    objective: Objective
    candidates: dict[str, Candidate]
    layers: int

    @classmethod
    def of(cls, run: Run, recipe: Recipe) -> RunCosts:
        """Raises RecipeError if the objective's device is not known."""
        from ..prediction.devices import find_device
        from ..prediction.objective import Objective

        settings = recipe.objective
        device = find_device(settings.device, settings.device_file)
        objective = Objective.from_settings(settings, device, run.shape, int(run.info["element_bytes"]))
        return cls(objective, run.candidates, run.shape.num_layers)

    def sides(self, key: str, ranks: list[int]) -> tuple[list[float], list[float]]:
        """Of the key side and of the value side at each rank of numbers."""
        candidate, latents = self.candidates[key], [Numbers(rank) for rank in ranks]
        keys = [self.objective.key_cost(candidate, latent) / self.layers for latent in latents]
        return keys, [self.objective.value_cost(candidate, latent) / self.layers for latent in latents]

    def numbers(self, key: str, key_rank: int, value_rank: int) -> float:
        """Of a whole group of numbers."""
        return self._group(key, Numbers(key_rank), Numbers(value_rank))

    def channels(self, key: str, keys: Channels, values: Channels | None) -> float:
        """Of a whole group of codes; values is None where they are in the key latent."""
        return self._group(key, keys, values)

    def _group(self, key: str, keys: Latent, values: Latent | None) -> float:
        return self.objective.group_cost(self.candidates[key], keys, values) / self.layers
