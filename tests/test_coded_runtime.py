"""Compressed checkpoints through transformers: against their source, and against rounded latents in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import load_file
from support.compare import relative_error
from support.folded_models import MIXED, Folding, Pair, write_pair
from support.quick import mostly_nightly
from transformers import AutoModelForCausalLM
from transformers.cache_utils import Cache, DynamicCache, QuantizedLayer

from rotor.checkpoint.layout import POST_ROPE, PRE_ROPE, KeyForm
from rotor.checkpoint.sizes import kv_bytes_per_token
from rotor.errors import UsageError
from rotor.policies import stored_bytes
from rotor.tools.validation.validate import cache_bytes_per_token

BLOCK_OF_8 = KeyForm(8)
CASES = {
    "post": ("llama", Folding(POST_ROPE, 1, bits=MIXED)),
    "pre": ("llama", Folding(PRE_ROPE, 2, bits=MIXED)),
    "window": ("mistral", Folding(PRE_ROPE, 1, bits=MIXED)),
    "key norm": ("qwen3", Folding(PRE_ROPE, 2, bits=MIXED)),
    "softcap": ("gemma2", Folding(POST_ROPE, 2, bits=MIXED)),
    "no rope": ("gpt2", Folding(POST_ROPE, 1, bits=MIXED)),
    "joint": ("llama", Folding(PRE_ROPE, 2, joint=True, bits=MIXED)),
    "no rope, joint": ("gpt2", Folding(POST_ROPE, 4, joint=True, bits=MIXED)),
    "blocks": ("llama", Folding(BLOCK_OF_8, 2, joint=True, bits=MIXED)),
    "blocks in a window": ("mistral", Folding(BLOCK_OF_8, 1, bits=MIXED)),
    "blocks, key norm": ("qwen3", Folding(BLOCK_OF_8, 2, joint=True, bits=MIXED)),
    "partial": ("gpt_neox", Folding(BLOCK_OF_8, 2, bits=MIXED)),
}
"""Family, and how it is compressed."""

BLOCKS = {"blocks": 8, "blocks, key norm": 8}


@pytest.fixture(scope="module")
def pair(tiny, tmp_path_factory: pytest.TempPathFactory):
    """pair(name) -> a Pair, made once."""
    made: dict[str, Pair] = {}

    def get(name: str) -> Pair:
        if name not in made:
            family, folding = CASES[name]
            made[name] = write_pair(tiny(family), tmp_path_factory.mktemp("coded") / "out", folding)
        return made[name]

    return get


def prompts(batch_size: int, length: int, seed: int = 3) -> torch.Tensor:
    return torch.randint(1, 4096, (batch_size, length), generator=torch.Generator().manual_seed(seed))


def padded_prompts(multiple_of: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Three rows, two of them padded on the left."""
    rows = prompts(3, 20)
    mask = torch.ones_like(rows)
    mask[1, : -(-9 // multiple_of) * multiple_of] = mask[2, : -(-2 // multiple_of) * multiple_of] = 0
    return rows.masked_fill(mask == 0, 0), mask


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_rounded_latents_in_float64(name, pair) -> None:
    rows = prompts(2, 40)
    with torch.no_grad():
        got = pair(name).load(torch.float64)(rows).logits
        with pair(name).reference() as model:
            expected = model(rows).logits
    assert relative_error(got, expected) < 2e-3  # a shift in float32 may move a code of 16 bits by one


QUICK = ("pre", "softcap", "no rope, joint", "blocks", "blocks in a window")


@pytest.mark.parametrize("name", mostly_nightly(CASES, lambda name: name in QUICK))
def test_every_cache_gives_the_tokens_of_rounded_latents(name, pair) -> None:
    """Greedy and beams, in a batch padded on the left; windows (mistral, gemma2) are shorter than the prompt."""
    rows, mask = padded_prompts()
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    model = pair(name).load(torch.float64)
    for beams in (1, 3):
        with pair(name).reference() as reference:
            expected = reference.generate(rows, num_beams=beams, **options)
        for implementation in (None, "static"):
            output = model.generate(
                rows, num_beams=beams, cache_implementation=implementation, return_dict_in_generate=True, **options
            )
            assert torch.equal(output.sequences, expected)
            stored = {t.dtype for layer in output.past_key_values.layers for t in (layer.keys, layer.values)}
            assert stored == {torch.uint8}


@pytest.mark.parametrize("name", ["window", "softcap", "no rope, joint", "blocks", "blocks, key norm"])
def test_a_row_alone_is_its_row_in_a_padded_batch(name, pair) -> None:
    """Padding by whole blocks, where keys are rotated within such: their codes depend on their place in it."""
    rows, mask = padded_prompts(BLOCKS.get(name, 1))
    model = pair(name).load(torch.float64)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    together = model.generate(rows, attention_mask=mask, **options)
    for row, own in zip(together, mask.bool(), strict=True):
        alone = row[: len(own)][own][None]
        got = model.generate(alone, attention_mask=torch.ones_like(alone), **options)
        assert torch.equal(got[0], row[int((~own).sum()) :])


@pytest.mark.parametrize("name", ["post", "pre", "no rope", "blocks in a window", "partial"])
def test_chunks_leave_the_logits_of_one_prefill(name, pair) -> None:
    model, rows = pair(name).load(torch.float64), prompts(2, 33)
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    with torch.no_grad():
        whole = model(rows, past_key_values=caches[0]).logits
        parts = [model(part, past_key_values=caches[1]).logits for part in rows.split([9, 1, 1, 15, 7], dim=1)]
    assert relative_error(torch.cat(parts, dim=1), whole) < 2e-3
    for one, other in zip(caches[0].layers, caches[1].layers, strict=True):
        assert float((one.keys != other.keys).double().mean()) < 1e-2


def test_rows_move_between_devices_as_they_are(pair) -> None:
    """Moves of a layer by an offloaded cache between its steps."""
    model, rows = pair("pre").load(), prompts(2, 20)
    tokens = []
    for offloaded in (False, True):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(rows, past_key_values=cache)
            for layer in cache.layers if offloaded else ():
                layer.offload()
                layer.prefetch()
            cache.crop(-2)
            tokens.append(model(rows[:, -2:], past_key_values=cache).logits)
    assert torch.equal(*tokens)


def test_what_is_added_before_rounding_stays_in_float32(pair) -> None:
    for name in ("key_shift", "key_constant"):
        stored = load_file(pair("post").coded / "model.safetensors")[f"model.layers.0.self_attn.{name}"].float()
        model = pair("post").load(torch.bfloat16)
        for change in (lambda m: m, lambda m: m.to(torch.float16), lambda m: m.double(), lambda m: m.bfloat16()):
            module = change(model).model.layers[0].self_attn
            assert torch.equal(getattr(module, name), stored)
            assert getattr(module, name).dtype == torch.float32
        assert module.q_proj.weight.dtype == torch.bfloat16
        assert model.to("meta").model.layers[0].self_attn.get_parameter(name).is_meta


@pytest.mark.parametrize("name", ["post", "blocks", "no rope"])
def test_autocast_runs_on_a_cpu(name, pair) -> None:
    """Projections put out bfloat16, the rest is as in a model of that dtype."""
    model, rows = pair(name).load(), prompts(2, 20)
    with torch.no_grad():
        expected = model(rows).logits
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = model(rows).logits
            output = model.generate(rows, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert output.shape == (2, 24)
    assert relative_error(got.float(), expected) < 0.5


def test_a_round_trip_through_save_pretrained(pair, tmp_path) -> None:
    for name in ("post", "joint", "no rope"):
        model, rows = pair(name).load(), prompts(2, 20)
        model.save_pretrained(tmp_path / name)
        again = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32).eval()
        assert dict(again.named_parameters()).keys() == dict(model.named_parameters()).keys()
        assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
        options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(again.generate(rows, **options), model.generate(rows, **options))
        assert torch.equal(copy.deepcopy(model)(rows).logits, model(rows).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["post", "pre", "joint", "no rope"])
def test_a_cache_takes_the_bytes_that_the_layout_says(name, dtype, pair) -> None:
    model = pair(name).load(dtype)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(prompts(2, 10), past_key_values=cache)
    expected = kv_bytes_per_token(pair(name).layouts, dtype.itemsize)
    assert sum(cache_bytes_per_token(cache)) == expected
    assert stored_bytes(cache) == 20 * expected


class Quantised(QuantizedLayer):
    """Stands for those of quanto and HQQ, which need their packages."""

    def _quantize(self, tensor, axis):
        raise AssertionError("rows of codes reached a quantiser")

    _dequantize = _quantize


def test_what_cannot_be_run_is_refused(pair) -> None:
    model, rows = pair("pre").load(), prompts(1, 8)
    cache = Cache(layers=[Quantised() for _ in range(2)])
    with pytest.raises(
        UsageError, match=r"layer 0: a quantised cache \(Quantised\) was given rows of codes: this checkpoint"
    ):
        model(rows, past_key_values=cache)
