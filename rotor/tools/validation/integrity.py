"""Checks of a compressed checkpoint that need no forward pass: its files against rotor.json and against each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ...checked import JsonObject
from ...checkpoint.families import family_of
from ...checkpoint.files import tensor_sha256
from ...checkpoint.manifest import Manifest
from ...checkpoint.sizes import CacheSize
from ...checkpoint.tensors import layer_tensors
from ...errors import CheckpointError, RotorError
from ...models.compressed import CompressedCheckpoint
from ...policies import packed_size, read_stored
from ...progress import Progress
from ...search.evaluation.accuracy import Accuracy

OWN = ("q_proj.", "k_proj.", "v_proj.", "o_proj.", "key_", "query_")
"""Prefixes of the names of an attention layer's tensors."""


ROUNDED = 1e-6
"""rotor.json has six digits of a compression."""


@dataclass(frozen=True)
class Check:
    """One check: `status` is `pass`, `fail` or `skipped`."""

    name: str
    status: str
    detail: str


@dataclass
class Validation:
    """The result of validating one folder.

    summary: what the table shows: compression, bytes, accuracy, its interval and target, as JSON has them.
    accuracy: what was measured; None where nothing was.
    """

    folder: Path
    checks: list[Check] = field(default_factory=list)
    summary: JsonObject = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    accuracy: Accuracy | None = None

    @property
    def damaged(self) -> bool:
        """Tell whether a check other than the accuracy target failed."""
        return any(c.status == "fail" and c.name != "accuracy target" for c in self.checks)

    @property
    def target_met(self) -> bool:
        return not any(c.status == "fail" and c.name == "accuracy target" for c in self.checks)

    def to_dict(self) -> dict[str, object]:
        return {
            "folder": str(self.folder),
            "ok": not self.damaged and self.target_met,
            "checks": [asdict(c) for c in self.checks],
            "summary": self.summary,
            "seconds": self.seconds,
        }

    def add(self, name: str, ok: bool, detail: str) -> None:
        self.checks.append(Check(name, "pass" if ok else "fail", detail))

    def add_problems(self, name: str, problems: list[str], fine: str) -> None:
        """A check that passes without problems; shows the first three."""
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        self.add(name, not problems, "; ".join(problems[:3]) + more if problems else fine)

    def skip(self, name: str, why: str) -> None:
        self.checks.append(Check(name, "skipped", why))


def check_integrity(result: Validation, progress: Progress) -> CompressedCheckpoint:
    """Add the checks that need no forward pass to `result`; returns the folder, opened.

    Raises:
        CheckpointError: the folder is not a compressed checkpoint or cannot be opened at all.
    """
    checkpoint = CompressedCheckpoint(result.folder)
    with progress.task("integrity", checkpoint.total_bytes(), "B") as advance:
        _check_manifest(result)
        _check_tensors(result, checkpoint, advance)
    try:
        _ = checkpoint.kernel_config  # raises where a model with these layouts cannot be run so
        problem = _tensor_problem(checkpoint)
    except RotorError as error:
        problem = error.message
    result.add("layouts agree", not problem, problem or "config.json, kernel_config.json and the tensors")
    if not problem:
        _check_sizes(result, checkpoint)
    return checkpoint


