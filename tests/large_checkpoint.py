"""Make a large checkpoint of random weights with real layer shapes, shard by shard: for the test of memory limits.

    python tests/large_checkpoint.py FOLDER [--layers 14]

Layers are those of Llama-3-8B (hidden size 4096, 32 query and 8 KV heads of 128, feed-forward 14336, bfloat16): 0.44 GB
each, and 1.05 GB each for the embedding and the head; one shard a layer.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from rotor.format.atomic import write_json

CONFIG = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "dtype": "bfloat16",
}


def make_checkpoint(folder: Path, layers: int, **changes: int) -> int:
    """Write the checkpoint; returns the bytes of its shards. Weights of all layers are parts of one random block."""
    settings = {**CONFIG, **changes, "num_hidden_layers": layers}
    config = LlamaConfig(**settings)
    config.architectures = ["LlamaForCausalLM"]
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    hidden, width = config.hidden_size, config.intermediate_size
    kv = config.num_key_value_heads * config.head_dim
    generator = torch.Generator().manual_seed(0)
    largest = max(config.vocab_size, width) * hidden
    block = torch.randn(1 << 24, generator=generator).mul_(hidden**-0.5).bfloat16()
    block = block.repeat(-(-(largest + (1 << 20)) // len(block)))

    def weight(rows: int, columns: int, offset: int) -> torch.Tensor:
        return block[offset : offset + rows * columns].reshape(rows, columns).clone()

    norm = torch.ones(hidden, dtype=torch.bfloat16)
    shards = {"model.embed_tokens.weight": (config.vocab_size, hidden)}, {"lm_head.weight": (config.vocab_size, hidden)}
    attention = {"q_proj": (hidden, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, hidden)}
    feed_forward = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
    parts: list[dict[str, tuple[int, ...]]] = [*shards, {"model.norm.weight": (hidden,)}]
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        parts.append(
            {
                **{f"{prefix}self_attn.{name}.weight": shape for name, shape in attention.items()},
                **{f"{prefix}mlp.{name}.weight": shape for name, shape in feed_forward.items()},
                f"{prefix}input_layernorm.weight": (hidden,),
                f"{prefix}post_attention_layernorm.weight": (hidden,),
            }
        )
    weight_map, total = {}, 0
    for index, part in enumerate(parts):
        file = f"model-{index:05d}-of-{len(parts):05d}.safetensors"
        tensors = {}
        for place, (name, shape) in enumerate(part.items()):
            offset = (7919 * index + 104729 * place) % (1 << 20)
            tensors[name] = norm.clone() if len(shape) == 1 else weight(*shape, offset)
            weight_map[name] = file
        save_file(tensors, folder / file, metadata={"format": "pt"})
        total += (folder / file).stat().st_size
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    return total


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=14)
    arguments = parser.parse_args()
    print(f"{make_checkpoint(arguments.folder, arguments.layers) / 1e9:.2f} GB")
