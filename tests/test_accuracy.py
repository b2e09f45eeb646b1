"""Accuracy that means what it says: splits that never meet, tables by context, what a target asks of which split."""

from __future__ import annotations

import importlib
import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.command_line import rotor
from support.paths import DEMO_MODEL
from support.runs import FAST_EVALUATION, SHORT_TEXT, calibrated, reseal

from rotor import Progress, calibrate, export, inspect
from rotor.checked import Reader, plain
from rotor.cli.checkpoints import how_to_keep_more
from rotor.errors import CheckpointError, DataError, UsageError
from rotor.models.hardware import DevicePlan
from rotor.models.overlap import overlapping
from rotor.models.source import Checkpoint
from rotor.models.splits import (
    SPLITS,
    EvaluationData,
    SplitText,
    calibration_share,
    digest,
    digests,
    evaluation_data,
    held_out_documents,
    read_kinds,
)
from rotor.recipe.reading import load_recipe
from rotor.recipe.requests import ExportRequest
from rotor.recipe.sections import Evaluation
from rotor.search.evaluation.accuracy import Accuracy, Fidelity
from rotor.search.evaluation.fidelity import FidelityMeter
from rotor.search.evaluation.prompts import EvaluationContext
from rotor.search.export.job import ExportJob
from rotor.search.point import Point
from rotor.search.table import Context, ProbeTable

