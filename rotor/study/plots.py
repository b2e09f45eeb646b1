"""Plots of a study, as PNG and SVG. matplotlib is imported when it is needed."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..installing import pip_install
from ..report.style import MARKERS, STYLE
from .caches_plot import draw_budgets, draw_combine, draw_evict, draw_quantise
from .curves_plot import Quantity, draw_curves, draw_spectra
from .peers_part import peer_records
from .peers_plot import draw_peers
from .quantities import quantity
from .store import StudyStore
from .tables import SIDE_LABELS, Curves, ablation_curves, curves
from .tiers_plot import draw_tiers
from .tiers_tables import tiers_of_recipes

FOLDER = "plots"
SIZES = {
    "peers": (15.0, 8.5),
    "combine": (17.0, 9.0),
    "tiers": (25.0, 4.8),
    **dict.fromkeys(("quantise", "evict", "budgets"), (16.0, 5.0)),
}
"""Inches of the plots that have more than two axes."""


def require_matplotlib() -> None:
    """Raises UsageError, naming the command that installs it, if matplotlib is not there."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "plots need matplotlib, which is not installed.",
            f"Run `{pip_install('plots')}`, or give --no-plots.",
        ) from error


def write_plots(store: StudyStore) -> list[Path]:
    """Draw what the store has records for; returns the files.

    Raises:
        UsageError: matplotlib is not installed.
    """
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    files: list[Path] = []
    of = partial(quantity, store)
    with matplotlib.rc_context(STYLE):
        for name, draw in (
            ("recipes", lambda figure: draw_curves(figure, curves(store, "curves"))),
            ("ablation", lambda figure: draw_curves(figure, ablation_curves(store))),
            ("spectra", lambda figure: _draw_spectra(figure, curves(store, "curves"), of)),
            ("tokens", lambda figure: _draw_tokens(figure, store.part("tokens"))),
            ("degradation", lambda figure: _draw_degradation(figure, store.part("degradation"))),
            ("front", lambda figure: _draw_front(figure, store.part("front"))),
            ("peers", lambda figure: draw_peers(figure, peer_records(store))),
            ("tiers", lambda figure: draw_tiers(figure, tiers_of_recipes(store))),
            ("quantise", lambda figure: draw_quantise(figure, store)),
            ("evict", lambda figure: draw_evict(figure, store)),
            ("budgets", lambda figure: draw_budgets(figure, store)),
            ("combine", lambda figure: draw_combine(figure, store)),
        ):
            figure = Figure(figsize=SIZES.get(name, (11, 4.5)), dpi=120)
            if draw(figure):
                figure.suptitle(f"{store.settings['model']['name']}: {figure.get_suptitle()}")
                files += _save(figure, store.folder / FOLDER / name)
    return files


def _save(figure: Any, stem: Path) -> list[Path]:
    stem.parent.mkdir(parents=True, exist_ok=True)
    files = [stem.with_suffix(".png"), stem.with_suffix(".svg")]
    figure.savefig(files[0])
    figure.savefig(files[1], metadata={"Date": None})
    return files


def _line(axes: Any, index: int, x: list[float], y: list[float], label: str, **options: Any) -> None:
    axes.plot(x, y, marker=MARKERS[index % len(MARKERS)], markersize=5, color=f"C{index % 10}", label=label, **options)


def _legend(axes: Any, **options: Any) -> None:
    """A legend inside the axes that the layout does not make room for, however many entries it has."""
    axes.legend(fontsize=8, **options).set_in_layout(False)


def _draw_spectra(figure: Any, found: Curves, of: Quantity) -> bool:
    figure.suptitle("mean singular values of the groups")
    return draw_spectra(figure, {name: r["spectra"] for name, r in found.items() if "spectra" in r}, of)


def _draw_tokens(figure: Any, records: dict[str, dict[str, Any]]) -> bool:
    """KL at a fixed compression, and delta over epsilon of the query/key bases, by number of tokens."""
    series: dict[str, list[tuple[int, float, float]]] = {}
    for key, record in records.items():
        if "skipped" not in record:
            name = f"{record['recipe']}, {record['source']}, p = {float(key.rpartition('/p')[2]):g}"
            kl, ratio = record["report"]["kl_div"], record["bases"]["qk"]["ratio"]
            series.setdefault(name, []).append((record["count"], max(kl, 1e-7), 100 * ratio))
    if not series:
        return False
    figure.suptitle("error against the number of calibration tokens")
    divergence, distance = figure.subplots(1, 2)
    for index, (name, values) in enumerate(series.items()):
        count, kl, ratio = (list(column) for column in zip(*sorted(values), strict=True))
        _line(divergence, index, count, kl, name)
        _line(distance, index, count, ratio, name)
    for axes in (divergence, distance):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set_xlabel("calibration tokens")
    divergence.set_yscale("log")
    divergence.set_ylabel("KL divergence (nats per token)")
    distance.set_ylabel("delta / epsilon of QK against other text (%)")
    distance.set_ylim(bottom=0)
    _legend(divergence)
    return True


def _draw_degradation(figure: Any, records: dict[str, dict[str, Any]]) -> bool:
    if not records:
        return False
    figure.suptitle("degradation of the attention outputs, one side compressed (ZDC figure 14)")
    recipes = list(dict.fromkeys(key.split("/")[0] for key in records))
    for axes, (side, label) in zip(figure.subplots(1, 2, sharey=True), SIDE_LABELS.items(), strict=True):
        for index, recipe in enumerate(recipes):
            found = [r for key, r in records.items() if key.startswith(f"{recipe}/{side}/")]
            x = [r["p"] for r in found]
            _line(axes, index, x, [r["calibration"] for r in found], f"{recipe}, text calibrated on")
            means = [sum(r["held_out"]) / len(r["held_out"]) for r in found]
            _line(axes, index, x, means, f"{recipe}, other text", linestyle="--", fillstyle="none")
        axes.set(title=label, xlabel="p of this side (share of the columns removed)")
    figure.axes[0].set_ylabel("relative difference of the outputs")
    _legend(figure.axes[0])
    return True


def _draw_front(figure: Any, records: dict[str, dict[str, Any]]) -> bool:
    """Predicted time against bytes, both as shares of the uncompressed model; one line for each target accuracy."""
    series: dict[str, list[tuple[float, float, float]]] = {}
    for key, record in records.items():
        for target, point in record["targets"].items():
            if "out_of_reach" not in point:
                name = f"{key.split('/')[0]} at {float(target):g}"
                series.setdefault(name, []).append((record["weight"], point["bytes_share"], point["time_share"]))
    if not series:
        return False
    record = next(iter(records.values()))
    figure.suptitle(
        f"cache against predicted decode time on {record['device']}, {record['context_tokens']} tokens of context, "
        f"batch {record['batch_size']}"
    )
    axes = figure.subplots()
    for index, (name, values) in enumerate(series.items()):
        weights, x, y = (list(column) for column in zip(*sorted(values), strict=True))
        _line(axes, index, x, y, name, linestyle=":")
        at: dict[tuple[float, float], list[str]] = {}
        for weight, place in zip(weights, zip(x, y, strict=True), strict=True):
            at.setdefault(place, []).append(f"{weight:g}")
        for place, labels in at.items():
            axes.annotate(", ".join(labels), place, textcoords="offset points", xytext=(5, 5), fontsize=8)
    axes.set(xlabel="bytes of cache per token (share of the uncompressed model)")
    axes.set(ylabel="predicted attention time (share)")
    _legend(axes, title="numbers: weight of latency", title_fontsize=8)
    return True
