"""What the report's pictures show: axes that zoom to what matters, crossings, denominators, colours for many layers."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="figures need matplotlib")

from matplotlib.figure import Figure
from support.pages import Page

from rotor.checkpoint.layout import GroupLayout
from rotor.checkpoint.rows import CodedRow, NumberRow
from rotor.recipe.reading import load_recipe
from rotor.search.evaluation.accuracy import Fidelity
from rotor.search.point import Point
from rotor.search.report.data import ReportData
from rotor.search.report.figures import LOSS_FLOOR, _drawings, figures, layer_colours, shown_loss
from rotor.search.report.report import render


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


def drawn(data: ReportData, name: str) -> Any:
    figure = Figure(figsize=(4.4, 3.2))
    _drawings(data)[name][0](figure)
    figure.canvas.draw()
    return figure


def test_accuracy_is_logarithmic_in_what_is_lost() -> None:
    """Best at the top; as much room from 0.9 to 0.99 as from 0.99 to 0.999; the uncompressed model and the target."""
    axes = drawn(made(), "points").axes[0]
    assert axes.get_yscale() == "log"
    assert axes.yaxis_inverted()
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert {"0.99", "0.95", "0.9", "≥ 0.9995"} <= set(labels)
    assert "0.5" not in labels  # nothing lies there
    places = {a: axes.transData.transform((0, shown_loss(a)))[1] for a in (0.9, 0.99, 0.999)}
    assert places[0.99] - places[0.9] == pytest.approx(places[0.999] - places[0.99])
    assert shown_loss(1.02) == shown_loss(1.0) == LOSS_FLOOR
    assert shown_loss(-0.5) == 1
    marks = {tuple(map(float, xy)) for line in axes.lines for xy in zip(*line.get_data(), strict=True)}
    assert (0.0, LOSS_FLOOR) in marks
    levels = [float(line.get_ydata()[0]) for line in axes.lines if line.get_linestyle() == ":"]
    assert levels == pytest.approx([shown_loss(0.99)])


def test_a_long_title_is_not_clipped() -> None:
    data = made()
    data.spectra_of["qk"] = "blocks of 64, 13 fast planes or blocks of 64, 32 fast planes, 8 heads a group"
    figure = drawn(data, "spectra-qk")
    title = figure.axes[0].title.get_window_extent()
    assert figure.bbox.x0 <= title.x0
    assert title.x1 <= figure.bbox.x1


def test_layers_are_told_apart_by_a_scale() -> None:
    layers, colours = 80, layer_colours(80)
    assert len(set(colours)) == layers
    figure = drawn(made(layers), "spectra-qk")
    lines = [line for line in figure.axes[0].lines if line.get_marker() == "None"]
    assert [line.get_color() for line in lines] == colours
    scale = figure.axes[1]
    assert scale.get_ylim() == (-0.5, layers - 0.5)
    assert all(float(tick) == int(tick) for tick in scale.get_yticks())
    assert len(scale.get_yticks()) <= 10
    assert scale.get_ylabel() == "layer"
    assert len(drawn(made(1), "spectra-vo").axes) == 1  # one layer needs no scale


def page_of(data: ReportData) -> Page:
    return Page(render(data, figures(data)))


def test_ranks_have_their_denominators() -> None:
    text = " ".join(page_of(made()).text.split())
    for said in ("24/64", "8/64", "accuracy, search split", "accuracy, report split"):
        assert said in text
    coded = Page(render(made(coded=True), None))
    assert "28/64" in coded.text
    assert "4x16 8x8 16x4" in coded.text
    assert f"{4 * 16 + 8 * 8 + 16 * 4}/{64 * 16} bits" in coded.text
    shares = [a["style"] for tag, a in coded.tags if tag == "td" and "style" in a]
    assert set(shares) == {"--share: 1.000"}
    few = CodedRow(n16=2, n8=4, n4=8)
    mixed = made(coded=True)
    mixed.ranks[1] = [GroupLayout((0, 1), few, few)] * 2
    shares = [a["style"] for tag, a in Page(render(mixed, None)).tags if tag == "td" and "style" in a]
    assert set(shares) == {"--share: 1.000", "--share: 0.500"}  # of the most in any cell
    joint = render(made(coded=True, joint=True), None)
    assert "latents of keys and values together" in joint
    assert "value latents" not in joint


def test_no_card_is_empty() -> None:
    """What there is nothing of is a line with its reason, in one card, not a card of its own."""
    data = made()
    data.points, data.ranks, data.head_dims = [], [], []
    data.absent = {"points": "Nothing was measured.", "ranks": "Nothing was measured."}
    page = page_of(data)
    sections = [attributes["id"] for tag, attributes in page.tags if tag == "section"]
    assert sections == ["spectra", "next", "absent", "recipe"]
    assert page.text.count("Nothing was measured.") == 1
