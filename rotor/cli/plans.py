"""Print an inspection."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..calibration.prediction.decode_times import too_wide
from ..progress import in_bytes, in_time
from ..tools.inspection import REMOVED, SHARE_OF_PEAK
from .console import print_pairs, print_table, say

if TYPE_CHECKING:
    from ..tools.inspection import Inspection, ResourceEstimate


SHORT_S = 10
"""Seconds on a server below which other things than products take most of the time."""


def print_inspection(inspection: Inspection, layouts: bool) -> None:
    """Print what is known of a model.

    Args:
        layouts: predicted times of other layouts of the cache, too.
    """
    shape = inspection.shape
    extras = "RoPE" if shape.rotates else "no RoPE"
    if shape.key_norm:
        extras += ", norm on queries, keys and values" if shape.value_norm else ", norm on queries and keys"
    cache = ", ".join(f"{in_bytes(size)} at {_length(tokens)}" for tokens, size in inspection.kv_cache_bytes.items())
    start = (
        "not known without a tokenizer"
        if inspection.row_start is None
        else inspection.row_start or "nothing of its own"
    )
    states = inspection.state_bytes
    gpu = inspection.available_device_bytes
    print_pairs(
        ("model", inspection.name + (f" at {inspection.revision}" if inspection.revision else "")),
        ("family", f"{inspection.model_type}, {inspection.dtype}, {inspection.parameters / 1e6:,.1f} M parameters"),
        ("weights", in_bytes(inspection.weight_bytes)),
        (
            "attention",
            f"{shape.num_layers} layers, {shape.num_heads} query and {shape.heads_in_words}, {extras}",
        ),
        ("KV cache", f"{inspection.kv_bytes_per_token:,} bytes per token: {cache}"),
        *([("afterwards", _afterwards(inspection))] if inspection.after else []),
        *([("states", f"{in_bytes(states)} a sequence beside the cache, which stay as they are")] if states else []),
        ("context", f"{inspection.context_tokens:,} tokens, whose bytes an export counts (--context)"),
        ("text begins with", start),
        (
            "recipe",
            f"{inspection.recipe}, {inspection.tokens['count']} {inspection.tokens['source']} tokens, channels of "
            f"{' or '.join(map(str, inspection.bits))} bits",
        ),
        ("form", inspection.form),
        *([("warning", inspection.warning)] if inspection.warning else []),
        ("calibrate", f"{_needs(inspection.calibrate)}\n{_elsewhere(inspection, 'calibrate')}"),
        ("export", f"{_needs(inspection.export)}\n{_elsewhere(inspection, 'export')}"),
        ("validate", _time(inspection.validate)),
        (
            "checkpoint",
            f"up to {in_bytes(inspection.export.disk_bytes)}, {in_bytes(inspection.weight_bytes)} before: it grows "
            "because bases are stored beside projections",
        ),
        *([] if gpu is None else [("GPU", f"{in_bytes(gpu)} available")]),
    )
    if layouts:
        _print_decode_times(inspection)
    else:
        _print_own_times(inspection)


def _afterwards(inspection: Inspection) -> str:
    """The cache at the length whose bytes an export counts, by what other models kept."""
    least, most = inspection.after[inspection.context_tokens]
    short, long = REMOVED
    first, last = (tokens or 1 for tokens in inspection.smaller_from)  # where none is smaller, the sizes say so
    from_where_on = f"; smaller from {first} to {last} tokens on" if last > 1 else ""
    return (
        f"{in_bytes(least)} to {in_bytes(most)} at {_length(inspection.context_tokens)} with its exact tokens, if as "
        f"much can go as of other models at --accuracy 0.99 ({short:.2f} to {long:.2f} of the rows, "
        f"docs/large-models.md){from_where_on}"
    )


def _elsewhere(inspection: Inspection, command: str) -> str:
    """Time with --quick, and on a server."""
    quick, server = inspection.quick_seconds[command], inspection.server_seconds[command]
    there = f"about {in_time(server)}" if server >= SHORT_S else f"less than {SHORT_S} s"
    return (
        f"about {in_time(quick)} with --quick; as it is {there} on an H100 (by arithmetic, at {SHARE_OF_PEAK:g} of its "
        "peak)"
    )


def _print_own_times(inspection: Inspection) -> None:
    """Attention's predicted time with the layout that the recipe takes."""
    chosen = [t for t in inspection.decode_times if t.chosen and t.instructions_per_key]
    load = inspection.objective
    if chosen:
        shares = ", ".join(f"{t.share:.2f} at {t.scenario} removed" for t in chosen)
        say(
            f"Attention in a decode step is predicted to take {shares}, of the uncompressed model's time "
            f"({load.device}, {load.batch_size} x {load.context_tokens} tokens; arithmetic, not measured). --layouts "
            "has others."
        )
    _say_slower(inspection)


