"""Compressed tiny models whose attention runs in Triton's interpreter, against the same models on plain PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import build_tiny, calibrated, shortcuts  # noqa: F401
from transformers import AutoModelForCausalLM

from rotor.export.export import export
from rotor.kernels.decode.launch import decode_attention

CASES = [
    ("llama", "post", 1, None),
    ("llama", "post", 1, "static"),
    ("mistral", "pre", 2, None),
    ("qwen3", "pre", "all", "static"),
]
PROMPT = torch.randint(1, 4096, (2, 15), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory):
    """compressed(case) -> a compressed model in float32, made once."""
    made = {}

    def get(case):
        if case not in made:
            folder: Path = tmp_path_factory.mktemp("model")
            family, domain, size = case
            export(
                calibrated(build_tiny(family, folder / "m"), folder / "run", domain, size).folder,
                folder / "out",
                compression=0.45,
                measure=False,
            )
            made[case] = AutoModelForCausalLM.from_pretrained(folder / "out", dtype=torch.float32).eval()
        return made[case]

    return get


@pytest.mark.parametrize("case", CASES, ids=str)
def test_generate_with_left_padding(case, compressed, monkeypatch) -> None:
    """Prefill and decoding with the masks of `generate`; mistral's window of 12 is shorter than the prompt."""
    *case, cache = case
    model = compressed(tuple(case))
    mask = torch.ones_like(PROMPT)
    mask[0, :5] = 0
    calls = []
    monkeypatch.setattr(
        "rotor.kernels.attention.decode_attention",
        lambda *args, **kwargs: calls.append("decode") or decode_attention(*args, **kwargs),
    )
    logits = {}
    for choice in ("reference", "triton"):
        monkeypatch.setenv("ROTOR_ATTENTION", choice)
        output = model.generate(
            PROMPT,
            attention_mask=mask,
            max_new_tokens=3,
            do_sample=False,
            pad_token_id=0,
            cache_implementation=cache,
            output_logits=True,
            return_dict_in_generate=True,
        )
        logits[choice] = torch.stack(output.logits)
        assert len(calls) == (0 if choice == "reference" else 2 * 2)  # two layers, two steps after the prefill
    error = (logits["triton"] - logits["reference"]).norm() / logits["reference"].norm()
    assert error < 1e-5
