"""Passes of a model: what one layer computes serves the others of its pass, and no other pass."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from support.compare import relative_error
from support.folded_models import MIXED, Folding, folded
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache, StaticCache

from rotor.checkpoint.layout import ExactTokens, KeyForm
from rotor.kernels.passes import Pass, Passes, TokenSpan
from rotor.runtime.attention import RotorAttention

FOLDING = Folding(KeyForm(8), 2, joint=True, bits=MIXED, exact=ExactTokens(first=2, newest=6))
PROMPT, STEPS = 11, 6
SPAN, CPU = TokenSpan(4, 1, 0, 5), torch.device("cpu")


@pytest.fixture(scope="module")
def model(tiny) -> Any:
    source = AutoModelForCausalLM.from_pretrained(tiny("llama"), dtype=torch.float64).eval()
    return folded(source, FOLDING)


def prompts(seed: int) -> Tensor:
    return torch.randint(1, 4096, (2, PROMPT + STEPS), generator=torch.Generator().manual_seed(seed))


def mask_of(padding: int) -> Tensor:
    mask = torch.ones(2, PROMPT + STEPS, dtype=torch.long)
    mask[0, :padding] = 0
    return mask


def step(model: Any, cache: Any, ids: Tensor, mask: Tensor, start: int, stop: int) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache).logits
    return logits[:, -1]


def alone(model: Any, ids: Tensor, mask: Tensor, kind: Any = DynamicCache) -> list[Tensor]:
    """Logits of a prompt and steps, in a model of its own, so that nothing is left of other passes."""
    model = copy.deepcopy(model)
    cache = kind(config=model.config)
    found = [step(model, cache, ids, mask, 0, PROMPT)]
    return found + [step(model, cache, ids, mask, n, n + 1) for n in range(PROMPT, PROMPT + STEPS)]


def static(config: Any) -> StaticCache:
    return StaticCache(config=config, max_cache_len=PROMPT + STEPS)


@pytest.mark.parametrize("kind", [DynamicCache, static], ids=["dynamic", "static"])
def test_two_caches_take_turns_in_one_model(kind: Any, model) -> None:
    """Their sequences have the same lengths, and begin behind padding of different lengths."""
    rows, masks = [prompts(1), prompts(2), prompts(3)], [mask_of(0), mask_of(3), mask_of(5)]
    caches: list[Any] = [kind(config=model.config) for _ in rows]
    found: list[list[Tensor]] = [[] for _ in rows]
    bounds = [(0, PROMPT), *((n, n + 1) for n in range(PROMPT, PROMPT + STEPS))]
    for start, stop in bounds:
        for got, cache, ids, mask in zip(found, caches, rows, masks, strict=True):
            got.append(step(model, cache, ids, mask, start, stop))
    for got, ids, mask in zip(found, rows, masks, strict=True):
        for own, expected in zip(got, alone(model, ids, mask, kind), strict=True):
            assert torch.equal(own, expected)


@pytest.mark.parametrize("inference", [False, True])
def test_one_shape_and_another_mask(inference: bool, model) -> None:
    """Also where one tensor is written anew for each pass, which inference mode does not count."""
    ids = prompts(4)
    expected = [alone(model, ids, mask_of(padding)) for padding in (2, 6)]
    with torch.inference_mode(inference):
        shared = mask_of(0)
        caches = [DynamicCache(config=model.config) for _ in expected]
        for n in range(STEPS + 1):
            start, stop = (0, PROMPT) if n == 0 else (PROMPT + n - 1, PROMPT + n)
            for padding, cache, logits in zip((2, 6), caches, expected, strict=True):
                shared.copy_(mask_of(padding))
                assert torch.equal(step(model, cache, ids, shared, start, stop), logits[n])


def test_layers_called_with_one_mask_that_is_written_to_in_between(model) -> None:
    """Attention itself is given the tensor that changes: a pass ends where its mask does, or its layers begin anew."""
    layers = [module for module in model.modules() if isinstance(module, RotorAttention)]
    hidden = torch.randn(1, 3, model.config.hidden_size, generator=torch.Generator().manual_seed(0)).double()
    rotation = model.model.rotary_emb(hidden, torch.arange(3)[None])
    for inference in (False, True):
        with torch.inference_mode(inference), torch.no_grad():
            states, found = hidden.clone(), []
            angles = tuple(side.clone() for side in rotation)
            mask = torch.ones(1, 1, 3, 3, dtype=torch.bool).tril()
            for first in (0, 1):  # in the second pass the first token is padding
                mask[..., :first] = False
                mask[..., 0, 0] = True
                cache = DynamicCache(config=model.config)
                found += [
                    layer(states, angles, attention_mask=mask, past_key_values=cache, position_ids=None)[0]
                    for layer in layers
                ]
            other = [layer(states, angles, attention_mask=mask.clone(), past_key_values=None)[0] for layer in layers]
        for got, expected in zip(found[len(layers) :], other, strict=True):
            assert relative_error(got[:, 1:], expected[:, 1:]) < 1e-9
        assert not torch.equal(found[0][:, 2], found[len(layers)][:, 2])


def test_beams_are_reordered_between_passes(model) -> None:
    """A reordered cache is the same object, and each sequence still begins behind its own padding."""
    ids, mask = prompts(5), mask_of(4)
    swapped = torch.tensor([1, 0])
    expected = alone(model, ids[swapped], mask[swapped])
    cache = DynamicCache(config=model.config)
    step(model, cache, ids, mask, 0, PROMPT)
    step(model, cache, ids, mask, PROMPT, PROMPT + 1)
    cache.reorder_cache(swapped)
    for n in range(1, STEPS):
        got = step(model, cache, ids[swapped], mask[swapped], PROMPT + n, PROMPT + n + 1)
        assert relative_error(got, expected[n + 1]) < 1e-9


def test_layers_of_a_step_share_what_they_compute(model) -> None:
    ids, mask = prompts(6), mask_of(3)
    cache = DynamicCache(config=model.config)
    step(model, cache, ids, mask, 0, PROMPT)
    step(model, cache, ids, mask, PROMPT, PROMPT + 1)
    layers = sum(isinstance(module, RotorAttention) for module in model.modules())
    assert layers > 1
    store = model.model.layers[0].self_attn.store
    (known,) = store.passes._known
    kinds = [key[0] for key in known.now._made]
    assert sorted(kinds) == ["division", "first real", "positions", "rotations"]


def test_what_tells_passes_apart() -> None:
    passes, cache, mask, rotation = Passes(), DynamicCache(), torch.ones(1, 1, 1, 5), torch.ones(1, 1, 4)

    def find(layer: int, cache=cache, mask=mask, rotation=rotation, span=SPAN) -> Pass:
        return passes.find(cache, mask, rotation, span, layer, CPU)

    first = find(0)
    assert first.once(("a",), lambda: 1) == 1
    assert find(1) is first
    assert first.once(("a",), lambda: 2) == 1
    assert find(1) is not first  # the layers begin anew
    now = find(2)
    others = [
        find(2, cache=DynamicCache()),
        find(2, mask=mask.clone()),
        find(2, mask=None),
        find(2, rotation=rotation.clone()),
        find(2, span=SPAN._replace(query_offset=3)),
    ]
    assert len({id(one) for one in [first, now, *others]}) == 7
    now = find(0)
    mask += 1
    assert find(1) is not now
    now = find(0)
    counted = SPAN._replace(query_offset=torch.tensor(4))
    assert find(1, span=counted) is not now
    assert find(2, span=counted).span == SPAN
    for copied in (copy.deepcopy(passes), pickle.loads(pickle.dumps(passes))):
        assert copied._known == []


def test_a_mask_is_not_kept_alive() -> None:
    passes, kept = Passes(), torch.ones(1)
    mask: Tensor | None = kept.clone()
    now = passes.find(None, mask, None, SPAN, 0, CPU)
    mask = kept  # the former is gone, and a new tensor may have its address
    assert passes.find(None, mask, None, SPAN, 1, CPU) is not now
