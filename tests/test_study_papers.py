"""The parts of a study that have figures of the papers in shape, each on a tiny model; and their arithmetic by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import fdc
import gear
import pytest
import scores
import torch
import zdc
from prompt_flops import bases_flops, layer_flops, uncompressed_layer_flops
from support.paths import ROOT
from support.runs import TINY_STUDY
from torch.nn import functional
from transformers import AutoModelForCausalLM

from rotor import study
from rotor.calibration.prediction.devices import find_device
from rotor.checkpoint.layout import POST_ROPE, AttentionShape, GroupLayout, LayerLayout, pre_rope
from rotor.checkpoint.rows import NumberRow
from rotor.policies import GEAR, KCVT
from rotor.policies.agreement import in_common
from rotor.tools.study.context import StudyContext
from rotor.tools.study.part import Part, Task, find_part
from rotor.tools.study.store import Record, StudyStore

LLAMA = AttentionShape(32, 32, 8, 128, 4096, rotary_dim=128)
H200 = find_device("h200")

LONGER = "evaluation.seq_len=128", "evaluation.report_tokens=256", "evaluation.search_tokens=128"
"""Sequences for parts that look at groups of 32 tokens, or at requests of 128."""


def part_of(name: str) -> str:
    """The part as `--parts` takes it."""
    return f"{ROOT}/artifacts/studies/parts/{name}.py:{name.capitalize()}"


def records(
    tiny, out: Path, part: str, recipe: str = "zdc", overrides: tuple[str, ...] = ()
) -> tuple[dict[str, Record], str]:
    """The records of a part on a tiny model, and summary.md."""
    more = ["prune.kmeans=32"] if recipe == "zdc" else []
    result = study(tiny("llama"), out, [recipe], [*TINY_STUDY, *more, *overrides], parts=[part_of(part)], plots=False)
    return result.records, (out / "summary.md").read_text()


def drawn(part: str, name: str, folder: Path):
    """The figure that a part draws of a study's records."""
    figure = pytest.importorskip("matplotlib.figure").Figure()
    settings = json.loads((folder / "results.json").read_text())["settings"]
    find_part(part_of(part)).plots(StudyStore.read(folder, settings))[name](figure)
    return figure


def test_gear_errors_fall_with_its_parts(tiny, tmp_path: Path) -> None:
    found, summary = records(tiny, tmp_path / "study", "gear", overrides=LONGER)
    for bits in gear.BITS:
        names = ("KCVT", "GEAR-L on KCVT", "GEAR on KCVT")
        plain, light, whole = (found[f"gear/{name}, {bits} bits"] for name in names)
        for side in (0, 1):
            assert plain["errors"][side] > light["errors"][side] >= whole["errors"][side] > 0
        assert plain["parts"]["low rank"] == plain["parts"]["outliers"] == light["parts"]["outliers"] == 0
        assert whole["parts"]["low rank"] == light["parts"]["low rank"] > 0
        assert plain["parts"]["codes"] + plain["parts"]["waiting"] * bits / 16 == pytest.approx(bits / 16)
        spectra = found[f"gear/residual, {bits} bits"]["spectra"]
        assert all(values[0] == 1.0 and values == sorted(values, reverse=True) for values in spectra.values())
    single = found["gear/one technique"]
    for points in single.values():
        errors = [error for _, error in points]
        assert errors == sorted(errors)  # fewer bits, more error
    for title in ("Figures 1a and 6", "Figure 2a", "Figure 2b"):
        assert title in summary
    lines = {line.get_label(): line for line in drawn("gear", "gear-residual", tmp_path / "study").axes[0].lines}
    keys = found["gear/residual, 2 bits"]["spectra"]["keys"]
    assert list(lines["residual, 2 bits: keys"].get_ydata()) == keys


