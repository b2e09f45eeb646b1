"""The examples of CONTRIBUTING.md run."""

from __future__ import annotations

import re
import sys
from types import ModuleType

import pytest
from conftest import ROOT

HEADING, FENCED = r"^## (.+)$", r"^```python\n(.*?)^```$"


def examples() -> dict[str, list[str]]:
    """The fenced blocks of Python below each heading."""
    _, *sections = re.split(HEADING, (ROOT / "CONTRIBUTING.md").read_text("utf-8"), flags=re.MULTILINE)
    found = {
        heading: re.findall(FENCED, text, flags=re.MULTILINE | re.DOTALL)
        for heading, text in zip(sections[::2], sections[1::2], strict=True)
    }
    return {heading: blocks for heading, blocks in found.items() if blocks}


@pytest.mark.parametrize("heading", examples())
def test_an_example_runs(heading: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One block after the other; one that begins with the path of a new file of rotor is that module."""
    names: dict[str, object] = {"__name__": "example"}
    for block in examples()[heading]:
        path = re.match(r"# (rotor/\S+)\.py\n", block)
        if path:
            module = ModuleType(path[1].replace("/", "."))
            monkeypatch.setitem(sys.modules, module.__name__, module)
            names = module.__dict__
        exec(compile(block, f"CONTRIBUTING.md, {heading}", "exec"), names)
