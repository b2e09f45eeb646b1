"""A run of `python artifacts/gpu` as Markdown: tables of what its records say."""

from __future__ import annotations

import re
from collections.abc import Iterable

from .loads import FLASH_ROWS
from .plan import Record
from .subjects import model_of


def markdown(records: list[Record]) -> str:
    """All tables, of what there is."""
    tables = (_about, _times, _parts, _tuned, _model, _carried, _counters, _sanitizer, _tests, _troubles, _seconds)
    parts = [table(records) for table in tables]
    return "\n\n".join(part for part in parts if part) + "\n"


def table(titles: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
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


def _times(records: list[Record]) -> str:
    timed = [record for record in records if record["job"] == "times" and "seconds" in record]
    stock: dict[tuple[str, str], float] = {}
    fp8: dict[tuple[str, str], float] = {}
    for record in timed:
        if record["layout"].endswith(", uncompressed") and record["row"] != FLASH_ROWS[4]:
            key = record["layout"].removesuffix(", uncompressed"), record["load"]
            of = fp8 if record["row"] == FLASH_ROWS[8] else stock
            of[key] = min(of.get(key, float("inf")), record["seconds"]["median"])
    rows: list[tuple[str, ...]] = []
    for record in timed:
        place = model_of(record["layout"]), record["load"]
        beside, beside_fp8 = stock.get(place), fp8.get(place)
        seconds, predicted = record["seconds"]["median"], record.get("predicted_s")
        moved = record.get("cache_bytes")
        rows.append((
            record["load"], record["layout"], record["row"], record.get("cache", ""), f"{1e6 * seconds:.1f}",
            "" if predicted is None else f"{1e6 * predicted:.1f}",
            "" if moved is None else f"{moved / seconds / 1e12:.2f}",
            "" if beside is None or "SDPA" in record["row"] else f"{seconds / beside:.2f}",
            "" if beside_fp8 is None or "SDPA" in record["row"] else f"{seconds / beside_fp8:.2f}",
            f"{record['error']:.2g}" if isinstance(record.get("error"), float) else "",
        ))  # fmt: skip
    over = "over the fastest at 16 bits", "over fp8"
    titles = "load", "layout", "row", "cache", "us", "predicted us", "TB/s", *over, "error"
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


def _tuned(records: list[Record]) -> str:
    """The fastest of what was tried of each layer at each load, beside the layer's own, which is tried first."""
    rows = []
    for (layout, load), tried in tuned(records).items():
        own, best, absorbing = (tried.get(name) for name in ("own", "best", "absorbing"))
        if own is None or best is None:
            continue
        chosen = "materialise" if best.get("materialise") else _in_words(best)
        own_us, best_us = _us(own["seconds"]["median"]), _us(best["seconds"]["median"])
        row = [layout, load, _in_words(own), own_us, chosen, best_us]
        if absorbing is None:
            row += ["", ""]
        else:
            row += [", ".join(map(str, absorbing["absorbing"].values())), _us(absorbing["seconds"]["median"])]
        rows.append(row)
    titles = (
        "layout", "load", "own tile", "us", "fastest tile", "us", "absorb with it: blocks, warps, stages", "us",
    )  # fmt: skip
    note = "Tiles: keys x warps, stages; programs an SM."
    return f"{note}\n\n{table(titles, rows)}" if rows else ""


def tuned(records: list[Record]) -> dict[tuple[str, str], dict[str, Record]]:
    """The layer's own tile, the fastest tile, and the fastest way to absorb, by layout and load."""
    found: dict[tuple[str, str], dict[str, Record]] = {}
    for record in records:
        if record["job"] != "tune" or "seconds" not in record:
            continue
        of = found.setdefault((record["layout"], record["load"]), {})
        kind = "absorbing" if "absorbing" in record else "best"
        if kind == "best" and "own" not in of:
            of["own"] = record
        if kind not in of or record["seconds"]["median"] < of[kind]["seconds"]["median"]:
            of[kind] = record
    return found


def _in_words(record: Record) -> str:
    """A tile that was tried."""
    tile = record["tile"]
    return f"{tile['keys']} x {tile['warps']}, {tile['stages']}; {record['slices_per_sm']}"


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:.1f}"


