"""What loading a compressed checkpoint may import: nothing of the half that made it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from conftest import ROOT

SHARED = {"rotor.errors", "rotor.logs", "rotor.numerics", "rotor.typed"}
RUNTIME = {"rotor.integration", "rotor.modeling", "rotor.kernel_config", "rotor.cache_size", "rotor.kernel_choice"}
FORMAT = {
    "rotor.families",
    "rotor.file_names",
    "rotor.formats",
    "rotor.json_files",
    "rotor.layout",
    "rotor.section",
    "rotor.truncation",
}


def source_of(module: str) -> Path | None:
    """The file of a module or package of rotor, or None where the name is something inside a module."""
    parts = module.split(".")[1:]
    folder = ROOT / "kernels" if parts[:1] == ["kernels"] else ROOT / "rotor"
    path = folder.joinpath(*(parts[1:] if parts[:1] == ["kernels"] else parts))
    if path.with_suffix(".py").is_file() and parts:
        return path.with_suffix(".py")
    return path / "__init__.py" if (path / "__init__.py").is_file() else None


def imports_of(module: str) -> set[str]:
    """Modules of rotor that a module imports anywhere in its text, inside functions too; `rotor` itself left out."""
    path = source_of(module)
    assert path is not None, module
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            origin = ".".join(filter(None, (base, node.module)))
            inside = {f"{origin}.{alias.name}" for alias in node.names}
            names |= {origin} | {name for name in inside if name.startswith("rotor.") and source_of(name)}
    return {name for name in names if name.startswith("rotor.") and source_of(name)}


def reached_from(modules: set[str]) -> set[str]:
    reached: set[str] = set()
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        if module not in reached:
            reached.add(module)
            waiting += imports_of(module)
    return reached


def test_loading_a_checkpoint_reaches_nothing_of_the_offline_half() -> None:
    reached = {module for module in reached_from(RUNTIME) if not module.startswith("rotor.kernels.")}
    assert reached <= SHARED | RUNTIME | FORMAT


@pytest.mark.parametrize("module", sorted(FORMAT | {"rotor.typed", "rotor.errors"}))
def test_what_is_on_disk_is_read_without_the_runtime(module: str) -> None:
    assert reached_from({module}) <= SHARED | FORMAT


def test_the_walk_sees_relative_absolute_and_inner_imports() -> None:
    """rotor.search imports with dots, rotor.ranks with two; kernels.dispatch names rotor; modeling imports inside."""
    assert {"rotor.ranks", "rotor.errors"} <= imports_of("rotor.search")
    assert "rotor.layout" in imports_of("rotor.ranks.plan")
    assert {"rotor.logs", "rotor.kernels.shapes"} <= imports_of("rotor.kernels.dispatch")
    assert "rotor.kernels.attention" in imports_of("rotor.modeling")
