"""Every kernel is launched on the GPU of its tensors."""

from __future__ import annotations

import ast
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from conftest import ROOT
from ragged import layer, random_case
from torch.utils._python_dispatch import TorchDispatchMode

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


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("domain", ["none", "pre"])
def test_a_later_layer_of_a_decoding_step_launches_two_kernels_and_nothing_else(domain, masked, monkeypatch) -> None:
    """Attention and the combination of its slices; nothing of PyTorch's that a GPU would run, in inference mode."""
    pytest.importorskip("triton", reason="triton is not installed")
    from rotor.kernels import attention
    from rotor.kernels.decode import launch as decode

    class Counted(TorchDispatchMode):
        names: ClassVar[list[str]] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if not func.is_view and "empty" not in func.name():
                self.names.append(func.name())
            return func(*args, **(kwargs or {}))

    launched: list[str] = []
    monkeypatch.setattr(decode, "launch", lambda kernel, *args, **kwargs: launched.append(kernel.fn.__name__))
    case = random_case(layer(domain, 2, (48, 56), (16, 24)), 2, 32, 3, 1, 64)

    def attend(layer_idx: int) -> None:
        attention.packed_attention(
            case.query, case.key.unsqueeze(1), case.value.unsqueeze(1), case.parameters(), 32, case.key_rotation, mask,
            layer_idx=layer_idx,
        )  # fmt: skip

    with torch.inference_mode():
        mask = torch.ones(3, 1, 1, 64, dtype=torch.bool) if masked else None
        attend(0)
        launched.clear()
        with Counted():
            attend(1)
    assert launched == ["decode_kernel", "combine_kernel"]
    assert Counted.names == []
