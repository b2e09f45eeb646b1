"""Reading source checkpoints and writing output folders: the only module that touches model files."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig

from .errors import CheckpointError, NumericsError, RotorError, UnsupportedModelError, UsageError
from .file_names import ADDED
from .json_files import read_json
from .source_config import check_config, check_generation_config
from .tokenizer import load_tokenizer
from .typed import shorten

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
NUMBERED = re.compile(r"(?P<stem>.*)-\d+-of-(?P<total>\d+)\.safetensors")
"""Names of the shards of one model."""

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class Checkpoint:
    """A folder with config.json and safetensors shards, opened read-only; tensors are read when asked for.

    Raises:
        CheckpointError: no model folder, a missing, truncated or unreadable shard, or a pickle checkpoint.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise CheckpointError(f"{folder}: no such folder.", "Give the folder of a downloaded model.")
        _refuse_other_formats(self.folder)
        self.config_dict = read_json(self.folder / "config.json", "Give a folder that save_pretrained wrote.")
        check_config(self.folder / "config.json", self.config_dict)
        self.file_of = self._locate()
        self._handles: dict[str, Any] = {}
        self._check_index()

    @property
    def files(self) -> list[str]:
        """Shard file names, sorted."""
        return sorted(set(self.file_of.values()))

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.file_of)

    @cached_property
    def config(self) -> Any:
        """The transformers config; code in the folder is never run."""
        return config_of(self.folder)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer in the folder, or None; tried in a child process before (see rotor.tokenizer)."""
        return load_tokenizer(self.folder, self.config.vocab_size)

    def tensor(self, name: str) -> Tensor:
        """Read one tensor.

        Raises:
            CheckpointError: there is none of that name.
            NumericsError: it has a NaN or Inf.
        """
        tensor = self.unchecked_tensor(name)
        if not is_finite(tensor):
            bad = int((~torch.isfinite(tensor.float())).sum())
            raise NumericsError(
                f"{self.folder / self.file_of[name]}: tensor {name} has {bad} elements that are NaN or Inf.",
                "The source checkpoint is damaged; download it again.",
            )
        return tensor

    def unchecked_tensor(self, name: str) -> Tensor:
        """Read one tensor that has been looked through before."""
        if name not in self.file_of:
            raise CheckpointError(
                f"{self.folder}: tensor {name} is missing; the shards hold {len(self.file_of)} tensors.",
                "Check that config.json belongs to these weights.",
            )
        file = self.file_of[name]
        try:
            return self._open(file).get_tensor(name)
        except (SafetensorError, OSError, RuntimeError, ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{self.folder / file}: tensor {name}: {_one_line(error)}") from error

    def meta_tensor(self, name: str) -> Tensor:
        """The shape and dtype of a tensor, on the meta device; only its header is read."""
        stored = self._open(self.file_of[name]).get_slice(name)
        return torch.empty(stored.get_shape(), dtype=stored[:0].dtype if stored.get_shape() else None, device="meta")

    def release(self) -> None:
        """Close the shards, so that what was read of them no longer counts as this process's memory."""
        self._handles.clear()

    def shape_of(self, name: str) -> list[int]:
        return list(self._open(self.file_of[name]).get_slice(name).get_shape())

    def stored_names(self, file: str) -> list[str]:
        """Names of all tensors in a shard, also those that the index does not know."""
        return sorted(self._open(file).keys())

    def names_in(self, file: str) -> list[str]:
        return sorted(name for name, where in self.file_of.items() if where == file)

    def other_hashes(self) -> dict[str, str]:
        """SHA-256 by name of what a run depends on beside the shards: config.json, the index, and the sidecars."""
        own = [self.folder / name for name in ("config.json", INDEX_FILE)]
        return {path.name: file_sha256(path) for path in (*own, *self.sidecars()) if path.is_file()}

    def sidecars(self) -> list[Path]:
        """Files to take along unchanged: everything but the weights, the index and config.json."""
        skip = {"config.json", INDEX_FILE, *self.files}
        return sorted(
            p
            for p in self.folder.iterdir()
            if p.is_file()
            and self._belongs(p)
            and p.name not in skip
            and p.suffix not in (".safetensors", *PICKLE_SUFFIXES)
            and not p.name.startswith(".")
            and p.name not in ADDED
        )

    def _belongs(self, path: Path) -> bool:
        """Not a link to somewhere else, whose content a published checkpoint would give away.

        Links to where config.json lies too are those of the hub's cache, or of somebody who linked a whole model.
        """
        places = {self.folder.resolve(), (self.folder / "config.json").resolve().parent}
        return path.resolve().parent in places

    def total_bytes(self) -> int:
        return sum((self.folder / file).stat().st_size for file in self.files)

    def _check_index(self) -> None:
        """The index names what the shards hold, no more and no less: transformers reads all that is in them."""
        holder: dict[str, str] = {}
        for file in self.files:
            for name in self._open(file).keys():  # noqa: SIM118 (not a dict)
                if name in holder:
                    raise CheckpointError(
                        f"{self.folder}: tensor {name} is in {holder[name]} and again in {file}.",
                        "Only one of them can be meant; download the model again.",
                    )
                holder[name] = file
        for name, file in self.file_of.items():
            if holder.get(name) != file:
                where = f"it is in {holder[name]}" if name in holder else "no shard has it"
                raise CheckpointError(
                    f"{self.folder / file}: tensor {name} is missing, but {INDEX_FILE} names it; {where}.",
                    "Download it again.",
                )
        unnamed = sorted(holder.keys() - self.file_of.keys())
        if unnamed:
            raise CheckpointError(
                f"{self.folder / holder[unnamed[0]]}: tensor {unnamed[0]} is not in the index ({INDEX_FILE}), though "
                "transformers would load it.",
                "Index and shards are not of one model; download it again.",
            )

    def _locate(self) -> dict[str, str]:
        """Tensor name -> shard file name."""
        index = self.folder / INDEX_FILE
        if index.is_file():
            weight_map = read_json(index, "Download it again.").get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise CheckpointError(f"{index}: no weight_map in it.", "Download it again.")
            for name, file in weight_map.items():
                if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
                    raise CheckpointError(
                        f"{index}: {name} is in {shorten(file)}, expected a file name in this folder, *.safetensors."
                    )
                if not (self.folder / file).is_file():
                    raise CheckpointError(f"{self.folder / file}: missing shard (holds {name}).", "Download it again.")
            if (self.folder / SINGLE_FILE).is_file() and set(weight_map.values()) != {SINGLE_FILE}:
                raise CheckpointError(
                    f"{self.folder}: {SINGLE_FILE}, which transformers would read, beside an index of other files.",
                    f"Remove the one that is not meant: {SINGLE_FILE}, or {INDEX_FILE} with its shards.",
                )
            self._check_numbered(set(weight_map.values()))
            return dict(weight_map)
        single = self.folder / SINGLE_FILE
        if single.is_file():
            with _safetensors(single) as handle:
                return {name: SINGLE_FILE for name in handle.keys()}  # noqa: SIM118 (not a dict)
        pickles = sorted(p.name for p in self.folder.iterdir() if p.suffix in PICKLE_SUFFIXES)
        if pickles:
            raise CheckpointError(
                f"{self.folder / pickles[0]}: a pickle checkpoint, which can run code when loaded; rotor refuses it.",
                "Convert it with transformers' save_pretrained, which writes safetensors.",
            )
        raise CheckpointError(
            f"{self.folder}: no {SINGLE_FILE} and no {INDEX_FILE}.", "Give a folder that save_pretrained wrote."
        )

    def _check_numbered(self, indexed: set[str]) -> None:
        """No shard of a numbered series is left out of the index: what it holds would be made up at random."""
        series = {(match["stem"], match["total"]) for file in indexed if (match := NUMBERED.fullmatch(file))}
        for path in sorted(self.folder.glob("*.safetensors")):
            match = NUMBERED.fullmatch(path.name)
            if match and (match["stem"], match["total"]) in series and path.name not in indexed:
                raise CheckpointError(
                    f"{path}: a shard that is not in the index ({INDEX_FILE}).",
                    "Index and shards are not of one model; download it again.",
                )

    def _open(self, file: str) -> Any:
        if file not in self._handles:
            self._handles[file] = _safetensors(self.folder / file)
        return self._handles[file]


