"""ZDC's ratios are searched for an accuracy: along one proportion, then other shares and proportions."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from support.policy_models import PolicyModels, prompts
from support.runs import calibrated
from transformers import DynamicCache

from rotor import export
from rotor.calibration.allocation.plan import Plan
from rotor.checkpoint.layout import AttentionShape, GroupLayout, LayerLayout
from rotor.checkpoint.rows import NumberRow
from rotor.errors import AccuracyError, UsageError
from rotor.policies import Tiers, cache_policy, find_policy, packed_bytes_per_token
from rotor.policies.agreement import agreement, agreement_in_words, shared_choices
from rotor.recipe.sections import Search
from rotor.search.evaluation.accuracy import Fidelity
from rotor.search.ratio_grid import _policies, find_by_regression, find_optimum
from rotor.search.ratio_search import Cache, RatioPlan, find_ratios

START = Tiers(0.4, (), 0.4, 0.7, 0.4, 0.7)
LAYOUT = LayerLayout((GroupLayout((0,), NumberRow(100), NumberRow(100)),))
RANKS = [[(100, 100)]] * 3
SMALLER = ["evaluation.metric=kl_div", "evaluation.seq_len=32"]
SMALLER += ["evaluation.search_tokens=64", "evaluation.report_tokens=64", "search.resolution=0.2"]


def cache() -> Cache:
    return Cache(Plan(0.0, 0.0, 0.0, RANKS, RANKS), [LAYOUT] * 3, AttentionShape(3, 1, 1, 100, 100), 2)


def test_bytes_are_those_of_a_long_cache() -> None:
    policy = replace(START, layer_important=(0.2, 0.4, 0.6))
    counted = packed_bytes_per_token(policy, [LAYOUT] * 3, torch.bfloat16, 1000)
    assert policy.bytes_per_token([LAYOUT] * 3, 2) == pytest.approx(counted, rel=1e-3)


@pytest.mark.parametrize(
    ("best", "loss"),
    [
        ("share", lambda p: 0.02 * p.important + 0.1 * p.qk_unimportant),
        ("rise", lambda p: 0.1 * p.qk_unimportant - 0.05 * (p.shares(3)[2] - p.shares(3)[0])),
        ("values", lambda p: 0.01 * p.qk_unimportant + 0.3 * p.v_unimportant**2),
    ],
)
def test_what_removes_most_at_the_accuracy_is_found(best, loss) -> None:
    """With losses that depend on one thing each, that one is changed; every measured plan is a policy's own."""
    measured = {}

    def measure(plan: RatioPlan) -> Fidelity:
        accuracy = 1.0 - loss(plan.policy)
        measured[plan.policy] = plan.stored, accuracy
        return Fidelity(accuracy, (accuracy, accuracy), {})

    found = find_ratios(cache(), replace(START, search=True), 0.97, Search(0.01), measure)
    stored, accuracy = measured[replace(found, search=True)]
    assert accuracy >= 0.97
    along = [saved for policy, (saved, kept) in measured.items() if kept >= 0.97 and _as_given(policy)]
    assert stored > max(along) + 0.01
    assert {"share": found.important != 0.4, "rise": found.layer_important != (), "values": _lighter(found)}[best]
    assert not found.search
    assert len(measured) < 30


def _as_given(policy: Tiers) -> bool:
    return policy.important == 0.4 and not policy.layer_important and not _lighter(policy)


def _lighter(policy: Tiers) -> bool:
    return policy.v_unimportant < 0.9 * policy.qk_unimportant


def test_an_accuracy_out_of_reach_is_said() -> None:
    with pytest.raises(AccuracyError, match=r"accuracy 0.99 is out of reach: the best measured is 0.5"):
        find_ratios(cache(), START, 0.99, Search(0.05), lambda plan: Fidelity(0.5, (0.5, 0.5), {}))


@pytest.mark.nightly
def test_an_export_searches_ratios(tiny, tmp_path, caplog) -> None:
    """Ranks stay whole, the policy that is written keeps the accuracy, and a second export measures nothing."""
    run = calibrated(tiny("llama"), tmp_path / "run", "post", 1, qk="svd", vo="svd")
    (tmp_path / "zdc.yaml").write_text(json.dumps({**find_policy("zdc").as_dict(), "share_above": 0.1}))
    options = {"accuracy": 0.6, "cache": str(tmp_path / "zdc.yaml"), "overrides": SMALLER}
    done = export(run.folder, tmp_path / "out", **options)
    shares = done.report["compression"]
    assert shares["planned"] == 0.0 < shares["stored"]  # by ranks, and by what the policy stores
    policy = done.report["cache"]["policy"]
    assert done.accuracy.measured["search"].accuracy >= 0.6
    assert policy["search"] is False
    assert policy["qk_unimportant"] > policy["qk_important"] > 0
    assert policy["shared_with"] == [0, 0]
    assert "1 of 1 pairs more than 0.1" in caplog.text
    before = done.report["kv_bytes_per_token"]["before"]
    assert done.report["cache"]["kv_bytes_per_token"]["32768"] < before
    again = export(run.folder, tmp_path / "again", **options)
    assert again.report["cache"] == done.report["cache"]
    assert again.measured_points == 0
    fixed = export(run.folder, tmp_path / "fixed", compression=0.1, cache="zdc", measure=False)
    assert fixed.report["cache"]["policy"]["qk_unimportant"] == 0.7
    assert "--accuracy A searches those that keep A" in caplog.text


