"""Pictures of the report: axes that zoom to what matters, bars by layer, colours for many layers."""

from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from support.pages import Page

from rotor.checkpoint.layout import GroupLayout
from rotor.checkpoint.rows import CodedRow, NumberRow
from rotor.recipe.reading import load_recipe
from rotor.search.evaluation.accuracy import Fidelity
from rotor.search.point import Point
from rotor.search.report.collect import ReportData
from rotor.search.report.figures import LOSS_FLOOR, Axis, Chart, accuracy_axis, figures, layer_colours, shown_loss
from rotor.search.report.report import render

SVG = "{http://www.w3.org/2000/svg}"


def shown(stored: float, search: Fidelity, report: Fidelity | None = None) -> Point:
    return Point(0.0, stored, stored, [], [], search=search, report=report)


def made(layers: int = 5, coded: bool = False, joint: bool = False) -> ReportData:
    """A report of numbers made up."""
    data = ReportData("run", "made", "model", load_recipe("rotor-16"))
    data.points = [
        shown(0.2, Fidelity(0.999, (0.997, 1.0005), {})),
        shown(0.4, Fidelity(0.991, (0.98, 0.995), {}), Fidelity(0.992, (0.985, 0.996), {})),
        shown(0.7, Fidelity(0.93, (0.9, 0.95), {})),
    ]
    data.chosen = data.points[1]
    data.target, data.metric = 0.99, "some ratio"
    channels = CodedRow(n16=4, n8=8, n4=16, scaled=joint)
    latents = (channels, None) if joint else (channels, channels) if coded else (NumberRow(24), NumberRow(8))
    data.ranks = [[GroupLayout((0, 1), *latents)] * 2 for _ in range(layers)]
    data.head_dims = [32] * layers
    data.ranks_of = "of this point"
    data.spectra_of = {"joint": "2 heads"} if joint else {"qk": "after RoPE, 1 head a group", "vo": "1 head a group"}
    data.spectra = [{side: [1.0, 0.1, 0.01] for side in data.spectra_of} for _ in range(layers)]
    return data


def drawn(data: ReportData, name: str) -> ElementTree.Element:
    """A figure, as XML that parses."""
    return ElementTree.fromstring(figures(data)[name])


def texts(picture: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in picture.iter(f"{SVG}text")]


def test_accuracy_is_logarithmic_in_what_is_lost() -> None:
    """Best at the top; as much room from 0.9 to 0.99 as from 0.99 to 0.999."""
    axis = accuracy_axis([shown_loss(a) for a in (0.9, 1.0)])
    places = {a: axis.share(shown_loss(a)) for a in (0.9, 0.99, 0.999)}
    assert 0 < places[0.9] < places[0.999] < 1
    assert places[0.99] - places[0.9] == pytest.approx(places[0.999] - places[0.99])
    labels = [label for _, label in axis.ticks]
    assert {"0.99", "0.95", "0.9", "≥ 0.9995"} <= set(labels)
    assert "0.5" not in labels  # nothing lies there
    assert shown_loss(1.02) == shown_loss(1.0) == LOSS_FLOOR
    assert shown_loss(-0.5) == 1


def test_one_accuracy_has_two_ticks_beside_it() -> None:
    axis = accuracy_axis([shown_loss(0.9966)])
    assert len(axis.ticks) >= 2
    assert all(0 <= axis.share(value) <= 1 for value, _ in axis.ticks)


def test_points_are_zoomed_to_and_say_their_numbers() -> None:
    picture = drawn(made(), "points")
    across = [float(text) for text in texts(picture) if re.fullmatch(r"0(\.\d+)?", text)]
    assert 0.0 not in across
    dots = [circle for circle in picture.iter(f"{SVG}circle") if circle.find(f"{SVG}title") is not None]
    said = [dot.find(f"{SVG}title").text for dot in dots]  # type: ignore[union-attr]
    assert said == [
        "0.200 removed: 0.9990 [0.9970, 1.0005] on the search split",
        "0.400 removed: 0.9910 [0.9800, 0.9950] on the search split",
        "0.700 removed: 0.9300 [0.9000, 0.9500] on the search split",
        "0.400 removed: 0.9920 [0.9850, 0.9960] on the report split",
    ]
    places = [(float(dot.get("cx", 0)), float(dot.get("cy", 0))) for dot in dots]
    assert places[0][0] < places[1][0] == places[3][0] < places[2][0]
    assert places[0][1] < places[3][1] < places[1][1] < places[2][1]  # the best is at the top
    assert "target 0.99" in texts(picture)
    (ring,) = [circle for circle in picture.iter(f"{SVG}circle") if circle.get("r") == "9"]
    assert (float(ring.get("cx", 0)), float(ring.get("cy", 0))) == places[3]


