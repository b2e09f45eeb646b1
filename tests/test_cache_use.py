"""Cache policies in use: adopted by attention, stored in a checkpoint, under transformers' own generate."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import FAST_EVALUATION, SHORT_TEXT, calibrated, reseal
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

import rotor
from rotor.calibration.calibrate import calibrate
from rotor.errors import CheckpointError, RecipeError, UnsupportedModelError, UsageError
from rotor.export.export import export
from rotor.runtime.cache import (
    FP8,
    GEAR,
    H2O,
    KCVT,
    KIVI,
    METHODS,
    EvictingLayer,
    Keyformer,
    PerToken,
    Policy,
    PolicyLayer,
    Random,
    Streaming,
    TieredLayer,
    Tiers,
    Window,
    bundled_policies,
    cache_policy,
    find_policy,
    make_cache,
    policy_of,
    stored_bytes,
    use_cache_policy,
)

ALL = 10_000
EVERYTHING: list[Policy] = [
    PerToken(bits=16),
    KCVT(bits=16, buffer=5),
    KIVI(bits=16, group=4, residual=8),
    Window(tokens=ALL),
    Streaming(tokens=ALL, scope="layer"),
    H2O(tokens=ALL),
    Keyformer(tokens=ALL, scope="layer"),
    Random(tokens=ALL),
    H2O(tokens=ALL, squeeze=0.5),
    Tiers(important=1.0, qk_unimportant=0.9, v_unimportant=0.9),
    Tiers(important=0.3, qk_unimportant=0.0, v_unimportant=0.0, leaders=(0, 0)),
    Tiers(important=1.0, qk_unimportant=0.9, v_unimportant=0.9, cut="bits"),
    Tiers(important=0.3, qk_unimportant=0.0, v_unimportant=0.0, cut="bits"),
]
LOSSY: list[Policy] = [
    PerToken(bits=4, group=8),
    GEAR(bits=2, sparsity=0.2, buffer=6),
    Window(share=0.5),
    Streaming(tokens=9),
    H2O(share=0.4),
    H2O(share=0.4, scope="layer", squeeze=0.4),
    Keyformer(share=0.4),
    Keyformer(share=0.4, bits=4, group=8),
    Random(share=0.5),
    Tiers(important=0.4, qk_important=0.1, qk_unimportant=0.6, v_unimportant=0.5),
    Tiers(important=0.4, qk_unimportant=0.8, v_unimportant=0.5, leaders=(0, 0), importance="mean"),
    Tiers(important=0.4, qk_unimportant=0.6, v_unimportant=0.5, cut="bits"),
]
NAMES = {"ids": lambda policy: policy.method}


def serves(policy: Policy, kind: str) -> bool:
    """Quantisers want rows of numbers, tiers rows of any kind, fewer bits codes."""
    if isinstance(policy, Tiers):
        return kind == "codes" if policy.cut == "bits" else kind != "plain"
    return kind != "codes" or (policy.evicts and getattr(policy, "bits", 16) == 16)


def prompts(batch: int, length: int) -> Tensor:
    return torch.randint(1, 4096, (batch, length), generator=torch.Generator().manual_seed(3))


def left_padded(rows: Tensor, pads: list[int]) -> Tensor:
    mask = torch.ones_like(rows)
    for row, count in enumerate(pads):
        mask[row, :count] = 0
    return mask


@pytest.fixture(scope="module")
def checkpoints(tiny, tmp_path_factory):
    """get(kind) -> folder: rows of numbers before and after RoPE in two groups, and rows of codes."""
    built: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in built:
            folder = tmp_path_factory.mktemp(kind)
            domain = "post" if kind == "post" else "pre"
            run = calibrated(tiny("llama"), folder / "run", domain, 2)
            if kind == "codes":
                more = ["codes.bits=[0,2,4,8,16]", "codes.tokens=512", "tokens.count=1024", "tokens.seq_len=64"]
                overrides = [f"groups.domain={domain}", "groups.size=2", *more, *FAST_EVALUATION, *SHORT_TEXT]
                run = calibrate(tiny("llama"), folder / "coded", "rotor", overrides)
            export(run.folder, folder / "out", compression=0.4, measure=False)
            built[kind] = folder / "out"
        return built[kind]

    return get


@pytest.fixture(scope="module")
def models(tiny, checkpoints):
    """get(kind) -> the model `plain`, of another family, or compressed."""
    loaded = {}

    def get(kind: str):
        if kind not in loaded:
            folder = (
                checkpoints(kind) if kind in ("pre", "post", "codes") else tiny("llama" if kind == "plain" else kind)
            )
            loaded[kind] = AutoModelForCausalLM.from_pretrained(folder).eval()
        return loaded[kind]

    return get


@pytest.mark.parametrize("kind", ["plain", "pre", "post", "codes"])
@pytest.mark.parametrize("policy", EVERYTHING, **NAMES)
def test_with_everything_kept_the_tokens_are_the_same(policy: Policy, kind: str, models) -> None:
    model, rows = models(kind), prompts(2, 16)
    if not serves(policy, kind):
        return
    mask = left_padded(rows, [5, 0])
    for extra in ({}, {"num_beams": 3}):
        options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, **extra}
        expected = model.generate(rows, **options)
        with cache_policy(model, policy):
            output = model.generate(rows, return_dict_in_generate=True, **options)
        assert torch.equal(output.sequences, expected)
        assert all(isinstance(layer, PolicyLayer) for layer in output.past_key_values.layers)


@pytest.mark.parametrize("kind", ["plain", "pre", "post", "codes"])
@pytest.mark.parametrize("policy", LOSSY, **NAMES)
def test_a_row_alone_equals_its_row_in_a_batch(policy: Policy, kind: str, models) -> None:
    if not serves(policy, kind):
        return
    model, rows, pads = models(kind), prompts(3, 24), [0, 9, 2]
    mask = left_padded(rows, pads)
    for beams in (1, 2):
        options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "num_beams": beams}
        with cache_policy(model, policy):
            together = model.generate(rows, attention_mask=mask, **options)
            for row, count in enumerate(pads):
                one = rows[row : row + 1, count:]
                alone = model.generate(one, attention_mask=torch.ones_like(one), **options)
                assert torch.equal(together[row, count:], alone[0])


@pytest.mark.parametrize("family", ["qwen3", "gpt_neox", "opt", "gpt2", "falcon", "falcon-40b", "mixtral"])
@pytest.mark.parametrize("policy", [H2O(tokens=ALL), H2O(share=0.4)], ids=["all", "some"])
def test_every_family_drops_tokens(family: str, policy: Policy, models) -> None:
    model, rows = models(family), prompts(2, 14)
    options = {"attention_mask": torch.ones_like(rows), "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(rows, **options)
    with cache_policy(model, policy):
        output = model.generate(rows, return_dict_in_generate=True, **options)
    layer = output.past_key_values.layers[0]
    assert layer.keys.shape[2] == (19 if policy.tokens else round(0.4 * 14))
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
    if isinstance(layer, TieredLayer):
        held = [layer.keys, layer.values, layer.low_keys, layer.low_values, layer.index.tiers, layer.index.scores]
        assert layer.stored_bytes() == sum(t.untyped_storage().nbytes() for t in held)
    if isinstance(layer, EvictingLayer):
        held = [layer.keys, layer.values, layer.positions, layer.scores]
        coded = [part for codes in layer._codes for parts in codes._parts for part in parts]
        assert bool(coded) == (policy.bits < 16)
        assert layer.stored_bytes() == sum(t.untyped_storage().nbytes() for t in [*held, *coded] if t is not None)
    assert 0 < stored_bytes(cache) == sum(layer.stored_bytes() for layer in cache.layers)
    plain = model(rows, use_cache=True).past_key_values
    assert type(plain.layers[0]).__name__ == "DynamicLayer"


@pytest.mark.parametrize("name", ["gear-2", "tiers-50"])
def test_a_policy_is_exported_loaded_saved_and_validated(name: str, tiny, tmp_path) -> None:
    run = calibrated(tiny("llama"), tmp_path / "run", "post", 2)
    out, again = tmp_path / "out", tmp_path / "again"
    export(run.folder, out, compression=0.3, cache=name, measure=False)
    stored = json.loads((out / "config.json").read_text())["quantization_config"]["cache"]
    assert stored == find_policy(name).as_dict()
    assert json.loads((out / "kernel_config.json").read_text())["cache"] == stored
    model = AutoModelForCausalLM.from_pretrained(out).eval()
    assert policy_of(model) == find_policy(name)
    rows = prompts(1, 30)
    output = model.generate(
        rows, attention_mask=torch.ones_like(rows), max_new_tokens=4, return_dict_in_generate=True, pad_token_id=0
    )
    assert isinstance(output.past_key_values.layers[0], PolicyLayer)
    model.save_pretrained(again)
    assert json.loads((again / "config.json").read_text())["quantization_config"]["cache"] == stored
    twice = AutoModelForCausalLM.from_pretrained(again).eval()
    same = twice.generate(rows, attention_mask=torch.ones_like(rows), max_new_tokens=4, pad_token_id=0)
    assert torch.equal(same, output.sequences)
    rotor.use_cache_policy(model, "none")
    plain = model.generate(
        rows, attention_mask=torch.ones_like(rows), max_new_tokens=4, return_dict_in_generate=True, pad_token_id=0
    )
    assert type(plain.past_key_values.layers[0]).__name__ == "DynamicLayer"
    result = rotor.validate(out, dtype="float32")
    assert not result.damaged
    assert result.summary["measured_kv_bytes_per_token"] == result.summary["cache"]["kv_bytes_per_token"]


@pytest.mark.parametrize(
    "section, text",
    [
        (["gear"], "cache"),
        ({"method": "gears"}, "cache.method"),
        ({"method": "h2o", "share": 2.0}, "share: got 2.0"),
        ({"method": "h2o", "layer_shares": [1.0]}, "one for each of the model's 2 layers"),
        ({"method": "h2o", "tokens": "many"}, "cache.tokens"),
        ({"method": "tiers", "qk_unimportant": 1.0}, "qk_unimportant: got 1.0"),
        ({"method": "tiers", "leaders": [1, 0]}, "leaders"),
        ({"method": "tiers", "leaders": [0, 0, 0]}, "one for each of the model's 2 layers"),
        ({"method": "tiers", "importance": "score"}, "cache.importance"),
    ],
)
def test_a_hostile_section_is_refused(section: object, text: str, checkpoints, tmp_path) -> None:

    folder = tmp_path / "out"
    shutil.copytree(checkpoints("post"), folder)
    for name in ("config.json", "kernel_config.json"):
        data = json.loads((folder / name).read_text())
        (data["quantization_config"] if name == "config.json" else data)["cache"] = section
        (folder / name).write_text(json.dumps(data))
    reseal(folder)
    with pytest.raises(CheckpointError, match=text):
        AutoModelForCausalLM.from_pretrained(folder)


def test_what_a_policy_cannot_serve_is_said(models, tiny, checkpoints, tmp_path) -> None:
    model, rows = models("pre"), prompts(1, 10)
    options = {"attention_mask": torch.ones_like(rows), "max_new_tokens": 4, "pad_token_id": 0}
    with cache_policy(model, H2O()):
        with pytest.raises(UsageError, match="is a StaticLayer, expected one that grows"):
            model.generate(rows, cache_implementation="static", **options)
        full = DynamicCache(config=model.config)
        with torch.no_grad():
            cache_policy_off = policy_of(model)
            use_cache_policy(model, None)
            model(rows, past_key_values=full)
            use_cache_policy(model, cache_policy_off)
            with pytest.raises(UsageError, match="holds 10 tokens that were stored without it"):
                model(rows[:, :1], past_key_values=full)
            cache = DynamicCache(config=model.config)
            model(rows, past_key_values=cache)
        with pytest.raises(UsageError, match="has dropped tokens, which cannot come back"):
            cache.crop(-2)
    plain = models("plain")
    with cache_policy(plain, Streaming(tokens=4)), pytest.raises(UsageError, match="has dropped tokens, which cannot"):
        plain.generate(rows, assistant_model=models("pre"), attention_mask=torch.ones_like(rows), max_new_tokens=6)
    with pytest.raises(UsageError, match="does not know that its cache drops tokens"):
        plain(rows, past_key_values=make_cache(Window(), plain.config))
    with pytest.raises(UnsupportedModelError, match="DynamicSlidingWindowLayer"):
        use_cache_policy(AutoModelForCausalLM.from_pretrained(tiny("mistral")), Window())
    with pytest.raises(UnsupportedModelError, match="layer 0 is not compressed"):
        use_cache_policy(plain, Tiers())
    with pytest.raises(UsageError, match="does not know that its cache has tiers"):
        plain(rows, past_key_values=make_cache(Tiers(), plain.config))
    with pytest.raises(UsageError, match="cut: bits: this checkpoint's columns are numbers of 16 bits, no codes"):
        use_cache_policy(models("pre"), Tiers(cut="bits"))
    with pytest.raises(UsageError, match="rows are codes already"):
        use_cache_policy(models("codes"), KIVI())
    with pytest.raises(UsageError, match="bits 4: this checkpoint's rows are codes already"):
        use_cache_policy(models("codes"), H2O(bits=4))
    with pytest.raises(RecipeError, match="did you mean 'gear-2'"):
        find_policy("gear2")
    holes = torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1, 1, 1]])
    with cache_policy(plain, Window()), pytest.raises(UsageError, match="not on the left"):
        plain.generate(rows, **{**options, "attention_mask": holes})


def test_a_cache_that_kept_everything_can_be_cropped_and_regrouped(models) -> None:
    model, rows = models("plain"), prompts(2, 10)
    with cache_policy(model, H2O(tokens=ALL)), torch.no_grad():
        cache = DynamicCache(config=model.config)
        model(rows, past_key_values=cache)
        expected = model(rows[:, :1], past_key_values=cache).logits
        cache.crop(-1)
        assert cache.get_seq_length() == 10
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([0, 3]))
        cache.layers[0].offload()
        cache.layers[0].prefetch()
        assert torch.allclose(model(rows[:, :1], past_key_values=cache).logits, expected, atol=1e-5)
        cache.reset()
        assert cache.get_seq_length() == stored_bytes(cache) == 0
        model(rows, past_key_values=cache)
        assert torch.allclose(model(rows[:, :1], past_key_values=cache).logits, expected, atol=1e-5)


class Offloading(DynamicCache):
    """What transformers' offloaded cache does with a layer around each of its steps, wherever it lies."""

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: object, **kwargs: object):
        self.layers[layer_idx].prefetch()
        found = self.layers[layer_idx].update(key, value)
        self.layers[layer_idx].offload()
        return found


