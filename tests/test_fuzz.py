"""Whole commands with drawn paths, damaged files, odd environments and faults at system calls.

Whatever happens: an exit code that is documented, no traceback and no defect on stderr, sources as they were, nothing
changed outside of OUT and RUN, and OUT absent, as it was, or whole by its manifest. What a fault stopped works when the
same command is given again. `make test` runs the same examples each time, `make fuzz` many more of its own choice.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import build_tiny, reseal
from faults import ERRORS, KINDS, Faults, injected
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from worlds import check, fresh, is_own, state_of

from rotor.calibration.calibrate import calibrate
from rotor.export.export import export
from rotor.format.manifest import CHANGING

RANDOM = ["tokens.source=random", "tokens.count=128", "tokens.seq_len=64", "groups.size=1", "ranks.multiple_of=4"]
SETTINGS = [word for setting in RANDOM for word in ("--set", setting)]

fuzzed = settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], database=None
)


@pytest.fixture(scope="module", autouse=True)
def offline() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.delenv("ROTOR_DEBUG", raising=False)
        yield


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a run, a checkpoint, and things of the user's beside them."""
    world = tmp_path_factory.mktemp("template")
    model = build_tiny("llama", world / "model")
    for path in model.glob("tokenizer*"):
        path.unlink()
    (model / "LICENSE").write_text("as you like")
    run = calibrate(model, world / "run", "fdc", RANDOM)
    export(run.folder, world / "out", compression=0.4, measure=False)
    for name in ("notes", "notes.partial", "deep/er"):
        (world / name).mkdir(parents=True)
        (world / name / "diary.txt").write_text("dear diary")
    (world / "file").write_text("a file")
    (world / "link").symlink_to("deep/er")
    (world / "to-model").symlink_to("model")
    (world / "to-out").symlink_to("out")
    (world / "dangling").symlink_to("nowhere")
    return world


# Paths.

WORDS = st.sampled_from(
    ["x", "out", "run", "model", "m[ab]", "**", "a b", "*", "é", "\x1b[31m", "new\nline", "-", "..."]
)
PLACES = """
    . .. ./ file file/x link link/../notes link/../new link/../../model link/x to-model to-model/x to-model/../fresh
    to-out dangling dangling/x notes notes.partial model model/ model/x model.partial run run/bases run.partial out
    out/x out.partial deep/er/../../model/../new new/below .out.rotor-lock .new.rotor-0123456789abcdef ~ $HOME C:\\x
"""
ODD = [*PLACES.split(), "", os.fsdecode(b"caf\xe9"), "x" * 300]
PATHS = st.one_of(
    st.sampled_from(ODD),
    st.sampled_from(ODD),
    st.lists(st.one_of(WORDS, st.sampled_from(["..", ".", "link", "deep"])), min_size=1, max_size=4).map("/".join),
)


@st.composite
def writing(draw: Any) -> tuple[list[str], str, str, bool]:
    """A command that writes to a drawn place: arguments, place, kind, whether it may replace."""
    place, overwrite = draw(PATHS), draw(st.booleans())
    flags = ["--overwrite"] * overwrite + draw(st.sampled_from([[], [], ["--json"], ["--quiet"]]))
    if draw(st.booleans()):
        flags += ["--resume"] * draw(st.integers(0, 3).map(lambda n: n == 3))
        model = draw(st.sampled_from(["model", "model", "model", "to-model", "./link/../../model", "run", "out"]))
        return ["calibrate", model, "-o", place, "--recipe", "fdc", *SETTINGS, *flags], place, "run", overwrite
    run = draw(st.sampled_from(["run", "run", "run", "deep/../run", "model", "out"]))
    goal = draw(st.sampled_from([["--compression", "0.4"], ["--removal-rate", "0.2"]]))
    return ["export", run, "-o", place, *goal, "--no-measure", *flags], place, "checkpoint", overwrite


@fuzzed
@given(writing())
def test_any_path(template: Path, command: tuple[list[str], str, str, bool]) -> None:
    arguments, place, kind, overwrite = command
    with fresh(template) as world:
        before = world.state()
        done = world.run(arguments)
        event(f"{arguments[0]}: {done.code}")
        check(world, before, done, place, kind, overwrite)


# Faults.

