"""Calibration tokens: what each source yields, its topics, and the errors of each."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from conftest import DEMO_MODEL

from rotor.data.documents import Document, read_documents, read_topics
from rotor.data.repeats import SPAN, TIMES, with_repeats
from rotor.data.rows import topic_rows
from rotor.data.tokens import calibration_tokens, ordinary_tokens, random_tokens, synthetic_tokens
from rotor.errors import DataError, MissingError, NumericsError
from rotor.models.checkpoint import Checkpoint
from rotor.models.loading import load_model
from rotor.progress import Progress
from rotor.recipe import Tokens

CPU = torch.device("cpu")
HAS_DATASETS = importlib.util.find_spec("datasets") is not None
needs_datasets = pytest.mark.skipif(not HAS_DATASETS, reason="the package `datasets` is not installed")


@pytest.fixture(scope="module")
def demo() -> Checkpoint:
    return Checkpoint(DEMO_MODEL)


def mean_log_likelihood(model, rows: torch.Tensor) -> float:
    with torch.inference_mode():
        logits = model(rows, use_cache=False).logits[:, :-1]
    return -float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()))


def test_random_tokens_leave_special_tokens_out(demo) -> None:
    tokens = random_tokens(64, 512, demo.config, demo.tokenizer, seed=3)
    assert set(demo.tokenizer.all_special_ids) == {0}
    assert tokens.min() == 1
    assert tokens.max() == 4095
    assert torch.equal(tokens, random_tokens(64, 512, demo.config, demo.tokenizer, seed=3))
    assert not torch.equal(tokens, random_tokens(64, 512, demo.config, demo.tokenizer, seed=4))


def test_synthetic_rows_come_from_the_model(demo) -> None:
    """Sampled at temperature 1, their mean log-likelihood is minus the entropy of the model, far above a random one."""
    model = load_model(demo.folder, CPU, torch.float32)
    rows = synthetic_tokens(model, 4, 96, demo.config, demo.tokenizer, seed=0)
    assert rows.shape == (4, 96)
    assert rows.dtype == torch.int64
    random = random_tokens(4, 96, demo.config, demo.tokenizer, seed=0)
    assert mean_log_likelihood(model, rows) > -5.5
    assert mean_log_likelihood(model, random) < -9


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gpt2"])
def test_synthetic_tokens_are_those_of_sampling_without_a_cache(family: str, tiny) -> None:
    """Token by token from whole forward passes; 24 tokens go beyond mistral's window of 12."""
    checkpoint = Checkpoint(tiny(family))
    model = load_model(checkpoint.folder, CPU, torch.float32)
    rows = synthetic_tokens(model, 3, 24, checkpoint.config, checkpoint.tokenizer, seed=5)
    allowed = ordinary_tokens(checkpoint.config, checkpoint.tokenizer)
    generator = torch.Generator().manual_seed(5)
    with torch.inference_mode():
        logits = model(rows, use_cache=False).logits[..., allowed]
    for position in range(23):
        drawn = torch.multinomial(logits[:, position].softmax(-1), 1, generator=generator)
        assert torch.equal(allowed[drawn].flatten(), rows[:, position + 1]), position
    starts = random_tokens(3, 1, checkpoint.config, checkpoint.tokenizer, seed=5)
    assert rows[:, 0].tolist() == [0, int(starts[1]), 0]


def test_synthetic_tokens_follow_the_seed_and_not_the_global_generator(tiny) -> None:
    checkpoint = Checkpoint(tiny("llama"))
    model = load_model(checkpoint.folder, CPU, torch.float32)
    drawn = []
    for seed, global_seed in ((0, 1), (0, 2), (1, 1)):
        torch.manual_seed(global_seed)
        drawn.append(synthetic_tokens(model, 2, 16, checkpoint.config, checkpoint.tokenizer, seed))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_synthetic_tokens_hold_a_special_one_only_first_in_every_second_row(tiny) -> None:
    """Even where the model gives nearly all its probability to the end of the text."""
    checkpoint = Checkpoint(tiny("gpt2"))
    model = load_model(checkpoint.folder, CPU, torch.float32)
    with torch.no_grad():
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
        model.lm_head.weight[0] *= 100
    rows = synthetic_tokens(model, 8, 32, checkpoint.config, checkpoint.tokenizer, seed=0)
    assert rows[:, 1:].min() > 0
    assert (rows[:, 0] == 0).tolist() == [True, False] * 4
    with torch.inference_mode():
        assert (model(rows).logits.argmax(-1) == 0).any()


