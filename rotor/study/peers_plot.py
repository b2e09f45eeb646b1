"""The picture of the peers: KL and each accuracy against bytes per token, with the Pareto front drawn."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

from ..report.style import MARKERS
from .peers import PeerRecord

LEAST_KL = 1e-5
"""Where the axis of KL begins; what is closer is drawn there."""

COLOURS = 10
"""In matplotlib's cycle."""

Size = Literal["kv_bytes_per_token", "mean_kv_bytes_per_token", "long_kv_bytes_per_token"]


def draw_peers(figure: Any, records: Sequence[PeerRecord], size: Size = "mean_kv_bytes_per_token") -> bool:
    """Draw records that were measured into a matplotlib figure; false if there are none.

    Records of a family (their names without bits) share a colour and a marker.

    Args:
        size: which bytes of a record. The mean is of the lengths at which fidelity was measured, so that tokens that
            are not yet coded count where they help.
    """
    measured = [record for record in records if not record.skipped]
    if not measured:
        return False
    figure.suptitle("fidelity against bytes of the KV cache")
    tasks = list(dict.fromkeys(task for record in measured for task in record.answers))
    panels: list[tuple[str, Callable[[PeerRecord], float | None], bool]] = [
        ("KL divergence (nats per token)", lambda r: max(r.kl_div, LEAST_KL), False),
        ("next-token accuracy (ratio)", lambda r: r.token_accuracy, True),
        ("perplexity (ratio)", lambda r: r.ppl_ratio, True),
        *((f"{task}: probability of answers (ratio)", _answers(task), True) for task in tasks),
    ]
    columns = 2 if len(panels) <= 4 else 3
    axes = figure.subplots(-(-len(panels) // columns), columns, squeeze=False).flatten()
    for axis, (label, value, higher) in zip(axes, panels, strict=False):
        _panel(axis, measured, size, value, higher)
        axis.set(xlabel="bytes of cache per token", ylabel=label)
    axes[0].set_yscale("log")
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
    return True


def pareto_front(points: Sequence[tuple[float, float]], higher: bool) -> list[tuple[float, float]]:
    """The points (bytes, value) that no other equals or beats in both, in ascending order of bytes.

    Args:
        higher: whether a higher value is better.
    """
    front: list[tuple[float, float]] = []
    for size, value in sorted(points, key=lambda point: (point[0], -point[1] if higher else point[1])):
        if not front or (value > front[-1][1] if higher else value < front[-1][1]):
            front.append((size, value))
    return front


def family(name: str) -> str:
    """What records of one method have in common in their names: `KIVI-2` and `KIVI-4` are KIVI.

    A recipe's own number stays: `rotor-16, 320 bytes` is rotor-16.
    """
    short = re.sub(r", \d+ (bits|bytes)", "", name)
    return short if short != name else re.sub(r"-\d+$", "", name)


def _answers(task: str) -> Callable[[PeerRecord], float | None]:
    return lambda record: record.answers.get(task)


def _panel(
    axis: Any,
    records: Sequence[PeerRecord],
    size: Size,
    value: Callable[[PeerRecord], float | None],
    higher: bool,
) -> None:
    families: dict[str, list[tuple[float, float]]] = {}
    for record in records:
        found = value(record)
        if found is not None:
            families.setdefault(family(record.name), []).append((getattr(record, size), found))
    for index, (name, points) in enumerate(families.items()):
        x, y = zip(*sorted(points), strict=True)
        # Of more families than colours, the same colour comes with another marker.
        marker = MARKERS[(index + index // COLOURS) % len(MARKERS)]
        axis.plot(x, y, marker=marker, markersize=5, color=f"C{index % COLOURS}", label=name, linestyle=":")
    front = pareto_front([point for points in families.values() for point in points], higher)
    axis.step(*zip(*front, strict=True), where="post", color="0.3", linewidth=1, label="Pareto front", zorder=0)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:.0f}")