CPU = torch.device("cpu")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder of seven documents."""
    (tmp_path / "texts").mkdir()
    for i in range(7):
        (tmp_path / "texts" / f"{i}.txt").write_text(f"document{i} " * 400)
    return tmp_path / "texts"


def shared(path: Path, spec: Evaluation) -> list[str]:
    """Parts of a text that a calibration takes."""
    return [unit.text for units in calibration_share(read_kinds([path], None), spec).values() for unit in units]


# Splits.


def test_the_three_splits_share_no_document_and_no_copies(texts: Path) -> None:
    found = held_out_documents(Evaluation("text", str(texts)))
    parts = [set(found.texts("calibration")), set(found.texts("search")), set(found.texts("report"))]
    assert sorted(map(len, parts)) == [2, 2, 3]
    assert len(set.union(*parts)) == 7
    other = held_out_documents(Evaluation("text", str(texts), seed=1))
    assert set(other.texts("search")) != parts[1]
    for i in range(7):
        (texts / f"copy{i}.txt").write_text((texts / f"{i}.txt").read_text())
    assert held_out_documents(Evaluation("text", str(texts))) == found


def test_a_document_that_is_cut_up_or_changed_a_little_serves_one_split(texts: Path) -> None:
    """Parts of a document and a second edition of it are dealt with it; what many begin with joins nothing."""
    generator = random.Random(0)
    licence = " ".join(f"licence{i}" for i in range(150))
    for i in range(7):
        words = [f"w{generator.randrange(10_000)}" for _ in range(1200)]
        (texts / f"{i}.txt").write_text(f"{licence}\n{' '.join(words)}")
        (texts / f"{i}-a.txt").write_text(" ".join(words[:500]))
        (texts / f"{i}-b.txt").write_text(" ".join(words[430:]))
        (texts / f"{i}-second.txt").write_text(" ".join(word for word in words if generator.random() > 0.02))
    for seed in range(4):
        names = held_out_documents(Evaluation("text", str(texts), seed=seed)).names
        numbers = [{name.split("/")[1][0] for name in names[split]} for split in ("calibration", *SPLITS)]
        assert all(numbers)
        assert sum(map(len, numbers)) == 7, numbers
        assert sum(sum(counts.values()) for counts in names.values()) == 28
    last = " ".join(f"last{j}" for j in range(400))
    numbered = [f"{licence} {' '.join(f'{i}x{j}' for j in range(400))}" for i in range(150)]
    assert overlapping([*numbered, last, last]) == [*range(151), 150]  # a licence that all have hides no copy
    spec = Evaluation("text", str(texts))
    (texts.parent / "own.txt").write_text((texts / "3-a.txt").read_text())
    served = next(split for split in names if "texts/3.txt" in held_out_documents(spec).names[split])
    assert shared(texts.parent / "own.txt", spec) == [] or served == "calibration"


def test_texts_are_kinds_of_which_the_smallest_ratio_counts(texts: Path, demo) -> None:
    """Each has an equal share of each split; a document of both is dealt once; the report tells them apart."""
    checkpoint, network = demo
    other = texts.parent / "python"
    other.mkdir()
    for i, module in enumerate(("argparse", "ast", "csv", "shutil", "tarfile", "typing")):
        (other / f"{i}.py").write_text(Path(importlib.import_module(module).__file__).read_text()[:20_000])
    (other / "copy.txt").write_text((texts / "0.txt").read_text())
    spec = Evaluation("text", (str(texts), str(other)), seq_len=256, search_tokens=512, report_tokens=1024)
    dealt = held_out_documents(replace(spec, metric="text"))
    assert sorted(name for names in dealt.names.values() for name in names) == sorted(
        [f"texts/{i}.txt" for i in range(7)] + [f"python/{i}.py" for i in range(6)]
    )
    data = evaluation_data(replace(spec, metric="text"), checkpoint.config, checkpoint.tokenizer)
    assert data.description == "your text in texts and python"
    assert data.splits["report"].kinds == ("texts",) * 2 + ("python",) * 2
    context = EvaluationContext.of(replace(spec, metric="text"), data, checkpoint.tokenizer, checkpoint.config)
    meter = FidelityMeter(context, Progress())
    meter.measure_base(network, "report")
    read, rows = (lambda rows, prefill, advance: network.final_states(rows).flip(-1)), data.report
    found = meter.measure(network, "report", read)
    assert set(found.kinds) == {"texts", "python"}
    assert found.values["ppl_ratio"] == min(kind["ppl_ratio"] for kind in found.kinds.values())
    assert found.values["token_accuracy"] == min(kind["token_accuracy"] for kind in found.kinds.values())
    assert found.kinds["texts"]["ppl_ratio"] != found.kinds["python"]["ppl_ratio"]
    told = dict(meter.accuracy({"report": found, "search": found}, None, data.description).part_rows())
    assert told["text python"].startswith(f"next tokens {found.kinds['python']['token_accuracy']:.4f}, perplexity")
    assert rows.shape == (4, 256)


def test_a_calibration_on_the_held_out_text_takes_its_own_share_alone(texts: Path, tmp_path: Path) -> None:
    spec = Evaluation("text", str(texts))
    found = held_out_documents(spec)
    assert set(shared(texts, spec)) == set(found.texts("calibration"))
    one = tmp_path / "one.txt"
    one.write_text("".join(f"{i:04d} " for i in range(600)))
    thirds = held_out_documents(Evaluation("text", str(one)))
    parts = ["".join(part) for part in map(thirds.texts, ("calibration", "search", "report"))]
    assert "".join(parts) == one.read_text()
    assert [len(part) for part in parts] == [1000, 1000, 1000]
    assert "".join(shared(one, Evaluation("text", str(one)))) == one.read_text()[:1000]
    (other,) = calibration_share({"other": [("something else", "a.txt")]}, spec)["other"]
    assert other.text == "something else"


def test_what_was_calibrated_on_is_left_out_and_nothing_left_is_an_error(texts: Path) -> None:
    spec = Evaluation("text", str(texts))
    free = held_out_documents(spec)
    known = [digest(free.texts("search")[0])]
    found = held_out_documents(spec, known)
    assert found.excluded == tuple(known)
    assert found.texts("search") == free.texts("search")[1:]
    assert found.texts("report") == free.texts("report")
    with pytest.raises(
        DataError, match=r"the report split has no document left that was not calibrated on \(\d were\)"
    ):
        held_out_documents(spec, digests(free.texts("report")))


def test_a_run_on_the_text_that_it_is_judged_on_never_sees_those_splits(texts: Path, tmp_path: Path) -> None:
    own = ["evaluation.seq_len=64", "evaluation.search_tokens=256", "evaluation.report_tokens=256"]
    text = ["tokens.source=text", f"tokens.path={texts}", "tokens.count=512", "tokens.seq_len=64"]
    same = ["evaluation.source=text", f"evaluation.path={texts}", *own]
    run = calibrate(DEMO_MODEL, tmp_path / "run", "fdc", [*text, *same, "evaluation.metric=text"])
    data = held_out_documents(run.recipe.evaluation, run.calibrated_documents)
    assert data.excluded == ()
    assert run.calibrated_documents == set(digests(data.texts("calibration")))
    # Calibrated on all of it, as the evaluation was another then.
    run = calibrate(DEMO_MODEL, tmp_path / "all", "fdc", [*text, *own])
    with pytest.raises(DataError, match="was not calibrated on"):
        export(run.folder, tmp_path / "out", compression=0.3, overrides=same)


# Points and tables.


def test_a_point_survives_json() -> None:
    found = Fidelity(0.97, (0.95, 0.99), {"token_accuracy": 0.98, "score": None})
    point = Point(0.1, 0.41, 0.4, [[(3, 4)]], [[(8, 8)]], search=found)
    data, reader = json.loads(json.dumps(plain(point))), Reader("x.json", CheckpointError)
    again = reader.read(Point, data, "points[0]")
    assert again == point
    assert again.key == point.key
    assert again.with_fidelity("report", found).fidelity("report") == found
    data["search"]["interval_95"] = [0.9]
    with pytest.raises(CheckpointError, match=r"points\[0\]\.search\.interval_95: got \[0\.9\]"):
        reader.read(Point, data, "points[0]")


def test_all_that_a_number_depends_on_makes_another_context() -> None:
    def data(token: int) -> EvaluationData:
        texts = [SplitText(rows, rows.flatten()) for rows in (torch.full((2, 4), token), torch.zeros(2, 4).long())]
        return EvaluationData(dict(zip(SPLITS, texts, strict=True)), "text")

    spec = Evaluation()
    f32 = DevicePlan(CPU, torch.float32)
    places = [(data(1), f32), (data(2), f32), (data(1), DevicePlan(CPU, torch.bfloat16))]
    elsewhere = DevicePlan(torch.device("meta"), torch.float32)
    contexts = [Context.of(spec, *place) for place in [*places, (data(1), elsewhere)]]
    for change in ({"metric": "text"}, {"lookup_keys": 4}, {"filler_tokens": 64}):
        contexts.append(Context.of(Evaluation(**change), *places[0]))
    assert len({context.key for context in contexts}) == len(contexts)
    assert Context.of(Evaluation(search_tokens=1), data(1), f32).key == contexts[0].key


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the bundled model on a short text, exported once at an accuracy of text alone."""
    folder = tmp_path_factory.mktemp("measured")
    text = folder / "text.txt"
    text.write_text((Path(__file__).parent.parent / "LICENSE").read_text())
    run = calibrated(DEMO_MODEL, folder / "run", "pre", 1)
    own = ["evaluation.source=text", f"evaluation.path={text}", "evaluation.metric=text"]
    recipe = load_recipe(str(run.folder / "recipe.yaml"), own)
    (run.folder / "recipe.yaml").write_text(recipe.to_yaml())
    reseal(run.folder)
    export(run.folder, folder / "out", accuracy=0.9)
    return folder