def test_layers_that_agree_share_a_choice() -> None:
    agreeing = torch.tensor(
        [[1.0, 0.97, 0.9, 0.2], [0.97, 1.0, 0.97, 0.2], [0.9, 0.97, 1.0, 0.96], [0.2, 0.2, 0.96, 1]]
    )
    assert shared_choices(agreeing, 0.95) == (0, 0, 2, 2)
    assert shared_choices(agreeing, 0.98) == (0, 1, 2, 3)
    assert agreement_in_words(agreeing, 0.95).endswith("3 of 3 pairs more than 0.95")
    with pytest.raises(UsageError, match=r"shared_with: .* expected for each layer itself, or an earlier layer"):
        Tiers(shared_with=(0, 2, 2))
    with pytest.raises(UsageError, match="shared_with"):
        Tiers(shared_with=(0, 0, 1))


def test_a_layer_takes_the_choice_of_another(policy_models: PolicyModels) -> None:
    """Its important tokens are those of that layer, step by step, and it keeps no scores."""
    model, tokens = policy_models.model("post"), prompts(2, 30)
    shared, alone = Tiers(0.4, shared_with=(0, 0)), Tiers(0.4)
    caches = []
    for policy in (shared, alone):
        cache = DynamicCache(config=model.config)
        with cache_policy(model, policy), torch.no_grad():
            for part in (tokens[:, :20], tokens[:, 20:21], tokens[:, 21:]):
                model(input_ids=part, past_key_values=cache, use_cache=True)
        caches.append([[sequence.important for sequence in layer.sequences] for layer in cache.layers])
        scores = [len(layer.sequences[0].scores) for layer in cache.layers]
        assert scores == ([12, 0] if policy is shared else [12, 12])
    assert all(torch.equal(*pair) for pair in zip(*caches[0], strict=True))
    assert not all(torch.equal(*pair) for pair in zip(*caches[1], strict=True))
    found = agreement(model, alone, tokens)
    assert found.shape == (2, 2)
    assert torch.equal(found.diagonal(), torch.ones(2, dtype=torch.float64))
    assert 0 < float(found[0, 1]) < 1


def falling(p: Tiers) -> float:
    """A loss that grows with every ratio and falls with every share."""
    return (
        0.1 * p.qk_unimportant
        + 0.1 * p.v_unimportant**2
        + 0.2 * p.qk_important
        + 0.3 * p.v_important**2
        - (0.02 * sum(p.shares(3)))
    )


def by_loss(plan: RatioPlan) -> Fidelity:
    assert plan.policy is not None
    accuracy = 1.0 - falling(plan.policy)
    return Fidelity(accuracy, (accuracy, accuracy), {})


@pytest.mark.parametrize("target", [0.99, 0.95, 0.8])
def test_the_oracle_is_the_best_of_its_grid(target: float) -> None:
    every = [cache().with_ratios(policy) for policy in _policies(START, 3)]
    best = max((plan for plan in every if by_loss(plan).accuracy >= target), key=lambda plan: plan.stored)
    measured = []
    found = find_optimum(
        cache(), replace(START, search=True), target, Search(), lambda p: measured.append(p) or by_loss(p)
    )
    assert cache().with_ratios(found).stored == best.stored
    assert by_loss(cache().with_ratios(found)).accuracy >= target
    assert len(every) > 1000
    assert len(measured) < 200
    with pytest.raises(AccuracyError, match=r"the best measured ratios keep 0\.5"):
        find_optimum(cache(), START, 0.99, Search(), lambda plan: Fidelity(0.5, (0.5, 0.5), {}))


@pytest.mark.parametrize("target", [0.99, 0.93])
def test_the_regression_keeps_the_accuracy_without_having_seen_it(target: float) -> None:
    """It removes no more than the best of a finer search could, and at least half of what the Oracle does."""
    found = cache().with_ratios(find_by_regression(cache(), replace(START, search=True), target, Search(), by_loss))
    oracle = cache().with_ratios(find_optimum(cache(), START, target, Search(), by_loss))
    assert by_loss(found).accuracy >= target
    assert found.stored >= 0.5 * oracle.stored
    assert found.policy is not None
    assert not found.policy.search


@pytest.mark.parametrize("way", ["oracle", pytest.param("regression", marks=pytest.mark.nightly)])
def test_an_export_searches_as_it_is_told(way: str, tiny, tmp_path) -> None:
    run = calibrated(tiny("llama"), tmp_path / "run", "post", 1, qk="svd", vo="svd")
    done = export(run.folder, tmp_path / "out", accuracy=0.3, cache=f"zdc-{way}", overrides=SMALLER)
    policy = done.report["cache"]["policy"]
    assert done.accuracy.measured["search"].accuracy >= 0.3
    assert (policy["search"], policy["search_by"]) == (False, way)
    assert policy["qk_unimportant"] > 0
