"""Tokens that evicting policies keep: each score against float64, budgets of layers, and other tools' definitions."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.quick import mostly_nightly
from support.runs import calibrated, in_memory
from support.tiny_models import CONFIGS
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from rotor.errors import UnsupportedModelError
from rotor.policies import (
    H2O,
    EvictingLayer,
    Eviction,
    Keyformer,
    Streaming,
    Window,
    cache_policy,
    use_cache_policy,
)
from rotor.policies.budgets import SqueezeBudgets, squeeze_shares, three_means
from rotor.policies.eviction import KeptTokens
from rotor.search.evaluation.cached import final_states_through_cache

GROUPS, HEADS, PROMPT, TOKENS = 2, 3, 12, 20
ALL_METHODS = [
    Window(tokens=5),
    Streaming(tokens=7),
    Streaming(tokens=3),
    H2O(tokens=6),
    H2O(share=0.5),
    Keyformer(tokens=6, steps=5),
    Keyformer(share=0.25),
]


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def logits() -> np.ndarray:
    """Of each query and key: [groups, heads of a group, tokens, tokens]."""
    generator = torch.Generator().manual_seed(1)
    return 2 * torch.randn(GROUPS, HEADS, TOKENS, TOKENS, generator=generator).double().numpy()


def drive(policy: Eviction, x: np.ndarray) -> EvictingLayer:
    """A layer of one row that has seen all tokens, the first PROMPT at once; keys are the tokens' places."""
    layer = EvictingLayer(policy, 1)
    steps = [range(PROMPT), *(range(t, t + 1) for t in range(PROMPT, TOKENS))]
    for step in steps:
        layer.begin(None, 1, len(step), torch.device("cpu"))
        place = torch.tensor(list(step), dtype=torch.float32)[:, None].expand(1, GROUPS, -1, 4)
        keys, _ = layer.update(place, place)
        held = keys[0, :, :, 0].long().numpy()
        weights = np.zeros((1, GROUPS, HEADS, len(step), held.shape[1]))
        for group in range(GROUPS):
            for row, query in enumerate(step):
                seen = held[group] <= query
                weights[0, group, :, row, seen] = softmax(x[group][:, query, held[group][seen]]).T
        layer.observe_weights(torch.tensor(weights).flatten(1, 2))
    return layer


def truth(policy: Eviction, x: np.ndarray, noise: np.ndarray) -> list[list[int]]:
    """The tokens each group keeps, in float64, by loops over steps and tokens. noise: [groups, tokens] from (0, 1)."""
    share = policy.tokens if policy.tokens is not None else round(policy.share * PROMPT)
    kept = [list(range(PROMPT)) for _ in range(GROUPS)]
    scores = np.zeros((GROUPS, TOKENS))
    for newest in range(PROMPT - 1, TOKENS):
        queries = range(PROMPT) if newest == PROMPT - 1 else [newest]
        if newest >= PROMPT:
            for group in kept:
                group.append(newest)
        added = np.zeros((GROUPS, TOKENS))
        for group in range(GROUPS):
            for query in queries:
                keys = [k for k in kept[group] if k <= query]
                for head in range(HEADS):
                    row = x[group, head, query, keys]
                    if policy.method == "keyformer":
                        tau = policy.tau_first + (policy.tau_last - policy.tau_first) * min(
                            1, max(0, newest - PROMPT + 1) / policy.steps
                        )
                        row = (row - np.log(-np.log(noise[group, keys]))) / tau
                    added[group, keys] += softmax(row) / HEADS
        scores += added
        for group in range(GROUPS):
            row = scores[group].copy()
            sinks = min(policy.sinks, share - 1) if policy.method == "streaming" else 0
            recent = {"window": share, "streaming": share - sinks}.get(policy.method)
            recent = round(policy.recent * share) if recent is None else recent
            safe = [k for k in kept[group] if k < sinks or k > newest - recent]
            rest = sorted((k for k in kept[group] if k not in safe), key=lambda k: (-row[k], k))
            kept[group] = sorted(safe + rest[: max(0, share - len(safe))])
    return kept


@pytest.mark.parametrize("policy", ALL_METHODS, ids=str)
def test_what_is_kept_is_that_of_float64(policy: Eviction) -> None:
    x = logits()
    layer = drive(policy, x)
    (sequence,) = layer.sequences
    got = sequence.sides[0][0][0, :, :, 0].long().tolist()
    index = torch.arange(TOKENS).expand(1, GROUPS, -1)
    table = KeptTokens(index, None, 1, 0).noise(getattr(policy, "seed", 0))[0].double().numpy()
    assert got == truth(policy, x, table)
    assert layer.places[0].tolist() == got
    assert not policy.needs_weights or sequence.scores.shape == sequence.index.shape


def test_noise_is_a_tokens_own() -> None:
    """Whatever rows and tokens lie beside it."""
    places = torch.arange(8).expand(1, GROUPS, 8)
    whole = KeptTokens(places, None, 1, 0).noise(0)
    assert torch.equal(
        KeptTokens(places[..., 3:].expand(2, -1, -1), None, 1, 0).noise(0), whole[..., 3:].expand(2, -1, -1)
    )
    for other in (KeptTokens(places, None, 1, 0).noise(1), KeptTokens(places, None, 2, 0).noise(0)):
        assert not torch.equal(other, whole)


