"""The table of peers: records from caches that are really used, and their picture."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from conftest import DEMO_MODEL, FAST_EVALUATION
from transformers import AutoModelForCausalLM

from rotor.errors import UsageError
from rotor.evaluation.metrics.distance import Prompts
from rotor.policies import KCVT, PerToken, make_cache
from rotor.progress import Progress
from rotor.study import peers_part
from rotor.study.peers import (
    Peer,
    PeerBench,
    PeerData,
    PeerRecord,
    long_kv_bytes_per_token,
    mean_kv_bytes_per_token,
    peers,
)
from rotor.study.peers_plot import draw_peers, family, pareto_front
from rotor.study.study import study


@pytest.fixture(scope="module")
def bench(tiny) -> Iterator[PeerBench]:
    model = AutoModelForCausalLM.from_pretrained(tiny("llama")).to(torch.bfloat16).eval()
    starts = torch.randint(1, 4096, (3, 4), generator=torch.Generator().manual_seed(0))
    rows = model.generate(starts, attention_mask=torch.ones_like(starts), min_new_tokens=20, max_new_tokens=20)
    answers = torch.zeros_like(rows, dtype=torch.bool)
    answers[:, 15:17] = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rotor.evaluation.metrics.distance.LEAST_BASE", 0.0)  # random weights can do nothing
        yield PeerBench(model, PeerData(rows, 8, {"copy": Prompts(rows, answers, 0)}))


def test_the_uncompressed_cache_loses_nothing(bench) -> None:
    record = bench.peer(peers()[0])
    assert record.kl_div < 1e-3  # bfloat16 sums blocks of other lengths
    exact = 2 * 2 * 4 * 16 * 2  # layers, sides, heads, head_dim, bytes
    assert record.kv_bytes_per_token == record.mean_kv_bytes_per_token == record.long_kv_bytes_per_token == exact
    ones = record.token_accuracy, record.ppl_ratio, record.top1_agreement, record.answers["copy"], record.compression
    assert ones == (1, 1, 1, 1, 0)


def test_a_quantised_cache_is_measured_in_bytes_and_fidelity(bench) -> None:
    four, two = (bench.peer(Peer("q", lambda c, bits=bits: make_cache(PerToken(bits), c))) for bits in (4, 2))
    assert two.kl_div > four.kl_div > 1e-4
    assert two.ppl_ratio != 1
    assert four.kv_bytes_per_token == 2 * 2 * 4 * (8 + 4)  # 16 codes in 8 bytes, scale and zero in 4
    assert four.compression == pytest.approx(1 - 12 / 32)
    assert set(four.answers) == set(four.hits) == {"copy"}


def test_bytes_of_long_contexts_are_those_of_a_cache_of_that_length(bench) -> None:
    def make():
        return make_cache(KCVT(4), bench.model.config)

    per_key = 16 * 4 * (0.5 + 4 / 1000)  # scale and zero of each channel, once
    per_value = 16 * 4 * 0.5 + 4
    assert long_kv_bytes_per_token(bench.model, make, 1000) == pytest.approx(2 * (per_key + per_value))


def test_the_mean_over_lengths_counts_what_waits(bench) -> None:
    def make():
        return make_cache(KCVT(4, buffer=2), bench.model.config)

    sides = 2 * 4  # layers, heads
    coded, scales, waiting = 16 * 0.5 * 2, 4 * 16, 16 * 2 * 2  # of a token, a run of keys, and a token that waits
    prompt = sides * (8 * coded + scales) + 2 * 8 * 4  # a value's scale and zero is shared by the heads
    one, two = prompt + sides * waiting, prompt + sides * (2 * coded + scales) + 2 * 2 * 4
    assert mean_kv_bytes_per_token(bench.model, make, 8, 10) == pytest.approx((one / 9 + two / 10) / 2)


def test_a_compressed_checkpoint_is_measured_like_a_peer(bench, tiny, tmp_path) -> None:
    from conftest import calibrated

    from rotor.export.export import export

    run = calibrated(tiny("llama"), tmp_path / "run", "post", 2)
    export(run.folder, tmp_path / "out", compression=0.5)
    compressed = AutoModelForCausalLM.from_pretrained(tmp_path / "out").to(torch.bfloat16).eval()
    record = bench.checkpoint("rotor", compressed)
    coded = bench.checkpoint("rotor, 4 bits", compressed, PerToken(4))
    assert record.compression == pytest.approx(0.5, abs=0.1)
    assert record.kl_div > 0
    assert coded.kv_bytes_per_token < 0.5 * record.kv_bytes_per_token


def test_what_is_not_installed_or_not_offered_is_skipped_with_its_reason(bench, monkeypatch) -> None:
    monkeypatch.setattr("transformers.cache_utils.is_optimum_quanto_available", lambda: False)
    monkeypatch.setattr("transformers.cache_utils.is_hqq_available", lambda: False)
    skipped = [bench.peer(peer) for peer in peers() if peer.name.startswith("transformers")]
    assert len(skipped) == 6
    for record in skipped:
        assert "You need to install" in record.skipped
        assert record.kv_bytes_per_token == 0


@pytest.mark.peer
@pytest.mark.parametrize("name, package", [("quanto", "optimum.quanto"), ("hqq", "hqq.core.quantize")])
def test_transformers_quantised_caches_are_counted_whole(name: str, package: str, bench) -> None:
    pytest.importorskip(package)
    peer = next(peer for peer in peers() if peer.name == f"transformers {name}, 4 bits")
    record = bench.peer(peer)
    assert record.kl_div > 0
    # Codes of half a byte; groups of 64 numbers with scale and zero in the model's dtype.
    assert record.long_kv_bytes_per_token == pytest.approx(2 * 2 * 4 * 16 * (0.5 + 4 / 64))


def test_the_picture_shows_the_front(bench) -> None:
    matplotlib = pytest.importorskip("matplotlib.figure")
    one = PeerRecord("KIVI-4", kl_div=0.01, token_accuracy=0.99, ppl_ratio=0.98, answers={"copy": 0.9})
    records = [
        replace(one, mean_kv_bytes_per_token=700.0),
        replace(one, name="KIVI-2", kl_div=0.1, mean_kv_bytes_per_token=400.0),
        replace(one, name="rotor", kl_div=0.001, mean_kv_bytes_per_token=320.0),
        PeerRecord("hqq", skipped="not installed"),
    ]
    figure = matplotlib.Figure()
    assert draw_peers(figure, records)
    divergence = figure.axes[0]
    assert {line.get_label() for line in divergence.lines} == {"KIVI", "rotor", "Pareto front"}
    front = divergence.lines[-1]
    assert front.get_xydata().tolist() == [[320, 0.001]]
    assert divergence.get_yscale() == divergence.get_xscale() == "log"
    assert [axis.get_ylabel().split(":")[0] for axis in figure.axes[1:4]][-1] == "copy"
    assert not draw_peers(matplotlib.Figure(), records[-1:])
    many = matplotlib.Figure()
    assert draw_peers(
        many, [replace(one, name=f"method {i:c}", mean_kv_bytes_per_token=99.0 + i) for i in range(65, 85)]
    )
    looks = {(line.get_color(), line.get_marker()) for line in many.axes[0].lines[:-1]}
    assert len(looks) == 20
    long = matplotlib.Figure()
    assert draw_peers(long, [replace(one, long_kv_bytes_per_token=50.0)], "long_kv_bytes_per_token")
    assert long.axes[0].lines[0].get_xdata().tolist() == [50]


def test_the_front_has_what_nothing_else_beats() -> None:
    points = [(1.0, 5.0), (2.0, 3.0), (2.0, 4.0), (3.0, 3.0), (4.0, 1.0)]
    assert pareto_front(points, higher=False) == [(1, 5), (2, 3), (4, 1)]
    assert pareto_front(points, higher=True) == [(1, 5)]
    assert family("KIVI-2") == family("KIVI-4") == "KIVI"
    assert family("GEAR-L-4") == "GEAR-L"
    assert family("rotor-post") == family("rotor-post, 96 bytes") == "rotor-post"
    assert family("rotor-16, 320 bytes") == "rotor-16"
    assert family("per token, 2 bits, Hadamard") != family("per token, 2 bits") == "per token"
    assert PeerRecord(**asdict(PeerRecord("a", answers={"copy": 1.0}))).answers == {"copy": 1.0}


class Told(Progress):
    """Keeps its messages."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def message(self, text: str) -> None:
        self.messages.append(text)


