"""`rotor generate` without a prompt: a conversation whose cache is kept from turn to turn."""

from __future__ import annotations

import builtins
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.command_line import expect_error, rotor
from transformers import AutoModelForCausalLM, AutoTokenizer

from rotor import Progress, export
from rotor.errors import CheckpointError, UsageError
from rotor.models.chats import between_turns
from rotor.recipe.requests import GenerationOptions
from rotor.tools.chat import Chat, Frame

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}</{{ message.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def with_template(tiny, tmp_path: Path) -> Path:
    model = shutil.copytree(tiny("llama"), tmp_path / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    return model


def said_to(chat: Chat, *turns: str) -> list[str]:
    pieces: list[str] = []
    answers = [chat.say(turn, pieces.append) for turn in turns]
    assert "".join(pieces) == "".join(answers)
    return answers


def test_turns_are_framed_by_the_chat_template(with_template: Path) -> None:
    assert Frame.of_template(with_template) == Frame("<user>", "</user><assistant>", "</assistant><user>")
    chat = Chat(with_template, GenerationOptions(max_new_tokens=4), Progress())
    first, second = said_to(chat, "Good morning", "And good night")
    tokenizer = AutoTokenizer.from_pretrained(with_template)
    wanted = f"<user>Good morning</user><assistant>{first}</assistant><user>And good night</user><assistant>{second}"
    assert tokenizer.decode(chat.tokens[0]) == wanted


def test_a_template_that_hides_turns_is_refused(with_template: Path) -> None:
    (with_template / "chat_template.jinja").write_text("{{ messages | length }}")
    assert between_turns(with_template) is None
    with pytest.raises(CheckpointError, match="does not show turns as they were said"):
        Frame.of_template(with_template)


@pytest.mark.parametrize("compressed", [False, True])
def test_the_cache_is_kept_and_gives_what_a_new_one_would(compressed: bool, demo_run, tiny, tmp_path: Path) -> None:
    """Of a later turn only what is new is read, and the answer is that to the whole conversation."""
    folder = tiny("llama")
    if compressed:
        folder = tmp_path / "out"
        export(demo_run("rotor").folder, folder, compression=0.5, measure=False)
    chat = Chat(folder, GenerationOptions(max_new_tokens=5, dtype="float32"), Progress())
    read: list[int] = []
    embedding = chat._model.get_input_embeddings()
    embedding.register_forward_hook(lambda module, inputs, output: read.append(inputs[0].shape[1]))
    said_to(chat, "import os\nimport sys\n\ndef main(")
    before, held = len(read), chat.tokens.shape[1]
    said_to(chat, "class Test(unittest")
    assert read[before] == chat.tokens.shape[1] - 5 - held + 1  # its last token was written, but not read
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    prompt = chat.tokens[:, :-5]
    whole = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5, do_sample=False)
    assert torch.equal(whole, chat.tokens)


def test_an_interrupted_turn_is_forgotten(tiny) -> None:
    options = GenerationOptions(max_new_tokens=4)
    chat, other = Chat(tiny("llama"), options, Progress()), Chat(tiny("llama"), options, Progress())
    said_to(chat, "one")

    def stop(text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        chat.say("two", stop)
    said_to(chat, "three")
    said_to(other, "one", "three")
    assert torch.equal(chat.tokens, other.tokens)


def test_a_conversation_ends_at_what_the_model_reads(tiny) -> None:
    chat = Chat(tiny("llama"), GenerationOptions(max_new_tokens=4), Progress())
    limit = chat._model.config.max_position_embeddings
    with pytest.raises(UsageError, match=f"tokens, the model reads {limit}"):
        chat.say("a b c d " * limit, lambda text: None)
    assert said_to(chat, "short")


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """typed(lines): what a user types in a terminal, then Ctrl-D; an exception is raised in place of a line."""

    def give(*lines: str | type[BaseException]) -> None:
        left: Iterator[str | type[BaseException]] = iter(lines)

        def line(prompt: str) -> str:
            assert prompt == "> "
            found = next(left, EOFError)
            if isinstance(found, str):
                return found
            raise found

        monkeypatch.setattr(builtins, "input", line)
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True)

    return give


def test_command(tiny, typed, capsys) -> None:
    generate = ["generate", tiny("llama"), "--max-new-tokens", "4", "-q"]
    answer = json.loads(rotor(capsys, *generate, "one", "--json")[1])["text"].removeprefix("one")
    typed("one", "", "/new", "one", "/exit", "never")
    code, text, _ = rotor(capsys, *generate)
    assert code == 0
    assert text == f"{answer}\n{answer}\n"
    typed("one")
    assert rotor(capsys, *generate)[1] == f"{answer}\n\n"  # ended by Ctrl-D
    typed("a b c d " * 4096, "one")
    code, text, _ = rotor(capsys, *generate[:-1])
    assert code == 0
    assert "/new begins another conversation.\n" in text
    assert text.endswith(f"{answer}\n\n")


def test_what_is_no_chat(tiny, typed, capsys) -> None:
    expect_error(capsys, 2, "stdin is no terminal to chat in", "generate", tiny("llama"))
    typed()
    expect_error(capsys, 2, "--json: not in a chat", "generate", tiny("llama"), "--json")
    expect_error(capsys, 2, "--parallel: not in a chat", "generate", tiny("llama"), "--parallel", "sequence")
    for option, value in (("--save-cache", "a.rotor"), ("--cache-file", "a.rotor"), ("--cache-level", "fast")):
        expect_error(capsys, 2, f"{option}: not in a chat", "generate", tiny("llama"), option, value)
