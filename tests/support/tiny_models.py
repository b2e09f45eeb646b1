"""Tiny models with random weights, one or more of each family."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from support.paths import DEMO_MODEL

COMMON: dict[str, Any] = {
    "vocab_size": 4096,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
}
SIZES: dict[str, Any] = COMMON | {
    "intermediate_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "tie_word_embeddings": True,
}
UNTIED: dict[str, Any] = {"tie_word_embeddings": False}
EVEN: dict[str, Any] = SIZES | UNTIED | {"hidden_size": 64}
"""Sizes of models with experts: on a CPU those of vLLM take multiples of 32. Some of its models have a head of their
own whatever the config says."""
IMPLIED_HEAD_DIM: dict[str, Any] = {k: v for k, v in SIZES.items() if k != "head_dim"} | {"hidden_size": 128}
MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(36)],
    "long_factor": [2.0 + 0.3 * i for i in range(36)],
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 128,
}
FALCON = COMMON | {"hidden_size": 64, "num_attention_heads": 4}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES, attention_bias=True, rope_parameters=LLAMA3_ROPE),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=12),
    "mixtral": lambda: MixtralConfig(
        **SIZES | {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 48},
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "qwen2": lambda: Qwen2Config(**IMPLIED_HEAD_DIM),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **IMPLIED_HEAD_DIM | {"tie_word_embeddings": False},
        **MOE,
        shared_expert_intermediate_size=32,
        mlp_only_layers=[1],
    ),
    "qwen3": lambda: Qwen3Config(**SIZES),
    "qwen3_moe": lambda: Qwen3MoeConfig(**EVEN, **MOE),
    "phi3": lambda: Phi3Config(
        **COMMON | {"hidden_size": 192},
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=2,
        original_max_position_embeddings=128,
        rope_parameters=LONGROPE,
    ),
    "gemma2": lambda: Gemma2Config(
        **SIZES, sliding_window=12, attn_logit_softcapping=2.0, final_logit_softcapping=10.0, query_pre_attn_scalar=24
    ),
    "gemma3_text": lambda: Gemma3TextConfig(
        **SIZES,
        sliding_window=12,
        layer_types=["sliding_attention", "full_attention"],
        query_pre_attn_scalar=24,
    ),
    "gpt_neox": lambda: GPTNeoXConfig(
        **COMMON | {"hidden_size": 160, "rotary_pct": 0.25}, num_attention_heads=2, intermediate_size=64
    ),
    "opt": lambda: OPTConfig(
        **COMMON | {"hidden_size": 160, "pad_token_id": 1}, num_attention_heads=2, ffn_dim=64, word_embed_proj_dim=64
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=4096, bos_token_id=0, eos_token_id=0, n_embd=64, n_layer=2, n_head=4, n_positions=256
    ),
    "falcon": lambda: FalconConfig(**FALCON),
    "falcon-40b": lambda: FalconConfig(**FALCON, new_decoder_architecture=True, num_kv_heads=2),
    "falcon-rw": lambda: FalconConfig(**FALCON, multi_query=False, parallel_attn=False, bias=True),
}
"""One tiny config a family, and one a layout of Falcon's fused projection.

