"""Options that several commands have: by name, and in groups."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from ..progress import Progress
from .console import print_json, show_progress

if TYPE_CHECKING:
    from ..recipe.settings import Compute

MAX_NUMBER = 1 << 30
Count = Annotated[int, typer.Option(min=1, max=MAX_NUMBER)]
OptionalCount = Annotated[int | None, typer.Option(min=1, max=MAX_NUMBER)]
"""Not `Count | None`, which older versions of typer do not read."""
NONE: Any = ()
"""The default of options that may be repeated."""

HELP = {
    "model": "Folder of the model (config.json and safetensors), or a hub id.",
    "folder": "A checkpoint that `rotor export` wrote.",
    "source": "Source model of a checkpoint without weights, if it is not where it was: a folder or a hub id.",
    "revision": "Branch, tag or commit of a hub id.",
    "recipe": "Name of a bundled recipe (see `rotor recipes`) or a YAML file.",
    "overrides": "Override a recipe field (`rotor recipes --fields` has all of them); may be repeated.",
    "text": "Text of your own (a UTF-8 file or a folder of them) to calibrate on and to measure accuracy on. Its "
    "documents are dealt to three splits that share none: calibration, search, report. Without it the recipe's tokens "
    "calibrate, and accuracy is measured on source of Python's standard library (evaluation.source=stdlib).",
    "batch_tokens": "Tokens in one forward pass of a calibration.",
    "overwrite": "Replace a non-empty output folder.",
    "no_measure": "Do not measure accuracy; an export then needs --compression or --removal-rate.",
    "cache": "How the cache is kept: none, a bundled policy (see `rotor recipes`), a YAML file, or FILE.py:CLASS of "
    "your own; default: the checkpoint's own.",
    "out": "JSON file to write.",
    "target_device": "Device whose decode time is predicted, e.g. h200 (rotor/calibration/prediction/devices.yaml).",
    "device": "auto (the GPU if there is one), cpu, cuda or cuda:N.",
    "dtype": "auto (float32 on a CPU), float32, bfloat16 or float16.",
    "offload": "Read weights from disk layer by layer: auto (if they do not fit in memory), always or never.",
    "distance": "Tokens of other text between what look-ups and copies state and what asks for it, in rows with room "
    "for that (1500: rows of 2048); default: evaluation.filler_tokens.",
    "tasks": "Benchmarks to run on the uncompressed model and on the compressed ones, separated by commas: tasks of "
    "lm-eval, by name or YAML file; of each the first evaluation.lm_eval_limit documents (docs/accuracy.md).",
    "lengths": "Tokens of the documents of RULER's tasks, with the answer.",
    "as_json": "Print one JSON object on stdout.",
    "quiet": "Print nothing but errors, and what --json or generate prints.",
}
"""Help text by parameter name, where a command's docstring has none."""

NAMES = {
    "out": ("--out", "-o"),
    "overrides": ("--set",),
    "sizes": ("--bytes",),
    "as_json": ("--json",),
    "quiet": ("--quiet", "-q"),
}
"""Names of options that are not the parameter's."""

METAVARS = {
    "overrides": "KEY=VALUE",
    "program": "COMMAND [ARGS]...",
    "tasks": "A,B",
    "lengths": "A,B",
    "text": "FILE",
    "prompt_file": "FILE",
}


@dataclass
class DeviceOptions:
    """Where forward passes run."""

    device: str = "auto"
    dtype: str = "auto"

    def checked(self) -> Compute:
        """Raises UsageError for a name that is none."""
        from ..recipe.settings import Compute

        return Compute(**{name: value for name, value in vars(self).items() if name in Compute.__dataclass_fields__})


@dataclass
class MemoryOptions(DeviceOptions):
    """Device options, with how weights are held on it."""

    offload: str = "auto"


@dataclass
class Json:
    """How results are printed."""

    as_json: bool = False

    def show(self, data: Any, text: Callable[[], None]) -> None:
        """Print the data, or what `text` prints."""
        print_json(data) if self.as_json else text()


@dataclass
class Printed(Json):
    """Output options, with --quiet."""

    quiet: bool = False

    def progress(self) -> Progress:
        return show_progress(self.quiet)


def with_options(function: Callable[..., None]) -> Callable[..., None]:
    """A function that Typer can call.

    Parameters that are groups of options, dataclasses of this module, become the options of the group. Those without a
    default are arguments, but `out`. Their help is in the docstring's Args, or in HELP.
    """
    text, _, described = (inspect.getdoc(function) or "").partition("\n\nArgs:\n    ")
    helps = HELP | dict(entry.split(": ", 1) for entry in re.split(r"\n    (?=\w+: )", described) if entry)
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    own = [p for name, p in inspect.signature(function).parameters.items() if name not in groups]
    for group in groups.values():
        own += inspect.signature(group).parameters.values()
        hints |= get_type_hints(group)
    kinds = {p.name: _explained(p, hints[p.name], " ".join(helps.get(p.name, "").split())) for p in own}

    @functools.wraps(function)
    def call(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in dataclasses.fields(group)})
        function(**given)

    call.__doc__, call.__annotations__ = text, kinds
    call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [p.replace(annotation=kinds[p.name], kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
    )
    return call


def _explained(parameter: inspect.Parameter, hint: Any, text: str) -> Any:
    """A parameter's type with what Typer shall say of it, but for what says it itself."""
    if hasattr(hint, "__metadata__"):
        info = copy.copy(hint.__metadata__[0])
        info.help = info.help or text
        return Annotated[hint.__origin__, info]
    names, metavar = NAMES.get(parameter.name, ()), METAVARS.get(parameter.name)
    if parameter.default is inspect.Parameter.empty and not names:
        return Annotated[hint, typer.Argument(help=text, metavar=metavar)]
    if parameter.default is False and not names:
        names = (f"--{parameter.name.replace('_', '-')}",)
    return Annotated[hint, typer.Option(*names, help=text, metavar=metavar)]
