"""Compressed attention within models of transformers: its modules, and the methods of models that have to know it.

Imported for the first model that is compressed: others never meet it.
"""

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
from transformers.utils import cached_file

from ..checkpoint.families import Family
from ..checkpoint.files import KERNEL_CONFIG
from ..checkpoint.layout import AttentionShape, LayerLayout
from ..checkpoint.section import MARK, METHOD, is_ours
from .attention import RotorAttention, attend_to_shared
from .integration import RotorQuantizer
from .positions import keep_shifts_with_rows
from .rope import rotary_tables
from .steps import CacheRows

if TYPE_CHECKING:
    from types import EllipsisType

    from transformers import PreTrainedConfig, PreTrainedModel

    from ..checkpoint.rewritten import RewrittenTensors

log = logging.getLogger("rotor")


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


def _meet_transformers() -> None:
    """Make transformers know rotor's attention, and its models' methods keep it."""
    for name in (METHOD, MARK):
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


_meet_transformers()
