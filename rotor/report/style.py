"""How all plots look."""

from __future__ import annotations

from typing import Any

STYLE: dict[Any, Any] = {
    "figure.constrained_layout.use": True,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 10,
    "svg.hashsalt": "rotor",
}

MARKERS = "osD^vPX*<>"
"""Of the lines of a plot, in turn."""
