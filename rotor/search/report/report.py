"""The report of a run or a checkpoint: one HTML file with everything in it, readable with no network."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import accumulate
from pathlib import Path

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup, escape

from ...calibration.run import Run
from ...checkpoint.files import ROTOR_JSON, write_text
from ...checkpoint.output_folder import check_file
from ...checkpoint.schemas import CheckpointInfo
from ...errors import UsageError
from ...progress import in_bytes, in_time
from ...recipe.recipe import Recipe
from ...versions import pip_install
from .collect import Cell, ReportData, collect, collect_checkpoint, collect_run
from .figures import SIDE_NAMES, figures

NAME = "report.html"
TEMPLATE = "report.html.jinja"


@dataclass(frozen=True)
class Report:
    """A written report: the file, the figures in it, and what it could not show with the reason."""

    path: Path
    figures: list[str]
    absent: dict[str, str]


def report(folder: str | Path, out: str | Path | None = None) -> Report:
    """Write the report of a run or of a checkpoint.

    Args:
        folder: what calibrate or export wrote. out: the HTML file; by default report.html in a run, and
            OUT-report.html beside a checkpoint, whose files stay as its manifest says.
    Raises:
        UsageError: `out` is not an .html file, or cannot be written where it is. CheckpointError: a damaged folder.
    """
    folder = Path(folder)
    if out is None and (folder / ROTOR_JSON).is_file():
        out = folder.resolve().with_name(f"{folder.resolve().name}-{NAME}")
    path = folder / NAME if out is None else Path(out)
    if path.suffix not in (".html", ".htm") or path.is_dir():
        raise UsageError(f"{path}: a report is an .html file.", "Example: -o report.html")
    check_file(path)
    return write(collect(folder), path)


def write(data: ReportData, path: Path) -> Report:
    drawn = figures(data)
    try:
        write_text(path, render(data, drawn))
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror}).", "Choose another place.") from error
    return Report(path, list(drawn), data.absent)


def write_with_checkpoint(folder: Path, place: Path, info: CheckpointInfo, recipe: Recipe, run: Run) -> None:
    """Put a report into the folder of a checkpoint that is being written, and another into its run.

    The one of the checkpoint leaves out seconds, so that the same run gives the same bytes.

    Args:
        place: where the folder will be, as the user gave it. info: the content of its rotor.json.
    """
    data = collect_checkpoint(folder, info, recipe, run, place)
    data.timings = []
    data.absent["timings"] = "Seconds of each stage are in the report of the run: they differ each time."
    write(data, folder / NAME)
    if run.writable:
        write(collect_run(run), run.folder / NAME)


def render(data: ReportData, drawn: dict[str, str]) -> str:
    """The page, with its figures by name."""
    energies = [
        {side: f"{_channels_for(values)} of {len(values)}" for side, values in layer.items()} for layer in data.spectra
    ]
    return _template().render(
        data=data,
        figures=drawn,
        spectra_figures=[name for name in drawn if name.startswith("spectra-")],
        energies=energies,
        sides={side: SIDE_NAMES[side] for side in data.spectra_of},
        recipe_yaml=data.recipe.to_yaml(),
        kept=list(_kept_by_layer(data)),
        whole_bits=_whole_bits(data),
        next_steps=_next_steps(data),
    )


def _kept_by_layer(data: ReportData) -> Iterator[tuple[int, str, Cell]]:
    """Layer, what it is of, and what is kept of each latent of each group of KV heads."""
    for layer, (groups, head_dim) in enumerate(zip(data.ranks, data.head_dims, strict=True)):
        for group in groups:
            if group.joint:
                yield layer, "keys and values", Cell.of(group, "keys", head_dim)
            else:
                for side in ("keys", "values"):
                    yield layer, side, Cell.of(group, side, head_dim)


def _whole_bits(data: ReportData) -> str:
    """Bits of a token in an uncompressed layer, in words."""
    layers: dict[int, int] = {}
    for layer, _, cell in _kept_by_layer(data):
        layers[layer] = layers.get(layer, 0) + cell.whole_bits
    return " to ".join(f"{bits:,}" for bits in sorted({min(layers.values()), max(layers.values())})) if layers else ""


def _next_steps(data: ReportData) -> list[tuple[str, str]]:
    """Commands that follow, each with what it does; from the folder above, as no path of this machine is shown."""
    place = shlex.quote(data.folder)
    if data.kind == "run":
        export = f"rotor export {place} -o OUT --accuracy 0.99"
        return [(export, "writes a checkpoint; measured points are not measured again")]
    generate = f'rotor generate {place} "Once upon a time"'
    serve = f"vllm serve {place}"
    return [
        (f"rotor validate {place}", "checks files, numbers and accuracy"),
        (generate, "tries it; a model with a chat template answers"),
        (serve, f"serves it, where rotor is installed with {pip_install('vllm')}"),
    ]


def _channels_for(spectrum: list[float]) -> int:
    """Number of leading channels that hold 0.99 of the sum of squares."""
    sums = list(accumulate(value * value for value in spectrum))
    return next(i + 1 for i, total in enumerate(sums) if total >= 0.99 * sums[-1])


def _code(text: str) -> Markup:
    """Backticks as <code>."""
    return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(text))))


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    environment.filters |= {"bytes": in_bytes, "code": _code, "time": in_time}
    return environment.from_string((resources.files("rotor.search.report") / TEMPLATE).read_text("utf-8"))
