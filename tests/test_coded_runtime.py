"""Checkpoints with rows of codes: loaded, run through transformers, against the same latents rounded in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from coded_models import Pair, write_pair
from conftest import relative_error

CASES = [
    ("llama", "post", 1),
    ("llama", "pre", 2),
    ("mistral", "pre", 1),
    ("qwen3", "pre", 2),
    ("gemma2", "post", 2),
    ("gpt2", "none", 1),
]


@pytest.fixture(scope="module")
def pair(tiny, tmp_path_factory: pytest.TempPathFactory):
    """pair(family, domain, group_size) -> a Pair, made once."""
    made: dict[tuple, Pair] = {}

    def get(*case):
        if case not in made:
            folder: Path = tmp_path_factory.mktemp("coded")
            made[case] = write_pair(tiny(case[0]), folder, *case[1:])
        return made[case]

    return get


def prompts(batch_size: int, length: int, seed: int = 3) -> torch.Tensor:
    return torch.randint(1, 4096, (batch_size, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_are_those_of_rounded_latents_in_float64(case, pair) -> None:
    rows = prompts(2, 40)
    with torch.no_grad():
        got = pair(*case).load(torch.float64)(rows).logits
        with pair(*case).reference() as model:
            expected = model(rows).logits
    assert relative_error(got, expected) < 1e-5  # what is stored is in float32
