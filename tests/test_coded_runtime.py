"""Checkpoints with rows of codes: loaded, run through transformers, against the same latents rounded in float64."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from coded import coded_layer
from coded_models import Pair, write_pair
from conftest import relative_error
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.cache_utils import Cache, DynamicCache, QuantizedLayer

from rotor.bench.problem import checked_output, compressed_layout, random_problem, rebuilt_layout, truth
from rotor.bench.rows import pytorch_path
from rotor.errors import CheckpointError, UsageError
from rotor.evaluation.scoring import batch_logits
from rotor.format.columns import Columns
from rotor.format.kernel_config import KernelConfig
from rotor.format.layout import AttentionShape, Domain, LayerLayout, kv_bytes_per_token
from rotor.kernels.defaults import default_config
from rotor.kernels.dispatch import widths_fit
from rotor.kernels.rows import key_columns, unpack_layer, value_columns
from rotor.kernels.specialise import model_variants
from rotor.models.compressed import CompressedCheckpoint
from rotor.models.layerwise import LayerwiseModel
from rotor.models.loading import compressed_weights
from rotor.runtime.cache import PerToken, make_cache, stored_bytes
from rotor.runtime.cache_size import cache_bytes_per_token

CASES = [
    ("llama", "post", 1),
    ("llama", "pre", 2),
    ("mistral", "pre", 1),
    ("qwen3", "pre", 2),
    ("gemma2", "post", 2),
    ("gpt2", "none", 1),
    ("llama", "pre", 2, "joint"),
    ("gpt2", "none", 4, "joint"),
    ("llama", "pre", 2, "joint", 4),
    ("mistral", "pre", 1, "apart", 8),
    ("qwen3", "pre", 2, "joint", 4),
]
"""Family, domain, KV heads of a group; `joint` latents, and positions of the blocks within which keys are turned."""


@pytest.fixture(scope="module")
def pair(tiny, tmp_path_factory: pytest.TempPathFactory):
    """pair(family, domain, group_size) -> a Pair, made once."""
    made: dict[tuple, Pair] = {}

    def get(*case):
        if case not in made:
            folder: Path = tmp_path_factory.mktemp("coded")
            rope_block = case[4] if len(case) > 4 else 1
            made[case] = write_pair(
                tiny(case[0]), folder, *case[1:3], joint=case[3:4] == ("joint",), rope_block=rope_block
            )
        return made[case]

    return get


def prompts(batch_size: int, length: int, seed: int = 3) -> torch.Tensor:
    return torch.randint(1, 4096, (batch_size, length), generator=torch.Generator().manual_seed(seed))


def padded_prompts(multiple_of: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Three rows, two of them padded on the left."""
    rows = prompts(3, 20)
    mask = torch.ones_like(rows)
    mask[1, : -(-9 // multiple_of) * multiple_of] = mask[2, : -(-2 // multiple_of) * multiple_of] = 0
    return rows.masked_fill(mask == 0, 0), mask


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_are_those_of_rounded_latents_in_float64(case, pair) -> None:
    rows = prompts(2, 40)
    with torch.no_grad():
        got = pair(*case).load(torch.float64)(rows).logits
        with pair(*case).reference() as model:
            expected = model(rows).logits
    assert relative_error(got, expected) < 1e-5  # what is stored is in float32


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_cache_gives_the_tokens_of_rounded_latents(case, pair) -> None:
    """Greedy and beams, in a batch padded on the left; windows (mistral, gemma2) are shorter than the prompt."""
    rows, mask = padded_prompts()
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    model = pair(*case).load(torch.float64)
    for beams in (1, 3):
        with pair(*case).reference() as reference:
            expected = reference.generate(rows, num_beams=beams, **options)
        for implementation in (None, "static"):
            output = model.generate(
                rows,
                num_beams=beams,
                cache_implementation=implementation,
                return_dict_in_generate=True,
                **options,
            )
            assert torch.equal(output.sequences, expected)
            stored = {t.dtype for layer in output.past_key_values.layers for t in (layer.keys, layer.values)}
            assert stored == {torch.uint8}


def test_a_row_alone_is_its_row_in_a_padded_batch(pair) -> None:
    """Padding by whole blocks, where keys are turned within such: their codes depend on their place in it."""
    for case in CASES:
        rows, mask = padded_prompts(case[4] if len(case) > 4 else 1)
        model = pair(*case).load(torch.float64)
        options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        together = model.generate(rows, attention_mask=mask, **options)
        for row, own in zip(together, mask.bool(), strict=True):
            alone = row[: len(own)][own][None]
            got = model.generate(alone, attention_mask=torch.ones_like(alone), **options)
            assert torch.equal(got[0], row[int((~own).sum()) :])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_chunks_leave_the_bytes_and_logits_of_one_prefill(case, pair) -> None:
    model, rows = pair(*case).load(torch.float64), prompts(2, 33)
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    with torch.no_grad():
        whole = model(rows, past_key_values=caches[0]).logits
        parts = [model(part, past_key_values=caches[1]).logits for part in rows.split([9, 1, 1, 15, 7], dim=1)]
    # transformers' cosines are of float32, and behind a window they count from its first key.
    assert relative_error(torch.cat(parts, dim=1), whole) < 1e-6
    for layer, layout in enumerate(pair(*case).layouts):
        for name, columns in (("keys", key_columns(layout)), ("values", value_columns(layout))):
            if not columns:  # values that are read from the key rows
                assert caches[0].layers[layer].values.shape == (2, 1, 33, 0)
                continue
            one, other = (unpack_layer(getattr(c.layers[layer], name), columns, torch.float64) for c in caches)
            codes = pair(*case).codes[layer][name == "values"].bits < 16
            assert torch.equal(one[..., codes], other[..., codes])
            assert relative_error(one, other) < 1e-6


def test_rows_move_between_devices_as_they_are(pair) -> None:
    """What an offloaded cache does with a layer between its steps."""
    model, rows = pair(*CASES[1]).load(), prompts(2, 20)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_narrow_dtypes_are_as_near_float64_as_rounded_latents(case, dtype, pair) -> None:
    """A number beside the edge of two codes may fall to either side, and these models have large steps."""
    rows = prompts(2, 40)
    with torch.no_grad():
        got = pair(*case).load(dtype)(rows).logits.double()
        with pair(*case).reference() as model:
            expected = model(rows).logits
        with pair(*case).reference(dtype) as model:
            rounded = model(rows).logits.double()
    assert relative_error(got, expected) <= max(2 * relative_error(rounded, expected), 2e-3)


def test_what_is_added_before_rounding_stays_in_float32(pair) -> None:
    for case, name in ((CASES[0], "key_shift"), (CASES[1], "key_constant")):
        stored = load_file(pair(*case).coded / "model.safetensors")[f"model.layers.0.self_attn.{name}"]
        model = pair(*case).load(torch.bfloat16)
        for change in (lambda m: m, lambda m: m.to(torch.float16), lambda m: m.double(), lambda m: m.bfloat16()):
            module = change(model).model.layers[0].self_attn
            assert torch.equal(getattr(module, name), stored)
            assert getattr(module, name).dtype == torch.float32
        assert module.q_proj.weight.dtype == torch.bfloat16
        assert model.to("meta").model.layers[0].self_attn.get_parameter(name).is_meta


def test_a_round_trip_through_save_pretrained(pair, tmp_path) -> None:
    for case in CASES:
        model, rows = pair(*case).load(), prompts(2, 20)
        model.save_pretrained(tmp_path / str(case))
        again = AutoModelForCausalLM.from_pretrained(tmp_path / str(case), dtype=torch.float32).eval()
        assert dict(again.named_parameters()).keys() == dict(model.named_parameters()).keys()
        assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
        options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(again.generate(rows, **options), model.generate(rows, **options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[5]], ids=str)
def test_a_cache_takes_the_bytes_that_the_layout_says(case, dtype, pair) -> None:
    model = pair(*case).load(dtype)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(prompts(2, 10), past_key_values=cache)
    expected = kv_bytes_per_token(pair(*case).layouts, dtype.itemsize)
    assert cache_bytes_per_token(cache) == expected
    assert stored_bytes(cache) == 20 * expected
    if case == CASES[0] and dtype == torch.bfloat16:
        # By hand: the keys of four heads, and their values, in two layers.
        assert expected == 2 * ((4 + 4 + 4) + 12 + 4 + 8 + 4 + (4 + 8) + 8 + 4)


@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[3]], ids=str)
def test_layer_by_layer_is_the_whole_model(case, pair) -> None:
    rows = prompts(2, 30)
    checkpoint = CompressedCheckpoint(pair(*case).coded)
    logits = []
    for streamed in (False, True):
        weights = compressed_weights(checkpoint, torch.device("cpu"), torch.bfloat16, streamed)
        logits.append(batch_logits(LayerwiseModel(weights), rows))
    with torch.inference_mode():
        whole = pair(*case).load(torch.bfloat16)(rows).logits[:, :-1]
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], whole.float())