def test_gear_measures_what_codes_lose() -> None:
    numbers = torch.randn(1, 2, 64, 16, generator=torch.Generator().manual_seed(0))
    stream = KCVT(4).streams()[1]
    read = stream.codec.decode(stream.codec.encode(numbers), 2, 16)
    record = gear._cache(KCVT(4), [(numbers, numbers)])
    assert record["errors"][1] == pytest.approx(float((numbers - read).norm() / numbers.norm()), rel=1e-5)
    sizes = gear._stored(GEAR(4, buffer=20).streams()[0], numbers.half())
    assert sizes["codes"] == 2 * 16 * 48 // 2  # a prompt of 48
    assert sizes["waiting"] == 2 * 2 * 16 * 16  # and 16 more


class Report(Part):
    """The report split that the other parts look at."""

    name = "report"

    def tasks(self, study: StudyContext) -> Iterator[Task]:
        yield Task("report/tokens", lambda: {"rows": study.data.report.tolist()})


def test_squeeze_has_the_cosines_of_the_layers(tiny, tmp_path: Path) -> None:
    parts = [part_of("squeeze"), f"{__file__}:Report"]
    out = tmp_path / "study"
    found = study(tiny("llama"), out, ["fdc"], TINY_STUDY, parts=parts, plots=False).records
    summary = (out / "summary.md").read_text()
    record = found["squeeze/cosines"]
    model = AutoModelForCausalLM.from_pretrained(tiny("llama"), dtype=torch.float32)
    states: list[tuple[torch.Tensor, torch.Tensor]] = []
    entered: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _, args, kwargs: entered.append(args[0]), with_kwargs=True)
        layer.self_attn.register_forward_hook(lambda _, args, out: states.append((entered[-1], entered[-1] + out[0])))
    with torch.no_grad():
        model(torch.tensor(found["report/tokens"]["rows"]))
    expected = [float(functional.cosine_similarity(a.double(), b.double(), dim=-1).mean()) for a, b in states]
    assert record["means"] == pytest.approx(expected, abs=1e-5)
    places = torch.tensor(record["places"], dtype=torch.float64)
    assert places.mean(1).tolist() == pytest.approx(expected, abs=1e-5)
    assert "Cosines of the layers" in summary
    image = drawn("squeeze", "squeeze", tmp_path / "study").axes[0].images[0].get_array()
    assert image.T.flatten().tolist() == pytest.approx(places.flatten().tolist(), abs=1e-6)


def layout(key: int, value: int, before: bool = False) -> LayerLayout:
    groups = tuple(GroupLayout((head,), NumberRow(key), NumberRow(value)) for head in range(8))
    return LayerLayout(groups, *(pre_rope(LLAMA) if before else POST_ROPE))


def test_prompts_are_predicted_by_their_products() -> None:
    tokens, pairs = 1000, 1000 * 1001 / 2
    projections = 2 * 1000 * 2 * (32 + 8) * 128 * 4096
    assert uncompressed_layer_flops(LLAMA, tokens) == projections + 32 * pairs * 4 * 128
    half = layout(64, 64)
    own = 2 * 1000 * 4096 * (32 * 128 + 8 * 128 + 8 * 64 + 32 * 64)
    bases = 2 * 1000 * 128 * 8 * 64 * (1 + 4)  # each KV head's keys, each query head's queries
    assert bases_flops(half, LLAMA, tokens) == bases
    assert layer_flops(half, LLAMA, tokens) == own + bases + 32 * pairs * 4 * 64
    wide = layer_flops(layout(60, 33), LLAMA, tokens) - layer_flops(layout(57, 33), LLAMA, tokens)
    assert wide == 2 * 1000 * 3 * 8 * 128 * (1 + 4)  # both sides are padded to 64
    before = 2 * 1000 * (4096 * (32 * 128 + 8 * 64 + 8 * 64 + 32 * 64) + 128 * 8 * 64)  # keys are folded and rebuilt
    assert layer_flops(layout(64, 64, before=True), LLAMA, tokens) == before + 32 * pairs * 4 * 128


