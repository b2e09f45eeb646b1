"""Registration with transformers: `from_pretrained` of a compressed checkpoint, and the `rotor` attention function."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, modeling_utils
from transformers.masking_utils import sdpa_mask
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils import cached_file
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..checked import JsonObject
from ..checkpoint.families import Family, attention_shape, family_of, language_model_setting
from ..checkpoint.files import KERNEL_CONFIG
from ..checkpoint.layout import AttentionShape, LayerLayout
from ..checkpoint.section import MARK, METHOD, CompressedSection, is_ours
from ..errors import CheckpointError, UnsupportedModelError, UsageError
from ..kernels.dispatch import config_of
from . import registration
from .attention import RotorAttention, attend_to_shared
from .positions import keep_shifts_with_rows
from .rope import rotary_tables
from .steps import NO_GRADIENTS, CacheRows

if TYPE_CHECKING:
    from types import EllipsisType

    from transformers import PreTrainedConfig, PreTrainedModel

    from ..checkpoint.rewritten import RewrittenTensors

log = logging.getLogger("rotor")


class RotorConfig(CompressedSection, QuantizationConfigMixin):
    """The section as transformers wants it: made by `from_dict`, written by `to_dict`."""

    def to_dict(self) -> JsonObject:
        return {**super().to_dict(), "quant_method": MARK}


class RotorQuantizer(HfQuantizer):
    """Swaps the attention modules for compressed ones while the model is still on the meta device."""

    requires_calibration = True
    quantization_config: RotorConfig

    def validate_environment(self, *args: object, device_map: object = None, **kwargs: object) -> None:
        """Let Falcon be built: it looks its attention class up by the name of the implementation.

        Raises:
            UsageError: weights are to be offloaded to disk from a checkpoint that has none.
        """
        config = self.quantization_config
        if config.source is not None and isinstance(device_map, dict) and "disk" in device_map.values():
            raise UsageError(
                "device_map offloads weights to disk, and this checkpoint has none: they are rewritten while it loads.",
                "Write them first: rotor materialise OUT -o FULL.",
            )
        from transformers.models.falcon.modeling_falcon import FALCON_ATTENTION_CLASSES, FalconAttention

        for name in (METHOD, MARK):
            FALCON_ATTENTION_CLASSES.setdefault(name, FalconAttention)

    def update_attn_implementation(self, config: PreTrainedConfig) -> PreTrainedConfig:
        keep_attention(config)
        return config

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **kwargs: object
    ) -> PreTrainedModel:
        config = self.quantization_config
        family, shape = family_of(model.config), attention_shape(model.config)
        network, layouts = with_head(model, family), config.layouts(shape)
        section = getattr(config, "cache", None)
        self.cache_policy = None if section is None else registration.find_policies().read_stored(section)
        replace_attention(network, family, shape, dict(enumerate(layouts)), frozenset(config.biases))
        self.kernel_config = config_of(find_kernel_config(model.config, checkpoint_files), layouts)
        if config.source is not None and checkpoint_files:
            from ..checkpoint.rewritten import open_rewritten  # not needed for checkpoints with weights

            tensors = open_rewritten(Path(checkpoint_files[0]), model.config, config)
            model.__dict__[REWRITTEN] = {name: LazyTensor(tensors, name) for name in tensors.file_of}
        return model

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: object) -> PreTrainedModel:
        """Give the layers their kernels and cache policy, and mark the config."""
        family = family_of(model.config)
        network = with_head(model, family)
        for config in (self.quantization_config, model.config.quantization_config):
            vars(config).pop("source", None)  # save_pretrained will write the weights
        # transformers drops it, and save_pretrained must write it
        model.config.attn_implementation = language_model_setting(model.config, MARK)
        for index, kernels in enumerate(self.kernel_config.layers):
            module = family.attention_module(network, index)
            assert isinstance(module, RotorAttention)
            module.check_finite()
            module.kernels = kernels
        if self.cache_policy is not None:
            try:
                registration.find_policies().attach_stored(model, network, self.cache_policy)
            except (UsageError, UnsupportedModelError) as error:
                raise CheckpointError(f"config.json, quantization_config: {error.message}", error.hint) from error
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        """Tell whether the loss has right gradients: rows of numbers do, codes have none."""
        config = self.quantization_config
        if config.coded:
            log.warning("%s", NO_GRADIENTS)
        return not config.coded

    @property
    def is_qat_trainable(self) -> bool:
        """Tell whether the weights can be trained, not only adapters; bases stay as they are."""
        return not self.quantization_config.coded

    @property
    def is_compileable(self) -> bool:
        return True


REWRITTEN = "rotor_rewritten"
"""Attribute of a model while it is loaded from a checkpoint without weights: its tensors by name."""


class LazyTensor:
    """A rewritten tensor in place of one in a file; transformers indexes it with `[...]` when it loads it."""

    def __init__(self, tensors: RewrittenTensors, name: str) -> None:
        self.tensors, self.name = tensors, name

    def __getitem__(self, index: EllipsisType | slice) -> Tensor:
        return self.tensors.tensor(self.name)[index]

    def get_dtype(self) -> str:
        """The name that safetensors has for the dtype; transformers only asks whether it is a float."""
        return "F32"


def with_rewritten(load: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' `convert_and_load_state_dict_in_model`, which takes a model's rewritten tensors where it has them.

    Transformers does with them all that it does with weights of files (names, experts, dtypes, devices).
    """

    @wraps(load)
    def loading(model: PreTrainedModel, state_dict: Any, *rest: object, **named: object) -> Any:
        return load(model, model.__dict__.pop(REWRITTEN, state_dict), *rest, **named)

    return loading


