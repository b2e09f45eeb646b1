"""`rotor study --parts match`: the bytes at which a recipe is as good as the caches in use."""

from __future__ import annotations

import csv
import math
from dataclasses import replace

import pytest
import torch
from support.paths import ROOT

from rotor import study
from rotor.checkpoint.layout import AttentionShape
from rotor.errors import UsageError
from rotor.policies import FP8, KIVI, PerToken
from rotor.tools.study.caches import mean_sequence_bytes, sequence_bytes
from rotor.tools.study.parts.match import MatchRecord, bytes_of_answers, bytes_of_kl, header, match_rows

SHAPE = AttentionShape(3, 4, 2, 16, 64, rotary_dim=16, windows=(24, None, 24))


def of_recipe(size: float, kl_div: float, copy: float) -> MatchRecord:
    sizes = {"2048": size, "32768": size / 2}
    return MatchRecord(f"own, {size} bytes", "own", "", kl_div, {"copy": copy}, sizes)


OWN = [of_recipe(400, 0.01, 0.97), of_recipe(100, 0.1, 0.5), of_recipe(200, 0.04, 0.98), of_recipe(800, 0.001, 0.99)]


def test_bytes_of_a_kl_are_exponential_between_what_was_measured() -> None:
    assert bytes_of_kl(OWN, 0.02, "2048") == "300"
    assert bytes_of_kl(OWN, 0.02, "32768") == "150"
    assert bytes_of_kl(OWN, math.sqrt(0.001 * 0.01), "2048") == "600"
    assert bytes_of_kl(OWN, 0.1, "2048") == bytes_of_kl(OWN, 0.3, "2048") == "< 100"
    assert bytes_of_kl(OWN, 0.0009, "2048") == "> 800"
    assert bytes_of_kl([], 0.02, "2048") == ""


def test_bytes_of_answers_are_the_fewest_from_which_on_they_are_as_good() -> None:
    """The sample at 400 bytes is worse than that at 200, which had them already."""
    assert bytes_of_answers(OWN, 0.74, "copy", "2048") == "150"
    assert bytes_of_answers(OWN, 0.975, "copy", "2048") == "199"
    assert bytes_of_answers(OWN, 0.985, "copy", "2048") == "600"
    assert bytes_of_answers(OWN, 0.995, "copy", "2048") == "> 800"


def test_the_table_has_a_row_for_each_cache_in_use() -> None:
    used = MatchRecord("KIVI-4", "", "", 0.02, {"copy": 0.74}, {"2048": 500.0, "32768": 300.0})
    missing = MatchRecord("KVTC-4", skipped="no")
    records = [used, missing, *OWN]
    assert header(records) == ["cache", "bytes", "KL", "at", "copies", "at"]
    assert match_rows(records, "own", "2048") == [
        ["KIVI-4", "500", "0.02000", "300", "0.740", "150"],
        ["KVTC-4", "not measured: no"],
    ]


def test_bytes_of_a_sequence_count_what_windows_hold() -> None:
    assert sequence_bytes(SHAPE, torch.bfloat16, 40, None) == 128 * (24 + 40 + 24)
    assert sequence_bytes(SHAPE, torch.bfloat16, 40, FP8("tensor")) == 64 * (24 + 40 + 24)
    assert sequence_bytes(SHAPE, torch.bfloat16, 40, FP8()) == (64 + 8) * (24 + 40 + 24)
    assert sequence_bytes(SHAPE, torch.bfloat16, 40, PerToken(4, 16)) == 4 * (8 + 4) * (24 + 40 + 24)
    assert sequence_bytes(SHAPE, torch.bfloat16, 40, KIVI(4, 8, 64)) == 128 * (24 + 40 + 24)  # all tokens wait
    in_windows = sequence_bytes(SHAPE, torch.bfloat16, 40, KIVI(4, 8, 32)) - sequence_bytes(
        replace(SHAPE, num_layers=1, windows=()), torch.bfloat16, 40, KIVI(4, 8, 32)
    )
    assert in_windows == 128 * (24 + 24)  # where fewer are held than may wait


def test_bytes_count_the_tokens_that_wait() -> None:
    """KIVI's keys wait until a block is coded: in the mean half a block has 16 bits; KVTC's newest always do."""
    shape = replace(SHAPE, num_layers=1, windows=())
    coded, whole = 2 * 16 * (4 / 8 + 4 / 8), 2 * 16 * 2  # bytes of a side of a token
    for tokens in (2048, 32768):
        values = (coded * (tokens - 128) + whole * 128) / tokens
        keys = coded + (whole - coded) * 127 / 2 / tokens
        found = mean_sequence_bytes(shape, torch.bfloat16, tokens, KIVI(4, 8, 128))
        assert found == pytest.approx(keys + values, rel=1e-3)
        assert found > sequence_bytes(shape, torch.bfloat16, tokens, KIVI(4, 8, 128)) / tokens
        plain = PerToken(4, 16)
        assert mean_sequence_bytes(shape, torch.bfloat16, tokens, plain) == 4 * (8 + 4)


