"""kernel_config.json, edited: what a loaded checkpoint launches in Triton's interpreter follows it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import build_tiny, calibrated, shortcuts  # noqa: F401
from transformers import AutoModelForCausalLM

from rotor.export.export import export
from rotor.kernels.decode import combine, longest_first
from rotor.kernels.decode import kernel as decode
from rotor.kernels.decode import launch as decode_launch
from rotor.kernels.launch import launch
from rotor.kernels.prefill import kernel as prefill
from rotor.kernels.prefill import launch as prefill_launch

PROMPT = torch.randint(1, 4096, (2, 15), generator=torch.Generator().manual_seed(5))
KERNELS = {
    decode.decode_kernel: "decode",
    combine.combine_kernel: "combine",
    longest_first.assign_kernel: "assign",
    prefill.prefill_kernel: "prefill",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    run = calibrated(build_tiny("mistral", folder / "m"), folder / "run", "pre", 2)
    return export(run.folder, folder / "out", compression=0.45, measure=False).folder


def generate(folder: Path, edit: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], Any]:
    """The launches of a prefill and a decoding step as (kernel, constants), and the logits, after an edit."""
    path = folder / "kernel_config.json"
    original = path.read_text()
    data = json.loads(original)
    edit(data)
    path.write_text(json.dumps(data))
    launched = []

    def record(kernel: Any, grid: Any, *arguments: Any, **constants: Any) -> None:
        if kernel in KERNELS:
            launched.append((KERNELS[kernel], constants))
        launch(kernel, grid, *arguments, **constants)

    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    finally:
        path.write_text(original)
    with monkeypatch.context() as patch:
        patch.setenv("ROTOR_ATTENTION", "triton")
        for module in (decode_launch, longest_first, prefill_launch):
            patch.setattr(module, "launch", record)
        output = model.generate(
            PROMPT,
            max_new_tokens=2,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    return launched, torch.stack(output.logits)


def of(launched: list[Any], kernel: str, constant: str) -> list[Any]:
    return [constants[constant] for name, constants in launched if name == kernel]


def widths(launched: list[Any]) -> list[Any]:
    """The bodies of each decode launch, as the widths of the one piece that a side of 16-bit columns has here."""
    return [tuple(tuple(side[0][2] for side in body) for body in bodies) for bodies in of(launched, "decode", "BODIES")]


def test_edited_values_change_what_is_launched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    default, logits = generate(folder, lambda data: None, monkeypatch)
    assert of(default, "decode", "SCHEDULE") == ["stream", "stream"]
    assert of(default, "decode", "TILE") == [64, 64]
    assert widths(default) == [((32, 32), (32, 16)), ((16, 16),)]
    assert of(default, "prefill", "ROWS") == [64, 64, 64]
    assert of(default, "prefill", "TILE") == [32, 32, 32]
    assert [name for name, _ in default if name in ("combine", "assign")] == ["combine", "combine"]

    def edit(data: Any) -> None:
        first, second = data["layers"]
        data["schedule"], first["tile"], second["tile"] = "lpt", 32, 16
        first["specialisations"] = [[32, 32]]
        for cls in (first["classes"][1], second["classes"][0]):
            cls["blocks"] = cls["rebuilt"] = {"rows": 16, "columns": 16}
        second["classes"] = [second["classes"][0] | {"groups": 1}] * 2

    edited, again = generate(folder, edit, monkeypatch)
    assert of(edited, "decode", "SCHEDULE") == ["lpt", "lpt"]
    assert of(edited, "decode", "TILE") == [32, 16]
    assert widths(edited) == [((32, 32),), ((16, 16),)]
    assert of(edited, "prefill", "ROWS") == [64, 16, 16, 16]
    assert of(edited, "prefill", "TILE") == [32, 16, 16, 16]
    assert [name for name, _ in edited if name in ("combine", "assign")] == ["assign", "assign"]
    assert (again - logits).norm() <= 1e-5 * logits.norm()


@pytest.mark.parametrize(("schedule", "others"), [("lpt", {"assign"}), ("none", set()), ("stream", {"combine"})])
def test_every_schedule_at_run_time(schedule: str, others: set[str], folder: Path, monkeypatch) -> None:
    launched, logits = generate(folder, lambda data: data.update(schedule=schedule), monkeypatch)
    assert of(launched, "decode", "SCHEDULE") == [schedule] * 2
    assert {name for name, _ in launched} - {"decode", "prefill"} == others
    monkeypatch.setenv("ROTOR_ATTENTION", "reference")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        first = model(PROMPT).logits[:, -1]
    assert (logits[0] - first).norm() <= 1e-5 * first.norm()
