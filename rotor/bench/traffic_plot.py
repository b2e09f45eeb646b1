"""A plot of the bytes on the wire over the number of processes, and of their predicted time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..installing import pip_install
from ..report.style import MARKERS, STYLE


def write_traffic_plot(result: dict[str, Any], path: Path) -> None:
    """Draw what `measure_traffic` found.

    Raises:
        UsageError: matplotlib is not installed, or it cannot write such a file.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError(
            "plots need matplotlib, which is not installed.", f"Run `{pip_install('plots')}`, or leave --plot out."
        ) from error
    entries = result["counted"]
    counts = [entry["processes"] for entry in entries]
    titles = [
        "sent by all processes, counted",
        f"predicted, {result['rates']['device']}'s links",
        f"predicted, Ethernet of {8 * result['rates']['ethernet_bytes_per_s'] / 1e9:g} Gb/s",
    ]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12, 4), dpi=120)
        panels = figure.subplots(1, 3)
        for index, (name, label) in enumerate(result["labels"].items()):
            line = {"marker": MARKERS[index], "color": f"C{index}", "label": label}
            bytes_a_token = [entry[name]["bytes"] / result["tokens"] for entry in entries]
            panels[0].plot(counts, bytes_a_token, **line)
            for axes, link in zip(panels[1:], ("link", "ethernet"), strict=True):
                seconds = [1e6 * entry[name]["predicted_s"][link] / result["tokens"] for entry in entries]
                axes.plot(counts, seconds, **line)
        for axes, title in zip(panels, titles, strict=True):
            unit = "bytes a token of the prompt" if axes is panels[0] else "microseconds a token of the prompt"
            axes.set(title=title, xlabel="processes", ylabel=unit, yscale="log")
            axes.set_xscale("log", base=2)
            axes.set_xticks(counts, [str(count) for count in counts])
        panels[0].legend(fontsize=8)
        try:
            figure.savefig(path)
        except (OSError, ValueError) as error:
            raise UsageError(f"--plot {path}: {error}.", "Give a path that ends in .png, .svg or .pdf.") from error