def _length(tokens: int) -> str:
    return f"{tokens:,}" if tokens % 1024 else f"{tokens // 1024} K"


def _print_decode_times(inspection: Inspection) -> None:
    """Candidates down, shares of the bytes removed across; without layouts that no kernel attends to."""
    served = {(t.candidate, t.scenario): t for t in inspection.decode_times if t.instructions_per_key or t.chosen}
    scenarios = list(dict.fromkeys(t.scenario for t in inspection.decode_times))
    rows = []
    for candidate in dict.fromkeys(name for name, _ in served):
        cells = [served.get((candidate, scenario)) for scenario in scenarios]
        mark = "* " if any(t and t.chosen for t in cells) else "  "
        rows.append((mark + candidate, *(f"{t.share:.2f}" if t else "-" for t in cells)))
    load = inspection.objective
    title = (
        "Predicted time of attention in a decode step, as a share of the uncompressed model's, by the share of the "
        f"cache removed ({load.device}, {load.batch_size} x {load.context_tokens} tokens, "
        f"{inspection.instructions_per_cycle:g} instructions a cycle and SM; arithmetic, not measured)"
    )
    print_table(title, ("  layout of the cache",), scenarios, rows)
    say(
        "Below 1: faster than the uncompressed model. *: what the recipe takes. joint: keys and values in one latent; "
        "apart: a latent each. blocks: positions within which keys are rotated. heads: KV heads that share a latent. "
        "-, and what is left out: no kernel attends to it."
    )
    wide = [f"{name} at {' and '.join(at)} removed" for name, at in too_wide(inspection.decode_times).items()]
    if wide:
        say(f"Rows of too many heads to be worth their time (those of fewer take a tenth less): {'; '.join(wide)}.")
    _say_slower(inspection)


def _say_slower(inspection: Inspection) -> None:
    """Hint where the recipe's attention is predicted to be slower than without compression."""
    if inspection.slower is not None:
        chosen, other = inspection.slower
        better = f"{other.settings} is predicted at {other.share:.2f}" if other else "no layout is predicted below 1"
        say(
            f"With {chosen.scenario} of the cache removed this recipe's attention is predicted at {chosen.share:.2f} "
            f"of the uncompressed model's time: {better}."
        )


def _needs(needs: ResourceEstimate) -> str:
    """Memory, disk and time, a line each."""
    lines = []
    kind = "one layer of weights at a time" if needs.streamed else "all weights in memory"
    there = f"{in_bytes(needs.available_host_bytes)} available"
    if not needs.streamed:
        there += f", {in_bytes(needs.usable_host_bytes)} of them for weights in memory"
    for where, parts in (("memory", needs.host_bytes), ("GPU memory", needs.device_bytes)):
        if parts:
            named = ", ".join(f"{name} {in_bytes(size)}" for name, size in parts.items())
            about = f"about {in_bytes(sum(parts.values()))} of {where}"
            lines.append(f"{about}, {kind} ({named}); {there}" if where == "memory" else f"{about} ({named})")
    kept = "" if needs.kept_disk_bytes == needs.disk_bytes else f", of which {in_bytes(needs.kept_disk_bytes)} stay"
    lines.append(f"up to {in_bytes(needs.disk_bytes)} of disk{kept}; {in_bytes(needs.free_disk_bytes)} free")
    return "\n".join([*lines, _time(needs)])


def _time(needs: ResourceEstimate) -> str:
    named = ", ".join(f"{name} {in_time(seconds)}" for name, seconds in needs.product_seconds.items())
    total = in_time(sum(needs.product_seconds.values()))
    return f"about {total} for the matrix products alone ({named}), at the rate measured here"