def test_latency_rises_to_the_most_that_is_served() -> None:
    assert H200.matmul_flops_per_s is not None
    base = fdc.Server(LLAMA, (), 7 * 10**9, 2, H200, H200.matmul_flops_per_s)
    server = replace(base, layouts=[layout(64, 64)] * 32)
    most = base.most_per_s(6300, 243)
    assert server.most_per_s(6300, 243) > most
    assert server.fits(6543) == pytest.approx(2 * base.fits(6543), rel=0.01)
    idle = base.latency_s(6300, 243, 1e-9)
    assert idle == pytest.approx(base.step_s(6421, 0) + base.prompt_s(6300) / 243, rel=1e-6)
    rising = [base.latency_s(6300, 243, load * most) for load in (0.1, 0.5, 0.9)]
    assert rising == sorted(rising)
    assert base.latency_s(6300, 243, most) is None
    # At the most the batch is full: as many requests as fit are decoded.
    full = base.step_s(6421, base.fits(6543)) / (1 - most * base.prompt_s(6300))
    assert most * 243 * full == pytest.approx(base.fits(6543))


def test_fdc_predicts_requests_of_every_trace(tiny, tmp_path: Path) -> None:
    found, summary = records(tiny, tmp_path / "study", "fdc", "fdc")
    times = found["fdc/fdc"]["times"]
    assert set(times) == {"this model", "like an 8B"}
    for of_model in times.values():
        assert set(of_model) == set(fdc.TRACES)
        for record in of_model.values():
            assert 0 < record["bases"] < 0.5
    of_8b = times["like an 8B"]["Cocktail"]
    assert of_8b["prompt"] < 1 < of_8b["most"]
    assert of_8b["step"] < 0.7
    assert "Times of requests, predicted" in summary
    equal = found["fdc/fdc, accuracy 0.99"]
    if "times" in equal:
        assert set(equal["times"]) == set(times)
        assert equal["stored"] > 0
    assert "at an equal accuracy, predicted" in summary


@pytest.mark.nightly
def test_zdc_measures_tokens_bases_and_bytes(tiny, tmp_path: Path) -> None:
    found, summary = records(tiny, tmp_path / "study", "zdc", overrides=LONGER)
    of_scores = found["zdc/scores"]
    assert all(of == sorted(of) for of in of_scores["ranges"])
    repeated = of_scores["repeated"]
    assert set(repeated) == {f"{u}important by {b}" for u in ("", "un") for b in ("mean scores", "denominators")}
    assert all(0 <= least <= mean <= 1 for of in repeated.values() for mean, least in of)
    lost = found["zdc/degradation/zdc"]
    for side in ("QK", "VW_L"):
        for text in range(3):
            of_text = [lost[side][f"{ratio:g}"][text] for ratio in zdc.RATIOS]
            assert of_text[0] > 0
            assert of_text == sorted(of_text)
    for count, (before, sent, rows) in found["zdc/travel/zdc"].items():
        assert sent <= rows, count
        assert sent < before, count
    assert set(found["zdc/seconds"]["128"]) == {"model", "with H2O", "with GEAR", "SVD"}
    for name in ("H2O, 0.5 of the tokens", "zdc: ZDC, 0.5", "zdc: /DL, 0.5", "zdc: /DT, 0.5", "zdc: GEAR-ZDC, 4 bits"):
        assert not found[f"zdc/{name}"]["skipped"]
    for figures in ("6", "7 and 8", "14", "9 and 18", "4 and 5", "20 and 23", "19 and 22"):
        assert f"Figure{'s' if 'and' in figures else ''} {figures}" in summary


