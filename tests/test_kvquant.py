"""KVQuant: levels and ranges found on calibration text, against float64; outliers; stored, loaded and measured."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.cache_truth import states
from support.runs import FAST_EVALUATION, SHORT_TEXT, calibrated
from support.stopped import Counting
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

import rotor
from rotor import export
from rotor.errors import CheckpointError, DataError, UsageError
from rotor.policies import CodedLayer, KVQuant, LayerSample, cache_policy, find_policy, policy_of, read_stored
from rotor.policies.fitting import layer_samples
from rotor.policies.methods.kvquant import weighted_means
from rotor.tools.generation import FITTED_TOKENS, continue_prompt


def sample(seed: int = 0) -> LayerSample:
    """Two rows of 30 tokens of 12 numbers."""
    parts = [states(2, 30, 12, seed=seed + i) for i in range(2)]
    gradients = [states(2, 30, 12, seed=seed + 9 + i) for i in range(2)]
    return LayerSample(*parts, *gradients)


def means_truth(x: np.ndarray, weights: np.ndarray, count: int, loops: int) -> np.ndarray:
    """Weighted K-means of one dimension by loops, from the quantiles of what has a weight."""
    order = np.argsort(x[weights > 0])
    x, weights = x[weights > 0][order], weights[weights > 0][order]
    levels = x[[int((i + 0.5) / count * len(x)) for i in range(count)]].copy()
    for _ in range(loops):
        nearest = np.abs(x[:, None] - levels).argmin(1)
        for i in range(count):
            if weights[nearest == i].sum() > 0:
                levels[i] = (weights * x)[nearest == i].sum() / weights[nearest == i].sum()
        levels.sort()  # of two that begin alike one takes all
    return levels


def range_truth(keys: np.ndarray, outliers: float) -> tuple[np.ndarray, np.ndarray]:
    ordered, beyond = np.sort(keys, axis=0), int(outliers / 2 * len(keys))
    return ordered[beyond], ordered[len(keys) - 1 - beyond]


def token_truth(row: np.ndarray, outliers: float) -> tuple[list[int], float, float]:
    """Indices of a token's outliers, and the middle and half of the range of the rest."""
    count = max(1, round(outliers * len(row))) if outliers else 0
    taken = sorted(range(len(row)), key=lambda i: -abs(row[i] - row.mean()))[:count]
    rest = np.delete(row, taken)
    return taken, (rest.min() + rest.max()) / 2, (rest.max() - rest.min()) / 2


def test_means_are_those_of_float64() -> None:
    x, weights = states(200).double().numpy(), states(200, seed=3).abs().double().numpy()
    weights[::7] = 0
    found = weighted_means(torch.tensor(x), torch.tensor(weights), 8, 6).numpy()
    np.testing.assert_allclose(found, means_truth(x, weights, 8, 6), rtol=1e-9)
    alike = weighted_means(torch.tensor(x), torch.zeros(200), 8, 6).numpy()  # nothing reads them
    np.testing.assert_allclose(alike, means_truth(x, np.ones(200), 8, 6), rtol=1e-9)


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_levels_are_those_of_float64(bits: int) -> None:
    found = sample()
    levels = KVQuant(bits, outliers=0.2).fitted([found]).levels[0]
    keys, values, key_gradients, value_gradients = (
        part[:, 1:].flatten(0, 1).double().numpy()
        for part in (found.keys, found.values, found.key_gradients, found.value_gradients)
    )
    low, high = range_truth(keys, 0.2)
    np.testing.assert_allclose(levels.key_low, low, rtol=1e-4)
    np.testing.assert_allclose(levels.key_high, high, rtol=1e-4)
    half = (high - low) / 2
    inside = (keys - (low + high) / 2) / half
    weights = (key_gradients * half) ** 2 * (np.abs(inside) <= 1 + 1e-12)
    np.testing.assert_allclose(levels.key_levels, means_truth(inside.ravel(), weights.ravel(), 2**bits, 50), atol=1e-4)
    inside, weights = np.empty_like(values), np.empty_like(values)
    for i, row in enumerate(values):
        taken, middle, half = token_truth(row, 0.2)
        inside[i], weights[i] = (row - middle) / half, (value_gradients[i] * half) ** 2
        weights[i, taken] = 0
    expected = means_truth(inside.ravel(), weights.ravel(), 2**bits, 50)
    np.testing.assert_allclose(levels.value_levels, expected, atol=1e-4)


