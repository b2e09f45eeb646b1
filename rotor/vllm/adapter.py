"""All contact with vLLM's internals; interfaces that vLLM promises are used in `__init__` and `quantization`.

A native model is built as always. Each of its attention modules is replaced as it is assigned to its layer, so at most
one of them is in memory at a time. Everything else (other layers and kernels, experts, parallelism) stays vLLM's.
`tests/test_vllm_adapter.py` has the signatures that this module relies on.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, TypeGuard
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from vllm.distributed import get_tensor_model_parallel_rank, tensor_model_parallel_all_reduce
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig
from vllm.model_executor.models.registry import ModelRegistry
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase
from vllm.utils.torch_utils import _encode_layer_name
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    max_decode_query_len,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from ..checked import JsonObject
from ..checkpoint.families import Family, family_of
from ..checkpoint.layout import ExactTokens
from ..checkpoint.projections import attention_norms
from ..checkpoint.section import CompressedSection, is_compressed
from ..kernels.rotary import Rotation
from ..logs import log
from .attention import OneSequence, RotorSelfAttention
from .layers import Loading, Plan
from .pages import ExactPages, PagedLayer, StepRequests
from .served import PREFIX
from .windows import FirstAndNewestSpec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig
    from vllm.config import VllmConfig

__all__: list[str] = []

WIDEST_HEAD = 256
"""Widest head that vLLM's own attention takes."""


BY_TRANSFORMERS = ("TransformersForCausalLM", "TransformersMoEForCausalLM")
"""vLLM's classes around transformers' own models, without and with experts."""


def native_name(architecture: str, config: PreTrainedConfig) -> str:
    """The name of vLLM's class for an architecture: that around transformers' own model where it has no other."""
    name = family_of(config).vllm_name or architecture
    if name in ModelRegistry.models:
        return name
    experts = ModelArchConfigConvertorBase(config, config.get_text_config()).get_num_experts()
    return BY_TRANSFORMERS[experts > 0]


def watch(architecture: str) -> None:
    """Check vLLM's configuration before a compressed model of an architecture is built, after the native checks.

    The check stands under the native name, which vLLM looks up before it knows how the checkpoint is quantised; other
    checkpoints pass.
    """
    native = MODELS_CONFIG_MAP.get(architecture, VerifyAndUpdateConfig)

    class Requests(native):  # type: ignore[misc, valid-type]
        @staticmethod
        def verify_and_update_config(vllm_config: VllmConfig) -> None:
            native.verify_and_update_config(vllm_config)
            stored: Any = getattr(vllm_config.model_config.hf_config, "quantization_config", None)
            if is_compressed({"quantization_config": stored}):
                plan, parallel = _plan(vllm_config, stored), vllm_config.parallel_config
                lora = vllm_config.lora_config is not None
                plan.check(vllm_config.cache_config.cache_dtype, lora, parallel.decode_context_parallel_size)
                plan.separate_stores(vllm_config.kv_transfer_config)

    MODELS_CONFIG_MAP[architecture] = Requests


def _plan(vllm_config: VllmConfig, stored: JsonObject) -> Plan:
    model, section = vllm_config.model_config, CompressedSection(**stored)
    ranks = vllm_config.parallel_config.tensor_parallel_size
    return Plan(model.hf_config, section, model.model, model.revision, model.dtype, model.max_model_len, ranks)