def config_of(folder: Path) -> Any:
    """The transformers config of a model folder; code in it is never run.

    Raises:
        CheckpointError: config.json is missing or not one that transformers knows, or what it or generation_config.json
            says is refused (see rotor.source_config).
    """
    check_config(folder / "config.json", read_json(folder / "config.json"))
    generation = folder / "generation_config.json"
    if generation.is_file():
        check_generation_config(generation, read_json(generation))
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except RotorError:
        raise
    except Exception as error:  # whatever the config classes of transformers make of values that they do not expect
        raise CheckpointError(
            f"{folder / 'config.json'}: transformers cannot read it: {_one_line(error)}",
            "Check config.json, or install a version of transformers that knows this model.",
        ) from error


def _refuse_other_formats(folder: Path) -> None:
    """Raises UnsupportedModelError for folders whose weights are not a model's own: adapters and quantised formats."""
    for name, what, hint in (
        (
            "adapter_config.json",
            "a LoRA adapter, not a whole model",
            "Merge it into its base model (peft's merge_and_unload, then save_pretrained) and give that folder.",
        ),
        ("quantize_config.json", "an already quantised checkpoint (GPTQ or AWQ)", "Give the original checkpoint."),
        ("hf_quant_config.json", "an already quantised checkpoint (ModelOpt)", "Give the original checkpoint."),
    ):
        if (folder / name).is_file():
            raise UnsupportedModelError(f"{folder / name}: {what}, which rotor cannot compress.", hint)
    if not (folder / "config.json").is_file() and any(folder.glob("*.gguf")):
        raise UnsupportedModelError(
            f"{folder}: a GGUF model, which rotor cannot compress.", "Give the original safetensors checkpoint."
        )


