"""Cache policies in use: adopted by attention, under transformers' own generate."""

from __future__ import annotations

import copy

import pytest
import torch
from support.policy_models import COMPRESSED, PolicyModels, left_padded, prompts
from support.quick import mostly_nightly
from torch import Tensor
from transformers.cache_utils import DynamicCache

from rotor.policies import (
    FP8,
    GEAR,
    H2O,
    KCVT,
    KIVI,
    Eviction,
    Keyformer,
    PerToken,
    Policy,
    PolicyLayer,
    Streaming,
    Tiers,
    Window,
    cache_policy,
    stored_bytes,
)
from rotor.policies.store import stored_tensors

ALL = 10_000
EVERYTHING: list[Policy] = [
    KIVI(group=4, residual=ALL),
    Streaming(tokens=ALL),
    H2O(tokens=ALL),
    Keyformer(tokens=ALL),
    H2O(tokens=ALL, squeeze=0.5),
    Tiers(important=1.0, qk_unimportant=0.9, v_unimportant=0.9),
    Tiers(important=0.3, qk_unimportant=0.0, v_unimportant=0.0),
]
LOSSY: list[Policy] = [
    PerToken(bits=4, group=8),
    FP8(),
    KIVI(bits=2, group=4, residual=8),
    GEAR(bits=2, sparsity=0.2, buffer=6),
    Window(share=0.5),
    Streaming(tokens=9),
    H2O(share=0.4),
    H2O(share=0.4, squeeze=0.4),
    Keyformer(share=0.4),
    Tiers(important=0.4, qk_important=0.1, qk_unimportant=0.6, v_unimportant=0.5),
]
NAMES = {"ids": lambda policy: policy.method}


def serves(policy: Policy, kind: str) -> bool:
    """Quantisers want rows of numbers, tiers rows of any kind."""
    if isinstance(policy, Tiers):
        return kind != "plain"
    if policy.moves_keys and kind == "post":
        return False
    return kind != "codes" or isinstance(policy, Eviction)


def on_every_kind(policies: list[Policy]) -> list[object]:
    """(policy, kind of rows) wherever it serves them; the quick tests take each policy once, and each kind."""
    kinds = [[kind for kind in ("plain", *COMPRESSED) if serves(policy, kind)] for policy in policies]
    quick = {(index, served[index % len(served)]) for index, served in enumerate(kinds)}
    assert {kind for _, kind in quick} == {"plain", *COMPRESSED}
    return [
        pytest.param(
            policy,
            kind,
            id=f"{policy.method}-{kind}",
            marks=() if (index, kind) in quick else pytest.mark.nightly,
        )
        for index, (policy, served) in enumerate(zip(policies, kinds, strict=True))
        for kind in served
    ]


@pytest.fixture(scope="module")
def models(policy_models: PolicyModels):
    return policy_models.model


@pytest.mark.parametrize(("policy", "kind"), on_every_kind(EVERYTHING))
def test_with_everything_kept_the_tokens_are_the_same(policy: Policy, kind: str, models) -> None:
    model, rows = models(kind), prompts(2, 16)
    mask = left_padded(rows, [5, 0])
    for extra in ({}, {"num_beams": 3}):
        options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, **extra}
        expected = model.generate(rows, **options)
        with cache_policy(model, policy):
            output = model.generate(rows, return_dict_in_generate=True, **options)
        assert torch.equal(output.sequences, expected)
        assert all(isinstance(layer, PolicyLayer) for layer in output.past_key_values.layers)


@pytest.mark.parametrize(("policy", "kind"), on_every_kind(LOSSY))
def test_a_row_alone_equals_its_row_in_a_batch(policy: Policy, kind: str, models) -> None:
    model, rows, pads = models(kind), prompts(2, 24), [0, 9]
    mask = left_padded(rows, pads)
    for beams in (1, 2):
        options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "num_beams": beams}
        with cache_policy(model, policy):
            together = model.generate(rows, attention_mask=mask, **options)
            for row, count in enumerate(pads):
                one = rows[row : row + 1, count:]
                alone = model.generate(one, attention_mask=torch.ones_like(one), **options)
                assert torch.equal(together[row, count:], alone[0])


