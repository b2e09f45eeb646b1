"""The content of a report's page, collected from the files of a run, a checkpoint, or both; nothing is drawn.

Where something was not measured, the field is empty and `absent` says why: a report never fills a gap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ...calibration.run import Run
from ...checked import Reader
from ...checkpoint.families import attention_shape
from ...checkpoint.files import ROTOR_JSON
from ...checkpoint.layout import AttentionShape, GroupLayout, LayerLayout
from ...checkpoint.rows import WIDTHS, NumberRow, Row
from ...checkpoint.schemas import CheckpointInfo, ModelInfo, SequenceInfo, SizeInfo, TextInfo
from ...checkpoint.sizes import CacheSize, share_removed
from ...errors import CheckpointError, RotorError
from ...models.compressed import read_report
from ...models.sequences import LONG_CONTEXT
from ...models.source import Checkpoint
from ...progress import in_bytes
from ...recipe.metric_registry import metric_info
from ...recipe.reading import load_stored_recipe
from ...recipe.recipe import Recipe
from ..evaluation.accuracy import Accuracy, chance_note
from ..point import Point
from ..table import TABLES, RankTable

if TYPE_CHECKING:
    from torch import Tensor


WHOLE_BITS = 16


@dataclass(frozen=True)
class Cell:
    """A latent in the map of ranks: channels that are kept of those that there are, and their bits of those at 16.

    widths: `28x8 76x4` are 28 channels of 8 bits and 76 of 4; nothing for channels that are numbers.
    """

    kv_heads: tuple[int, ...]
    rank: int
    channels: int
    bits: int
    whole_bits: int
    widths: str = ""

    @classmethod
    def of(cls, group: GroupLayout, side: str, head_dim: int) -> Cell:
        """side: `keys`, which stands for the latents of a joint group too, or `values`."""
        latent = group.key if side == "keys" else group.values
        channels = group.columns(head_dim)
        bits, widths = WHOLE_BITS * latent.rank, ""
        if not isinstance(latent, NumberRow):
            bits = sum(latent.bits)
            counts = {width: latent.bits.count(width) for width in WIDTHS}
            widths = " ".join(f"{count}x{width}" for width, count in counts.items() if count)
        return cls(group.kv_heads, latent.rank, channels, bits, WHOLE_BITS * channels, widths)


def groups_of_point(run: Run, point: Point) -> list[list[GroupLayout]]:
    """The groups of each layer of a measured point."""
    layers = []
    size = run.form.group_size
    for index in range(len(point.ranks)):
        pairs: Sequence[tuple[Row, ...]] = [(NumberRow(qk), NumberRow(v)) for qk, v in point.ranks[index]]
        if point.channels:
            pairs = point.channels[index]
        heads = [tuple(range(i * size, (i + 1) * size)) for i in range(len(pairs))]
        layers.append([GroupLayout(kv_heads, *pair) for kv_heads, pair in zip(heads, pairs, strict=True)])
    return layers


@dataclass
class ReportData:
    """Everything that the page shows.

    kind: `checkpoint` (a folder that export wrote) or `run` (one that calibrate wrote).
    headline: (label, value, note). spectra: per layer and latent singular values over the largest, averaged over the
    groups; spectra_of: by latent, what they are of. ratios: (name, value or why there is none) of
    the point that is shown; ratios_of: the split that they are on.
    ranks: per layer its groups by KV heads, of latents of `head_dims` channels a head. chosen: of points, that which is
    shown. absent: section -> why there is nothing to show.
    """

    kind: str
    folder: str
    model: str
    recipe: Recipe
    facts: list[tuple[str, str]] = field(default_factory=list)
    headline: list[tuple[str, str, str]] = field(default_factory=list)
    spectra: list[dict[str, list[float]]] = field(default_factory=list)
    spectra_of: dict[str, str] = field(default_factory=dict)
    ranks: list[list[GroupLayout]] = field(default_factory=list)
    head_dims: list[int] = field(default_factory=list)
    ranks_of: str = ""
    points: list[Point] = field(default_factory=list)
    chosen: Point | None = None
    ratios: list[tuple[str, str]] = field(default_factory=list)
    ratios_of: str = "report"
    target: float | None = None
    metric: str = ""
    sizes: list[tuple[str, str, str]] = field(default_factory=list)
    timings: list[tuple[str, float, int]] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    texts: list[TextInfo] = field(default_factory=list)


def collect(folder: Path) -> ReportData:
    """Collect the content of a report on a run or a checkpoint.

    Raises:
        CheckpointError: neither of them, or a damaged one.
    """
    if (folder / ROTOR_JSON).is_file():
        info = read_report(folder)
        return collect_checkpoint(folder, info, load_stored_recipe(folder), _opened_run(folder, info["run"]))
    if (folder / "run.json").is_file():
        return collect_run(Run.open(folder))
    raise CheckpointError(
        f"{folder}: neither run.json nor {ROTOR_JSON} is in it.",
        "Give a folder that `rotor calibrate` or `rotor export` wrote.",
    )


def collect_run(run: Run) -> ReportData:
    """Collect what the report of an open run shows."""
    data = ReportData("run", run.folder.resolve().name, str(run.info["model"]["name"]), run.recipe)
    table = RankTable.latest(run)
    point = None
    if table and table.points:
        data.metric = metric_info(table.context.metric).description
        point = max(table.points, key=lambda point: (point.report is not None, point.stored))
        data.points, data.chosen = table.points, point
        data.ratios_of, what = ("report", "exported") if point.report else ("search", "measured")
        data.ranks_of = f"of the strongest point that was {what}: compression {point.stored:.3f}"
        data.ratios = _accuracy_of(point, table).ratio_rows(data.ratios_of)
        tokens = table.context.settings.get("context_tokens", LONG_CONTEXT)
        size = _run_size(run, point)
        _headline(data, point, size.info, size.of_sequence(tokens), run.info["model"])
    else:
        why = f"No point was measured yet (nothing in {TABLES}); `rotor export RUN -o OUT --accuracy 0.99` measures."
        data.absent.update({"points": why, "ranks": why})
    _add_run(data, run, table, point)
    return data


def collect_checkpoint(
    folder: Path, report: CheckpointInfo, recipe: Recipe, run: Run | str, place: Path | None = None
) -> ReportData:
    """Collect what the report of a checkpoint shows, given its rotor.json and recipe.

    Args:
        run: its opened run, or why there is none. place: where the folder will be, if that is not where it is.
    """
    data = ReportData("checkpoint", (place or folder).resolve().name, report["source"]["name"], recipe)
    accuracy = Accuracy.read(report["accuracy"], Reader(str(folder / ROTOR_JSON), CheckpointError, "Export again."))
    data.metric = metric_info(accuracy.metric).description
    data.target = accuracy.target
    data.texts = report.get("texts", [])
    chosen = Point.of_checkpoint(report, accuracy.measured)
    data.ratios = accuracy.ratio_rows() + accuracy.part_rows()
    if accuracy.report is None:
        data.absent["points"] = f"Accuracy was not measured: {accuracy.not_measured}."
    else:
        data.points = [chosen]
        data.chosen = chosen
    shape = run.shape if isinstance(run, Run) else attention_shape(Checkpoint(folder).config)
    data.head_dims = [layer.head_dim for layer in shape.layers]
    layouts = [LayerLayout.from_dict(layer, ROTOR_JSON) for layer in report["layouts"]]
    if len(layouts) != shape.num_layers:
        raise CheckpointError(
            f"{ROTOR_JSON}: {len(layouts)} layouts, expected {shape.num_layers}.", "Get the checkpoint again."
        )
    data.ranks = [sorted(layout.groups, key=lambda group: group.kv_heads) for layout in layouts]
    data.ranks_of = "of this checkpoint"
    size = report["kv_bytes_per_token"]
    _headline(data, chosen, size, report["kv_bytes_of_sequence"], report["source"])
    if isinstance(run, Run):  # which has other measured points, spectra and timings
        table = None if accuracy.table is None else RankTable.named(run, accuracy.table)
        point = next((p for p in table.points if p.ranks_json == report["ranks"]), None) if table else None
        if table and point and "cache" not in report:  # points count rows alone, without what a policy makes of them
            data.points, data.chosen = table.points, point
        _add_run(data, run, table, point)
    else:
        for section in ("spectra", "timings"):
            data.absent[section] = f"The run folder is not where rotor.json says ({run})."
    weights = in_bytes(sum(path.stat().st_size for path in folder.glob("*.safetensors")))
    data.sizes.append(("weights of this checkpoint", weights, "safetensors files"))
    return data


def _accuracy_of(point: Point, table: RankTable) -> Accuracy:
    """The accuracy that a table has of a point."""
    splits = {"search": point.search, "report": point.report}
    measured = {split: fidelity for split, fidelity in splits.items() if fidelity is not None}
    return Accuracy(table.context.metric, None, measured, table.base, table.left_out, table.context.data)


def _opened_run(folder: Path, recorded: str) -> Run | str:
    try:
        return Run.open(folder.resolve() / recorded)
    except RotorError as error:
        return error.message.replace(str(folder.resolve()), folder.name)


def _add_run(data: ReportData, run: Run, table: RankTable | None, point: Point | None) -> None:
    """Add facts, times, spectra and ranks from a run and the point that is shown."""
    info, shape = run.info, run.shape
    data.timings = [(stage, v["seconds"], v["peak_bytes"]) for stage, v in info["stages"].items()]
    tokens = info["tokens"]
    data.facts = [
        ("model", f"{data.model} ({info['model'].get('model_type', 'unknown type')})"),
        (
            "attention",
            f"{shape.num_layers} layers, {shape.num_heads} query heads, {shape.heads_in_words} dimensions",
        ),
        *([("windows", _windows(shape))] if shape.windows else []),
        ("calibration tokens", f"{tokens.get('count')} {tokens.get('source')}, rows of {tokens.get('seq_len')}"),
        ("calibrated on", f"{info['device']} in {info['dtype']}"),
        ("versions", ", ".join(f"{k} {v}" for k, v in info["versions"].items())),
    ]
    if table and table.base:
        split = "report" if "report" in table.base else "search"
        base, context = table.base[split], table.context
        data.facts += [
            ("measured on", f"{context.data}, {base['tokens']} predicted tokens to {split}"),
            ("measured in", f"{context.dtype} on {context.device_type}"),
            (
                "uncompressed model",
                f"perplexity {base['perplexity']:.3f}, accuracy {base['token_accuracy']:.4f}{chance_note(base)}",
            ),
        ]
    try:
        source = in_bytes(Checkpoint(run.model_folder).total_bytes())
        data.sizes.append(("weights of the source", source, "safetensors files"))
    except RotorError as error:
        data.absent["sizes"] = f"The source model is not where run.json says: {error.message}"
    try:
        spectra = [run.spectra(layer) for layer in range(shape.num_layers)]  # not the bases, which are far larger
    except RotorError as error:
        data.absent["spectra"] = error.message
        return
    names = _spectrum_names(run)
    data.spectra_of = names
    data.spectra = [{side: _mean_spectrum(values) for side, values in layer.items()} for layer in spectra]
    if point and not data.ranks:
        data.ranks = groups_of_point(run, point)
        data.head_dims = [layer_shape.head_dim for layer_shape in shape.layers]


def _windows(shape: AttentionShape) -> str:
    """Counts of layers that hold at most so many tokens, in words."""
    counts = {window: shape.windows.count(window) for window in sorted({w for w in shape.windows if w})}
    held = [f"{count} of {shape.num_layers} layers hold at most {window:,} tokens" for window, count in counts.items()]
    return ", ".join(held) or "none"


def _spectrum_names(run: Run) -> dict[str, str]:
    """The form of each of the latents in words, by name."""
    keys, heads, joint = run.form
    size = f"{heads} head{'s' if heads > 1 else ''} a group"
    words = (form.in_words(run.shape.layer(layer)) for layer, form in enumerate(keys))
    where = f"{' or '.join(dict.fromkeys(words))}, {size}"
    return {"joint": where} if joint else {"qk": where, "vo": size}


def _mean_spectrum(values: Tensor) -> list[float]:
    """Singular values [num_groups, channels] over each group's largest, averaged over the groups."""
    largest = values[:, :1].clamp(min=1e-300)
    return [float(value) for value in (values / largest).mean(0)]


