"""Keys stored before RoPE are rotated by their place in the cache: positions that say otherwise are refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import calibrated, in_memory, relative_error
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from rotor.errors import UsageError
from rotor.runtime.attention import RotorAttention
from rotor.runtime.positions import PositionCheck
from rotor.search.probe import full_ranks

IDS = torch.arange(7, 19).reshape(1, 12)
HOLE = torch.tensor([[1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1]])
SKIPPING = (HOLE.cumsum(-1) - 1).clamp(min=0)


@pytest.fixture(scope="module")
def pair(tiny, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Any, Any]]:
    """pair(family, domain) -> the source model and one with compressed attention that keeps all columns."""
    made: dict[tuple[str, str], tuple[Any, Any]] = {}

    def get(family: str, domain: str) -> tuple[Any, Any]:
        if (family, domain) not in made:
            run = calibrated(tiny(family), tmp_path_factory.mktemp("positions") / "run", domain, 1)
            bases = run.bases().select([f"{domain}-1"] * run.shape.num_layers)
            network = in_memory(run)
            network.compress(bases, [[full_ranks(layer)] * len(layer.qk.encode) for layer in bases])
            made[family, domain] = AutoModelForCausalLM.from_pretrained(tiny(family)).eval(), network.model
        return made[family, domain]

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
    exact = error(models, torch.ones_like(IDS))
    with pytest.raises(UsageError, match="are 7 apart there, but not by position_ids"):
        logits(models[1], attention_mask=HOLE, position_ids=SKIPPING)
    # The same hole with positions that count it is what the cache says.
    assert error(models, HOLE, attention_mask=HOLE) <= 2 * exact + 1e-4


def test_after_rope_any_positions_hold(pair) -> None:
    models = pair("llama", "post")
    exact = error(models, torch.ones_like(IDS))
    assert error(models, HOLE, attention_mask=HOLE, position_ids=SKIPPING) <= 2 * exact + 1e-4


@pytest.mark.parametrize("family", ["llama", "falcon"])
def test_padding_shifts_a_row(family: str, pair) -> None:
    """On the left with positions as `generate` makes them; on the right, where padding repeats a position."""
    models = pair(family, "pre")
    exact = error(models, torch.ones_like(IDS))
    ids = IDS.repeat(3, 1)
    mask = torch.ones_like(ids)
    mask[1, :4], mask[2, 9:] = 0, 0
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    assert error(models, mask, ids, attention_mask=mask, position_ids=positions) <= 2 * exact + 1e-4
    assert error(models, mask, ids, attention_mask=mask) <= 2 * exact + 1e-4
    assert error(models, mask, ids, attention_mask=mask, position_ids=positions + 5) <= 2 * exact + 1e-4


def test_packed_documents(pair) -> None:
    """transformers parts them by their positions for Llama; Falcon's tokens see those of the document before."""
    packed = torch.arange(12).reshape(1, 12) % 6
    models = pair("llama", "pre")
    exact = error(models, torch.ones_like(IDS))
    assert error(models, torch.ones_like(IDS), position_ids=packed) <= 2 * exact + 1e-4
    with pytest.raises(UsageError, match="are 6 apart there, but not by position_ids"):
        logits(pair("falcon", "pre")[1], position_ids=packed)


def test_a_gap_between_two_calls_with_one_cache(pair) -> None:
    _, model = pair("llama", "pre")
    cache = DynamicCache(config=model.config)
    logits(model, IDS[:, :6], past_key_values=cache)
    logits(model, IDS[:, 6:7], past_key_values=cache)
    with pytest.raises(UsageError, match="but not by position_ids"):
        logits(model, IDS[:, 7:8], past_key_values=cache, position_ids=torch.tensor([[20]]))
    fresh = DynamicCache(config=model.config)
    logits(model, IDS[:, :6], past_key_values=fresh, position_ids=torch.arange(30, 36)[None])
    with pytest.raises(UsageError, match="but not by position_ids"):
        logits(model, IDS[:, 6:9], past_key_values=fresh)  # counts from the cache's length, 6


def test_generation_of_padded_rows_and_beams(pair) -> None:
    source, model = pair("llama", "pre")
    mask = torch.ones(2, 6, dtype=torch.int64)
    mask[1, :3] = 0
    ids = IDS[:, :6].repeat(2, 1)
    for beams in (1, 2):
        lengths = {
            m.generate(
                ids, attention_mask=mask, max_new_tokens=4, num_beams=beams, do_sample=False, pad_token_id=0
            ).shape
            for m in (source, model)
        }
        assert lengths == {(2, 10)}


def test_a_copy_of_a_model_begins_anew(pair) -> None:
    _, model = pair("llama", "pre")
    logits(model)
    again = copy.deepcopy(model)
    assert torch.equal(logits(again), logits(model))
    tables = [m.rotary.check_positions for m in again.modules() if isinstance(m, RotorAttention)]
    assert len(tables) == 2
    assert isinstance(pickle.loads(pickle.dumps(tables[0])), PositionCheck)


def test_each_mask_of_a_pass_is_compared() -> None:
    """Layers with a sliding window see less than others that share their positions."""
    check, positions = PositionCheck(), torch.tensor([[0, 1, 2, 9]])
    near = torch.eye(4, dtype=torch.bool)[None, None]
    check(positions, near, None, 0, 0)
    with pytest.raises(UsageError, match="row 0: the tokens at 0 and 3 of the cache"):
        check(positions, torch.ones(1, 1, 4, 4, dtype=torch.bool).tril(), None, 0, 0)
    additive = torch.zeros(1, 1, 4, 4).masked_fill(~near, torch.finfo(torch.float32).min)
    check(positions, additive, None, 0, 0)
