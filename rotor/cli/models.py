"""Looking at models and trying them: generate, inspect, recipes, run."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import suppress
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import UsageError
from ..logs import is_first_process, printable
from ..recipe.requests import GenerationOptions, InspectionRequest
from .app import command
from .console import say
from .options import Json, OutputOptions

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    from ..recipe.recipe import Recipe

BOOTSTRAP = Path(__file__).parent / "bootstrap"
"""Folder of sitecustomize, which every Python process runs that has it on PYTHONPATH."""


@command(
    epilog='Example: rotor generate out/demo "def main(" --max-new-tokens 40. A long prompt: rotor generate out/demo '
    "--prompt-file prompt.txt. Over several processes: torchrun --nproc-per-node 4 -m rotor generate ... "
    "--parallel sequence"
)
def generate(
    folder: str,
    options: GenerationOptions,
    output: OutputOptions,
    prompt: Annotated[str | None, typer.Argument()] = None,
    prompt_file: str | None = None,
) -> None:
    """Continue a prompt with transformers' generate(); a model with a chat template answers it.

    Text is printed as it is generated; with --json one object at the end. Without a prompt it is a chat in the
    terminal, whose cache is kept from turn to turn: /new begins another one, /exit or Ctrl-D ends it.

    Args:
        folder: A compressed checkpoint (or any model's folder or hub id).
        prompt: Text to continue, or to answer; without one, a chat.
        prompt_file: A file in UTF-8 with the prompt, or - for stdin; its last line break is dropped.
    """
    from ..models.hub import check_name

    if prompt is None and prompt_file is None:
        _chat(folder, options, output)
        return
    if options.parallel is not None and prompt_file == "-":
        raise UsageError("--prompt-file -: several processes cannot all read stdin.", "Give a file.")
    text = _read_prompt(prompt, prompt_file)
    check_name(folder)

    from ..tools.generation import continue_prompt

    first = is_first_process()
    on_text = _show if first and not output.as_json else None
    result = continue_prompt(folder, text, **vars(options), on_text=on_text, progress=output.progress())
    if first:
        output.show(result, print)


def _chat(folder: str, options: GenerationOptions, output: OutputOptions) -> None:
    """Talk in the terminal."""
    if not sys.stdin.isatty():
        raise UsageError(
            "got neither of PROMPT and --prompt-file, and stdin is no terminal to chat in.",
            'Text of a pipe is read by --prompt-file -. Example: rotor generate OUT "Once upon a time"',
        )
    single_answer_options = {
        "--json": output.as_json,
        "--parallel": options.parallel is not None,
        "--cache-file": options.cache_file is not None,
        "--save-cache": options.save_cache is not None,
        "--cache-level": options.cache_level != "none",
    }
    for option, given in single_answer_options.items():
        if given:
            raise UsageError(f"{option}: not in a chat.", "Give a PROMPT or --prompt-file, too.")
    from ..models.hub import check_name

    check_name(folder)

    from ..tools.chat import Chat

    with suppress(ImportError):
        import readline  # noqa: F401 lets input() edit lines and remember them

    chat = Chat(folder, options, output.progress())
    say("/new begins another conversation, Ctrl-C stops an answer, /exit or Ctrl-D ends.")
    while (said := _turn()) not in (None, "/exit"):
        try:
            if said == "/new":
                chat.forget()
            elif said:
                chat.say(said, _show)
                print()
        except UsageError as error:
            say(f"{error.message} {error.hint}")
        except KeyboardInterrupt:
            say("\nThis turn was forgotten.")


def _turn() -> str | None:
    """Read what the user says next; None at the end."""
    try:
        return input("> ").strip()
    except EOFError:
        print()
        return None


def _show(text: str) -> None:
    sys.stdout.write(printable(text))
    sys.stdout.flush()


def _read_prompt(prompt: str | None, file: str | None) -> str:
    """Read the prompt, which is given in one of two ways."""
    if prompt is not None and file is not None:
        raise UsageError("got both of PROMPT and --prompt-file.", 'Example: rotor generate OUT "Once upon a time"')
    if file is None:
        assert prompt is not None
        return prompt
    try:
        text = sys.stdin.buffer.read().decode("utf-8") if file == "-" else Path(file).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "is not UTF-8"
        hint = "Give a text file, or - for stdin."
        raise UsageError(f"--prompt-file {file}: cannot be read ({why}).", hint) from error
    return text.removesuffix("\n").removesuffix("\r")


@command(epilog="Example: rotor inspect artifacts/demo-model --recipe fdc")
def inspect(request: InspectionRequest, output: Json, layouts: bool = False) -> None:
    """Describe a model: attention, cache, what a recipe does with it, the memory and disk that this takes.

    Reads the configuration, the headers of the shards and the tokenizer, no weights; of a hub id nothing but the
    configuration is fetched. A config.json alone is enough.

    Args:
        layouts: Predict the time of attention with other layouts of the cache, too.
    """
    from ..models.hub import check_name

    check_name(str(request.model), request.revision)

    from ..tools.inspection import run_inspection
    from .plans import print_inspection

    inspection = run_inspection(request)
    output.show(inspection.to_dict(), lambda: print_inspection(inspection, layouts))


@command(epilog="Example: rotor recipes --show rotor")
def recipes(output: Json, show: str | None = None, fields: bool = False) -> None:
    """List the bundled recipes, the bases and rank methods that a recipe may name, and cache policies; or show one.

    Args:
        show: Print this recipe whole, every default filled in, and how it differs from its paper: YAML that
            --recipe takes. Of a cache policy each field with its meaning: YAML that --cache takes.
        fields: Print what each field of a recipe may be, its default and what it decides.
    """
    from ..recipe.reading import bundled_recipes, comments_of, load_recipe
    from ..recipe.reference import recipe_fields, reference_page

    if show is not None and fields:
        raise UsageError("--show and --fields: expected one of them.", "Example: rotor recipes --show rotor")
    if fields:
        described = [asdict(field) for section in recipe_fields().values() for field in section]
        output.show(described, lambda: print(reference_page()))
    elif show in _policy_files() and show not in bundled_recipes():
        from ..policies import bundled_policies, describe_policy

        output.show(bundled_policies()[show].as_dict(), lambda: print(describe_policy(show), end=""))
    elif show is not None:
        recipe = load_recipe(show)
        output.show(
            recipe.to_dict(), lambda: print(comments_of(show) + recipe.to_yaml() + _policy_beside(show), end="")
        )
    else:
        bundled = bundled_recipes()
        output.show({name: recipe.to_dict() for name, recipe in bundled.items()}, lambda: _print_recipes(bundled))


def _policy_beside(recipe: str) -> str:
    """The cache policy of a recipe's name, in comments behind the recipe; nothing if there is none."""
    if recipe not in _policy_files():
        return ""
    from ..policies import describe_policy

    lines = [f"the cache policy {recipe} (--cache {recipe})", "", *describe_policy(recipe).splitlines()]
    return "".join(f"# {line}".rstrip() + "\n" for line in ["", *lines])


def _print_recipes(bundled: dict[str, Recipe]) -> None:
    from ..checkpoint.files import read_yaml
    from ..recipe.sections import NAMES

    for name, recipe in bundled.items():
        print(f"{name:15} {recipe.summary}")
    for setting, methods in NAMES.items():
        print(f"\n{setting}")
        for name, method in methods.items():
            print(f"  {name:13} {method.summary}")
    print("\ncache policies (--cache NAME)")
    for name, file in sorted(_policy_files().items()):
        described = read_yaml(file.read_text("utf-8"), name)
        print(f"  {name:20} {', '.join(f'{key} {value}' for key, value in described.items())}")


def _policy_files() -> dict[str, Traversable]:
    """Files of the bundled cache policies by name, without importing the policies."""
    files = (resources.files("rotor.recipes") / "cache").iterdir()
    return {file.name[:-5]: file for file in files if file.name.endswith(".yaml")}


@command(
    epilog="Example: rotor run -- lm_eval --model hf --model_args pretrained=out/demo --tasks arc_easy",
    allow_interspersed_args=False,
)
def run(program: Annotated[list[str], typer.Argument(metavar="COMMAND [ARGS]...")]) -> None:
    """Run a program whose transformers loads compressed checkpoints, without any import of rotor in it.

    It takes this process's place, so that signals, exit code and terminal are its own, and it passes the registration
    on to the Python processes that it starts, in whose environment torch and transformers have to be. An installed
    rotor registers itself in every process, unless ROTOR_AUTOLOAD=0 is set; this command does it in any case.

    Args:
        program: Program and its arguments, as without rotor run.
    """
    path = shutil.which(program[0])
    if path is None:
        raise UsageError(f"rotor run {program[0]}: no such program.", "Example: rotor run -- python -m lm_eval --help")
    folders = [str(BOOTSTRAP), *filter(None, [os.environ.get("PYTHONPATH")])]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(path, program, {**os.environ, "PYTHONPATH": os.pathsep.join(folders)})
