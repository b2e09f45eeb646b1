"""Memory that the launches of all layers share: who shares it, how it grows, and that parts do not overlap."""

from __future__ import annotations

from threading import Thread
from types import SimpleNamespace

import pytest
import torch

from rotor.kernels import workspace as module
from rotor.kernels.workspace import Workspace, workspace_on

CPU = torch.device("cpu")


def test_layers_take_the_same_memory_in_turn_and_it_grows_to_the_largest() -> None:
    of = Workspace(CPU)
    small = of.take((3, 5), (7,))
    large = of.take((100, 8), (2, 3, 4))
    assert large[0].data_ptr() != small[0].data_ptr()  # grown
    again = of.take((3, 5), (7,))
    assert again[0].data_ptr() == large[0].data_ptr()
    assert of.take((3, 5), (7,))[0] is again[0]
    assert [tuple(part.shape) for part in again] == [(3, 5), (7,)]


def test_parts_are_apart_and_aligned() -> None:
    parts = Workspace(CPU).take((3, 5), (64,), (1,), (2, 65))
    begins = [part.data_ptr() - parts[0].data_ptr() for part in parts]
    assert begins == [0, 256, 512, 768]
    for number, part in enumerate(parts):
        assert part.is_contiguous()
        part.fill_(number)
    assert all((part == number).all() for number, part in enumerate(parts))


def test_memory_taken_in_inference_mode_serves_calls_outside_of_it() -> None:
    of = Workspace(CPU)
    with torch.inference_mode():
        (part,) = of.take((4,))
    assert not part.is_inference()


def test_the_views_of_many_batch_sizes_are_not_kept_for_ever() -> None:
    of = Workspace(CPU)
    for size in range(1, 3 * module.MOST_SHAPES):
        of.take((size,))
    assert len(of._views) <= module.MOST_SHAPES


def test_threads_devices_and_streams_have_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = {0: 7, 1: 7}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=streams[device.index]))
    first, second = (torch.device("cuda", index) for index in (0, 1))
    mine = workspace_on(first)
    assert workspace_on(first) is mine
    assert workspace_on(second) is not mine
    streams[0] = 8
    assert workspace_on(first) is not mine
    streams[0] = 7
    assert workspace_on(first) is mine
    found: list[Workspace | None] = []
    thread = Thread(target=lambda: found.append(workspace_on(first)))
    thread.start()
    thread.join()
    assert found[0] is not None
    assert found[0] is not mine


def test_a_graph_under_capture_allocates_from_its_own_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert workspace_on(torch.device("cuda", 0)) is None
    assert workspace_on(CPU) is not None
