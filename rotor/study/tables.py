"""A study's records as tables: results.csv, one row per recipe and compression, and summary.md."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..data.splits import SPLITS
from ..format.atomic import write_text
from ..recipe.metric_registry import describe
from .cache_tables import cache_tables
from .measure import COLUMNS
from .peers_part import peer_records, peer_rows
from .quantities import token_sides
from .store import StudyStore
from .tiers_tables import tiers_tables

CSV, SUMMARY = "results.csv", "summary.md"
CURVE_PARTS = ("curves", "ablation")
SIDE_LABELS = {"qk": "QK", "vo": "V"}

Curves = dict[str, dict[str, dict[str, Any]]]


def write_csv(store: StudyStore) -> Path:
    """One row per recipe (or ablation) and compression, with the metrics of both splits."""
    header = ["part", "recipe", "compression_target", "compression_planned", "compression_stored"]
    header += [f"{split}_{metric}" for split in SPLITS for metric in COLUMNS]
    header += ["report_interval_low", "report_interval_high"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    for part in CURVE_PARTS:
        for recipe, records in curves(store, part).items():
            for point in points(records):
                row = [part, recipe, point["target"], point["planned"], point["stored"]]
                row += [point[split].get(metric, "") for split in SPLITS for metric in COLUMNS]
                writer.writerow([*row, *(point["interval"] or ("", ""))])
    return _write(store, CSV, text.getvalue())


def write_summary(store: StudyStore) -> Path:
    """Tables in Markdown: compression at the target accuracies, every metric by compression, and the other parts."""
    settings = store.settings
    evaluation = settings["evaluation"]
    lines = [
        f"# Study of {settings['model']['name']}",
        "",
        f"{settings['tokens']['count']} calibration tokens in rows of {settings['tokens']['seq_len']}, seed "
        f"{settings['tokens']['seed']}; measured in {settings['dtype']} on {evaluation['source']} text, "
        f"{evaluation['search_tokens']} tokens to search and {evaluation['report_tokens']} to report. Accuracy is "
        f"{describe(evaluation['metric'])}. Compression is the share of the KV cache removed, as stored.",
    ]
    for found, title in ((curves(store, "curves"), "Recipes"), (ablation_curves(store), "Ablation")):
        if found:
            lines += ["", f"## {title}", *_target_table(found), *_metric_tables(found)]
    for name, title, make in (
        ("sources", "Bases by source of the calibration tokens", lambda records: _sources(store, records)),
        ("tokens", "Error by number of calibration tokens", lambda records: _tokens(store, records)),
        ("degradation", "Degradation of the attention outputs (ZDC figure 14)", _degradation),
        ("front", "Bytes of cache against predicted decode time", _front),
        ("peers", "Caches against quantisers, at their bytes", lambda _: _peers(store)),
    ):
        records = store.part(name)
        if records:
            lines += ["", f"## {title}", *make(records)]
    for title, header, rows in cache_tables(store):
        lines += ["", f"## {title}", *table(header, rows)]
    for title, header, rows in tiers_tables(store):
        lines += ["", f"## {title}", *table(header, rows)]
    return _write(store, SUMMARY, "\n".join(lines) + "\n")


def curves(store: StudyStore, part: str) -> Curves:
    """Records of `curves` or `ablation` by recipe, then by what they are (spectra, targets, p0.10 ...)."""
    found: Curves = {}
    for key, record in store.part(part).items():
        recipe, _, what = key.rpartition("/")
        found.setdefault(recipe, {})[what] = record
    return found


def ablation_curves(store: StudyStore) -> Curves:
    """The ablations, each recipe that they start from before them."""
    found = curves(store, "ablation")
    bases = {
        recipe: records
        for recipe, records in curves(store, "curves").items()
        if any(name.startswith(f"{recipe}-") for name in found)
    }
    return {**bases, **found}


def points(records: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The measured points of one recipe by rising compression, without those out of reach."""
    measured = [r for what, r in records.items() if what.startswith("p") and "stored" in r]
    return sorted(measured, key=lambda point: point["target"])


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """A Markdown table after an empty line."""
    header = list(header)
    return ["", *(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows))]


