"""Calibration tokens: what each source yields, and the errors of each."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.paths import DEMO_MODEL
from support.quick import mostly_nightly
from support.texts import texts_of
from support.tiny_models import CONFIGS

from rotor.errors import DataError, MissingError
from rotor.models.loading import load_model, weights_of
from rotor.models.sequences import text_sequences
from rotor.models.source import Checkpoint
from rotor.models.tokenizer import chat_opening
from rotor.models.tokens import (
    MAX_SPAN_TOKENS,
    SPAN_REPEATS,
    WrittenText,
    calibration_tokens,
    ordinary_tokens,
    random_tokens,
    synthetic_tokens,
    with_repeats,
)
from rotor.models.weights import Weights
from rotor.recipe.sections import Tokens

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def demo() -> Checkpoint:
    return Checkpoint(DEMO_MODEL)


def test_random_tokens_leave_special_tokens_out(demo) -> None:
    tokens = random_tokens(64, 512, demo.config, demo.tokenizer, seed=3)
    assert set(demo.tokenizer.all_special_ids) == {0}
    assert tokens.min() == 1
    assert tokens.max() == 4095
    assert torch.equal(tokens, random_tokens(64, 512, demo.config, demo.tokenizer, seed=3))
    assert not torch.equal(tokens, random_tokens(64, 512, demo.config, demo.tokenizer, seed=4))


QUICK = ("mistral",)


@pytest.mark.parametrize("family", mostly_nightly(CONFIGS, lambda family: family in QUICK))
def test_synthetic_tokens_are_those_of_sampling_without_a_cache(family: str, tiny, few_written_at_a_time) -> None:
    """Token by token from whole forward passes, in three batches; 24 tokens go beyond mistral's window of 12.

    And the same where one part of the weights is in memory at a time."""
    checkpoint, done = Checkpoint(tiny(family)), []
    weights = weights_of(checkpoint, CPU, torch.float32, streamed=False)
    torch.manual_seed(9)  # the global generator does not matter
    rows = synthetic_tokens(weights, 5, 24, checkpoint.config, checkpoint.tokenizer, 5, done.append)
    assert sum(done) == rows.numel()
    allowed = ordinary_tokens(checkpoint.config, checkpoint.tokenizer)
    generator = torch.Generator().manual_seed(5)
    with torch.inference_mode():
        logits = weights.model(rows, use_cache=False).logits[..., allowed]
    for batch in (slice(0, 2), slice(2, 4), slice(4, 5)):
        for position in range(23):
            drawn = torch.multinomial(logits[batch, position].softmax(-1), 1, generator=generator)
            assert torch.equal(allowed[drawn].flatten(), rows[batch, position + 1]), position
    starts = random_tokens(5, 1, checkpoint.config, checkpoint.tokenizer, seed=5)
    assert rows[:3, 0].tolist() == [0, int(starts[1]), 0]
    streamed = weights_of(checkpoint, CPU, torch.float32, streamed=True)
    assert torch.equal(rows, synthetic_tokens(streamed, 5, 24, checkpoint.config, checkpoint.tokenizer, 5))
    embedding = streamed.model.get_input_embeddings().weight
    assert embedding.is_meta


def test_synthetic_tokens_hold_a_special_one_only_first_in_every_second_row(tiny) -> None:
    """Even where the model gives nearly all its probability to the end of the text."""
    checkpoint = Checkpoint(tiny("gpt2"))
    model = load_model(checkpoint.folder, CPU, torch.float32)
    with torch.no_grad():
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
        model.lm_head.weight[0] *= 100
    rows = synthetic_tokens(Weights(model), 8, 32, checkpoint.config, checkpoint.tokenizer, seed=0)
    assert rows[:, 1:].min() > 0
    assert (rows[:, 0] == 0).tolist() == [True, False] * 4
    with torch.inference_mode():
        assert (model(rows).logits.argmax(-1) == 0).any()


def test_a_model_that_chats_writes_both_sides_in_every_second_row(tiny, tmp_path: Path) -> None:
    """With special tokens, from what its template has before a user speaks, however short rows are."""
    folder = shutil.copytree(tiny("gpt2"), tmp_path / "model")
    assert chat_opening(folder, Checkpoint(folder).tokenizer) == []
    (folder / "chat_template.jinja").write_text("{% for m in messages %}<|endoftext|>ask: {{ m.content }}{% endfor %}")
    checkpoint = Checkpoint(folder)
    opening = chat_opening(folder, checkpoint.tokenizer)
    assert opening == [0, *checkpoint.tokenizer.encode("ask: ", add_special_tokens=False)]
    model = load_model(folder, CPU, torch.float32)
    with torch.no_grad():
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
        model.lm_head.weight[0] *= 100
    rows = synthetic_tokens(Weights(model), 8, 32, checkpoint.config, checkpoint.tokenizer, 0, opening=opening)
    assert rows[::2, : len(opening)].tolist() == [opening] * 4
    assert (rows[::2, len(opening) :] == 0).any()
    assert rows[1::2].min() > 0
    short = synthetic_tokens(Weights(model), 2, 3, checkpoint.config, checkpoint.tokenizer, 0, opening=opening)
    assert short[0, :2].tolist() == opening[:2]
    (folder / "chat_template.jinja").write_text("{{ raise_exception('only in verse') }}")
    assert chat_opening(folder, Checkpoint(folder).tokenizer) == []


def test_the_documents_of_a_folder(tmp_path: Path, demo) -> None:
    for name in ("code/a.txt", "code/deep/b.txt", "prose/a.txt", "loose.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"text of {name} " * 200)
    (tmp_path / "binary.bin").write_bytes(b"\xff\xfe\x00")
    documents = texts_of(tmp_path)
    assert [d.split()[2] for d in documents] == ["code/a.txt", "code/deep/b.txt", "loose.txt", "prose/a.txt"]
    spec = Tokens("text", str(tmp_path), count=1024, seq_len=64)
    tokens = calibration_tokens(spec, demo.config, demo.tokenizer)
    assert [unit.text for unit in tokens.documents] == documents
    every = text_sequences(documents, demo.tokenizer, 64)
    assert torch.equal(tokens.sequences, every[torch.arange(16) * len(every) // 16])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (Tokens("text", "nowhere/at/all"), r"text nowhere/at/all: no such file or folder(.|\n)*path of a text file"),
        (
            Tokens("text", __file__, count=10**7),
            r"tokens.path .*test_tokens.py: \d+ sequences of 512 tokens, expected 19532",
        ),
    ],
)
def test_text_that_is_missing_or_short(spec: Tokens, message: str, demo) -> None:
    with pytest.raises((DataError, MissingError), match=message):
        calibration_tokens(spec, demo.config, demo.tokenizer)


def test_text_without_a_tokenizer(demo) -> None:
    with pytest.raises(DataError, match=r"needs a tokenizer(.|\n)*tokenizer\.json"):
        calibration_tokens(Tokens("text", __file__), demo.config, None)


def test_a_dataset_without_the_package_names_what_to_install(demo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"x: the package `datasets`(.|\n)*pip install 'PATH/TO/rotor\[eval\]'"):
        calibration_tokens(Tokens("dataset", dataset="x"), demo.config, demo.tokenizer)


@pytest.fixture
def data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of JSON lines: 40 documents, one of them empty."""
    monkeypatch.setattr(pytest.importorskip("datasets").config, "HF_DATASETS_CACHE", tmp_path / "cache")
    lines = [{"text": f"story number {i}. " * 40, "n": i} for i in range(40)]
    lines[7]["text"] = " "
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "data"


