"""Files beside the code: the notebook, the workflow, issue forms, Dockerfile and CITATION.cff."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import typer.main
import yaml
from support.paths import DEMO_MODEL, ROOT
from support.printed import parse

from rotor.cli.commands import app
from rotor.vllm.served import refusal

NOTEBOOK = ROOT / "artifacts" / "demo.ipynb"
README = ROOT / "README.md"


def code_cells() -> list[str]:
    cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_the_notebook_has_readmes_commands_and_program() -> None:
    """And settings that make them short, which the commands take."""
    found = []
    for cell in code_cells():
        (small,) = [eval(text) for text in re.findall(r"^SMALL = (.*?)\n!", cell, re.DOTALL)] or [""]
        for line in re.findall(r"^!(rotor .*)$", cell, re.MULTILINE):
            parse(shlex.split(line.replace("$SMALL", small))[1:])
            found.append(line.removesuffix(" $SMALL"))
    text = README.read_text("utf-8")
    example = re.search(r"^## Use it\n(.*?)^Give your own", text, re.MULTILINE | re.DOTALL)
    assert found == re.findall(r"^    (rotor .*)$", example[1], re.MULTILINE)
    assert code_cells()[-1] == re.search(r"^```python\n(.*?)\n```$", text, re.MULTILINE | re.DOTALL)[1]


def test_the_notebook_shows_what_it_printed() -> None:
    """All but quiet commands, in tables of at most 100 columns, without bars, colours, errors, or places of the
    machine that it ran on. `make notebook` stores it anew."""
    cells = [cell for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]
    printed = ["".join("".join(output.get("text", "")) for output in cell["outputs"]) for cell in cells]
    for cell, text in zip(cells[1:], printed[1:], strict=True):
        assert bool(text) == ("--overwrite -q" not in "".join(cell["source"]))
    assert not [output for cell in cells for output in cell["outputs"] if output["output_type"] != "stream"]
    lines = "".join(printed).splitlines()
    assert [line for line in lines if line[:1] in "┏┃│└" and len(line) > 100] == []
    assert not [line for line in lines if re.search(r"\r|\x1b|it/s|/(root|home|tmp|work|Users)/|Traceback", line)]
    assert any("accuracy target" in line and "pass" in line for line in lines)
    assert all("def main(" in text for text in printed[-2:])


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "artifacts").mkdir()
    (tmp_path / "artifacts" / "demo-model").symlink_to(DEMO_MODEL)
    copied = shutil.copy(NOTEBOOK, tmp_path / "artifacts")
    notebook = nbformat.read(copied, as_version=4)
    nbclient.NotebookClient(notebook, resources={"metadata": {"path": str(tmp_path / "artifacts")}}).execute()
    printed = ["".join(o.get("text", "") for o in c.outputs) for c in notebook.cells if c.cell_type == "code"]
    assert all("def main(" in text for text in printed[-2:]), printed
    assert "pass" in printed[-3], printed
    assert (tmp_path / "out" / "demo" / "manifest.json").is_file()


def commands_of(workflow: str) -> dict[str, list[str]]:
    """Commands of each job of a workflow."""
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / workflow).read_text("utf-8"))["jobs"]
    return {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in jobs.items()}


def test_workflows_run_what_checks_a_submission_and_targets_that_exist() -> None:
    found = commands_of("ci.yml")
    assert found["test"] == [".ci/run"]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    rest = [command for commands in [*found.values(), *commands_of("nightly.yml").values()] for command in commands]
    assert {command.removeprefix("make ") for command in rest} - {".ci/run"} <= set(targets)


def test_the_workflow_tests_every_python_that_is_supported() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    supported = re.findall(r"Programming Language :: Python :: (3\.\d+)", project)
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == supported


def test_hooks_before_a_commit_are_part_of_lint() -> None:
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"]
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for hook in local["hooks"]:
        assert hook["entry"].replace(".venv/bin", "$(BIN)") in makefile


@pytest.mark.parametrize("name", ["bug", "model-family", "method"])
def test_a_form_asks_each_thing_once_and_names_commands_that_exist(name: str) -> None:
    text = (ROOT / f".github/ISSUE_TEMPLATE/{name}.yml").read_text("utf-8")
    form = yaml.safe_load(text)
    assert set(form) == {"name", "description", "labels", "body"}
    assert len({part["id"] for part in form["body"]}) == len(form["body"])
    assert {part["type"] for part in form["body"]} <= {"textarea", "input", "dropdown"}
    known = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    assert set(re.findall(r"(?:`|: )rotor ([a-z]+)", text)) <= known
    for path in re.findall(r"rotor/[\w/]+\.py", text):
        assert (ROOT / path).is_file()


def test_citation_and_images_are_of_this_version() -> None:
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    for key in ("version", "license"):
        assert f'\n{key} = "{cited[key]}"\n' in project
    image = (ROOT / "Dockerfile").read_text("utf-8")
    assert refusal(re.search(r"vllm/vllm-openai:v([\d.]+)", image)[1]) is None
    kept = re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text("utf-8"), re.MULTILINE)
    assert {"pyproject.toml", "constraints.txt", "rotor", "kernels", "recipes"} <= set(kept)
    assert all((ROOT / name).exists() for name in kept)
    commands = re.findall(r"^#.*docker run .* rotor(?:-vllm)? (\w+ .*)$", image, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        parse(shlex.split(command))
