"""A study's records of caches that are really used: baselines, policies; their tables and plots."""

from __future__ import annotations

import csv
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from support.metric_values import context
from support.paths import DEMO_MODEL
from support.runs import FAST_EVALUATION
from support.stopped import Counting

from rotor import Progress, study
from rotor.errors import UsageError
from rotor.models.compressible import CompressibleModel
from rotor.models.hardware import DevicePlan
from rotor.models.source import Checkpoint
from rotor.policies import H2O, KCVT, LONG_TOKENS, PerToken, bundled_policies
from rotor.recipe.sections import Evaluation
from rotor.tools.study.cache_part import StudiedCache, cache_records, draw_fidelity, method_of, pareto_front
from rotor.tools.study.caches import CacheBench, CacheRecord, cache_bytes
from rotor.tools.study.context import StudyContext
from rotor.tools.study.parts.methods import Methods, at_equal_bytes, fewest_bytes
from rotor.tools.study.store import StudyStore

LAYERS, HEADS, HEAD_DIM = 5, 2, 64
EXACT = LAYERS * 2 * HEADS * HEAD_DIM * 2
"""Bytes of a token in the bundled model's cache, in bfloat16."""


@pytest.fixture(scope="module")
def bench() -> CacheBench:
    """Rows of 64 tokens, of which 48 are the prompt."""
    checkpoint = Checkpoint(DEMO_MODEL)
    network = CompressibleModel(checkpoint, DevicePlan(torch.device("cpu"), torch.bfloat16))
    whole = context(Evaluation(copy_prompts=4, seq_len=64), checkpoint)
    rows = whole.rows["report"][:6]
    short = replace(whole, rows={"report": rows}, kinds={})
    return CacheBench(network, short, ["copy"], 2 * EXACT, lambda: rows, Progress())


def test_the_uncompressed_cache_loses_nothing(bench) -> None:
    record = bench.of_policy("uncompressed", None)
    assert record.kl_div < 1e-3  # bfloat16 sums blocks of other lengths
    assert record.kv_bytes_per_token == record.mean_kv_bytes_per_token == record.long_kv_bytes_per_token == EXACT
    ones = record.token_accuracy, record.ppl_ratio, record.top1_agreement, record.answers["copy"]
    assert ones == pytest.approx((1, 1, 1, 1), abs=0.05)
    assert record.compression == 0.5