@pytest.mark.parametrize("policy", LOSSY, **NAMES)
def test_an_offloaded_cache_gives_the_same_tokens(policy: Policy, models) -> None:
    model, rows = models("pre"), prompts(2, 20)
    options = {"attention_mask": left_padded(rows, [4, 0]), "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with cache_policy(model, policy):
        expected = model.generate(rows, **options)
        offloaded = Offloading(config=model.config)
        assert torch.equal(model.generate(rows, past_key_values=offloaded, **options), expected)
    assert all(isinstance(layer, PolicyLayer) for layer in offloaded.layers)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("policy", LOSSY, **NAMES)
def test_transformers_offloaded_cache_gives_the_same_tokens(policy: Policy, checkpoints) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoints("pre")).cuda().eval()
    rows = prompts(2, 20).cuda()
    options = {"attention_mask": torch.ones_like(rows), "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with cache_policy(model, policy):
        expected = model.generate(rows, **options)
        assert torch.equal(model.generate(rows, cache_implementation="offloaded", **options), expected)


def test_tiers_can_be_cropped_and_regrouped(models) -> None:
    model, rows = models("pre"), prompts(2, 16)
    with cache_policy(model, Tiers(important=0.4, qk_unimportant=0.8, leaders=(0, 0))), torch.no_grad():
        cache = DynamicCache(config=model.config)
        model(rows, past_key_values=cache)
        expected = model(rows[:, :1], past_key_values=cache).logits
        layer = cache.layers[0]
        tiers = layer.index.tiers.clone()
        cache.crop(-1)
        assert cache.get_seq_length() == 16
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([0, 3]))
        cache.layers[0].offload()
        cache.layers[0].prefetch()
        assert torch.equal(layer.index.tiers, tiers[[0, 1], :16])  # what the step cut stays cut
        held = [(layer.keys, layer.low_keys) for layer in cache.layers]
        assert all(high.shape[2] + low.shape[2] >= 16 and len(high) == 2 for high, low in held)
        again = model(rows[:, :1], past_key_values=cache).logits
        assert not torch.isnan(again).any()
        assert cache.get_seq_length() == 17
        cache.reset()
        assert cache.get_seq_length() == stored_bytes(cache) == 0
        model(rows, past_key_values=cache)
        assert torch.allclose(model(rows[:, :1], past_key_values=cache).logits, expected, atol=1e-5)