@pytest.fixture
def copied(measured: Path, tmp_path: Path) -> Path:
    """The same, to be changed."""
    return shutil.copytree(measured, tmp_path / "copy")


def test_a_changed_text_reuses_no_point(copied: Path) -> None:
    text = copied / "text.txt"
    own = [f"evaluation.path={text}"]
    before = export(copied / "run", copied / "same", accuracy=0.9, overrides=own)
    assert before.measured_points == 0  # another place, equal tokens
    text.write_text(text.read_text().replace("the", "those"))
    after = export(copied / "run", copied / "new", accuracy=0.9, overrides=own)
    assert after.measured_points > 1
    assert after.report["accuracy"]["data_sha256"] != before.report["accuracy"]["data_sha256"]
    assert len(list((copied / "run" / "tables").glob("*.json"))) == 3


def test_a_choice_depends_on_the_request_alone(copied: Path) -> None:
    fresh = copied / "fresh"
    shutil.copytree(copied / "run", fresh)
    shutil.rmtree(fresh / "tables")
    for compression in (0.35, 0.45):
        export(copied / "run", copied / f"out-{compression}", compression=compression)
    export(copied / "run", copied / "other", accuracy=0.95)
    a = export(copied / "run", copied / "a", accuracy=0.97)
    b = export(fresh, copied / "b", accuracy=0.97)
    assert a.report["ranks"] == b.report["ranks"]
    assert b.measured_points > a.measured_points