def test_three_means_against_every_split() -> None:
    values = torch.rand(9, generator=torch.Generator().manual_seed(2)).double().tolist()
    ordered = sorted(values)

    def cost(parts: list[list[float]]) -> float:
        return sum(float(np.var(part)) * len(part) for part in parts)

    best = min(cost([ordered[:i], ordered[i:j], ordered[j:]]) for i in range(1, 8) for j in range(i + 1, 9))
    cluster = three_means(values)
    found = cost([[v for v, c in zip(values, cluster, strict=True) if c == k] for k in range(3)])
    assert found == pytest.approx(best)


def test_what_stands_at_padding_does_not_count_for_budgets() -> None:
    layers = [SimpleNamespace(sequences=[SimpleNamespace(budget=10)], evict=lambda: None) for _ in range(2)]
    budgets = SqueezeBudgets(0.5, layers)
    states = torch.ones(1, 3, 4, dtype=torch.float64)
    states[:, 0] = torch.nan
    tokens = torch.tensor([[False, True, True]])
    budgets.observe(0, states, states, tokens)
    budgets.observe(1, states, states * torch.tensor([1.0, 1, -1, -1]), tokens)
    assert [layer.sequences[0].budget for layer in layers] == [5, 15]


def test_squeeze_is_algorithm_1() -> None:
    shares = squeeze_shares([0.2, 0.99, 0.98, 0.6, 0.97], 0.4)
    assert shares == pytest.approx([(5 - 3 * 0.4) / 2, 0.4, 0.4, (5 - 3 * 0.4) / 2, 0.4])
    assert sum(shares) == pytest.approx(5)
    assert squeeze_shares([0.5, 0.5, 0.5], 0.4) == [1.0, 1.0, 1.0]
    assert squeeze_shares([0.3, 0.9], 0.4) == pytest.approx([1.6, 0.4])


@pytest.mark.parametrize("family, pads", [("llama", 0), ("llama", 3), ("gpt_neox", 0), ("falcon", 0)])
def test_positions_within_the_cache_are_those_of_the_paper(family: str, pads: int) -> None:
    """StreamingLLM section 3.2: in a model of one layer, logits are the model's own behind the kept tokens alone."""
    torch.manual_seed(0)
    config = CONFIGS[family]()
    config.num_hidden_layers = 1
    model = AutoModelForCausalLM.from_config(config).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    rows, budget, prompt = torch.randint(1, 4096, (2, 60), generator=torch.Generator().manual_seed(1)), 9, 20
    mask = torch.ones_like(rows)
    mask[0, :pads] = 0
    places = mask.cumsum(-1).sub(1).clamp(min=0)
    with cache_policy(model, Streaming(tokens=budget)), torch.no_grad():
        cache = DynamicCache(config=config)
        for start, end in [(0, prompt), *((t, t + 1) for t in range(prompt, 60))]:
            found = {"attention_mask": mask[:, :end], "position_ids": places[:, start:end]}
            logits = model(rows[:, start:end], past_key_values=cache, **found).logits[:, -1]
    for row, first in enumerate((pads, 0)):
        kept = torch.cat([rows[row, first : first + 4], rows[row, 60 - (budget - 4) - 1 :]])
        with torch.no_grad(), cache_policy(model, None):
            expected = model(kept[None]).logits[0, -1]
        torch.testing.assert_close(logits[row], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("domain", mostly_nightly(["pre", "block"], lambda domain: domain == "block"))
def test_positions_within_the_cache_of_compressed_rows(domain: str, tiny, tmp_path) -> None:
    """At full rank they are those of the uncompressed model, whose keys RoPE turns."""
    run = calibrated(tiny("llama"), tmp_path / "run", domain, 2)
    network, states = in_memory(run), []
    rows = torch.randint(1, 4096, (2, 80), generator=torch.Generator().manual_seed(0))
    for compressed in (False, True):
        if compressed:
            bases = run.bases()
            network.compress(bases, [[b.full_ranks] * b.num_groups for b in bases])
        for positions in ("cache", "sequence"):
            policy = Streaming(tokens=12, positions=positions)
            states.append(final_states_through_cache(network, rows, 20, policy))
    for before, after in zip(states[:2], states[2:], strict=True):
        assert float((after - before).norm() / before.norm()) < 1e-4
    assert float((states[1] - states[0]).norm() / states[0].norm()) > 0.05


def test_positions_within_the_cache_are_refused_where_keys_cannot_turn(policy_models) -> None:
    for kind, text in (("gpt2", "has no RoPE"), ("phi3", "depend on the length"), ("post", "after RoPE")):
        with pytest.raises(UnsupportedModelError, match=text):
            use_cache_policy(policy_models.model(kind), Streaming())
        use_cache_policy(policy_models.model(kind), Streaming(positions="sequence"))
        use_cache_policy(policy_models.model(kind), None)
