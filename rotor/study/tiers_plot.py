"""The picture of the part `tiers`."""

from __future__ import annotations

from typing import Any

from ..report.style import MARKERS
from .tiers_part import COMPARED, LIMITS
from .tiers_tables import KINDS, by_distance


def draw_tiers(figure: Any, recipes: dict[str, dict[str, Any]]) -> bool:
    """Draw what was measured of each recipe, a row of axes each, into a matplotlib figure; false if there is nothing.

    Args:
        recipes: see tiers_of_recipes.
    """
    complete = {
        name: found for name, found in recipes.items() if {"layers", "shares", "ratios", "choices"} <= set(found)
    }
    if not complete:
        return False
    figure.suptitle("ratios per token (ZDC section 5.2)")
    axes = figure.subplots(len(complete), 4, squeeze=False)
    for row, (name, found) in zip(axes, complete.items(), strict=True):
        _repetition(row[0], found["layers"])
        _sweeps(row[1], found["shares"], found["ratios"])
        _choices(row[2], found["choices"])
        _records(row[3], found["records"])
        row[0].set_title(name)
    return True


def _line(axes: Any, index: int, x: list[float], y: list[float], label: str, **options: Any) -> None:
    axes.plot(x, y, marker=MARKERS[index % len(MARKERS)], markersize=5, color=f"C{index % 10}", label=label, **options)


def _legend(axes: Any) -> None:
    if axes.lines:
        axes.legend(fontsize=7)


def _repetition(axes: Any, record: dict[str, Any]) -> None:
    for index, (measure, both) in enumerate(record["repetition"].items()):
        for which, style in (("most", "-"), ("least", "--")):
            found = by_distance(both[which])
            _line(axes, index, list(found), list(found.values()), f"{measure}, {which}", linestyle=style)
    axes.axhline(0.95, color="0.5", linewidth=1)
    axes.axhline(record["share"], color="0.5", linewidth=1, linestyle=":")
    axes.set(xlabel="layers apart", ylabel="tokens shared (lines: 0.95, chance)", ylim=(0, 1))
    _legend(axes)


def _sweeps(axes: Any, shares: dict[str, Any], ratios: dict[str, Any]) -> None:
    series = {"g, at p = 0.4 and 0.7": list(shares.values())}
    for side, label in (("qk", "p of keys, all tokens"), ("v", "p of values, all tokens")):
        series[label] = [one for name, one in ratios.items() if name.startswith(f"{side} ")]
    for index, (label, found) in enumerate(series.items()):
        _line(axes, index, [one["removed"] for one in found], [max(one["degradation"], 1e-4) for one in found], label)
    axes.set(xlabel="share of the rows removed", ylabel="Q_d", yscale="log")
    _legend(axes)


def _choices(axes: Any, record: dict[str, Any]) -> None:
    for index, kind in enumerate(KINDS):
        found = [record[f"{limit:g}"][kind] for limit in LIMITS]
        points = [(one["degradation"], one["removed"]) for one in found if one is not None]
        if points:
            x, y = (list(column) for column in zip(*sorted(points), strict=True))
            _line(axes, index, x, y, kind, linestyle=":")
    axes.set(xlabel="Q_d measured", ylabel="share of the rows removed", xscale="log")
    _legend(axes)


def _records(axes: Any, records: dict[str, Any]) -> None:
    kinds = list(dict.fromkeys(label.partition(", ")[2] for label in records))
    for index, kind in enumerate(kinds):
        found = [records.get(f"Q_d {limit:g}, {kind}") for limit in COMPARED]
        points = [(one.mean_kv_bytes_per_token, one.kl_div) for one in found if one is not None and not one.skipped]
        if points:
            x, y = (list(column) for column in zip(*sorted(points), strict=True))
            _line(axes, index, x, y, kind, linestyle=":")
    axes.set(xlabel="bytes of cache per token", ylabel="KL divergence (nats per token)", yscale="log")
    _legend(axes)
