"""Rows of the suite for GPUs: how tests are counted, sanitised, served and timed, and when a row is not timed."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from ragged import layer

from rotor.bench.attention import relative_error
from rotor.bench.clock import Clock
from rotor.bench.gpu import programs
from rotor.bench.gpu.attention import AttentionSizes, Problems, copies_for
from rotor.bench.gpu.case import Skipped
from rotor.bench.graphs import replayed
from rotor.bench.problem import checked_output, copied, paged_rows, random_problem, truth
from rotor.bench.rows import BACKENDS, pytorch_path, sdpa
from rotor.errors import NumericsError
from rotor.format.layout import AttentionShape
from rotor.kernels.decode.tile_sizes import decode_config
from rotor.kernels.layer_table import layer_parts
from rotor.kernels.tuning import decode_constants

SHAPE = AttentionShape(num_layers=1, num_heads=6, num_kv_heads=2, head_dim=16, hidden_size=96)
JUNIT = """<testsuites><testsuite>
<testcase name="a" /><testcase name="b"><failure message="x" /></testcase><testcase name="c"><error /></testcase>
<testcase name="d"><skipped /></testcase></testsuite></testsuites>"""


def test_the_outcome_of_tests_is_counted(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(JUNIT)
    assert programs.read_junit(tmp_path / "report.xml") == {
        "passed": 1, "failed": 2, "skipped": 1, "names": ["b", "c"],
    }  # fmt: skip
    names = [file.name for file in programs.gpu_test_files(ROOT / "tests")]
    assert names[0] == "test_kernels_gpu.py"
    assert "test_bench.py" in names


SANITIZER = """#!/bin/sh
echo "$@" >> calls
echo "========= ERROR SUMMARY: 1 error"
exit $CODE
"""


def test_the_sanitizer_runs_each_case_and_its_findings_are_red(tmp_path: Path, monkeypatch) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(SANITIZER)
    tool.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = list(programs.sanitizer_cases(dry=False))
    assert len(found) == 2 * len(programs.TINY)
    assert set(programs.TINY) <= set(AttentionSizes.of(dry=False).layouts)
    for code, text in (("99", "memcheck found errors: ========= ERROR SUMMARY: 1 error"), ("5", "ended with 5: ====")):
        monkeypatch.setenv("CODE", code)
        with pytest.raises(Exception, match=text):
            found[0].run()
    monkeypatch.setenv("CODE", "0")
    assert found[0].run()["with_tool"]
    call = (tmp_path / "calls").read_text().splitlines()[-1]
    assert call.startswith("--tool memcheck --error-exitcode 99 ")
    assert call.endswith("-m rotor.bench.gpu.tiny after RoPE")
    monkeypatch.setattr(programs, "find_sanitizer", lambda: None)
    with pytest.raises(Skipped, match="compute-sanitizer is not installed"):
        found[0].run()


def test_an_engine_serves_what_was_given_or_a_quick_checkpoint(tmp_path: Path, monkeypatch) -> None:
    (case,) = programs.engine_cases(False, None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Skipped, match="vLLM is not installed"):
        case.run()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: SimpleNamespace())
    called: list[tuple[str, ...]] = []

    def rotor(*words: str) -> None:
        called.append(words)
        if words[0] == "bench":
            Path(words[words.index("-o") + 1]).write_text(
                json.dumps(dict.fromkeys(("serving", "cache", "checks", "versions"), 1))
            )

    monkeypatch.setattr(programs, "_rotor", rotor)
    assert case.run() == dict.fromkeys(("serving", "cache", "checks", "versions"), 1)
    assert [words[0] for words in called] == ["calibrate", "export", "bench"]
    called.clear()
    (given,) = programs.engine_cases(False, tmp_path)
    given.run()
    assert [words[:2] for words in called] == [("bench", str(tmp_path))]


def test_the_cache_is_flushed_by_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(importlib.import_module("rotor.bench.clock").FLUSH_BYTES, "cpu", 1 << 12)
    clock = Clock(torch.device("cpu"))
    clock.once(lambda: None)
    version = clock._buffer._version
    clock.once(lambda: None)
    assert clock._buffer._version == version
    assert clock._buffer.nbytes == 1 << 12
    assert float(clock._buffer.min()) == 1.0  # every page its own


def test_calls_of_a_graph_take_turns() -> None:
    order: list[int] = []
    calls = [lambda i=i: order.append(i) for i in range(3)]  # type: ignore[misc]
    assert replayed(calls, torch.device("cpu"), 2).repetitions == 2
    assert order == [0, 1, 2] * 2


def test_caches_are_together_larger_than_three_l2_caches() -> None:
    problem = random_problem(layer("none", 1, (16, 16), (16, 16)), SHAPE, 1, 1, 100, torch.float16, torch.Generator())
    each = 100 * 64 * 2
    assert [copies_for(problem, size) for size in (0, each // 3, each // 3 + 1, 10 * each)] == [1, 1, 2, 30]


def test_other_constants_hold_within_their_block() -> None:
    parts = layer_parts(layer("none", 1, (16, 16)), 3, 16)
    plain = decode_config(parts, 3, 2, 0)
    with decode_constants(TILE=32), decode_constants(num_warps=2):
        assert decode_config(parts, 3, 2, 0) == plain | {"TILE": 32, "num_warps": 2}
    assert decode_config(parts, 3, 2, 0) == plain


@pytest.mark.parametrize("domain", ["none", "pre"])
def test_queries_behind_cached_keys_agree_with_the_truth(domain: str) -> None:
    ranks = ((16, 16), (16, 16))
    problem = random_problem(layer(domain, 1, *ranks), SHAPE, 2, 4, 50, torch.float32, torch.Generator().manual_seed(0))  # type: ignore[arg-type]
    exact = truth(problem)
    rows = [pytorch_path, *((lambda p: sdpa(p, BACKENDS["math"]),) if domain == "none" else ())]
    for prepare in rows:
        assert relative_error(checked_output(problem, prepare(problem)()), exact) < 4e-6
    assert problem.mask is not None
    assert problem.mask[0, 0].sum(-1).tolist() == [47, 48, 49, 50]
    assert copied(problem).mask is problem.mask  # layers share one, and what follows from it


def test_rows_in_permuted_pages_are_the_same_rows() -> None:
    problem = random_problem(layer("none", 1, (16, 8), (16, 8)), SHAPE, 3, 1, 48, torch.float32, torch.Generator())
    key, value, table = paged_rows(problem, 16, torch.Generator().manual_seed(1))
    assert table.dtype == torch.int32
    assert sorted(table.flatten().tolist()) == list(range(9))
    assert torch.equal(key[table.long()].flatten(1, 2), problem.key[:, 0])
    assert torch.equal(value[table.long()].flatten(1, 2), problem.value[:, 0])


def test_a_wrong_row_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    from rotor.bench.gpu import attention

    problems = Problems(AttentionSizes.of(dry=True))
    monkeypatch.setattr(attention, "replayed", lambda *a: pytest.fail("timed"))

    def wrong(problem):
        return lambda: pytorch_path(problem)() * 1.001

    case = attention._case(problems, "rotor, full", "full", wrong, 2, 1, 16)
    with pytest.raises(NumericsError, match=r"relative error 0\.001 against float64"):
        case.run()