def test_one_scale_for_all_numbers() -> None:
    """A byte a number; what lies beyond 448 becomes that."""
    code = FP8("tensor").streams()[0].codec
    states = torch.tensor([[[[0.5, -3.3, 1000.0, 0.0], [1e-3, 447.0, -448.0, 17.0]]]])
    parts = code.encode(states)
    assert [part.dtype for part in parts] == [torch.uint8]
    read = code.decode(parts, 1, 4)
    assert read[0, 0, 0].tolist() == [0.5, -3.25, 448.0, 0.0]
    assert torch.allclose(read, states.clamp(-448, 448), rtol=1 / 16, atol=1e-3)


@pytest.fixture(scope="module")
def of_windows(tiny, tmp_path_factory: pytest.TempPathFactory):
    """of_windows(name, *overrides, **options) -> a study of a model with windows and random weights, by KL alone."""
    folder = tmp_path_factory.mktemp("windows")
    settings = ["tokens.source=random", "tokens.count=1024", "tokens.seq_len=64", "codes.tokens=512", "groups.size=2"]
    settings += ["evaluation.source=text", f"evaluation.path={ROOT / 'docs'}", "evaluation.seq_len=64"]
    settings += ["evaluation.search_tokens=128", "evaluation.report_tokens=256"]
    settings += ["evaluation.lookup_prompts=2", "evaluation.copy_prompts=2"]
    settings += ["exact.first=0", "exact.newest=0"]
    usual = {"parts": ["match"], "sizes": [80, 200], "plots": False}

    def get(name: str, *overrides: str, **options):
        return study(tiny("gemma3_text"), folder / name, ["rotor"], [*settings, *overrides], **usual | options)

    return get


def records_of(result) -> dict:
    return {name.partition("/")[2]: record for name, record in result.records.items()}


def test_a_study_of_a_model_with_windows(of_windows) -> None:
    """A second start measures nothing."""
    result = of_windows("study")
    names = ["fp8, one scale", "4 bits a token and head", "KIVI-4", "KIVI-2", "KVTC-4"]
    assert list(result.records) == [f"match/{name}" for name in (*names, "rotor, 80 bytes", "rotor, 200 bytes")]
    records = records_of(result)
    whole = 2 * 4 * 16 * 4  # float32, of a layer
    fp8 = records["fp8, one scale"]["sizes"]
    assert fp8 == {str(n): whole / 4 * (12 + n) / n for n in (2048, 32768)}
    few, many = records["rotor, 80 bytes"], records["rotor, 200 bytes"]
    assert few["kl_div"] > many["kl_div"] > 0
    assert few["sizes"]["2048"] <= 80 * 1.2
    text = (result.folder / "summary.md").read_text()
    assert "## Bytes to match" in text
    assert text.count("| fp8, one scale |") == 3
    with (result.folder / "match.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == [*names, "rotor, 80 bytes", "rotor, 200 bytes"]
    assert float(rows[0]["kv_bytes_per_token_at_2048"]) == pytest.approx(fp8["2048"])
    again = of_windows("study")
    assert (again.added, again.records) == (0, result.records)
    with pytest.raises(UsageError, match="other settings: context"):
        of_windows("study", context=16)


@pytest.mark.nightly
def test_exact_tokens_and_a_short_context_of_a_model_with_windows(of_windows) -> None:
    records = records_of(of_windows("study"))
    few, many = records["rotor, 80 bytes"], records["rotor, 200 bytes"]
    whole = 2 * 4 * 16 * 4  # float32, of a layer
    exact = records_of(of_windows("exact", "exact.first=2", "exact.newest=16", sizes=[80]))["rotor, 80 bytes"]
    added = whole * ((2 + 12) + (2 + 16))  # of the layer with a window of 12, and of the other
    assert exact["sizes"] == {n: pytest.approx(size + added / int(n)) for n, size in few["sizes"].items()}
    assert exact["kl_div"] < few["kl_div"]
    of_short = records_of(of_windows("short", context=16))[
        "rotor, 200 bytes"
    ]  # of a sequence whose windows hold most of it
    assert of_short["kl_div"] > many["kl_div"]
    assert 0 < of_short["sizes"]["2048"] < many["sizes"]["2048"]
