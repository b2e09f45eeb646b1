"""What rotor says about installing it, and what its package says about itself."""

from __future__ import annotations

import re
import subprocess

import pytest
from conftest import ROOT

from rotor.installing import PACKAGE, pip_install

tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")


def test_the_command_has_one_place() -> None:
    """Nothing recommends a name of a package index that nobody owns."""
    assert pip_install() == "pip install PATH/TO/rotor"
    assert pip_install("plots") == "pip install 'PATH/TO/rotor[plots]'"
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    texts = {
        name: ROOT / name for name in listed.stdout.splitlines() if name.endswith((".py", ".md", ".jinja", ".yaml"))
    }
    named = re.compile(rf"pip install ['\"]?{PACKAGE}|{PACKAGE}\[")
    assert [name for name, path in texts.items() if path.is_file() and named.search(path.read_text("utf-8"))] == []


def test_the_package_describes_itself() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == PACKAGE
    assert project["version"] in (ROOT / "CHANGELOG.md").read_text()
    assert {"License :: OSI Approved :: Apache Software License"}.isdisjoint(project["classifiers"])  # PEP 639
    low, high = re.findall(r"3\.(\d+)", project["requires-python"])
    minors = [c.rpartition(".")[2] for c in project["classifiers"] if re.fullmatch(r".*Python :: 3\.\d+", c)]
    assert minors == [str(minor) for minor in range(int(low), int(high))]
    assert len(project["keywords"]) >= 5
