"""Internals of vLLM that the plugin's adapter relies on: a version that changes it fails here, and says what."""

from __future__ import annotations

import inspect
from dataclasses import fields
from importlib import import_module
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM in an environment of its own: make test-vllm")
pytestmark = pytest.mark.vllm

BACKEND, SPECS = "vllm.v1.attention.backend", "vllm.v1.kv_cache_interface"
MANAGERS = "vllm.v1.core.single_type_kv_cache_manager"
LAYERS, ROTARY = "vllm.model_executor.layers", "vllm.model_executor.layers.rotary_embedding"
SIGNATURES = {
    # what vLLM calls, and we define
    f"{BACKEND}:AttentionImpl.forward": (
        "self layer query key value kv_cache attn_metadata output output_scale output_block_scale"
    ),
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.do_kv_cache_update": (
        "self layer key value kv_cache slot_mapping"
    ),
    f"{BACKEND}:AttentionBackend.get_name": "",
    f"{BACKEND}:AttentionBackend.get_impl_cls": "",
    f"{BACKEND}:AttentionBackend.get_builder_cls": "",
    f"{BACKEND}:AttentionBackend.supported_kv_cache_layouts": "",
    f"{BACKEND}:AttentionBackend.get_supported_kernel_block_sizes": "kv_cache_spec",
    f"{BACKEND}:AttentionBackend.supports_sliding_window": "",
    f"{BACKEND}:AttentionBackend.supports_device_cpu_query_lens_mismatch": "",
    f"{BACKEND}:AttentionMetadataBuilder.__init__": "self kv_cache_spec layer_names vllm_config device",
    f"{BACKEND}:AttentionMetadataBuilder.build": "self common_prefix_len common_attn_metadata fast_build",
    f"{BACKEND}:AttentionMetadataBuilder.get_cudagraph_support": "vllm_config kv_cache_spec",
    f"{LAYERS}.attention_layer_base:AttentionLayerBase.bind_kv_cache": "self kv_cache",
    f"{LAYERS}.attention_layer_base:AttentionLayerBase.get_attn_backend": "self",
    f"{LAYERS}.attention_layer_base:AttentionLayerBase.get_kv_cache_spec": "self vllm_config",
    "vllm.model_executor.models.config:VerifyAndUpdateConfig.verify_and_update_config": "vllm_config",
    "vllm.model_executor.models.llama:LlamaForCausalLM.load_weights": "self weights",
    # what we call
    f"{BACKEND}:AttentionMetadataBuilder._init_reorder_batch_threshold": (
        "self reorder_batch_threshold supports_spec_as_decode supports_dcp_with_varlen"
    ),
    f"{BACKEND}:max_decode_query_len": "vllm_config",
    "vllm.v1.attention.backends.utils:split_decodes_and_prefills": (
        "common_attn_metadata decode_threshold require_uniform treat_short_extends_as_decodes"
    ),
    f"{LAYERS}.attention.attention:unified_kv_cache_update": "key value layer_name",
    f"{LAYERS}.attention.attention:unified_attention_with_output": (
        "query key value output layer_name output_scale output_block_scale kv_cache_dummy_dep"
    ),
    f"{LAYERS}.attention.attention:get_attention_context": "layer_name",
    f"{MANAGERS}:resolve_block_hashes": (
        "block_hashes hash_block_size block_size supports_fine_grained_hash_lookup alignment_tokens"
    ),
    f"{MANAGERS}:SlidingWindowManager.find_longest_cache_hit": (
        "block_hashes max_length kv_cache_group_ids block_pool kv_cache_spec drop_eagle_block alignment_tokens "
        "dcp_world_size pcp_world_size"
    ),
    f"{MANAGERS}:SlidingWindowManager.remove_skipped_blocks": (
        "self request_id processed_computed_tokens num_prompt_tokens"
    ),
    f"{MANAGERS}:SlidingWindowManager._remove_blocks_in_range": "self request_id first_block last_block",
    f"{MANAGERS}:SlidingWindowManager.add_local_computed_blocks": (
        "self request_id new_computed_blocks num_local_computed_tokens num_external_computed_tokens"
    ),
    f"{MANAGERS}:SlidingWindowManager.get_num_blocks_to_allocate": (
        "self request_id num_tokens new_computed_blocks total_computed_tokens num_local_computed_tokens "
        "num_tokens_main_model apply_admission_cap prefill_end"
    ),
    f"{MANAGERS}:SlidingWindowManager._get_num_evictable_blocks": "blocks",
    f"{SPECS}:SlidingWindowSpec.max_admission_blocks_per_request": "self max_in_flight_tokens max_model_len",
    "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry.register": (
        "kvcache_spec_cls manager_class uniform_type_base_spec"
    ),
    "vllm.model_executor.models.utils:extract_layer_index": "layer_name num_attn_module",
    "vllm.utils.torch_utils:_encode_layer_name": "layer_name",
    "vllm.transformers_utils.model_arch_config_convertor:ModelArchConfigConvertorBase.__init__": (
        "self hf_config hf_text_config revision"
    ),
    "vllm.transformers_utils.model_arch_config_convertor:ModelArchConfigConvertorBase.get_num_experts": "self",
    "vllm.model_executor.models.registry:_LazyRegisteredModel.load_model_cls": "self",
    f"{ROTARY}.base:RotaryEmbeddingBase._compute_cos_sin_cache": "self",
    f"{ROTARY}.phi3_long_rope_scaled_rope:Phi3LongRoPEScaledRotaryEmbedding._compute_cos_sin_cache": (
        "self max_position_embeddings rescale_factors mscale"
    ),
    "vllm.distributed:tensor_model_parallel_all_reduce": "input_",
    "vllm.v1.attention.backends.fa_utils:get_flash_attn_version": (
        "requires_alibi head_size head_size_v has_sinks requires_softcap kv_cache_block_size supports_fa4_hd256"
    ),
}
"""Names of parameters."""

