"""ZDC's ratios are searched for an accuracy: along one proportion, then other shares and proportions."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.runs import calibrated

from rotor.calibration.allocation.plan import Plan
from rotor.checkpoint import AttentionShape, GroupLayout, LayerLayout, Numbers
from rotor.errors import AccuracyError
from rotor.policies import Tiers, find_policy, packed_bytes_per_token
from rotor.search.evaluation.accuracy import Fidelity
from rotor.search.export.export import export
from rotor.search.ratio_search import Cache, RatioPlan, find_ratios

START = Tiers(0.4, (), 0.4, 0.7, 0.4, 0.7)
LAYOUT = LayerLayout((GroupLayout((0,), Numbers(100), Numbers(100)),))
RANKS = [[(100, 100)]] * 3


def cache() -> Cache:
    return Cache(Plan(0.0, 0.0, 0.0, RANKS, RANKS), [LAYOUT] * 3, AttentionShape(3, 1, 1, 100, 100), 2)


def test_bytes_are_those_of_a_long_cache() -> None:
    import torch

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

    found = find_ratios(cache(), replace(START, search=True), 0.97, 0.01, measure)
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
        find_ratios(cache(), START, 0.99, 0.05, lambda plan: Fidelity(0.5, (0.5, 0.5), {}))


def test_an_export_searches_ratios(tiny, tmp_path, caplog) -> None:
    """Ranks stay whole, the policy that is written keeps the accuracy, and a second export measures nothing."""
    run = calibrated(tiny("llama"), tmp_path / "run", "post", 1, qk="svd", vo="svd")
    done = export(run.folder, tmp_path / "out", accuracy=0.9, cache="zdc")
    assert done.report["compression"]["stored"] == 0.0
    policy = done.report["cache"]["policy"]
    assert done.accuracy.measured["search"].accuracy >= 0.9
    assert policy["search"] is False
    assert policy["qk_unimportant"] > policy["qk_important"] > 0
    before = done.report["kv_bytes_per_token"]["before"]
    assert done.report["cache"]["kv_bytes_per_token"]["32768"] < before
    again = export(run.folder, tmp_path / "again", accuracy=0.9, cache="zdc")
    assert again.report["cache"] == done.report["cache"]
    assert again.measured_points == 0
    fixed = export(run.folder, tmp_path / "fixed", compression=0.1, cache="zdc")
    assert fixed.report["cache"]["policy"]["qk_unimportant"] == 0.7
    assert "--accuracy A searches those that keep A" in caplog.text
    assert find_policy("zdc").search