def test_layers_of_codes_and_of_numbers_in_one_model(tiny, tmp_path) -> None:
    rows = prompts(2, 30)
    mixed = write_pair(tiny("llama"), tmp_path, "pre", 2, coded_layers=1)
    assert [layout.coded for layout in mixed.layouts] == [True, False]
    with torch.no_grad():
        got = mixed.load(torch.float64)(rows).logits
        with mixed.reference() as model:
            expected = model(rows).logits
    assert relative_error(got, expected) < 1e-5


class Quantised(QuantizedLayer):
    """Stands for those of quanto and HQQ, which need their packages."""

    def _quantize(self, tensor, axis):
        raise AssertionError("rows of codes reached a quantiser")

    _dequantize = _quantize


def test_what_cannot_be_run_is_refused(pair) -> None:
    model, rows = pair(*CASES[1]).load(), prompts(1, 8)
    cache = Cache(layers=[Quantised() for _ in range(2)])
    with pytest.raises(
        UsageError, match=r"layer 0: a quantised cache \(Quantised\) was given rows of codes: this checkpoint"
    ):
        model(rows, past_key_values=cache)
    with pytest.raises(UsageError, match=r"rows of torch.uint8, which are codes already"):
        model(rows, past_key_values=make_cache(PerToken(bits=4, group=8), model.config))
    with pytest.raises(UsageError, match=r"layer 0: dropout of 0.1 in attention over rows of codes"):
        model.model.layers[0].self_attn(torch.zeros(1, 3, 48), position_ids=torch.arange(3)[None], dropout=0.1)


