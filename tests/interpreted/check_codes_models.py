"""Tiny models with rows of codes whose attention and packing run in Triton's interpreter, against plain PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from coded_models import write_pair
from conftest import build_tiny

from rotor.kernels.decode.launch import decode_attention
from rotor.kernels.projection import append, coded
from rotor.kernels.rows import key_columns, unpack_layer, value_columns

CASES = [
    ("gemma2", "post", 2, "static"),
    ("mistral", "pre", 2, None),
    ("llama", "pre", 2, "joint"),
]
PROMPT = torch.randint(1, 4096, (2, 13), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_generate_with_left_padding(case, tmp_path: Path, monkeypatch) -> None:
    """Logits, and the codes in the cache; mistral's window of 12 is shorter than the prompt."""
    family, domain, size, cache = case
    joint = cache == "joint"
    pair = write_pair(build_tiny(family, tmp_path / "m"), tmp_path, domain, size, joint=joint)
    model = pair.load()
    mask = torch.ones_like(PROMPT)
    mask[0, :5] = 0
    calls = []
    monkeypatch.setattr(
        "rotor.kernels.attention.decode_attention",
        lambda *args, **kwargs: calls.append("decode") or decode_attention(*args, **kwargs),
    )
    for module, name in ((append, "pack_rows"), (coded, "rotate_and_pack")):
        pack = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, pack=pack: calls.append("pack") or pack(*args))
    logits, stored = {}, {}
    for choice in ("reference", "triton"):
        monkeypatch.setenv("ROTOR_ATTENTION", choice)
        output = model.generate(
            PROMPT,
            attention_mask=mask,
            max_new_tokens=2,
            do_sample=False,
            pad_token_id=0,
            cache_implementation=None if joint else cache,
            output_logits=True,
            return_dict_in_generate=True,
        )
        logits[choice] = torch.stack(output.logits)
        stored[choice] = [
            unpack_layer(rows, columns(layout), torch.float32)
            for cached, layout in zip(output.past_key_values.layers, pair.layouts, strict=True)
            for rows, columns in ((cached.keys, key_columns), (cached.values, value_columns))
            if columns(layout)
        ]
        # Two layers: a step after the prefill, and the rows of both.
        expected = (0, 0) if choice == "reference" else (2, 2 * 2)
        assert (calls.count("decode"), calls.count("pack")) == expected
    error = (logits["triton"] - logits["reference"]).norm() / logits["reference"].norm()
    assert error < 1e-4
    for got, expected in zip(stored["triton"], stored["reference"], strict=True):
        difference = (got - expected).abs()
        assert difference.max() <= 1
        assert (difference > 0.5).float().mean() < 0.002  # a number on the edge of two codes