FIELDS = {
    f"{BACKEND}:CommonAttentionMetadata": (
        "query_start_loc query_start_loc_cpu seq_lens num_reqs num_actual_tokens max_query_len max_seq_len "
        "block_table_tensor slot_mapping seq_lens_cpu_upper_bound"
    ),
    f"{SPECS}:FullAttentionSpec": "block_size num_kv_heads head_size head_size_v dtype dcp_sharded max_tp_shards",
    f"{SPECS}:SlidingWindowSpec": (
        "block_size num_kv_heads head_size head_size_v dtype dcp_sharded max_tp_shards sliding_window"
    ),
    "vllm.config:VllmConfig": (
        "model_config cache_config parallel_config device_config lora_config quant_config compilation_config "
        "kv_transfer_config"
    ),
    "vllm.config:ModelConfig": "model revision dtype max_model_len hf_config",
    "vllm.config:CacheConfig": "block_size cache_dtype",
    "vllm.config:ParallelConfig": "tensor_parallel_size decode_context_parallel_size",
    "vllm.config:DeviceConfig": "device",
    "vllm.config:CompilationConfig": "static_forward_context",
    "vllm.config:KVTransferConfig": "kv_connector kv_connector_extra_config kv_connector_module_path",
}
"""That are read or set; others may come and go."""


def found(place: str) -> Any:
    module, _, path = place.partition(":")
    value: Any = import_module(module)
    for part in path.split("."):
        assert hasattr(value, part), f"{place}: vLLM has no {part} there any more"
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("place", SIGNATURES)
def test_signatures_are_those_that_the_adapter_was_written_for(place: str) -> None:
    got, expected = list(inspect.signature(found(place)).parameters), SIGNATURES[place].split()
    new, gone = sorted(set(got) - set(expected)), sorted(set(expected) - set(got))
    assert got == expected, f"{place} takes {got}: new {new}, gone {gone}"


@pytest.mark.parametrize("place", FIELDS)
def test_fields_are_those_that_the_adapter_reads(place: str) -> None:
    of = found(place)
    names = {field.name for field in fields(of)}
    gone = sorted(set(FIELDS[place].split()) - names)
    assert not gone, f"{place} has no {', '.join(gone)} any more"


def test_what_the_adapter_must_define_is_what_it_defines() -> None:
    from rotor.vllm import adapter

    for name in ("RotorBackend", "RotorImpl", "RotorMetadataBuilder", "RotorCache"):
        missing = sorted(getattr(getattr(adapter, name), "__abstractmethods__", ()))
        assert not missing, f"{name}: vLLM asks for {', '.join(missing)} too"


def test_names_of_graphs_layouts_and_operators() -> None:
    import torch
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionMetadataBuilder
    from vllm.v1.kv_cache_layout import KVCacheLayout

    assert {"NEVER", "UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH"} <= set(AttentionCGSupport.__members__)
    assert {"BLHNC", "BLNHC"} <= set(KVCacheLayout.__members__)
    assert isinstance(MODELS_CONFIG_MAP, dict)
    assert isinstance(ModelRegistry.models, dict)
    assert AttentionMetadataBuilder._cudagraph_support is AttentionCGSupport.NEVER
    assert AttentionBackend.forward_includes_kv_cache_update is True
    for operator in ("unified_kv_cache_update", "unified_attention_with_output"):
        assert hasattr(torch.ops.vllm, operator)
    # set in __init__, and read of the layer that is replaced
    source = inspect.getsource(Attention.__init__)
    for name in ("layer_name", "attn_type", "sliding_window", "impl"):
        assert f"self.{name}" in source, f"Attention sets no {name} any more"


def test_the_page_of_the_first_tokens_stays_in_the_block_table() -> None:
    """vLLM 0.33 takes pages out of a step's block table that lie further than an int32 says before its first token."""
    import torch

    from rotor.vllm.windows import FirstAndNewestSpec

    spec = FirstAndNewestSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.uint8, sliding_window=20)
    assert int(torch.tensor(spec.num_retained_tokens, dtype=torch.int32)) > 1_000_000_000
