"""Write the tables of a study: summary.md and CSV files."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from ...checkpoint.files import write_text
from ...recipe.metric_registry import metric_info
from .part import CsvRow, Part
from .store import StudyStore

SUMMARY = "summary.md"


def write_tables(store: StudyStore, parts: Sequence[Part]) -> list[Path]:
    """Write CSV files of the parts that have records, and the summary; returns the files."""
    files = {}
    for name in dict.fromkeys(part.csv for part in parts if part.csv):
        rows = [row for part in parts if part.csv == name for row in part.rows(store)]
        if rows:
            files[store.folder / name] = _csv_text(rows)
    tables = (table for part in parts for table in part.tables(store))
    lines = [*_introduction(store), *(line for table in tables for line in table.lines())]
    files[store.folder / SUMMARY] = "\n".join(lines) + "\n"
    for path, text in files.items():
        write_text(path, text)
    return list(files)


def _csv_text(rows: Sequence[CsvRow]) -> str:
    """CSV text with a column for each key of any row; None and missing values are empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _introduction(store: StudyStore) -> list[str]:
    settings = store.settings
    evaluation = settings["evaluation"]
    return [
        f"# Study of {settings['model']['name']}",
        "",
        f"{settings['tokens']['count']} calibration tokens in rows of {settings['tokens']['seq_len']}, seed "
        f"{settings['tokens']['seed']}; measured in {settings['dtype']} on {evaluation['source']} text, "
        f"{evaluation['search_tokens']} tokens to search and {evaluation['report_tokens']} to report. Accuracy is "
        f"{metric_info(evaluation['metric']).description}. Compression is the share of the KV cache removed, "
        "as stored.",
    ]
