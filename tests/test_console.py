"""Output of the command line: logs, bars, exit codes, JSON."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from support.command_line import rotor
from support.paths import DEMO_MODEL, ROOT
from support.runs import SMALL_OPTIONS as SETTINGS
from support.stopped import Counting

from rotor import Progress, calibrate
from rotor.cli import console
from rotor.progress import Stages

README = (ROOT / "README.md").read_text()


def test_quiet_tells_nothing_and_the_log_keeps_all(tiny, tmp_path: Path, capsys) -> None:
    said = {}
    for option in (None, "-q"):
        out = tmp_path / f"run{option}"
        command = ["calibrate", tiny("llama"), "-o", out, *SETTINGS, "--json", *([option] if option else [])]
        code, text, said[option] = rotor(capsys, *command)
        assert code == 0
        assert json.loads(text)["run"] == str(out)
        log = (out / "log.txt").read_text()
        for stage in ("check model", "tokens", "capture", "bases", "write"):
            assert re.search(rf"^\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d DEBUG {stage}: \d+\.\d\d s", log, re.MULTILINE)
        assert "INFO memory: about" in log
        assert log.splitlines()[-1].endswith("calibrate has finished")
    assert said["-q"] == ""
    assert [line[:8] for line in said[None].splitlines()] == ["memory: ", "text: ca"]


def test_export_appends_to_the_log_how_it_ended(run_copy, tmp_path: Path, capsys) -> None:
    run = run_copy("fdc").folder
    assert rotor(capsys, "export", run, "-o", tmp_path / "out", "--accuracy", "0.5", "-q")[0] == 0
    log = (run / "log.txt").read_text()
    assert log.index("calibrate has finished") < log.index("export begins") < log.index("export has finished")
    assert re.search(r"DEBUG measure: \d", log)
    assert re.search(r"INFO accuracy 0\.5: about \d+ more point\(s\) to measure, \d", log)
    code, _, error = rotor(capsys, "export", run, "-o", tmp_path / "out", "--compression", "0.9999", "--overwrite")
    assert code == 2
    assert "ERROR export ended by UsageError: --compression 0.9999" in (run / "log.txt").read_text()
    assert error.count("--compression 0.9999") == 1


def test_bars_on_a_terminal_alone(tiny, tmp_path: Path, capsys, monkeypatch) -> None:
    commands = (
        ["calibrate", tiny("llama"), "-o", tmp_path / "run", "--recipe", "rotor-16", *SETTINGS],
        ["export", tmp_path / "run", "-o", tmp_path / "out", "--compression", "0.5", "--set", "ranks.method=global"],
        ["validate", tmp_path / "out"],
    )
    code, _, error = rotor(capsys, *commands[0])
    assert code == 0
    assert "\x1b" not in error
    assert "check model" not in error
    terminal = io.StringIO()
    monkeypatch.setattr(console, "stderr", Console(file=terminal, force_terminal=True, width=100))
    for command in commands:
        assert rotor(capsys, *command, *(["--overwrite"] if command[0] != "validate" else []))[0] == 0
    shown = terminal.getvalue()
    assert re.search(r"calibrate, stage (\d) of \1 ", shown)
    for name in (
        "check model",
        "load model",
        "load text",
        "probe",
        "measure",
        "write",
        "integrity",
        "full-rank rewrite",
    ):
        assert re.search(rf"{name}(, stage \d of \d)? ", shown)
    assert "0:00:0" in shown  # time left


def test_exit_codes_are_documented(capsys) -> None:
    """Each of them is tested: 0, 1, 2 and 3 in test_cli.py, 130 in test_processes.py."""
    code, shown, _ = rotor(capsys, "--help")
    assert code == 0
    for text in (" ".join(shown.split()), " ".join(README.split())):
        assert re.search(r"codes: 0 done; 1 a model.*; 2 the request is bad; 3 the accuracy.*; 130 interrupted", text)


WATCHED = """
import sys
from rotor.cli import main

class Interruption:
    \"\"\"Ctrl-C while a package is being imported.\"\"\"

    def find_spec(self, name, path=None, target=None):
        if name == stop:
            raise KeyboardInterrupt

