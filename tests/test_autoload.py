"""Programs that never import rotor load its checkpoints: of an installed rotor by themselves, else by `rotor run`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from support.paths import ROOT

pytestmark = pytest.mark.nightly


def bare_environment(folder: Path) -> tuple[Path, Path]:
    """The interpreter and the site-packages of an environment that has what this one has, but no rotor."""
    venv.create(folder, system_site_packages=False, with_pip=False, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    (packages / "z_dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python", packages


def run(*arguments: str | Path, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "ROTOR_AUTOLOAD")}
    return subprocess.run(
        [*map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**inherited, "PYTHONPATH": str(ROOT)} | environment,
    )


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Asks transformers for the quantisation of a checkpoint; says also whether start-up imported anything large."""
    from rotor.checkpoint.section import MARK

    path = tmp_path_factory.mktemp("program") / "program.py"
    path.write_text(
        "import sys\n"
        "print([m for m in ('rotor', 'torch', 'transformers') if m in sys.modules])\n"
        "from transformers.quantizers.auto import AutoQuantizationConfig\n"
        f"print(type(AutoQuantizationConfig.from_dict({{'quant_method': {MARK!r}}})).__name__)\n"
    )
    return path


@pytest.mark.parametrize("kind", ["build_wheel", pytest.param("build_editable", marks=pytest.mark.slow)])
def test_an_installed_rotor_is_found_by_transformers_alone(kind: str, program: Path, tmp_path: Path) -> None:
    """By what pip unpacks into site-packages, from a wheel of either kind; start-up imports nothing for it."""
    pytest.importorskip("setuptools", reason="setuptools, which builds the wheels, is not installed")
    source = tmp_path / "source"
    source.mkdir()
    for name in ("rotor", "kernels", "recipes", "build_backend", "pyproject.toml", "README.md", "LICENSE"):
        (source / name).symlink_to(ROOT / name)
    build = f"import rotor_build; rotor_build.{kind}({str(tmp_path)!r})"
    subprocess.run(
        [sys.executable, "-c", build],
        cwd=source,  # where setuptools leaves what it builds
        env={**os.environ, "PYTHONPATH": str(ROOT / "build_backend")},
        capture_output=True,
        check=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        names = set(archive.namelist())
        recorded = archive.read(next(n for n in names if n.endswith("/RECORD"))).decode()
        python, packages = bare_environment(tmp_path / "environment")
        archive.extractall(packages)
    assert {line.split(",")[0] for line in recorded.splitlines()} == names
    without_path = {"PYTHONPATH": ""}
    assert run(python, program, **without_path).stdout.splitlines() == ["[]", "RotorConfig"]
    if kind == "build_editable":
        beside = tmp_path / "beside"
        (beside / "rotor" / "rotor").mkdir(parents=True)  # as in the folder that a clone lies in
        shown = run(python, "-c", "import rotor; print(rotor.__file__)", cwd=beside, **without_path)
        assert shown.stdout.strip() == str(ROOT / "rotor" / "__init__.py")
        return
    refused = run(python, program, ROTOR_AUTOLOAD="0", **without_path)
    assert refused.stdout.splitlines() == ["[]"]
    assert "needs the Python package rotor-kv" in refused.stderr.splitlines()[-1]


def test_run_registers_in_a_program_and_in_those_that_it_starts(program: Path, tmp_path: Path) -> None:
    """Also where rotor is not installed, but only run from its source tree."""
    rotor = sys.executable, "-m", "rotor", "run"
    python, _ = bare_environment(tmp_path / "environment")
    done = run(*rotor, "--", python, program, PYTHONPATH="")
    assert done.stdout.splitlines() == ["[]", "RotorConfig"], done.stderr
    child = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, {str(program)!r}]).returncode + 7)"
    done = run(*rotor, sys.executable, "-c", child, ROTOR_AUTOLOAD="0")
    assert done.stdout.splitlines() == ["[]", "RotorConfig"], done.stderr
    assert done.returncode == 7


def autoloading(folder: Path, rotor: str) -> Path:
    """A folder with a program that has the autoload, and beside it a module `rotor` of its own."""
    (folder / "rotor.py").write_text(rotor)
    program = folder / "program.py"
    program.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT / 'rotor' / 'bootstrap')!r}); import rotor_autoload\n"
        "import importlib.util\n"
        "assert importlib.util.find_spec('transformers')\n"
        "print('found', flush=True)\n"
        "import transformers\n"
        "print('imported')\n"
    )
    return program


@pytest.mark.parametrize(("strict", "rotor"), [(False, "print('executed')"), (True, "")])
def test_another_module_rotor_is_neither_run_nor_taken_for_it(strict: bool, rotor: str, tmp_path: Path) -> None:
    """And where warnings are errors, that breaks no import."""
    options = ["-W", "error::RuntimeWarning"] if strict else []
    done = run(sys.executable, *options, autoloading(tmp_path, rotor), ROTOR_AUTOLOAD="0", PYTHONPATH="")
    assert done.stdout.splitlines() == ["found", "imported"], done.stderr
    assert f"the module rotor is {tmp_path / 'rotor.py'} here, which hides the package rotor-kv" in done.stderr


def test_run_passes_on_arguments_exit_code_and_signals(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('the one behind')")
    rotor = sys.executable, "-m", "rotor", "run"
    show = "import sys, json; print(json.dumps(sys.argv[1:])); sys.exit(5)"
    done = run(*rotor, "--", sys.executable, "-c", show, "--", "-x", "a b", PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert done.stdout.splitlines()[-2:] == ["the one behind", json.dumps(["--", "-x", "a b"])], done.stderr
    assert done.returncode == 5
    dies = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
    assert run(*rotor, sys.executable, "-c", dies).returncode == -signal.SIGTERM
    missing = run(*rotor, "--", "no-such-program")
    assert missing.returncode == 2
    assert missing.stderr.startswith("error: rotor run no-such-program: no such program.")


def test_a_rotor_that_cannot_be_registered_breaks_no_other_model() -> None:
    broken = """
import sys
sys.modules["rotor.checkpoint.section"] = None
import rotor
import transformers.modeling_utils
"""
    done = run(sys.executable, "-c", broken)
    assert done.returncode == 0, done.stderr
    assert "RuntimeWarning: transformers loads no checkpoint of rotor's" in done.stderr
