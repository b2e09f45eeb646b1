"""Quantised caches: codes against float64 truth, bytes, transformers' contract, and scoring through them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from rotor.errors import CheckpointError, DataError, UnsupportedModelError, UsageError
from rotor.evaluation.cached import prefill_of, score_through_cache
from rotor.runtime.cache import (
    FP8,
    GEAR,
    KCVT,
    KIVI,
    METHODS,
    NUQ,
    CodedLayer,
    PerToken,
    make_cache,
    read_policy,
    stored_bytes,
)
from rotor.runtime.cache.affine import AffineCode
from rotor.runtime.cache.fp8 import FP8Code
from rotor.runtime.cache.low_rank import low_rank
from rotor.runtime.cache.packing import pack, packed_bytes, unpack
from rotor.runtime.cache.per_token import hadamard
from rotor.typed import Reader

CODED = [
    PerToken(bits=4, group=8),
    PerToken(bits=3, group=16, hadamard=True),
    KCVT(bits=4, buffer=5),
    KIVI(bits=2, group=4, residual=8),
    FP8("token"),
    FP8("tensor"),
    NUQ(bits=3),
    GEAR(bits=2, sparsity=0.2, buffer=6),
    GEAR(bits=2, backbone="kivi", sparsity=0.2, buffer=8, group=4),
]
EXACT = [PerToken(bits=16), KCVT(bits=16, buffer=5), KIVI(bits=16, group=4, residual=8)]


def states(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    scales = torch.rand(shape[-1], generator=generator) * 3 + 0.2
    return (torch.randn(shape, generator=generator) * scales + scales.flip(0)).to(dtype)


@pytest.fixture(scope="module")
def model(tiny):
    return AutoModelForCausalLM.from_pretrained(tiny("llama")).eval()


def prompts(batch: int, length: int) -> Tensor:
    return torch.randint(1, 4096, (batch, length), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize("width", [1, 5, 8, 63])
def test_packing_is_without_gaps_and_reversible(bits: int, width: int) -> None:
    codes = torch.randint(2**bits, (3, width), generator=torch.Generator().manual_seed(width)).to(torch.uint8)
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (3, packed_bytes(width, bits)) == (3, -(-width * bits // 8))
    assert torch.equal(unpack(packed, bits, width), codes)
    stream = sum(int(code) << (bits * i) for i, code in enumerate(codes[0]))  # one long number, lowest bits first
    assert bytes(packed[0].tolist()) == stream.to_bytes(packed_bytes(width, bits), "little")


def affine_truth(numbers: np.ndarray, bits: int, tokens: int, columns: int) -> np.ndarray:
    """Decoded numbers of one head, [tokens, width], group by group in float64; metadata rounded to float16."""
    result = np.empty_like(numbers)
    for t in range(0, numbers.shape[0], tokens):
        for c in range(0, numbers.shape[1], columns):
            group = numbers[t : t + tokens, c : c + columns]
            zero = float(np.float16(group.min()))
            scale = float(np.float16((group.max() - zero) / (2**bits - 1)))
            codes = np.clip(np.round((group - zero) / scale), 0, 2**bits - 1)
            result[t : t + tokens, c : c + columns] = zero + scale * codes
    return result


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize("tokens, columns", [(1, 8), (1, 16), (6, 1), (12, 1), (1, 5)])
def test_affine_code_is_that_of_float64(bits: int, tokens: int, columns: int) -> None:
    x = states(2, 3, 12, 13)
    code = AffineCode(bits, tokens, columns)
    got = code.decode(code.encode(x), 3, 13).double().numpy()
    for row in range(2):
        for head in range(3):
            expected = affine_truth(x[row, head].double().numpy(), bits, tokens, min(columns, 13))
            np.testing.assert_allclose(got[row, head], expected, rtol=1e-5, atol=1e-5)


def test_groups_over_all_heads_are_those_of_the_row() -> None:
    x = states(2, 3, 4, 8)
    code = AffineCode(4, heads_together=True)
    got = code.decode(code.encode(x), 3, 8)
    row = x.transpose(1, 2).flatten(2)[0].double().numpy()
    expected = affine_truth(row, 4, 1, 24).reshape(4, 3, 8).transpose(1, 0, 2)
    np.testing.assert_allclose(got[0].double().numpy(), expected, rtol=1e-5, atol=1e-5)


def test_equal_numbers_and_huge_ones_are_coded() -> None:
    code = AffineCode(2, 1, 4)
    constant = torch.full((1, 1, 2, 8), 0.5)
    assert torch.equal(code.decode(code.encode(constant), 1, 8), constant)
    assert torch.isfinite(code.decode(code.encode(torch.tensor([[[[1e9, -1e9, 0, 1]]]])), 1, 4)).all()


@pytest.mark.parametrize("fixed", [False, True])
def test_fp8_is_the_nearest_of_float64(fixed: bool) -> None:
    x = states(2, 2, 5, 8)
    code = FP8Code(fixed)
    parts = code.encode(x)
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    every = every[torch.isfinite(every)]
    scale = parts[1].double().expand(2, 2, 5, 1)
    nearest = (x.double().unsqueeze(-1) / scale.unsqueeze(-1) - every).abs().min(-1).values
    got = code.decode(parts, 2, 8).double()
    assert torch.allclose((x.double() - got).abs() / scale, nearest, rtol=1e-5, atol=1e-7)
    assert float((x.abs() / scale).max()) <= 448


def test_hadamard_is_orthonormal_and_leaves_no_trace() -> None:
    matrix = hadamard(16).double()
    assert torch.allclose(matrix @ matrix.T, torch.eye(16).double(), atol=1e-6)
    layer = CodedLayer(PerToken(bits=8, group=16, hadamard=True).streams())
    x = states(1, 2, 6, 48)
    layer.update(x, x)
    key, _ = layer.update(x[:, :, :1], x[:, :, :1])
    assert float((key[:, :, :6] - x).abs().max()) < 0.05


@pytest.mark.parametrize("policy", CODED + EXACT, ids=str)
def test_reported_bytes_are_those_of_the_tensors(policy) -> None:
    layer = CodedLayer(policy.streams())
    for start, end in ((0, 11), (11, 12), (12, 30)):
        layer.update(states(2, 2, 30, 16)[:, :, start:end], states(2, 2, 30, 16, seed=1)[:, :, start:end])
        tensors = [t for store in layer._stores for s in store for t in (*sum(s.segments, ()), s.waiting)]
        assert layer.stored_bytes() == sum(t.untyped_storage().nbytes() for t in tensors)
    assert layer.get_seq_length() == 30
    assert layer.get_mask_sizes(2) == (32, 0)


def test_bytes_are_those_of_the_formulas() -> None:
    def per_token(policy, tokens: int) -> float:
        layer = CodedLayer(policy.streams())
        layer.update(states(1, 2, tokens, 64, dtype=torch.bfloat16), states(1, 2, tokens, 64, dtype=torch.bfloat16))
        return layer.stored_bytes() / tokens

    numbers = 2 * 2 * 64  # keys and values of two heads
    assert per_token(PerToken(bits=16), 128) == 2 * numbers
    assert per_token(PerToken(bits=4, group=64), 128) == numbers * (0.5 + 4 / 64)
    assert per_token(PerToken(bits=3, group=32), 128) == numbers * (3 / 8 + 4 / 32)
    assert per_token(FP8("token"), 128) == numbers * (1 + 2 / 64)
    assert per_token(KCVT(bits=4), 128) == numbers * 0.5 + numbers / 2 * 4 / 128 + 4
    residual = numbers / 2 * 2 * 64 / 256  # of values; 256 keys are whole groups
    assert per_token(KIVI(bits=2), 256) == numbers / 2 * (2 / 8 + 4 / 64) * (1 + 192 / 256) + residual


@pytest.mark.parametrize("policy", EXACT, ids=str)
def test_sixteen_bits_change_nothing(policy, model) -> None:
    rows = prompts(3, 24)
    mask = torch.ones_like(rows)
    mask[1, :9] = mask[2, :2] = 0
    for extra in ({}, {"num_beams": 3}):
        options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, **extra}
        expected = model.generate(rows, **options)
        for known in (mask, None):
            assert torch.equal(
                model.generate(rows, past_key_values=make_cache(policy, model.config, known), **options), expected
            )


@pytest.mark.parametrize("policy", CODED, ids=str)
@pytest.mark.parametrize("beams", [1, 3])
def test_a_row_alone_equals_its_row_in_a_batch(policy, beams: int, model) -> None:
    rows, pads = prompts(3, 24), [0, 9, 2]
    mask = torch.ones_like(rows)
    for row, count in enumerate(pads):
        mask[row, :count] = 0
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "num_beams": beams}
    together = model.generate(
        rows, attention_mask=mask, past_key_values=make_cache(policy, model.config, mask), **options
    )
    for row, count in enumerate(pads):
        one = rows[row : row + 1, count:]
        alone = model.generate(
            one, attention_mask=torch.ones_like(one), past_key_values=make_cache(policy, model.config), **options
        )
        assert torch.equal(together[row, count:], alone[0])


@pytest.mark.parametrize("policy", CODED, ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_rows_can_be_chosen_repeated_and_reset(policy, padded: bool) -> None:
    padding = torch.tensor([3, 0]) if padded else None
    x = states(2, 2, 14, 16)
    layer = CodedLayer(policy.streams(), padding)
    layer.update(x, x)
    before, _ = CodedLayer.update(layer, x[:, :, :1], x[:, :, :1])
    layer.batch_repeat_interleave(2)
    layer.reorder_cache(torch.tensor([3, 0, 1]))
    layer.batch_select_indices(torch.tensor([0, 1]))
    after, _ = layer.update(x.flip(0)[:, :, 1:2], x.flip(0)[:, :, 1:2])
    # What a step sees of tokens that were already coded is what the next one sees; waiting tokens may be coded between.
    coded = 8 if isinstance(policy, KIVI) or getattr(policy, "backbone", "") == "kivi" else 14
    assert torch.equal(after[:, :, 3:coded], before.flip(0)[:, :, 3:coded])
    layer.offload()
    layer.prefetch()
    layer.reset()
    assert layer.get_seq_length() == layer.stored_bytes() == 0
    layer.update(x, x)
    assert torch.equal(layer.update(x[:, :, :1], x[:, :, :1])[0], before)


def test_tokens_can_be_cropped_where_each_is_coded_by_itself() -> None:
    x = states(1, 2, 10, 16)
    for policy in (PerToken(bits=4, group=8), FP8("token"), FP8("tensor")):
        layer = CodedLayer(policy.streams())
        layer.update(x, x)
        seen, _ = layer.update(x[:, :, :2], x[:, :, :2])
        layer.crop(-4)
        assert layer.get_seq_length() == 8
        again, _ = layer.update(x[:, :, 8:9], x[:, :, 8:9])
        assert torch.equal(again, seen[:, :, :9])
    layer = CodedLayer(KCVT(buffer=4).streams())
    layer.update(x, x)
    layer.update(x[:, :, :3], x[:, :, :3])
    layer.crop(-3)
    assert layer.get_seq_length() == 10
    size = layer.stored_bytes()
    with pytest.raises(UsageError, match=r"crop\(-1\): only the newest 0 tokens"):
        layer.crop(-1)
    assert (layer.get_seq_length(), layer.stored_bytes()) == (10, size)
    with pytest.raises(UsageError, match="expected a negative number"):
        layer.crop(1)


@pytest.mark.parametrize(
    "policy",
    [
        PerToken(bits=2, group=8),
        FP8("tensor"),
        KCVT(bits=2, buffer=6),
        GEAR(bits=2, buffer=6),
        KIVI(group=4, residual=4),
    ],
    ids=str,
)
def test_the_longest_step_sees_what_steps_of_one_token_see(policy, model) -> None:
    rows = prompts(2, 40)
    step = policy.longest_step
    assert step == {"per-token": None, "fp8": None, "kcvt": 6, "gear": 6, "kivi": 1}[policy.method]
    one, many = (
        score_through_cache(model, rows, lambda: make_cache(policy, model.config), 22, chunk)
        for chunk in (1, step or 9)
    )
    assert torch.allclose(one.nll, many.nll, rtol=1e-3, atol=1e-3)
    assert one.kv_bytes_per_token == many.kv_bytes_per_token


@pytest.mark.parametrize("policy", [PerToken(bits=3), KIVI(bits=2, group=4, residual=4)], ids=str)
def test_packed_rows_of_a_compressed_model_are_coded(policy, tiny, tmp_path) -> None:
    from conftest import calibrated

    from rotor.export.export import export

    run = calibrated(tiny("llama"), tmp_path / "run", "pre", 2)
    export(run.folder, tmp_path / "out", compression=0.3)
    compressed = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    rows = prompts(2, 20)
    plain = score_through_cache(compressed, rows, lambda: DynamicCache(config=compressed.config), 8)
    same = score_through_cache(compressed, rows, lambda: make_cache(PerToken(bits=16), compressed.config), 8)
    coded = score_through_cache(compressed, rows, lambda: make_cache(policy, compressed.config), 8)
    assert torch.equal(plain.nll, same.nll)
    assert plain.kv_bytes_per_token == same.kv_bytes_per_token > coded.kv_bytes_per_token
    assert not torch.equal(plain.nll, coded.nll)


def test_scores_through_an_ordinary_cache_are_those_of_whole_rows(model, monkeypatch) -> None:
    monkeypatch.setattr("rotor.evaluation.cached.REFERENCE_LOGIT_BYTES", 4 * 4096 * 2 * 5)  # blocks of five positions
    rows = prompts(3, 20)
    scores = score_through_cache(
        model, rows, lambda: DynamicCache(config=model.config), 7, 4, reference=model, batch_size=2
    )
    logits = model(rows).logits[:, 7:-1].double()
    nll = -logits.log_softmax(-1).gather(-1, rows[:, 8:, None])[..., 0]
    assert scores.first == 8
    assert torch.allclose(scores.nll, nll, atol=1e-4)
    assert torch.equal(scores.top1, logits.argmax(-1))
    assert torch.equal(scores.correct, logits.argmax(-1) == rows[:, 8:])
    assert scores.kl_div is not None
    assert scores.kl_div.shape == (3, 12)
    assert float(scores.kl_div.max()) < 1e-5
    config = model.config
    exact = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    assert scores.kv_bytes_per_token == exact


def test_kl_is_that_of_the_logits_of_a_step_by_step_loop(model) -> None:
    rows = prompts(1, 14)
    make = lambda: make_cache(PerToken(bits=2, group=8), model.config)  # noqa: E731
    scores = score_through_cache(model, rows, make, 6, reference=model)
    cache = make()
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
    scores = score_through_cache(model, rows, lambda: DynamicCache(config=model.config), 8)
    found = scores.of_answers(answers)
    probability = model(rows).logits.detach().double().softmax(-1)[:, :-1].gather(-1, rows[:, 1:, None])[..., 0]
    chosen = probability[answers[:, 1:]]
    assert found.answers.tolist() == [1, 2]
    assert found.mean_probability == pytest.approx(float(chosen.mean()), rel=1e-3)
    rows[1, 12] = model(rows).logits[1, 11].argmax()
    scores = score_through_cache(model, rows, lambda: DynamicCache(config=model.config), 8)
    assert scores.of_answers(answers).hits[1] >= 1
    late = score_through_cache(model, rows, lambda: DynamicCache(config=model.config), 10)
    with pytest.raises(DataError, match="must begin at token 11"):
        late.of_answers(answers)
    with pytest.raises(DataError, match="at least two tokens"):
        prefill_of(torch.ones(1, 4, dtype=torch.bool))
    with pytest.raises(DataError, match="a prefill of 15 tokens"):
        score_through_cache(model, rows, lambda: DynamicCache(config=model.config), 15)


@pytest.mark.parametrize("policy", CODED, ids=str)
def test_a_policy_is_stored_and_read(policy) -> None:
    reader = Reader("config.json, quantization_config", CheckpointError, "Export it again.")
    assert read_policy(policy.as_dict(), reader, METHODS) == policy


@pytest.mark.parametrize(
    "section, text",
    [
        ([1], "expected a mapping"),
        (
            {"method": "kiwi"},
            "one of per-token, kcvt, kivi, nuq, kvquant, fp8, gear, .*; did you mean 'kivi'",
        ),
        ({"method": ["kivi"]}, "cache.method"),
        ({"method": "kivi", "bits": 5}, "bits: got 5, expected one of"),
        ({"method": "kivi", "bits": "2"}, "cache.bits"),
        ({"method": "kivi", "residual": 65}, "a multiple of the group, 64"),
        ({"method": "kivi", "grop": 64}, "cache.grop"),
        ({"method": "fp8", "scale": "row"}, "one of token, tensor"),
        ({"method": "gear", "backbone": "kivi"}, "buffer: got 20, expected a multiple of the group, 64"),
        ({"method": "gear", "sparsity": 1.5}, "sparsity: got 1.5, expected a share below 1"),
        ({"method": "gear", "bits": 16}, "bits: got 16"),
    ],
)
def test_a_hostile_policy_is_refused(section: object, text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        read_policy(section, Reader("config.json", CheckpointError), METHODS)


def test_what_a_policy_cannot_serve_is_said(model, tiny) -> None:
    sliding = AutoModelForCausalLM.from_pretrained(tiny("mistral"))
    with pytest.raises(UnsupportedModelError, match="layer 0 of the model has a DynamicSlidingWindowLayer"):
        make_cache(KIVI(), sliding.config)
    with pytest.raises(UsageError, match="not on the left"):
        make_cache(KIVI(), model.config, torch.tensor([[1, 1, 0]]))
    layer = CodedLayer(KIVI().streams(), torch.tensor([1, 0]))
    with pytest.raises(UsageError, match="a batch of 2 rows and is given 3"):
        layer.update(states(3, 1, 4, 8), states(3, 1, 4, 8))
    codes = torch.zeros(1, 1, 4, 8, dtype=torch.uint8)
    with pytest.raises(UsageError, match="which are codes already"):
        CodedLayer(KIVI().streams()).update(codes, codes)


def test_bytes_of_transformers_own_caches_are_counted(model) -> None:
    cache = DynamicCache(config=model.config)
    model(prompts(2, 10), past_key_values=cache)
    layer = cache.layers[0]
    assert stored_bytes(cache) == 2 * 2 * layer.keys.numel() * 4


def gear_truth(numbers: np.ndarray, bits: int, sparsity: float, rank: int, keys: bool) -> np.ndarray:
    """GEAR of one row in float64, [heads, tokens, width]: outliers, KCVT of the rest, low rank of what is left."""
    heads, tokens, width = numbers.shape
    rest, outlier = numbers.copy(), np.zeros(numbers.shape, bool)
    together = numbers.transpose(1, 0, 2).reshape(tokens, heads * width)
    vectors = (
        [(head, slice(None), channel) for head in range(heads) for channel in range(width)]
        if keys
        else [(slice(None), token) for token in range(tokens)]
    )
    for place in vectors:
        vector = rest[place].reshape(-1)
        count = int(sparsity / 2 * len(vector))
        order = np.argsort(vector)
        taken = np.r_[order[:count], order[len(vector) - count :]]
        mask = np.zeros(len(vector), bool)
        mask[taken] = True
        filled = np.where(mask, vector[~mask].mean(), vector)
        rest[place], outlier[place] = filled.reshape(rest[place].shape), mask.reshape(rest[place].shape)
    if keys:
        coded = np.stack([affine_truth(head, bits, tokens, 1) for head in rest])
    else:
        together = rest.transpose(1, 0, 2).reshape(tokens, heads * width)
        coded = affine_truth(together, bits, 1, heads * width).reshape(tokens, heads, width).transpose(1, 0, 2)
    result = np.empty_like(numbers)
    for head in range(heads):
        lost = np.where(outlier[head], 0.0, rest[head] - coded[head])
        right = torch.randn(width, rank, generator=torch.Generator().manual_seed(0)).double().numpy()
        for _ in range(2):  # algorithm 2
            last, right = right, lost.T @ (lost @ right)
        left = np.linalg.qr(lost @ np.linalg.qr(last)[0])[0]
        result[head] = coded[head] + left @ (left.T @ lost)
    return np.where(outlier, numbers, result)


@pytest.mark.parametrize("keys", [True, False])
@pytest.mark.parametrize("sparsity, rank", [(0.2, 3), (0.0, 2), (0.2, 0)])
def test_gear_is_that_of_float64(keys: bool, sparsity: float, rank: int) -> None:
    x = states(1, 2, 20, 12)
    policy = GEAR(bits=2, sparsity=sparsity, rank=rank)
    codec = policy.streams()[0 if keys else 1].prompt_codec
    got = codec.decode(codec.encode(x), 2, 12)[0].double().numpy()
    expected = gear_truth(x[0].double().numpy(), 2, sparsity, rank, keys)
    assert np.abs(got - expected).max() < 5e-3  # factors and outliers are float16
    assert np.abs(got - x[0].double().numpy()).max() > 0.05


def test_gear_corrects_its_backbone() -> None:
    x = states(1, 2, 64, 16)
    errors = {}
    for name, policy in {
        "backbone": GEAR(bits=2, sparsity=0.0, rank=0),
        "low rank": GEAR(bits=2, sparsity=0.0),
        "sparse": GEAR(bits=2, rank=0, sparsity=0.1),
        "both": GEAR(bits=2, sparsity=0.1),
    }.items():
        codec = policy.streams()[0].prompt_codec
        errors[name] = float((codec.decode(codec.encode(x), 2, 16) - x).norm())
    assert errors["both"] < min(errors["low rank"], errors["sparse"])
    assert max(errors["low rank"], errors["sparse"]) < errors["backbone"]
    kcvt = KCVT(2).streams()[0].codec
    assert errors["backbone"] == pytest.approx(float((kcvt.decode(kcvt.encode(x), 2, 16) - x).norm()))


def test_low_rank_comes_close_to_the_best_there_is() -> None:
    matrix = states(3, 20, 9)
    left, right = low_rank(matrix, 2, 8)
    best = torch.linalg.svdvals(matrix.double())[:, 2:].norm(dim=-1)
    assert torch.allclose((matrix - left @ right.mT).norm(dim=(-2, -1)).double(), best, rtol=0.02)
    assert all(torch.isfinite(factor).all() for factor in low_rank(1e4 * matrix, 2, 60))
    assert torch.allclose(left.mT @ left, torch.eye(2).expand(3, 2, 2), atol=1e-5)
    assert low_rank(matrix, 4, 1)[0].shape == (3, 20, 4)
    assert low_rank(matrix[:, :2], 4, 2)[0].shape == (3, 2, 2)  # no more than there are rows


def test_bytes_of_gear_are_its_codes_factors_and_outliers() -> None:
    layer = CodedLayer(GEAR(bits=4, sparsity=0.02, rank=4).streams())
    x = states(1, 2, 100, 64, dtype=torch.bfloat16)
    layer.update(x, x)
    numbers = 2 * 64 * 100
    codes = 2 * numbers // 2 + 4 * 2 * 64 + 4 * 100
    factors = 2 * 2 * 2 * 4 * (100 + 64)  # sides, heads, bytes, rank
    outliers = (2 * 2 * 64 + 2 * 100) * (2 + 2)  # of each channel of keys and of each token of values
    assert layer.stored_bytes() == codes + factors + outliers


def levels_truth(numbers: np.ndarray, count: int, loops: int) -> np.ndarray:
    """Of one vector, in float64, by loops."""
    ordered = np.sort(numbers)
    levels = ordered[[int((i + 0.5) / count * len(ordered)) for i in range(count)]]
    for _ in range(loops):
        nearest = np.abs(ordered[:, None] - levels).argmin(1)
        levels = np.array([ordered[nearest == i].mean() if (nearest == i).any() else levels[i] for i in range(count)])
    return levels


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_levels_are_those_of_float64(bits: int) -> None:
    x = states(2, 3, 40, 6)
    key, value = (stream.codec for stream in NUQ(bits, loops=2).streams())
    keys, values = (codec.decode(codec.encode(x), 3, 6).double().numpy() for codec in (key, value))
    for row in range(2):
        for head in range(3):
            own = x[row, head].double().numpy()
            for channel in range(6):
                levels = levels_truth(own[:, channel], 2**bits, 2)
                expected = levels[np.abs(own[:, channel, None] - levels).argmin(1)]
                np.testing.assert_allclose(keys[row, head, :, channel], expected, rtol=2e-3, atol=2e-3)
            scale = np.abs(own).max(1, keepdims=True).astype(np.float16).astype(np.float64)
            levels = levels_truth((own / scale).reshape(-1), 2**bits, 2)
            expected = levels[np.abs((own / scale)[..., None] - levels).argmin(-1)] * scale
            error = np.abs(values[row, head] - expected)
            assert np.quantile(error, 0.98) < 5e-3  # a number in the middle of two levels may fall on either side


def test_bytes_of_levels_are_counted_once() -> None:
    layer = CodedLayer(NUQ(bits=2).streams())
    x = states(1, 2, 100, 64)
    layer.update(x, x)
    layer.update(x[:, :, :1], x[:, :, :1])
    codes, levels, scales = 2 * 2 * 101 * 16, 2 * 64 * 4 * 2 + 2 * 4 * 2, 2 * 101 * 2
    assert layer.stored_bytes() == codes + levels + scales