def _run_size(run: Run, point: Point) -> CacheSize:
    """Size of the cache of a run's point."""
    element_bytes = int(run.info["element_bytes"])
    exact = [run.recipe.exact.tokens] * run.shape.num_layers
    return CacheSize.of_rows(point.row_bytes(element_bytes), run.shape, element_bytes, exact)


def _headline(data: ReportData, point: Point, size: SizeInfo, held: SequenceInfo, model: ModelInfo) -> None:
    fidelity = point.report or point.search
    split = "search" if point.report is None else "report"
    target = "no target was set" if data.target is None else f"target {data.target:g}"
    if point.report is not None and data.target is not None:
        why = point.report.against(data.target)[1]
        target += f"{why and ': '}{why}"
    measured = ("accuracy", "not measured", target)
    if fidelity is not None:
        measured = (
            "accuracy",
            f"{fidelity.accuracy:.4f}",
            f"{fidelity.interval_in_words} on the {split} split; {target}",
        )
    data.headline = [
        ("rows of the KV cache", f"{100 * point.stored:.1f} % less", "stored compression"),
        ("bytes per token", f"{size['before']} → {size['after']}", "rows of all layers"),
        measured,
    ]
    long = f"{in_bytes(held['before'])} → {in_bytes(held['after'])}"
    share = 100 * share_removed(held["before"], held["after"])
    data.sizes.append((f"KV cache at {held['tokens']:,} tokens", long, f"one sequence, {share:.1f} % less"))
    if states := model["state_bytes"]:
        data.sizes.append(("states beside the KV cache", in_bytes(states), "one sequence of any length, unchanged"))