def test_an_elastic_checkpoint_of_codes_is_refused(pair, tmp_path) -> None:
    folder = shutil.copytree(pair(*CASES[1]).coded, tmp_path / "elastic")
    config = json.loads((folder / "config.json").read_text())
    layers = config["quantization_config"]["layers"]
    ranks = [[[8, 8] for _ in layer["groups"]] for layer in layers.values()]
    config["quantization_config"]["profiles"], config["rank_profile"] = {"0.9": ranks}, "0.9"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="rank profiles need columns of 16 bits"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_planes_beside_codes_are_refused() -> None:
    data = coded_layer("none", 1, (Columns(n4=8), Columns(n4=8))).to_dict()
    data["groups"][0]["planes"] = [0, 1, 2, 3]
    with pytest.raises(CheckpointError, match=r"here: groups: .*expected no rotary planes beside columns by bits"):
        LayerLayout.from_dict(data, "here")


LAYERS = [
    coded_layer("pre", 2, (Columns(n8=16), Columns(n4=16)), (Columns(n4=16), Columns(n4=16))),
    coded_layer("post", 2, (Columns(n8=16), Columns(n4=16)), (Columns(n8=16), Columns(n4=16))),
]
SHAPE = AttentionShape(num_layers=2, num_heads=8, num_kv_heads=4, head_dim=32, hidden_size=64)


