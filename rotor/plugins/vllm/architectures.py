"""Architectures that vLLM serves compressed. Imports nothing of vLLM, so that it starts as quickly as without rotor."""

from __future__ import annotations

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Phi3ForCausalLM": "phi3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "FalconForCausalLM": "falcon",
    "OPTForCausalLM": "opt",
    "GPT2LMHeadModel": "gpt2",
}
"""Name in config.json -> family. GPT-NeoX is not among them: vLLM dropped it."""

PREFIX = "Rotor"


def served_name(architecture: str) -> str:
    """The name under which the compressed class of an architecture is registered."""
    return PREFIX + architecture
