"""vLLM's own model classes, with compressed attention in place of theirs.

A native model is built as always; each of its attention modules is replaced as it is assigned to its layer, so that at
most one of them is in memory at a time. All else (other layers and their kernels, experts, parallelism) stays vLLM's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.registry import ModelRegistry
from vllm.model_executor.models.utils import extract_layer_index

from ...errors import CheckpointError
from ...format.file_names import KERNEL_CONFIG
from ...format.section import CompressedSection
from ...format.truncation import truncate_layer
from ...runtime.families import FAMILIES, attention_shape
from ...runtime.kernel_choice import kernels_of
from .architectures import PREFIX
from .attention import LayerPlan, RotorSelfAttention
from .requests import beside_weights
from .shards import padded_rows, row_bytes

__all__: list[str] = []


class Compressed:
    """Before a native model class: builds it with compressed attention, and loads that."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        model_config = vllm_config.model_config
        hf_config = model_config.hf_config
        family, shape = FAMILIES[hf_config.model_type], attention_shape(hf_config)
        section = CompressedSection(**vllm_config.quant_config.config)
        chosen = getattr(hf_config, "rank_profile", None)
        stored, layouts = section.layouts(shape), section.cut_layouts(shape, chosen)
        size, element_bytes = vllm_config.parallel_config.tensor_parallel_size, model_config.dtype.itemsize
        kinds = getattr(hf_config, "layer_types", None)
        rows = padded_rows([row_bytes(layout, size, element_bytes) for layout in layouts], kinds)
        kernels = kernels_of(section, beside_weights(model_config, KERNEL_CONFIG), shape, chosen)
        loading = _Loading(family, shape, stored, section.profile_ranks(chosen))
        self.__dict__["_rotor"] = loading  # before nn.Module's own __init__

        def build(native: nn.Module) -> RotorSelfAttention:
            attn: Any = native.attn
            index = extract_layer_index(attn.layer_name)
            plan = LayerPlan(
                index,
                family,
                shape,
                layouts[index],
                frozenset(section.biases),
                rows[index],
                kinds is not None and len(set(kinds)) > 1,
                kernels.schedule,
                kernels.layers[index],
            )
            module = RotorSelfAttention(native, plan, vllm_config)
            loading.modules[index] = module
            return module

        plain = copy.copy(vllm_config)
        plain.quant_config = None
        with _replaced_attention(family.attention, build):
            super().__init__(vllm_config=plain, prefix=prefix)  # type: ignore[call-arg]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str] | None:
        loading: _Loading = self.__dict__["_rotor"]
        loaded = super().load_weights(loading.others(weights))  # type: ignore[misc]
        names = loading.finish()
        return None if loaded is None else loaded | names


class _Loading:
    """Tensors of attention on their way from the checkpoint to the modules of this process."""

    def __init__(self, family: Any, shape: Any, stored: list[Any], profile: list[Any] | None) -> None:
        self.family, self.shape, self.stored, self.profile = family, shape, stored, profile
        self.modules: dict[int, RotorSelfAttention] = {}
        self.held: dict[int, dict[str, Tensor]] = {}

    def others(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Hold what is attention's, pass on the rest."""
        full = {self.family.attention_prefix(index): index for index in range(self.shape.num_layers)}
        bare = {name.partition(".")[2]: index for name, index in full.items()}  # the original GPT-2
        prefixes = bare | full
        for name, tensor in weights:
            prefix = next((p for p in prefixes if name.startswith(p)), None)
            if prefix is None:
                yield name, tensor
            elif prefixes[prefix] in self.modules:  # else another pipeline stage's
                self.held.setdefault(prefixes[prefix], {})[name[len(prefix) :]] = tensor

    def finish(self) -> set[str]:
        """Fill the modules, cut down to the profile; the names of their parameters in the model.

        Raises:
            CheckpointError: a layer's tensors are not all there.
        """
        missing = sorted(set(self.modules) - set(self.held))
        if missing:
            raise CheckpointError(f"no attention weights of layers {missing}.", "Run `rotor validate`.")
        names = set()
        for index, tensors in self.held.items():
            if self.profile is not None:
                _, tensors = truncate_layer(tensors, self.stored[index], self.profile[index], self.shape)
            self.modules[index].load(tensors)
            names |= {f"{self.family.attention_prefix(index)}{name}" for name in tensors}
        self.held.clear()
        return names


@contextmanager
def _replaced_attention(name: str, build: Callable[[nn.Module], nn.Module]) -> Iterator[None]:
    """Within: a module that holds an attention layer of vLLM's is replaced when it is assigned under that name."""

    def hook(parent: nn.Module, assigned: str, module: nn.Module | None) -> nn.Module | None:
        if assigned == name and isinstance(getattr(module, "attn", None), Attention):
            assert module is not None
            return build(module)
        return None

    handle = register_module_module_registration_hook(hook)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


def __getattr__(name: str) -> type[nn.Module]:
    """RotorLlamaForCausalLM and so on, made when vLLM first asks for one."""
    if not name.startswith(PREFIX):
        raise AttributeError(name)
    native = ModelRegistry.models[name[len(PREFIX) :]].load_model_cls()
    made = type(name, (Compressed, native), {"__module__": __name__})
    globals()[name] = made
    return made
