"""The measure of artifacts/studies/side_by_side.py: KL and perplexity where only likely tokens are kept."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import side_by_side
import torch
from side_by_side import Distributions

VOCABULARY = 50


@pytest.fixture(autouse=True)
def few_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "KEPT", 8)


def kept(logits: torch.Tensor, labels: list[int], kept: int = 8) -> Distributions:
    likely = logits.log_softmax(-1).topk(kept)
    facts = {"vocabulary": VOCABULARY, "bytes": 100, "bytes_32k": 50}
    return Distributions(likely.indices.numpy().astype(np.int32), likely.values.numpy(), np.array(labels), facts)


def peaked(seed: int) -> torch.Tensor:
    """Logits [3, vocabulary] of which the first eight tokens have nearly all of the probability, each seed its own."""
    generator = torch.Generator().manual_seed(seed)
    likely = 12.0 * (torch.arange(VOCABULARY) < 8) + 2 * torch.eye(3, VOCABULARY)
    return torch.randn(3, VOCABULARY, generator=generator, dtype=torch.float64) * 0.5 + likely


def test_kl_is_that_of_whole_distributions_where_little_is_left() -> None:
    one, other = peaked(0), peaked(1)
    found = kept(one, [0, 1, 2]).kl_div(kept(other, [0, 1, 2]))
    log_p, log_q = one.log_softmax(-1), other.log_softmax(-1)
    whole = (log_p.exp() * (log_p - log_q)).sum(-1)
    assert found == pytest.approx(whole.numpy(), abs=2e-4)
    assert kept(one, [0, 1, 2]).kl_div(kept(one, [0, 1, 2])) == pytest.approx([0, 0, 0], abs=1e-9)


def test_tokens_that_one_of_both_keeps_count_as_rest() -> None:
    """A lower bound: what falls into one place cannot be told apart."""
    p = Distributions(np.array([[0, 1]]), np.log([[0.6, 0.3]]), np.array([0]), {"vocabulary": VOCABULARY})
    q = Distributions(np.array([[0, 2]]), np.log([[0.5, 0.4]]), np.array([0]), {"vocabulary": VOCABULARY})
    assert p.kl_div(q)[0] == pytest.approx(0.6 * math.log(0.6 / 0.5) + 0.4 * math.log(0.4 / 0.5))


def test_a_label_that_is_not_kept_has_its_part_of_the_rest() -> None:
    found = Distributions(np.array([[4, 1]]), np.log([[0.6, 0.3]]), np.array([1]), {"vocabulary": VOCABULARY})
    assert found.nll()[0] == pytest.approx(-math.log(0.3))
    found.labels = np.array([7])
    assert found.nll()[0] == pytest.approx(-math.log(0.1 / (VOCABULARY - 8)))


def test_files_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "SCORED", 1)  # three windows of a token
    kept(peaked(0), [0, 1, 2]).save(tmp_path / "f16.npz")
    kept(peaked(1), [0, 1, 2]).save(tmp_path / "q4_0.npz")
    side_by_side.compare(tmp_path / "f16.npz", [tmp_path / "f16.npz", tmp_path / "q4_0.npz"], tmp_path / "x.csv")
    same, other = (line.split(",") for line in (tmp_path / "x.csv").read_text().splitlines()[1:])
    assert same[:3] == ["f16", "100", "50"]
    assert float(same[4]) == 0
    assert float(other[4]) > 0
    assert other[6] == "1.0"