def _check_tensors(result: Validation, checkpoint: CompressedCheckpoint, advance: Callable[[float], None]) -> None:
    """Check tensors against rotor.json: names, shapes, dtypes, hashes, finiteness."""
    recorded = checkpoint.report["tensors"]
    stored = set(checkpoint.names)
    problems = [f"{name} is missing" for name in sorted(set(recorded) - stored)]
    problems += [f"{name} in {checkpoint.file_of[name]} is unexpected" for name in sorted(stored - set(recorded))]
    result.add_problems("tensor names", problems, f"{len(recorded)} tensors")
    wrong: dict[str, list[str]] = {"tensor shapes and dtypes": [], "tensor hashes": [], "tensors finite": []}
    for file in checkpoint.files:
        for name in checkpoint.names_in(file):
            entry = recorded.get(name)
            if entry is None:
                continue
            try:
                tensor = checkpoint.tensor(name)
            except RotorError as error:
                wrong["tensors finite"].append(error.message)
                continue
            expected = (entry["shape"], entry["dtype"], entry["file"])
            got = (list(tensor.shape), str(tensor.dtype).removeprefix("torch."), checkpoint.file_of[name])
            if got != expected:
                text = "{1} {0} in {2}, expected {4} {3} in {5}".format(*got, *expected)
                wrong["tensor shapes and dtypes"].append(f"{name} is {text}")
            elif tensor_sha256(tensor) != entry["sha256"]:
                wrong["tensor hashes"].append(f"{name} in {file} differs from its SHA-256")
        advance(checkpoint.bytes_of(file))
    for check, problems_of_check in wrong.items():
        result.add_problems(check, problems_of_check, f"{len(recorded)} tensors")


def _check_sizes(result: Validation, checkpoint: CompressedCheckpoint) -> None:
    """Check the sizes that rotor.json claims against those of the layouts in the dtype that is served, or of what a
    stored cache policy keeps of rows of these layouts."""
    report = checkpoint.report
    tokens = report["kv_bytes_of_sequence"]["tokens"]
    policy = read_stored(getattr(checkpoint.section, "cache", None))
    if policy is not None:
        size = packed_size(policy, checkpoint.layouts, checkpoint.shape, checkpoint.dtype, tokens)
    else:
        size = CacheSize.of_layouts(checkpoint.layouts, checkpoint.shape, checkpoint.dtype.itemsize)
    whose = "the layouts'" if policy is None else f"cache policy {policy.method}'s"
    claimed, removed = report["compression"]["stored"], size.removed(tokens)
    problems = [] if abs(claimed - removed) <= ROUNDED else [f"compression {claimed:.6f}, {whose} is {removed:.6f}"]
    stated = report["kv_bytes_per_token"]
    if stated != size.info:
        problems.append(f"{stated} KV bytes per token, {whose} are {size.info}")
    if report["kv_bytes_of_sequence"] != size.of_sequence(tokens):
        problems.append(f"{report['kv_bytes_of_sequence']} of a sequence, {whose} are {size.of_sequence(tokens)}")
    dtype = str(checkpoint.dtype).removeprefix("torch.")
    what = "the rows" if policy is None else "the cache"
    fine = f"{removed:.4f} of {what} removed, in bytes of a cache in {dtype}"
    result.add_problems("sizes in rotor.json", problems, fine)


def _check_manifest(result: Validation) -> None:
    """Check every file against manifest.json."""
    try:
        manifest = Manifest.read(result.folder)
    except CheckpointError as error:
        result.add("files", False, error.message)
        return
    problems = [f"{name} {problem}" for name, problem in manifest.problems().items()]
    result.add_problems("files", problems, f"{len(manifest.files)}, as manifest.json says")
    result.summary["digest"] = manifest.digest


def _tensor_problem(checkpoint: CompressedCheckpoint) -> str:
    """The first tensor of a layer's attention that is not what its layout says, or nothing."""
    family = family_of(checkpoint.config)
    biases = checkpoint.section.biases
    for index, layout in enumerate(checkpoint.layouts):
        prefix = family.stored_prefix(index, checkpoint.names)
        expected = layer_tensors(layout, checkpoint.shape.layer(index), biases)
        for name, spec in expected.items():
            if prefix + name not in checkpoint.names:
                return f"config.json, layer {index}: {name} is missing"
            if checkpoint.shape_of(prefix + name) != list(spec.shape):
                return f"config.json, layer {index}: {name} is not {list(spec.shape)} as its layout says"
        prefixes = tuple(prefix + name for name in (*OWN, *family.consumed))  # others are buffers of old files
        known = {*expected, *(f"{norm}.weight" for norm in family.norms)}
        unexpected = (n for n in sorted(checkpoint.names) if n.startswith(prefixes) and n[len(prefix) :] not in known)
        for stray in unexpected:
            return f"config.json, layer {index}: {stray} is not in its layout"
    return ""
