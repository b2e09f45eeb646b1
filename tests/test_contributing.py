"""The examples of CONTRIBUTING.md run."""

from __future__ import annotations

import re
import sys
from types import ModuleType

import pytest
from support.paths import ROOT

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
    name = "example"
    for block in examples()[heading]:
        path = re.match(r"# (rotor/\S+)\.py\n", block)
        name = path[1].replace("/", ".") if path else name
        if name not in sys.modules:
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        exec(compile(block, f"CONTRIBUTING.md, {heading}", "exec"), sys.modules[name].__dict__)
