"""Layers that keep the first and the newest tokens exactly: every cache against one pass with keys of two kinds."""

from __future__ import annotations

import copy
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.both_kinds import in_one_pass
from support.compare import relative_error
from support.folded_models import MIXED, Folding, folded
from support.quick import mostly_nightly
from support.runs import calibrated
from support.tiny_models import CONFIGS
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.cache_utils import Cache, DynamicCache, QuantizedLayer, StaticCache

from rotor import export, validate
from rotor.checkpoint import layout as checkpoint_layout
from rotor.checkpoint.layout import POST_ROPE, PRE_ROPE, ExactTokens, KeyForm
from rotor.checkpoint.sizes import CacheSize, exact_bytes_of_sequence, kv_bytes_per_token
from rotor.errors import UsageError
from rotor.policies import Streaming, stored_bytes, use_cache_policy
from rotor.runtime.attention import RotorAttention
from rotor.search.evaluation.cached import constant_rope_tokens

PRE, SOME = PRE_ROPE, KeyForm(8)
EXACT = ExactTokens(first=2, newest=6)
CASES = {
    "post": ("llama", Folding(POST_ROPE, 1, bits=MIXED, exact=EXACT)),
    "pre": ("llama", Folding(PRE, 2, joint=True, bits=MIXED, exact=EXACT)),
    "blocks": ("llama", Folding(SOME, 2, joint=True, bits=MIXED, exact=EXACT)),
    "numbers": ("llama", Folding(SOME, 1, rank=8, exact=EXACT)),
    "key norm": ("qwen3", Folding(SOME, 2, joint=True, bits=MIXED, exact=EXACT)),
    "window": ("mistral", Folding(SOME, 1, bits=MIXED, exact=EXACT)),
    "window, pre": ("mistral", Folding(PRE, 2, joint=True, bits=MIXED, exact=EXACT)),
    "window shorter than the ring": ("mistral", Folding(SOME, 1, bits=MIXED, exact=ExactTokens(2, 16))),
    "both kinds of layers": ("gemma3_text", Folding(SOME, 1, joint=True, bits=MIXED, exact=EXACT)),
    "soft cap": ("gemma2", Folding(POST_ROPE, 2, bits=MIXED, exact=EXACT)),
    "no RoPE": ("gpt2", Folding(POST_ROPE, 2, joint=True, bits=MIXED, exact=EXACT)),
    "partial": ("gpt_neox", Folding(KeyForm(8), 2, bits=MIXED, exact=EXACT)),
    "newest alone": ("llama", Folding(SOME, 1, joint=True, bits=MIXED, exact=ExactTokens(0, 5))),
}
"""Family, and how it is compressed."""

TOLERANCE = 1e-4
"""Tables of RoPE are float32, so that a code of many bits may move by one."""

LENGTH = 34
STEPS = [9, *[1] * 8, 5, 1, 1, 7, *[1] * 3]
"""Tokens of each pass: a prompt, single tokens, several."""

CACHES = {
    "dynamic": lambda config: DynamicCache(config=config),
    "grown layer by layer": lambda config: DynamicCache(),
    "static": lambda config: StaticCache(config=config, max_cache_len=LENGTH + 6),
}


@pytest.fixture(scope="module")
def models(tiny):
    """models(name) -> a model of exact tokens, in float64, and its source."""
    made: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in made:
            family, folding = CASES[name]
            source = AutoModelForCausalLM.from_pretrained(tiny(family), dtype=torch.float64).eval()
            made[name] = folded(source, folding), source
        return made[name]

    return get


def prompts(batch_size: int, length: int, seed: int = 3) -> Tensor:
    return torch.randint(1, 4096, (batch_size, length), generator=torch.Generator().manual_seed(seed))