def keep_attention(config: PreTrainedConfig) -> None:
    """Set the language model's attention to rotor's; warn where another was asked for."""
    language_model = config.get_text_config()
    asked = language_model._attn_implementation
    if asked is not None and not is_ours(asked):
        log.warning("attn_implementation=%r is ignored: compressed layers always run rotor's own attention.", asked)
    language_model._attn_implementation = METHOD


def with_own_attention(method: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' `set_attn_implementation`, by which a compressed language model keeps rotor's."""

    @wraps(method)
    def setting(model: PreTrainedModel, *given: object, **named: object) -> None:
        method(model, *given, **named)
        if any(isinstance(module, RotorAttention) for module in model.modules()):
            keep_attention(model.config)

    return setting


def converting(model: PreTrainedModel, fn: Callable[[Tensor], Tensor], *rest: object, **named: object) -> Any:
    """`nn.Module._apply` of a model, which `.to()`, `.half()` and the like call: refuses before anything is changed.

    Raises:
        UsageError: numbers of a compressed layer are beyond the new dtype.
    """
    for module in model.modules():
        if isinstance(module, RotorAttention):
            module.check_range(fn)
    return nn.Module._apply(model, fn, *rest, **named)


def as_to(method: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    """transformers' `half` or `float` of a model, which of a compressed one is `.to(dtype)`; it refuses others."""

    @wraps(method)
    def convert(model: PreTrainedModel, *given: object) -> Any:
        if isinstance(getattr(model, "hf_quantizer", None), RotorQuantizer):
            whole: Any = model
            return whole.to(dtype)
        return method(model, *given)

    return convert


def with_head(model: PreTrainedModel, family: Family) -> Any:
    """A causal model as it is; a base model (of AutoModel) under the name that a causal model has it by."""
    name = family.decoder.partition(".")[0]
    if hasattr(model, name):
        return model
    head: Any = nn.Module()
    head.config = model.config
    setattr(head, name, model)
    return head


def find_kernel_config(config: PreTrainedConfig, checkpoint_files: list[str] | None) -> Path | None:
    """kernel_config.json beside the weights, fetched from the hub if its cache lacks it; None where there is none.

    Args:
        config: the model's, which knows where it came from. checkpoint_files: paths of the weights.
    """
    if not checkpoint_files:
        return None
    beside = Path(checkpoint_files[0]).parent / KERNEL_CONFIG
    snapshots = beside.parent.parent
    if not beside.is_file() and snapshots.name == "snapshots":  # of the hub's cache
        cached_file(
            config.name_or_path or "",
            KERNEL_CONFIG,
            cache_dir=snapshots.parent.parent,
            revision=beside.parent.name,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    return beside if beside.is_file() else None


def replace_attention(
    model: PreTrainedModel,
    family: Family,
    shape: AttentionShape,
    layouts: dict[int, LayerLayout],
    biases: frozenset[str],
) -> list[RotorAttention]:
    """Put a RotorAttention with uninitialised weights into each layer of `layouts`, and select `rotor` attention."""
    tables, store, modules = rotary_tables(model, family, model.config), CacheRows(), []
    for index, layout in layouts.items():
        base = family.attention_module(model, index)
        module = RotorAttention(base, family, shape.layer(index), layout, biases, tables[index], store)
        family.replace_attention(model, index, module)
        modules.append(module)
    model.config.get_text_config()._attn_implementation = METHOD
    return modules


def register() -> None:
    """Make transformers know rotor's checkpoints and attention; harmless when called again."""
    if METHOD in AUTO_QUANTIZATION_CONFIG_MAPPING:
        return
    for name in (METHOD, MARK):
        register_quantization_config(name)(RotorConfig)
        register_quantizer(name)(RotorQuantizer)
        AttentionInterface.register(name, attend_to_shared)
        AttentionMaskInterface.register(name, sdpa_mask)
    loading: Any = modeling_utils
    loading.convert_and_load_state_dict_in_model = with_rewritten(loading.convert_and_load_state_dict_in_model)
    for name, dtype in (("half", torch.float16), ("float", torch.float32)):
        setattr(loading.PreTrainedModel, name, as_to(getattr(loading.PreTrainedModel, name), dtype))
    loading.PreTrainedModel._apply = converting
    set_attention = with_own_attention(loading.PreTrainedModel.set_attn_implementation)
    loading.PreTrainedModel.set_attn_implementation = set_attention
    keep_shifts_with_rows(Cache)


register()
