"""A run of `rotor gpu` as Markdown: tables of what its records say."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Record = dict[str, Any]


def markdown(records: list[Record]) -> str:
    """All tables, of what there is."""
    parts = [_about(records), _times(records), _parts(records), _counters(records), _tests(records), _troubles(records)]
    return "\n\n".join(part for part in parts if part) + "\n"


def table(titles: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """Numbers as they are given."""
    lines = [" | ".join(titles), *(" | ".join(map(str, row)) for row in rows)]
    lines.insert(1, " | ".join("---" for _ in lines[0].split(" | ")))
    return "\n".join(f"| {line} |" for line in lines)


def _about(records: list[Record]) -> str:
    gpu = next((record["gpu"] for record in records if record.get("cuda")), None)
    if gpu is None:
        return "No CUDA device."
    lines = [f"# {gpu['name']}", ""]
    first = records[0]
    lines.append(f"{first.get('date')}, commit {first.get('commit')}, {first.get('versions')}")
    lines.append(f"Clocks and power: { {key: value for key, value in gpu.items() if '.' in key} }")
    for record in records:
        if rate := record.get("bytes_per_s"):
            lines.append(f"- {record['row']}: {rate / 1e12:.3f} TB/s")
        if rate := record.get("flop_per_s"):
            lines.append(f"- {record['row']}: {rate / 1e12:.0f} TFLOP/s")
    return "\n".join(lines)


SHAPE_OF = {"smollm2-135m": "smollm2-135m"}
"""The uncompressed layer that a layout is set beside, but for llama3-8b's."""


def _times(records: list[Record]) -> str:
    timed = [record for record in records if record["job"] == "times" and "seconds" in record]
    stock: dict[tuple[str, str], float] = {}
    for record in timed:
        if record["layout"].endswith(", uncompressed"):
            key = record["layout"].removesuffix(", uncompressed"), record["load"]
            stock[key] = min(stock.get(key, float("inf")), record["seconds"]["median"])
    rows: list[tuple[str, ...]] = []
    for record in timed:
        beside = stock.get((SHAPE_OF.get(record["layout"], "llama3-8b"), record["load"]))
        seconds, predicted = record["seconds"]["median"], record.get("predicted_s")
        moved = record.get("cache_bytes")
        rows.append((
            record["load"], record["layout"], record["row"], record.get("cache", ""), f"{1e6 * seconds:.1f}",
            "" if predicted is None else f"{1e6 * predicted:.1f}",
            "" if moved is None else f"{moved / seconds / 1e12:.2f}",
            "" if beside is None or record["layout"].endswith("uncompressed") else f"{seconds / beside:.2f}",
            f"{record['error']:.2g}" if isinstance(record.get("error"), float) else "",
        ))  # fmt: skip
    titles = "load", "layout", "row", "cache", "us", "predicted us", "TB/s", "over the faster SDPA", "error"
    return table(titles, sorted(rows)) if rows else ""


def _parts(records: list[Record]) -> str:
    with_parts = [record for record in records if record.get("parts")]
    names = sorted({name for record in with_parts for name in record["parts"]})
    rows = [
        (record["load"], record["layout"], record["cache"],
         *(f"{1e6 * record['parts'][name]:.1f}" if name in record["parts"] else "" for name in names))
        for record in with_parts
    ]  # fmt: skip
    return table(("load", "layout", "cache", *(f"{name} us" for name in names)), rows) if rows else ""


def _counters(records: list[Record]) -> str:
    rows = [
        (record["layout"], record["kernel"], kind, metric, f"{value:g}")
        for record in records
        for kind, metrics in record.get("counters", {}).items()
        for metric, value in metrics.items()
        if kind in ("instructions_per_cycle", "pipes", "stalls", "dram", "duration_ns") and value
    ]
    return table(("layout", "kernel", "of", "metric", "value"), rows) if rows else ""


def _tests(records: list[Record]) -> str:
    tests = [record for record in records if "test" in record]
    if not tests:
        return ""
    counts: dict[str, int] = {}
    for record in tests:
        counts[record["outcome"]] = counts.get(record["outcome"], 0) + 1
    lines = ["Tests: " + ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))]
    lines += [f"- {record['test']}: {_last(record['why'])}" for record in tests if record["outcome"] == "failed"]
    return "\n".join(lines)


def _troubles(records: list[Record]) -> str:
    lines = [f"- failed: {_place(record)}: {_last(record['failed'])}" for record in records if "failed" in record]
    skipped: dict[tuple[str, str], list[str]] = {}
    for record in records:
        if "skipped" in record:
            skipped.setdefault((record["job"], record["skipped"]), []).append(record["task"])
    lines += [
        f"- skipped: {job}" + (f", {len(tasks)} task(s)" if any(tasks) else "") + f": {why}"
        for (job, why), tasks in skipped.items()
    ]
    return "\n".join(lines)


def _place(record: Record) -> str:
    return ", ".join(filter(None, (record["job"], record["task"])))


def _last(text: str) -> str:
    """The last line of a traceback."""
    return text.strip().splitlines()[-1][:300] if text.strip() else ""
