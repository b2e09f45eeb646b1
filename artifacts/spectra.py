"""How many channels hold 99 % of the energy of a model's keys (before RoPE) and values: what compression lives on.

    python artifacts/spectra.py artifacts/demo-model

For models of llama's kind, on rows of 512 tokens of the standard library's argparse, which no training here has seen.
"""

from __future__ import annotations

import argparse
import inspect
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
    folder = parser.parse_args().model
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
    print(f"| layer | keys, of {dim} a head | values, of {dim} a head | a layer, scaled alike |")
    print("|---|---|---|---|")
    for index, (keys, values) in enumerate(zip(*found.values(), strict=True)):
        heads = [[channels(head) for head in side.split(dim, 1)] for side in (keys, values)]
        both = torch.cat([keys, values], 1)
        alike = (both - both.mean(0)) / both.std(0)
        cells = [", ".join(map(str, side)) for side in heads]
        print(f"| {index} | {cells[0]} | {cells[1]} | {channels(alike)} of {alike.shape[1]} |")


if __name__ == "__main__":
    main()
