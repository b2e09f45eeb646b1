"""Accuracy with a cache policy in force: measured through the cache, in tables of its own."""

from __future__ import annotations

import pytest
import torch
from support.runs import calibrated, in_memory
from transformers.cache_utils import DynamicCache

from rotor import export
from rotor.policies import GEAR, H2O, Window, cache_policy, stored_bytes
from rotor.tools.study.caches import cache_bytes, of_row


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    return calibrated(tiny("llama"), tmp_path_factory.mktemp("accuracy") / "run", "pre", 2)


def test_export_measures_with_the_policy(run, tmp_path) -> None:
    plain = export(run.folder, tmp_path / "plain", compression=0.2).report
    kept = export(run.folder, tmp_path / "kept", compression=0.2, cache="per-token-2").report
    assert plain["accuracy"]["table"] != kept["accuracy"]["table"]
    losses = [found["accuracy"]["measurements"]["report"]["values"]["kl_div"] for found in (plain, kept)]
    assert 0 < losses[0] < losses[1]
    size = kept["cache"]["kv_bytes_per_token"]
    assert set(size) == {"128", "32768"}
    assert size["128"] < plain["kv_bytes_per_token"]["after"]
    assert "cache" not in plain
    assert "| cache policy | per-token;" in (tmp_path / "kept" / "README.md").read_text()


@pytest.mark.parametrize("policy", [H2O(share=0.5), Window(share=0.5), GEAR(4)], ids=str)
@pytest.mark.parametrize("compressed", [False, True])
def test_bytes_by_shape_are_those_of_a_run(policy, compressed: bool, run) -> None:
    network = in_memory(run)
    if compressed:
        bases = run.bases()
        network.compress(bases, [[(8, 12)] * len(b.qk.encode) for b in bases])
    cache = DynamicCache(config=network.config)
    rows = torch.randint(1, 4096, (1, 24), generator=torch.Generator().manual_seed(0))
    found = []
    with torch.no_grad(), cache_policy(network.model, of_row(policy, 22)):
        for start, end in ((0, 20), (20, 21), (21, 22)):
            network.model(input_ids=rows[:, start:end], past_key_values=cache)
            found.append(stored_bytes(cache))
    assert cache_bytes(network, 20, 22, policy) == found
