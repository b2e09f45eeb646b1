"""`rotor study --parts context`: what is lost by position, on the study's text and on text of another kind."""

from __future__ import annotations

import csv
from pathlib import Path

from support.tiny_models import demo_model

from rotor import study

SETTINGS = ["tokens.count=1024", "tokens.seq_len=128", "codes.tokens=512", "evaluation.report_tokens=2048"]


def test_positions_of_two_texts(tmp_path: Path) -> None:
    """Fewer bytes lose more everywhere; a second start measures nothing."""
    model = demo_model(tmp_path / "model", max_position_embeddings=1024)
    texts = tmp_path / "text"
    texts.mkdir()
    for number in range(8):
        lines = (f"In the year {year} harvest {number} brought {year * 7 % 97} carts." for year in range(1000, 1400))
        (texts / f"{number}.txt").write_text("\n".join(lines))
    given = {"parts": ["context"], "sizes": [600, 200], "plots": False, "text": [texts]}
    result = study(model, tmp_path / "study", ["rotor"], SETTINGS, **given)
    recipes = ["rotor, 600 bytes", "rotor, 200 bytes"]
    assert list(result.records) == [f"context/{text}/{name}" for text in ("your text", "Python") for name in recipes]
    for text in ("your text", "Python"):
        mild, hard = (result.records[f"context/{text}/{name}"] for name in recipes)
        assert 0.9 * 200 < hard["bytes"] <= 200 < mild["bytes"] <= 600
        assert list(mild["positions"]) == list(hard["positions"]) == ["0-512", "512-1024"]
        for name, values in mild["positions"].items():
            assert 0 < values["kl_div"] < hard["positions"][name]["kl_div"]
            assert values["top1_agreement"] > hard["positions"][name]["top1_agreement"]
    with (tmp_path / "study/context.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 2 * 2 * 2
    assert "| text | recipe | 0 to 512 | 512 to 1024 |" in (tmp_path / "study/summary.md").read_text()
    assert study(model, tmp_path / "study", ["rotor"], SETTINGS, **given).added == 0