stop = sys.argv.pop(1)
sys.meta_path.insert(0, Interruption())
try:
    main()
finally:
    models = [name for name in sys.modules if ".modeling_" in name and name.startswith("transformers.models.")]
    models = [name for name in models if not name.endswith("modeling_auto")]  # names alone
    print(*sorted({"torch", "transformers"} & set(sys.modules)), *models, file=sys.stderr)
"""
"""The command in a fresh interpreter, interrupted when it imports something; then what large packages it imported."""


def watched(stop: str, *arguments: str | Path) -> tuple[int, str, list[str]]:
    """Exit code, stdout and the lines of stderr."""
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, stop, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    return done.returncode, done.stdout, done.stderr.splitlines()


@pytest.mark.nightly
def test_inspect_imports_no_models_of_transformers() -> None:
    code, said, error = watched("nothing", "inspect", DEMO_MODEL)
    assert (code, error) == (0, ["torch transformers"])
    assert "bytes per token" in said


@pytest.mark.parametrize("stop", ["typer", "torch"])
def test_an_interruption_while_importing_is_two_lines(stop: str, tmp_path: Path) -> None:
    code, said, error = watched(stop, "calibrate", DEMO_MODEL, "-o", tmp_path / "run")
    assert (code, said) == (130, "")
    assert error[0] == "error: interrupted."
    assert "the same command again" in error[1]
    assert error[2:] == [""]
    assert list(tmp_path.iterdir()) == []


def test_stages_are_numbered() -> None:
    """Tasks that are no stage keep their names."""

    class Named(Progress):
        def __init__(self) -> None:
            self.names: list[str] = []

        def task(self, name, total, unit):
            self.names.append(name)
            return super().task(name, total, unit)

    shown = Named()
    stages = Stages(shown, ["check model", "gradients", "calibrate"])
    for name in ("check model", "download", "calibrate"):
        with stages.task(name, None, "") as advance:
            advance(1)
    assert shown.names == ["check model, stage 1 of 3", "download", "calibrate, stage 3 of 3"]


@pytest.mark.parametrize(
    ("recipe", "names"),
    [
        ("rotor", ["check model", "load model", "sample", "gradients", "calibrate"]),
        ("fdc", ["check model", "load model", "calibrate"]),
        ("palu", ["check model", "load model", "sample", "gradients", "calibrate"]),
    ],
)
def test_each_stage_of_a_calibration_has_its_number(recipe: str, names: list[str], tiny, tmp_path) -> None:
    """All of them run, in this order, and nothing else does."""
    seen = Counting()
    few = ["tokens.count=512", "tokens.seq_len=64"]
    calibrate(tiny("llama"), tmp_path / "run", recipe, few, progress=seen)
    assert seen.names == [f"{name}, stage {index + 1} of {len(names)}" for index, name in enumerate(names)]


def test_details_are_shown_with_v(tiny, tmp_path: Path, capsys) -> None:
    few = [word for item in ("tokens.count=512", "tokens.seq_len=64") for word in ("--set", item)]
    run, said = tmp_path / "run", {}
    for option in ((), ("-v",)):
        code, text, error = rotor(
            capsys, "calibrate", tiny("llama"), "-o", run, "--recipe", "rotor", *few, "--overwrite", *option
        )
        assert code == 0, error
        out = tmp_path / f"out{len(option)}"
        made = rotor(capsys, "export", run, "-o", out, "--compression", "0.5", "--no-measure", *option)
        assert made[0] == 0, made[2]
        said[option] = text + made[1], error + made[2]
    details = ("top 0.1 % of tokens", f"Digest: {hashlib.sha256((out / 'manifest.json').read_bytes()).hexdigest()}")
    for detail in details:
        assert detail in said["-v",][0]
        assert detail[:10] not in said[()][0]
    assert "bits [0, 2, 4" in said["-v",][1]
    assert "bits [0" not in said[()][1]
    assert re.search(r"Seconds: .*; together ", said[()][0])