def test_a_quantised_cache_is_measured_in_bytes_and_fidelity(bench) -> None:
    four, two = (bench.of_policy("q", PerToken(bits, HEAD_DIM)) for bits in (4, 2))
    assert two.kl_div > four.kl_div > 1e-4
    assert two.ppl_ratio < four.ppl_ratio
    assert four.kv_bytes_per_token == LAYERS * 2 * HEADS * (HEAD_DIM // 2 + 4)  # codes, scale and zero in 4
    assert four.compression == pytest.approx(1 - four.kv_bytes_per_token / (2 * EXACT))
    assert set(four.answers) == {"copy"}
    assert two.answers["copy"] < four.answers["copy"]


def test_bytes_of_long_contexts_are_those_of_a_cache_of_that_length(bench) -> None:
    per_key = HEAD_DIM * HEADS * (0.5 + 4 / LONG_TOKENS)  # scale and zero of each channel, once
    per_value = HEAD_DIM * HEADS * 0.5 + 4
    size = bench.of_policy("q", KCVT(4)).long_kv_bytes_per_token
    assert size == pytest.approx(LAYERS * (per_key + per_value), rel=1e-6)


def test_the_mean_over_lengths_counts_what_waits(bench) -> None:
    sides = LAYERS * HEADS
    coded, scales, waiting = HEAD_DIM * 0.5 * 2, 4 * HEAD_DIM, HEAD_DIM * 2 * 2  # a token, a run of keys, one waits
    prompt = sides * (8 * coded + scales) + LAYERS * 8 * 4  # a value's scale and zero is shared by the heads
    sizes = [prompt, prompt + sides * waiting, prompt + sides * (2 * coded + scales) + LAYERS * 2 * 4]
    assert cache_bytes(bench.network, 8, 10, KCVT(4, buffer=2)) == sizes


def drawn(records: list[CacheRecord]) -> Any:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    draw_fidelity(records, "", figure)
    return figure


def test_the_plot_shows_the_front() -> None:
    one = CacheRecord("KIVI-4", family="KIVI", kl_div=0.01, token_accuracy=0.99, ppl_ratio=0.98, answers={"copy": 0.9})
    records = [
        replace(one, mean_kv_bytes_per_token=700.0),
        replace(one, name="KIVI-2", kl_div=0.1, mean_kv_bytes_per_token=400.0),
        replace(one, name="GEAR-2", family="KIVI", kl_div=0.2, mean_kv_bytes_per_token=800.0),
        replace(one, name="rotor", family="rotor", kl_div=0.001, mean_kv_bytes_per_token=320.0),
    ]
    figure = drawn(records)
    divergence = figure.axes[0]
    colours = {line.get_label(): line.get_color() for line in divergence.lines}
    assert set(colours) == {"KIVI", "GEAR", "rotor", "Pareto front"}
    assert colours["KIVI"] == colours["GEAR"] != colours["rotor"]  # one a family
    assert divergence.lines[-1].get_xydata().tolist() == [[320, 0.001]]
    assert divergence.get_yscale() == divergence.get_xscale() == "log"
    assert [axis.get_ylabel().split(":")[0] for axis in figure.axes[1:4]][-1] == "copy"
    many = drawn(
        [replace(one, name=f"method {i:c}", family=f"{i}", mean_kv_bytes_per_token=99.0 + i) for i in range(65, 85)]
    )
    looks = {(line.get_color(), line.get_marker()) for line in many.axes[0].lines[:-1]}
    assert len(looks) == 20


def test_the_front_has_what_nothing_else_beats(tmp_path) -> None:
    points = [(1.0, 5.0), (2.0, 3.0), (2.0, 4.0), (3.0, 3.0), (4.0, 1.0)]
    assert pareto_front(points, higher=False) == [(1, 5), (2, 3), (4, 1)]
    assert pareto_front(points, higher=True) == [(1, 5)]
    for name, method in (
        *(("KIVI-2", "KIVI"), ("GEAR-L-4", "GEAR-L"), ("per token, 2 bits", "per token")),
        *(("fdc", "fdc"), ("rotor-16, 96 bytes", "rotor-16"), ("rotor, 320 bytes", "rotor")),
        ("H2O, alike, 0.2 of the tokens", "H2O, alike"),
    ):
        assert method_of(name) == method
    older = asdict(CacheRecord("a", answers={"copy": 1.0})) | {"time_share": 0.5}
    (record,) = cache_records(StudyStore(tmp_path, {}, {"methods/a": older}), "methods")
    assert record.answers == {"copy": 1.0}


class Few(Methods):
    """Of all policies one."""

    def caches(self, study: StudyContext) -> dict[str, StudiedCache]:
        caches = super().caches(study)
        return {name: cache for name, cache in caches.items() if name == FOUR or name not in bundled_policies()}


RECIPES = ["palu", "rotor"]
FOUR = "per-token-4"
FEW = ("uncompressed", FOUR)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A study of few baselines, of ranks and of codes: (result, keyword arguments that give it)."""
    overrides = [
        *FAST_EVALUATION,
        "evaluation.lookup_prompts=2",
        "evaluation.copy_prompts=6",
        "tokens.count=1024",
        "tokens.seq_len=128",
        "exact.first=0",
        "exact.newest=0",
        "groups.rope_block=16",
        "codes.tokens=256",
        "tokens.source=random",
        "evaluation.report_tokens=256",
    ]
    parts = [f"{__file__}:Few"]
    arguments = {"parts": parts, "overrides": overrides, "sizes": [1280, 640, 1], "plots": False}
    out = tmp_path_factory.mktemp("methods") / "study"
    return study(DEMO_MODEL, out, RECIPES, **arguments), arguments


@pytest.mark.nightly
def test_the_part_measures_quantisers_and_recipes_at_equal_bytes(measured) -> None:
    result, _ = measured
    records = {key.removeprefix("methods/"): record for key, record in result.records.items() if "methods/" in key}
    assert list(records) == [*FEW, *(f"{recipe}, {size} bytes" for recipe in RECIPES for size in (1280, 640, 1))]
    exact, half, quarter = (records[name] for name in ("uncompressed", "palu, 1280 bytes", "palu, 640 bytes"))
    assert exact["kv_bytes_per_token"] == 2560  # bfloat16, though the study computes in float32
    assert 1200 < half["kv_bytes_per_token"] <= 1280
    assert 560 < quarter["kv_bytes_per_token"] <= 640
    assert exact["kl_div"] < half["kl_div"] < quarter["kl_div"]
    coded = records["rotor, 640 bytes"]
    assert 600 < coded["kv_bytes_per_token"] == coded["long_kv_bytes_per_token"] <= 640
    assert exact["kl_div"] < coded["kl_div"] < quarter["kl_div"]
    assert exact["answers"] == pytest.approx({"lookup": 1, "copy": 1}, abs=0.02)
    assert records["palu, 1 bytes"]["skipped"].startswith("out of reach: the least is ")


@pytest.mark.nightly
def test_the_part_writes_a_table_and_a_csv(measured) -> None:
    result, _ = measured
    rows = {row["name"]: row for row in csv.DictReader((result.folder / "methods.csv").open())}
    assert result.folder / "methods.csv" in result.files
    coded = result.records[f"methods/{FOUR}"]
    assert float(rows[FOUR]["kl_div"]) == coded["kl_div"]
    assert float(rows[FOUR]["lookup_answers"]) == coded["answers"]["lookup"]
    assert rows["palu, 1 bytes"]["kl_div"] == ""
    text = (result.folder / "summary.md").read_text()
    table = text[text.index("## All methods") :].partition("At equal bytes")[0].splitlines()
    lines = [line for line in table if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1
    assert [line.split(" | ")[0] for line in lines[2:4]] == ["| uncompressed", "| palu, 1280 bytes"]
    assert any("not measured: out of reach" in line for line in lines)


@pytest.mark.nightly
def test_a_second_start_measures_nothing(measured) -> None:
    result, arguments = measured
    begun = Counting()
    assert study(DEMO_MODEL, result.folder, RECIPES, **arguments, progress=begun).added == 0
    assert "measure" not in begun.names


def test_a_model_that_is_not_in_memory_is_refused(tmp_path) -> None:
    with pytest.raises(UsageError, match="about caches: they are read step by step, which needs all weights in memory"):
        study(DEMO_MODEL, tmp_path / "s", ["palu"], parts=["methods"], offload="always", plots=False)


def test_the_tables_of_all_methods_by_hand() -> None:
    one = CacheRecord("KIVI-4", family="kivi", kl_div=0.01, mean_kv_bytes_per_token=720.0)
    two = replace(one, name="KIVI-2", kl_div=0.1, mean_kv_bytes_per_token=400.0)
    own = CacheRecord("rotor", family="rotor", kl_div=0.002, mean_kv_bytes_per_token=200.0)
    rows = at_equal_bytes([one, two, own], [1280, 512, 128])
    assert rows == [["kivi", "0.01000 (KIVI-4)", "0.10000 (KIVI-2)", ""], ["rotor", "0.00200", "0.00200", ""]]


def test_the_best_mixture_is_the_smallest_that_is_good_enough() -> None:
    def record(name: str, value: float, size: float, long: float) -> CacheRecord:
        sizes = {"kv_bytes_per_token": size, "long_kv_bytes_per_token": long}
        return CacheRecord(name, token_accuracy=value, ppl_ratio=1.0, answers={"copy": 1.0}, **sizes)

    records = [record("a", 0.995, 900, 100), record("b", 0.96, 300, 250), record("c", 0.96, 400, 50)]
    rows = fewest_bytes([*records, CacheRecord("d", skipped="not there")])
    assert rows[0] == ["0.99", "a", "900.0", "a", "100.0"]
    assert rows[1] == ["0.95", "b", "300.0", "c", "50.0"]
    assert fewest_bytes(records[1:])[0] == ["0.99", "none measured", "", "none measured", ""]


def test_budgets_are_shares_of_the_whole_row(bench) -> None:
    """Half of a row of 64 tokens is 32, of which the prompt's 48 already fill all."""
    half = bench.of_policy("half", H2O(0.5))
    all_of_it = bench.of_policy("half", H2O(tokens=32))
    assert (half.kl_div, half.kv_bytes_per_token) == (all_of_it.kl_div, all_of_it.kv_bytes_per_token)
    assert half.long_kv_bytes_per_token == pytest.approx(EXACT / 2 + 0.5 * LAYERS * HEADS * 8)  # places and scores
