"""Registration with transformers: `from_pretrained` of a compressed checkpoint, and the `rotor` attention function."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from .errors import CheckpointError
from .families import FAMILIES, Family, attention_shape
from .layout import AttentionShape, LayerLayout
from .modeling import RotaryTable, RotorAttention, rotor_attention_forward

METHOD = "rotor"
FORMAT_VERSION = 1


class RotorConfig(QuantizationConfigMixin):
    """The `quantization_config` of a compressed checkpoint.

    Args:
        format_version: version of what is stored.
        layers: layer index (a string, as JSON has it) -> LayerLayout as a dict.
        biases: the projections, of q, k, v, o, that have a bias.
    """

    def __init__(
        self, format_version: int = FORMAT_VERSION, layers: Any = None, biases: Any = (), **kwargs: Any
    ) -> None:
        kwargs.pop("quant_method", None)
        self.quant_method = METHOD  # type: ignore[assignment]
        self.format_version = format_version
        self.layers = {str(index): layout for index, layout in (layers or {}).items()}
        self.biases = sorted(biases)

    def layouts(self, num_layers: int) -> list[LayerLayout]:
        """The layout of each layer; raises CheckpointError if the version or the number of layers does not fit."""
        if self.format_version != FORMAT_VERSION:
            raise CheckpointError(
                f"config.json: format_version is {self.format_version}, this rotor reads {FORMAT_VERSION}.",
                "Install the version of rotor that wrote the checkpoint (rotor.json names it).",
            )
        if sorted(self.layers) != sorted(str(i) for i in range(num_layers)):
            raise CheckpointError(
                f"config.json: layouts for layers {sorted(self.layers)}, expected 0 to {num_layers - 1}.",
                "The folder was edited; export it again.",
            )
        return [LayerLayout.from_dict(self.layers[str(i)], f"config.json, layer {i}") for i in range(num_layers)]


class RotorQuantizer(HfQuantizer):
    """Swaps the attention modules for compressed ones while the model is still on the meta device."""

    requires_calibration = True

    def update_attn_implementation(self, config: Any) -> Any:
        config._attn_implementation = METHOD
        return config

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        shape = attention_shape(model.config)
        layouts = self.quantization_config.layouts(shape.num_layers)  # type: ignore[attr-defined]
        replace_attention(
            model,
            FAMILIES[model.config.model_type],
            shape,
            layouts,
            frozenset(self.quantization_config.biases),  # type: ignore[attr-defined]
        )
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return True


def replace_attention(
    model: Any, family: Family, shape: AttentionShape, layouts: list[LayerLayout], biases: frozenset[str]
) -> list[RotorAttention]:
    """Put a RotorAttention with uninitialised weights in place of each attention module, and use `rotor` attention."""
    rotary = None if family.rotary is None else RotaryTable(model.get_submodule(family.rotary))
    modules = []
    for index, layout in enumerate(layouts):
        base = family.attention_module(model, index)
        module = RotorAttention(base, family, shape, layout, biases, rotary)
        family.replace_attention(model, index, module)
        modules.append(module)
    model.config._attn_implementation = METHOD
    return modules


def uses_rotor(model: nn.Module) -> bool:
    return any(isinstance(module, RotorAttention) for module in model.modules())


def register() -> None:
    """Make transformers know rotor's checkpoints and attention; harmless when called again."""
    if METHOD in AUTO_QUANTIZATION_CONFIG_MAPPING:
        return
    register_quantization_config(METHOD)(RotorConfig)
    register_quantizer(METHOD)(RotorQuantizer)
    AttentionInterface.register(METHOD, rotor_attention_forward)
    AttentionMaskInterface.register(METHOD, sdpa_mask)
