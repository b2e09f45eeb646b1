"""What was measured against the goals, and what is red: from the records of one device and commit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from .records import ENDED

Rows = dict[tuple[str, str], dict[str, Any]]
"""The last record of each row that ended, by phase and row."""


@dataclass(frozen=True)
class Goal:
    """wanted, got: as text; got is empty and met None where a row that it needs was not measured."""

    name: str
    wanted: str
    got: str
    met: bool | None


def judge(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The verdict on the device and commit of the last record that has them.

    Returns:
        device, rates, commit, dry; goals; rows by status; those that failed, with why; those that were left out.
    """
    last: dict[str, Any] = next((r for r in reversed(records) if "device" in r), {})
    run = records[-1].get("run") if records else None
    keys = ("device", "commit", "dry")
    # What ended before it knew its device counts in its own run.
    mine = [r for r in records if (all(r.get(k) == last.get(k) for k in keys) if "device" in r else r["run"] == run)]
    rows: Rows = {(r["phase"], r["row"]): r for r in mine if r["status"] in ENDED}
    about = rows.get(("device", "rates"), {})
    shown = [
        {k: r[k] for k in ("phase", "row", "why", "hint") if k in r} for r in rows.values() if r["status"] == "failed"
    ]
    return {
        "device": about.get("about", {"name": last.get("device")}),
        "rates": about.get("rates"),
        "commit": last.get("commit"),
        "dry": bool(last.get("dry")),
        "goals": [asdict(goal) for goal in goals(rows)],
        "rows": dict(Counter(r["status"] for r in rows.values())),
        "failed": shown,
        "left_out": [
            {k: r[k] for k in ("phase", "row", "why") if k in r}
            for r in rows.values()
            if r["status"] in ("skipped", "refused")
        ],
    }


def goals(rows: Rows) -> list[Goal]:
    """Every goal, whether or not its rows were measured; a dry run meets and misses none."""
    found = [
        _none_red(rows, "tests", "every test of the GPU passes"),
        _none_red(rows, "sanitizer", "no error by NVIDIA's sanitizer"),
    ]
    for name, batch_size, share in (
        ("after RoPE", 8, 0.85),
        ("after RoPE", 1, 0.75),
        ("before RoPE", 8, 0.60),
        ("before RoPE", 1, 0.60),
    ):
        found.append(_of_floor(rows, name, batch_size, share))
    for batch_size in (1, 8):
        found.append(_faster_than_full(rows, "after RoPE", batch_size, 0.9))
        found.append(_faster_than_full(rows, "before RoPE", batch_size, None))
    found += [_prefill(rows), _model(rows)]
    return found


def _seconds(record: dict[str, Any] | None) -> float | None:
    if record is None or record["status"] != "ok" or record.get("dry"):
        return None
    return float(record["seconds"]["median"])


def _find(rows: Rows, phase: str, keep: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    return [r for (of, _), r in rows.items() if of == phase and keep(r) and _seconds(r) is not None]


def _rotor(rows: Rows, phase: str, name: str, batch_size: int) -> dict[str, Any] | None:
    found = _find(
        rows,
        phase,
        lambda r: r.get("layout") == name and r["batch_size"] == batch_size and r["row"].startswith("rotor"),
    )
    return found[0] if found else None


def _none_red(rows: Rows, phase: str, name: str) -> Goal:
    ended = [r for (of, _), r in rows.items() if of == phase and r["status"] in ("ok", "failed") and not r.get("dry")]
    red = sum(r["status"] == "failed" for r in ended)
    if not ended:
        return Goal(name, "none red", "", None)
    return Goal(name, "none red", f"{red} of {len(ended)} rows red", red == 0)


def _of_floor(rows: Rows, name: str, batch_size: int, share: float) -> Goal:
    """The floor is the larger of bytes over the copy rate and FLOPs over the matrix rate of the same device."""
    title = f"decode, {name}, batch {batch_size}: share of the floor"
    row, rates = _rotor(rows, "decode", name, batch_size), rows.get(("device", "rates"), {}).get("rates")
    if row is None or rates is None:
        return Goal(title, f"{share:.0%}", "", None)
    floor = max(row["bytes"] / rates["copy_bytes_per_s"], row["flops"] / rates["bfloat16_flops_per_s"])
    got = floor / row["seconds"]["median"]
    return Goal(title, f"{share:.0%}", f"{got:.1%}", got >= share)


def _faster_than_full(rows: Rows, name: str, batch_size: int, share: float | None) -> Goal:
    """Over the fastest that there is for the uncompressed cache: so many times its bytes over ours, or not slower."""
    title = f"decode, {name}, batch {batch_size}: speed-up over the fastest uncompressed"
    row = _rotor(rows, "decode", name, batch_size)
    others = _find(rows, "decode", lambda r: r.get("layout") == "full" and r["batch_size"] == batch_size)
    if row is None or not others:
        return Goal(title, "1.00" if share is None else f"{share:g} / (1 - p)", "", None)
    fastest = min(others, key=lambda r: r["seconds"]["median"])
    wanted = 1.0 if share is None else share * fastest["bytes"] / row["bytes"]
    got = fastest["seconds"]["median"] / row["seconds"]["median"]
    return Goal(title, f"{wanted:.2f}", f"{got:.2f} ({fastest['row'].partition(',')[0]})", got >= wanted)


def _prefill(rows: Rows) -> Goal:
    title = "prefill, after RoPE: share of SDPA's FLOP rate"
    row = _rotor(rows, "prefill", "after RoPE", 1)
    others = _find(rows, "prefill", lambda r: r["row"].startswith("SDPA"))
    if row is None or not others:
        return Goal(title, "70%", "", None)
    got = row["flops_per_s"] / max(r["flops_per_s"] for r in others)
    return Goal(title, "70%", f"{got:.1%}", got >= 0.7)


def _model(rows: Rows) -> Goal:
    """The best mode of each, at batch 1."""
    title = "8B, after RoPE, batch 1: time between tokens over the uncompressed"
    best = {}
    for name in ("after RoPE", "full"):
        found = _find(rows, "model", lambda r, name=name: r.get("layout") == name and r["batch_size"] == 1)  # type: ignore[misc]
        best[name] = min((r["seconds"]["median"] for r in found), default=None)
    ours, theirs = best["after RoPE"], best["full"]
    if ours is None or theirs is None:
        return Goal(title, "at most 0.75", "", None)
    return Goal(title, "at most 0.75", f"{ours / theirs:.2f}", ours <= 0.75 * theirs)