@pytest.mark.parametrize(
    "family",
    mostly_nightly(
        ["qwen3", "gpt_neox", "opt", "gpt2", "falcon", "falcon-40b", "mixtral"],
        lambda family: family in ("qwen3", "gpt2", "falcon-40b"),
    ),
)
@pytest.mark.parametrize("policy", [H2O(tokens=ALL), H2O(share=0.4)], ids=["all", "some"])
def test_every_family_drops_tokens(family: str, policy: Policy, models) -> None:
    model, rows = models(family), prompts(2, 14)
    options = {"attention_mask": torch.ones_like(rows), "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(rows, **options)
    with cache_policy(model, policy):
        output = model.generate(rows, return_dict_in_generate=True, **options)
    layer = output.past_key_values.layers[0]
    assert layer.places.shape[2] == (19 if policy.tokens else round(0.4 * 14))
    assert torch.equal(output.sequences, expected) == bool(policy.tokens)


@pytest.mark.parametrize("policy", LOSSY, **NAMES)
def test_reported_bytes_are_those_of_the_tensors(policy: Policy, models) -> None:
    model, rows = models("pre"), prompts(2, 20)
    with cache_policy(model, policy), torch.no_grad():
        cache = DynamicCache(config=model.config)
        model(rows, past_key_values=cache)
        model(rows[:, :1], past_key_values=cache)
    layer = cache.layers[0]
    assert cache.get_seq_length() == 21
    assert layer.stored_bytes() == sum(t.untyped_storage().nbytes() for t in stored_tensors(layer.sequences))
    assert 0 < stored_bytes(cache) == sum(layer.stored_bytes() for layer in cache.layers)
    plain = model(rows, use_cache=True).past_key_values
    assert type(plain.layers[0]).__name__ == "DynamicLayer"


@pytest.mark.parametrize(
    "policy",
    [
        H2O(tokens=8),
        Tiers(important=0.4, qk_unimportant=0.8),
        KIVI(bits=2, group=4, residual=8),
        GEAR(bits=2, sparsity=0.2, buffer=6),
    ],
    ids=str,
)
def test_rows_can_be_chosen_moved_and_reset(policy: Policy, models) -> None:
    model, rows = models("pre"), prompts(2, 16)
    with cache_policy(model, policy), torch.no_grad():
        cache = DynamicCache(config=model.config)
        model(rows, past_key_values=cache)
        twin = copy.deepcopy(cache)
        expected = model(rows[:, :1], past_key_values=cache).logits
        twin.batch_repeat_interleave(2)
        twin.batch_select_indices(torch.tensor([3, 0]))
        twin.layers[0].offload()
        twin.layers[0].prefetch()
        assert torch.allclose(model(rows.flip(0)[:, :1], past_key_values=twin).logits, expected.flip(0), atol=1e-5)
        assert cache.get_seq_length() == 17
        cache.reset()
        assert cache.get_seq_length() == stored_bytes(cache) == 0
        model(rows, past_key_values=cache)
        assert torch.allclose(model(rows[:, :1], past_key_values=cache).logits, expected, atol=1e-5)


class Offloading(DynamicCache):
    """Moves of a layer by transformers' offloaded cache around each of its steps, wherever it lies."""

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: object, **kwargs: object):
        self.layers[layer_idx].prefetch()
        found = self.layers[layer_idx].update(key, value)
        self.layers[layer_idx].offload()
        return found


@pytest.mark.parametrize("policy", [GEAR(bits=2, sparsity=0.2, buffer=6), Keyformer(share=0.4), Tiers()], **NAMES)
def test_an_offloaded_cache_gives_the_same_tokens(policy: Policy, models) -> None:
    model, rows = models("pre"), prompts(2, 20)
    options = {"attention_mask": left_padded(rows, [4, 0]), "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with cache_policy(model, policy):
        expected = model.generate(rows, **options)
        offloaded = Offloading(config=model.config)
        assert torch.equal(model.generate(rows, past_key_values=offloaded, **options), expected)
    assert all(isinstance(layer, PolicyLayer) for layer in offloaded.layers)


@pytest.mark.parametrize(
    "policy",
    [PerToken(4, 8), KCVT(4, buffer=5), Streaming(tokens=8, positions="sequence"), H2O(tokens=8), Tiers()],
    **NAMES,
)
def test_a_prompt_in_chunks_goes_on(policy: Policy, models) -> None:
    model, rows = models("post"), prompts(2, 18)
    mask = left_padded(rows, [8, 0])  # the first chunk of a row is padding alone
    with cache_policy(model, policy):
        output = model.generate(
            rows, attention_mask=mask, max_new_tokens=4, prefill_chunk_size=6, do_sample=False, pad_token_id=0
        )
    assert output.shape == (2, 22)
