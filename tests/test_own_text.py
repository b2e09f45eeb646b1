"""Text of the user's own: one flag for all three splits, checked before any long work, and named wherever it judges."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from support.command_line import expect_error, rotor
from support.paths import ROOT
from support.stopped import Counting
from support.tiny_models import build_tiny

from rotor import Run, calibrate
from rotor.errors import DataError
from rotor.models.documents import read_documents
from rotor.models.readiness import check_text, describe_evaluation
from rotor.models.sequences import text_sequences
from rotor.models.source import Checkpoint
from rotor.models.splits import held_out_documents
from rotor.recipe.reading import load_recipe, text_overrides

SMALL = ["tokens.count=512", "tokens.seq_len=64", "evaluation.seq_len=64", "evaluation.search_tokens=256"]
SMALL += [
    "ranks.multiple_of=4",
    "evaluation.report_tokens=256",
    "evaluation.lookup_prompts=4",
    "evaluation.copy_prompts=4",
]
SET = [item for setting in SMALL for item in ("--set", setting)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny("qwen3", tmp_path_factory.mktemp("own") / "model")


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """Six documents in a folder."""
    folder = tmp_path / "words"
    folder.mkdir()
    lines = (ROOT / "LICENSE").read_text().splitlines()
    for index in range(6):
        (folder / f"{index}.txt").write_text("\n".join(lines[index * 30 : (index + 1) * 30]))
    return folder


def test_one_flag_is_for_all_splits_which_share_nothing(
    model: Path, words: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    """Calibrated on a third, judged on the others; found from another folder; named at the start and in tables."""
    monkeypatch.chdir(tmp_path)
    run, out = tmp_path / "run", tmp_path / "out"
    code, _, error = rotor(capsys, "calibrate", model, "-o", run, "--recipe", "fdc", "--text", "words", *SET)
    assert code == 0, error
    assert "text: calibrates on 512 tokens of your text in words; accuracy is measured on your text in words" in error
    opened = Run.open(run)
    assert (opened.recipe.tokens.source, opened.recipe.evaluation.source) == ("text", "text")
    assert opened.recipe.tokens.path == opened.recipe.evaluation.path == str(words)
    documents = held_out_documents(opened.recipe.evaluation, opened.calibrated_documents)
    assert documents.excluded == ()
    parts = [set(documents.texts("calibration")), set(documents.texts("search")), set(documents.texts("report"))]
    assert [len(part) for part in parts] == [2, 2, 2]
    assert set.union(*parts) == {text for text, _ in read_documents(words)}

    monkeypatch.chdir(ROOT)
    code, printed, error = rotor(capsys, "export", run, "-o", out, "--compression", "0.3")
    assert code == 0, error
    assert "text: accuracy is measured on your text in words" in error
    assert "search split) of your text in words" in printed
    code, printed, error = rotor(capsys, "validate", out, "--text", words)
    assert code == 0, error
    assert "accuracy on the report split of your text in words" in " ".join(printed.split())
    code, printed, error = rotor(capsys, "validate", out, "--text", words, "--json")
    assert json.loads(printed)["summary"]["accuracy"]["data"] == "your text in words"
    assert json.loads(printed)["summary"]["same_data_as_export"]
    (target,) = (check for check in json.loads(printed)["checks"] if check["name"] == "accuracy target")
    assert target["detail"].startswith("on the report split none was set; default ")


def test_too_little_text_is_told_before_anything_is_done(model: Path, tmp_path: Path, capsys) -> None:
    """With what there is and what is needed of each split, and settings that then work."""
    short = tmp_path / "short.txt"
    short.write_text((ROOT / "LICENSE").read_text()[:4000])
    tokenizer = Checkpoint(model).tokenizer
    recipe = load_recipe("fdc", [*text_overrides(short), *SMALL])
    with pytest.raises(DataError) as error:
        check_text(recipe, Checkpoint(model).config, tokenizer)
    parts = held_out_documents(recipe.evaluation)
    has = [
        64 * (len(text_sequences(part, tokenizer, 64))) for part in (parts.texts("calibration"), parts.texts("search"))
    ]
    assert 0 < has[0] < 512
    assert f"calibration has {has[0]} of 512 tokens" in error.value.message
    assert str(short) in error.value.message
    fits = error.value.hint.partition("for what there is: ")[2].replace("--set ", "").split()
    check_text(load_recipe("fdc", [*text_overrides(short), *SMALL, *fits]), Checkpoint(model).config, tokenizer)

    command = ("calibrate", model, "-o", tmp_path / "run", "--recipe", "fdc", "--text", short, *SET)
    expect_error(capsys, 1, f"calibration has {has[0]} of 512 tokens", *command)
    expect_error(capsys, 2, "no such file or folder", *command, "--text", tmp_path / "nowhere")
    (tmp_path / "tiny.txt").write_text("x")
    expect_error(capsys, 1, "too little text", *command, "--text", tmp_path / "tiny.txt")
    bare = shutil.copytree(model, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    expect_error(capsys, 1, "text needs a tokenizer", "calibrate", bare, *command[2:])
    begun = Counting()
    with pytest.raises(DataError):
        calibrate(model, tmp_path / "run", recipe, progress=begun)
    assert begun.names == []
    assert not list(tmp_path.glob("run*"))


def test_text_that_only_judges_is_checked_too(model: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text((ROOT / "LICENSE").read_text()[:2000])
    recipe = load_recipe("fdc", ["evaluation.source=text", f"evaluation.path={short}", *SMALL[:3]])
    with pytest.raises(DataError, match=r"the search split has \d+ of 16384 tokens, the report split has \d+ of 24576"):
        check_text(recipe, Checkpoint(model).config, Checkpoint(model).tokenizer)


def test_rows_are_counted_as_they_are_cut(model: Path) -> None:
    tokenizer, documents = Checkpoint(model).tokenizer, [text for text, _ in read_documents(ROOT / "docs")]
    rows = len(text_sequences(documents, tokenizer, 100))
    assert len(text_sequences(documents, tokenizer, 100, 1 << 30)) == rows
    assert len(text_sequences(documents, tokenizer, 100, rows)) == rows
    assert len(text_sequences(documents, tokenizer, 100, 3)) == 3


def test_python_source_for_a_chat_model_is_warned_of(model: Path, words: Path) -> None:
    """With the fix, and not where the text is the user's."""
    tokenizer = Checkpoint(model).tokenizer
    spec = load_recipe("fdc").evaluation
    assert describe_evaluation(spec, tokenizer).endswith("standard library (modules held out)")
    tokenizer.chat_template = "{{ messages }}"
    assert "chat template" in describe_evaluation(spec, tokenizer)
    assert "--text FILE" in describe_evaluation(spec, tokenizer)
    own = load_recipe("fdc", text_overrides(words, ("evaluation",))).evaluation
    assert describe_evaluation(own, tokenizer) == "accuracy is measured on your text in words"
    assert "no tokenizer" in describe_evaluation(spec, None)


def test_a_path_with_any_characters_is_one_value(tmp_path: Path) -> None:
    odd = tmp_path / "it's: a #path [1]"
    assert load_recipe("fdc", text_overrides(odd)).tokens.path == str(odd)


def test_lines_of_json_are_documents(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    said = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "Four."}]
    file.write_text("\n".join(map(json.dumps, ({"text": "one"}, {"messages": said}))) + "\n\n")
    assert read_documents(file) == [("one", "chats.jsonl"), ("What is 2 + 2?\n\nFour.", "chats.jsonl")]
    assert read_documents(tmp_path) == read_documents(file)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("plain words", "line 2: not JSON"),
        ('{"body": "x"}', "line 2: got the keys body, expected `text`, `messages` or `conversations`"),
        ('{"messages": [{"role": "user"}]}', "line 2: `messages`, message 1: it has neither content nor tool_calls"),
        ("[1]", "line 2: got list"),
    ],
)
def test_lines_of_something_else_are_refused(line: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text(f'{{"text": "one"}}\n{line}\n')
    with pytest.raises(DataError, match=re.escape(text)):
        read_documents(file)
