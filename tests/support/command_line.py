"""The command line in the process of the tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rotor import cli


def rotor(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    """Run a command in this process: (exit code, stdout, stderr)."""
    capsys.readouterr()  # what fixtures printed
    old = sys.argv
    sys.argv = ["rotor", *map(str, arguments)]
    try:
        cli.main()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.argv = old
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def expect_error(capsys: pytest.CaptureFixture[str], code: int, text: str, *arguments: str | Path) -> None:
    got, out, err = rotor(capsys, *arguments)
    assert got == code, err
    assert text in err, err
    assert out == ""
    told = ("memory: ", "text: ")  # before the work begins
    said = [line for line in err.splitlines() if not line.startswith(told)]
    assert len(said) == 2, err
    assert said[0].startswith("error: ")
