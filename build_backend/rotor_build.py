"""setuptools, and in every wheel two files at its root: what lets transformers find an installed rotor by itself.

A `.pth` file is read only at the root of site-packages, where setuptools puts no data; so they are added to the wheel
that it built, an editable one too (PEP 517, PEP 660; wheels: PEP 427).
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import zipfile
from pathlib import Path
from typing import Any

import setuptools.build_meta
from setuptools.build_meta import *  # noqa: F403  (all other hooks as they are)

ROOT = Path(__file__).parent.parent
AUTOLOAD = "rotor_autoload"
PTH = f"import os; os.environ.get('ROTOR_AUTOLOAD') == '0' or __import__('{AUTOLOAD}')\n"


def root_files(editable: bool = False) -> dict[str, bytes]:
    """Content by name.

    Args:
        editable: the source tree is put on sys.path, too. setuptools' own finder comes after the search of sys.path,
            where beside a clone the folder `rotor` would be taken for a package without __init__.py.
    """
    module = (ROOT / "rotor" / "cli" / "bootstrap" / f"{AUTOLOAD}.py").read_bytes()
    path = os.fsencode(f"{ROOT}\n") if editable else b""
    return {f"{AUTOLOAD}.py": module, f"{AUTOLOAD}.pth": path + PTH.encode()}


def build_wheel(wheel_directory: str, *arguments: Any) -> str:
    name = setuptools.build_meta.build_wheel(wheel_directory, *arguments)
    add_to_wheel(Path(wheel_directory) / name, root_files())
    return name


def build_editable(wheel_directory: str, *arguments: Any) -> str:
    name = setuptools.build_meta.build_editable(wheel_directory, *arguments)
    add_to_wheel(Path(wheel_directory) / name, root_files(editable=True))
    return name


def add_to_wheel(wheel: Path, files: dict[str, bytes]) -> None:
    """Write the wheel again with `files` at its root, each with its line in RECORD."""
    finished = wheel.with_suffix(".tmp")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(finished, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            content = old.read(entry)
            if entry.filename.endswith(".dist-info/RECORD"):
                for name, added in files.items():
                    new.writestr(zipfile.ZipInfo(name, entry.date_time), added)
                content += _record(files)
            new.writestr(entry, content)
    os.replace(finished, wheel)


def _record(files: dict[str, bytes]) -> bytes:
    lines = io.StringIO()
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        csv.writer(lines, lineterminator="\n").writerow((name, f"sha256={digest}", len(content)))
    return lines.getvalue().encode()
