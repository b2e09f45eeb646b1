"""Answers of a command line before anything large is imported, and their form."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import logging
import os
import pydoc
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.command_line import rotor
from support.paths import ROOT

import rotor as rotor_package
from rotor.cli import console

REFUSED = {
    ("--help",): (0, ""),
    ("--version",): (0, ""),
    ("export", "--help"): (0, ""),
    ("recipes",): (0, ""),
    ("export", "RUN", "-o", "OUT", "--accuracy", "99"): (2, "--accuracy: got 99.0, expected a finite number above 0"),
    ("export", "RUN", "-o", "OUT", "--accuracy", "99.0"): (2, "Did you mean --accuracy 0.99?"),
    ("export", "RUN", "-o", "OUT", "--accuracy", "1.5"): (2, "Example: --accuracy 0.99"),
    ("export", "RUN", "-o", "OUT", "--accuracy", "99%"): (2, "Did you mean 0.99?"),
    ("export", "RUN", "-o", "OUT"): (2, "got no goal"),
    ("export", "RUN", "-o", "OUT", "--accuracy", ".9", "--dtype", "int3"): (2, "--dtype: got 'int3'"),
    ("export", "RUN", "-o", "OUT", "--accuracy", ".9"): (2, "RUN: no such folder"),
    ("calibrate", "MODEL", "-o", "RUN", "--recipe", "fcd"): (2, "did you mean 'fdc'"),
    ("calibrate", "MODEL", "-o", "RUN", "--recipe", "pca"): (2, "recipe 'pca' is neither bundled nor a file."),
    ("calibrate", "MODEL", "-o", "RUN", "--set", "tokens.cuont=3"): (2, "did you mean 'count'"),
    ("calibrate", "MODEL", "-o", "RUN", "--offload", "maybe"): (2, "--offload: got 'maybe', expected one of auto,"),
    ("calibrate", "a/b/c", "-o", "RUN"): (2, "a/b/c: no such folder"),
    ("calibrate", ".", "-o", "RUN", "--revision", "v1"): (2, "--revision v1: . is a local folder"),
    ("inspect", "./nowhere"): (2, "./nowhere: no such folder"),
    ("inspect", ".", "--device", "abacus"): (2, "--device: got 'abacus', expected auto, cpu, cuda or cuda:N"),
    ("inspect", ".", "--device", "mps"): (2, "--device: got 'mps', expected auto, cpu"),
    ("validate", "OUT"): (2, "OUT: no such folder"),
    ("bench", "OUT", "--batch", "0"): (2, "--batch 0: expected whole numbers"),
    ("compile", "OUT"): (2, "OUT: no such folder"),
    ("study", ".", "-o", "STUDY", "--recipes", "fcd"): (2, "did you mean 'fdc'"),
    ("generate", "OUT"): (2, "got neither of PROMPT and --prompt-file, and stdin is no terminal to chat in"),
    ("generate", "OUT", "x", "--prompt-file", "y"): (2, "got both of PROMPT and --prompt-file"),
    ("generate", "OUT", "--prompt-file", "y"): (2, "--prompt-file y: cannot be read (No such file or directory)"),
    ("run", "no-such-program"): (2, "rotor run no-such-program: no such program"),
    ("calibrate",): (2, "error: missing argument 'model'.\n  `rotor calibrate --help` has an example.\n"),
    ("calibrate", "MODEL", "-o", "RUN", "--batch-tokens", "0"): (2, "error: invalid value for '--batch-tokens'"),
    ("calibrat", "MODEL"): (2, "Did you mean 'calibrate'"),
    ("calibrate", "MODEL", "-o", "RUN", "--set", "groups.joint=maybe"): (2, "`rotor recipes --fields` has every field"),
}
WITHOUT_TORCH = """
import contextlib, io, json, sys


class Forbidden:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in ("torch", "transformers", "numpy"):
            raise AssertionError(f"{name} was imported")


sys.meta_path.insert(0, Forbidden)
from rotor.cli import main

found = []
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["rotor", *arguments]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
    found.append([code, err.getvalue()])
