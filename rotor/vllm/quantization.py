"""vLLM's quantisation method `rotor`: it carries the layouts to the model and chooses the compressed class."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from ..checked import JsonObject
from ..checkpoint.families import architectures, family_of, is_supported
from ..checkpoint.section import METHOD, is_compressed
from ..errors import UnsupportedModelError, UsageError
from .served import PREFIX


@register_quantization_config(METHOD)
class RotorQuantization(QuantizationConfig):
    """Holds the quantization_config of config.json. It quantises no layer, and models are built without it.

    refusal: why compressed checkpoints are not served; None if they are.
    """

    refusal: ClassVar[str | None] = None

    def __init__(self, config: JsonObject) -> None:
        super().__init__()
        self.config = config

    def get_name(self) -> str:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: JsonObject) -> RotorQuantization:
        return cls(config)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> None:
        return None

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: JsonObject, user_quant: Any, hf_config: Any = None) -> Any:
        """Claim compressed checkpoints, as vLLM asks each method to, and choose the compressed class.

        Raises:
            UsageError: this vLLM is outside of the tested range.
            UnsupportedModelError: the architecture is not served.
        """
        if not is_compressed({"quantization_config": hf_quant_cfg}):
            return None
        if cls.refusal is not None:
            raise UsageError(cls.refusal, "Install one of these, or serve with transformers.")
        if hf_config is not None:
            from .adapter import BY_TRANSFORMERS, native_name

            served = architectures()
            names = [name.removeprefix(PREFIX) for name in hf_config.architectures or []]
            unknown = [name for name in names if name not in served and name not in BY_TRANSFORMERS]
            if unknown or not names:
                known = is_supported(hf_config) and family_of(hf_config).not_in_vllm
                raise UnsupportedModelError(
                    f"{', '.join(unknown) or 'a model without `architectures`'}: not served compressed by vLLM"
                    + (f": {known}." if known else "."),
                    f"Served: {', '.join(sorted(served))}; transformers loads all that rotor compresses.",
                )
            hf_config.architectures = [PREFIX + native_name(name, hf_config) for name in names]
        return METHOD
