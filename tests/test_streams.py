"""Errors of the system and closed terminals: two lines and an exit code, never a traceback."""

from __future__ import annotations

import errno
import importlib
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.command_line import rotor
from support.paths import DEMO_MODEL, ROOT
from support.quick import mostly_nightly

from rotor import RotorError
from rotor.cli import console
from rotor.cli.console import print_json
from rotor.errors import from_system, system_errors
from rotor.logs import log, log_file


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """A line of the shell in which `rotor` is this one."""
    command = f"rotor() {{ '{sys.executable}' -m rotor \"$@\"; }}; {line}"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(["bash", "-c", command], capture_output=True, env=env)


@pytest.mark.parametrize(
    ("redirection", "code", "text"),
    [
        (">/dev/full", 1, "error: No space left on device."),
        ("--unknown 2>/dev/full", 2, ""),
    ],
)
def test_streams_that_are_full(redirection: str, code: int, text: str) -> None:
    done = shell(f"rotor recipes {redirection}")
    assert (done.returncode, done.stderr.decode().partition("\n")[0]) == (code, text)
    assert b"Traceback" not in done.stderr
    assert b"Exception ignored" not in done.stderr


def test_what_a_terminal_in_ascii_cannot_show_is_escaped(tmp_path: Path) -> None:
    """And names that are no UTF-8; nothing in them is markup."""
    folders = [tmp_path / name for name in ("caf\u00e9[/b]", os.fsdecode(b"caf\xe9"), "esc\x1b[31m")]
    each = "; ".join(f"rotor validate {shlex.quote(str(folder))}; echo $?" for folder in folders)
    done = shell(each, PYTHONIOENCODING="ascii")
    assert done.stdout.split() == [b"2"] * 3
    assert [line.startswith(b"error: ") for line in done.stderr.splitlines()] == [True, False] * 3
    assert b"\x1b" not in done.stderr
    assert done.stderr.isascii()


@pytest.mark.parametrize(
    ("thrown", "text"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/x/y"), "/x/y: No space left on device."),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), "/x: Permission denied."),
        (MemoryError(), "out of memory: MemoryError"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "out of memory: [enforce fail]"),
        (UnicodeEncodeError("ascii", "é", 0, 1, "no"), "a name or a text is not in the expected encoding"),
        (ZeroDivisionError("division by zero"), "unexpected ZeroDivisionError: division by zero"),
    ],
)
def test_anything_thrown_in_a_command_is_two_lines(thrown: Exception, text: str, monkeypatch, capsys) -> None:
    def throwing(*_: object, **__: object) -> None:
        raise thrown

    monkeypatch.setattr(importlib.import_module("rotor.tools.inspection"), "run_inspection", throwing)
    code, said, error = rotor(capsys, "inspect", DEMO_MODEL)
    assert (code, said) == (1, "")
    assert error.startswith(f"error: {text}")
    assert error.count("\n") == 2
    if not isinstance(thrown, ZeroDivisionError):
        assert isinstance(from_system(thrown), RotorError)
        with pytest.raises(RotorError), system_errors():
            throwing()


def test_hangups_end_like_ctrl_c() -> None:
    program = f"""
import os, signal, sys
from rotor import cli
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may have it ignored
with cli._terminable():
    try:
        os.kill(os.getpid(), signal.SIGHUP)
    except KeyboardInterrupt:
        print("interrupted")
signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
with cli._terminable():
    os.kill(os.getpid(), {int(signal.SIGHUP)})
print("still here")
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env)
    assert done.stdout.split("\n")[:2] == ["interrupted", "still here"], done.stderr


@pytest.mark.parametrize(
    ("command", "code"),
    mostly_nightly(
        [("recipes >&-", 0), ("nosuch 2>&-", 2), (f"generate {shlex.quote(str(DEMO_MODEL))} --prompt-file - <&-", 1)],
        lambda case: not case[0].startswith("generate"),
    ),
)
def test_streams_that_are_closed(command: str, code: int) -> None:
    done = subprocess.run(
        f"{shlex.quote(sys.executable)} -m rotor {command}", shell=True, cwd=ROOT, capture_output=True
    )
    assert done.returncode == code, done.stderr
    assert b"defect" not in done.stderr


def test_text_of_unknown_origin_moves_no_cursor(capsys, tmp_path: Path) -> None:
    evil = "a\x1b]0;title\x07b\x9b31m[/b]\u202e"
    console.say(evil)
    console.print_table(evil, [evil], [evil], [(evil, evil)])
    console.print_pairs((evil, evil))
    shown = capsys.readouterr().out
    assert "[/b]" in shown
    print_json({"x": evil})
    said = capsys.readouterr().out
    assert json.loads(said) == {"x": evil}
    with log_file(tmp_path, "test"):
        log.info(evil)
    for text in (shown, said, (tmp_path / "log.txt").read_text()):
        assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(text)
        assert "[/b]" in text


def test_a_record_of_the_log_is_one_line(tmp_path: Path, monkeypatch) -> None:
    """Whatever name is in it: a line of its own could say anything."""
    monkeypatch.setattr(sys, "argv", ["rotor", "calibrate", "a\n2030-01-01 00:00:00 INFO b"])
    with log_file(tmp_path, "calibrate"):
        log.info("model %s", "a\n2030-01-01 00:00:00 INFO b")
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert len(lines) == 3
    assert r"model a\n2030-01-01 00:00:00 INFO b" in lines[1]
