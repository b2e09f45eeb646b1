"""Recipes: bundled ones, overrides, and errors that name the nearest known key."""

import re
from pathlib import Path

import pytest

from rotor.errors import RecipeError
from rotor.models.splits import description_of
from rotor.recipe.reading import QUICK, bundled_recipes, load_recipe, override, parse_recipe
from rotor.recipe.recipe import EXPORT_SECTIONS
from rotor.recipe.requests import CalibrationRequest

RECIPES = Path(__file__).parent.parent / "recipes"


def test_bundled_recipes_are_what_the_papers_say() -> None:
    recipes = bundled_recipes()
    assert set(recipes) >= {"fdc", "rotor"}
    fdc, ours = recipes["fdc"], recipes["rotor"]
    assert (fdc.tokens.source, fdc.groups.size, fdc.groups.domain) == ("random", 1, "post")
    assert fdc.tokens.count >= 8192
    assert (fdc.bases.qk, fdc.bases.vo) == ("svd", "palu")
    assert (ours.groups.size, ours.groups.domain, ours.bases.qk, ours.coded) == ("auto", "block", "fisher", True)
    sixteen = recipes["rotor-16"]
    assert (sixteen.groups.size, sixteen.groups.domain, sixteen.ranks.method) == ("all", "pre", "global")
    assert sixteen.codes.bits == (0, 16)
    coded = {name for name, recipe in recipes.items() if recipe.coded}
    assert coded == {"rotor"}
    for name, recipe in recipes.items():
        assert recipe.name == name
        assert "\n" not in recipe.summary


def test_settings_that_recipes_name_are_accepted() -> None:
    named = [
        (path.stem, setting)
        for path in sorted(RECIPES.glob("*.yaml"))
        for setting in re.findall(r"--set (\S+=[^\s,;]+)", path.read_text())
    ]
    assert ("rotor", "groups.rope_block=128") in named
    for name, setting in named:
        load_recipe(name, [setting.rstrip(".")])


def test_yaml_round_trip_keeps_every_field() -> None:
    recipe = load_recipe(
        "rotor", ["tokens.count=4096", "ranks.probe_shares=[0.97, 0.9]", "evaluation.metric=ppl_ratio"]
    )
    assert parse_recipe(recipe.to_yaml(), "x") == recipe
    assert recipe.tokens.count == 4096
    assert recipe.ranks.probe_shares == (0.97, 0.9)


def test_an_exponent_makes_a_number() -> None:
    """YAML 1.1 takes both for text, for want of a point and of a sign."""
    recipe = load_recipe("rotor", ["search.resolution=1e-3", "codes.repeats=2.5e-1"])
    assert (recipe.search.resolution, recipe.codes.repeats) == (0.001, 0.25)


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ("tokns.count=1", "unknown key 'tokns'; did you mean 'tokens'?"),
        ("tokens.cout=1", "unknown key 'tokens.cout'; did you mean 'count'?"),
        ("tokens.count=many", "tokens.count: got 'many', expected a whole number from 1 to"),
        ("tokens.count=true", "tokens.count: got True, expected a whole number"),
        ("tokens.count=0", "tokens.count: got 0, expected a whole number from 1 to 67108864"),
        ("tokens.source=randm", "expected one of random, synthetic, text, dataset; did you mean 'random'?"),
        ("tokens.count", "expected section.field=value"),
        ("tokens.count=[1", "not valid YAML"),
        ("tokens.source=text", "tokens.path: got None, expected a file or folder"),
        (
            "tokens.source=dataset",
            "tokens.dataset: got None, expected a name on the hub or a folder, as source is dataset",
        ),
        ("tokens.split=test", "tokens.split: got 'test', expected \"train\", as source is not dataset"),
        ("tokens=3", "tokens is a section"),
        ("tokens.count.more=3", "count has no fields of its own"),
        ("ranks.probe_shares=[0.9, 1.5]", "ranks.probe_shares"),
        ("groups.rope_block=48", "groups.rope_block: got 48, expected a power of two from 1 to 128"),
        ("groups.fast_planes=0", "unknown key 'groups.fast_planes'"),
        ("groups.domain=pre", "got 'svd', expected one of whitened, kq, fisher, palu"),
        ("groups.size=any", "groups.size: got 'any', expected a whole number from 1 to 65536 or one of all, auto"),
        ("bases.qk=kqq", "bases.qk: got 'kqq', expected one of svd, whitened, kq, fisher"),
        (
            "bases.vo=output",
            "bases.vo: got 'output', expected one of svd, whitened, kq, kq-output, fisher, palu",
        ),
        ("ranks.method=removalrate", "did you mean 'removal-rate'?"),
        ("name.x=1", "name has no fields of its own"),
    ],
)
def test_a_wrong_override_says_what_and_what_is_known(item: str, text: str) -> None:
    with pytest.raises(RecipeError) as error:
        load_recipe("fdc", [item])
    assert text in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1", "expected a mapping"),
        ("name: x", "missing key 'summary'"),
        ("name: x\nsummary: y\ntoken: {}", "unknown key 'token'; did you mean 'tokens'?"),
        ("name: x\nsummary: y\ntokens: {sead: 1}", "unknown key 'tokens.sead'; did you mean 'seed'?"),
        ("name: [", "not valid YAML"),
    ],
)
def test_a_wrong_file_says_what_and_where(text: str, message: str) -> None:
    with pytest.raises(RecipeError) as error:
        parse_recipe(text, "mine.yaml")
    assert message in str(error.value)
    assert "mine.yaml" in str(error.value)


def test_calibration_settings_are_refused_on_export() -> None:
    recipe = load_recipe("fdc")
    assert override(recipe, ["ranks.multiple_of=8"], EXPORT_SECTIONS).ranks.multiple_of == 8
    with pytest.raises(RecipeError, match="Calibrate again"):
        override(recipe, ["tokens.count=1"], EXPORT_SECTIONS)


@pytest.mark.parametrize("name", ["rotor", "fdc"])
def test_quick_takes_few_tokens_of_what_a_recipe_has(name: str) -> None:
    recipe = CalibrationRequest("MODEL", "RUN", name, quick=True).overridden_recipe
    assert recipe.tokens.count == QUICK["tokens.count"]
    assert recipe.evaluation.quick
    assert recipe.evaluation.search_tokens == QUICK["evaluation.search_tokens"]
    assert (recipe.search.tries, load_recipe(name).search.tries) == (0, 3)
    assert recipe.codes.bits == load_recipe(name).codes.bits
    said = CalibrationRequest("MODEL", "RUN", name, ["tokens.count=100"], quick=True).overridden_recipe
    assert said.tokens.count == 100
    assert "a quick look" in description_of(recipe.evaluation)
    assert "quick" not in description_of(load_recipe(name).evaluation)
