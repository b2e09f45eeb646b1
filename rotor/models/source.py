"""Read checkpoints: shards, configuration, tokenizer, and the files beside them."""

from __future__ import annotations

import os
import re
import shlex
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig

from ..checked import nearest_name, shorten
from ..checkpoint.files import INFO, file_sha256, read_json
from ..errors import CheckpointError, MissingError, NumericsError, RotorError, UnsupportedModelError, UsageError
from ..numerics import is_finite
from .source_config import check_config
from .tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DOWNLOAD_AGAIN = "Download it again: index and shards are not of one model."
GIVE_ORIGINAL = "Give the original safetensors checkpoint."
FROM_GGUF = (
    "Give the original safetensors checkpoint, or convert it: pip install gguf accelerate, then in Python "
    "AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=NAME).save_pretrained(OUT), and the tokenizer likewise."
)
CHANGED = " changed since calibration"
"""End of what `Checkpoint.changes` says of a file whose content is another."""

SIDECAR_NAMES = re.compile(
    r"tokenizer(_config)?\.json|tokenizer\.model(\.v\d+)?|tekken\.json|[\w.-]*\.tiktoken"
    r"|vocab\.(json|txt|bpe)|merges\.txt|bpe\.codes|encoder\.json"
    r"|(spiece|sentencepiece(\.bpe)?)\.model"
    r"|special_tokens_map\.json|added_tokens\.json"
    r"|generation_config\.json|chat_template\.(json|jinja)"
    r"|((image_|video_|audio_)?(pre)?processor_config|processor_config)\.json"
    r"|(LICEN[SC]E|NOTICE|COPYING|COPYRIGHT|USE_POLICY|AUTHORS)([_-][\w-]+)?(\.(txt|md|rst|pdf))?",
    re.IGNORECASE,
)
"""Files beside the weights that belong to a model: tokenizer, templates, generation settings, licence. Only these are
copied into a checkpoint, so that no key, backup or second copy of the weights that happens to lie in the folder is
published with it."""

OTHER_FORMATS = {
    "adapter_config.json": ("a LoRA adapter, not a whole model", "Give its base model merged (merge_and_unload)."),
    "quantize_config.json": ("an already quantised checkpoint (GPTQ or AWQ)", GIVE_ORIGINAL),
    "hf_quant_config.json": ("an already quantised checkpoint (ModelOpt)", GIVE_ORIGINAL),
}
"""Files that show a format rotor cannot compress: what the folder is, and what to do."""


