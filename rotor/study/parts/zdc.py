"""`zdc`: ZDC's figures of job times (3 to 5, 9, 19 to 23) by bytes and predicted times, with what `tiers` measures.

What was measured is the perplexity and the bytes of each cache. Times are those of a prompt's traffic over a link and
of reading memory in each decode step. What a processor computes is in none of them: the prompt itself (figure 9
without sequence parallelism), bases computed online (ZDC/OC), sums of scores (ZDC/LT, H2O).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any

from ...errors import UsageError
from ...format.layout import LayerLayout
from ...parallel.traffic import of_heads, uncompressed
from ...policies import GEAR, PerToken, Policy
from ...policies import Tiers as TiersPolicy
from ...prediction.devices import find_device
from ...rewriting.rewrite import planned_layouts
from ...runtime.families import attention_shape
from ..cache_part import GROUP, StudiedCache, evictions
from ..caches import CachedModel, CacheRecord
from ..context import StudyContext
from ..part import Part, Task
from ..plots import draw_legend, draw_line
from ..store import StudyStore
from ..tables import Table, number
from .combine import STEPS, both, equal_contribution, most_removed
from .memory import GPU_BYTES
from .tiers import LIMIT, Tiers, compress

SEGMENT = 2048
"""Prompt tokens of a process (section 3)."""

TRACES = {"The Pile": (2500, 446), "ShareGPT": (161, 338)}
"""Mean tokens of a prompt and of what follows it (table 2)."""

LENGTHS = (1000, 2500, 5000, 10000, 20000)
"""Prompts of figures 3 to 5 and 9; as many tokens follow as in the first trace."""

FIXED: dict[str, Policy | None] = {
    "uncompressed": None,
    "4 bits": PerToken(4, GROUP),
    "GEAR-4": GEAR(4),
    "GEAR-2": GEAR(2, backbone="kivi", buffer=GROUP, group=GROUP),
}
"""Caches whose size cannot be chosen; all but the first write and read keys and values of full width in every step."""

WEIGHTS_4 = (4 + 16 / GROUP) / 16
"""Share of weights that 4 bits leave, with a scale of 16 bits a group (figure 3's model compression)."""

EQUAL = {"Q_d": STEPS.bit_length(), "bytes": 1}
"""At what caches are compared, and how many are measured for it."""

PARTS = ("sent", "weights", "cache", "rebuilt")
"""Of a job's time."""

TEXT = (
    "**Predicted**, no time was measured: a prompt's queries, keys, values and outputs over `objective.device`'s link "
    f"(sequence parallelism, {SEGMENT} tokens a process), then in each step the weights, the cache, and where it is "
    "rebuilt, keys and values of full width written and read, over the memory's bandwidth, a batch of one. "
)


Found = list[tuple[str, dict[str, Any]]]
"""Records by label."""


@dataclass(frozen=True)
class Rates:
    """What predicted times depend on beside the cache."""

    weight_bytes: float
    bandwidth_bytes_per_s: float
    link_bytes_per_s: float


class Zdc(Part):
    name = "zdc"

    def tasks(self, study: StudyContext) -> Iterator[Task]:
        yield Task(f"{self.name}/rates", partial(_rates, study), points=0)
        yield from Tiers().tasks(study)
        for label, policy in FIXED.items():
            yield Task(f"{self.name}/caches/{label}", partial(_fixed, study, label, policy))
        for name in study.plan.focus:
            recipe = study.plan.recipes[name]
            if recipe.coded:
                continue
            yield Task(f"{self.name}/caches/{name} with tiers", partial(_tiers, study, name), {name: recipe}, points=0)
            for label in _choices(study, name):
                for equal, points in EQUAL.items():
                    measure = partial(_chosen, study, name, label, equal)
                    yield Task(f"{self.name}/at equal {equal}/{label}", measure, {name: recipe}, points)

    def tables(self, store: StudyStore) -> Iterator[Table]:
        rates, found = read(store)
        if rates is None or not found:
            return
        rows = [
            [name, number(record["q_d"]), *cells(jobs(rates, record, *request)), trace]
            for trace, request in TRACES.items()
            for name, record in found
        ]
        header = ["cache", "Q_d", "time", *PARTS, "trace"]
        title = "Predicted job times at equal quality (ZDC figures 19 and 22, in shape)"
        text = (
            f"{TEXT}Milliseconds. What can be chosen costs a Q_d of at most {LIMIT:g}, of tiers on other text; "
            "GEAR and 4 bits are as they are. /ZO rebuilds."
        )
        yield Table(header, rows, title, text)
        rows = [
            [name, str(length), *cells(jobs(rates, record, length, TRACES["The Pile"][1]))]
            for length in LENGTHS
            for name, record in [*found, *quantised_weights(found)]
        ]
        title = "Predicted job times by prompt (ZDC figures 3b, 4, 5 and 9, in shape)"
        text = f"{TEXT}Milliseconds; `sent` is figure 9's communication, /ZO figure 5 without the bases."
        yield Table(["cache", "prompt", "time", *PARTS], rows, title, text)
        rows = [
            [name, f"{record['bytes']:.0f}", number(record["q_d"])]
            for name, record in sorted(found_equal(store), key=lambda pair: -pair[1]["bytes"])
        ]
        title = "Perplexity at equal bytes (ZDC figures 20 and 23, in shape)"
        text = "By bytes of a token, which stand for times. Q_d = (perplexity' - perplexity) / perplexity, measured."
        yield Table(["cache", "bytes", "Q_d"], rows, title, text)
        rows = [[name, *(f"{x:.4g}" for x in rate_curve(rates, record)[-1])] for name, record in found]
        title = "Predicted latency at the highest request rate (ZDC figure 21, in shape)"
        text = f"{TEXT}With as many requests of The Pile's mean as fit into {GPU_BYTES >> 30} GB, always; no queue."
        yield Table(["cache", "requests a second", "seconds a token", "batch"], rows, title, text)

    def plots(self, store: StudyStore) -> dict[str, Callable[[Any], None]]:
        rates, found = read(store)
        return {self.name: partial(_draw, rates, found, found_equal(store))} if rates and found else {}


def read(store: StudyStore) -> tuple[Rates | None, Found]:
    """The rates, and by label the caches at equal quality, each recipe's again with rebuilding (/ZO)."""
    records = store.part(Zdc.name)
    rates = Rates(**records["rates"]) if "rates" in records else None
    found = []
    for key, record in records.items():
        if key.partition("/")[0] in ("caches", "at equal Q_d") and "skipped" not in record:
            found.append((record["name"], record))
            if record.get("rebuilt_online"):
                found.append((f"{record['name']}/ZO", record | {"rebuilt": record["rebuilt_online"]}))
    return rates, found


def found_equal(store: StudyStore) -> Found:
    """The caches at the bytes of the chosen tiers, and those whose bytes cannot be chosen."""
    records = store.part(Zdc.name).items()
    return [(r["name"], r) for k, r in records if k.startswith(("caches/", "at equal bytes/")) and "skipped" not in r]


def jobs(rates: Rates, record: dict[str, Any], prompt: int, output: int) -> dict[str, float]:
    """Predicted seconds of a request, by PARTS."""
    keys, bandwidth = output * (prompt + (output + 1) / 2), rates.bandwidth_bytes_per_s
    return {
        "sent": record["sent"][str(prompt)] / rates.link_bytes_per_s,
        "weights": output * rates.weight_bytes * record.get("weights", 1.0) / bandwidth,
        "cache": keys * record["bytes"] / bandwidth,
        "rebuilt": keys * record["rebuilt"] / bandwidth,
    }


def rate_curve(rates: Rates, record: dict[str, Any]) -> list[tuple[float, float, int]]:
    """Requests a second, seconds a token, and the batch, for batches in powers of two up to what fits."""
    prompt, output = TRACES["The Pile"]
    most = max(1, int((GPU_BYTES - rates.weight_bytes) // (record["bytes"] * (prompt + output))))
    parts, curve = jobs(rates, record, prompt, output), []
    for batch in [*(1 << i for i in range(most.bit_length()) if 1 << i < most), most]:
        time = parts["weights"] + batch * (sum(parts.values()) - parts["weights"])
        curve.append((batch / time, time / output, batch))
    return curve


def cells(parts: dict[str, float]) -> list[str]:
    return [f"{1000 * x:.3f}" for x in (sum(parts.values()), *(parts[part] for part in PARTS))]


def quantised_weights(found: Found) -> Found:
    """Figure 3's other two: weights in 4 bits, and 4 bits that are sent (method 1)."""
    records = dict(found)
    four, whole = records.get("4 bits"), records.get("uncompressed")
    if four is None or whole is None:
        return []
    sent = {length: size * four["bytes"] / whole["bytes"] for length, size in whole["sent"].items()}
    return [("4 bits, sent so", four | {"sent": sent}), ("weights in 4 bits", whole | {"weights": WEIGHTS_4})]


def _rates(study: StudyContext) -> dict[str, Any]:
    settings, checkpoint = study.plan.first.objective, study.checkpoint
    device = find_device(settings.device, settings.device_file)
    if device.link_bytes_per_s is None:
        raise UsageError(f"device {settings.device}: its link is not known.", "Name another objective.device.")
    weights = sum((checkpoint.folder / name).stat().st_size for name in checkpoint.files)
    return vars(Rates(weights, device.bandwidth_bytes_per_s, device.link_bytes_per_s))


@dataclass(frozen=True)
class Choice:
    """A cache that removes a share of the bytes: its record, what the busiest process sends of a prompt, by tokens, and
    the bytes that are written and read in every step for a token, so that attention sees it."""

    measure: Callable[[float], CacheRecord]
    sent: Callable[[float], dict[str, float]]
    rebuilt: Callable[[float], float] = lambda removed: 0.0

    def described(self, removed: float, record: CacheRecord, **more: Any) -> dict[str, Any]:
        """What tables need of its record."""
        if record.skipped:
            return {"skipped": record.skipped}
        size, q_d = record.long_kv_bytes_per_token, 1 / record.ppl_ratio - 1
        sent, rebuilt = self.sent(removed), self.rebuilt(removed)
        return {"name": record.name, "bytes": size, "q_d": q_d, "sent": sent, "rebuilt": rebuilt, **more}


def _sent(study: StudyContext, layouts: Sequence[LayerLayout], share: float = 1.0) -> dict[str, float]:
    shape, size = attention_shape(study.checkpoint.config), study.cache_dtype.itemsize
    lengths = sorted({*LENGTHS, *(prompt for prompt, _ in TRACES.values())})
    return {str(n): share * of_heads(layouts, shape, n, ceil(n / SEGMENT), size).busiest_bytes for n in lengths}


def _whole(study: StudyContext, removed: float) -> dict[str, float]:
    """What does not compress before it sends."""
    del removed
    return _sent(study, uncompressed(attention_shape(study.checkpoint.config)))


def _by_ratio(study: StudyContext, removed: float) -> dict[str, float]:
    """Ratios cut queries as keys, and outputs as values."""
    return _sent(study, uncompressed(attention_shape(study.checkpoint.config)), 1 - removed)


def _by_ranks(study: StudyContext, name: str, removed: float) -> dict[str, float]:
    measurer, path = study.path(name, study.plan.recipes[name])
    plan = path.at_compression(removed)
    assert plan is not None  # it was measured
    return _sent(study, [layout for layout, _ in planned_layouts(measurer.run.bases(plan.channels), plan.rounded)])


def _fixed(study: StudyContext, label: str, policy: Policy | None) -> dict[str, Any]:
    record = StudiedCache(label, policy).measure(study, label)
    rebuilt = 0.0 if policy is None else 2.0 * study.whole_bytes
    return Choice(lambda _: record, partial(_whole, study), lambda _: rebuilt).described(0.0, record)


def _tiers(study: StudyContext, name: str) -> dict[str, Any]:
    """By the record of `tiers`."""
    record = CacheRecord(**study.store.records[f"{Tiers.name}/{name}: tiers"])
    choice = Choice(lambda _: record, partial(_by_ratio, study))
    return choice.described(record.compression, replace(record, name=f"{name} with tiers"))


def _chosen(study: StudyContext, name: str, label: str, equal: str) -> dict[str, Any]:
    """At the strongest that costs at most LIMIT, or at the bytes of the tiers that were chosen."""
    choice = _choices(study, name)[label]
    if equal == "Q_d":
        found = most_removed(choice.measure, lambda record: 1 / record.ppl_ratio - 1 <= LIMIT)
        if found is None:
            return {"skipped": f"nothing keeps a Q_d of {LIMIT:g}"}
    else:
        tiers = study.store.records[f"{Tiers.name}/{name}: tiers"]
        if tiers["skipped"]:
            return {"skipped": tiers["skipped"]}
        removed = tiers["compression"]
        found = removed, choice.measure(removed)
    return choice.described(*found, rebuilt_online=2 * study.whole_bytes if label == name else 0)


def _choices(study: StudyContext, name: str) -> dict[str, Choice]:
    """What removes a share of the cache that can be chosen, by label."""
    recipe, gear = study.plan.recipes[name], FIXED["GEAR-4"]

    def measured(label: str, make: Callable[[float], StudiedCache]) -> Callable[[float], CacheRecord]:
        return lambda removed: make(removed).measure(study, label)

    def one_ratio(removed: float) -> CacheRecord:
        bench = study.bench()
        compress(study, name, recipe, bench.network, removed)
        return bench.record(f"{name}/DT", CachedModel(bench.network, compressed=True))

    def alike(removed: float) -> CacheRecord:
        """g = 0.5 in all layers, and ratios as 0.26 to 0.45 (section 6.5), as far as they go."""
        bench, (inner, outer) = study.bench(), (min(0.95, removed * ratio / 0.355) for ratio in (0.26, 0.45))
        compress(study, name, recipe, bench.network)
        policy = TiersPolicy(0.5, (), inner, outer, inner, outer)
        return bench.record(f"{name}/DL", CachedModel(bench.network, policy, compressed=True))

    ranks, ratios, latents = partial(_by_ranks, study, name), partial(_by_ratio, study), 2.0 * study.whole_bytes
    h2o, geared = f"{name} and H2O", f"{name} and GEAR-4"
    return {
        "H2O": Choice(measured("H2O", lambda x: StudiedCache("H2O", evictions(1 - x)["H2O"])), partial(_whole, study)),
        name: Choice(measured(name, lambda x: StudiedCache(name, None, name, x)), ranks),
        h2o: Choice(measured(h2o, partial(both, name, "H2O")), lambda x: ranks(equal_contribution(x))),
        geared: Choice(
            measured(geared, lambda x: StudiedCache(name, gear, name, x)), ranks, lambda x: latents * (1 - x)
        ),
        f"{name}/DT": Choice(one_ratio, ratios),
        f"{name}/DL": Choice(alike, ratios),
    }


def _draw(rates: Rates, found: Found, equal: Found, figure: Any) -> None:
    figure.suptitle("predicted from bytes, in shape ZDC's figures 4, 5, 9, 19 to 23")
    figure.set_size_inches(14, 10)
    (lengths, bars), (quality, latency) = figure.subplots(2, 2)
    output = TRACES["The Pile"][1]
    for index, (name, record) in enumerate(found):
        times = [(n, 1000 * sum(jobs(rates, record, n, output).values())) for n in LENGTHS]
        draw_line(lengths, index, times, name)
        curve = rate_curve(rates, record)
        draw_line(latency, index, [(rate, 1e6 * time) for rate, time, _ in curve], name, markevery=[-1])
    lengths.set(xlabel="prompt (tokens)", ylabel="predicted ms of a job", title="by prompt (figures 4, 5, 9)")
    latency.set(xlabel="predicted requests a second", ylabel="predicted µs a token", title="The Pile (figure 21)")
    latency.set(xscale="log", yscale="log")
    draw_legend(lengths)
    names, left = [name for name, _ in found], [0.0] * len(found)
    for part in PARTS:
        values = [1000 * jobs(rates, record, *TRACES["The Pile"])[part] for _, record in found]
        bars.barh(names, values, left=left, label=part)
        left = [a + b for a, b in zip(left, values, strict=True)]
    bars.set(xlabel="predicted ms of a job", title=f"The Pile, Q_d at most {LIMIT:g} (figures 19, 22)")
    bars.invert_yaxis()
    draw_legend(bars)
    for index, (name, record) in enumerate(equal):
        draw_line(quality, index, [(record["bytes"], record["q_d"])], name, linestyle="")
    quality.set(xlabel="bytes of cache per token", ylabel="Q_d, measured", title="by bytes (figures 20, 23)")
    draw_legend(quality)