class Compressed:
    """Mixin before a native model class, which it builds with compressed attention and loads."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        plan = _plan(vllm_config, vllm_config.quant_config.config)
        loading = Loading(plan)
        self.__dict__["_rotor"] = loading  # before nn.Module's own __init__

        def build(
            native: nn.Module, rotary: nn.Module | None = None, kind: type[RotorSelfAttention] = RotorSelfAttention
        ) -> RotorSelfAttention:
            module = _attention(native, plan, vllm_config, rotary or getattr(native, "rotary_emb", None), kind)
            loading.modules[module.index] = module
            return module

        plain = copy.copy(vllm_config)
        plain.quant_config = None
        with _replaced_attention(build):
            super().__init__(vllm_config=plain, prefix=prefix)  # type: ignore[call-arg]
        # Where vLLM runs transformers' own model, attention layers come into it once it is whole.
        for name, native in list(self.named_modules()):  # type: ignore[attr-defined]
            if _has_attention(native):
                path = plan.family.rotary_below("model")
                rotary = None if path is None else self.get_submodule(path)  # type: ignore[attr-defined]
                self.set_submodule(name, build(native, rotary, OneSequence))  # type: ignore[attr-defined]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str] | None:
        loading: Loading = self.__dict__["_rotor"]
        loaded = super().load_weights(loading.others(loading.plan.tensors(weights)))  # type: ignore[misc]
        loading.finish()
        modules = ((p, m) for p, m in self.named_modules() if isinstance(m, RotorSelfAttention))  # type: ignore[attr-defined]
        names = {f"{place}.{name}" for place, module in modules for name, _ in module.named_parameters()}
        return None if loaded is None else loaded | names


def _has_attention(module: object) -> TypeGuard[nn.Module]:
    """Tell whether a module holds an attention layer of vLLM's."""
    return isinstance(getattr(module, "attn", None), Attention)


def _attention(
    native: Any, plan: Plan, vllm_config: VllmConfig, rotary: Any, kind: type[RotorSelfAttention]
) -> RotorSelfAttention:
    """Make the module of a compressed layer; scale, soft cap and norms are the native one's."""
    attn, index = native.attn, extract_layer_index(native.attn.layer_name)
    family, shape = plan.family, plan.shape.layer(index)
    # Falcon sums the outputs of attention and MLP over the ranks together.
    reduces = all(m.reduce_results for m in native.modules() if isinstance(m, RowParallelLinear))
    module = kind(
        index,
        plan.shard(index, get_tensor_model_parallel_rank()),
        attention_norms(native, family, shape, plan.config),
        rotation_table(rotary, family, plan.max_model_len, plan.rotary_type(index)) if shape.rotary_dim else None,
        tensor_model_parallel_all_reduce if reduces and plan.ranks > 1 else lambda output: output,
        family.layer_returns_tuple,
        plan.query_scale(index),
    )
    softcap = getattr(attn.impl, "logits_soft_cap", None) or None  # 0 is none, on some backends
    device = torch.device(vllm_config.device_config.device)
    layer = plan.paged_layer(module, float(attn.impl.scale), softcap, device)
    layer.varlen = _varlen(layer.widest, plan.dtype)
    vllm_config.compilation_config.static_forward_context.pop(attn.layer_name)
    mixed = len(set(plan.kinds or ())) > 1 or plan.keeps_exact
    module.attn = RotorCache(attn, layer, module.shard.parts, plan.row_bytes[index], mixed, vllm_config)
    return module