def test_synthetic_tokens_in_several_batches_and_their_progress(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    import rotor.data.tokens

    checkpoint = Checkpoint(tiny("qwen2"))
    model = load_model(checkpoint.folder, CPU, torch.float32)
    monkeypatch.setattr(rotor.data.tokens, "SAMPLING_TOKENS", 40)
    done: list[float] = []

    class Counting(Progress):
        def task(self, name, total, unit):
            assert (name, total, unit) == ("sample", 80, "tokens")
            return super().task(name, total, unit)

    spec = Tokens("synthetic", count=80, seq_len=16)
    tokens = calibration_tokens(spec, checkpoint.config, checkpoint.tokenizer, model, Counting())
    assert tokens.rows.shape == (5, 16)
    assert tokens.topic_counts() == {"synthetic": 5}
    synthetic_tokens(model, 5, 16, checkpoint.config, checkpoint.tokenizer, 0, done.append)
    assert sum(done) == 80


def test_a_model_that_overflows_cannot_write_its_text(tiny) -> None:
    checkpoint = Checkpoint(tiny("llama"))
    model = load_model(checkpoint.folder, CPU, torch.float32)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("inf"))
    with pytest.raises(NumericsError, match=r"not finite while it writes token 1(.|\n)*tokens.source=random"):
        synthetic_tokens(model, 1, 4, checkpoint.config, checkpoint.tokenizer, 0)


