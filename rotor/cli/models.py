"""Looking at models and trying them: generate, inspect, recipes."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from ..logs import printable
from . import is_first_process
from .app import AsJson, BatchTokens, Device, Dtype, Model, Quiet, RecipeOverrides, Revision, app, print_json
from .console import show_progress
from .plans import print_inspection


class Parallel(str, Enum):
    """What is spread over processes."""

    sequence = "sequence"


@app.command(
    epilog='Example: rotor generate out/demo "def main(" --max-new-tokens 40. Over several processes: torchrun '
    "--nproc-per-node 4 -m rotor generate ... --parallel sequence"
)
def generate(
    folder: Annotated[str, typer.Argument(help="A compressed checkpoint (or any model's folder or hub id).")],
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    profile: Annotated[str | None, typer.Option(help="Rank profile of an elastic checkpoint, e.g. 0.95.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy; above, samples at this temperature.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed for sampling.")] = 0,
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
    quiet: Quiet = False,
) -> None:
    """Continue a prompt with transformers' generate()."""
    from ..models.generation import continue_prompt

    with show_progress(quiet).task("generate", None, ""):
        timeout_s = None if parallel is None else parallel_timeout
        result = continue_prompt(folder, prompt, max_new_tokens, temperature, seed, device, dtype, profile, timeout_s)
    if not is_first_process():
        return
    if as_json:
        print_json(result)
    else:
        print(printable(result["text"]))


@app.command(epilog="Example: rotor inspect artifacts/demo-model --recipe fdc")
def inspect(
    model: Model,
    recipe: Annotated[str, typer.Option(help="Recipe whose needs are shown: a bundled one or a YAML file.")] = "rotor",
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
    from ..planning.inspection import inspect as run_inspect

    found = run_inspect(
        model, recipe, overrides or [], revision=revision, device=device, dtype=dtype, batch_tokens=batch_tokens
    )
    if as_json:
        print_json(found.to_dict())
    else:
        print_inspection(found)


@app.command(epilog="Example: rotor recipes --json")
def recipes(as_json: AsJson = False) -> None:
    """List the bundled recipes, and the bases and rank methods that a recipe may name."""
    from ..recipe import bundled_recipes
    from ..recipe.checks import NAMES

    found = bundled_recipes()
    if as_json:
        print_json({name: recipe.to_dict() for name, recipe in found.items()})
        return
    for name, recipe in found.items():
        print(f"{name:15} {recipe.summary}")
    for setting, methods in NAMES.items():
        print(f"\n{setting}")
        for name, method in methods.items():
            print(f"  {name:13} {method.summary}")
