"""Accuracy with a cache policy in force: measured through the cache, in tables of its own; and the study's parts."""

from __future__ import annotations

import pytest
import torch
from conftest import DEMO_MODEL, FAST_EVALUATION, calibrated, in_memory

from rotor.errors import UsageError
from rotor.evaluation.cached import final_states_through_cache
from rotor.export.export import export
from rotor.policies import GEAR, H2O, KIVI, KVQuant, PerToken, Random, Streaming
from rotor.search.probe import full_ranks
from rotor.study import cache_bench, cache_plans, caches_part
from rotor.study.cache_bench import PolicyModel
from rotor.study.cache_plans import equal_contribution
from rotor.study.cache_tables import best_mixtures
from rotor.study.peers import PeerRecord
from rotor.study.study import study


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    return calibrated(tiny("llama"), tmp_path_factory.mktemp("judged") / "run", "pre", 2)


def test_states_through_a_cache_that_keeps_everything_are_those_of_whole_rows(run) -> None:
    network = in_memory(run)
    rows = torch.randint(1, 4096, (3, 40), generator=torch.Generator().manual_seed(0))
    for compressed in (False, True):
        if compressed:
            bases = run.bases()
            chosen = bases.select([next(iter(bases[0]))] * len(bases))
            network.compress(chosen, [[full_ranks(b)] * len(b.qk.encode) for b in chosen])
        whole = network.final_states(rows)
        for policy in (H2O(tokens=1000), PerToken(16), KIVI(16, 4, 8)):
            stepped = final_states_through_cache(network, rows, policy, 10)
            assert float((stepped - whole).norm() / whole.norm()) < 1e-5
        cut = final_states_through_cache(network, rows, Streaming(tokens=6), 10)
        assert torch.allclose(cut[:, :10], whole[:, :10], atol=1e-4)
        assert float((cut[:, 12:] - whole[:, 12:]).norm() / whole.norm()) > 1e-3


def test_export_judges_with_the_policy(run, tmp_path) -> None:
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
    overrides = ["evaluation.metric=lm-eval:arc_easy"]
    with pytest.raises(UsageError, match="lm-eval:arc_easy does not read"):
        export(run.folder, tmp_path / "x", accuracy=0.9, cache="gear-2", overrides=overrides)


@pytest.mark.parametrize("policy", [H2O(share=0.5), Random(share=0.5, scope="layer"), GEAR(4)], ids=str)
@pytest.mark.parametrize("compressed", [False, True])
def test_bytes_by_shape_are_those_of_a_run(policy, compressed: bool, run) -> None:
    from transformers.cache_utils import DynamicCache

    from rotor.policies import stored_bytes

    network = in_memory(run)
    if compressed:
        bases = run.bases()
        chosen = bases.select([next(iter(bases[0]))] * len(bases))
        network.compress(chosen, [[(8, 12)] * len(b.qk.encode) for b in chosen])
    model, cache = PolicyModel(network, policy, compressed), DynamicCache(config=network.config)
    rows = torch.randint(1, 4096, (1, 24), generator=torch.Generator().manual_seed(0))
    found = []
    with torch.no_grad():
        for start, end in ((0, 20), (20, 21), (21, 22)):
            model(input_ids=rows[:, start:end], past_key_values=cache)
            found.append(stored_bytes(cache))
    assert model.layer_bytes(20, 22) == found


def test_two_ways_contribute_alike() -> None:
    each = equal_contribution(0.75)
    assert each == pytest.approx(0.5)
    assert 1 - (1 - each) * (1 - each) == pytest.approx(0.75)


def test_the_best_mixture_is_the_smallest_that_is_good_enough() -> None:
    def record(name: str, value: float, size: float, long: float) -> PeerRecord:
        sizes = {"kv_bytes_per_token": size, "long_kv_bytes_per_token": long}
        return PeerRecord(name, token_accuracy=value, ppl_ratio=1.0, answers={"copy": 1.0}, **sizes)

    records = [record("a", 0.995, 900, 100), record("b", 0.96, 300, 250), record("c", 0.96, 400, 50)]
    rows = best_mixtures([*records, PeerRecord("d", skipped="not there")])
    assert rows[0] == ["0.99", "a", "900.0", "a", "100.0"]
    assert rows[1] == ["0.95", "b", "300.0", "c", "50.0"]
    assert best_mixtures(records[1:])[0] == ["0.99", "none measured", "", "none measured", ""]


