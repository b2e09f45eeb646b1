"""vLLM's plugin: `vllm serve OUT` loads compressed checkpoints without a patch.

vLLM calls `register` in each of its processes, perhaps more than once. Importing this package imports neither vLLM nor
transformers' integration, and nothing of the offline half.
"""

from __future__ import annotations

from ..checkpoint.families import architectures
from .served import PREFIX, refusal


def register() -> None:
    """Register the quantisation method `rotor` and the compressed classes of the architectures served.

    With a vLLM outside of the tested range only the method is registered, which refuses compressed checkpoints; other
    models load as ever.
    """
    import vllm
    from vllm import ModelRegistry

    from .quantization import RotorQuantization

    RotorQuantization.refusal = refusal(vllm.__version__)
    if RotorQuantization.refusal is not None:
        return
    from .adapter import BY_TRANSFORMERS, watch

    known = set(ModelRegistry.get_supported_archs())
    for name in (architectures() | {*BY_TRANSFORMERS}) & known:
        if PREFIX + name not in known:
            # By name: a model's module is imported only where such a checkpoint is loaded.
            ModelRegistry.register_model(PREFIX + name, f"{__name__}.adapter:{PREFIX}{name}")
            watch(name)