@pytest.mark.parametrize(
    "policy", [PerToken(4, 8), KCVT(4, buffer=5), Streaming(tokens=8), H2O(tokens=8), Tiers(leaders=(0, 0))], **NAMES
)
def test_a_prompt_in_chunks_goes_on(policy: Policy, models) -> None:
    model, rows = models("post"), prompts(2, 18)
    mask = left_padded(rows, [8, 0])  # the first chunk of a row is padding alone
    with cache_policy(model, policy):
        output = model.generate(
            rows, attention_mask=mask, max_new_tokens=4, prefill_chunk_size=6, do_sample=False, pad_token_id=0
        )
    assert output.shape == (2, 22)


def test_bundled_policies_are_there_under_every_method() -> None:
    found = bundled_policies()
    assert {policy.method for policy in found.values()} == set(METHODS)
    assert found["gear-l-2"] == GEAR(bits=2, sparsity=0.0)
    assert found["fp8"] == FP8("token")
    assert find_policy("none") is None


def test_commands_take_a_policy_by_name(checkpoints, tiny, capsys, tmp_path) -> None:
    from test_cli import rotor as command

    sizes = []
    for folder, name in ((tiny("llama"), "none"), (tiny("llama"), "random-50"), (checkpoints("codes"), "streaming-50")):
        arguments = ("generate", folder, "def main(self, a, b): return a", "--cache", name, "--max-new-tokens", "4")
        code, out, _ = command(capsys, *arguments, "--json", "-q")
        assert code == 0
        sizes.append(json.loads(out)["kv_cache_bytes"])
    assert sizes[0] > sizes[1]
    code, _, error = command(capsys, "generate", checkpoints("codes"), "def", "--cache", "kivi-2", "-q")
    assert code == 2
    assert "codes already" in error
    mine = tmp_path / "mine.yaml"
    mine.write_text("method: h2o\nshare: 2\n")
    code, _, error = command(capsys, "generate", tiny("llama"), "def", "--cache", mine, "-q")
    assert code == 2
    assert "share: got 2.0" in error
    code, out, _ = command(capsys, "recipes")
    assert code == 0
    assert "streaming-50" in out
