"""Keys stored before RoPE are rotated by their place in the cache: positions that say otherwise are refused."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.compare import relative_error
from support.folded_models import Folding, folded
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from rotor.checkpoint.layout import POST_ROPE, PRE_ROPE, KeyForm
from rotor.errors import UsageError
from rotor.policies import H2O, KIVI, Tiers, cache_policy

IDS = torch.arange(7, 19).reshape(1, 12)
HOLE = torch.tensor([[1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1]])
SKIPPING = (HOLE.cumsum(-1) - 1).clamp(min=0)
FORMS = {"pre": None, "block": KeyForm(8), "post": POST_ROPE}
REFUSED = pytest.raises(UsageError, match="but not by position_ids")


@pytest.fixture(scope="module")
def pair(tiny) -> Callable[[str, str], tuple[Any, Any]]:
    """pair(family, form) -> the source model and one with compressed attention that keeps all numbers."""
    made: dict[tuple[str, str], tuple[Any, Any]] = {}

    def get(family: str, form: str) -> tuple[Any, Any]:
        if (family, form) not in made:
            source = AutoModelForCausalLM.from_pretrained(tiny(family)).eval()
            own = FORMS[form] or PRE_ROPE
            made[family, form] = source, folded(source, Folding(own))
        return made[family, form]

    return get


@torch.inference_mode()
def logits(model: Any, ids: Tensor = IDS, **keywords: Any) -> Tensor:
    return model(ids, use_cache="past_key_values" in keywords, **keywords).logits


def error(models: tuple[Any, Any], seen: Tensor, ids: Tensor = IDS, **keywords: Any) -> float:
    before, after = (logits(model, ids, **keywords)[seen.bool()] for model in models)
    return relative_error(after, before)


@pytest.mark.parametrize("family", ["llama", "gemma2", "falcon"])
def test_a_hole_with_positions_that_skip_it(family: str, pair) -> None:
    models = pair(family, "pre")
    with pytest.raises(UsageError, match="but not by position_ids"):
        logits(models[1], attention_mask=HOLE, position_ids=SKIPPING)
    # The same hole with positions that count it is what the cache says.
    assert error(models, HOLE, attention_mask=HOLE) < 1e-4
    if family == "llama":
        assert error(pair("llama", "post"), HOLE, attention_mask=HOLE, position_ids=SKIPPING) < 1e-4


def test_padding_on_the_right_says_to_pad_on_the_left(pair) -> None:
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[1, 8:] = 0
    with pytest.raises(UsageError, match="but not by position_ids") as caught:
        pair("llama", "pre")[1].generate(IDS.expand(2, -1), attention_mask=mask, max_new_tokens=2, pad_token_id=0)
    assert caught.value.hint.startswith("Pad on the left (tokenizer.padding_side = 'left')")


@pytest.mark.parametrize("family", ["llama", "falcon"])
def test_padding_shifts_a_sequence(family: str, pair) -> None:
    """On the left with positions as `generate` makes them; on the right, where padding repeats a position."""
    models = pair(family, "pre")
    ids = IDS.repeat(3, 1)
    mask = torch.ones_like(ids)
    mask[1, :4], mask[2, 9:] = 0, 0
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    for more in ({"position_ids": positions}, {}, {"position_ids": positions + 5}):
        assert error(models, mask, ids, attention_mask=mask, **more) < 1e-4


def test_packed_documents(pair) -> None:
    packed = torch.arange(12).reshape(1, 12) % 6
    for family in ("llama", "falcon"):
        with pytest.raises(UsageError, match="tokens at 0 and 11 of the cache are 11 apart there, but not by"):
            logits(pair(family, "pre")[1], position_ids=packed)


def test_a_gap_between_two_calls_with_one_cache(pair) -> None:
    _, model = pair("llama", "pre")
    cache = DynamicCache(config=model.config)
    logits(model, IDS[:, :6], past_key_values=cache)
    logits(model, IDS[:, 6:7], past_key_values=cache)
    with REFUSED:
        logits(model, IDS[:, 7:8], past_key_values=cache, position_ids=torch.tensor([[20]]))
    cache.reset()
    logits(model, IDS[:, :6], past_key_values=cache, position_ids=torch.arange(30, 36)[None])
    with REFUSED:
        logits(model, IDS[:, 6:9], past_key_values=cache)  # counts from the cache's length, 6


def test_each_pass_is_compared(pair) -> None:
    """Positions may be changed in place."""
    _, model = pair("llama", "pre")
    positions, ones = torch.arange(12)[None], torch.ones_like(IDS)
    logits(model, position_ids=positions, attention_mask=ones)
    positions[0, 6:] += 5
    with REFUSED:
        logits(model, position_ids=positions, attention_mask=ones)


def saved(cache: Any) -> Any:
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def rebuilt(cache: Any) -> Any:
    return DynamicCache([(layer.keys, layer.values) for layer in cache.layers])


def by(method: str, *arguments: Any) -> Callable[[Any], Any]:
    def change(cache: Any) -> Any:
        getattr(cache, method)(*arguments)
        return cache

    return change


LAST_TWO = torch.tensor([1, 2])
SWAPPED = torch.tensor([2, 1, 0])
COPIES: dict[str, tuple[Callable[[Any], Any], Callable[[Tensor], Tensor]]] = {
    "deepcopy": (copy.deepcopy, lambda x: x),
    "saved": (saved, lambda x: x),
    "rebuilt": (rebuilt, lambda x: x),
    "expanded": (by("batch_repeat_interleave", 2), lambda x: x.repeat_interleave(2, 0)),
    "selected": (by("batch_select_indices", LAST_TWO), lambda x: x[LAST_TWO]),
    "reordered": (by("reorder_cache", SWAPPED), lambda x: x[SWAPPED]),
    "sliced": (by("crop", -2), lambda x: x[:, :-2]),
}
"""Changes of a cache, and of the padding of its sequences."""
WINDOWED = ("gemma2", "gemma3_text", "mistral")
OTHERS = ("falcon", "gemma2", "gpt_neox", "mistral", "mixtral", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""Families with RoPE that are nowhere else in the test of copies."""
OTHERS_QUICK = [(family, ("block", "pre")[index % 2]) for index, family in enumerate(OTHERS)]
OTHERS_NIGHTLY = [(family, ("pre", "block")[index % 2]) for index, family in enumerate(OTHERS)]
POLICIES = {
    "h2o": H2O(tokens=1000),
    "coded": KIVI(group=4, residual=1000),
    "tiers": Tiers(qk_unimportant=0.0, v_unimportant=0.0),
}


