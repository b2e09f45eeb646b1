"""Ratios per token at export: what is chosen for a loss of quality, and what is refused."""

from __future__ import annotations

import json
from itertools import product
from math import log1p
from typing import Any

import numpy as np
import pytest
import torch
from conftest import calibrated, in_memory
from test_cli import rotor as command

from rotor.errors import AccuracyError, UsageError
from rotor.export.export import export
from rotor.policies import Tiers
from rotor.progress import Progress
from rotor.search import tiers
from rotor.search.probe import full_ranks
from rotor.search.tiers import choose_tiers, removed


def test_what_is_removed_counts_every_layer_side_and_kind_of_token() -> None:
    sizes = np.array([[64, 32], [64, 32], [32, 32]])
    policy = Tiers(
        layer_important=(0.1, 0.4, 0.9), qk_important=0.2, qk_unimportant=0.7, v_important=0.1, v_unimportant=0.3
    )
    ratios = ((0.2, 0.7), (0.1, 0.3))
    total = sum(
        sizes[layer, side] * (share * ratios[side][0] + (1 - share) * ratios[side][1])
        for (layer, share), side in product(enumerate(policy.layer_important), range(2))
    )
    assert removed(policy, sizes) == pytest.approx(total / sizes.sum())


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return calibrated(tiny("llama"), tmp_path_factory.mktemp("tiers") / "run", "post", 1)


@pytest.fixture
def network(run) -> Any:
    found, bases = in_memory(run), run.bases()
    found.compress(bases, [[full_ranks(layer)] * len(layer.qk.encode) for layer in bases])
    return found


ROWS = torch.randint(1, 4096, (2, 40), generator=torch.Generator().manual_seed(0))


def test_ratios_rise_where_they_cost_least_until_the_limit(network: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a loss in which keys cost ten times what values do, and steps of one token half as much again."""

    def loss(model: Any, rows: torch.Tensor, policy: Tiers | None, step: int) -> float:
        if policy is None:
            return 3.0
        keys, values = (
            (getattr(policy, f"{s}_important") + getattr(policy, f"{s}_unimportant")) ** 2 for s in ("qk", "v")
        )
        return 3.0 + log1p((0.1 * keys + 0.01 * values) * (1.5 if step == 1 else 1.0))

    monkeypatch.setattr(tiers, "_loss", loss)
    policy, found = choose_tiers(network, ROWS, 0.05, Progress())
    assert 0.03 < found <= 0.05
    assert policy.v_unimportant == policy.qk_unimportant > 0  # values cost less, and never lose more than keys
    assert policy.v_important == policy.qk_important
    assert policy.layer_important == (0.0, tiers.LAST_SHARE)
    with pytest.raises(AccuracyError, match="no ratios per token that remove anything"):
        choose_tiers(network, ROWS, 1e-6, Progress())


def test_an_export_chooses_ratios_and_stores_them(run, tmp_path, capsys) -> None:
    code, said, error = command(
        capsys, "export", run.folder, "-o", tmp_path / "out", "--compression", "0.2", "--set", "cache.tiers=0.5",
        "--set", "cache.tiers_tokens=128",
    )  # fmt: skip
    assert code == 0, error
    stored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["cache"]
    assert stored["method"] == "tiers"
    assert len(stored["layer_important"]) == 2
    assert "Cache policy tiers" in said
    report = json.loads((tmp_path / "out" / "rotor.json").read_text())
    assert report["cache"]["policy"] == stored
    assert report["cache"]["kv_bytes_per_token"]["32768"] < report["kv_bytes_per_token"]["after"]


def test_what_an_export_with_ratios_cannot_do_is_said(run, tmp_path) -> None:
    def refused(text: str, *more: str, **options: object) -> None:
        with pytest.raises(UsageError, match=text):
            export(run.folder, tmp_path / "out", overrides=["cache.tiers=0.1", *more], **options)  # type: ignore[arg-type]

    refused("for ranks that are known, got --accuracy", accuracy=0.9)
    refused("for ranks that are known, got --cache h2o-50", compression=0.2, cache="h2o-50")
    refused("for ranks that are known, got --no-measure", compression=0.2, measure=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", ["0", "-1", "many"])
def test_a_limit_that_is_none_is_refused(value: str, capsys, tmp_path) -> None:
    code, _, error = command(
        capsys, "calibrate", tmp_path, "-o", tmp_path / "run", "--recipe", "fdc", "--set", f"cache.tiers={value}"
    )
    assert code == 2
    assert "cache.tiers" in error