def test_kernel_config_tells_columns_of_equal_rank_apart() -> None:
    config = default_config(LAYERS, SHAPE)
    assert [[(c.groups, c.qk_columns, c.v_columns) for c in layer.classes] for layer in config.layers] == [
        [(1, (0, 16, 0, 0), (0, 0, 16, 0)), (1, (0, 0, 16, 0), (0, 0, 16, 0))],
        [(2, (0, 16, 0, 0), (0, 0, 16, 0))],
    ]
    data = json.loads(json.dumps(config.to_dict()))
    assert data["layers"][1]["classes"][0]["qk_columns"] == [0, 16, 0, 0]
    assert KernelConfig.from_dict(data) == config
    config.check(LAYERS)
    assert config.describes(LAYERS)
    first, second = data["layers"][0]["classes"]
    merged, plain = copy.deepcopy(data), copy.deepcopy(data)
    merged["layers"][0]["classes"] = [first | {"groups": 2}]
    plain["layers"][0]["classes"] = [{k: v for k, v in c.items() if "columns" not in k} for c in (first, second)]
    for changed in (merged, plain):
        edited = KernelConfig.from_dict(changed)
        assert not edited.describes(LAYERS)
        with pytest.raises(CheckpointError, match=r"layers\[0\].classes: got .*expected the columns of the groups"):
            edited.check(LAYERS)


def test_kernels_refuse_rebuilt_keys_whose_padded_pieces_are_wide() -> None:
    def fits(domain: Domain, columns: Columns) -> bool:
        layout = coded_layer(domain, 8, (columns, Columns(n4=64)))
        return widths_fit(layout, 4, 128, torch.bfloat16, torch.device("cpu"))

    narrow, wide = Columns(n8=512, n4=256, n2=256), Columns(n8=516, n4=256, n2=128)
    assert narrow.rank > wide.rank
    assert [fits("pre", narrow), fits("pre", wide)] == [True, False]


def test_compile_lists_what_packs_the_rows() -> None:
    variants = model_variants(default_config(LAYERS, SHAPE), LAYERS, SHAPE, torch.bfloat16)
    names = [variant.name for variant in variants]
    assert "append" in names
    rotations = [variant for variant in variants if variant.name.startswith("rotation")]
    assert [(" packed, " in v.name, v.pointers["key_shift"]) for v in rotations] == [(True, torch.float32)] * 2


@pytest.mark.parametrize("seq_len", [1, 80])
@pytest.mark.parametrize("layout", LAYERS, ids=lambda layout: layout.domain)
def test_the_benchmark_runs_on_rows_of_codes(layout: LayerLayout, seq_len: int) -> None:
    """Its own random codes against float64, the floor of their bytes, and the same ranks in numbers beside them."""
    generator = torch.Generator().manual_seed(0)
    problem = random_problem(compressed_layout(layout), SHAPE, 2, seq_len, 80, torch.float32, generator)
    assert relative_error(checked_output(problem, pytorch_path(problem)()), truth(problem)) < 4e-6
    assert problem.work.cache_bytes == problem.key.nbytes + problem.value.nbytes == 2 * 80 * sum(layout.row_bytes(4))
    rebuilt = random_problem(rebuilt_layout(layout), SHAPE, 2, seq_len, 80, torch.float32, generator)
    assert rebuilt.key.dtype == torch.float32
    assert relative_error(checked_output(rebuilt, pytorch_path(rebuilt)()), truth(rebuilt)) < 4e-6