@pytest.mark.parametrize("outliers", [0.0, 0.01, 0.3])
def test_codes_are_those_of_float64(outliers: float) -> None:
    policy = KVQuant(3, outliers, first=0).fitted([sample()])
    levels = policy.levels[0]
    key, value = (stream.codec for stream in policy.streams())
    x = states(2, 3, 9, 4, seed=5)  # three heads of four numbers
    x[0, :, 4] *= 9  # a token of outliers alone
    rows = x.transpose(1, 2).flatten(2).double().numpy()
    low, high = np.array(levels.key_low), np.array(levels.key_high)
    for code, keys in ((key, True), (value, False)):
        parts = [code.encode(row) for row in x.split(1)]
        got = torch.cat([code.decode(part, 3, 4) for part in parts]).transpose(1, 2).flatten(2).double().numpy()
        assert (int(parts[0][1].max()) >= 10) == (keys and outliers > 0)
        for row, decoded in zip(rows.reshape(-1, 12), got.reshape(-1, 12), strict=True):
            if keys:
                middle, half, known = (low + high) / 2, (high - low) / 2, np.array(levels.key_levels)
                taken = np.nonzero(((row < low) | (row > high)) & (outliers > 0))[0]  # every one, however many
            else:
                taken, middle, half = token_truth(row, outliers)
                known = np.array(levels.value_levels)
            expected = known[np.abs(((row - middle) / half)[:, None] - known).argmin(1)] * half + middle
            expected[taken] = row[taken]
            np.testing.assert_allclose(decoded, expected, rtol=2e-3, atol=1e-2)


def test_first_tokens_and_outliers_are_kept_as_they_are() -> None:
    policy = KVQuant(2, outliers=0.1, first=3).fitted([sample()])
    layer = policy.layers(1)[0]
    x = states(2, 3, 9, 4, seed=5)
    for start, end in ((0, 2), (2, 5), (5, 9)):  # the first tokens come in two steps
        key, value = layer.update(x[:, :, start:end], x[:, :, start:end])
    assert torch.equal(key[:, :, :3], x[:, :, :3])
    assert torch.equal(value[:, :, :3], x[:, :, :3])
    whole = CodedLayer(policy.streams())
    assert torch.equal(whole.update(x, x)[0], x)  # a prompt sees itself exactly
    assert torch.equal(whole.update(x[:, :, :1], x[:, :, :1])[0][:, :, :9], key)
    levels = policy.levels[0]
    rows, got = (part[:, :, 3:].transpose(1, 2).flatten(2) for part in (x, key))
    beyond = (rows < torch.tensor(levels.key_low)) | (rows > torch.tensor(levels.key_high))
    assert beyond.sum(-1).unique().numel() > 2  # their number varies
    torch.testing.assert_close(got[beyond], rows[beyond], rtol=1e-3, atol=1e-3)


def test_bytes_are_those_of_the_formula() -> None:
    policy = KVQuant(4, outliers=0.1, first=1).fitted([sample()])
    layer, levels, x = policy.layers(1)[0], policy.levels[0], states(1, 3, 51, 4).bfloat16()
    layer.update(x[:, :, :20], x[:, :, :20])
    for start in range(20, 51):
        layer.update(x[:, :, start : start + 1], x[:, :, start : start + 1])
    rows = x.transpose(1, 2).flatten(2)[0, 1:].float()
    beyond = int(((rows < torch.tensor(levels.key_low)) | (rows > torch.tensor(levels.key_high))).sum())
    each = 12 * 4 // 8 + 2  # codes, and how many outliers there are
    assert (
        layer.stored_bytes() == 50 * (2 * each + 4 + 4) + 4 * beyond + 2 * 12 * 2
    )  # of values one a token, and a range
    layer.reset()
    layer.fill(*(torch.randn(2, 1, 3, 1001, 4, generator=torch.Generator().manual_seed(0))))
    keys = layer.stored_bytes() - 1000 * (2 * each + 4 + 4) - 2 * 12 * 4
    assert keys / 4 == pytest.approx(0.1 * 12 * 1000, rel=0.1)  # as many as calibration leaves out


