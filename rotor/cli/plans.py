"""How plans and inspections are shown."""

from __future__ import annotations

from typing import Any

from .console import in_bytes, print_pairs, print_table, say


def print_inspection(found: Any) -> None:
    shape = found.shape
    extras = ("RoPE" if shape.rotary_dim else "no RoPE") + (", norm on queries and keys" if shape.key_norm else "")
    cache = ", ".join(f"{in_bytes(size)} at {tokens // 1024} K" for tokens, size in found.kv_cache_bytes.items())
    device = "" if found.available_device_bytes is None else f", {in_bytes(found.available_device_bytes)} on the GPU"
    print_pairs(
        ("model", found.name + (f" at {found.revision}" if found.revision else "")),
        ("family", f"{found.model_type}, {found.dtype}, {found.parameters / 1e6:,.1f} M parameters"),
        ("weights", in_bytes(found.weight_bytes)),
        (
            "attention",
            f"{shape.num_layers} layers, {shape.num_heads} query and {shape.num_kv_heads} KV heads of "
            f"{shape.head_dim}, {extras}",
        ),
        ("KV cache", f"{found.kv_bytes_per_token:,} bytes per token: {cache}"),
        (
            "recipe",
            f"{found.recipe}, {found.tokens['count']} {found.tokens['source']} tokens, columns of "
            f"{' or '.join(map(str, found.bits))} bits",
        ),
        *(("keys", f"{key}: {what}") for key, what in found.keys.items()),
        ("calibrate", _needs(found.calibrate) + f", run folder {in_bytes(found.calibrate.kept_disk_bytes)}"),
        (
            "export",
            f"{_needs(found.export)}, checkpoint up to {in_bytes(found.export_disk_bytes)} where the model has "
            f"{in_bytes(found.weight_bytes)}: bases come beside its projections",
        ),
        (
            "available",
            _available(found) + device,
        ),
    )
    _print_decode_times(found)


def _print_decode_times(found: Any) -> None:
    """Candidates down, shares of the bytes removed across: instructions a key and KV head, and time as a share of the
    uncompressed model's; "memory" for keys that are rebuilt there.
    """
    times = {(t.candidate, t.scenario): t for t in found.decode_times}
    candidates = list(dict.fromkeys(t.candidate for t in found.decode_times))
    scenarios = list(dict.fromkeys(t.scenario for t in found.decode_times))
    rows = []
    for candidate in candidates:
        cells = [times[candidate, scenario] for scenario in scenarios]
        issued = (f"{t.instructions_per_key:.0f}" if t.instructions_per_key else "memory" for t in cells)
        rows.append((candidate, *(f"{n}: {t.share:.2f}" for n, t in zip(issued, cells, strict=True))))
    load = found.objective
    title = (
        "Predicted attention of a decode step: instructions a key and KV head, and time over the uncompressed model's, "
        f"by the share of bytes removed ({load.device} at {found.instructions_per_cycle:g} instructions a cycle and "
        f"SM, {load.batch_size} x {load.context_tokens} tokens; arithmetic, not measured)"
    )
    print_table(title, ("codes of keys and values, heads a group",), scenarios, rows)
    say(
        "Time below 1: faster than the uncompressed model. joint: keys and values in one latent; fast: rotary planes "
        "that attention rebuilds; then the KV heads that share a latent."
    )


def _available(found: Any) -> str:
    return f"{in_bytes(found.available_host_bytes)} (at most {in_bytes(found.usable_host_bytes)} are filled)"


def _needs(needs: Any) -> str:
    kind = "one layer of weights at a time" if needs.streamed else "all weights in memory"
    gpu = f" and {in_bytes(needs.device_bytes)} on the GPU" if needs.device_bytes else ""
    return f"about {in_bytes(needs.host_bytes)} of memory{gpu}, {kind}"