def test_a_task_that_the_uncompressed_model_cannot_do_is_left_out(bench, monkeypatch) -> None:
    monkeypatch.setattr("rotor.evaluation.metrics.distance.LEAST_BASE", 1.1)
    progress, prompts = Told(), bench.data.tasks["copy"]
    data = PeerData(prompts.rows, 8, {"copy": prompts})
    record = PeerBench(bench.model, data, progress=progress).peer(peers()[0])
    assert record.answers == record.hits == {}
    (line,) = progress.messages
    assert "peers leave out `copy`: copy: the uncompressed model gives the right answers a mean probability" in line


RECIPES = ["palu", "rotor-plain"]
FEW = ("uncompressed", "transformers quanto, 4 bits", "per token, 4 bits")


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A study of few peers, of ranks and of codes: (result, keyword arguments that give it)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.cache_utils.is_optimum_quanto_available", lambda: False)
        patch.setattr(peers_part, "peers", lambda: [peer for peer in peers() if peer.name in FEW])
        overrides = [*FAST_EVALUATION, "evaluation.lookup_prompts=2", "tokens.count=1024", "tokens.seq_len=128"]
        overrides += ["codes.tokens=256", "tokens.source=random", "evaluation.report_tokens=512"]
        arguments = {"parts": ["peers"], "overrides": overrides, "sizes": [1280, 640, 1], "plots": False}
        out = tmp_path_factory.mktemp("peers") / "study"
        yield study(DEMO_MODEL, out, RECIPES, **arguments), arguments


