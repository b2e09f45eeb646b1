"""Chats in JSON lines: what formats are read, and that the model's chat template renders them."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.paths import DEMO_MODEL
from support.texts import texts_of

from rotor.errors import DataError
from rotor.models.chats import _rendered, in_words, read_chat
from rotor.models.sequences import text_sequences
from rotor.models.source import Checkpoint
from rotor.models.splits import held_out_documents
from rotor.recipe.sections import Evaluation

TEMPLATE = (
    "{{ bos_token }}{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}{% for m in messages %}"
    "{% if m.role == 'banned' %}{{ raise_exception('no such role') }}{% endif %}<{{ m.role }}>"
    "{% if m.content is none %}{% else %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}{% endfor %}"
)
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}
WITH_TOOLS = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "2 + 2?"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
        {"role": "assistant", "content": "Four."},
    ],
    "tools": [{"type": "function", "function": {"name": "add"}}],
}
SHAREGPT = {
    "system": "Be brief.",
    "conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi."}],
}
TOOLS = '<tools>[{"type": "function", "function": {"name": "add"}}]</tools>'
CALLED = '<assistant><call>{"name": "add", "arguments": {"a": 2, "b": 2}}</call>'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shutil.copytree(DEMO_MODEL, tmp_path_factory.mktemp("chats") / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def written(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    return path


def test_chats_with_tools_and_of_sharegpt_are_rendered(model: Path, tmp_path: Path) -> None:
    """Null content, parts of text, tools, and arguments that are JSON in a string; texts beside them stay."""
    file = written(tmp_path / "a.jsonl", WITH_TOOLS, {"text": "a\u2028b"}, SHAREGPT)
    tokenizer = Checkpoint(model).tokenizer
    bos = tokenizer.bos_token
    assert texts_of(file, tokenizer) == [
        f"{bos}{TOOLS}<user>What is 2 + 2?{CALLED}<tool>4<assistant>Four.",
        "a\u2028b",
        f"{bos}<system>Be brief.<user>Hello<assistant>Hi.",
    ]


def test_without_a_template_messages_are_joined(tmp_path: Path) -> None:
    file = written(tmp_path / "a.jsonl", WITH_TOOLS, SHAREGPT)
    called = '{"name": "add", "arguments": {"a": 2, "b": 2}}'
    expected = [f"What is 2 + 2?\n\n{called}\n\n4\n\nFour.", "Be brief.\n\nHello\n\nHi."]
    assert texts_of(file) == expected
    assert texts_of(file, Checkpoint(DEMO_MODEL).tokenizer) == expected


def test_a_template_that_takes_no_null_gets_calls_as_text(model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}"
    )
    file = written(tmp_path / "a.jsonl", WITH_TOOLS)
    (text,) = texts_of(file, Checkpoint(folder).tokenizer)
    assert text.startswith('<user>What is 2 + 2?<assistant>{"id": "1", "type": "function", "function": {"name": "add"')
    assert text.endswith("<tool>4<assistant>Four.")


def test_a_chat_that_the_template_refuses_is_joined_with_a_warning(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    banned = {"messages": [{"role": "banned", "content": "x"}, {"role": "user", "content": "y"}]}
    file = written(tmp_path / "a.jsonl", SHAREGPT, banned)
    with caplog.at_level(logging.WARNING, "rotor"):
        assert texts_of(file, Checkpoint(model).tokenizer)[1] == "x\n\ny"
    assert "1 of 2 chats cannot be rendered by the model's chat template" in caplog.text
    assert "no such role" in caplog.text


def test_a_rendered_chat_has_its_bos_once(model: Path, tmp_path: Path) -> None:
    file = written(tmp_path / "a.jsonl", *[SHAREGPT] * 40, {"text": "plain " * 50})
    tokenizer = Checkpoint(model).tokenizer
    ids = text_sequences(texts_of(file, tokenizer), tokenizer, 32).flatten()
    assert int((ids == tokenizer.bos_token_id).sum()) == 41
    assert not torch.any((ids[1:] == tokenizer.bos_token_id) & (ids[:-1] == tokenizer.bos_token_id))


def test_splits_are_of_rendered_chats_and_a_template_runs_once(model: Path, tmp_path: Path) -> None:
    chats = [{"messages": [{"role": "user", "content": f"Question {i}"}]} for i in range(9)]
    file = written(tmp_path / "a.jsonl", *chats)
    tokenizer = Checkpoint(model).tokenizer
    _rendered.cache_clear()
    parts = [held_out_documents(Evaluation("text", str(file)), tokenizer=tokenizer) for _ in range(2)]
    assert parts[0] == parts[1]
    assert sorted(unit.text for units in parts[0].splits.values() for unit in units) == [
        f"{tokenizer.bos_token}<user>Question {i}" for i in range(9)
    ]
    assert (_rendered.cache_info().misses, _rendered.cache_info().hits) == (1, 1)


@pytest.mark.parametrize(
    ("chat", "text"),
    [
        ({"messages": []}, "`messages` is [], expected a list of messages"),
        ({"messages": [{"content": "x"}]}, "`messages`, message 1: it has no `role`"),
        ({"messages": [{"role": "user", "content": None}]}, "message 1: it has neither content nor tool_calls"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "a part of its content is not text"),
        ({"conversations": [{"from": "human", "value": 3}]}, "`conversations`, message 1: its content is 3, expected"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": 3}, "`tools` is 3, expected a list"),
    ],
)
def test_what_is_wrong_with_a_chat_is_said(chat: Any, text: str, tmp_path: Path) -> None:
    said = read_chat(chat)
    assert isinstance(said, str)
    assert text in said
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: `"):
        texts_of(written(tmp_path / "a.jsonl", {"text": "one"}, chat))


def test_sharegpt_names_roles_in_its_own_words() -> None:
    chat = read_chat({"conversations": [{"from": "observation", "value": "4"}, {"role": "user", "content": "x"}]})
    assert isinstance(chat, dict)
    assert [message["role"] for message in chat["messages"]] == ["tool", "user"]
    assert in_words(chat) == "4\n\nx"


def test_files_that_are_no_text_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.pdf").write_bytes(b"%PDF-1.4\x00\xff\xfe")
    (tmp_path / "b.txt").write_bytes("für".encode("latin1"))
    with pytest.raises(DataError, match="not text but a binary file"):
        texts_of(tmp_path / "a.pdf")
    with pytest.raises(DataError, match=r"not UTF-8 \(byte 1 is 0xfc\)") as caught:
        texts_of(tmp_path / "b.txt")
    assert caught.value.hint == f"Convert it: iconv -f latin1 -t utf-8 {tmp_path}/b.txt > {tmp_path}/b.txt.utf8"
    with pytest.raises(
        DataError, match=r"no text in it\. 2 files skipped: a\.pdf \(not text but a binary file\), b\.txt"
    ):
        texts_of(tmp_path)
    (tmp_path / "c.txt").write_text("text")
    with caplog.at_level(logging.WARNING, "rotor"):
        assert texts_of(tmp_path) == ["text"]
    assert "2 files skipped" in caplog.text