def _model(records: list[Record]) -> str:
    rows = [
        (record.get("load", ""), record["layout"], record["row"], record.get("layers", 32),
         f"{1e3 * record['seconds']['median']:.2f}", f"{record['tokens_per_s']:.0f}",
         f"{record['cache_bytes'] / 1e9:.2f}")
        for record in records if "tokens_per_s" in record
    ]  # fmt: skip
    titles = "load", "layers are", "row", "layers", "ms a step", "tokens/s", "cache GB"
    return "An 8B with random weights:\n\n" + table(titles, rows) if rows else ""


def _carried(records: list[Record]) -> str:
    """The real model; what it wrote stands below the table."""
    found = [record for record in records if record["job"] == "carried" and "took_s" in record]
    rows = [
        (record["row"], f"{record['took_s']:.1f}",
         f"{record['generated_per_s']:.0f}" if "generated_per_s" in record else "",
         "; ".join(f"{split} {said}" for split, said in record.get("measured", {}).items()))
        for record in found
    ]  # fmt: skip
    written = [f"{record['row']}:\n\n    {record['text'][:400]!r}" for record in found if "text" in record]
    titles = "a model that was carried here", "s", "tokens/s", "accuracy"
    return "\n\n".join([table(titles, rows), *written]) if rows else ""


SHOWN = {
    "us": (r"gpu__time_duration\.sum", 1e-3),
    "instructions a cycle": (r"sm__inst_executed\.avg\.per_cycle_active", 1),
    "warps an SM": (r"sm__warps_active\.avg\.per_cycle_active", 1),
    "DRAM %": (r"gpu__dram_throughput\.avg\.pct_of_peak_sustained_elapsed", 1),
    "shared %": (r"l1tex__data_pipe_lsu_wavefronts\.avg\.pct_of_peak_sustained_elapsed", 1),
    "tensor %": (r"sm__(inst_executed_pipe_tensor\w*|pipe_tensor\w*)\.avg\.pct_of_peak_sustained_active", 1),
}
"""Columns of the table of counters: the metric, and what it is multiplied by; of several the largest."""

STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")


def _counters(records: list[Record]) -> str:
    """Limits of each kernel; all other counters are in the records."""
    rows = []
    for record in records:
        if "counters" not in record:
            continue
        metrics = {name: value for kind in record["counters"].values() for name, value in kind.items()}
        row = [record["layout"], record["kernel"]]
        for pattern, factor in SHOWN.values():
            values = [value for name, value in metrics.items() if re.fullmatch(pattern, name)]
            row.append(f"{factor * max(values):.3g}" if values else "")
        stalls = [(value, found[1]) for name, value in metrics.items() if (found := STALL.fullmatch(name))]
        largest = sorted((pair for pair in stalls if pair[1] != "selected"), reverse=True)[:3]
        rows.append([*row, ", ".join(f"{name} {value:.2f}" for value, name in largest)])
    return table(("layout", "kernel", *SHOWN, "largest stalls"), rows) if rows else ""


def _sanitizer(records: list[Record]) -> str:
    lines = [
        f"compute-sanitizer, {record['job']}, {record['task']}: {record['sanitizer']} error(s)"
        for record in records
        if "sanitizer" in record
    ]
    lines += [
        f"{record['layout']}, {record['row']}: {record['different']} of {record['launches']} launches differ"
        for record in records
        if "different" in record
    ]
    lines += [f"racecheck, CUDA C++: {record['hazards']} hazard(s)" for record in records if "hazards" in record]
    return "\n".join(lines)


def _seconds(records: list[Record]) -> str:
    """Seconds of each job."""
    took = [f"{record['job']} {record['job_s']:.0f} s" for record in records if "job_s" in record]
    return f"Seconds: {', '.join(took)}" if took else ""


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