def test_gradients_are_those_of_differences(tiny) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny("llama")).double().eval()
    rows = torch.randint(1, 4096, (2, 9), generator=torch.Generator().manual_seed(0))
    found = layer_samples(model, rows, pre_rope=True)

    def loss(layer: int, name: str, step: float) -> float:
        attention = model.model.layers[layer].self_attn

        def change(module, arguments, output):
            changed = output.clone()
            changed[:, 4, 3] += step
            return changed

        handle = getattr(attention, name).register_forward_hook(change)
        with torch.no_grad():
            logits = model(rows[1:]).logits[0, :-1]
        handle.remove()
        return float(torch.nn.functional.cross_entropy(logits, rows[1, 1:], reduction="sum"))

    for layer in range(2):
        expected = (loss(layer, "v_proj", 0.05) - loss(layer, "v_proj", -0.05)) / 0.1  # norms are in float32
        assert float(found[layer].value_gradients[1, 4, 3]) == pytest.approx(expected, rel=0.01)
        expected = (loss(layer, "k_proj", 0.05) - loss(layer, "k_proj", -0.05)) / 0.1
        assert float(found[layer].key_gradients[1, 4, 3]) == pytest.approx(expected, rel=0.02)
        assert found[layer].keys.shape == (2, 9, model.config.num_key_value_heads * model.config.head_dim)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_samples_without_gradients_are_the_same(family: str, tiny) -> None:
    """Of a pass without autograd, as the activations of all layers of a model of 1.5 B parameters are 10 GB."""
    model = AutoModelForCausalLM.from_pretrained(tiny(family)).eval()
    rows = torch.randint(1, 4096, (2, 11), generator=torch.Generator().manual_seed(0))
    pairs = zip(layer_samples(model, rows), layer_samples(model, rows, gradients=False), strict=True)
    for with_gradients, without in pairs:
        assert torch.equal(with_gradients.keys, without.keys)
        assert torch.equal(with_gradients.values, without.values)
        assert without.key_gradients is None


def test_keys_of_an_uncompressed_model_are_coded_before_rope(tiny) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny("llama")).double().eval()
    rows = torch.randint(1, 4096, (2, 40), generator=torch.Generator().manual_seed(0))
    policy = rotor.fit_cache_policy(model, KVQuant(4, outliers=0.1), rows)
    projected: list[Tensor] = []
    handle = model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda *step: projected.append(step[2]))
    mask = torch.ones_like(rows)
    mask[0, :7] = 0
    with cache_policy(model, policy), torch.no_grad():
        cache = DynamicCache(config=model.config)
        for part in (slice(0, 30), slice(30, 31), slice(31, 32)):
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, part]
            found = {"attention_mask": mask[:, : part.stop], "position_ids": positions}
            model(rows[:, part], past_key_values=cache, **found)
    handle.remove()
    keys = torch.cat(projected, dim=1)  # before RoPE
    code = policy.streams()[0].codec
    for row, pads in enumerate((7, 0)):
        heads = keys[row : row + 1, pads:].unflatten(-1, (-1, model.config.head_dim)).transpose(1, 2)
        expected: list[tuple[Tensor, ...]] = []
        code.append(expected, heads[:, :, 1:])
        for kept, again in zip(cache.layers[0].sequences[row].sides[0].segments[-1], expected[-1], strict=True):
            torch.testing.assert_close(kept, again)