def bars(picture: ElementTree.Element) -> dict[str, list[float]]:
    """Widths of the parts of each bar, by what it says."""
    groups = [group for group in picture.iter(f"{SVG}g") if group.find(f"{SVG}title") is not None]
    return {
        group.find(f"{SVG}title").text or "": [float(box.get("width", 0)) for box in group.iter(f"{SVG}rect")]  # type: ignore[union-attr]
        for group in groups
    }


def test_each_layer_is_a_bar_of_its_bits() -> None:
    data = made(coded=True, joint=True)
    data.ranks[1] = [GroupLayout((0, 1), CodedRow(n16=2, n8=4, n4=8, scaled=True), None)] * 2
    found = bars(drawn(data, "layers"))
    one = "KV heads 0, 1: 28 of 128 channels, 192 of 2048 bits (4x16 8x8 16x4)"
    assert next(iter(found)) == f"layer 0: {one}; {one}"
    whole, half = list(found.values())[:2]
    assert len(whole) == 3  # channels of 16, 8 and 4 bits, which take the same here
    assert whole[0] == pytest.approx(whole[1], abs=0.2) == pytest.approx(whole[2], abs=0.2)
    assert sum(half) == pytest.approx(sum(whole) / 2, abs=0.3)
    assert [text for text in texts(drawn(data, "layers")) if "bits" in text][:3] == ["16 bits", "8 bits", "4 bits"]


def test_keys_and_values_are_parts_of_one_bar() -> None:
    keys, values = next(iter(bars(drawn(made(), "layers")).values()))
    assert keys == pytest.approx(3 * values, abs=0.3)  # 24 and 8 channels
    assert {"keys", "values"} <= set(texts(drawn(made(), "layers")))


def test_many_layers_stay_short() -> None:
    height = float(drawn(made(80), "layers").get("viewBox", "").split()[3])
    assert height < 600


def test_layers_are_told_apart_by_a_scale() -> None:
    colours = layer_colours(80)
    assert len(set(colours)) == 80
    picture = drawn(made(80), "spectra-qk")
    lines = [line.get("style") for line in picture.iter(f"{SVG}polyline")]
    assert lines == [f"fill:none;stroke:{colour}" for colour in colours]
    scale = [box.get("style") for box in picture.iter(f"{SVG}rect") if box.get("width") == "10"]
    assert scale == [f"fill:{colour}" for colour in colours]
    assert "layer" in texts(picture)
    assert not any(box.get("width") == "10" for box in drawn(made(1), "spectra-vo").iter(f"{SVG}rect"))


def test_ticks_are_round_and_within_the_axis() -> None:
    for low, high in ((0, 1), (0.795, 0.924), (0, 1724), (0.44, 0.46), (3, 70000)):
        axis = Axis.linear(low, high, "")
        values = [value for value, _ in axis.ticks]
        assert 2 <= len(values) <= 7
        assert all(low <= value <= high for value in values)
        steps = {round((b - a) / (high - low), 6) for a, b in pairwise(values)}
        assert len(steps) == 1


def test_words_are_escaped() -> None:
    chart = Chart(Axis.linear(0, 1, "<x>"), Axis.linear(0, 1, "a & b"))
    chart.legend("<script>", "red")
    chart.dot((0.5, 0.5), "red", "1 < 2")
    picture = ElementTree.fromstring(chart.svg('"quoted"'))
    assert {"<x>", "a & b", "<script>"} <= set(texts(picture))
    assert picture.get("aria-label") == '"quoted"'


def page_of(data: ReportData) -> Page:
    return Page(render(data, figures(data)))


def test_what_is_kept_has_its_denominators() -> None:
    text = " ".join(page_of(made()).text.split())
    for said in ("24/64", "8/64", "accuracy, search split", "accuracy, report split"):
        assert said in text
    assert f"Uncompressed, a layer has {2 * 2 * 64 * 16:,}." in text
    coded = page_of(made(coded=True)).text
    for said in ("28/64", "4x16 8x8 16x4", f"{4 * 16 + 8 * 8 + 16 * 4}/{64 * 16}"):
        assert said in coded
    joint = page_of(made(coded=True, joint=True)).text
    assert "keys and values" in joint
    assert "28/128" in joint


def test_no_card_is_empty() -> None:
    """A figure without data is a line with its reason, in one card, not a card of its own."""
    data = made()
    data.points, data.ranks, data.head_dims = [], [], []
    data.absent = {"points": "Nothing was measured.", "ranks": "Nothing was measured."}
    page = page_of(data)
    sections = [attributes["id"] for tag, attributes in page.tags if tag == "section"]
    assert sections == ["spectra", "next", "absent", "recipe"]
    assert page.text.count("Nothing was measured.") == 1
