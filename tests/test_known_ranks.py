"""A model whose heads use known numbers of dimensions gets exactly these ranks, and identical logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.compare import relative_error
from support.tiny_models import build_tiny
from transformers import AutoModelForCausalLM

from rotor import calibrate, export

HEAD_DIM, HEADS_PER_KV = 16, 2
QK_RANKS = [[2, 6, 10, 16], [14, 4, 8, 12]]
V_RANKS = [[5, 16, 9, 1], [3, 7, 16, 11]]


def plant_ranks(folder: Path) -> Path:
    """Zero whole rotary pairs of q and k, and rows of v, so that head h of layer l uses just the planted dimensions."""
    build_tiny("llama", folder)
    tensors = load_file(folder / "model.safetensors")
    half = HEAD_DIM // 2
    for layer in range(2):
        prefix = f"model.layers.{layer}.self_attn."
        for head in range(4):
            unused = list(range(QK_RANKS[layer][head] // 2, half))
            unused += [i + half for i in unused]
            for name, first, count in (("q_proj", head * HEADS_PER_KV, HEADS_PER_KV), ("k_proj", head, 1)):
                for h in range(first, first + count):
                    rows = [h * HEAD_DIM + i for i in unused]
                    tensors[prefix + name + ".weight"][rows] = 0
                    tensors[prefix + name + ".bias"][rows] = 0
            rows = list(range(head * HEAD_DIM + V_RANKS[layer][head], (head + 1) * HEAD_DIM))
            tensors[prefix + "v_proj.weight"][rows] = 0
            tensors[prefix + "v_proj.bias"][rows] = 0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("multiple_of", [1, 8])
def test_planted_ranks_are_found_and_logits_stay(tmp_path: Path, multiple_of: int) -> None:
    """At a tiny removal rate; exact ranks are kept beside the rounded ones."""
    model = plant_ranks(tmp_path / "model")
    settings = ["tokens.count=4096", "tokens.seq_len=128", f"ranks.multiple_of={multiple_of}", "evaluation.seq_len=64"]
    small = ["evaluation.search_tokens=256", "evaluation.report_tokens=256"]
    run = calibrate(model, tmp_path / "run", "fdc", [*settings, *small])
    report = export(run.folder, tmp_path / "out", removal_rate=1e-6).report
    exact = [[list(pair) for pair in zip(qk, v, strict=True)] for qk, v in zip(QK_RANKS, V_RANKS, strict=True)]
    assert report["ranks"]["exact"] == exact
    stored = [[[-(-rank // multiple_of) * multiple_of for rank in pair] for pair in layer] for layer in exact]
    assert report["ranks"]["stored"] == stored
    # Groups are ordered by class, widest first; the KV heads say which is which.
    groups = report["layouts"][0]["groups"]
    assert [group["kv_heads"] for group in groups] == (
        [[2], [3], [1], [0]] if multiple_of == 8 else [[3], [2], [1], [0]]
    )
    assert all([group["key"], group["value"]] == stored[0][group["kv_heads"][0]] for group in groups)
    prompt = torch.randint(1, 4096, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        before = AutoModelForCausalLM.from_pretrained(model)(prompt).logits
        after = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(prompt).logits
    assert relative_error(after, before) < 1e-5