CASES: dict[str, tuple[list[str], str, str]] = {
    "calibrate": (["calibrate", "model", "-o", "new", "--recipe", "fdc", *SETTINGS], "new", "run"),
    "calibrate again": (["calibrate", "model", "-o", "run", "--recipe", "fdc", *SETTINGS, "--overwrite"], "run", "run"),
    "export": (["export", "run", "-o", "new", "--compression", "0.4", "--no-measure"], "new", "checkpoint"),
    "export again": (
        ["export", "run", "-o", "out", "--compression", "0.3", "--no-measure", "--overwrite"],
        "out",
        "checkpoint",
    ),
}


@st.composite
def faults(draw: Any) -> Callable[[Path, Counter[str]], Faults]:
    """A fault at one of the calls that there are: drawn(folder, calls by kind)."""
    kind = draw(st.sampled_from(KINDS))
    error = draw(st.one_of(st.sampled_from(ERRORS[kind]), st.sampled_from([KeyboardInterrupt, MemoryError])))
    share, lasting = draw(st.floats(0, 1, exclude_max=True)), draw(st.booleans()) and isinstance(error, int)
    return lambda folder, calls: Faults(folder, frozenset([kind]), int(share * calls[kind]), error, lasting)


@pytest.fixture(scope="module")
def calls(template: Path) -> dict[str, Counter[str]]:
    """How many calls of each kind each case makes when nothing goes wrong."""
    found = {}
    for name, (arguments, _, _) in CASES.items():
        with fresh(template) as world:
            with injected(Faults(world.root, frozenset(KINDS), sys.maxsize, 0)) as counted:
                assert world.run(arguments).code == 0
            found[name] = counted.seen
    assert set(found["export again"]) == set(KINDS)
    return found


@fuzzed
@given(st.sampled_from(sorted(CASES)), faults())
def test_any_fault(
    template: Path, calls: dict[str, Counter[str]], name: str, fault: Callable[[Path, Counter[str]], Faults]
) -> None:
    arguments, place, kind = CASES[name]
    with fresh(template) as world:
        before = world.state()
        with injected(fault(world.root, calls[name])) as injection:
            done = world.run(arguments)
        event(f"{name}: {'fault' if injection.raised else 'none'}, {done.code}")
        check(world, before, done, place, kind, may_replace=True)
        if done.code == 0:
            return
        middle = world.state()
        resume = ["--resume"] if kind == "run" and (world.root / f"{place}.partial").exists() else []
        overwrite = ["--overwrite"] if (world.root / place).exists() and "--overwrite" not in arguments else []
        again = world.run([*arguments, *resume, *overwrite])
        assert again.code == 0, (injection, done, again)
        check(world, middle, again, place, kind, may_replace=True)
        assert not [n for n in world.state().keys() - before.keys() if ".rotor-" in n or ".partial" in n]


# Files.

JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=20),
    st.sampled_from([[], {}, [[]], "../model", "/", "\x1b[31m", "a" * 5000, 10**400, [[1] * 50]]),
)


def mutate(path: Path, change: str, where: float, junk: object) -> None:
    """Damage a file, in a way that is drawn."""
    data = path.read_bytes()
    at = min(int(where * len(data)), max(0, len(data) - 1))
    if change == "flip" and data:
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
    elif change == "cut":
        path.write_bytes(data[:at])
    elif change == "longer":
        path.write_bytes(data + b"\0more")
    elif change == "gone":
        path.unlink()
    elif change in ("folder", "pipe", "link", "loop"):
        path.unlink()
        if change == "folder":
            path.mkdir()
        elif change == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to({"link": "/etc/hostname", "loop": path.name}[change])
    elif change == "json" and path.suffix == ".json":
        path.write_text(json.dumps(replaced(json.loads(data), where, junk)))


def replaced(data: Any, where: float, junk: object) -> Any:
    """A JSON value with one value somewhere in it replaced."""
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            places.append((value, key))
            if isinstance(item, (dict, list)):
                walk(item)

    walk(data)
    holder, key = places[min(int(where * len(places)), len(places) - 1)]
    holder[key] = junk
    return data


FILES = {
    "model": "config.json model.safetensors generation_config.json LICENSE",
    "run": "run.json recipe.yaml manifest.json bases/layer-0000.safetensors bases/layer-0001.safetensors log.txt",
    "out": "config.json rotor.json manifest.json kernel_config.json recipe.yaml README.md model.safetensors "
    "generation_config.json report.html",
}
READING: dict[str, list[tuple[list[str], str | None, str]]] = {
    "model": [
        (["inspect", "model"], None, ""),
        CASES["calibrate"],
        CASES["export"],
    ],
    "run": [
        CASES["export"],
        (["export", "run", "-o", "new", "--compression", "0.4", "--no-measure", "--dry-run"], None, ""),
        CASES["calibrate again"],
    ],
    "out": [
        (["validate", "out"], None, ""),
        (["validate", "out", "--json"], None, ""),
        CASES["export again"],
    ],
}
CHANGES = ["flip", "cut", "longer", "gone", "folder", "pipe", "link", "loop", "json", "json", "json", "json"]