@pytest.mark.parametrize(
    ("family", "form", "kind"),
    [
        ("llama", "pre", "dynamic"),
        ("llama", "post", "dynamic"),
        ("gemma3_text", "block", "dynamic"),
        ("llama", "block", "static"),
        ("gemma3_text", "pre", "static"),
        ("llama", "block", "h2o"),
        ("llama", "pre", "coded"),
        ("llama", "block", "tiers"),
        *((family, form, "dynamic") for family, form in OTHERS_QUICK),
        *(pytest.param(family, form, "dynamic", marks=pytest.mark.nightly) for family, form in OTHERS_NIGHTLY),
    ],
)
def test_a_copy_of_a_cache_knows_its_positions(family: str, form: str, kind: str, pair) -> None:
    """Going on with the right positions gives what the source gives; with others too, or it is refused."""
    source, model = pair(family, form)
    by_index = form != "post" and family != "phi3"  # longrope: keys are read as they were rotated when they came
    ids = torch.randint(7, 4000, (3, 16), generator=torch.Generator().manual_seed(0))
    padding = torch.ones(3, 12, dtype=torch.int64)
    padding[0, :5], padding[2, :3] = 0, 0
    for name, (change, of_padding) in COPIES.items():
        if name in ("rebuilt", "sliced") and (kind in POLICIES or family in WINDOWED):
            continue
        if kind == "static" and name in ("rebuilt", "expanded", "selected", "sliced"):
            continue
        mask = of_padding(padding)
        more = ids[:1, 12:].expand(len(mask), -1)
        whole = torch.cat([mask, torch.ones_like(more)], 1)
        right = whole.cumsum(-1)[:, -more.shape[1] :] - 1
        for positions in (right, right + 3):
            found = []
            for network in (source, model):
                policy = POLICIES.get(kind) if network is model else None
                with cache_policy(network, policy), torch.inference_mode():
                    cache = StaticCache(model.config, 32) if kind == "static" else DynamicCache(config=model.config)
                    first = (padding.cumsum(-1) - 1).clamp(min=0)
                    network(ids[:, :12], attention_mask=padding, position_ids=first, past_key_values=cache)
                    cache = change(cache)
                    step = {"attention_mask": whole, "position_ids": positions, "past_key_values": cache}
                    unknown = form != "post" and name == "rebuilt"
                    if network is model and (unknown or (by_index and positions is not right)):
                        with pytest.raises(UsageError, match=r"(positions|rotations) are unknown|but not by position"):
                            network(more, **step)
                    else:
                        found.append(network(more, **step).logits)
            if len(found) == 2:
                assert relative_error(*found) < 1e-4, (name, positions is right)


def test_sequences_changed_by_hand_are_refused_unless_they_are_alike(pair) -> None:
    _, model = pair("llama", "block")
    for padded in (True, False):
        mask = torch.ones(2, 6, dtype=torch.int64)
        mask[0, :3] = 0 if padded else 1
        cache = DynamicCache(config=model.config)
        first = (mask.cumsum(-1) - 1).clamp(min=0)
        ids = IDS[:, :6].expand(2, -1)
        logits(model, ids, past_key_values=cache, attention_mask=mask, position_ids=first)
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[1:], layer.values[1:]
        step = {"past_key_values": cache, "position_ids": torch.tensor([[6]])}
        if padded:
            with pytest.raises(UsageError, match="holds 6 tokens whose positions are unknown"):
                logits(model, IDS[:, 6:7], **step)
        else:
            expected = logits(model, IDS[:, :7])[:, -1:]
            assert relative_error(logits(model, IDS[:, 6:7], **step), expected) < 1e-4