def test_local_datasets(data_folder: Path, demo) -> None:
    import datasets

    spec = Tokens("dataset", dataset=str(data_folder), count=2048, seq_len=64)
    tokens = calibration_tokens(spec, demo.config, demo.tokenizer)
    assert tokens.sequences.shape == (32, 64)
    assert 1 < len(tokens.documents) < 39
    assert torch.equal(tokens.sequences, calibration_tokens(spec, demo.config, demo.tokenizer).sequences)
    other = calibration_tokens(replace(spec, seed=1), demo.config, demo.tokenizer)
    assert other.documents != tokens.documents
    saved = data_folder.parent / "saved"
    datasets.load_dataset(str(data_folder)).save_to_disk(str(saved))
    assert calibration_tokens(replace(spec, dataset=str(saved)), demo.config, demo.tokenizer).rows.shape == (32, 64)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dataset": "./nowhere"}, r"tokens.dataset ./nowhere, split train: cannot be read"),
        ({"split": "tset"}, r"split tset: cannot be read.*train"),
        ({"column": "txt"}, r"no column 'txt'(.|\n)*There are text, n"),
        ({"column": "n"}, r"column 'n' holds int, expected text"),
        ({"count": 10**6}, r"sequences of 512 tokens, expected 1954"),
    ],
)
def test_datasets_that_cannot_be_used(fields: dict, message: str, data_folder: Path, demo) -> None:
    spec = Tokens(**{"source": "dataset", "dataset": str(data_folder), **fields})
    with pytest.raises(DataError, match=message):
        calibration_tokens(spec, demo.config, demo.tokenizer)


