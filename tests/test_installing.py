"""Words of rotor about installing it, and of its package about itself."""

from __future__ import annotations

import re
import subprocess

import pytest
from support.paths import ROOT

from rotor.versions import PACKAGE, pip_install


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