def _safetensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path}: truncated or not a safetensors file ({path.stat().st_size} bytes): {_one_line(error)}",
            "Download it again.",
        ) from error


def write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n", "utf-8")


def write_shard(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write one safetensors file of a checkpoint."""
    write_tensors(path, {name: t.contiguous() for name, t in sorted(tensors.items())}, {"format": "pt"})


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write one safetensors file, with the permissions of any new file: safetensors' own are for its owner alone."""
    with path.open("wb") as file:
        mode = os.fstat(file.fileno()).st_mode
    save_file(tensors, path, metadata=metadata)
    path.chmod(mode)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def tensor_sha256(tensor: Tensor) -> str:
    """Hash of the elements in row-major order, as the safetensors file stores them."""
    return hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy().data).hexdigest()


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor has neither NaN nor Inf. Its extremes show both, far faster than `isfinite` does."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    if tensor.element_size() == 1:  # torch has no extremes for numbers of 8 bits
        tensor = tensor.float()
    return all(math.isfinite(extreme) for extreme in torch.aminmax(tensor))


@contextmanager
def staged_folder(out: Path, overwrite: bool, sources: list[Path], needed_bytes: int) -> Iterator[Path]:
    """A folder that appears whole or not at all: written beside `out`, flushed to disk, then renamed.

    Args:
        out: where it is to appear.
        overwrite: allow a non-empty folder there; it is replaced only when the new one is complete.
        sources: folders that must not be written to; `out` in or equal to one of them is refused.
        needed_bytes: checked against the free disk space first.
    Raises:
        UsageError: `out` must not be written. CheckpointError: the disk is too small or fails.
    """
    out = Path(os.path.abspath(out))
    check_writable(out, overwrite, sources)
    parent = out.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _clean_leftovers(out)
    except OSError as error:
        raise CheckpointError(f"{parent}: cannot be written ({error.strerror}).", "Choose another place.") from error
    check_space(out, needed_bytes)
    staging = _staging(out)
    try:
        staging.mkdir()
        yield staging
        publish_folder(staging, out)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{out}: writing failed: {_one_line(error)}", "Nothing was changed there.") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def check_writable(out: Path, overwrite: bool, sources: list[Path]) -> None:
    """Raises UsageError where an output folder must not be written."""
    resolved = out.resolve()
    for source in sources:
        if resolved == source.resolve() or source.resolve() in resolved.parents:
            raise UsageError(f"{out}: lies in {source}, which rotor reads from.", "Choose a folder outside of it.")
        linked = source.iterdir() if source.is_dir() else ()
        for path in (source, *linked):  # files of a source may be links to where they really are
            if resolved in path.resolve().parents:
                raise UsageError(f"{out}: contains {path}, which rotor reads from.", "Choose another folder.")
    if out.is_file():
        raise UsageError(f"{out}: is a file.", "Choose another name.")
    if out.is_dir() and any(out.iterdir()) and not overwrite:
        raise UsageError(f"{out}: exists and is not empty.", "Give --overwrite to replace it.")


def check_space(out: Path, needed_bytes: int) -> None:
    """Raises CheckpointError if the disk that `out` is to lie on has less free space than needed."""
    place = Path(os.path.abspath(out)).parent
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed_bytes:
        raise CheckpointError(
            f"{place}: {free / 1e9:.2f} GB free, {needed_bytes / 1e9:.2f} GB needed.", "Free space, or choose another."
        )


def _staging(out: Path) -> Path:
    """Where this process writes what is to become `out`."""
    return out.with_name(f".{out.name}.rotor-{os.getpid()}")


def publish_folder(staging: Path, out: Path) -> None:
    """Flush a folder that lies beside `out` to disk and rename it to that, in place of what is there."""
    _clean_leftovers(out)
    for path in sorted(staging.rglob("*")):
        if path.is_file():
            sync(path)
    sync(staging)
    if out.is_dir():
        old = _staging(out).with_name(f"{_staging(out).name}-old")
        try:
            os.rename(out, old)
            os.rename(staging, out)
        except BaseException:  # also an interruption between the two
            if old.exists() and not out.exists():
                os.rename(old, out)
            raise
        gone = _staging(out)  # a name that nobody restores, since from here on it may be there in part
        os.rename(old, gone)
        shutil.rmtree(gone, ignore_errors=True)
    else:
        os.rename(staging, out)
    sync(out.parent)


def _clean_leftovers(out: Path) -> None:
    """Remove what a killed process left beside `out`; put the old folder back if it was killed between two renames."""
    for path in out.parent.glob(f".{out.name}.rotor-*"):
        pid = path.name.rpartition("rotor-")[2].removesuffix("-old")
        if not pid.isdigit() or _is_alive(int(pid)):
            continue
        if path.name.endswith("-old") and not out.exists():
            os.rename(path, out)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or repr(error)
    if isinstance(error, RotorError):
        text = error.message
    return text if len(text) <= 300 else text[:297] + "..."