def test_repeats_state_a_span_again_further_on():
    rows = torch.arange(8 * 128).reshape(8, 128)  # every token once
    vocabulary = torch.arange(2000, 4000)
    found = with_repeats(rows, 0.5, 3, vocabulary)
    assert torch.equal(found[:4], rows[:4])
    assert torch.equal(found[:, 0], rows[:, 0])
    for number, row in enumerate(found[4:]):
        values, counts = row.unique(return_counts=True)
        again = values[counts == 1 + SPAN_REPEATS]
        if number % 2:  # drawn tokens, in the order in which they are stated
            assert bool((again >= 2000).all())
            first = int(torch.isin(row, again).nonzero()[0])
            again = row[first : first + len(again)]
        else:  # from one place of one row
            assert torch.equal(again, torch.arange(int(again[0]), int(again[0]) + len(again)))
        span = len(again)
        assert 16 <= span <= MAX_SPAN_TOKENS
        places = (row == again[0]).nonzero().flatten()
        for place in places.tolist():
            assert torch.equal(row[place : place + span], again)
        assert int(places[0]) + span <= 32
        assert int(places[1]) >= 32
    assert torch.equal(with_repeats(rows, 0.5, 3, vocabulary), found)
    assert not torch.equal(with_repeats(rows, 0.5, 4, vocabulary), found)
    assert torch.equal(with_repeats(rows, 0, 3, vocabulary), rows)
    assert bool((with_repeats(rows, 1, 3, vocabulary[:0]) < 2000).all())  # nothing to draw: all spans are of the text
    short = rows[:, :8].clone()
    assert torch.equal(with_repeats(short, 1, 3, vocabulary), short)


def test_text_goes_on_where_the_model_was_stopped_at_writing_it(tiny, few_written_at_a_time) -> None:
    """To the same text; batches that were finished are not written again."""
    checkpoint = Checkpoint(tiny("llama"))
    weights = weights_of(checkpoint, CPU, torch.float32, streamed=False)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def written(begun: WrittenText, stop_after: int = 5 * 24) -> torch.Tensor:
        left = stop_after

        def advance(done: float) -> None:
            nonlocal left
            left -= int(done)
            if left < 0:
                raise KeyboardInterrupt

        arguments = weights, 5, 24, checkpoint.config, checkpoint.tokenizer, 5, advance
        return synthetic_tokens(*arguments, begun=begun)

    whole = written(WrittenText())
    with pytest.raises(KeyboardInterrupt):
        written(
            WrittenText(keep=lambda *found: kept.append(found)), stop_after=3 * 24
        )  # in the second batch of two rows
    ((rows, generator),) = kept
    assert torch.equal(rows, whole[:2])
    counted: list[float] = []
    again = synthetic_tokens(
        weights, 5, 24, checkpoint.config, checkpoint.tokenizer, 5, counted.append, begun=WrittenText(rows, generator)
    )
    assert torch.equal(again, whole)
    assert counted[0] == rows.numel()
    assert sum(counted) == whole.numel()
