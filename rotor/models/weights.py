"""Keep a model's weights available while it runs: all in memory, or one part at a time read from its shards.

A part is a decoder layer (its index), the `embedding`, or the `head`. Everything else (final norm, learned positions,
and what layers read of tokens, which is large) is always in memory. transformers' loading code converts the weights, so
that families whose modules hold them in another form than the checkpoint (fused experts) need no code here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Literal

import torch
import transformers
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.initialization import meta_device_safe_creation_ops
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging as transformers_logging

from ..checkpoint.families import family_of, is_supported
from ..errors import CheckpointError
from .source import Checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Part = int | Literal["embedding", "head"]


class Weights:
    """A causal model with all of its weights in memory; base of other ways to keep them."""

    streamed = False

    def __init__(self, model: PreTrainedModel) -> None:
        self.model: Any = model  # modules by name, which are tensors to the type of nn.Module
        self.device = model.device
        self.dtype = model.dtype

    def loaded(self, part: Part) -> AbstractContextManager[None]:
        """Context in which a part's weights are on their device."""
        return nullcontext()

    def whole(self) -> AbstractContextManager[None]:
        """Context in which the whole model can be called."""
        return nullcontext()


class StreamedWeights(Weights):
    """A causal model with one part of its weights in memory at a time.

    Args:
        checkpoint: checkpoint that the weights are read from.
        device, dtype: device and dtype of the loaded weights.
        prepare: changes the model before anything is read, e.g. its attention modules; all parameters stay on meta.
    Raises:
        CheckpointError: the tensors of a part do not fit the config; raised when the part is loaded.
    """

    streamed = True

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        prepare: Callable[[PreTrainedModel], None] = lambda model: None,
    ) -> None:
        self.checkpoint, self.device, self.dtype = checkpoint, device, dtype
        self.model = empty_model(checkpoint.config, dtype)
        with torch.device("meta"):
            prepare(self.model)
        keep_softcap(self.model)
        family = family_of(checkpoint.config)
        self._module_name = family.module_name
        self._layers = f"{family.decoder}.{family.layers}."
        self._base = family.decoder.partition(".")[0]
        self._aliases = _aliases(self.model)
        self._mapping = get_model_conversion_mapping(self.model)
        self._dtype_plan = self.model._get_dtype_plan(dtype)
        named = {id(module): name for name, module in self.model.named_modules()}
        self._vocabulary = {
            "embedding": named[id(self.model.get_input_embeddings())] + ".",
            "head": named[id(self.model.get_output_embeddings())] + ".",
        }
        self._names: dict[Part | None, list[str]] = {}
        for name in sorted(checkpoint.names):
            self._names.setdefault(self._part_of(name), []).append(name)
        self._sources: dict[Part, Part] = {} if self._names.get("head") else {"head": "embedding"}  # a tied head
        for name, buffer in self.model.named_buffers():
            _set(self.model, name, buffer.to(device))
        self._load(None)
        # A head is in the shards or tied to the embedding; transformers would initialise a missing one at random.
        head = self._vocabulary["head"] + "weight"
        tied = any(head in group for group in self._aliases)
        if "head" in self._sources and not tied and self.model.get_parameter(head).is_meta:
            raise self._misfit(f"missing on loading: {head}, which config.json does not tie")

    @contextmanager
    def loaded(self, part: Part) -> Iterator[None]:
        try:
            self._load(part)
            yield
        finally:
            self._drop(part)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Context in which each part is read when its module is called, and dropped when the module returns."""
        modules: dict[Part, nn.Module] = dict(enumerate(self.model.get_submodule(self._layers[:-1])))
        modules |= {"embedding": self.model.get_input_embeddings(), "head": self.model.get_output_embeddings()}
        handles = []
        for part, module in modules.items():
            handles += [
                module.register_forward_pre_hook(lambda *_, part=part: self._load(part)),
                module.register_forward_hook(lambda *_, part=part: self._drop(part), always_call=True),
            ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _part_of(self, name: str) -> Part | None:
        """The part that a parameter or a tensor of the checkpoint belongs to; None if it is always in memory.

        Tensor names of a checkpoint that holds the bare decoder lack the first component.
        """
        name = self._module_name(name)
        for full in (name, f"{self._base}.{name}"):
            if full.startswith(self._layers):
                index = full[len(self._layers) :].partition(".")[0]
                return int(index) if index.isdigit() else None
            for part, prefix in self._vocabulary.items():
                if full.startswith(prefix):
                    return part  # type: ignore[return-value]
        return None

    def _parameters(self, part: Part | None) -> list[str]:
        return [name for name, _ in self.model.named_parameters() if self._part_of(name) == part]

    def _load(self, part: Part | None) -> None:
        part = part if part is None else self._sources.get(part, part)
        tensors = {name: self.checkpoint.unchecked_tensor(name) for name in self._names.get(part, [])}
        loading = LoadStateDictConfig(
            dtype=self.dtype,
            dtype_plan=self._dtype_plan,
            device_map={"": self.device},
            weight_mapping=self._mapping,  # type: ignore[arg-type]
        )
        progress_bar = transformers_logging.is_progress_bar_enabled()
        transformers_logging.disable_progress_bar()  # there would be one for each part
        try:
            report, _ = convert_and_load_state_dict_in_model(self.model, tensors, loading)
        finally:
            if progress_bar:
                transformers_logging.enable_progress_bar()
        where = "the weights outside of the layers" if part is None else f"part {part}"
        for kind in ("unexpected_keys", "mismatched_keys", "conversion_errors", "error_msgs"):
            items = [item for item in getattr(report, kind) if kind != "unexpected_keys" or not self._is_unused(item)]
            if items:
                names = ", ".join(sorted(str(item[0] if isinstance(item, tuple) else item) for item in items))
                raise self._misfit(f"{where}: {kind.replace('_', ' ')} on loading: {names[:300]}")
        for group in self._aliases:
            first = next((p for p in map(self.model.get_parameter, group) if not p.is_meta), None)
            for name in group if first is not None else ():
                _set(self.model, name, first)
        missing = [name for name in self._parameters(part) if self.model.get_parameter(name).is_meta]
        if missing:
            raise self._misfit(f"{where}: missing on loading: {', '.join(missing)[:300]}")

    def _is_unused(self, name: str) -> bool:
        """Tell whether checkpoints of the family hold a tensor that their model has no use for."""
        patterns = self.model._keys_to_ignore_on_load_unexpected or ()
        return any(re.search(pattern, name) for pattern in patterns)

    def _drop(self, part: Part) -> None:
        for name in self._parameters(self._sources.get(part, part)):
            empty = nn.Parameter(self.model.get_parameter(name).detach().to("meta"), requires_grad=False)
            for alias in next((group for group in self._aliases if name in group), [name]):
                _set(self.model, alias, empty)
        self.checkpoint.release()

    def _misfit(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.checkpoint.folder}: {what}.", "Check that config.json belongs to these weights.")


def keep_softcap(model: PreTrainedModel) -> None:
    """Switch models with a soft cap from sdpa, which older versions of transformers choose and which omits the cap."""
    softcap = is_supported(model.config) and family_of(model.config).softcap
    if softcap and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation("eager")


def auto_class(config: PreTrainedConfig) -> Any:
    """The class of transformers that builds and loads a model, by its config."""
    name = family_of(config).auto_class if is_supported(config) else "AutoModelForCausalLM"
    return getattr(transformers, name)


def empty_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model of a config: parameters on the meta device, real buffers (rotary frequencies, masks).

    The model gets a copy of the config, into which transformers writes dtype and attention implementation.
    """
    with torch.device("meta"), meta_device_safe_creation_ops():
        model: Any = auto_class(config).from_config(deepcopy(config), dtype=dtype, trust_remote_code=False)
    for name, buffer in list(model.named_buffers()):
        _set(model, name, torch.empty_like(buffer, device="cpu"))
    for parameter in model.parameters():
        parameter._is_hf_initialized = True
    model.initialize_weights()  # initialises the buffers alone, as transformers does when it loads a checkpoint
    whole: PreTrainedModel = model.eval().requires_grad_(False)
    return whole


def _aliases(model: nn.Module) -> list[list[str]]:
    """Groups of parameter names that share one tensor (tied embeddings)."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _set(model: nn.Module, name: str, tensor: Tensor | nn.Parameter | None) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, tensor)
