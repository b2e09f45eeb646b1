"""The bytes that a plan counts are those of the checkpoint and of its cache, whatever was computed in."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from support.quick import mostly_nightly
from support.runs import FAST_EVALUATION, SHORT_TEXT, WITH_EXACT, reseal
from support.tiny_models import build_tiny

from rotor import calibrate, export, validate
from rotor.checkpoint.layout import AttentionShape, ExactTokens
from rotor.checkpoint.sizes import CacheSize, share_removed
from rotor.models.compressed import CompressedCheckpoint
from rotor.models.loading import config_model, load_model
from rotor.models.source import Checkpoint
from rotor.models.weights import empty_model
from rotor.search.report.collect import collect
from rotor.tools.validation.validate import cache_bytes_per_token

CPU = torch.device("cpu")
SETTINGS = [*WITH_EXACT, *FAST_EVALUATION, *SHORT_TEXT, "evaluation.metric=text"]
REMOVED = 0.6

SOURCES = (torch.float32, torch.bfloat16, torch.float16)
COMPUTED = ("float32", "bfloat16")
CASES = [(of, offload, dtype) for of in SOURCES for offload in ("always", "never") for dtype in COMPUTED]


def is_quick(case: tuple[torch.dtype, str, str]) -> bool:
    return case in [(torch.bfloat16, "always", "float32"), (torch.float32, "never", "bfloat16")]


@pytest.mark.parametrize(("stored", "offload", "dtype"), mostly_nightly(CASES, is_quick))
def test_plan_checkpoint_and_cache_have_the_same_bytes(stored, offload: str, dtype: str, tmp_path: Path) -> None:
    model = build_tiny("llama", tmp_path / "model", stored)
    run = calibrate(model, tmp_path / "run", "rotor", SETTINGS, offload=offload, dtype=dtype)
    assert run.info["element_bytes"] == stored.itemsize
    result = export(run.folder, tmp_path / "out", compression=REMOVED, offload=offload, dtype=dtype)
    report, shape = result.report, run.shape
    before = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * stored.itemsize
    loaded = load_model(tmp_path / "out", CPU, stored)
    with torch.inference_mode():
        rows = cache_bytes_per_token(loaded(torch.arange(3, 43)[None], use_cache=True).past_key_values)
    assert report["kv_bytes_per_token"] == {"before": before, "after": sum(rows), "element_bytes": stored.itemsize}
    assert report["compression"]["stored"] == pytest.approx(share_removed(before, sum(rows)), abs=1e-6)
    assert report["compression"]["stored"] >= REMOVED
    held = report["kv_bytes_of_sequence"]
    share = f"{100 * share_removed(held['before'], held['after']):.1f} % less"
    card = " ".join((tmp_path / "out" / "README.md").read_text().split())
    assert f"take {sum(rows):,.0f} bytes instead of {before:,}" in card
    assert share in card
    assert (f"{before} → {sum(rows):.0f}") in [value for _, value, _ in collect(tmp_path / "out").headline]
    found = validate(tmp_path / "out", measure=False)
    assert not found.damaged
    assert found.summary["measured_compression"] == pytest.approx(report["compression"]["stored"], abs=1e-6)


def test_no_model_that_is_built_writes_into_the_sources_config(tmp_path: Path) -> None:
    checkpoint = Checkpoint(build_tiny("llama", tmp_path / "model", torch.bfloat16))
    before = checkpoint.config.to_dict()
    for built in (empty_model(checkpoint.config, torch.float32), config_model(checkpoint.config)):
        assert built.config is not checkpoint.config
    assert checkpoint.config.to_dict() == before
    assert checkpoint.dtype == torch.bfloat16


def test_a_config_without_a_dtype_has_that_of_its_tensors(tmp_path: Path) -> None:
    folder = build_tiny("llama", tmp_path / "model", torch.float16)
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config))
    assert Checkpoint(folder).dtype == torch.float16


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run of a bfloat16 model, and a checkpoint of it; do not write to them."""
    folder = tmp_path_factory.mktemp("sizes")
    model = build_tiny("llama", folder / "model", torch.bfloat16)
    run = calibrate(model, folder / "run", "rotor", SETTINGS)
    export(run.folder, folder / "out", compression=REMOVED, measure=False)
    return run.folder, folder / "out"


def test_a_checkpoint_that_claims_more_than_its_layouts_remove_fails(exported, tmp_path: Path) -> None:
    out = shutil.copytree(exported[1], tmp_path / "out")
    report = json.loads((out / "rotor.json").read_text())
    claimed = round((1 + report["compression"]["stored"]) / 2, 6)
    report["compression"]["stored"] = claimed
    (out / "rotor.json").write_text(json.dumps(report))
    reseal(out)
    checks = {check.name: check for check in validate(out, measure=False).checks}
    assert checks["sizes in rotor.json"].status == "fail"
    assert f"compression {claimed:.6f}, the layouts' is " in checks["sizes in rotor.json"].detail
    assert checks["files"].status == "pass"


def test_a_window_holds_no_more_than_its_tokens(exported) -> None:
    checkpoint = CompressedCheckpoint(exported[1])
    shape = checkpoint.shape
    size = CacheSize.of_layouts(checkpoint.layouts, shape, 2)
    held = size.of_sequence(1000)
    rows = checkpoint.report["kv_bytes_per_token"]
    slots = sum(layout.exact.slots * 2 * 2 * shape.kv_width for layout in checkpoint.layouts if layout.exact)
    before, after = 1000 * rows["before"], 1000 * rows["after"] + slots
    assert (held["tokens"], held["before"], held["after"]) == (1000, before, after)


def test_short_sequences_take_more_and_it_is_said_from_where_on_they_do_not() -> None:
    """Up to 44 exact tokens of 64 bytes beside rows of 16 for each of all: smaller from 59 tokens on."""
    shape = AttentionShape(1, 1, 1, 16, 16, rotary_dim=16)
    size = CacheSize.of_rows([16], shape, 2, [ExactTokens(4, 40)])
    found = size.of_sequence(100)
    assert found == {"tokens": 100, "before": 6400, "after": 1600 + 44 * 64, "smaller_from": 59}
    for tokens, smaller in ((58, False), (59, True)):
        assert (size.of_sequence(tokens)["after"] < size.of_sequence(tokens)["before"]) == smaller
    assert size.of_sequence(58)["smaller_from"] is None
    for tokens, slots in ((1, 4 + 16), (16, 4 + 16), (17, 4 + 32), (33, 44), (58, 44)):
        assert size.of_sequence(tokens)["after"] == 16 * tokens + 64 * slots
    assert CacheSize.of_rows([16], shape, 2).smaller_from(100) == 1
