"""README and docs: links lead somewhere, and every command and program in them runs."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest
import typer.main
from support.command_line import rotor
from support.paths import DEMO_MODEL, ROOT
from support.printed import parse
from support.runs import SHORT_TEXT

from rotor.cli.commands import app

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PLACES = {
    "artifacts/demo-model": str(DEMO_MODEL),
    "MODEL": str(DEMO_MODEL),
    "RUN": "runs/demo",
    "RUN2": "runs/other",
    "OUT": "out/demo",
    "OUT2": "out/other",
    "STUDY": "studies/demo",
    "FILE": str(ROOT / "LICENSE"),
}
"""Values of the names in capitals here."""

FAST = ["tokens.count=512", "tokens.seq_len=64", "evaluation.seq_len=64", "ranks.probe_tokens=64"]
FAST_SETTINGS = [
    item for setting in [*FAST, "search.resolution=0.2", "search.tries=0", *SHORT_TEXT] for item in ("--set", setting)
]
QUICKER = {
    "calibrate": [*FAST_SETTINGS, "--overwrite", "-q"],
    "export": ["--overwrite", "-q"],
    "generate": ["--max-new-tokens", "4"],
}
"""Options put after those of the page; the last one counts."""

PARSED_ALONE = {
    "--tasks": "test_tasks.py",
    "bench": "test_bench.py",
    "compile": "test_precompile.py",
    "tune": "test_bench.py",
    "run": "test_autoload.py",
    "study": "test_study_request.py",
    "torchrun": "test_parallel.py",
}
"""Commands and settings that take long, or this process's place; what else runs them."""


def test_commands_of_the_readme_work_after_make_demo() -> None:
    """They write to other folders, so that nothing has to be overwritten."""
    made = set(re.findall(r" -o (\S+)", (ROOT / "Makefile").read_text("utf-8")))
    written = set(re.findall(r"^    rotor .* -o (\S+)", (ROOT / "README.md").read_text("utf-8"), flags=re.MULTILINE))
    assert {"runs/demo", "out/demo"} <= written
    assert any("demo" in folder for folder in made)
    assert not made & written


