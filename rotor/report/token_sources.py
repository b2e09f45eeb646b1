"""What a study found about sources of calibration tokens, for a report's page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..bases.registry import sides_that_read_tokens
from ..format.file_names import RESULTS
from ..format.json_files import read_json
from .data import SIDES, ReportData


def add_study(data: ReportData, study: Path | None) -> None:
    """The comparison of token sources from a study's records."""
    if study is None:
        how = "`rotor study MODEL --parts sources,tokens -o STUDY` compares token sources"
        data.absent["tokens"] = f"No study was given: {how}, `rotor report RUN --study STUDY` shows it."
        return
    found = read_json(study / RESULTS, "Give a folder that `rotor study` wrote.")
    records = found.get("records", {})
    settings = found.get("settings", {}).get("recipes", {})
    for key, record in records.items():
        part, _, recipe = key.partition("/")
        if part == "sources":
            reading = _token_sides(settings.get(recipe, {}))
            for pair in record["pairs"]:
                ratios = (f"{100 * pair[side]['ratio']:.2f} %" if side in reading else "-" for side in SIDES)
                data.token_pairs.append((recipe, pair["a"], pair["b"], *ratios))
        elif part == "tokens" and "report" in record:
            row = (record["recipe"], record["source"], str(record["count"]), f"{record['stored']:.3f}")
            data.token_counts.append((*row, f"{record['report']['kl_div']:.5f}", f"{record['report']['accuracy']:.4f}"))
    if not data.token_pairs and not data.token_counts:
        data.absent["tokens"] = f"The study {study.resolve().name} has no part `sources` or `tokens`."


def _token_sides(settings: dict[str, Any]) -> tuple[str, ...]:
    """The sides that a recipe's tokens decide; all where its settings are not known."""
    bases = settings.get("bases", {})
    return sides_that_read_tokens(str(bases.get("qk")), str(bases.get("vo")))