class Checkpoint:
    """A folder with config.json and safetensors shards, opened read-only; tensors are read when asked for.

    file_of: shard file name by tensor name.
    names: tensor names. unused: names that are left out, of scales by which an engine would keep the cache.
    files: shard file names, sorted.

    Raises:
        CheckpointError: no model folder, a missing, truncated or unreadable shard, or a pickle checkpoint.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if self.folder.suffix == ".gguf" and self.folder.is_file():
            raise UnsupportedModelError(f"{folder}: a GGUF model, which rotor cannot compress.", FROM_GGUF)
        if not self.folder.is_dir():
            said = "is a file" if self.folder.exists() else "no such folder"
            raise MissingError(f"{folder}: {said}.", "Give the folder of a downloaded model.")
        _check_files(self.folder)
        _check_no_run(self.folder)
        self.config_dict = read_json(self.folder / "config.json", "Give a folder that save_pretrained wrote.")
        check_config(self.folder / "config.json", self.config_dict)
        self.unused: frozenset[str] = frozenset()
        self._handles: dict[str, safe_open] = {}
        self._located = self._locate()

    @property
    def file_of(self) -> dict[str, str]:
        return self._located

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(self.file_of)

    @cached_property
    def files(self) -> list[str]:
        return sorted(set(self.file_of.values()))

    @cached_property
    def config(self) -> PreTrainedConfig:
        """The transformers config; code in the folder is never run."""
        return config_of(self.folder)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype that the model is served in, and its cache: what config.json names, else that of its tensors."""
        named = self.config.dtype
        if isinstance(named, torch.dtype):
            return named
        floating = (dtype for name in sorted(self.names) if (dtype := self.meta_tensor(name).dtype).is_floating_point)
        return next(floating, torch.float32)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer in the folder, or None; a child process tries it first."""
        return load_tokenizer(self.folder, self.config.get_text_config().vocab_size)

    def tensor(self, name: str) -> Tensor:
        """Read one tensor.

        Raises:
            CheckpointError: there is no tensor of this name.
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
        """Read one tensor whose values were checked before."""
        if name not in self.file_of:
            raise CheckpointError(
                f"{self.folder}: tensor {name} is missing; the shards hold {len(self.file_of)} tensors.",
                "Check that config.json belongs to these weights.",
            )
        file = self.file_of[name]
        try:
            return self._open(file).get_tensor(name)
        except (SafetensorError, OSError, RuntimeError, ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{self.folder / file}: tensor {name}: {one_line(error)}") from error

    def meta_tensor(self, name: str) -> Tensor:
        """Shape and dtype of a tensor, on the meta device; only the header is read."""
        stored = self._open(self.file_of[name]).get_slice(name)
        shape = stored.get_shape()
        return torch.empty(shape, dtype=stored[:0].dtype if shape else None, device="meta")

    def release(self) -> None:
        """Close the shards, so that their mapped pages no longer count as this process's memory."""
        self._handles.clear()

    def shape_of(self, name: str) -> list[int]:
        return list(self._open(self.file_of[name]).get_slice(name).get_shape())

    def names_in(self, file: str) -> list[str]:
        return sorted(name for name, where in self.file_of.items() if where == file)

    def other_hashes(self) -> dict[str, str]:
        """SHA-256 by name of the other files that a run depends on: config.json, the index, and the sidecars."""
        return {name: file_sha256(self.folder / name) for name in self.other_files()}

    def other_files(self) -> list[str]:
        """Names of the files of `other_hashes`."""
        return [
            *(name for name in ("config.json", INDEX_FILE) if (self.folder / name).is_file()),
            *sidecars(self.folder),
        ]

    def changes(self, recorded: dict[str, str]) -> list[str]:
        """List what differs from calibration: `FILE is gone`, `FILE was added`, `FILE changed`.

        Args:
            recorded: SHA-256 of every shard and of the other files at calibration, by name.
        """
        changes = []
        present = {*self.files, *self.other_files()}
        for file in sorted({*recorded, *present}):
            path = self.folder.resolve() / file
            if file not in present or not path.is_file():  # also a recorded name that leads out of the folder
                changes.append(f"{path} is gone")
            elif file not in recorded:
                changes.append(f"{path} was added since calibration")
            elif file_sha256(path) != recorded[file]:
                changes.append(f"{path}{CHANGED}")
        return changes

    def bytes_of(self, file: str) -> int:
        """Bytes of a shard file."""
        return (self.folder / file).stat().st_size

    def total_bytes(self) -> int:
        return sum(map(self.bytes_of, self.files))

    def _locate(self) -> dict[str, str]:
        """Shard file name by tensor name, for the files that transformers would read."""
        index, files = self.folder / INDEX_FILE, [SINGLE_FILE]
        if not (self.folder / SINGLE_FILE).is_file():
            if not index.is_file():
                raise self._no_weights()
            weight_map = read_json(index, DOWNLOAD_AGAIN).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise CheckpointError(f"{index}: no weight_map in it.", DOWNLOAD_AGAIN)
            for name, file in weight_map.items():
                if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
                    raise CheckpointError(
                        f"{index}: {name} is in {shorten(file)}, expected a file name in this folder, *.safetensors."
                    )
                if not (self.folder / file).is_file():
                    raise CheckpointError(f"{self.folder / file}: missing shard (holds {name}).", DOWNLOAD_AGAIN)
            files = sorted(set(weight_map.values()))
        located = {name: file for file in files for name in self._open(file).keys()}  # noqa: SIM118
        if only_cache_is_quantised(self.config_dict.get("quantization_config")):
            self.unused = frozenset(name for name in located if name.endswith((".k_scale", ".v_scale")))
        return {name: file for name, file in located.items() if name not in self.unused}

    def _no_weights(self) -> CheckpointError:
        for path in sorted(self.folder.iterdir()):
            if path.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl"):
                return CheckpointError(
                    f"{path}: a pickle checkpoint, which can run code when loaded; rotor refuses it.",
                    "Convert it with transformers' save_pretrained, which writes safetensors.",
                )
        return CheckpointError(
            f"{self.folder}: no {SINGLE_FILE} and no {INDEX_FILE}.", "Give a folder that save_pretrained wrote."
        )

    def _open(self, file: str) -> Any:
        if file not in self._handles:
            path = self.folder / file
            try:
                path.open("rb").close()  # the system's error is clearer than that of safetensors
                self._handles[file] = safe_open(path, framework="pt")
            except OSError as error:
                why = f"cannot be read ({error.strerror or one_line(error)})."
                raise CheckpointError(
                    f"{path}: {why}", "Check its permissions and the disk that it lies on."
                ) from error
            except SafetensorError as error:
                size = path.stat().st_size
                raise CheckpointError(
                    f"{path}: truncated or not a safetensors file ({size} bytes): {one_line(error)}",
                    "Download it again; in a clone of a repository run `git lfs pull`.",
                ) from error
        return self._handles[file]


def config_of(folder: Path) -> PreTrainedConfig:
    """Read the transformers config of a model folder; code in the folder is never run.

    Raises:
        CheckpointError: config.json is missing, unknown to transformers, or has a refused value.
    """
    _check_no_run(folder)
    check_config(folder / "config.json", read_json(folder / "config.json"))
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if only_cache_is_quantised(getattr(config, "quantization_config", None)):
            del config.quantization_config
        return config
    except RotorError:
        raise
    except Exception as error:  # config classes of transformers raise anything for unexpected values
        kind = read_json(folder / "config.json").get("model_type")
        if isinstance(kind, str) and kind not in CONFIG_MAPPING:
            raise UnsupportedModelError(
                f"{folder / 'config.json'}: model_type {shorten(kind)} is not known to transformers "
                f"{transformers.__version__}{nearest_name(kind, CONFIG_MAPPING)}",
                "docs/families.md lists what rotor supports; a newer transformers may know the model.",
            ) from None
        raise CheckpointError(
            f"{folder / 'config.json'}: transformers cannot read it: {one_line(error)}",
            "Check config.json, or install a version of transformers that knows this model.",
        ) from error


def only_cache_is_quantised(section: object) -> bool:
    """Tell whether a `quantization_config` of compressed-tensors speaks of the cache alone: weights are whole."""
    if not isinstance(section, dict) or section.get("quant_method") != "compressed-tensors":
        return False
    return bool(section.get("kv_cache_scheme")) and not (section.get("config_groups") or section.get("sparsity_config"))


def _check_no_run(folder: Path) -> None:
    """Raise UsageError for a run of calibrate, with the command that makes a checkpoint of it."""
    if (folder / INFO).is_file() and not (folder / "config.json").exists():
        raise UsageError(
            f"{folder} is a run of `rotor calibrate`, not a model.",
            f"A checkpoint is made of it by: rotor export {shlex.quote(str(folder))} -o OUT --accuracy 0.99",
        )


def _check_files(folder: Path) -> None:
    """Raise UnsupportedModelError for formats that rotor cannot compress."""
    for name, (what, hint) in OTHER_FORMATS.items():
        if (folder / name).is_file():
            raise UnsupportedModelError(f"{folder / name}: {what}, which rotor cannot compress.", hint)
    if not (folder / "config.json").is_file() and any(folder.glob("*.gguf")):
        raise UnsupportedModelError(f"{folder}: a GGUF model, which rotor cannot compress.", FROM_GGUF)


def one_line(error: BaseException) -> str:
    """Text of an error as part of a message: on one line, bounded, and without the hint of rotor's errors."""
    text = error.message if isinstance(error, RotorError) else " ".join(str(error).split()) or repr(error)
    return text if len(text) <= 300 else text[:297] + "..."


def sidecars(folder: Path) -> list[str]:
    """Names of a model's files to copy unchanged, relative to its folder, sorted.

    Links within the folder and into the folder of config.json (the hub's cache) are followed.

    Raises:
        CheckpointError: a link is broken or leads out of the model.
    """
    files = (path.name for path in folder.iterdir() if path.is_file() or path.is_symlink())
    names = sorted(name for name in files if SIDECAR_NAMES.fullmatch(name))
    here = folder.resolve()
    allowed = {here, (folder / "config.json").resolve().parent}
    for path in (folder / name for name in names):
        target = Path(os.path.realpath(path))
        if not target.is_file() or not allowed & set(target.parents):
            problem = "outside of the model" if target.is_file() else "where there is no file"
            raise CheckpointError(f"{path}: is a link to {target}, {problem}.", "Put a copy of the file in its place.")
    return names