def _described(key: str, candidate: Any) -> str:
    shared = ", keys and values in one latent" if candidate.joint else ""
    block, fast = candidate.form
    form = "" if block is None else f"blocks of {block} positions, {fast} fast planes, "
    return f"{key} ({form}groups of {candidate.group_size}{shared})"


def print_calibration_plan(plan: Any) -> None:
    tokens, layers = plan.tokens, f"{plan.num_layers} layers"
    if plan.finished_layers:
        layers += f", {plan.finished_layers} of them done"
    print_pairs(
        ("calibrate", f"{plan.model} -> {plan.run}; nothing is written in a dry run"),
        ("recipe", f"{plan.recipe}, {tokens['count']} {tokens['source']} tokens in rows of {tokens['seq_len']}"),
        ("work", f"{layers}, on {plan.device} in {plan.dtype}"),
        ("candidates", ", ".join(_described(key, candidate) for key, candidate in plan.candidates.items())),
        *_planned_needs(plan.needs),
    )


def print_export_plan(plan: Any) -> None:
    """What is known before anything is measured: ranks by layer and sizes by tensor, or how much to measure."""
    goal = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in plan.goal.items())
    measure = f"about {plan.points} point(s), {plan.known_points} are in the table"
    if plan.probed_layers:
        measure = f"probes of {plan.probed_layers} layer(s), then {measure}"
    nothing = f"nothing; {plan.unmeasured}" if plan.unmeasured else "nothing; the table has the point"
    cache, size = plan.kv_bytes_per_token, plan.checkpoint_bytes
    rows = [
        ("export", f"{plan.run} -> {plan.out}; nothing is written in a dry run"),
        ("recipe", f"{plan.recipe}, {goal}"),
        ("measure", measure if plan.points or plan.probed_layers else nothing),
    ]
    if plan.ranks is None:
        rows.append(("ranks", "depend on what is measured"))
    else:
        rows.append(
            ("compression", f"{plan.compression:.3f}, {cache['before']} -> {cache['after']} KV bytes per token")
        )
        rows.append(("tensors", f"{in_bytes(size['before'])} -> {in_bytes(size['after'])}"))
    print_pairs(*rows, *_planned_needs(plan.needs))
    if plan.ranks is None:
        return
    if plan.channels is None:
        ranks = [" ".join(f"({qk}, {v})" for qk, v in layer) for layer in plan.ranks]
        title = "Ranks (key, value) of each group"
    else:
        ranks = [" ".join(f"({'; '.join(map(_by_bits, latents))})" for latents in layer) for layer in plan.channels]
        title = "Channels x bits of each group (key; value, or both together)"
    rows_of = [(index, key, found) for index, (key, found) in enumerate(zip(plan.choice, ranks, strict=True))]
    print_table(title, ("layer", "basis", "channels"), (), rows_of)
    tensors = ((name, f"{sizes['before']:,}", f"{sizes['after']:,}") for name, sizes in plan.tensors.items())
    print_table("Bytes of each tensor that changes", ("tensor",), ("before", "after"), [*tensors])


def _by_bits(channels: dict[str, int]) -> str:
    return " ".join(f"{count}x{bits}" for bits, count in channels.items())


def _planned_needs(needs: Any) -> list[tuple[str, str]]:
    """Memory and disk of a plan."""
    rows = []
    for where, parts in (("memory", needs.host_bytes), ("GPU memory", needs.device_bytes)):
        if parts:
            named = ", ".join(f"{name} {in_bytes(size)}" for name, size in parts.items())
            there = f"; {_available(needs)} available" if where == "memory" else ""
            rows.append((where, f"about {in_bytes(sum(parts.values()))} ({named}){there}"))
    disk = f"up to {in_bytes(needs.disk_bytes)}, of which {in_bytes(needs.kept_disk_bytes)} stay"
    rows.append(("disk", f"{disk}; {in_bytes(needs.free_disk_bytes)} free"))
    return rows
