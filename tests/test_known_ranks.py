"""A model whose heads use known numbers of dimensions gets exactly these ranks, and identical logits."""

from __future__ import annotations

from pathlib import Path

import torch
from conftest import build_tiny, in_memory, relative_error
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rotor.allocation.removal_rate import RemovalRatePath
from rotor.calibration.calibrate import calibrate
from rotor.export.export import export
from rotor.search.search import rank_path

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


def test_planted_ranks_are_found_at_a_tiny_removal_rate(tmp_path: Path) -> None:
    model = plant_ranks(tmp_path / "model")
    settings = ["tokens.count=4096", "tokens.seq_len=128", "ranks.multiple_of=1", "evaluation.seq_len=64"]
    small = ["evaluation.search_tokens=256", "evaluation.report_tokens=256"]
    run = calibrate(model, tmp_path / "run", "fdc", [*settings, *small])
    path = rank_path(run.bases(), run, run.recipe)
    assert isinstance(path, RemovalRatePath)
    plan = path.plan(1e-6)
    expected = [list(zip(qk, v, strict=True)) for qk, v in zip(QK_RANKS, V_RANKS, strict=True)]
    assert plan.exact == expected

    export(run.folder, tmp_path / "out", removal_rate=1e-6)
    prompt = torch.randint(1, 4096, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        before = AutoModelForCausalLM.from_pretrained(model)(prompt).logits
        after = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(prompt).logits
    assert relative_error(after, before) < 1e-5


def test_exact_ranks_are_kept_beside_the_rounded_ones(tmp_path: Path) -> None:
    model = plant_ranks(tmp_path / "model")
    overrides = ["tokens.count=4096", "tokens.seq_len=128", "ranks.multiple_of=8", "evaluation.seq_len=64"]
    run = calibrate(
        model, tmp_path / "run", "fdc", [*overrides, "evaluation.search_tokens=256", "evaluation.report_tokens=256"]
    )
    report = export(run.folder, tmp_path / "out", removal_rate=1e-6).report
    assert report["ranks"]["exact"][0] == [[2, 5], [6, 16], [10, 9], [16, 1]]
    assert report["ranks"]["stored"][0] == [[8, 8], [8, 16], [16, 16], [16, 8]]
    # Groups are ordered by class, widest first; the KV heads say which is which.
    groups = report["layouts"][0]["groups"]
    assert [(g["kv_heads"], g["key"], g["value"]) for g in groups] == [
        ([2], 16, 16),
        ([3], 16, 8),
        ([1], 8, 16),
        ([0], 8, 8),
    ]
    network = in_memory(run)
    prompt = torch.randint(1, 4096, (1, 30), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        before = network.model(prompt).logits
        after = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(prompt).logits
    assert relative_error(after, before) < 1e-5