@st.composite
def damage(draw: Any) -> tuple[str, str, str, float, object, bool, int]:
    folder = draw(st.sampled_from(sorted(FILES)))
    file = draw(st.sampled_from(FILES[folder].split()))
    where = draw(st.floats(0, 1, exclude_max=True))
    return folder, file, draw(st.sampled_from(CHANGES)), where, draw(JUNK), draw(st.booleans()), draw(st.integers(0, 2))


@fuzzed
@given(damage())
def test_any_damage(template: Path, drawn: tuple[str, str, str, float, object, bool, int]) -> None:
    folder, file, change, where, junk, sealed, number = drawn
    arguments, place, kind = READING[folder][number]
    with fresh(template) as world:
        path = world.root / folder / file
        untouched = state_of(str(path))
        mutate(path, change, where, junk)
        damaged = not os.path.lexists(path) or state_of(str(path)) != untouched
        if sealed and folder != "model" and file != "manifest.json" and change not in ("folder", "pipe", "loop"):
            reseal(world.root / folder)
        before = world.state()
        done = world.run(arguments)
        event(f"{arguments[0]}: {done.code}")
        if place == folder and done.code == 2:  # it is not told to be rotor's any more, and stays as it is
            place = None
        check(world, before, done, place, kind, may_replace=True)
        if damaged and not sealed and arguments[0] == "validate":
            assert done.code == 1, done
        if "--json" in arguments and done.out:
            json.loads(done.out, parse_constant=pytest.fail)


# Environments.

ENVIRONMENT = st.fixed_dictionaries(
    {},
    optional={
        "COLUMNS": st.sampled_from(["0", "-1", "x", "1", "100000"]),
        "LINES": st.sampled_from(["0", "x"]),
        "TERM": st.sampled_from(["", "dumb", "nothing"]),
        "NO_COLOR": st.just("1"),
        "FORCE_COLOR": st.just("1"),
        "HOME": st.sampled_from(["", "/nowhere", "relative"]),
        "TMPDIR": st.sampled_from(["/nowhere", "", "model"]),
        "LANG": st.sampled_from(["C", "xx_YY.ascii"]),
        "TZ": st.sampled_from(["nowhere", ":/etc/passwd"]),
        "RANK": st.sampled_from(["", "x", "1", "-1"]),
        "WORLD_SIZE": st.sampled_from(["", "x", "1", "-5"]),
        "LOCAL_RANK": st.sampled_from(["", "0", "7"]),
        "LOCAL_WORLD_SIZE": st.sampled_from(["", "1"]),
    },
)
COMMANDS: list[tuple[list[str], str | None, str]] = [
    *CASES.values(),
    (["validate", "out"], None, ""),
    (["inspect", "model", "--json"], None, ""),
    (["recipes"], None, ""),
    (["validate", "--help"], None, ""),
    (["generate", "out", "hello"], None, ""),
    (["export", "run", "-o", "new", "--accuracy", "0.9"], "new", "checkpoint"),
]


@fuzzed
@given(
    st.sampled_from(COMMANDS),
    ENVIRONMENT,
    st.sampled_from(["utf-8", "ascii", "latin-1"]),
    st.sampled_from([0o22, 0o77, 0o777, 0]),
)
def test_any_environment(
    template: Path, command: tuple[list[str], str | None, str], names: dict[str, str], encoding: str, mask: int
) -> None:
    arguments, place, kind = command
    with fresh(template) as world, pytest.MonkeyPatch.context() as patch:
        for name, value in names.items():
            patch.setenv(name, value)
        before, old = world.state(), os.umask(mask)
        try:
            done = world.run(arguments, encoding)
        finally:
            os.umask(old)
        event(f"{arguments[0]}: {done.code}")
        check(world, before, done, place, kind, may_replace=True)


def test_the_manifest_leaves_out_only_what_is_written_later() -> None:
    """What `check` allows to change in a run is what its manifest does not list."""
    for name in ("log.txt", "report.html", "tables/x.json", "probes/x.json"):
        assert CHANGING["run"].fullmatch(name)
        assert is_own(f"run/{name}", set(), "checkpoint")
    assert not is_own("run/run.json", set(), "checkpoint")