def test_the_parts_of_a_study(tmp_path, monkeypatch) -> None:
    few = ("Keyformer", "random")
    every = cache_plans.combined_policies(0.5, False)
    monkeypatch.setattr(caches_part, "SHARES", (0.5,))
    monkeypatch.setattr(caches_part, "TOTALS", (0.5,))
    monkeypatch.setattr(caches_part, "PROBE_SHARES", (0.8,))
    monkeypatch.setattr(cache_bench, "LONG_TOKENS", 512)
    monkeypatch.setattr(caches_part, "quantisers", lambda: {"GEAR KCVT-2": GEAR(2), "KVQuant-2": KVQuant(2)})
    monkeypatch.setattr(caches_part, "evictions", lambda share: {n: cache_plans.evictions(share)[n] for n in few})
    monkeypatch.setattr(caches_part, "budget_methods", lambda share: {"window": cache_plans.Window(share)})
    monkeypatch.setattr(caches_part, "BUDGET_SHARES", (0.2,))
    on_top = {name: every[name] for name in (*few, "KIVI-4")}
    monkeypatch.setattr(caches_part, "combined_policies", lambda share, coded: on_top)
    overrides = [*FAST_EVALUATION, "evaluation.lookup_prompts=1", "evaluation.copy_prompts=1", "tokens.count=512"]
    overrides += ["tokens.seq_len=64", "evaluation.report_tokens=64", "evaluation.search_tokens=64"]
    overrides += ["tokens.source=random", "evaluation.seq_len=64", "evaluation.metric=text"]
    arguments = {"parts": ["quantise", "evict", "budgets", "combine"], "overrides": overrides}
    result = study(DEMO_MODEL, tmp_path / "study", ["fdc"], **arguments)
    names = list(result.records)
    assert names[:3] == ["quantise/GEAR KCVT-2", "quantise/KVQuant-2", "evict/per token, 4 bits"]
    assert "evict/random, 0.5 of the tokens" in names
    assert [name for name in names if name.startswith("budgets/")] == [
        "budgets/cosines",
        "budgets/per token, 4 bits",
        "budgets/window, alike, 0.2 of the tokens",
        "budgets/window, SqueezeAttention, 0.2 of the tokens",
        "budgets/sensitivities/window",
        "budgets/window, by sensitivity, 0.2 of the tokens",
    ]
    for name in ("fdc alone", "fdc and Keyformer", "fdc and random", "Keyformer alone"):
        assert f"combine/{name}, 0.5 removed" in names
    assert "combine/fdc at 0.29 and KIVI-4" in names
    half = result.records["evict/Keyformer, 0.5 of the tokens"]
    assert half["kl_div"] > 0
    assert half["long_kv_bytes_per_token"] == pytest.approx(2560 / 2 + 0.5 * 5 * 2 * 8)  # places and scores
    assert len(half["kl_by_step"]) == 8
    assert sum(half["kl_by_step"]) / 8 == pytest.approx(half["kl_div"], rel=0.2)
    assert 0 <= half["greedy_agreement"] <= 1
    cosines = result.records["budgets/cosines"]["cosines"]
    assert len(cosines) == 5
    assert all(0 < cosine < 1 for layer in cosines for cosine in layer)
    csv = (tmp_path / "study" / "caches.csv").read_text().splitlines()
    assert len(csv) == 1 + sum(not name.startswith(("budgets/sensitivities", "budgets/cosines")) for name in names)
    summary = (tmp_path / "study" / "summary.md").read_text()
    assert "## Compressed rows and a policy on top" in summary
    assert "the fewest bytes at an accuracy" in summary
    assert "## GEAR tables 1, 2 and 9 in shape" in summary
    assert "## GEAR table 8 in shape" not in summary  # of its methods none was measured
    assert "## SqueezeAttention table 2 in shape" in summary
    assert {path.stem for path in result.files if path.suffix == ".png"} == {"quantise", "evict", "budgets", "combine"}
    again = study(DEMO_MODEL, tmp_path / "study", ["fdc"], **arguments)
    assert again.added == 0
