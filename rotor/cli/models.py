"""Looking at models and trying them: generate, inspect, recipes."""

from __future__ import annotations

import sys
from dataclasses import asdict
from enum import Enum
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from ..errors import UsageError
from ..logs import printable
from . import completion, is_first_process
from .app import (
    AsJson,
    BatchTokens,
    CachePolicy,
    Device,
    Dtype,
    Model,
    QuietText,
    RecipeOverrides,
    Revision,
    app,
    print_json,
)
from .console import show_progress
from .plans import print_inspection


class Parallel(str, Enum):
    """What is spread over processes."""

    sequence = "sequence"


@app.command(
    epilog='Example: rotor generate out/demo "def main(" --max-new-tokens 40. A long prompt: rotor generate out/demo '
    "--prompt-file prompt.txt. Over several processes: torchrun --nproc-per-node 4 -m rotor generate ... "
    "--parallel sequence"
)
def generate(
    folder: Annotated[str, typer.Argument(help="A compressed checkpoint (or any model's folder or hub id).")],
    prompt: Annotated[str | None, typer.Argument(help="Text to continue, or to answer.")] = None,
    prompt_file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The prompt as a file in UTF-8, - for stdin; the end of its last line goes."),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, also where the model has a chat template.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy; above, samples at this temperature.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed for sampling.")] = 0,
    cache: CachePolicy = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    parallel: Annotated[
        Parallel | None,
        typer.Option(help="sequence: spread the prompt and its cache over the processes that torchrun started."),
    ] = None,
    parallel_timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds that a process waits for another before all end.")
    ] = 300.0,
    as_json: AsJson = False,
    quiet: QuietText = False,
) -> None:
    """Continue a prompt with transformers' generate(); a model with a chat template answers it.

    Text is printed as it is generated; with --json one object at the end.
    """
    from ..models.hub import check_name
    from ..recipe.settings import Compute

    if parallel is not None and prompt_file == "-":
        raise UsageError("--prompt-file -: several processes cannot all read stdin.", "Give a file.")
    text = _read_prompt(prompt, prompt_file)
    Compute(device, dtype).check()
    check_name(folder)

    from ..models.generation import continue_prompt

    progress = show_progress(quiet)
    first, timeout_s = is_first_process(), None if parallel is None else parallel_timeout
    result = continue_prompt(
        folder,
        text,
        max_new_tokens,
        temperature,
        seed,
        device,
        dtype,
        cache,
        raw=raw,
        progress=progress,
        on_text=_show if first and not as_json else None,
        parallel_timeout_s=timeout_s,
    )
    if first and as_json:
        print_json(result)
    elif first:
        print()


def _show(text: str) -> None:
    sys.stdout.write(printable(text))
    sys.stdout.flush()


def _read_prompt(prompt: str | None, file: str | None) -> str:
    """The prompt, given in one of two ways."""
    if (prompt is None) == (file is None):
        got = "both" if file is not None else "neither"
        raise UsageError(f"got {got} of PROMPT and --prompt-file.", 'Example: rotor generate OUT "Once upon a time"')
    if file is None:
        assert prompt is not None
        return prompt
    try:
        text = sys.stdin.buffer.read().decode("utf-8") if file == "-" else Path(file).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "is not UTF-8"
        raise UsageError(
            f"--prompt-file {file}: cannot be read ({why}).", "Give a text file, or - for stdin."
        ) from error
    return text.removesuffix("\n").removesuffix("\r")


@app.command(epilog="Example: rotor inspect artifacts/demo-model --recipe fdc")
def inspect(
    model: Model,
    recipe: Annotated[
        str,
        typer.Option(
            help="Recipe whose needs are shown: a bundled one or a YAML file.", autocompletion=completion.recipe_names
        ),
    ] = "rotor",
    revision: Revision = None,
    overrides: RecipeOverrides = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    batch_tokens: BatchTokens = 2048,
    as_json: AsJson = False,
) -> None:
    """Tell what a model is to rotor: attention, cache, what a recipe does with it, memory and disk that it takes.

    Reads the configuration and the headers of the shards, no weights; of a hub id nothing else is fetched.
    """
    from ..models.hub import check_name
    from ..recipe import load_recipe
    from ..recipe.settings import Compute

    load_recipe(recipe, overrides or [])
    Compute(device, dtype).check()
    check_name(model, revision)

    from ..planning.inspection import inspect as run_inspect

    found = run_inspect(
        model, recipe, overrides or [], revision=revision, device=device, dtype=dtype, batch_tokens=batch_tokens
    )
    if as_json:
        print_json(found.to_dict())
    else:
        print_inspection(found)


@app.command(epilog="Example: rotor recipes --show rotor")
def recipes(
    show: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Print this recipe whole, every default filled in: YAML that --recipe takes.",
            autocompletion=completion.recipe_names,
        ),
    ] = None,
    fields: Annotated[
        bool,
        typer.Option("--fields", help="Print what each field of a recipe may be, its default and what it decides."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the bundled recipes, the bases and rank methods that a recipe may name, and cache policies; or show one."""
    from ..format.yaml_files import read_yaml
    from ..recipe import bundled_recipes, load_recipe
    from ..recipe.reference import recipe_fields, reference_page
    from ..recipe.sections import NAMES

    if show is not None and fields:
        raise UsageError("--show and --fields: expected one of them.", "Example: rotor recipes --show rotor")
    if fields:
        found = [asdict(field) for section in recipe_fields().values() for field in section]
        print_json(found) if as_json else print(reference_page())
        return
    if show is not None:
        recipe = load_recipe(show)
        print_json(recipe.to_dict()) if as_json else print(recipe.to_yaml(), end="")
        return
    bundled = bundled_recipes()
    if as_json:
        print_json({name: recipe.to_dict() for name, recipe in bundled.items()})
        return
    for name, recipe in bundled.items():
        print(f"{name:15} {recipe.summary}")
    for setting, methods in NAMES.items():
        print(f"\n{setting}")
        for name, method in methods.items():
            print(f"  {name:13} {method.summary}")
    print("\ncache policies (--cache NAME)")
    for file in sorted((resources.files("rotor.recipes") / "cache").iterdir(), key=lambda file: file.name):
        fields_of = read_yaml(file.read_text("utf-8"), file.name)
        described = ", ".join(f"{key} {value}" for key, value in fields_of.items())
        print(f"  {file.name.removesuffix('.yaml'):20} {described}")
