"""Every kernel is launched on the GPU of its tensors."""

from __future__ import annotations

import ast
import importlib
import sys
from types import SimpleNamespace

import pytest
import torch
from coded import MIXTURES, coded_layer
from conftest import ROOT
from ragged import layer, random_case
from torch.utils._python_dispatch import TorchDispatchMode

from rotor.kernels import launch as module
from rotor.kernels.launch import launch
from rotor.kernels.rows import LayerColumns


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
        "column_sums_kernel",
        "combine_kernel",
        "decode_kernel",
        "few_kernel",
        "join_kernel",
        "log_sums_kernel",
        "mask_kernel",
        "plan_kernel",
        "prefill_kernel",
        "prefix_kernel",
        "rebuild_kernel",
        "rotate_and_pack_kernel",
        "rotation_kernel",
    }


class Counted(TorchDispatchMode):
    """Records what PyTorch itself would run on a GPU, and apart from it what is allocated; views are neither."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.allocated: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            (self.allocated if "empty" in func.name() else self.names).append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that are launched, none of which run."""
    pytest.importorskip("triton", reason="triton is not installed")
    for name in ("masks", "operators"):
        importlib.import_module(f"rotor.kernels.{name}")
    names: list[str] = []
    for name, loaded in list(sys.modules.items()):
        if name.startswith("rotor.kernels") and loaded is not module and getattr(loaded, "launch", None) is launch:
            monkeypatch.setattr(loaded, "launch", lambda kernel, *args, **kwargs: names.append(kernel.fn.__name__))
    return names


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("domain", ["none", "pre"])
def test_a_later_layer_of_a_decoding_step_launches_two_kernels_and_nothing_else(domain, masked, launched) -> None:
    """Attention and the combination of its slices; nothing of PyTorch's that a GPU would run, in inference mode.

    Nor is anything allocated but the output: partial results have memory that stays.
    """
    from rotor.kernels import attention

    case = random_case(layer(domain, 2, (48, 56), (16, 24)), 2, 32, 3, 1, 64)

    def attend(layer_idx: int) -> None:
        attention.packed_attention(
            case.query, case.key.unsqueeze(1), case.value.unsqueeze(1), case.parameters(), 32,
            case.key_rotation, attention_mask=mask, layer_idx=layer_idx,
        )  # fmt: skip

    with torch.inference_mode():
        mask = torch.ones(3, 1, 1, 64, dtype=torch.bool) if masked else None
        attend(0)
        assert launched == ["mask_kernel"] * masked + ["prefix_kernel", "decode_kernel", "combine_kernel"]
        launched.clear()
        with Counted() as counted:
            attend(1)
    assert launched == ["decode_kernel", "combine_kernel"]
    assert counted.names == []
    assert counted.allocated == ["aten::new_empty"]


@pytest.mark.parametrize("domain", ["post", "pre"])
def test_a_layer_that_remembers_nothing_launches_five_kernels_a_step(domain, launched) -> None:
    """What the operators of a traced layer with codes run in a step of decoding: no copy, no wait for the host."""
    from rotor.kernels import attention
    from rotor.kernels.parameters import AttentionParameters
    from rotor.kernels.projection.append import pack_rows
    from rotor.kernels.projection.coded import rotate_and_pack

    layout = coded_layer(domain, 2, (MIXTURES[0], MIXTURES[4]), (MIXTURES[7], MIXTURES[2]))
    query, key, table = torch.zeros(3, 1, 8, 32), torch.zeros(3, 1, 4, 32), torch.zeros(1, 1, 32)
    basis, shift = torch.zeros(64, layout.qk_width), torch.zeros(layout.qk_width)
    latents = torch.zeros(3, 1, 1, layout.qk_width), torch.zeros(3, 1, 1, layout.v_width)
    rows = [torch.zeros(3, 1, 64, size, dtype=torch.uint8) for size in layout.row_bytes(4)]
    rotation = (torch.zeros(64, 32),) * 2
    parameters = AttentionParameters(layout, 2, 1.0, basis, torch.zeros(4, 32))
    mask = torch.ones(3, 1, 1, 64, dtype=torch.bool)

    def step() -> None:
        queries = query.transpose(1, 2)
        if domain == "post":
            queries = rotate_and_pack(query, key, latents[1][:, 0], table, table, layout, 2, basis, basis, shift)[0]
        else:
            pack_rows(*latents, LayerColumns.of(layout))
        keys = attention.ranges_of(mask, (3, 1, 64), mask.device)
        attention.attend(queries, *rows, parameters, 32, keys, rotation)

    with torch.inference_mode():
        step()  # tables are put on the device
        launched.clear()
        with Counted() as counted:
            step()
    new_rows = "rotate_and_pack_kernel" if domain == "post" else "append_kernel"
    assert launched == [new_rows, "mask_kernel", "prefix_kernel", "decode_kernel", "combine_kernel"]
    assert counted.names == []


@pytest.mark.parametrize("domain", ["none", "pre"])
def test_few_queries_take_two_launches_whatever_the_widths_of_groups(domain, launched) -> None:
    """One for all classes and one that joins it; the plan is made once, and serves layers of other widths too."""
    from rotor.kernels import attention

    layers = [((48, 56), (16, 24)), ((48, 56), (32, 24)), ((16, 16), (64, 24))]
    cases = [random_case(layer(domain, 2, *widths), 2, 32, 1, 4, 640) for widths in layers]
    before, mask = torch.ones(2, 1, 1, 4, 640, dtype=torch.bool)

    def attend(layer_idx: int, mask: torch.Tensor = mask) -> None:
        case = cases[layer_idx]
        attention.packed_attention(
            case.query, case.key.unsqueeze(1), case.value.unsqueeze(1), case.parameters(), 32, case.key_rotation,
            attention_mask=mask, layer_idx=layer_idx,
        )  # fmt: skip

    with torch.inference_mode():
        for layer_idx in range(3):
            attend(layer_idx, before)  # tables are put on the device
        launched.clear()
        attend(0)
        assert launched == ["mask_kernel", "plan_kernel", "few_kernel", "join_kernel"]
        for layer_idx in (1, 2):
            launched.clear()
            with Counted() as counted:
                attend(layer_idx)
            assert launched == ["few_kernel", "join_kernel"]
            assert counted.names == []
            assert counted.allocated == ["aten::empty.memory_format"]  # the output: partial results have a workspace