Between them: biases, tied embeddings, scaled RoPE (llama, phi3), partial rotary (phi3, gpt_neox), sliding windows
shorter than the sequences, per-head norms, two RoPEs (gemma3_text), a soft cap, no RoPE, Conv1D, one KV head (falcon),
a dense layer among sparse ones (qwen2_moe), head_dim 48, 80 and 96, and other than hidden_size / num_attention_heads.
"""

WINDOWS: dict[str, Any] = {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]}
AMONG_OTHERS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "full_attention", "linear_attention"],
}
AMONG_CONVOLUTIONS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "full_attention", "conv"],
}
DELTA = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
FAR_QUERIES = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.5,
}
STRETCHED = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": 10.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
ROUTED = MOE | {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
BIASED: dict[str, Any] = SIZES | {"attention_bias": True}
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
TWO_SIZES: dict[str, Any] = {
    "attention_k_eq_v": True,
    "global_head_dim": 32,
    "num_global_key_value_heads": 2,
    "hidden_size_per_layer_input": 0,
}
ALIKE: dict[str, tuple[str, dict[str, Any]]] = {
    "apertus": ("ApertusConfig", SIZES),
    "arcee": ("ArceeConfig", BIASED),
    "dots1": (
        "Dots1Config",
        EVEN | ROUTED,
    ),
    "afmoe": (
        "AfmoeConfig",
        EVEN
        | WINDOWS
        | MOE
        | {
            "num_dense_layers": 1,
            "num_shared_experts": 1,
            "score_func": "sigmoid",
            "route_norm": True,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "cohere": ("CohereConfig", IMPLIED_HEAD_DIM),
    "cohere2": ("Cohere2Config", IMPLIED_HEAD_DIM | WINDOWS),
    "cwm": ("CwmConfig", SIZES | WINDOWS),
    "ernie4_5": ("Ernie4_5Config", SIZES | {"use_bias": True}),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        EVEN | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 1},
    ),
    "exaone4": ("Exaone4Config", SIZES | WINDOWS),
    "exaone_moe": ("ExaoneMoeConfig", EVEN | WINDOWS | MOE),
    "flex_olmo": ("FlexOlmoConfig", IMPLIED_HEAD_DIM | UNTIED | EXPERTS),
    "gemma": ("GemmaConfig", SIZES),
    "gemma4_text": (
        "Gemma4TextConfig",
        SIZES | WINDOWS | TWO_SIZES | MOE | {"enable_moe_block": True, "top_k_experts": 2},
    ),
    "gemma4_unified_text": ("Gemma4UnifiedTextConfig", SIZES | WINDOWS | TWO_SIZES),
    "glm": ("GlmConfig", SIZES | {"attention_bias": True, "rope_parameters": PARTIAL}),
    "glm4": ("Glm4Config", SIZES | {"rope_parameters": PARTIAL}),
    "glm4_moe": ("Glm4MoeConfig", BIASED | EVEN | ROUTED | {"use_qk_norm": True, "rope_parameters": PARTIAL}),
    "gpt_oss": ("GptOssConfig", EVEN | WINDOWS | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "granite": ("GraniteConfig", IMPLIED_HEAD_DIM | {"attention_multiplier": 0.3, "residual_multiplier": 0.5}),
    "granitemoe": ("GraniteMoeConfig", IMPLIED_HEAD_DIM | {"attention_multiplier": 0.3, "num_local_experts": 4}),
    "granitemoeshared": (
        "GraniteMoeSharedConfig",
        IMPLIED_HEAD_DIM | {"attention_multiplier": 0.3, "num_local_experts": 4, "shared_intermediate_size": 32},
    ),
    "helium": ("HeliumConfig", SIZES | {"hidden_size": 128}),
    "hunyuan_v1_dense": ("HunYuanDenseV1Config", BIASED),
    "hunyuan_v1_moe": (
        "HunYuanMoEV1Config",
        EVEN | {"num_experts": 4, "moe_topk": 2, "rope_parameters": STRETCHED},
    ),
    "hy_v3": ("HYV3Config", EVEN | MOE),
    "hyperclovax": ("HyperCLOVAXConfig", SIZES | {"attention_multiplier": 0.3}),
    "jais2": ("Jais2Config", SIZES),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        IMPLIED_HEAD_DIM
        | MAMBA
        | AMONG_OTHERS
        | {"num_local_experts": 0, "shared_intermediate_size": 32, "position_embedding_type": "nope"},
    ),
    "bamba": ("BambaConfig", IMPLIED_HEAD_DIM | MAMBA | {"num_hidden_layers": 4, "attn_layer_indices": [1, 2]}),
    "jamba": (
        "JambaConfig",
        IMPLIED_HEAD_DIM
        | {
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "mamba_dt_rank": 4,
        },
    ),
    "lfm2": ("Lfm2Config", IMPLIED_HEAD_DIM | AMONG_CONVOLUTIONS),
    "lfm2_moe": ("Lfm2MoeConfig", IMPLIED_HEAD_DIM | AMONG_CONVOLUTIONS | MOE | {"num_dense_layers": 1}),
    "falcon_h1": ("FalconH1Config", SIZES | MAMBA | {"mamba_d_ssm": 64, "mamba_d_head": 8, "key_multiplier": 0.7}),
    "nemotron_h": (
        "NemotronHConfig",
        SIZES
        | {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "full_attention", "mlp", "full_attention"]}
        | {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1},
    ),
    "llama4_text": (
        "Llama4TextConfig",
        SIZES
        | {"no_rope_layers": [1, 0], "attention_chunk_size": 12, "floor_scale": 128}
        | {
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "ministral3": ("Ministral3Config", SIZES | {"rope_parameters": FAR_QUERIES}),
    "mellum": ("MellumConfig", EVEN | WINDOWS | MOE),
    "minimax_m2": (
        "MiniMaxM2Config",
        EVEN | {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": PARTIAL},
    ),
    "ministral": ("MinistralConfig", SIZES | WINDOWS),
    "nanochat": ("NanoChatConfig", IMPLIED_HEAD_DIM | {"rope_parameters": YARN}),
    "nemotron": ("NemotronConfig", SIZES | {"rope_parameters": PARTIAL}),
    "olmo": ("OlmoConfig", IMPLIED_HEAD_DIM),
    "olmo2": ("Olmo2Config", IMPLIED_HEAD_DIM),
    "olmo3": ("Olmo3Config", IMPLIED_HEAD_DIM | WINDOWS),
    "olmoe": ("OlmoeConfig", IMPLIED_HEAD_DIM | UNTIED | EXPERTS),
    "phi": ("PhiConfig", IMPLIED_HEAD_DIM | {"rope_parameters": PARTIAL, "tie_word_embeddings": False}),
    "phimoe": ("PhimoeConfig", IMPLIED_HEAD_DIM | UNTIED | {"attention_bias": True, "num_local_experts": 4}),
    "qwen3_5_text": ("Qwen3_5TextConfig", SIZES | AMONG_OTHERS | DELTA),
    "qwen3_5_moe_text": (
        "Qwen3_5MoeTextConfig",
        SIZES | AMONG_OTHERS | DELTA | MOE | {"shared_expert_intermediate_size": 32},
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        SIZES | AMONG_OTHERS | DELTA | MOE | {"shared_expert_intermediate_size": 32, "attention_bias": True},
    ),
    "seed_oss": ("SeedOssConfig", BIASED | {"attention_out_bias": True}),
    "smollm3": ("SmolLM3Config", IMPLIED_HEAD_DIM | {"no_rope_layers": [1, 0]}),
    "solar_open": ("SolarOpenConfig", EVEN | ROUTED),
    "stablelm": ("StableLmConfig", IMPLIED_HEAD_DIM | {"rope_parameters": PARTIAL, "use_qkv_bias": True}),
    "starcoder2": ("Starcoder2Config", IMPLIED_HEAD_DIM | {"sliding_window": 12}),
    "vaultgemma": ("VaultGemmaConfig", SIZES | {"sliding_window": 12, "attn_logit_softcapping": 2.0}),
}
"""Class of the config and settings of families whose attention is that of one in CONFIGS, which a test of the whole
pipeline checks."""

SHARED_CACHE: dict[str, Any] = {
    "num_hidden_layers": 6,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 3,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 4096,
    "use_double_wide_mlp": True,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4_text-e2b": ("Gemma4TextConfig", SIZES | SHARED_CACHE),
}
"""The same of variants of families in ALIKE: layers that read the cache of others, and the tokens."""

VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 16,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "patch_size": 4,
    "num_position_embeddings": 16,
}
QWEN_IMAGES: dict[str, Any] = {"image_token_id": 5, "vision_start_token_id": 6, "vision_end_token_id": 7}
GEMMA4_TOKENS: dict[str, Any] = {
    "image_token_id": 5,
    "boi_token_id": 6,
    "eoi_token_id": 7,
    "video_token_id": 4,
    "audio_token_id": 3,
}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
PARTIAL_MROPE = PARTIAL | {"mrope_section": [2, 1, 1]}
MULTIMODAL: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        "Gemma3Config",
        SIZES | WINDOWS,
        VISION,
        {"mm_tokens_per_image": 4, "image_token_index": 5, "boi_token_index": 6, "eoi_token_index": 7},
    ),
    "gemma4": (
        "Gemma4Config",
        SIZES | SHARED_CACHE | {"pad_token_id": 0},
        VISION | {"num_key_value_heads": 2, "position_embedding_size": 16, "pooling_kernel_size": 2},
        GEMMA4_TOKENS,
    ),
    "gemma4_unified": (
        "Gemma4UnifiedConfig",
        SIZES | WINDOWS | TWO_SIZES | {"use_bidirectional_attention": "vision", "pad_token_id": 0},
        {"patch_size": 14, "pooling_kernel_size": 1, "mm_embed_dim": 32, "mm_posemb_size": 16, "output_proj_dims": 32},
        GEMMA4_TOKENS,
    ),
    "llama4": (
        "Llama4Config",
        ALIKE["llama4_text"][1] | {"tie_word_embeddings": False},
        VISION
        | {"intermediate_size": 128, "projector_input_dim": 32, "projector_output_dim": 32}
        | {"image_size": 56, "vision_output_dim": 32},
        {"image_token_index": 5, "boi_token_index": 6, "eoi_token_index": 7},
    ),
    "mistral3": (
        "Mistral3Config",
        SIZES | {"model_type": "mistral", "tie_word_embeddings": False},
        VISION | {"model_type": "pixtral"},
        {"image_token_index": 5, "tie_word_embeddings": False},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLConfig",
        IMPLIED_HEAD_DIM | {"rope_parameters": MROPE},
        QWEN_VISION | {"out_hidden_size": 128, "window_size": 16},
        QWEN_IMAGES,
    ),
    "qwen3_vl": (
        "Qwen3VLConfig",
        SIZES | {"rope_parameters": MROPE},
        QWEN_VISION | {"out_hidden_size": 48, "deepstack_visual_indexes": [0]},
        QWEN_IMAGES | {"tie_word_embeddings": True},
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoeConfig",
        SIZES | MOE | {"rope_parameters": MROPE},
        QWEN_VISION | {"out_hidden_size": 48, "deepstack_visual_indexes": [0]},
        QWEN_IMAGES,
    ),
    "qwen3_5": (
        "Qwen3_5Config",
        SIZES | AMONG_OTHERS | DELTA | {"rope_parameters": PARTIAL_MROPE},
        QWEN_VISION | {"out_hidden_size": 48},
        QWEN_IMAGES,
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeConfig",
        SIZES | AMONG_OTHERS | DELTA | MOE | {"shared_expert_intermediate_size": 32, "rope_parameters": PARTIAL_MROPE},
        QWEN_VISION | {"out_hidden_size": 48},
        QWEN_IMAGES,
    ),
}
"""Models that read more than text: class of the config; settings of the language model, the vision tower, and both."""

NO_ROPE = frozenset({"gpt2", "opt"})


def tiny_config(family: str) -> Any:
    """The config of a tiny model of a family, in CONFIGS, ALIKE, VARIANTS or MULTIMODAL."""
    if family in CONFIGS:
        return CONFIGS[family]()
    if family in MULTIMODAL:
        name, text, vision, both = MULTIMODAL[family]
        return getattr(transformers, name)(text_config=dict(text), vision_config=dict(vision), **both)
    name, settings = (ALIKE | VARIANTS)[family]
    return getattr(transformers, name)(**settings)


def tiny_model(family: str) -> Any:
    """A tiny model with random weights large enough that attention is not uniform; biases and norms random too."""
    torch.manual_seed(0)
    config = tiny_config(family)
    auto_class = AutoModelForImageTextToText if family in MULTIMODAL else AutoModelForCausalLM
    model = auto_class.from_config(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name or "ln_" in name:
                parameter.add_(0.2 * noise)
            elif parameter.dim() == 1:
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(noise * (1.5 / parameter.shape[-1] ** 0.5))
    return model


def build_tiny(family: str, folder: Path, dtype: torch.dtype = torch.float32, **save: object) -> Path:
    """The folder of a `tiny_model`, with the bundled tokenizer."""
    tiny_model(family).to(dtype).save_pretrained(folder, **save)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, folder / name)
    return folder


def demo_model(folder: Path, **fields: object) -> Path:
    """A copy of the bundled model whose configuration has other fields."""
    shutil.copytree(DEMO_MODEL, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder
