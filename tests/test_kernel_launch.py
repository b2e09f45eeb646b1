"""Every kernel is launched on the GPU of its tensors."""

from __future__ import annotations

import ast
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

from rotor.kernels import launch as module
from rotor.kernels.launch import launch


class Kernel:
    """Records what it is launched with, and on which device."""

    def __init__(self, current: list) -> None:
        self.current, self.launches = current, []

    def __getitem__(self, grid):
        return lambda *args, **constants: self.launches.append((grid, args, constants, self.current[-1]))


def test_the_guard_is_entered_with_the_tensors_device(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [torch.device("cuda", 0)]

    class Guard:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def __enter__(self) -> None:
            current.append(self.device)

        def __exit__(self, *_: object) -> None:
            current.pop()

    monkeypatch.setattr(module.torch.cuda, "device", Guard)
    kernel = Kernel(current)
    first = SimpleNamespace(device=torch.device("cuda", 1))
    launch(kernel, (2, 3), first, 4, TILE=5)  # type: ignore[arg-type]
    assert kernel.launches == [((2, 3), (first, 4), {"TILE": 5}, torch.device("cuda", 1))]
    assert current == [torch.device("cuda", 0)]
    launch(kernel, (1,), torch.zeros(1))
    assert kernel.launches[1][3] == torch.device("cuda", 0)  # a CPU has no guard


def test_nothing_else_launches_kernels() -> None:
    """`kernel[grid]` stands in `launch` alone, and every kernel goes through it."""
    launched, subscripted = set(), []
    for path in sorted((ROOT / "kernels").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            if isinstance(node.func, ast.Subscript):
                subscripted.append(path.name)
            elif isinstance(node.func, ast.Name) and node.func.id == "launch":
                launched.add(ast.unparse(node.args[0]))
    assert subscripted == ["launch.py"]
    assert launched == {
        "append_kernel",
        "assign_kernel",
        "combine_kernel",
        "decode_kernel",
        "prefill_kernel",
        "rebuild_kernel",
        "rotation_kernel",
    }
