"""Recipes in full, and the reference of their fields."""

from __future__ import annotations

import json

import pytest
from support.command_line import rotor
from support.paths import ROOT

from rotor.recipe.reading import load_recipe, parse_recipe
from rotor.recipe.recipe import EXPORT_SECTIONS
from rotor.recipe.reference import recipe_fields, reference_page

SETTINGS = {
    f"{section}.{field}"
    for section, values in load_recipe("rotor").to_dict().items()
    if isinstance(values, dict)
    for field in values
}


def test_the_help_of_export_names_what_can_still_be_set(capsys) -> None:
    said = " ".join(rotor(capsys, "export", "--help")[1].split()).replace(" and ", ", ")
    assert f"--set can still change the sections {', '.join(EXPORT_SECTIONS)}." in said


@pytest.mark.parametrize("name", ["fdc", "rotor"])
def test_a_shown_recipe_is_one_to_start_from(name: str, capsys) -> None:
    """Every default is there, and what is printed is read as the same recipe."""
    code, printed, _ = rotor(capsys, "recipes", "--show", name)
    assert code == 0
    assert parse_recipe(printed, "x") == load_recipe(name)
    assert all(f"  {setting.partition('.')[2]}:" in printed for setting in SETTINGS)
    assert json.loads(rotor(capsys, "recipes", "--show", name, "--json")[1])["tokens"]["source"] in printed


def test_a_shown_recipe_says_how_it_differs_and_which_policy_has_its_name(capsys) -> None:
    assert "# Differs from the paper: query heads" in rotor(capsys, "recipes", "--show", "fdc")[1]
    _, printed, _ = rotor(capsys, "recipes", "--show", "zdc")
    assert "ZDC (papers:" in printed
    assert "# the cache policy zdc (--cache zdc)" in printed
    assert "# qk_unimportant: 0.7" in printed
    assert parse_recipe(printed, "x") == load_recipe("zdc")


def test_every_field_has_a_text_a_default_and_its_values() -> None:
    found = {field.name: field for section in recipe_fields().values() for field in section}
    assert set(found) == SETTINGS | {"name", "summary"}
    assert [name for name, field in found.items() if len(field.text) < 10] == []
    assert all("  " not in field.text for field in found.values())
    assert found["tokens.count"].default == "8192"
    assert found["tokens.path"].default == "null"
    assert found["codes.bits"].default == "[0, 16]"
    assert found["name"].default is None
    assert found["tokens.source"].values == "one of random, synthetic, text, dataset"
    assert found["tokens.count"].values == "a whole number from 1 to 67108864"
    assert found["ranks.method"].values == "one of removal-rate, uniform, fisher, global"
    assert "stdlib" in found["evaluation.source"].text


def test_the_page_is_up_to_date(capsys) -> None:
    code, printed, _ = rotor(capsys, "recipes", "--fields")
    assert code == 0
    assert printed == reference_page() + "\n"
    assert (ROOT / "docs" / "recipes.md").read_text("utf-8") == printed, "rotor recipes --fields > docs/recipes.md"
    found = json.loads(rotor(capsys, "recipes", "--fields", "--json")[1])
    assert {field["name"] for field in found} == SETTINGS | {"name", "summary"}