def _target_table(found: Curves) -> list[str]:
    targets = sorted({t for records in found.values() for t in records.get("targets", {})}, reverse=True)
    if not targets:
        return []
    rows = []
    for recipe, records in found.items():
        reached = [records.get("targets", {}).get(target, {}) for target in targets]
        rows.append([f"`{recipe}`", *(_target_cell(point) for point in reached)])
    return [
        "",
        "Compression at a target accuracy, chosen by the search split; in brackets that of the report split with its "
        "95 % interval.",
        *table(["recipe", *(f"at {float(target):g}" for target in targets)], rows),
    ]


def _target_cell(point: dict[str, Any]) -> str:
    if "stored" not in point:
        return "out of reach" if point else ""
    interval = point.get("interval")
    bounds = f" [{interval[0]:.4f}, {interval[1]:.4f}]" if interval else ""
    return f"**{point['stored']:.3f}** ({point['report']:.4f}{bounds})"


def _metric_tables(found: Curves) -> list[str]:
    """One table a metric, report split: recipes down, compressions across."""
    targets = sorted({p["target"] for records in found.values() for p in points(records)})
    lines: list[str] = []
    for metric, label in COLUMNS.items():
        rows = []
        for recipe, records in found.items():
            values = {p["target"]: p["report"].get(metric) for p in points(records)}
            rows.append([f"`{recipe}`", *(_number(values.get(target), metric) for target in targets)])
        if any(cell for row in rows for cell in row[1:]):
            header = ["recipe", *(f"p = {target:g}" for target in targets)]
            lines += ["", f"{label[0].upper()}{label[1:]}, report split:", *table(header, rows)]
    stored = [[f"`{r}`", *_stored(records, targets)] for r, records in found.items()]
    if targets:
        header = ["recipe", *(f"p = {target:g}" for target in targets)]
        lines += ["", "Compression as stored at each of these (the mildest step beyond it):", *table(header, stored)]
    return lines


def _stored(records: dict[str, dict[str, Any]], targets: list[float]) -> list[str]:
    values = {p["target"]: f"{p['stored']:.3f}" for p in points(records)}
    return [values.get(target, "") for target in targets]


def _number(value: float | None, metric: str) -> str:
    if value is None:
        return ""
    return f"{value:.5f}" if metric == "kl_div" else f"{value:.4f}"


def _sources(store: StudyStore, records: dict[str, dict[str, Any]]) -> list[str]:
    """Without rows of bases that are of the weights alone, which no tokens change."""
    pairs, variation = [], []
    shares: list[str] = []
    for recipe, record in records.items():
        for pair in record["pairs"]:
            for side in token_sides(store, recipe):
                found, label = pair[side], SIDE_LABELS[side]
                shares = list(found["angles_degrees"])
                angles = (found["angles_degrees"][share] for share in shares)
                pairs.append(
                    [
                        f"`{recipe}`",
                        f"{pair['a']}, {pair['b']}",
                        label,
                        f"{found['delta']:.2e} / {found['epsilon']:.2e}",
                        f"{100 * found['ratio']:.2f} %",
                        *(f"{a['mean']:.2f} / {a['largest']:.2f}" for a in angles),
                    ]
                )
        for source, variant in record["variants"].items():
            cv = (_percent(store, recipe, side, variant["cv"][side]) for side in SIDE_LABELS)
            variation.append([f"`{recipe}`", source, str(variant["tokens"]), *cv])
    header = ["recipe", "tokens", "side", "delta / epsilon", "ratio"]
    header += [f"angles at {100 * float(share):g} % of the columns, mean / largest" for share in shares]
    return [
        "",
        "Mean absolute difference of corresponding entries (signs aligned, vectors of norm 1) over the mean absolute "
        "entry, as in FDC table 2 and ZACK tables 4 and 5; and the principal angles in degrees between the subspaces "
        "that are kept. Bases that are of the weights alone are left out, or `-`: no tokens change them.",
        *table(header, pairs),
        "",
        "Coefficient of variation of the largest singular value over all groups, as in FDC tables 3 and 4 and ZACK "
        "tables 6 and 7.",
        *table(["recipe", "tokens", "count", "QK", "V"], variation),
    ]


