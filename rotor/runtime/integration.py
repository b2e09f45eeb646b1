"""Registration with transformers, whose `from_pretrained` then loads compressed checkpoints.

Compressed attention itself is in `replacement`, which is imported for the first checkpoint that has it.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..checked import JsonObject
from ..checkpoint.families import attention_shape, family_of, language_model_setting
from ..checkpoint.section import MARK, METHOD, CompressedSection
from ..errors import CheckpointError, UnsupportedModelError, UsageError
from . import registration

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

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
        from .replacement import keep_attention

        keep_attention(config)
        return config

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **kwargs: object
    ) -> PreTrainedModel:
        from ..kernels.dispatch import config_of
        from .replacement import REWRITTEN, LazyTensor, find_kernel_config, replace_attention, with_head

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
        from .attention import RotorAttention
        from .replacement import with_head

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
        from .steps import NO_GRADIENTS

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


def register() -> None:
    """Make transformers know rotor's checkpoints; harmless when called again."""
    if METHOD in AUTO_QUANTIZATION_CONFIG_MAPPING:
        return
    for name in (METHOD, MARK):
        register_quantization_config(name)(RotorConfig)
        register_quantizer(name)(RotorQuantizer)


register()
