"""Pictures of a study's parts about caches: quantisers, eviction, budgets of layers, and what is combined."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..report.style import MARKERS
from .cache_plans import BUDGET_SHARES, SHARES, ablations, budget_methods, evictions
from .cache_tables import cache_records
from .caches_part import COSINES, of_budget, of_share
from .peers import PeerRecord
from .peers_plot import LEAST_KL, draw_peers

STEPPED = ("per token, 2 bits", "KCVT-2", "KIVI-2", "KVQuant-2", "GEAR-L KCVT-2", "GEAR KCVT-2", "GEAR KIVI-2")
"""Quantisers whose KL by step is drawn."""

ABLATED = "GEAR KCVT-2"


def draw_quantise(figure: Any, store: Any) -> bool:
    """KL against bytes, KL by step (GEAR figure 1b), and GEAR's ablations (figure 4a)."""
    named = _named(store, "quantise")
    if not named:
        return False
    figure.suptitle("quantised caches")
    size, step, ablated = figure.subplots(1, 3)
    changed = {name for of_name in ablations().values() for name in of_name}
    families: dict[str, list[PeerRecord]] = {}
    for name, record in named.items():
        if name not in changed:
            families.setdefault(name.rpartition("-")[0] or name.split(",")[0], []).append(record)
    for index, (name, records) in enumerate(families.items()):
        _line(size, index, [(r.mean_kv_bytes_per_token, _kl(r)) for r in records], name)
    for index, name in enumerate(STEPPED):
        if name in named and named[name].kl_by_step:
            steps = [(i + 1.0, max(kl, LEAST_KL)) for i, kl in enumerate(named[name].kl_by_step)]
            _line(step, index, steps, name)
    for index, (parameter, of_name) in enumerate(ablations().items()):
        records = [named[name] for name in (ABLATED, *of_name) if name in named]
        _line(ablated, index, [(r.mean_kv_bytes_per_token, _kl(r)) for r in records], parameter)
    size.set(
        xlabel="bytes of cache per token, mean over lengths", ylabel="KL divergence (nats per token)", yscale="log"
    )
    step.set(xlabel="scored tokens, from the first eighth to the last", yscale="log")
    ablated.set(xlabel="bytes of cache per token", title=f"{ABLATED} with other values", yscale="log")
    _legends(size, step, ablated)
    return True


def draw_evict(figure: Any, store: Any) -> bool:
    """KL and answers against the share of a prompt's tokens that is kept."""
    named = _named(store, "evict")

    def series(value: Callable[[PeerRecord], float | None]) -> dict[str, list[tuple[float, float]]]:
        return {
            method: _points((share, named.get(of_share(method, share)), value) for share in SHARES)
            for method in evictions(SHARES[0])
        }

    return _panels(figure, named, series, "evicted tokens", "share of the prompt's tokens kept")


def draw_budgets(figure: Any, store: Any) -> bool:
    """Cosines by layer and token (SqueezeAttention figure 2), and accuracy against the budget (figure 3)."""
    named, known = _named(store, "budgets"), store.get(f"budgets/{COSINES}")
    if not named or known is None:
        return False
    figure.suptitle("budgets of layers")
    heat, *rest = figure.subplots(1, 3)
    image = heat.imshow(known["cosines"], aspect="auto", interpolation="nearest", cmap="viridis")
    heat.set(xlabel="tokens of a prompt, in sixteenths", ylabel="layer", title="cosine before and after attention")
    heat.grid(False)
    figure.colorbar(image, ax=heat)
    values: list[tuple[str, Callable[[PeerRecord], float]]] = [
        ("next-token accuracy (ratio)", lambda r: r.token_accuracy),
        ("KL divergence (nats per token)", _kl),
    ]
    for axes, (label, value) in zip(rest, values, strict=True):
        for index, method in enumerate(budget_methods(BUDGET_SHARES[0])):
            for how, style in (("alike", "-"), ("SqueezeAttention", "--"), ("by sensitivity", "")):
                found = ((share, named.get(of_budget(method, how, share)), value) for share in BUDGET_SHARES)
                _line(
                    axes,
                    index,
                    _points(found),
                    f"{method}, {how}",
                    linestyle=style,
                    mfc="none" if style == "--" else None,
                )
        axes.set(xlabel="budget (share of the prompt's tokens)", ylabel=label)
    rest[0].axhline(1.0, color="0.5", linewidth=1, linestyle=":", label="full cache")
    rest[1].set_yscale("log")
    _legends(rest[0])
    return True


def draw_combine(figure: Any, store: Any) -> bool:
    """Compressed rows alone, policies alone, and both: KL and accuracies against bytes of a complete row."""
    drawn = draw_peers(figure, cache_records(store, "combine"), "kv_bytes_per_token")
    if drawn:
        figure.suptitle("compressed rows with a policy on top, and each alone")
    return drawn


def _named(store: Any, part: str) -> dict[str, PeerRecord]:
    return {record.name: record for record in cache_records(store, part) if not record.skipped}


def _kl(record: PeerRecord) -> float:
    return max(record.kl_div, LEAST_KL)


Value = Callable[[PeerRecord], "float | None"]


def _points(found: Iterable[tuple[float, PeerRecord | None, Value]]) -> list[tuple[float, float]]:
    values = [(x, None if record is None else value(record)) for x, record, value in found]
    return [(x, y) for x, y in values if y is not None]


def _panels(
    figure: Any,
    named: Mapping[str, PeerRecord],
    series: Callable[[Value], dict[str, list[tuple[float, float]]]],
    title: str,
    label: str,
) -> bool:
    """KL, next-token accuracy, and the probability of each task's answers."""
    if not any(points for points in series(_kl).values()):
        return False
    figure.suptitle(title)
    tasks = list(dict.fromkeys(task for record in named.values() for task in record.answers))
    values: list[tuple[str, Value]] = [
        ("KL divergence (nats per token)", _kl),
        ("next-token accuracy (ratio)", lambda record: record.token_accuracy),
        *((f"{task}: probability of answers (ratio)", _answers(task)) for task in tasks),
    ]
    panels = figure.subplots(1, len(values))
    for axes, (name, value) in zip(panels, values, strict=True):
        for index, (method, points) in enumerate(series(value).items()):
            _line(axes, index, points, method)
        axes.set(xlabel=label, ylabel=name)
    panels[0].set_yscale("log")
    _legends(panels[0])
    return True


def _answers(task: str) -> Value:
    return lambda record: record.answers.get(task)


def _line(axes: Any, index: int, points: Sequence[tuple[float, float]], label: str, **style: Any) -> None:
    if not points:
        return
    x, y = zip(*sorted(points), strict=True)
    marker, colour = MARKERS[index % len(MARKERS)], f"C{index % 10}"
    axes.plot(x, y, marker=marker, markersize=5, color=colour, label=label, **{"linestyle": ":", **style})


def _legends(*axes: Any) -> None:
    for one in axes:
        one.legend(fontsize=7).set_in_layout(False)
