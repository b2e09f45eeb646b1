"""What the groups of a run's candidates cost under a recipe's objective, as shares of the uncompressed attention."""

from __future__ import annotations

from dataclasses import dataclass

from ..allocation.priced_bits import Parts
from ..calibration.run import Run
from ..format.columns import Columns
from ..format.layout import Domain
from ..prediction.devices import find_device
from ..prediction.objective import Objective
from ..prediction.tiling import Latent
from ..recipe import Recipe


@dataclass(frozen=True)
class RunCosts:
    """Costs of one group of a candidate, by sides for allocating and whole for counting what a plan saves.

    kinds: of each candidate its domain, whether its key basis is folded, its group size, and the positions of the
    blocks that its keys are turned within. joint: those whose keys and values share a latent. layers: all alike.
    """

    objective: Objective
    kinds: dict[str, tuple[Domain, bool, int, int]]
    layers: int
    joint: frozenset[str] = frozenset()

    @classmethod
    def of(cls, run: Run, recipe: Recipe) -> RunCosts:
        """Raises RecipeError if the objective's device is not known."""
        settings = recipe.objective
        device = find_device(settings.device, settings.device_file)
        objective = Objective.from_settings(settings, device, run.shape, int(run.info["element_bytes"]))
        kinds: dict[str, tuple[Domain, bool, int, int]] = {
            key: (c.domain, bool(run.info["folded_keys"][key]), c.group_size, c.rope_block)
            for key, c in run.candidates.items()
        }
        joint = frozenset(key for key, candidate in run.candidates.items() if candidate.joint)
        return cls(objective, kinds, run.shape.num_layers, joint)

    def sides(self, key: str, ranks: list[int]) -> tuple[list[float], list[float]]:
        """Of the key side and of the value side at each rank."""
        domain, folded, size, rope_block = self.kinds[key]
        keys = [self.objective.key_cost(domain, folded, size, rank, rope_block) / self.layers for rank in ranks]
        return keys, [self.objective.value_cost(size, rank) / self.layers for rank in ranks]

    def group(self, key: str, qk: Latent, v: Latent | None) -> float:
        """Of a whole group; v is None for values in the key latent."""
        domain, folded, size, rope_block = self.kinds[key]
        return self.objective.group_cost(domain, folded, size, qk, v, rope_block) / self.layers

    def parts(self, key: str, columns: Columns) -> tuple[Parts, ...]:
        """Reading the cache and all else with these columns: of the key side and of the value side, or of both as one
        where they are joint.
        """
        domain, folded, size, rope_block = self.kinds[key]
        keys = self.objective.key_parts(domain, folded, size, columns, rope_block)
        values = self.objective.value_parts(size, columns, key in self.joint)
        return ((keys[0] + values[0], keys[1] + values[1]),) if key in self.joint else (keys, values)
