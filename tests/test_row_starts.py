"""Rows begin as the model is served: behind what its tokenizer puts before a text, where that is anything."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.paths import ROOT
from support.shortcuts import tried
from support.texts import texts_of

from rotor import inspect
from rotor.models import tokenizer as tokenizers
from rotor.models.loading import load_model
from rotor.models.sequences import prompt_start, text_sequences
from rotor.models.source import Checkpoint
from rotor.models.splits import evaluation_data
from rotor.models.tokenizer import text_start
from rotor.models.tokens import calibration_tokens, ordinary_tokens, with_repeats
from rotor.models.weights import Weights
from rotor.recipe.sections import Evaluation, Tokens
from rotor.search.evaluation.prompts import EvaluationContext, make_prompts

BOS = "<|endoftext|>"
TEXT = ROOT / "LICENSE"


@pytest.fixture(scope="module", autouse=True)
def tried_here() -> Iterator[None]:
    """Tokenizers are tried in this process: they are the bundled one with other tokens around a text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizers, "_trial", tried)
        yield


def with_template(model: Path, folder: Path, before: list[str], behind: list[str]) -> Checkpoint:
    """A copy of a model whose tokenizer puts tokens around a text."""
    shutil.copytree(model, folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    ids = {token: content["model"]["vocab"].get(token, 0) for token in (*before, *behind)}
    around: list[dict[str, Any]] = [{"SpecialToken": {"id": token, "type_id": 0}} for token in before]
    around.append({"Sequence": {"id": "A", "type_id": 0}})
    around += [{"SpecialToken": {"id": token, "type_id": 0}} for token in behind]
    content["post_processor"] |= {
        "single": around,
        "special_tokens": {token: {"id": token, "ids": [own], "tokens": [token]} for token, own in ids.items()},
    }
    path.write_text(json.dumps(content))
    return Checkpoint(folder)


@pytest.fixture(scope="module")
def plain(tiny) -> Checkpoint:
    """A tokenizer that adds nothing, as SmolLM2's."""
    return Checkpoint(tiny("qwen3"))


@pytest.fixture(scope="module")
def begins(tiny, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """One that adds BOS, as those of Gemma, Llama 3 and Mistral."""
    return with_template(tiny("qwen3"), tmp_path_factory.mktemp("starts") / "begins", [BOS], [])


def test_what_a_tokenizer_puts_before_a_text(plain: Checkpoint, begins: Checkpoint, tiny, tmp_path: Path) -> None:
    """Tokens that it puts behind one are no beginning, though they are all that it makes of an empty text."""
    ends = with_template(tiny("qwen3"), tmp_path / "ends", [], [BOS])
    around = with_template(tiny("qwen3"), tmp_path / "around", [BOS, BOS], [BOS])
    assert [text_start(of.tokenizer) for of in (plain, begins, ends, around)] == [[], [0], [], [0, 0]]
    assert begins.tokenizer("")["input_ids"] == ends.tokenizer("")["input_ids"] == [0]
    assert text_start(None) == []
    assert [prompt_start(of.tokenizer) for of in (plain, begins, around)] == [[0], [0], [0, 0]]


def test_rows_of_text(plain: Checkpoint, begins: Checkpoint) -> None:
    """Each begins with BOS, never with two, and no token of a document is lost or doubled between rows."""
    documents = [TEXT.read_text()[:3000], TEXT.read_text()[3000:7000], "short", TEXT.read_text()[7000:]]
    joined = [0]
    for text in documents:
        joined += [*plain.tokenizer(text)["input_ids"], 0]
    before = text_sequences(documents, plain.tokenizer, 32)
    assert before.flatten().tolist() == joined[: before.numel()]
    rows = text_sequences(documents, begins.tokenizer, 32)
    assert (rows[:, 0] == 0).all()
    assert (rows[:, 1] != 0).all()
    body = [token for token in rows[:, 1:].flatten().tolist() if token]
    assert body == [token for token in joined if token][: len(body)]
    assert sum(token == 0 for token in rows[:, 1:].flatten().tolist()) <= 3
    for most in (1, 3, len(rows)):
        assert torch.equal(text_sequences(documents, begins.tokenizer, 32, most), rows[:most])
    assert text_sequences(documents, begins.tokenizer, 2)[:5, 0].tolist() == [0] * 5


@pytest.mark.parametrize("source", ["random", "text", "synthetic"])
def test_rows_of_calibration(source: str, plain: Checkpoint, begins: Checkpoint) -> None:
    """All begin so; the model's own go on with ordinary tokens, drawn at random in every second row."""
    found = []
    for checkpoint in (plain, begins):
        model = load_model(checkpoint.folder, torch.device("cpu"), torch.float32)
        spec = Tokens(source, str(TEXT), count=256, seq_len=32)
        found.append(calibration_tokens(spec, checkpoint.config, checkpoint.tokenizer, Weights(model)).sequences)
    without, rows = found
    assert without.shape == rows.shape == (8, 32)
    assert (rows[:, 0] == 0).all()
    assert (without[:, 0] != 0).any()
    if source != "text":  # of which documents are kept apart in rows, too
        assert torch.isin(rows[:, 1:], ordinary_tokens(begins.config, begins.tokenizer)).all()
    if source == "random":
        assert torch.equal(rows[:, 1:], without[:, 1:])
    if source == "synthetic":
        assert torch.equal(rows[1::2, 1], without[1::2, 0])


def test_rows_of_both_splits_and_prompts(begins: Checkpoint) -> None:
    spec = Evaluation("text", str(TEXT), seq_len=128, search_tokens=512, report_tokens=512)
    data = evaluation_data(spec, begins.config, begins.tokenizer)
    context = EvaluationContext.of(spec, data, begins.tokenizer, begins.config)
    for split, rows in context.rows.items():
        assert (rows[:, 0] == 0).all()
        assert (rows[:, 1] != 0).all()
        for name in ("lookup", "copy"):
            prompts = make_prompts(name, context, split)
            assert (prompts.rows[:, 0] == 0).all()
            assert (prompts.rows[:, 1:] != 0).all()


def test_repeated_spans_leave_what_rows_begin_with() -> None:
    """It is in no span either, so that it never stands within a row."""
    rows = 100 + torch.arange(8 * 128).reshape(8, 128)
    rows[:, :2] = torch.tensor([1, 2])
    for seed in range(20):
        found = with_repeats(rows, 1.0, seed, torch.arange(2000, 4000), fixed=2)
        assert torch.equal(found[:, :2], rows[:, :2])
        assert not torch.isin(found[:, 2:], torch.tensor([1, 2])).any()
        assert not torch.equal(found, rows)


def test_inspect_says_what_a_text_begins_with(plain: Checkpoint, begins: Checkpoint, tmp_path: Path) -> None:
    shutil.copy(plain.folder / "config.json", tmp_path)
    assert [inspect(folder).row_start for folder in (plain.folder, begins.folder, tmp_path)] == ["", BOS, None]


def test_a_data_set_begins_so_too(begins: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytest.importorskip("datasets").config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "data").mkdir()
    lines = [json.dumps({"text": part}) + "\n" for part in texts_of(TEXT)[0].split("\n\n")]
    (tmp_path / "data" / "train.jsonl").write_text("".join(lines))
    spec = Tokens("dataset", dataset=str(tmp_path / "data"), count=512, seq_len=64)
    rows = calibration_tokens(spec, begins.config, begins.tokenizer).sequences
    assert (rows[:, 0] == 0).all()