def test_an_uncompressed_model_is_fitted_and_generates(tiny) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny("llama")).eval()
    rows = torch.randint(1, 4096, (2, 40), generator=torch.Generator().manual_seed(0))
    with pytest.raises(UsageError, match=r"fitted to 0 layers, the model has 2"):
        rotor.use_cache_policy(model, "kvquant-4")
    policy = rotor.fit_cache_policy(model, find_policy("kvquant-4"), rows)
    assert rotor.fit_cache_policy(model, policy, rows) is policy
    options = {"attention_mask": torch.ones_like(rows[:, :20]), "max_new_tokens": 6, "pad_token_id": 0}
    with cache_policy(model, policy):
        output = model.generate(rows[:, :20], return_dict_in_generate=True, **options)
    assert isinstance(output.past_key_values.layers[0], CodedLayer)
    short = replace(policy.levels[1], key_low=(0.0,), key_high=(1.0,))
    other = replace(policy, levels=(policy.levels[0], short))
    with cache_policy(model, other), pytest.raises(UsageError, match=r"ranges of 1 key channels, the layer has \d+"):
        model.generate(rows[:, :20], **options)
    with pytest.raises(DataError, match="expected sequences of two tokens"):
        rotor.fit_cache_policy(model, KVQuant(), rows[:, :1])


def test_generate_fits_an_uncompressed_model(tiny) -> None:
    """To its own text: `rotor generate MODEL --cache kvquant-4`."""
    written = Counting()
    done = continue_prompt(tiny("llama"), "hello there", max_new_tokens=6, cache="kvquant-4", progress=written)
    whole = continue_prompt(tiny("llama"), "hello there", max_new_tokens=6, cache="none")
    assert written.done["fit cache policy"] == FITTED_TOKENS
    assert 0 < done["kv_cache_bytes"] < whole["kv_cache_bytes"]


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    return calibrated(tiny("llama"), tmp_path_factory.mktemp("kvquant") / "run", "pre", 2)


def test_levels_are_stored_loaded_and_saved_again(run, tmp_path) -> None:
    overrides = [*FAST_EVALUATION, *SHORT_TEXT]
    report = export(run.folder, tmp_path / "out", compression=0.3, cache="kvquant-3", overrides=overrides).report
    stored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["cache"]
    assert report["cache"]["policy"] == stored
    assert len(stored["levels"]) == 2
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    policy = policy_of(model)
    assert policy.as_dict() == stored
    rows = torch.randint(1, 4096, (1, 20), generator=torch.Generator().manual_seed(0))
    options = {"attention_mask": torch.ones_like(rows), "max_new_tokens": 4, "pad_token_id": 0}
    expected = model.generate(rows, **options)
    model.save_pretrained(tmp_path / "again")
    twice = AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
    assert policy_of(twice) == policy
    assert torch.equal(twice.generate(rows, **options), expected)
    assert not rotor.validate(tmp_path / "out", dtype="float32", overrides=SHORT_TEXT).damaged
    with pytest.raises(UsageError, match="--no-measure: cache policy kvquant is found by running"):
        export(run.folder, tmp_path / "x", compression=0.3, cache="kvquant-3", measure=False)


@pytest.mark.parametrize(
    "change, text",
    [
        (lambda layer: layer.update(key_levels=[0.0]), "levels, and as many lower ends"),
        (lambda layer: layer.update(key_low=layer["key_low"][1:]), "levels, and as many lower ends"),
        (lambda layer: layer.update(key_levels="many"), r"cache.levels\[0\].key_levels"),
        (lambda layer: layer.pop("value_levels"), "missing key"),
    ],
)
def test_hostile_levels_are_refused(change, text: str) -> None:
    section = KVQuant(2).fitted([sample()]).as_dict()
    assert read_stored(section) == KVQuant(2).fitted([sample()])
    change(section["levels"][0])
    with pytest.raises(CheckpointError, match=text):
        read_stored(section)
