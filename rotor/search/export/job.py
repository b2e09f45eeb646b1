"""An export's request, checked against the run and its model before any work is done."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...calibration.form import block_warning, stays_after_rope
from ...calibration.run import Run
from ...checkpoint.families import Family, find_family
from ...checkpoint.files import file_sha256
from ...checkpoint.output_folder import OutputFolder
from ...checkpoint.publishing import check_space
from ...errors import CheckpointError, UsageError
from ...models.sequences import context_tokens
from ...models.source import Checkpoint
from ...recipe.recipe import Recipe
from ...recipe.requests import ExportRequest
from ...recipe.sections import Exact

if TYPE_CHECKING:
    from ...policies import Policy

log = logging.getLogger("rotor")


@dataclass(frozen=True)
class ExportJob:
    """An export with everything that is known before any work.

    recipe: the run's, with the request's overrides. context_tokens: length of the sequence whose bytes are counted.
    policy: the policy that keeps the cache, if any. warnings: what is said when all is done.
    """

    request: ExportRequest
    run: Run
    recipe: Recipe
    checkpoint: Checkpoint
    out: OutputFolder
    context_tokens: int
    policy: Policy | None = None
    warnings: tuple[str, ...] = ()

    @classmethod
    def check(cls, request: ExportRequest) -> ExportJob:
        """Raises RotorError where the request cannot be carried out; see export."""
        opened = Run.open(request.run)
        out = OutputFolder.at(request.out, "checkpoint")
        recipe = request.override(opened.recipe)
        _check_recipe(recipe, opened, request)
        out.check(request.overwrite, [opened.model_folder, opened.folder])
        checkpoint = Checkpoint(opened.fetch_model())
        policy = None if request.cache is None else _checked_policy(request.cache, recipe, checkpoint, request)
        if policy is not None and recipe.exact.newest:
            log.info(
                "cache policy %s keeps rows alone: no token is kept exactly beside them. Bits of this run go by what "
                "is read beside exact tokens; for this policy calibrate with --set exact.first=0 --set exact.newest=0",
                policy.method,
            )
            recipe = replace(recipe, exact=Exact())
        tokens = context_tokens(checkpoint.config, request.context)
        warnings = [block_warning(opened.form, recipe.exact.tokens)]
        if request.accuracy is not None:
            warnings.append(_beyond_calibration(opened, recipe, tokens))
        job = cls(request, opened, recipe, checkpoint, out, tokens, policy, tuple(filter(None, warnings)))
        check_space(out.path, job.needed_bytes)
        job.check_nothing_added()
        return job

    @property
    def unmeasured(self) -> str:
        """Why the accuracy of what is written is not measured; empty where it is."""
        if not self.request.measure:
            return "the export was asked not to measure it (--no-measure)"
        if self.request.accuracy is None and self.checkpoint.tokenizer is None:
            return "the model has no tokenizer to read text with"
        return ""

    @property
    def sources(self) -> list[Path]:
        """Folders that must not be written to."""
        return [self.checkpoint.folder, self.run.folder]

    @property
    def needed_bytes(self) -> int:
        """Disk that has to be free before anything is written: about the size of the source.

        A checkpoint without weights is no larger than the bases of the run.
        """
        if self.request.without_weights:
            return sum(path.stat().st_size for path in self.run.folder.glob("bases/*")) + (1 << 20)
        return int(self.checkpoint.total_bytes() * 1.1) + (1 << 20)

    @property
    def family(self) -> Family:
        return find_family(self.checkpoint.config)

    def check_nothing_added(self) -> None:
        """Raises CheckpointError if the run's model has a file that was not there when it was calibrated."""
        added = sorted({*self.checkpoint.files, *self.checkpoint.other_files()} - self._recorded.keys())
        if added:
            raise CheckpointError(
                f"{self.checkpoint.folder / added[0]}: was added since calibration.", "Calibrate again, or remove it."
            )

    @property
    def _recorded(self) -> dict[str, str]:
        model = self.run.info["model"]
        return {**model["shards"], **model["files"]}

    def check_unchanged(self, file: str) -> None:
        """Raises CheckpointError if a file of the run's model is not the one that was calibrated."""
        path = self.checkpoint.folder / file
        if not path.is_file() or self._recorded.get(file) != file_sha256(path):
            raise CheckpointError(
                f"{self.checkpoint.folder / file}: changed since calibration.", "Calibrate again, or restore the file."
            )


def _beyond_calibration(run: Run, recipe: Recipe, context: int) -> str:
    """Warning where keys stay after RoPE and sequences are longer than the rows that they were fitted to.

    Slow planes go on turning behind the last calibrated position, where codes clip what they never saw. Ranks, as the
    papers choose them, lose less there: a warning.

    Raises:
        UsageError: no target can be promised, as keys are codes.
    """
    calibrated = run.info["tokens"]["seq_len"]
    if not stays_after_rope(run.form, run.shape) or context <= calibrated:
        return ""
    what = f"keys stay after RoPE, calibrated on rows of {calibrated} tokens"
    if not recipe.coded:
        return f"{what}: behind them the accuracy that is measured here is not promised"
    raise UsageError(
        f"{what}: no accuracy can be promised for sequences of {context}, where keys have turned further.",
        f"Calibrate again with --set tokens.seq_len={context} --set evaluation.seq_len={context}, or promise less: "
        f"--context {calibrated}.",
    )


def _check_recipe(recipe: Recipe, run: Run, request: ExportRequest) -> None:
    """Raises UsageError where the recipe does not fit the run or the goal."""
    bits = f"codes.bits {list(recipe.codes.bits)}"
    method = f"ranks.method {recipe.ranks.method}"
    if recipe.coded and not run.has_codes:
        raise UsageError(
            f"{bits}: {run.folder} was calibrated without codes.",
            f"Calibrate again with --set codes.bits={json.dumps(recipe.codes.bits)}.",
        )
    if request.removal_rate is not None and (recipe.coded or recipe.ranks.method != "removal-rate"):
        what = bits if recipe.coded else method
        raise UsageError(
            f"--removal-rate: {what} does not choose ranks by a removal rate.", "Give --accuracy or --compression."
        )
    if not request.measure and "sensitivities" in recipe.rank_needs:
        raise UsageError(
            f"--no-measure: {method} chooses ranks by what is measured of every layer.",
            "Leave --no-measure out, or give another method (see `rotor recipes`) with --set ranks.method=NAME.",
        )


def _checked_policy(name: str, recipe: Recipe, checkpoint: Checkpoint, request: ExportRequest) -> Policy | None:
    """The cache policy of that name; None for `none`.

    Raises:
        UsageError: it cannot serve the model or its rows.
    """
    from ...policies import Tiers, find_policy

    policy = find_policy(name)
    if policy is None:
        return None
    count = policy.check_config(checkpoint.config)
    if not policy.needs_samples:
        policy.layers(count)  # what it cannot serve is said now
    elif not request.measure:
        raise UsageError(
            f"--no-measure: cache policy {policy.method} is found by running the compressed model over text.",
            "Leave --no-measure out, or take another --cache.",
        )
    policy.check_rows(recipe.coded, recipe.groups.domain == "post")
    if isinstance(policy, Tiers) and policy.search and request.accuracy is None:
        log.warning(
            "the ratios of cache policy %s are taken as they stand; --accuracy A searches those that keep A", name
        )
        return replace(policy, search=False)
    return policy
