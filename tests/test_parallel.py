"""Sequence parallelism: several processes equal one, in every domain, group size and code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from coded_models import write_pair
from parallel_jobs import answers, load, spread_answers
from parallel_processes import Processes
from torch import Tensor

from rotor.format.columns import Columns

MQA = [(Columns(n16=4, n8=4, n4=8), Columns(n8=8, n4=8))]
TWO = [(Columns(n16=8, n8=8, n4=16), Columns(n8=16, n4=16)), (Columns(n16=4, n4=32), Columns(n8=16, n2=16))]
CASES = {
    "post-1": ("llama", "post", 1, None),
    "post-2": ("qwen3", "post", 2, None),
    "pre-1": ("llama", "pre", 1, None),
    "pre-2": ("gemma3_text", "pre", 2, None),
    "pre-4": ("llama", "pre", 4, None),
    "none-1": ("gpt2", "none", 1, None),
    "post-softcap": ("gemma2", "post", 2, None),
    "pre-longrope": ("phi3", "pre", 1, TWO),
    "post-mqa": ("falcon", "post", 1, MQA),
    "pre-mqa": ("falcon", "pre", 1, MQA),
}
"""Family, domain, group size, columns; between them sliding windows, norms, biases, one group of all heads, one head,
frequencies that change with the length, a soft cap, more processes than groups."""


FLOAT32 = {"pre-2", "post-softcap"}
"""In these one process computes in float32: cosines by index within the window, logits under the soft cap."""


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    started = Processes(3, tmp_path_factory.mktemp("processes"))
    yield started
    started.close()


@pytest.fixture(scope="module")
def pair(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in made:
            family, domain, size, columns = CASES[name]
            out = tmp_path_factory.mktemp(name)
            made[name] = write_pair(tiny(family), out, domain, size, columns=columns)
        return made[name]

    return get


def prompt(batch_size: int, tokens: int) -> Tensor:
    return torch.randint(2, 4096, (batch_size, tokens), generator=torch.Generator().manual_seed(tokens))


def padded(tokens: int) -> Tensor:
    mask = torch.ones(2, tokens, dtype=torch.long)
    mask[0, : tokens // 3 + 1] = 0
    return mask


def check(got: dict[str, Any], expected: dict[str, Any], mask: Tensor | None, exact: bool = True) -> None:
    assert torch.equal(got["tokens"], expected["tokens"])
    real = torch.ones_like(got["logits"][..., 0], dtype=torch.bool) if mask is None else mask.bool()
    for name in ("logits", "steps", "chunk"):
        one, other = (found[name][real] if name == "logits" else found[name] for found in (got, expected))
        assert torch.isfinite(one).all()
        tolerance = 1e-9 if exact and name != "steps" else 1e-5  # generate() keeps logits in float32
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("coded", [False, True], ids=["numbers", "codes"])
@pytest.mark.parametrize("case", CASES)
def test_processes_equal_one(case: str, coded: bool, pair: Any, processes: Processes) -> None:
    folder = str(pair(case).coded if coded else pair(case).plain)
    model = load(folder)
    for tokens, mask, count in [(23, None, 2), (23, padded(23), 3), (16, None, 3), (2, None, 3)]:
        ids = prompt(1 if mask is None else 2, tokens)
        expected = answers(model, ids, mask, 5)
        for found in processes.run(spread_answers, folder, ids, mask, 5, count=count):
            check(found, expected, mask, case not in FLOAT32)
