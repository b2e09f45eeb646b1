"""Every command that rotor prints, in errors, help, reports and cards, is one that it takes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from support.printed import check, commands_in, printed_texts
from support.runs import calibrated
from support.tiny_models import build_tiny

from rotor import Run, export
from rotor.cli.app import app
from rotor.errors import AccuracyError
from rotor.recipe.reading import load_recipe

METRIC = ["evaluation.metric=kl_div"]
"""One that a random model has an accuracy in."""

TEXTS = printed_texts()
LONG = re.compile(r"(?<![\w(-])--[a-z][a-z-]+")
OTHERS = {"--nproc-per-node", "--kv-cache-dtype"}
"""Options of other programs' commands that are named."""


def test_the_collector_finds_commands_wherever_they_stand() -> None:
    found = {command for texts in TEXTS.values() for text in texts for command in commands_in(text)}
    assert "rotor recipes" in found  # a hint
    assert any(command.startswith("rotor export 0.5 -o OUT") for command in found)  # `Next:`
    assert any(command.startswith("rotor study") for command in found)  # an example of --help
    assert len(found) > 20


@pytest.mark.parametrize("file", [file for file, texts in TEXTS.items() if any(map(commands_in, texts))])
def test_commands_in_texts_are_taken(file: str) -> None:
    for command in (command for text in TEXTS[file] for command in commands_in(text)):
        check(command)


def test_settings_and_options_in_texts_exist() -> None:
    import typer.main

    commands = typer.main.get_command(app).commands.values()  # type: ignore[attr-defined]
    known = {option for command in commands for p in command.params for option in (*p.opts, *p.secondary_opts)}
    settings = load_recipe("rotor").to_dict()
    for file, texts in TEXTS.items():
        # Options of git and of an engine.
        others = ("rotor/vllm/", "rotor/tools/bench/records")
        if file.startswith(others):
            continue
        for text in texts:
            for section, field in re.findall(r"--set ([a-z]+)\.([a-z_]+)=", text):
                assert field in settings[section], (file, text)
            if not file.endswith(".jinja") and "pip install" not in text and "torchrun" not in text:
                own = re.sub(r"rotor run -- .*", "", text)  # what follows is another program's
                assert set(LONG.findall(own)) <= known | OTHERS | {"--help", "--version"}, (file, text)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run whose name a shell would take apart."""
    folder = tmp_path_factory.mktemp("printed")
    return calibrated(build_tiny("qwen3", folder / "model"), folder / "my run", "post", 1)


def test_a_card_and_a_report_with_a_target(run: Run, tmp_path: Path, caplog, monkeypatch) -> None:
    caplog.set_level("INFO", "rotor")
    folder = Path(shutil.copytree(run.folder, tmp_path / "run"))
    export(folder, tmp_path / "out", accuracy=0.5, overrides=METRIC)
    card = (tmp_path / "out" / "README.md").read_text()
    said = "it is at chance on this text"  # as a random model is
    assert said in card
    assert said in (folder / "report.html").read_text("utf-8")
    facts = json.loads((tmp_path / "out" / "rotor.json").read_text())
    assert facts["accuracy"]["base"]["report"]["at_chance"]
    assert caplog.text.count("the uncompressed model is at chance on this text: perplexity") == 1

    def no_plan(*_: object) -> None:
        raise AccuracyError("accuracy 0.5 is out of reach")

    monkeypatch.setattr("rotor.search.export.search.find_plan", no_plan)
    with pytest.raises(AccuracyError, match="out of reach The uncompressed model is at chance on this text"):
        export(folder, tmp_path / "more", accuracy=0.5, overrides=METRIC)
    for command in commands_in(card):
        check(command)