def padded(rows: Tensor, begin: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Mask and positions of rows that begin behind padding."""
    mask = torch.ones_like(rows)
    for row, start in enumerate(begin):
        mask[row, :start] = 0
    return mask, (mask.cumsum(-1) - 1).clamp(min=0)


def through(model: Any, cache: Any, rows: Tensor, passes: Sequence[int], begin: Sequence[int]) -> Tensor:
    """Logits of all tokens, pass by pass."""
    mask, positions = padded(rows, begin)
    found, start = [], cache.get_seq_length()
    for count in passes:
        stop = start + count
        found.append(
            model(
                rows[:, start:stop],
                attention_mask=mask[:, :stop],
                position_ids=positions[:, start:stop],
                past_key_values=cache,
            ).logits
        )
        start = stop
    return torch.cat(found, dim=1)


def expected_of(model: Any, rows: Tensor, passes: Sequence[int], begin: Sequence[int]) -> Tensor:
    mask, positions = padded(rows, begin)
    with in_one_pass(model, passes, begin):
        logits: Tensor = model(rows, attention_mask=mask, position_ids=positions, use_cache=False).logits
    return logits


def check(got: Tensor, expected: Tensor, begin: Sequence[int]) -> None:
    """Compare the tokens that are no padding."""
    for row, start in enumerate(begin):
        assert relative_error(got[row, start:], expected[row, start:]) < TOLERANCE


EVERY = [(name, cache) for name in CASES for cache in CACHES]
LIKE_OTHERS = ("pre", "window, pre", "window shorter than the ring")
QUICK = {(name, [*CACHES][index % len(CACHES)]) for index, name in enumerate(CASES) if name not in LIKE_OTHERS}
"""Each kind of layer with one of the caches; the others are nightly."""


@pytest.mark.parametrize(("name", "cache"), mostly_nightly(EVERY, lambda case: case in QUICK))
def test_passes_through_a_cache_are_one_pass_with_two_kinds_of_keys(name: str, cache: str, models) -> None:
    """Also behind padding that is no multiple of a block."""
    model, _ = models(name)
    rows, begin = prompts(3, LENGTH), [0, 5, 3]
    with torch.no_grad():
        got = through(model, CACHES[cache](model.config), rows, STEPS, begin)
        check(got, expected_of(model, rows, STEPS, begin), begin)
        rows = rows[:1]  # no mask
        got = through(model, CACHES[cache](model.config), rows, STEPS, [0])
        check(got, expected_of(model, rows, STEPS, [0]), [0])


UNLIKE = ("llama", "falcon-40b", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "mixtral", "opt", "phi3", "qwen3")
"""Families whose attention takes its tensors in a way of its own; the others are like one of them, and nightly."""


@pytest.mark.parametrize("name", mostly_nightly(CONFIGS, lambda name: name in UNLIKE))
def test_a_model_whose_sequences_are_shorter_than_the_ring_is_its_source(name: str, tiny) -> None:
    """Of every family; also where layers have windows, and where a prompt comes in chunks."""
    dtype = torch.float32 if "moe" in name or name == "mixtral" else torch.float64  # experts are never float64
    source = AutoModelForCausalLM.from_pretrained(tiny(name), dtype=dtype).eval()
    keys = SOME if constant_rope_tokens(source.config) is None else POST_ROPE
    model = folded(source, Folding(keys, 1, bits=((8, 4),), exact=ExactTokens(4, 128)))
    begin = [0, 0] if name == "gemma2" else [0, 5]  # gemma2's own attention gives NaN behind padding in float64
    rows = prompts(2, LENGTH)
    mask, positions = padded(rows, begin)
    with torch.no_grad():
        expected = through(source, DynamicCache(config=source.config), rows, STEPS, begin)
        check(through(model, DynamicCache(config=model.config), rows, STEPS, begin), expected, begin)
        got = model(rows, attention_mask=mask, position_ids=positions, use_cache=False).logits
        check(got, source(rows, attention_mask=mask, position_ids=positions, use_cache=False).logits, begin)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text", "gpt2"])
def test_autocast_is_that_of_the_source(name: str, tiny) -> None:
    """There projections put out bfloat16, and norms of heads float32."""
    source = AutoModelForCausalLM.from_pretrained(tiny(name), dtype=torch.float32).eval()
    model = folded(source, Folding(SOME, 1, bits=((8, 4),), exact=ExactTokens(4, 128)))
    rows, begin = prompts(2, LENGTH), [0, 0]
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = through(source, DynamicCache(config=source.config), rows, STEPS, begin)
        got = through(model, DynamicCache(config=model.config), rows, STEPS, begin)
        whole = model(rows, use_cache=False).logits
    assert got.dtype == expected.dtype
    assert relative_error(got.float(), expected.float()) < 0.05
    assert relative_error(whole.float(), expected.float()) < 0.05


def filled(model: Any, rows: Tensor, begin: Sequence[int], passes: Sequence[int]) -> Any:
    cache = DynamicCache(config=model.config)
    through(model, cache, rows, passes, begin)
    return cache


@pytest.mark.parametrize(
    "name", mostly_nightly(["blocks", "post", "both kinds of layers"], lambda name: name != "post")
)
def test_sequences_are_chosen_moved_copied_and_saved_with_their_exact_tokens(name: str, models) -> None:
    model, _ = models(name)
    rows, begin, prompt, rest = prompts(3, LENGTH), [0, 5, 3], [9, 1, 1, 1], [1, 5, 1, 1]
    rows = rows[:, : sum(prompt + rest)]
    with torch.no_grad():
        expected = expected_of(model, rows, prompt + rest, begin)[:, sum(prompt) :]
        cache = filled(model, rows, begin, prompt)

        def check_rest(cache: Any, taken: list[int]) -> None:
            start = sum(prompt)
            got = through(model, cache, rows[taken], rest, [begin[row] for row in taken])
            assert got.shape[1] == rows.shape[1] - start
            for row, of_row in zip(got, taken, strict=True):
                assert relative_error(row, expected[of_row]) < TOLERANCE

        saved = io.BytesIO()
        torch.save(cache, saved)
        saved.seek(0)
        check_rest(torch.load(saved, weights_only=False), [0, 1, 2])
        reordered = copy.deepcopy(cache)
        reordered.reorder_cache(torch.tensor([2, 0, 0]))
        check_rest(reordered, [2, 0, 0])
        repeated = copy.deepcopy(cache)
        repeated.batch_repeat_interleave(2)
        repeated.batch_select_indices(torch.tensor([3, 0, 5]))
        check_rest(repeated, [1, 0, 2])
        moved = copy.deepcopy(cache)
        for layer in moved.layers:
            layer.offload()
            layer.prefetch()
        check_rest(moved, [0, 1, 2])
        again = copy.deepcopy(cache)
        again.reset()
        through(model, again, rows, prompt, begin)
        check_rest(again, [0, 1, 2])
        check_rest(cache, [0, 1, 2])


def test_a_prefix_is_used_again_by_several_continuations(models) -> None:
    """One prefix, repeated for a batch, and copied for the next."""
    model, _ = models("blocks")
    rows = prompts(2, LENGTH)
    rows[1, :12] = rows[0, :12]
    passes = [12, 7, 1, 1, 1]
    with torch.no_grad():
        expected = expected_of(model, rows[:, : sum(passes)], passes, [0, 0])[:, 12:]
        prefix = DynamicCache(config=model.config)
        model(rows[:1, :12], past_key_values=prefix)
        for _ in range(2):
            cache = copy.deepcopy(prefix)
            cache.batch_repeat_interleave(2)
            got = through(model, cache, rows, passes[1:], [0, 0])
            assert relative_error(got, expected) < TOLERANCE


@pytest.mark.parametrize("name", ["blocks", "post"])
def test_what_is_taken_back_leaves_older_tokens_to_their_codes(name: str, models) -> None:
    """After a crop the ring lacks tokens that newer ones had replaced; what was exact stays so, and new ones are."""
    model, _ = models(name)
    rows, other = prompts(2, LENGTH), prompts(2, LENGTH, seed=4)
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        model(rows[:, :20], past_key_values=cache)
        cache.crop(-4)
        assert [layer.exact_rows.until for layer in cache.layers] == [14, 14]
        cut = copy.deepcopy(cache)
        got = model(other[:, 16:17], past_key_values=cache).logits
        # As if the ring held 3 tokens at this step, 14 and 15 and the new one.
        with in_one_pass(model, [16, 1], [0, 0]):
            for layer in (module for module in model.modules() if isinstance(module, RotorAttention)):
                layer.store.exactly[:, 16, :14] = torch.arange(14) < EXACT.first
            expected = model(torch.cat([rows[:, :16], other[:, 16:17]], 1), use_cache=False).logits
        assert relative_error(got, expected[:, -1:]) < TOLERANCE
        # Once as many new tokens as the ring holds have come, nothing is left of it.
        joined = torch.cat([rows[:, :16], other[:, 16:24]], 1)
        got = torch.cat([model(other[:, i : i + 1], past_key_values=cut).logits for i in range(16, 24)], 1)
        assert relative_error(got[:, :1], expected[:, -1:]) < TOLERANCE
        with in_one_pass(model, [16, *[1] * 8], [0, 0]):
            for layer in (module for module in model.modules() if isinstance(module, RotorAttention)):
                layer.store.exactly[:, 16:, 2:14] = False
            expected = model(joined, use_cache=False).logits
        assert relative_error(got, expected[:, 16:]) < TOLERANCE
        cut.crop(-cut.get_seq_length())
        assert relative_error(model(rows[:, :9], past_key_values=cut).logits, model(rows[:, :9]).logits) < TOLERANCE


class Offloading(DynamicCache):
    """Moves of a layer by transformers' offloaded cache around each of its steps, wherever it lies."""

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.layers[layer_idx].prefetch()
        found = super().update(key, value, layer_idx, *args, **kwargs)
        self.layers[layer_idx].offload()
        return found


@pytest.mark.parametrize(
    "name",
    mostly_nightly(
        ["blocks", "window", "both kinds of layers", "no RoPE"],
        lambda name: name in ("blocks", "both kinds of layers"),
    ),
)
def test_every_cache_gives_the_same_tokens(name: str, models) -> None:
    """Greedy and beams, in a batch padded on the left by any number; chunks, prompt look-up."""
    model, _ = models(name)
    rows = prompts(3, 20)
    mask, _ = padded(rows, [0, 7, 3])
    options = {"attention_mask": mask, "max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(rows, **options)
    assert torch.equal(model.generate(rows, cache_implementation="static", disable_compile=True, **options), expected)
    assert torch.equal(model.generate(rows, past_key_values=Offloading(config=model.config), **options), expected)
    beams = model.generate(rows, num_beams=3, **options)
    static = model.generate(rows, num_beams=3, cache_implementation="static", disable_compile=True, **options)
    assert torch.equal(beams, static)
    several = model.generate(rows[:1], **options | {"attention_mask": mask[:1]})
    looked_up = model.generate(
        rows[:1], prompt_lookup_num_tokens=3, max_matching_ngram_size=1, **options | {"attention_mask": mask[:1]}
    )
    assert looked_up.shape == several.shape


def test_gradients_of_numbers_beside_exact_tokens_are_the_sources(models) -> None:
    """A prompt is exact, so that its gradients are those of the source."""
    model, source = models("numbers")
    rows = prompts(1, 12)
    for own in (model, source):
        own.zero_grad()
        own(rows, labels=rows).loss.backward()
    theirs = source.get_input_embeddings().weight.grad
    assert relative_error(model.get_input_embeddings().weight.grad, theirs) < 1e-9


@pytest.mark.parametrize("use_cache", [False, True])
def test_a_loss_beside_codes_has_no_gradient(use_cache: bool, models) -> None:
    """In passes that read codes and in others; gradients stay as they were."""
    for name in ("post", "both kinds of layers"):
        model, _ = models(name)
        model.zero_grad()
        rows = prompts(1, 12)
        loss = model(rows, labels=rows, use_cache=use_cache).loss
        with pytest.raises(UsageError, match="caches codes, which have no gradients"):
            loss.backward()
    cache = DynamicCache(config=model.config)
    model(rows, past_key_values=cache)
    with pytest.raises(UsageError, match="caches codes, which have no gradients"):
        model(rows[:, :1], past_key_values=cache).logits.sum().backward()
    for name in ("q_proj", "k_proj", "v_proj"):
        assert model.model.layers[0].self_attn.get_submodule(name).weight.grad is None


LONGER = ExactTokens(first=3, newest=20)
GROWING = {
    "blocks": ("llama", Folding(SOME, 2, joint=True, bits=MIXED, exact=LONGER)),
    "window": ("mistral", Folding(SOME, 1, bits=MIXED, exact=LONGER)),
    "no RoPE": ("gpt2", Folding(POST_ROPE, 2, joint=True, bits=MIXED, exact=LONGER)),
}


@pytest.mark.parametrize("at_a_time", [1, 7])
@pytest.mark.parametrize("name", GROWING)
def test_slots_that_grow_with_a_sequence_hold_what_all_of_them_would(
    name: str, at_a_time: int, tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind padding: steps, chunks, a crop, a new order, copies, until the ring is whole; sums have another order."""
    family, folding = GROWING[name]
    model = folded(AutoModelForCausalLM.from_pretrained(tiny(family), dtype=torch.float64).eval(), folding)
    exact = LONGER.within(getattr(model.config, "sliding_window", None))

    def run(slots_at_a_time: int) -> tuple[Tensor, list[int]]:
        monkeypatch.setattr(checkpoint_layout, "SLOTS_AT_A_TIME", slots_at_a_time)
        cache, rows, begin, order = DynamicCache(config=model.config), prompts(3, 60), [0, 5, 3], [2, 0, 1]
        found, slots = [], []
        for place, count in enumerate([7, *[1] * 6, 3, 1, 1, 4, *[1] * 5, 9, 1]):
            if place == 9:
                cache.reorder_cache(torch.tensor(order))
                rows, begin = rows[order], [begin[row] for row in order]
            if place == 12 and family != "mistral":  # whose window takes nothing back
                cache.crop(-2)
            found.append(through(model, cache, rows, [count], begin))
            slots.append(cache.layers[-1].exact_rows.keys.shape[2])
        return torch.cat(found, 1), slots

    with torch.no_grad():
        (whole, every), (got, slots) = run(1 << 20), run(at_a_time)
    assert set(every) == {exact.slots}
    assert slots[0] == exact.slots_of(7) < exact.slots == slots[-1]
    assert slots == sorted(slots)
    assert relative_error(got, whole) < 1e-12


def test_bytes_are_counted_with_exact_tokens(models) -> None:
    """A cache holds the rows of its tokens, and the slots of its exact ones; a window holds no more, and a
    sequence that is shorter than the ring fewer."""
    whole, source = models("blocks")
    window, _ = models("window shorter than the ring")
    growing = folded(source, GROWING["blocks"][1])
    for model, slots in ((whole, 2 + 6), (window, 2 + 12), (growing, 3 + 16)):
        layers = [module for module in model.modules() if isinstance(module, RotorAttention)]
        layouts, shape = [layer.layout for layer in layers], layers[0].shape
        cache = filled(model, prompts(1, 10), [0], [10])
        exact = exact_bytes_of_sequence([layout.exact for layout in layouts], shape, 8, 10)
        assert exact == 2 * slots * 4 * 2 * 16 * 8
        counters = 2 * 8 if shape.windows else 0  # transformers' sliding layers keep their window as a tensor
        assert stored_bytes(cache) == 10 * kv_bytes_per_token(layouts, 8) + exact + counters
        assert CacheSize.of_layouts(layouts, shape, 8).of_sequence(10)["after"] == stored_bytes(cache) - counters


class Quantised(QuantizedLayer):
    """Stands for those of quanto and HQQ, which need their packages."""

    def _quantize(self, tensor: Tensor, axis: int) -> Any:
        raise AssertionError("rows reached a quantiser")

    _dequantize = _quantize


def test_what_cannot_keep_exact_tokens_is_refused(models) -> None:
    model, _ = models("blocks")
    rows = prompts(1, 8)
    numbers, _ = models("numbers")
    for own in (model, numbers):
        cache = Cache(layers=[Quantised(), Quantised()])
        with pytest.raises(UsageError, match="Quantised"):
            own(rows, past_key_values=cache)
    with pytest.raises(UsageError, match="keeps 2 first and 6 newest tokens exactly beside its rows"):
        use_cache_policy(model, Streaming(tokens=8))
    model, _ = models("post")
    cache = DynamicCache(config=model.config)
    cache.update(torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4, 8), 0)
    with pytest.raises(UsageError, match="holds 4 tokens that another model put there"):
        model(rows, past_key_values=cache)


@pytest.mark.parametrize("without_weights", [False, True])
def test_an_export_keeps_the_tokens_that_its_recipe_names(without_weights: bool, tiny, tmp_path: Path) -> None:
    """Of a run without any; loaded, its prompts are the source's, and its cache is what rotor.json says."""
    run = calibrated(tiny("llama"), tmp_path / "run", "pre", 1)
    out, overrides = tmp_path / "out", ["exact.first=2", "exact.newest=6"]
    exported = export(run.folder, out, compression=0.4, overrides=overrides, without_weights=without_weights)
    model = AutoModelForCausalLM.from_pretrained(out).eval()
    source = AutoModelForCausalLM.from_pretrained(tiny("llama")).eval()
    rows = prompts(2, 20)
    layers = [module for module in model.modules() if isinstance(module, RotorAttention)]
    assert {layer.layout.exact for layer in layers} == {EXACT}
    with torch.no_grad():
        assert relative_error(model(rows).logits, source(rows).logits) < 1e-5
        cache = filled(model, rows, [0, 0], [20])
    held = exported.report["kv_bytes_of_sequence"]
    per_token = exported.report["kv_bytes_per_token"]["after"]
    assert stored_bytes(cache) == 2 * (held["after"] - (held["tokens"] - 20) * per_token)
    result = validate(out)
    assert not result.damaged, [check for check in result.checks if check.status == "fail"]


def test_a_pass_of_one_token_of_padding_does_not_begin_a_sequence(models) -> None:
    """Rows behind 30 tokens of padding, of which one comes alone: slots keep the first tokens that are none."""
    model, _ = models("blocks")
    rows, begin, passes = prompts(3, 44), [0, 30, 21], [20, 1, 11, *[1] * 12]
    for make in CACHES["dynamic"], lambda config: StaticCache(config=config, max_cache_len=50):
        cache = make(model.config)
        with torch.no_grad():
            got = through(model, cache, rows, passes, begin)
            check(got, expected_of(model, rows, passes, begin), begin)
        assert all(layer.exact_rows.begin.tolist() == begin for layer in cache.layers)


def test_padding_that_comes_token_by_token_is_not_taken_for_the_first_tokens(models) -> None:
    model, _ = models("post")
    rows, begin, passes = prompts(2, 20), [6, 9], [1] * 20
    with torch.no_grad():
        got = through(model, DynamicCache(config=model.config), rows, passes, begin)
        check(got, expected_of(model, rows, passes, begin), begin)


@pytest.mark.parametrize("inference", [False, True])
def test_a_mask_that_was_edited_between_two_passes_is_another_one(inference: bool, models) -> None:
    """Also one made in inference mode, which does not count what is written to it."""
    model, _ = models("blocks")
    rows, begin = prompts(2, 24), [0, 0]
    with torch.inference_mode(inference), torch.no_grad():
        caches = [DynamicCache(config=model.config) for _ in range(2)]
        for cache in caches:
            through(model, cache, rows[:, :23], [23], begin)
        mask = torch.ones(2, 1, 1, 24, dtype=torch.bool)
        last = {"input_ids": rows[:, 23:], "position_ids": torch.full((2, 1), 23)}
        model(**last, attention_mask=mask, past_key_values=caches[0])
        mask[:, :, :, 3:9] = False
        got = model(**last, attention_mask=mask, past_key_values=caches[1]).logits
        caches[0].crop(-1)
        expected = model(**last, attention_mask=mask.clone(), past_key_values=caches[0]).logits
    assert relative_error(got, expected) < TOLERANCE