def test_scores_of_a_layer_by_hand() -> None:
    query = torch.tensor([[[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]], [[0.0, 1.0], [1.0, 0.0], [2.0, 0.0]]])
    key = torch.tensor([[[1.0, 1.0], [0.0, 3.0], [-1.0, 0.0]]])
    found = scores.layer_scores(query, key, 0.5)
    of_heads = [[[0.5], [1.0, 3.0], [1.0, 1.5, -0.5]], [[0.5], [0.5, 0.0], [1.0, 0.0, -1.0]]]
    rows = [torch.tensor([head[token] for head in of_heads]) for token in range(3)]
    assert found.worth["mean scores"].tolist() == pytest.approx([float(row.mean(1).sum()) for row in rows])
    assert found.worth["denominators"].exp().tolist() == pytest.approx([float(row.exp().sum()) for row in rows])
    assert (found.quantiles[0], found.quantiles[-1]) == (-1.0, 3.0)
    itself = scores.layer_scores(query, key, 0.5, window=1)
    assert itself.worth["mean scores"].tolist() == pytest.approx([float(row[:, -1].sum()) for row in rows])


def test_choices_mark_the_most_and_the_least() -> None:
    """0.35 of six tokens are two."""
    worth = torch.tensor([[5.0, 1.0, 4.0, 0.0, 2.0, 3.0], [0.0, 1.0, 2.0, 3.0, 5.0, 4.0]])
    assert scores.choices(worth).tolist() == [[1, 0, 1, 0, 0, 0], [0, 0, 0, 0, 1, 1]]
    assert scores.choices(worth, least=True).tolist() == [[0, 1, 0, 1, 0, 0], [1, 1, 0, 0, 0, 0]]
    worth = torch.tensor([[5.0, 1.0, 4.0, 0.0, 2.0, 3.0], [0.0, 1.0, 5.0, 3.0, 4.0, 2.0]])
    assert in_common(scores.choices(worth))[0, 1] == 0.5


def test_ablations_of_zdc_have_its_mean_ratios() -> None:
    found = zdc.tiers(4)
    assert found["ZDC"].shares(4) == (0.3, 0.3667, 0.4333, 0.5)
    assert found["/DL"].shares(4) == (0.4,) * 4
    alike = found["/DT"]
    assert alike.qk_important == alike.qk_unimportant == pytest.approx(0.4 * 0.4 + 0.6 * 0.7)


PAPERS = {
    "FDC": (13, 14),
    "ZACK": (12, 18),
    "ZDC": (2, 29),
    "GEAR": (10, 7),
    "SqueezeAttention": (3, 4),
}
"""Tables and figures of each paper."""


def numbers(cell: str) -> set[tuple[str, int]]:
    """`figures 4 to 6, table 2` -> the figures 4, 5 and 6, and table 2; letters of their parts are left out."""
    found, kind = set(), ""
    for words in re.split(r", | and ", cell):
        if word := re.match(r"(table|figure)s? ", words):
            kind = word[1]
        first, *last = (int(number) for number in re.findall(r"\d+", words))
        found |= {(kind, number) for number in range(first, (last or [first])[0] + 1)}
    return found


@pytest.mark.parametrize("paper", PAPERS)
def test_the_page_lists_every_table_and_figure(paper: str) -> None:
    page = (ROOT / "docs" / "papers.md").read_text("utf-8")
    section = page.partition(f"\n## {paper}\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| ((?:table|figure)s? [^|]*) \|", section, flags=re.MULTILINE)
    tables, figures = PAPERS[paper]
    expected = {("table", n + 1) for n in range(tables)} | {("figure", n + 1) for n in range(figures)}
    listed = [one for cell in cells for one in numbers(cell)]
    assert set(listed) == expected


def test_parts_that_the_page_names_exist() -> None:
    page = (ROOT / "docs" / "papers.md").read_text("utf-8")
    named = re.findall(r"--parts ([\w/.:,]+)", page)
    assert len(named) > 10
    for parts in named:
        for part in parts.split(","):
            find_part(part.replace("artifacts", f"{ROOT}/artifacts"))