def _varlen(width: int, dtype: torch.dtype) -> Callable[..., Tensor] | None:
    """vLLM's own attention over packed sequences, if it takes heads of that width; see kernels.stock.Varlen."""
    if not current_platform.is_cuda() or dtype == torch.float32 or width > WIDEST_HEAD:
        return None
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version

    version = get_flash_attn_version(head_size=-(-width // 8) * 8)

    def flash_attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        query_start, kv_start, longest, longest_kv, scaling, window, softcap = rest
        return flash_attn_varlen_func(
            q,
            k.contiguous(),
            v.contiguous(),
            max_seqlen_q=longest,
            cu_seqlens_q=query_start,
            max_seqlen_k=longest_kv,
            cu_seqlens_k=kv_start,
            softmax_scale=scaling,
            causal=True,
            window_size=[-1 if window is None else window - 1, 0],
            softcap=softcap or 0.0,
            fa_version=version,
        )

    return flash_attention


@contextmanager
def _replaced_attention(build: Callable[[nn.Module], nn.Module]) -> Iterator[None]:
    """Within a `with`, a module that holds an attention layer of vLLM's is replaced when another takes it in."""

    def hook(parent: nn.Module, assigned: str, module: nn.Module | None) -> nn.Module | None:
        return build(module) if _has_attention(module) else None

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


def rotation_table(rotary: Any, family: Family, length: int, layer_type: str | None) -> Rotation:
    """Compute cos and sin, each [length, rotary_dim], both halves equal; vLLM's are rounded to the model's dtype.

    Args:
        rotary: vLLM's module, which layers share, or transformers', where vLLM runs the model of that.
        length: number of positions, max_model_len. Where frequencies depend on it (longrope), vLLM has chosen one set
            of them, and so does this.
        layer_type: what transformers' module takes as its third argument, where it does.
    """
    tables = _rotation_tables.setdefault(rotary, {})
    if layer_type not in tables:
        native = hasattr(rotary, "_compute_cos_sin_cache")
        made = _native_rotation(rotary) if native else _transformers_rotation(rotary, family, length, layer_type)
        tables[layer_type] = made[0][:length], made[1][:length]
    return tables[layer_type]


def _native_rotation(rotary: Any) -> Rotation:
    arguments: tuple[Any, ...] = ()
    if hasattr(rotary, "use_long_rope"):
        which = "long" if rotary.use_long_rope else "short"
        most = "max_position_embeddings" if rotary.use_long_rope else "original_max_position_embeddings"
        arguments = tuple(getattr(rotary, name) for name in (most, f"{which}_factor", f"{which}_mscale"))
    halves = rotary._compute_cos_sin_cache(*arguments).float().chunk(2, dim=-1)
    cos, sin = (torch.cat([half, half], -1).contiguous() for half in halves)
    return cos, sin


def _transformers_rotation(rotary: Any, family: Family, length: int, layer_type: str | None) -> Rotation:
    device = next(rotary.buffers()).device
    positions = torch.arange(length, device=device)[None]
    of_type = () if layer_type is None else (layer_type,)
    cos, sin = family.rotation(rotary(torch.empty(0, dtype=torch.float32, device=device), positions, *of_type))
    return cos[0], sin[0]


_rotation_tables: WeakKeyDictionary[Any, dict[str | None, Rotation]] = WeakKeyDictionary()
"""The tables of each rotary module, which layers share, by type of layer."""


class RotorCache(nn.Module, AttentionLayerBase):
    """The layer that owns a cache. To vLLM it has one KV head, whose content is a token's row in bytes, keys and values
    side by side.

    It calls vLLM's own attention ops, so that graphs are split and captured and rows transferred as elsewhere.

    Args:
        native: the layer that this replaces under the same name. layer: writes rows and attends. parts: ranks that keep
            different rows. row_bytes: of a token in the cache. mixed: the model mixes sliding windows and full
            attention.
    """

    supports_dcp = False

    def __init__(
        self, native: Any, layer: PagedLayer, parts: int, row_bytes: int, mixed: bool, vllm_config: VllmConfig
    ) -> None:
        super().__init__()
        self.layer_name, self.attn_type = native.layer_name, native.attn_type
        parameters = layer.parameters
        self.num_heads, self.num_kv_heads = parameters.shape.num_heads, 1
        self.head_size, self.head_size_v = row_bytes, 0
        self.max_tp_shards, self.output_width = parts, parameters.heads_per_group * parameters.layout.value_width
        self.exact: ExactCache | None = None
        self.sliding_window = layer.window
        self.kv_cache_dtype = "auto"
        self.kv_sharing_target_layer_name = None
        self.kv_cache = torch.tensor([])
        self.impl = RotorImpl(self.num_heads, row_bytes, parameters.scaling, layer=layer)
        captured = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE if layer.decodes(1) else AttentionCGSupport.NEVER
        if layer.decodes(max_decode_query_len(vllm_config)):
            captured = AttentionCGSupport.UNIFORM_BATCH
        self._backend = _backend(captured, mixed)
        vllm_config.compilation_config.static_forward_context[self.layer_name] = self
        if parameters.layout.exact is not None:
            self.output_width = parameters.shape.num_heads * parameters.shape.head_dim
            if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
                _say_that_none_are_kept()
            else:
                self.exact = ExactCache(self, layer, parameters.layout.exact, vllm_config)
                self.impl.exact_name = self.exact.layer_name

    def get_attn_backend(self) -> type[RotorBackend]:
        return self._backend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        fields: dict[str, Any] = {
            "block_size": vllm_config.cache_config.block_size,
            "num_kv_heads": 1,
            # Bytes, however they are divided: layers of equal rows share a spec (and a metadata builder).
            "head_size": self.head_size,
            "head_size_v": 0,
            "dtype": torch.uint8,
            "dcp_sharded": False,
            "max_tp_shards": self.max_tp_shards,
        }
        if self.sliding_window is not None:
            return SlidingWindowSpec(sliding_window=self.sliding_window, **fields)
        return FullAttentionSpec(**fields)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, exact_key: Tensor | None = None) -> Tensor:
        """Write the rows of new tokens and attend; returns the outputs of all query heads side by side.

        Args:
            exact_key: in a layer with exact tokens, keys after RoPE; `value` then has heads.
        """
        output = torch.empty(query.shape[0], self.output_width, dtype=query.dtype, device=query.device)
        name = _encode_layer_name(self.layer_name)
        written = torch.ops.vllm.unified_kv_cache_update(key, value, name)
        if exact_key is not None:
            key = exact_key
        if self.exact is not None:
            of_exact = _encode_layer_name(self.exact.layer_name)
            written = torch.cat([written, torch.ops.vllm.unified_kv_cache_update(key, value, of_exact)])
        torch.ops.vllm.unified_attention_with_output(query, key, value, output, name, kv_cache_dummy_dep=written)
        return output


@lru_cache(maxsize=1)
def _say_that_none_are_kept() -> None:
    log.warning(
        "vLLM's hybrid cache manager is off, so that there is no place for exact tokens: earlier tokens are all read "
        "from codes, with less accuracy than the checkpoint's"
    )


class ExactCache(nn.Module, AttentionLayerBase):
    """The first and the newest tokens of a layer in the model's dtype: a cache of its own, of pages that vLLM manages.

    Args:
        cache: of the layer's rows, which attends to both.
    """

    supports_dcp = False

    def __init__(self, cache: RotorCache, layer: PagedLayer, exact: ExactTokens, vllm_config: VllmConfig) -> None:
        super().__init__()
        self.layer_name, self.attn_type = f"{cache.layer_name}.exact", cache.attn_type
        self.num_heads, self.num_kv_heads = cache.num_heads, 1
        self.head_size, self.head_size_v = layer.exact_bytes, 0
        self.max_tp_shards = layer.shard.parts * layer.shard.sharing
        self.sliding_window, self.first = exact.within(layer.window).newest, exact.first
        self.kv_cache_dtype = "auto"
        self.kv_sharing_target_layer_name = None
        self.kv_cache = torch.tensor([])
        self.impl = ExactImpl(cache.num_heads, layer.exact_bytes, layer.parameters.scaling, layer=layer)
        self._backend = cache.get_attn_backend()
        vllm_config.compilation_config.static_forward_context[self.layer_name] = self

    def get_attn_backend(self) -> type[RotorBackend]:
        return self._backend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        kind = FirstAndNewestSpec if self.first else SlidingWindowSpec
        return kind(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=1,
            head_size=self.head_size,
            head_size_v=0,
            dtype=torch.uint8,
            dcp_sharded=False,
            max_tp_shards=self.max_tp_shards,
            sliding_window=self.sliding_window,
        )


class RotorImpl(AttentionImpl[AttentionMetadata]):
    """Attention of one layer, which to vLLM has a single KV head."""

    def __init__(self, num_heads: int, head_size: int, scale: float, *, layer: PagedLayer) -> None:
        self.num_heads, self.head_size, self.scale, self.num_kv_heads = num_heads, head_size, scale, 1
        self.sliding_window, self.kv_cache_dtype = layer.window, "auto"
        self.layer = layer
        self.exact_name: str | None = None

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        self.layer.write(key, value, kv_cache[:, 0], slot_mapping)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: RotorMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if attn_metadata is None:  # vLLM measures the memory of a step
            self.layer.prepare(output.device)
            return output.fill_(0)
        exact = None
        if self.exact_name is not None:
            metadata, _, pages, _ = get_attention_context(self.exact_name)
            exact = ExactPages(pages[:, 0], metadata.block_table)
        new = None if self.layer.parameters.layout.exact is None else (key, value)
        self.layer.attend_step(query, kv_cache[:, 0], attn_metadata, output, exact, new)
        return output


class ExactImpl(RotorImpl):
    """Writes exact tokens; the layer of the rows attends to them."""

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        self.layer.write_exactly(key, value, kv_cache[:, 0], slot_mapping)


class RotorBackend(AttentionBackend):
    """The attention backend, the same for all layers except for CUDA graphs and cache layouts."""

    forward_includes_kv_cache_update = False
    builder: ClassVar[type[RotorMetadataBuilder]]
    layouts: ClassVar[tuple[KVCacheLayout, ...] | None] = None

    @staticmethod
    def get_name() -> str:
        return "ROTOR"

    @staticmethod
    def get_impl_cls() -> type[RotorImpl]:
        return RotorImpl

    @classmethod
    def get_builder_cls(cls) -> type[RotorMetadataBuilder]:
        return cls.builder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...] | None:
        return cls.layouts

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [16, 32, 64, 128, 256]  # powers of two, for the kernels

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # prompts are launched by the host's lengths of queries


