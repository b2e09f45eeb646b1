"""The picture of the part `tiers`."""

from __future__ import annotations

from typing import Any

from ..report.style import MARKERS
from .peers import PeerRecord
from .tiers_part import LIMITS
from .tiers_tables import KINDS, by_distance


def draw_tiers(figure: Any, recipes: dict[str, dict[str, Any]]) -> bool:
    """Draw what was measured of each recipe, a row of axes each, into a matplotlib figure; false if there is nothing.

    Args:
        recipes: see tiers_of_recipes.
    """
    shown = {name: found for name, found in recipes.items() if found["records"]}
    if not shown:
        return False
    figure.suptitle("ratios per token (ZDC section 5.2)")
    figure.set_figheight(len(shown) * figure.get_figheight())
    axes = figure.subplots(len(shown), 5, squeeze=False)
    for row, (name, found) in zip(axes, shown.items(), strict=True):
        if {"layers", "shares", "ratios", "choices"} <= set(found):
            _repetition(row[0], found["layers"])
            _sweeps(row[1], found["shares"], found["ratios"])
            _choices(row[2], found["choices"])
        else:
            for empty in row[:3]:
                empty.set_axis_off()
        _records(row[3], found["records"])
        _ways(row[4], found["records"])
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


def _records(axes: Any, records: dict[str, PeerRecord]) -> None:
    for index, (kind, found) in enumerate(_by_kind(records).items()):
        points = sorted((one.mean_kv_bytes_per_token, one.kl_div) for one in found)
        x, y = (list(column) for column in zip(*points, strict=True))
        _line(axes, index, x, y, kind, linestyle=":")
    axes.set(xlabel="bytes of cache per token", ylabel="KL divergence (nats per token)", yscale="log")
    _legend(axes)


def _ways(axes: Any, records: dict[str, PeerRecord]) -> None:
    """What each way of telling important tokens leaves at equal bytes (ZDC figure 17 in shape: its times of score sums
    and of softmax denominators are there in place of what their choices are worth)."""
    kinds = {kind: found[0] for kind, found in _by_kind(records).items()}
    kept = {
        "perplexity": [one.ppl_ratio for one in kinds.values()],
        **{
            task: [one.answers.get(task, 0.0) for one in kinds.values()]
            for task in dict.fromkeys(task for one in kinds.values() for task in one.answers)
        },
    }
    width = 0.8 / len(kept)
    for index, (what, values) in enumerate(kept.items()):
        places = [place + (index - (len(kept) - 1) / 2) * width for place in range(len(kinds))]
        axes.barh(places, values, height=width, color=f"C{index}", label=what)
    axes.set_yticks(
        range(len(kinds)), [f"{kind}\n{one.mean_kv_bytes_per_token:.0f} bytes" for kind, one in kinds.items()]
    )
    axes.tick_params(axis="y", labelsize=7)
    axes.invert_yaxis()
    axes.set(xlabel="share of the uncompressed model's", title="at equal bytes (figure 17)")
    axes.legend(fontsize=7)


def _by_kind(records: dict[str, PeerRecord]) -> dict[str, list[PeerRecord]]:
    """Those that were measured, by what they are."""
    found: dict[str, list[PeerRecord]] = {}
    for label, one in records.items():
        if not one.skipped:
            found.setdefault(label.partition(", ")[2], []).append(one)
    return found