def test_topics_of_a_folder_are_sub_folders_and_files_beside_them(tmp_path: Path, demo) -> None:
    for name in ("code/a.txt", "code/deep/b.txt", "prose/a.txt", "loose.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"text of {name} " * 200)
    (tmp_path / "binary.bin").write_bytes(b"\xff\xfe\x00")
    documents = read_topics(tmp_path)
    assert [d.topic for d in documents] == ["code", "code", "loose.txt", "prose"]
    assert read_documents(tmp_path) == [d.text for d in documents]
    assert [d.topic for d in read_topics(tmp_path / "loose.txt")] == ["loose.txt"]
    spec = Tokens("text", str(tmp_path), count=1024, seq_len=64)
    tokens = calibration_tokens(spec, demo.config, demo.tokenizer)
    assert tokens.rows.shape == (16, 64)
    assert set(tokens.topic_counts()) == {"code", "loose.txt", "prose"}
    for row, topic in zip(tokens.rows, tokens.topics, strict=True):
        names = demo.tokenizer.decode(row)
        assert names.count(f"text of {topic}") >= names.count("text of ") // 2
    again = calibration_tokens(spec, demo.config, demo.tokenizer)
    assert torch.equal(tokens.rows, again.rows)
    assert tokens.topics == again.topics


def test_a_row_over_a_border_has_the_topic_of_most_of_its_tokens(demo) -> None:
    length = len(demo.tokenizer("word " * 30, add_special_tokens=False)["input_ids"]) + 1
    documents = [Document("word " * 30, "b"), Document("word " * 30, "a")]
    assert topic_rows(documents, demo.tokenizer, 4 * length // 5).topics == ("b", "a")
    assert topic_rows(documents[:1], demo.tokenizer, length + 1).rows.shape == (0, length + 1)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (Tokens("text", "nowhere/at/all"), r"text nowhere/at/all: no such file or folder(.|\n)*path of a text file"),
        (
            Tokens("text", __file__, count=10**7),
            r"tokens.path .*test_tokens.py: \d+ rows of 512 tokens, expected 19532",
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
def data_folder(tmp_path: Path) -> Path:
    """A folder of JSON lines: 40 documents of two topics, one of them empty."""
    folder = tmp_path / "data"
    folder.mkdir()
    lines = [{"text": f"{kind} number {i}. " * 40, "kind": kind} for i in range(20) for kind in ("story", "poem")]
    lines[7]["text"] = " "
    (folder / "train.jsonl").write_text("".join(json.dumps({**line, "n": i}) + "\n" for i, line in enumerate(lines)))
    return folder


@needs_datasets
def test_a_local_dataset_with_topics(data_folder: Path, demo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(data_folder.parent / "cache"))
    spec = Tokens("dataset", dataset=str(data_folder), topic_column="kind", count=2048, seq_len=64)
    tokens = calibration_tokens(spec, demo.config, demo.tokenizer)
    assert tokens.rows.shape == (32, 64)
    assert set(tokens.topic_counts()) == {"story", "poem"}
    for row, topic in zip(tokens.rows, tokens.topics, strict=True):
        assert topic in demo.tokenizer.decode(row)
    again = calibration_tokens(spec, demo.config, demo.tokenizer)
    assert torch.equal(tokens.rows, again.rows)
    plain = calibration_tokens(Tokens("dataset", dataset=str(data_folder), count=2048), demo.config, demo.tokenizer)
    assert plain.topic_counts() == {"dataset": 4}


@needs_datasets
def test_a_saved_dataset_with_class_labels(data_folder: Path, demo) -> None:
    import datasets

    features = datasets.Features({"body": datasets.Value("string"), "kind": datasets.ClassLabel(names=["no", "yes"])})
    saved = datasets.Dataset.from_dict({"body": ["some text " * 400] * 4, "kind": [0, 1, 0, 1]}, features=features)
    saved.save_to_disk(str(data_folder.parent / "saved"))
    spec = Tokens("dataset", dataset=str(data_folder.parent / "saved"), column="body", topic_column="kind", seq_len=128)
    spec = Tokens(**{**spec.__dict__, "count": 2048})
    assert calibration_tokens(spec, demo.config, demo.tokenizer).topic_counts().keys() == {"no", "yes"}


@needs_datasets
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dataset": "./nowhere"}, r"tokens.dataset ./nowhere: no such folder"),
        ({"split": "tset"}, r"no split 'tset'; it has train"),
        ({"column": "txt"}, r"no column 'txt'; it has .*text(.|\n)*tokens.column=NAME"),
        ({"topic_column": "topic"}, r"no column 'topic'(.|\n)*tokens.topic_column=NAME"),
        ({"column": "n"}, r"column 'n' holds int, expected text"),
        ({"count": 10**6}, r"rows of 512 tokens, expected 1954"),
    ],
)
def test_datasets_that_cannot_be_used(fields: dict, message: str, data_folder: Path, demo) -> None:
    spec = Tokens(**{"source": "dataset", "dataset": str(data_folder), **fields})
    with pytest.raises(DataError, match=message):
        calibration_tokens(spec, demo.config, demo.tokenizer)


@needs_datasets
def test_a_damaged_dataset_is_one_error(data_folder: Path, demo) -> None:
    (data_folder / "train.jsonl").write_text('{"text": ')
    with pytest.raises(DataError, match=r"split train: cannot be read(.|\n)*folder with one"):
        calibration_tokens(Tokens("dataset", dataset=str(data_folder)), demo.config, demo.tokenizer)


def test_repeats_state_a_span_again_further_on():
    rows = torch.arange(8 * 128).reshape(8, 128)  # every token once
    vocabulary = torch.arange(2000, 4000)
    found = with_repeats(rows, 0.5, 3, vocabulary)
    assert torch.equal(found[:4], rows[:4])
    assert torch.equal(found[:, 0], rows[:, 0])
    for number, row in enumerate(found[4:]):
        values, counts = row.unique(return_counts=True)
        again = values[counts == 1 + TIMES]
        if number % 2:  # drawn tokens, in the order in which they are stated
            assert bool((again >= 2000).all())
            first = int(torch.isin(row, again).nonzero()[0])
            again = row[first : first + len(again)]
        else:  # from one place of one row
            assert torch.equal(again, torch.arange(int(again[0]), int(again[0]) + len(again)))
        span = len(again)
        assert 16 <= span <= SPAN
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
