"""Count channels that hold 99 % of the energy of a model's keys (before RoPE) and values: what compression lives on.

    python artifacts/spectra.py artifacts/demo-model [--json]

For models of llama's kind, on rows of 512 tokens of the standard library's argparse, which no training here has seen.
"""

from __future__ import annotations

import argparse
import inspect
import json
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer


def channels(numbers: Tensor, share: float = 0.99) -> int:
    """Leading principal directions of [tokens, width] that hold a share of its energy."""
    energy = torch.linalg.eigvalsh(numbers.mT @ numbers).flip(0).clamp(min=0)
    return int((energy.cumsum(0) < share * energy.sum()).sum()) + 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument(
        "--json", action="store_true", help="of each layer its keys, its values, and both, scaled alike"
    )
    given = parser.parse_args()
    folder = given.model
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(folder)(inspect.getsource(argparse)).input_ids
    rows = torch.tensor(ids[: len(ids) // 512 * 512]).view(-1, 512)
    found: dict[str, list[Tensor]] = {"k_proj": [], "v_proj": []}
    for layer in model.model.layers:
        for name, seen in found.items():
            projection = getattr(layer.self_attn, name)
            projection.register_forward_hook(lambda _, __, out, seen=seen: seen.append(out.flatten(0, 1).double()))
    with torch.no_grad():
        model(rows)
    dim = model.config.head_dim
    layers = []
    for keys, values in zip(*found.values(), strict=True):
        heads = [[channels(head) for head in side.split(dim, 1)] for side in (keys, values)]
        both = torch.cat([keys, values], 1)
        layers.append((*heads, channels((both - both.mean(0)) / both.std(0))))
    if given.json:
        print(json.dumps(layers))
        return
    print(f"| layer | keys, of {dim} a head | values, of {dim} a head | a layer, scaled alike, of {both.shape[1]} |")
    print("|---|---|---|---|")
    for index, (of_keys, of_values, alike) in enumerate(layers):
        print(f"| {index} | {', '.join(map(str, of_keys))} | {', '.join(map(str, of_values))} | {alike} |")


if __name__ == "__main__":
    main()
