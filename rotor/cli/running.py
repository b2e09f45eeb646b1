"""Another program with rotor registered: run."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..errors import UsageError
from .app import command

BOOTSTRAP = Path(__file__).parent.parent / "bootstrap"
"""Its sitecustomize is found by every Python process that has this folder on PYTHONPATH."""


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