@lru_cache(maxsize=8)
def _backend(captured: AttentionCGSupport, mixed: bool) -> type[RotorBackend]:
    """The backend of a layer.

    Args:
        captured: which batches go into a CUDA graph.
        mixed: the model mixes sliding windows and full attention. Pages of both sizes then lie side by side in blocks,
            which needs a block-outermost layout.
    """
    name = f"{captured.name}{'_MIXED' if mixed else ''}"
    builder = type(f"Builder_{name}", (RotorMetadataBuilder,), {"_cudagraph_support": captured, "__module__": __name__})
    layouts = (KVCacheLayout.BLHNC, KVCacheLayout.BLNHC) if mixed else None
    members = {"builder": builder, "layouts": layouts, "__module__": __name__}
    return type(f"Backend_{name}", (RotorBackend,), members)


class RotorMetadata(StepRequests, AttentionMetadata):
    """A step as vLLM passes it to the layers."""


class RotorMetadataBuilder(AttentionMetadataBuilder[RotorMetadata]):
    """Builds metadata of batches whose requests of few tokens come first: one token, or those of a speculation."""

    def __init__(
        self, kv_cache_spec: KVCacheSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> RotorMetadata:
        """Build the metadata of a batch, once for all builders of a step (layers of each width have one)."""
        common: Any = common_attn_metadata
        known = _latest.of(common)
        if known is None:
            threshold = self.reorder_batch_threshold or 1
            decodes = split_decodes_and_prefills(common, decode_threshold=threshold)[0]
            host = getattr(common, "seq_lens_cpu_upper_bound", None)
            lengths = common.seq_lens if host is None else host
            known = RotorMetadata(
                decodes,
                min(threshold, common.max_query_len),
                common.max_seq_len,  # the model's, where a graph is captured
                common.query_start_loc_cpu.tolist(),
                # A GPU is not asked; without the host's numbers the longest there may be stands for each.
                lengths.tolist() if lengths.device.type == "cpu" else [common.max_seq_len] * common.num_reqs,
                common.query_start_loc,
                common.seq_lens,
                common.block_table_tensor,
            )
            _latest.remember(common, known)
        return known


class _Latest:
    """Metadata of the latest batch, for the other builders of its step."""

    def __init__(self) -> None:
        self._batch: Any = None
        self._made: RotorMetadata | None = None

    def of(self, batch: Any) -> RotorMetadata | None:
        same = self._batch is not None and self._batch() is batch
        return self._made if same and self._made.block_table is batch.block_table_tensor else None  # type: ignore[union-attr]

    def remember(self, batch: Any, made: RotorMetadata) -> None:
        self._batch, self._made = weakref.ref(batch), made


_latest = _Latest()
