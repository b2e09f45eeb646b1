"""Quantised caches: codes against float64 truth, bytes, transformers' contract, and scoring through them."""

from __future__ import annotations

import pytest
import torch
from support.cache_truth import cache_of, scores_behind, states
from support.policy_models import prompts
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from rotor.checked import Reader
from rotor.errors import CheckpointError, DataError
from rotor.models.layerwise import LayerwiseModel
from rotor.policies import (
    FP8,
    GEAR,
    KCVT,
    KIVI,
    CodedLayer,
    PerToken,
    stored_bytes,
)
from rotor.policies.registry import read_policy
from rotor.search.evaluation.cached import prefill_of
from rotor.search.evaluation.scoring import answer_scores


@pytest.fixture(scope="module")
def model(tiny):
    return AutoModelForCausalLM.from_pretrained(tiny("llama")).eval()


def test_bytes_are_those_of_the_formulas() -> None:
    def per_token(policy, tokens: int) -> float:
        layer = CodedLayer(policy.streams())
        layer.update(states(1, 2, tokens, 64, dtype=torch.bfloat16), states(1, 2, tokens, 64, dtype=torch.bfloat16))
        return layer.stored_bytes() / tokens

    numbers = 2 * 2 * 64  # keys and values of two heads
    assert per_token(PerToken(bits=4, group=64), 128) == numbers * (0.5 + 4 / 64)
    assert per_token(PerToken(bits=3, group=32), 128) == numbers * (3 / 8 + 4 / 32)
    assert per_token(FP8(), 128) == numbers * (1 + 2 / 64)
    assert per_token(KCVT(bits=4), 128) == numbers * 0.5 + numbers / 2 * 4 / 128 + 4
    residual = numbers / 2 * 2 * 64 / 256  # of values; 256 keys are whole groups
    assert (
        per_token(KIVI(bits=2, group=64, residual=64), 256)
        == numbers / 2 * (2 / 8 + 4 / 64) * (1 + 192 / 256) + residual
    )


@pytest.mark.parametrize(
    "policy",
    [
        PerToken(bits=2, group=8),
        KCVT(bits=2, buffer=6),
        GEAR(bits=2, buffer=6),
        KIVI(group=4, residual=4),
    ],
    ids=str,
)
def test_the_longest_step_sees_what_steps_of_one_token_see(policy, model) -> None:
    rows = prompts(2, 40)
    step = policy.longest_step
    assert step == {"per-token": None, "kcvt": 6, "gear": 6, "kivi": 1}[policy.method]
    one, many = (scores_behind(model, rows, 22, policy, chunk) for chunk in (1, step or 9))
    assert torch.allclose(one.nll, many.nll, rtol=1e-3, atol=1e-3)


def test_kl_is_that_of_the_logits_of_a_step_by_step_loop(model) -> None:
    rows, policy = prompts(1, 14), PerToken(bits=2, group=8)
    scores = scores_behind(model, rows, 6, policy)
    cache = cache_of(policy, model.config)
    with torch.no_grad():
        full = model(rows).logits[0].double().log_softmax(-1)
        model(rows[:, :6], past_key_values=cache)
        for position in range(6, 13):
            log_q = model(rows[:, position : position + 1], past_key_values=cache).logits[0, -1].double()
            log_q = log_q.log_softmax(-1)
            expected = (full[position].exp() * (full[position] - log_q)).sum()
            assert float(scores.kl_div[0, position - 6]) == pytest.approx(float(expected), rel=1e-3, abs=1e-6)
    assert float(scores.kl_div.mean()) > 1e-4


def test_answers_are_read_behind_the_prefill(model) -> None:
    rows = prompts(2, 16)
    answers = torch.zeros_like(rows, dtype=torch.bool)
    answers[0, 9] = answers[1, 12] = answers[1, 13] = True
    assert prefill_of(answers) == 8
    network = LayerwiseModel.of(model)
    found = answer_scores(network, rows, answers, network.final_states(rows))
    probability = model(rows).logits.detach().double().softmax(-1)[:, :-1].gather(-1, rows[:, 1:, None])[..., 0]
    assert found.answers.tolist() == [1, 2]
    assert found.mean_probability == pytest.approx(float(probability[answers[:, 1:]].mean()), rel=1e-3)
    with pytest.raises(DataError, match="at least two tokens"):
        prefill_of(torch.ones(1, 4, dtype=torch.bool))


@pytest.mark.parametrize(
    "section, text",
    [
        ([1], "expected a mapping"),
        (
            {"method": "kiwi"},
            "one of fp8, gear, h2o, kcvt, .*; did you mean 'kivi'",
        ),
        ({"method": ["kivi"]}, "cache.method"),
        ({"method": "kivi", "bits": 5}, "bits: got 5, expected one of"),
        ({"method": "kivi", "bits": "2"}, "cache.bits"),
        ({"method": "kivi", "residual": 65}, "a multiple of the group, 32"),
        ({"method": "kivi", "grop": 64}, "cache.grop"),
        ({"method": "gear", "backbone": "kivi"}, "buffer: got 20, expected a multiple of the group, 64"),
        ({"method": "gear", "sparsity": 1.5}, "sparsity: got 1.5, expected a finite number of at least 0"),
        ({"method": "gear", "bits": 16}, "bits: got 16"),
        ({"method": "gear", "loops": 10**9}, "loops: got 1000000000, expected a whole number from 1 to 100"),
        ({"method": "h2o", "share": 2.0}, "share: got 2.0, expected a finite number above 0 and at most 1"),
        ({"method": "h2o", "tokens": "many"}, "cache.tokens"),
        ({"method": "antigravity:fly"}, "the module of cache policy antigravity:fly is not imported"),
        ({"method": "tiers", "important": 1.5}, "important: got 1.5, expected a finite number from 0 to 1"),
        ({"method": "tiers", "qk_important": 0.6}, r"qk_unimportant: got 0.5, expected at least qk_important \(0.6\)"),
        ({"method": "tiers", "v_important": 0.1}, r"qk_important: got 0.0, expected at least v_important \(0.1\)"),
        (
            {"method": "tiers", "layer_important": [0.4, 0.2]},
            "layer_important: .* expected shares that fall with no layer",
        ),
    ],
)
def test_a_hostile_policy_is_refused(section: object, text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        read_policy(section, Reader("config.json", CheckpointError))


def test_bytes_of_transformers_own_caches_are_counted(model) -> None:
    cache = DynamicCache(config=model.config)
    model(prompts(2, 10), past_key_values=cache)
    layer = cache.layers[0]
    assert stored_bytes(cache) == 2 * 2 * layer.keys.numel() * 4
