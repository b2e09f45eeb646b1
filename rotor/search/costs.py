"""What the groups of a run's candidates cost under a recipe's objective, as shares of the uncompressed attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..calibration.run import Run
from ..format.channels import Latent, Numbers
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
        found = [
            [cost(self.candidates[key], Numbers(rank)) / self.layers for rank in ranks]
            for cost in (self.objective.key_cost, self.objective.value_cost)
        ]
        return found[0], found[1]

    def group(self, key: str, keys: Latent, values: Latent | None) -> float:
        """Of a whole group; values is None where they are in the key latent."""
        return self.objective.group_cost(self.candidates[key], keys, values) / self.layers