def test_promises_name_tests_that_exist() -> None:
    """Files, and in brackets words in the names of their tests."""
    page = (ROOT / "docs" / "promises.md").read_text("utf-8")
    files = {path.name: path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
    assert set(re.findall(r"`(test_\w+\.py)`", page)) <= files.keys()
    for file, words in re.findall(r"`(test_\w+\.py)` \(((?:`\w+`(?:, )?)+)\)", page):
        for word in re.findall(r"\w+", words):
            assert re.search(rf"def test_\w*{word}", files[file]), (file, word)


def commands(page: Path) -> list[list[str]]:
    """The indented commands of a page that are rotor's, without comments, as lists of words."""
    lines = re.findall(r"^    ((?:rotor|torchrun) .*)$", page.read_text("utf-8"), flags=re.MULTILINE)
    found = [shlex.split(line.partition(" > ")[0], comments=True) for line in lines]
    return [
        [PLACES.get(word, word.replace("path=FILE", f"path={PLACES['FILE']}")) for word in words] for words in found
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text("utf-8")
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert targets or "](" not in text
    for target in targets:
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.is_file(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text("utf-8"), flags=re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, target


def test_docstrings_cite_what_a_reader_can_find() -> None:
    """Papers, or a page of docs/ that is there; never a plan of the authors'."""
    for folder in ("rotor", "kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text("utf-8")
            assert "DESIGN" not in text, path
            for page in re.findall(r"docs/[\w-]+\.md", text):
                assert (ROOT / page).is_file(), (path, page)


def test_the_flows_name_files_that_are_there() -> None:
    """At most 20, 25 and 10 of them: a step with exact tokens takes two more than one of codes alone."""
    text = (ROOT / "docs" / "design.md").read_text("utf-8")
    flows = re.findall(r"^\*\*[\w ]+\*\* \((\d+) files\):\n\n(.*?)\n\n", text, flags=re.MULTILINE | re.DOTALL)
    assert len(flows) == 3
    for (count, table), most in zip(flows, (20, 25, 10), strict=True):
        names = re.findall(r"`([\w/]+\.py)`", table)
        assert len(names) == int(count) <= most
        missing = [name for name in names if not (ROOT / name).is_file() and not (ROOT / "rotor" / name).is_file()]
        assert missing == []


def test_the_readme_leads_to_every_page() -> None:
    text = PAGES[0].read_text("utf-8")
    assert [page.name for page in PAGES[1:] if f"docs/{page.name}" not in text] == []
    site = (ROOT / "mkdocs.yml").read_text("utf-8")
    assert [page.name for page in PAGES[1:] if f"docs/{page.name}" not in site] == []
    assert len(text.splitlines()) <= 200


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_sentences_exist(page: Path) -> None:
    known = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    for name, rest in re.findall(r"`rotor (\w+)([^`]*)`", page.read_text("utf-8")):
        assert name in known
        command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
        options = {option for parameter in command.params for option in parameter.opts}
        own = rest.partition(" -- ")[0]  # what stands behind is another program's
        assert set(re.findall(r"(?<!\w)--?[a-z][a-z-]*", own)) <= options, rest


def test_help_has_an_example_for_each_command(capsys) -> None:
    """One that parses; the calibration's goes on about other things."""
    names = list(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    shown = " ".join(rotor(capsys, "--help")[1].split())
    assert [name for name in names if f" {name} " not in shown] == []
    for name in names:
        code, text, _ = rotor(capsys, name, "--help")
        assert code == 0
        (example,) = re.findall(rf"Example: (rotor {name}\b.*?)(?:\. |$)", " ".join(text.split()))
        parse(shlex.split(example)[1:])


@pytest.mark.nightly
@pytest.mark.parametrize("pages", [PAGES[:1], PAGES], ids=["README", "all"])
def test_every_command_runs(pages: list[Path], tmp_path: Path, capsys, monkeypatch) -> None:
    """In the order of the pages, in one folder: later commands find what earlier ones wrote. Of README alone each
    command runs once, and the others are parsed."""
    monkeypatch.chdir(tmp_path)
    ran: list[str] = []
    for page in PAGES:
        for words in commands(page):
            if words[0] == "torchrun":
                words = ["rotor", *words[words.index("rotor") + 1 :]]
                assert "--parallel" in words or words[1] == "calibrate"
                parse([word for word in words[1:] if word != "..."])
                continue
            name = words[1]
            again = pages != PAGES and name in ran
            if again or page not in pages or PARSED_ALONE.keys() & {*words} or "..." in words or "NAME" in words:
                parse([word for word in words[1:] if word != "..."])
                continue
            quicker = QUICKER.get(name, [])
            if any("distil" in word for word in words):
                quicker = [*quicker, "--set", "distil.steps=2"]
            if name == "export" and "--quick" in words:
                quicker = [*quicker, *(item for setting in SHORT_TEXT for item in ("--set", setting))]
            if "--accuracy" in words:
                quicker = [*quicker, "--accuracy", "0.5"]
            code, _, error = rotor(capsys, *words[1:], *quicker)
            assert code == 0, (page.name, words, error)
            ran.append(name)
    assert {"calibrate", "export", "validate", "generate", "inspect"} <= set(ran)
    assert pages != PAGES or {"recipes", "report", "materialise"} <= set(ran)
    assert all((ROOT / "tests" / name).is_file() for name in PARSED_ALONE.values())
    (program,) = re.findall(r"^```python\n(.*?)^```$", PAGES[0].read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert len(program.strip().splitlines()) <= 10
    capsys.readouterr()
    exec(compile(program, "README.md", "exec"), {})
    assert "def main(" in capsys.readouterr().out
    assert os.path.isdir("out/demo")
