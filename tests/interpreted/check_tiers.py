"""The kernels over the two blocks of a cache in tiers, in Triton's interpreter, joined, against float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from coded import MIXTURES, coded_layer, random_coded_case
from conftest import build_tiny, calibrated
from kernel_checks import FLOAT32_ERROR, relative_error
from ragged import layer, random_case
from torch import Tensor
from transformers import AutoModelForCausalLM

from rotor.export.export import export
from rotor.format.layout import GroupLayout
from rotor.kernels.attention import packed_partial_attention
from rotor.kernels.code_reference import partial_attention
from rotor.kernels.decode.launch import decode_attention
from rotor.kernels.parameters import AttentionParameters
from rotor.kernels.rows import key_columns, unpack_layer, value_columns
from rotor.runtime.cache import TieredLayer, Tiers, cache_policy
from rotor.runtime.tiered_attention import attend_to_tiers

HPK, HEAD_DIM, TOKENS, PADS = 2, 32, 40, (7, 0)
STEPS = [34, 1, 4, 1]
LAYOUTS = {
    "none": layer("none", 2, (24, 16), (16, 8)),
    "codes": coded_layer("none", 1, (MIXTURES[7], MIXTURES[0]), (MIXTURES[0], MIXTURES[7])),
}
POLICIES = {
    "none": [Tiers(important=0.4, qk_important=0.2, qk_unimportant=0.6, v_unimportant=0.5), Tiers(important=0.0)],
    "codes": [
        Tiers(important=0.4, qk_unimportant=0.5, v_unimportant=0.5),
        Tiers(0.4, (), qk_important=0.2, qk_unimportant=0.6, v_unimportant=0.5, cut="bits"),
    ],
}


@pytest.mark.parametrize(("kind", "number"), [(kind, number) for kind in LAYOUTS for number in (0, 1)])
def test_two_launches_joined_are_attention_to_both_blocks(kind: str, number: int) -> None:
    """A prompt with padding, steps of one token and of several; importance by the kernels' own log-sums."""
    layout, policy = LAYOUTS[kind], POLICIES[kind][number]
    if layout.coded:
        case = random_coded_case(layout, HPK, HEAD_DIM, 2, TOKENS, TOKENS)
    else:
        case = random_case(layout, HPK, HEAD_DIM, 2, TOKENS, TOKENS)
    parameters = AttentionParameters(layout, HPK, 0.25)
    (kept,) = policy.layers(1)
    assert isinstance(kept, TieredLayer)
    real = torch.arange(TOKENS) >= torch.tensor(PADS)[:, None]
    whole = (torch.ones(TOKENS, TOKENS).tril().bool() & real[:, None])[:, None]
    launches = []

    def kernels(query: Tensor, key: Tensor, value: Tensor, own, rotation, mask) -> tuple[Tensor, Tensor]:
        launches.append(key.shape[2])
        return packed_partial_attention(query, key, value, own, HEAD_DIM, mask)

    def exact(query: Tensor, key: Tensor, value: Tensor, own, rotation, mask) -> tuple[Tensor, Tensor]:
        if layout.coded:
            sides = zip((key, value), (key_columns(own.layout), value_columns(own.layout)), strict=True)
            key, value = (unpack_layer(rows, columns, torch.float32) for rows, columns in sides)
            groups = (GroupLayout(group.kv_heads, group.qk_rank, group.v_rank) for group in own.layout.groups)
            own = replace(own, layout=replace(own.layout, groups=tuple(groups)))
        return partial_attention(query.double(), key.double(), value.double(), own, None, mask)

    start = 0
    for length in STEPS:
        tokens = slice(start, start + length)
        mask = whole[:, :, tokens, : tokens.stop]
        kept.follow(layout, HPK, torch.float32)
        kept.begin(mask, 2, length, torch.device("cpu"))
        kept.update(case.key[:, None, tokens], case.value[:, None, tokens])
        query = case.query[:, tokens]
        expected, expected_sum = attend_to_tiers(parameters, kept, query.double(), mask, None, exact)
        got, log_sums = attend_to_tiers(parameters, kept, query, mask, None, kernels)
        seen = real[:, tokens]
        assert relative_error(got[seen], expected[seen].double()) < 2 * FLOAT32_ERROR
        assert float((log_sums[seen].double() - expected_sum[seen]).abs().max()) < 2e-5
        kept.finish_step(log_sums)
        start += length
    assert len(launches) > len(STEPS) or policy.important == 0.0
    assert kept.low_keys is not None
    assert kept.low_keys.shape[2]


def test_a_model_with_tiers_runs_them_in_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = calibrated(build_tiny("llama", tmp_path / "m"), tmp_path / "run", "post", 1)
    export(run.folder, tmp_path / "out", compression=0.2, measure=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    prompt = torch.randint(1, 4096, (2, 12), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(prompt)
    mask[0, :4] = 0
    calls, logits = [], {}
    monkeypatch.setattr(
        "rotor.kernels.attention.decode_attention",
        lambda *args, **kwargs: calls.append(args[1].shape[1]) or decode_attention(*args, **kwargs),
    )
    for choice in ("reference", "triton"):
        monkeypatch.setenv("ROTOR_ATTENTION", choice)
        with cache_policy(model, Tiers(important=0.5, qk_unimportant=0.5, v_unimportant=0.5)):
            found = model.generate(
                prompt, attention_mask=mask, max_new_tokens=2, do_sample=False, pad_token_id=0, output_logits=True,
                return_dict_in_generate=True,
            )  # fmt: skip
        logits[choice] = torch.stack(found.logits)
        assert len(calls) == (0 if choice == "reference" else 2 * 2)  # two layers, two blocks
    assert max(calls) < 12
    error = (logits["triton"] - logits["reference"]).norm() / logits["reference"].norm()
    assert error < 1e-5