print(json.dumps(found))
"""


def test_arguments_are_checked_before_torch_is_imported(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, json.dumps([list(arguments) for arguments in REFUSED])],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for (arguments, (code, text)), (got, error) in zip(REFUSED.items(), json.loads(done.stdout), strict=True):
        assert got == code, (arguments, error)
        assert text in error, arguments
        assert error.count("\n") == (2 if code else 0), arguments
        assert "ROTOR_DEBUG" not in error, arguments


SHOWN = {"as_json", "quiet", "verbose", "layouts"}
"""Options of what is printed."""

OTHERWISE = {"no_measure": "measure", "folders": "folder"}


@pytest.mark.parametrize("name", ["inspect", "calibrate", "export", "validate", "study"])
def test_a_function_takes_what_the_command_does(name: str) -> None:
    from rotor.cli.commands import app

    (command,) = (found.callback for found in app.registered_commands if found.callback.__name__ == name)
    options = {OTHERWISE.get(option, option) for option in inspect.signature(command).parameters} - SHOWN
    assert options - inspect.signature(getattr(rotor_package, name)).parameters.keys() == set()


def test_help_begins_with_what_a_user_calls() -> None:
    shown = pydoc.plain(pydoc.render_doc(rotor_package)).partition("The import itself")[0]
    called = [name for name in rotor_package.__all__ if name[0].islower() and name[0] != "_"]
    assert [name for name in called if f"rotor.{name}(" not in shown] == []


def test_help_has_whole_summaries_at_the_width_of_the_terminal(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    _, shown, _ = rotor(capsys, "--help")
    assert "..." not in shown.replace("COMMAND [ARGS]...", "")
    assert max(map(len, shown.splitlines())) in range(90, 101)
    assert f"Documentation: {ROOT}/docs/commands.md" in " ".join(shown.split())


def test_resuming_nothing_is_said(tiny, tmp_path: Path, capsys) -> None:
    few = [item for setting in ("tokens.count=512", "tokens.seq_len=64") for item in ("--set", setting)]
    command = ["calibrate", tiny("llama"), "-o", tmp_path / "run", "--recipe", "fdc", *few, "--resume"]
    code, _, error = rotor(capsys, *command)
    assert code == 0, error
    assert f"--resume: no unfinished run is at {tmp_path}/run.partial; this one begins at the start." in error


def test_what_is_left_of_a_long_task_is_told_where_there_is_no_terminal(caplog) -> None:
    seconds = iter(range(0, 1000, 20))
    progress = console.LineProgress(30.0, lambda: float(next(seconds)))
    with caplog.at_level(logging.INFO, "rotor"), progress.task("measure", 8000.0, "tokens") as advance:
        for _ in range(8):
            advance(1000.0)
    assert caplog.messages == [
        "measure: 25% of 8,000 tokens, about 2.0 min left",
        "measure: 50% of 8,000 tokens, about 80 s left",
        "measure: 75% of 8,000 tokens, about 40 s left",
    ]


def test_text_is_streamed_and_chat_templates_are_applied(tiny, tmp_path: Path, capsys, monkeypatch) -> None:
    model = shutil.copytree(tiny("llama"), tmp_path / "model")
    generate = ["generate", model, "--max-new-tokens", "6"]
    pieces: list[str] = []
    streamed = io.StringIO()
    streamed.flush = lambda: pieces.append(streamed.getvalue())
    with contextlib.redirect_stdout(streamed):
        code, *_ = rotor(capsys, *generate, "def main(")
    plain = streamed.getvalue()
    assert (code, plain.startswith("def main("), len(set(pieces)) > 1) == (0, True, True)
    whole = json.loads(rotor(capsys, *generate, "def main(", "--json")[1])
    assert plain == whole["text"] + "\n"
    assert (whole["new_tokens"], whole["chat_template"]) == (6, False)
    (tmp_path / "prompt.txt").write_text("def main(\n")
    assert rotor(capsys, *generate, "--prompt-file", tmp_path / "prompt.txt")[1] == plain
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"def main(\r\n")))
    assert rotor(capsys, *generate, "--prompt-file", "-")[1] == plain

    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    )
    answer = json.loads(rotor(capsys, *generate, "def main(", "--json")[1])
    assert answer["chat_template"] is True
    assert answer["prompt_tokens"] > whole["prompt_tokens"]
    assert "<user>" not in answer["text"]
    assert rotor(capsys, *generate, "def main(", "--raw")[1] == plain


@pytest.mark.nightly
def test_a_chat_is_streamed_and_a_template_that_fails_is_said(tiny, tmp_path: Path, capsys) -> None:
    model = shutil.copytree(tiny("llama"), tmp_path / "model")
    generate = ["generate", model, "--max-new-tokens", "6"]
    (model / "chat_template.jinja").write_text("<user>{{ messages[0].content }}<a>")
    answer = json.loads(rotor(capsys, *generate, "def main(", "--json")[1])
    assert rotor(capsys, *generate, "def main(")[1] == answer["text"] + "\n"
    (model / "chat_template.jinja").write_text("{{ raise_exception('only in verse') }}")
    code, _, error = rotor(capsys, *generate, "def main(")
    assert code == 1
    assert re.search(r"its chat template cannot be applied: .*only in verse\n  Give --raw", error)


@pytest.mark.nightly
def test_chat_templates_without_end_are_stopped(tiny, tmp_path: Path, capsys) -> None:
    model = shutil.copytree(tiny("llama"), tmp_path / "model")
    generate = ["generate", model, "--max-new-tokens", "6"]
    for template, whys in (
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            ("ended with code -", "was not done within 120 s"),  # by processor time, on a busy machine by the clock
        ),
        ("{% for a in range(1200) %}{{ 'x' * 1000 }}{% endfor %}", ("makes 1200000 characters of 9",)),
    ):
        (model / "chat_template.jinja").write_text(template)
        code, _, error = rotor(capsys, *generate, "def main(")
        assert (code, any(why in error for why in whys)) == (1, True), error
