"""Sizes that an export states are those that the stored cache policy keeps, not those of its rows."""

from __future__ import annotations

import json

import pytest
import torch
from support.runs import calibrated

from rotor import export, validate
from rotor.checkpoint.sizes import share_removed
from rotor.models.loading import load_model
from rotor.policies import stored_bytes
from rotor.search.report.collect import collect

CONTEXT = 96


@pytest.mark.parametrize("policy", ["zdc", "h2o-50"])
def test_an_export_counts_what_its_policy_stores(policy: str, tiny, tmp_path) -> None:
    run = calibrated(tiny("llama"), tmp_path / "run", "post", 1, qk="svd", vo="svd")
    options = {"compression": 0.1, "measure": False, "context": CONTEXT}
    rows = export(run.folder, tmp_path / "rows", **options).report
    report = export(run.folder, tmp_path / "out", cache=policy, **options).report
    model = load_model(tmp_path / "out", torch.device("cpu"), torch.float32)
    with torch.inference_mode():
        stored = stored_bytes(model(torch.arange(3, 3 + CONTEXT)[None], use_cache=True).past_key_values)
    before = rows["kv_bytes_per_token"]["before"]
    held = report["kv_bytes_of_sequence"]
    assert (held["tokens"], held["before"], held["after"]) == (CONTEXT, CONTEXT * before, stored)
    assert report["kv_bytes_per_token"]["after"] == stored // CONTEXT < rows["kv_bytes_per_token"]["after"]
    assert report["compression"]["stored"] == pytest.approx(share_removed(CONTEXT * before, stored), abs=1e-6)
    assert f"{before} → {stored // CONTEXT}" in [value for _, value, _ in collect(tmp_path / "out").headline]
    assert f"take {stored // CONTEXT:,} bytes instead of {before:,}" in (tmp_path / "out" / "README.md").read_text()
    checks = {check.name: check.status for check in validate(tmp_path / "out", measure=False).checks}
    assert checks["sizes in rotor.json"] == "pass"


def test_a_claim_beyond_the_policy_fails(tiny, tmp_path) -> None:
    run = calibrated(tiny("llama"), tmp_path / "run", "post", 1, qk="svd", vo="svd")
    export(run.folder, tmp_path / "out", compression=0.1, measure=False, cache="h2o-50")
    file = tmp_path / "out" / "rotor.json"
    report = json.loads(file.read_text())
    report["compression"]["stored"] = 0.9
    file.write_text(json.dumps(report))
    checks = {check.name: check for check in validate(tmp_path / "out", measure=False).checks}
    assert "compression 0.900000, cache policy h2o's is 0." in checks["sizes in rotor.json"].detail