def test_one_file_of_probes_serves_every_metric(tiny, tmp_path: Path) -> None:
    small = [
        "tokens.source=random",
        "tokens.count=512",
        "tokens.seq_len=64",
        "ranks.probe_tokens=256",
        *FAST_EVALUATION,
    ]
    run = calibrate(tiny("llama"), tmp_path / "run", "rotor-16", [*small, *SHORT_TEXT])
    export(run.folder, tmp_path / "a", compression=0.4)
    again = export(run.folder, tmp_path / "b", compression=0.2, overrides=["evaluation.metric=text"])
    assert "probe" not in again.seconds
    assert len(list((run.folder / "probes").iterdir())) == 1
    checkpoint = Checkpoint(run.model_folder)
    data = evaluation_data(run.recipe.evaluation, checkpoint.config, checkpoint.tokenizer)
    assert ProbeTable.open(run, run.recipe.ranks, data.search[:2], DevicePlan(CPU, torch.float32)).complete
    assert not ProbeTable.open(run, run.recipe.ranks, data.search[:1], DevicePlan(CPU, torch.float32)).complete


# What validate says of a target.


@pytest.mark.parametrize(
    ("value", "interval", "met", "text"),
    [
        (0.991, (0.985, 0.995), True, ""),
        (0.989, (0.985, 0.993), True, "the value is below the target, its 95 % interval is not"),
        (0.97, (0.96, 0.98), False, "the whole 95 % interval is below the target"),
    ],
)
def test_a_target_is_missed_where_the_whole_interval_is_below(
    value: float, interval: tuple[float, float], met: bool, text: str
) -> None:
    assert Fidelity(value, interval, {}).against(0.99) == (met, text)
    assert Accuracy("text", 0.99, {"report": Fidelity(value, interval, {})}).below_target == text


def test_a_report_below_its_target_says_what_keeps_more(tmp_path: Path) -> None:
    """By as much as is missing."""
    recipe = load_recipe("rotor", ["evaluation.quick=true"])
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    report, search = Fidelity(0.9863, (0.98, 0.992), {}), Fidelity(0.9901, (0.98, 0.999), {})
    found = Accuracy("text", 0.99, {"search": search, "report": report})
    assert (
        how_to_keep_more(tmp_path, found) == "To keep more, export with --accuracy 0.994, or calibrate without --quick."
    )
    (tmp_path / "recipe.yaml").write_text(load_recipe("rotor").to_yaml())
    found = Accuracy("text", 0.998, {"search": search, "report": report})
    assert how_to_keep_more(tmp_path, found) == "To keep more, export with --accuracy 0.999."


def test_no_target_behind_the_calibrated_length_of_keys_after_rope(tiny, tmp_path: Path, caplog) -> None:
    short = ["tokens.count=512", "tokens.seq_len=64", "tokens.source=random"]
    for recipe, settings in (("rotor", ["groups.domain=post", "codes.tokens=256"]), ("fdc", ["ranks.multiple_of=4"])):
        run = calibrate(tiny("llama"), tmp_path / recipe, recipe, [*short, *settings])
        asked = ExportRequest(run.folder, tmp_path / "out", accuracy=0.9)
        assert ("for longer sequences export promises no accuracy" in caplog.text) == (recipe == "rotor")
        assert bool(inspect(tiny("llama"), recipe, [*short, *settings]).warning) == (recipe == "rotor")
        caplog.clear()
        if recipe == "fdc":
            (said,) = ExportJob.check(asked).warnings
            assert "rows of 64 tokens: behind them the accuracy" in said
        else:
            with pytest.raises(UsageError, match="rows of 64 tokens: no accuracy can be promised"):
                ExportJob.check(asked)
        for promised in (replace(asked, context=64), replace(asked, accuracy=None, compression=0.5)):
            assert ExportJob.check(promised).warnings == ()


def test_validate_ends_with_3_where_the_interval_is_below_the_target_alone(copied: Path, capsys) -> None:
    out, path = copied / "out", copied / "out" / "rotor.json"
    report = json.loads(path.read_text())
    low, high = report["accuracy"]["interval_95"]
    value = report["accuracy"]["report"]
    assert low < value < high
    for target, code in ((value + (high - value) / 2, 0), (high + 0.01, 3)):
        report["accuracy"]["target"] = target
        path.write_text(json.dumps(report))
        reseal(out)
        own = f"evaluation.path={copied / 'text.txt'}"
        assert rotor(capsys, "validate", out, "--model", DEMO_MODEL, "--set", own, "-q")[0] == code