def _percent(store: StudyStore, recipe: str, side: str, value: float) -> str:
    """A share that tokens can change; nothing where they cannot."""
    return f"{100 * value:.2f} %" if side in token_sides(store, recipe) else "-"


def _tokens(store: StudyStore, records: dict[str, dict[str, Any]]) -> list[str]:
    rows = []
    for key, record in sorted(records.items(), key=lambda i: (i[1]["recipe"], i[1]["source"], i[1]["count"])):
        start = [f"`{record['recipe']}`", record["source"], str(record["count"]), f"p = {key.rpartition('/p')[2]}"]
        if "skipped" in record:
            rows.append([*start, "", "", "", "", f"not measured: {record['skipped']}"])
            continue
        ratios = [_percent(store, record["recipe"], side, record["bases"][side]["ratio"]) for side in SIDE_LABELS]
        rows.append([*start, *_point_cells(record), *ratios, ""])
    header = ["recipe", "source", "tokens", "compression", "accuracy", "KL", "delta/epsilon QK", "delta/epsilon V", ""]
    return [
        "",
        "Report split. Delta over epsilon is against the bases from other text (FDC figure 14, ZACK figure 18).",
        *table(header, rows),
    ]


def _degradation(records: dict[str, dict[str, Any]]) -> list[str]:
    rows = []
    for key, record in records.items():
        parts = record["held_out"]
        held_out = f"{min(parts):.4f} to {max(parts):.4f}"
        recipe = key.split("/")[0]
        rows.append(
            [f"`{recipe}`", SIDE_LABELS[record["side"]], f"{record['p']:g}", f"{record['calibration']:.4f}", held_out]
        )
    return [
        "",
        "Relative difference of the outputs of the attention layers, one side compressed by the same share everywhere, "
        "with bases from text.",
        *table(["recipe", "side", "p", "text calibrated on", "other text, by part"], rows),
    ]


def _front(records: dict[str, dict[str, Any]]) -> list[str]:
    rows: list[list[str]] = []
    for key, record in records.items():
        for target, point in record["targets"].items():
            start = [f"`{key.split('/')[0]}`", f"{float(target):g}", f"{record['weight']:g}"]
            if "out_of_reach" in point:
                rows.append([*start, "out of reach", "", "", ""])
                continue
            layers = " ".join(dict.fromkeys(f"{point['choice'].count(c)} {c}" for c in point["choice"]))
            cells = [str(point["kv_bytes_per_token"]), f"{point['bytes_share']:.3f}", f"{point['time_share']:.3f}"]
            rows.append([*start, *cells, layers])
    rows.sort(key=lambda row: (row[0], -float(row[1]), float(row[2])))
    first = next(iter(records.values()))
    header = ["recipe", "accuracy", "weight of latency", "bytes per token", "bytes, share", "time, share", "layers"]
    return [
        "",
        f"Form of keys and group size of every layer chosen with the ranks. Time is that of attention in a decode step "
        f"as "
        f"`rotor/prediction/cost.py` predicts it from the rates of {first['device']}, at {first['context_tokens']} "
        f"tokens of context and a batch of {first['batch_size']}, not a measurement; "
        "shares are of the uncompressed model.",
        *table(header, rows),
    ]


def _peers(store: StudyStore) -> list[str]:
    return [
        "",
        "Every cache is used: a prompt, then the rest of each row in steps through it (report split, dtype of the "
        "checkpoint). Bytes per token count scales, zero points, buffers, tokens that wait: of a complete row, their "
        "mean over the lengths that are scored, and of a long context. KL in nats a token; the others are ratios to "
        "the uncompressed model, of tasks the mean probability of the right answers. `rotor, 320 bytes` is that "
        "recipe's mildest plan at that size or below.",
        *table(*peer_rows(peer_records(store))),
    ]


def _point_cells(record: dict[str, Any]) -> list[str]:
    return [_number(record["report"].get(metric), metric) for metric in ("accuracy", "kl_div")]


def _write(store: StudyStore, name: str, text: str) -> Path:
    path = store.folder / name
    write_text(path, text)
    return path
