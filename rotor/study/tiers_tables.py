"""The part `tiers` of a study as tables of Markdown cells."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..format.atomic import write_text
from .peers import PeerRecord
from .peers_part import peer_rows, records_csv
from .store import StudyStore
from .tiers_codes import PART
from .tiers_part import IMPORTANT, LIMITS, SET_SHARE

CSV = "tiers.csv"
Table = tuple[str, list[str], list[list[str]]]
KINDS = ("tiers", "tiers, keys lose more", "g alike", "one ratio", "regression", "oracle")


def tiers_of_recipes(store: StudyStore) -> dict[str, dict[str, Any]]:
    """What was measured, by recipe; records by their label under `records`, in order of arrival."""
    found: dict[str, dict[str, Any]] = {}
    for key, record in store.part(PART).items():
        name, _, what = key.partition("/")
        own = found.setdefault(name, {"records": {}})
        kind, _, label = what.partition("/")
        if label:
            own[kind][label] = PeerRecord(**record)
        else:
            own[kind] = record
    return found


def tiers_tables(store: StudyStore) -> Iterator[Table]:
    """Title, header and cells of each."""
    for name, found in tiers_of_recipes(store).items():
        if "layers" in found:
            yield from _layers(name, found["layers"])
        if "shares" in found:
            important, unimportant = IMPORTANT
            title = f"`{name}`: g where {important:g} of important and {unimportant:g} of other tokens is removed"
            yield _sweep(f"{title} (ZDC figure 24)", "g", found["shares"])
        if "ratios" in found:
            yield _sweep(f"`{name}`: p of one side, for all tokens (ZDC figure 25)", "side, p", found["ratios"])
        if "choices" in found:
            yield _choices(name, found["choices"])
        if found["records"]:
            against = "one ratio" if "choices" in found else "one plan of codes"
            title = f"`{name}`: tiers against {against} at equal bytes, report split, read through the cache"
            yield title, *peer_rows(list(found["records"].values()))


def write_tiers_csv(store: StudyStore) -> Path | None:
    """One row a record: what takes the important tokens' place, at equal bytes; None without any."""
    recipes = tiers_of_recipes(store)
    rows = [({"recipe": name}, record) for name, found in recipes.items() for record in found["records"].values()]
    if not rows:
        return None
    path = store.folder / CSV
    write_text(path, records_csv(rows))
    return path


def by_distance(matrix: Sequence[Sequence[float]]) -> dict[int, float]:
    """The mean of a symmetric matrix over layers that are so far apart."""
    array = np.array(matrix)
    return {distance: float(np.diagonal(array, distance).mean()) for distance in range(1, len(array))}


def _layers(name: str, record: dict[str, Any]) -> Iterator[Table]:
    rows = []
    for measure, both in record["repetition"].items():
        for which, matrix in both.items():
            array = np.array(matrix)
            largest = float(array[~np.eye(len(array), dtype=bool)].max(initial=0.0))
            cells = [f"{value:.3f}" for value in by_distance(matrix).values()]
            rows.append([measure, which, *cells, f"{largest:.3f}"])
    distances = [f"{d} apart" for d in range(1, len(record["spread"]))]
    title = f"`{name}`: important tokens that two layers share, of {SET_SHARE:g} of all (ZDC figures 7 and 8)"
    yield title, ["importance", "set", *distances, "largest of all pairs"], rows
    spreads = [
        [str(layer), *(f"{value:.1f}" for value in spread.values())] for layer, spread in enumerate(record["spread"])
    ]
    yield f"`{name}`: spread of a query's logits (ZDC figure 6)", ["layer", *record["spread"][0]], spreads


def _sweep(title: str, what: str, record: dict[str, Any]) -> Table:
    rows = [[label, f"{one['removed']:.3f}", f"{one['degradation']:.4f}"] for label, one in record.items()]
    return title, [what, "removed", "Q_d"], rows


def _choices(name: str, record: dict[str, Any]) -> Table:
    rows = []
    for limit in LIMITS:
        for kind in KINDS:
            one = record[f"{limit:g}"][kind]
            if one is None:
                rows.append([f"{limit:g}", kind, "nothing fits", "", "", "", "", ""])
                continue
            policy = one["policy"]
            shares = policy["layer_important"]
            ratios = [f"{policy[f'{side}_important']:.2f}, {policy[f'{side}_unimportant']:.2f}" for side in ("qk", "v")]
            g = f"{shares[0]:.2f} to {shares[-1]:.2f}"
            measured = [f"{one[key]:.4f}" for key in ("removed", "degradation", "predicted")]
            rows.append([f"{limit:g}", kind, g, *ratios, *measured])
    header = [
        "Q_d allowed",
        "choice",
        "g",
        "p_QK of important, others",
        "p_VW of important, others",
        "removed",
        "Q_d",
        "Q_d predicted",
    ]
    return f"`{name}`: ratios chosen for a loss of quality, search split", header, rows
