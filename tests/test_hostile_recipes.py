"""Recipes, devices and overrides of unknown origin: whatever is in them, the end is success or a clean error."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mutations import BYTES, CHANGES, SHARES, VALUES, changed, clean, garbled, mutations

from rotor.errors import RecipeError
from rotor.prediction.devices import parse_devices
from rotor.recipe import load_recipe, override, parse_recipe

pytestmark = pytest.mark.usefixtures("bounded_memory")


@pytest.mark.parametrize("share", SHARES)
def test_recipes(share: float) -> None:
    text = load_recipe("zdc").to_yaml()
    base = load_recipe("rotor").to_dict()

    @mutations("recipe", share)
    @given(st.one_of(CHANGES, CHANGES, BYTES))
    def run(changes: Any) -> None:
        if changes[0][1] in ("flip", "insert", "cut", "end"):
            mutated = garbled(text.encode(), changes).decode("utf-8", "replace")
        else:
            mutated = json.dumps(changed(base, changes))
        recipe = clean(lambda: parse_recipe(mutated, "x.yaml"))
        if recipe is not None:
            assert parse_recipe(recipe.to_yaml(), "x.yaml") == recipe

    run()


@pytest.mark.parametrize("share", SHARES)
def test_overrides(share: float) -> None:
    recipe = load_recipe("fdc")
    names = ["tokens.count", "tokens.seed", "ranks.multiple_of", "objective.batch_size", "groups.size", "x.y"]
    values = st.one_of(VALUES.map(json.dumps), st.text(max_size=20))

    @mutations("override", share)
    @given(st.sampled_from(names), values)
    def run(name: str, value: str) -> None:
        clean(lambda: override(recipe, [f"{name}={value}"]))

    run()


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]",
        "name: x\nsummary: y\ntokens: {<<: &t {count: 1}, seed: 0}\nprune: *t",
        "name: " + "[" * 5000,
        "name: !!python/object/apply:os.system [echo]",
        "name: x\nsummary: y\ntokens: {count: " + "9" * 5000 + "}",
        "name: x\nsummary: y\ntokens: {count: 0x" + "f" * 5000 + "}",
        "name: x\nsummary: y\nranks: {probe_share: 0x" + "f" * 5000 + "}",
        "name: x\nsummary: " + "y" * (1 << 19),
        "? [1, 2]\n: 3",
        "name: 2001-13-45",
        "",
    ],
)
def test_yaml_that_asks_for_too_much(text: str) -> None:
    for read in (parse_recipe, parse_devices):
        with pytest.raises(RecipeError):
            read(text, "x.yaml")
