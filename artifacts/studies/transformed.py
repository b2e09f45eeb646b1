"""Write a llama that computes what another one does, with other keys and values: what it tells of a cache's code.

    python artifacts/studies/transformed.py artifacts/demo-model runs/transformed --largest 100
    python artifacts/studies/transformed.py artifacts/demo-model runs/plain --largest 1

The pairs of channels that RoPE rotates together are multiplied by s in W_k and by 1/s in W_q; s lies between 1 and
`--largest`, log-uniform, drawn for each pair and KV head. W_v of each KV head becomes A W_v and the slices of W_o that
read it W_o A^-1, where A is a rotation, such an s for each channel, and a rotation. Logits stay what they were, up to
float32's rounding; channels of keys and values get scales and directions that no norm or training keeps alike.
`--largest 1` writes the model itself, in float32, to compare with.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def transform(tensors: dict[str, Tensor], config: dict, largest: float, seed: int = 0) -> dict[str, Tensor]:
    """The tensors of a llama (names as transformers has them) with transformed keys and values, float32."""
    generator = torch.Generator().manual_seed(seed)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    found = {name: tensor.double() for name, tensor in tensors.items()}

    def scales(count: int) -> Tensor:
        return largest ** torch.rand(kv_heads, count, dtype=torch.float64, generator=generator)

    def rotations() -> Tensor:
        return torch.linalg.qr(torch.randn(kv_heads, dim, dim, dtype=torch.float64, generator=generator))[0]

    for layer in range(config["num_hidden_layers"]):
        pairs = scales(dim // 2).repeat(1, 2)  # RoPE rotates channel i with i + dim / 2
        of_query_heads = pairs.repeat_interleave(heads // kv_heads, 0)
        mixed = torch.eye(dim, dtype=torch.float64).expand(kv_heads, -1, -1)
        if largest > 1:
            mixed = rotations() @ torch.diag_embed(scales(dim)) @ rotations()
        for kind in ("weight", "bias"):
            q, k, v = (f"model.layers.{layer}.self_attn.{name}_proj.{kind}" for name in "qkv")
            if k in found:
                found[q] = (found[q].reshape(heads * dim, -1) / of_query_heads.flatten()[:, None]).reshape(
                    found[q].shape
                )
                found[k] = (found[k].reshape(kv_heads * dim, -1) * pairs.flatten()[:, None]).reshape(found[k].shape)
                found[v] = (mixed @ found[v].reshape(kv_heads, dim, -1)).reshape(found[v].shape)
        read = f"model.layers.{layer}.self_attn.o_proj.weight"
        slices = found[read].unflatten(1, (kv_heads, heads // kv_heads, dim))
        found[read] = torch.einsum("ohgd,hde->ohge", slices, torch.linalg.inv(mixed)).flatten(1)
    return {name: tensor.float().contiguous() for name, tensor in found.items()}


def write_transformed(model: Path, out: Path, largest: float, seed: int = 0) -> None:
    """Write the folder `out`: one file of weights in float32, and the tokenizer."""
    config = json.loads((model / "config.json").read_text())
    tensors = {name: tensor for file in sorted(model.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    out.mkdir(parents=True)
    for file in model.glob("*token*.json"):
        shutil.copy(file, out)
    config["dtype"] = "float32"
    (out / "config.json").write_text(json.dumps(config, indent=2))
    save_file(transform(tensors, config, largest, seed), out / "model.safetensors", {"format": "pt"})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--largest", type=float, default=100.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    write_transformed(given.model, given.out, given.largest, given.seed)