def test_the_part_measures_quantisers_and_recipes_at_equal_bytes(measured) -> None:
    result, _ = measured
    records = {key.removeprefix("peers/"): record for key, record in result.records.items()}
    assert list(records) == [*FEW, *(f"{recipe}, {size} bytes" for recipe in RECIPES for size in (1280, 640, 1))]
    exact, half, quarter = (records[name] for name in ("uncompressed", "palu, 1280 bytes", "palu, 640 bytes"))
    assert exact["kv_bytes_per_token"] == 2560  # bfloat16, though the study computes in float32
    assert 1200 < half["kv_bytes_per_token"] <= 1280
    assert 560 < quarter["kv_bytes_per_token"] <= 640
    assert exact["kl_div"] < half["kl_div"] < quarter["kl_div"]
    coded = records["rotor-plain, 640 bytes"]
    assert 600 < coded["kv_bytes_per_token"] == coded["long_kv_bytes_per_token"] <= 640
    assert exact["kl_div"] < coded["kl_div"] < quarter["kl_div"]
    assert exact["answers"] == exact["hits"] == {"lookup": 1, "copy": 1}
    assert records["palu, 1 bytes"]["skipped"].startswith("out of reach: the least is ")
    assert "You need to install optimum-quanto" in records[FEW[1]]["skipped"]


def test_the_part_writes_a_table_and_a_csv(measured) -> None:
    result, _ = measured
    rows = {row["name"]: row for row in csv.DictReader((result.folder / "peers.csv").open())}
    assert result.folder / "peers.csv" in result.files
    coded = result.records["peers/per token, 4 bits"]
    assert float(rows["per token, 4 bits"]["kl_div"]) == coded["kl_div"]
    assert float(rows["per token, 4 bits"]["lookup_answers"]) == coded["answers"]["lookup"]
    assert rows[FEW[1]]["kl_div"] == ""
    text = (result.folder / "summary.md").read_text()
    table = text[text.index("## Caches against quantisers") :].splitlines()
    lines = [line for line in table if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1
    assert [line.split(" | ")[0] for line in lines[2:4]] == ["| uncompressed", "| palu, 1280 bytes"]
    assert any("not measured: You need to install optimum-quanto" in line for line in lines)


def test_a_second_start_measures_nothing_but_what_was_skipped(measured, monkeypatch) -> None:
    result, arguments = measured
    scored: list[str] = []
    monkeypatch.setattr(PeerBench, "_record", lambda self, name, *rest: scored.append(name) or PeerRecord(name))
    assert study(DEMO_MODEL, result.folder, RECIPES, **arguments).added == 0
    assert scored == []
    monkeypatch.setattr(peers_part, "peers", lambda: [Peer(FEW[1], lambda config: None)])  # now it is installed
    assert study(DEMO_MODEL, result.folder, RECIPES, **arguments).added == 1
    assert scored == [FEW[1]]


def test_the_picture_of_a_study(measured) -> None:
    pytest.importorskip("matplotlib")
    result, arguments = measured
    found = study(DEMO_MODEL, result.folder, RECIPES, **{**arguments, "plots": True})
    assert Path(result.folder / "plots" / "peers.png") in found.files


def test_requests_that_cannot_be_are_refused(tmp_path) -> None:
    from rotor.study.request import parse_counts

    with pytest.raises(UsageError, match="--bytes 320,few: expected positive numbers of bytes"):
        parse_counts(["320", "few"], "--bytes", "bytes")
    with pytest.raises(UsageError, match="--parts peers: caches are read step by step"):
        study(DEMO_MODEL, tmp_path / "s", ["palu"], parts=["peers"], offload="always", plots=False)
