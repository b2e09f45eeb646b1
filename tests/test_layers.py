"""The packages' layers: pyproject.toml says which may import which; `make test` checks it with import-linter.

The kernels lie beside the package, where import-linter does not see them, so their imports are read here.
"""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest
from support.paths import ROOT

BELOW_KERNELS = ("rotor.errors", "rotor.logs", "rotor.checkpoint", "rotor.checked", "rotor.versions")


@pytest.mark.nightly
def test_imports_go_down() -> None:
    """`make lint`, which `make test` begins with, says the same."""
    pytest.importorskip("importlinter")
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


def test_kernels_import_only_what_is_below_them() -> None:
    for path in sorted((ROOT / "kernels").rglob("*.py")):
        depth = len(path.relative_to(ROOT / "kernels").parts)
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level <= depth, f"{path.name}: line {node.lineno} leaves kernels/"
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "rotor":
                assert str(node.module).startswith(BELOW_KERNELS), f"{path.name}: {node.module}"


def imported(*imports: str) -> list[set[str]]:
    """The packages of rotor that a fresh process has loaded after each of these imports."""
    loaded = "print(sorted({n.split('.')[1] for n in __import__('sys').modules if n.startswith('rotor.')}))"
    program = "; ".join(f"import {names}; {loaded}" for names in imports)
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    return [set(ast.literal_eval(line)) for line in done.stdout.splitlines()]


@pytest.mark.nightly
def test_a_process_loads_what_it_needs() -> None:
    """Loading a checkpoint, which registers rotor with transformers and an engine's plugin, reaches checkpoint, runtime
    and kernels alone; calibration loads no cache policy and no search.
    """
    loading, calibrating = imported(
        "rotor, rotor.runtime.integration, rotor.checkpoint.schemas", "rotor.calibration.calibrate"
    )
    below = {"errors", "checked", "logs", "numerics", "progress", "versions"}
    assert loading <= below | {"runtime", "checkpoint", "kernels"}
    assert "calibration" in calibrating
    assert not calibrating & {"policies", "vllm", "search", "tools"}
