"""Benchmarks of the source and of a compressed checkpoint beside each other, over the same documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ...checkpoint.files import write_json
from ...checkpoint.output_folder import check_apart
from ...errors import UsageError
from ...models.compressed import CompressedCheckpoint
from ...models.hardware import DevicePlan
from ...models.source import Checkpoint
from ...policies import Policy, cache_policy
from ...progress import Progress
from ...recipe.sections import Evaluation
from ...runtime.decoded import decoding_without_cache
from ...search.evaluation.tasks import Paired, TaskSuite, paired

COMPARISON = "comparison.json"


def compare_tasks(
    checkpoint: CompressedCheckpoint,
    source: Checkpoint,
    devices: DevicePlan,
    policy: Policy | None,
    names: Sequence[str],
    lengths: Sequence[int],
    spec: Evaluation,
    out: Path,
    progress: Progress,
) -> list[Paired]:
    """Ask the source and the checkpoint, and write the files of both, and COMPARISON.

    What a model generates follows a prompt as it is served. Likelihoods of given texts come from one pass, which has
    each token as decoding has it.

    Args:
        policy: of the checkpoint's cache. names, lengths: see TaskSuite. spec: only lm_eval_limit and seed matter.
        out: a new folder.
    Raises:
        UsageError: weights are read layer by layer, or `out` is there. DataError: a task cannot be loaded or run.
    """
    if devices.streamed:
        raise UsageError("--tasks: models generate, which needs all weights in memory.", "Give --offload never.")
    check_apart(out, [source.folder, checkpoint.folder])
    report = checkpoint.report
    scores = {}
    removed = report["compression"]["stored"]
    with TaskSuite.results(out) as folder:
        suite = TaskSuite(names, source.tokenizer, lengths, spec.lm_eval_limit, spec.seed)
        for model, model_policy in ((source, None), (checkpoint, policy)):
            about = {"pretrained": str(model.folder.resolve()), "dtype": str(devices.dtype).removeprefix("torch.")}
            about |= {} if model_policy is None else {"cache": f"rotor-{model_policy.method}"}
            network = devices.weights(model).model
            with (
                progress.task(f"tasks of {model.folder.name}", None, ""),
                cache_policy(network, model_policy),
                decoding_without_cache(network),
            ):
                scores[model.folder] = suite.measure(network, about, folder)
        rows = paired(*scores.values())
        comparison = {
            "before": str(source.folder.resolve()),
            "after": str(checkpoint.folder.resolve()),
            "compression": removed,
            "kv_bytes_per_token": report["kv_bytes_per_token"],
            "cache": None if policy is None else policy.as_dict(),
            "results": [asdict(row) for row in rows],
        }
        write_json(folder / COMPARISON, comparison)
    return rows
