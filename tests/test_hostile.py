"""Files of unknown origin: whatever is in them, the end is success or a clean error, in bounded memory; no code runs.

Every file that rotor reads is mutated, as structure (a value replaced, removed, repeated, nested) and as bytes.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import pickle
import resource
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DEMO_MODEL, FAST_EVALUATION, calibrated, reseal
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from rotor.calibration.calibrate import calibrate
from rotor.calibration.run import Run, read_statistics
from rotor.errors import CheckpointError, NumericsError, RecipeError, RotorError
from rotor.export.export import export
from rotor.format.atomic import json_bytes
from rotor.format.manifest import CHECKSUM
from rotor.models.checkpoint import Checkpoint
from rotor.models.fit import check_fit
from rotor.models.projections import read_attention
from rotor.prediction.devices import parse_devices
from rotor.progress import Progress
from rotor.recipe import load_recipe, override, parse_recipe
from rotor.report.data import collect
from rotor.runtime.families import attention_shape, find_family
from rotor.runtime.integration import RotorConfig
from rotor.search.search import rank_path
from rotor.search.table import RankTable, probes_json, read_probes
from rotor.validation.integrity import Validation, check_integrity

CASES = {
    "header": 2000,
    "index": 1500,
    "config": 700,
    "quantization": 1500,
    "recipe": 1500,
    "override": 800,
    "run": 1000,
    "table": 1200,
    "checkpoint": 700,
    "kernels": 300,
    "bases": 500,
}
"""Mutations of each kind of file."""

EXTRA_BYTES = 3 << 30
"""Address space that the mutations may take beyond what the process has."""


def mutations(kind: str) -> settings:
    return settings(
        max_examples=CASES[kind],
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture(autouse=True)
def bounded_memory() -> Iterator[None]:
    """An allocation that follows a number in a file fails at once, as a MemoryError that no test expects."""
    if sys.platform != "linux":
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + EXTRA_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def deep(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


NUMBERS = [0, 1, -1, 2, 7, 2**31, 2**40, 2**63 - 1, 2**63, 10**30, -(2**63), 1 << 2000, 0.5, -1.5, 1e308]
NUMBERS += [math.nan, math.inf, -math.inf]
TEXTS = [
    "",
    "x",
    "..",
    "../model.safetensors",
    "/etc/passwd",
    "a/b.safetensors",
    "\0",
    "\ud800",
    "F8_E4M3",
    "I64",
    "BOOL",
]
TEXTS += [
    "y" * 5000,
    "line\nline\x1b[31m",
    "post",
    "pre",
    "model.safetensors",
    "float16",
    "${x}",
    "!!python/name:os.system",
]
OTHERS: list[Any] = [
    None,
    True,
    False,
    [],
    {},
    [[]],
    [None],
    {"": {}},
    deep(50),
    deep(900),
    [0] * 300,
    [1, 2],
    [2**62, 2**62],
]
VALUES = st.one_of(st.sampled_from([*NUMBERS, *TEXTS, *OTHERS]), st.integers(-5, 300), st.floats(), st.text(max_size=4))
CHANGES = st.lists(
    st.tuples(st.integers(0, 1 << 16), st.sampled_from(["replace", "replace", "remove", "rename", "repeat"]), VALUES),
    min_size=1,
    max_size=3,
)
BYTES = st.lists(
    st.tuples(st.integers(0, 1 << 20), st.sampled_from(["flip", "insert", "cut", "end"]), st.integers(0, 255)),
    min_size=1,
    max_size=4,
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a JSON value."""
    found: list[tuple[Any, Any]] = []
    stack = [value]
    while stack:
        node = stack.pop()
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            found.append((node, key))
            if isinstance(node[key], (dict, list)):
                stack.append(node[key])
    return found


def changed(value: Any, changes: list[tuple[int, str, Any]]) -> Any:
    value = copy.deepcopy(value)
    for number, kind, new in changes:
        known = places(value)
        if not known:
            return value
        node, key = known[number % len(known)]
        if kind == "remove":
            del node[key]
        elif kind == "rename" and isinstance(node, dict):
            node[str(new)[:200] if not isinstance(new, int) or abs(new) < 2**64 else "big"] = node.pop(key)
        elif kind == "repeat" and isinstance(node, list):
            node.extend([node[key]] * 3)
        else:
            node[key] = copy.deepcopy(new)
    return value


def garbled(data: bytes, changes: list[tuple[int, str, int]]) -> bytes:
    for number, kind, byte in changes:
        at = number % max(len(data), 1)
        if kind == "flip":
            data = data[:at] + bytes([data[at] ^ (1 << byte % 8)]) + data[at + 1 :] if data else data
        elif kind == "insert":
            data = data[:at] + bytes([byte]) * (1 + byte % 3) + data[at:]
        else:
            data = data[:at] if kind == "end" else data[:at] + data[at + 1 + byte :]
    return data


def clean(action: Callable[[], Any]) -> Any:
    """The result of an action; an error of rotor's, of bounded and printable text, is as good."""
    caught: RotorError | None = None
    try:
        return action()
    except RotorError as error:
        caught = error
    assert caught.message
    assert caught.message.isprintable()
    assert len(str(caught)) < 5000
    return None


def both(kind: str, base: Any, check: Callable[[bytes], None]) -> None:
    """Run `check` on mutations of a JSON value: two thirds by structure, one third by bytes."""
    text = json.dumps(base).encode()

    @mutations(kind)
    @given(st.one_of(CHANGES, CHANGES, BYTES))
    def run(changes: Any) -> None:
        by_bytes = changes[0][1] in ("flip", "insert", "cut", "end")
        check(garbled(text, changes) if by_bytes else json.dumps(changed(base, changes)).encode())

    run()


def test_at_least_ten_thousand_mutations() -> None:
    assert sum(CASES.values()) >= 10_000


@pytest.fixture(scope="module")
def small(tiny, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """(model, run, checkpoint) of a tiny model."""
    folder = tmp_path_factory.mktemp("hostile")
    run = calibrated(tiny("llama"), folder / "run", "pre", 2)
    export(run.folder, folder / "out", compression=0.4)
    return tiny("llama"), folder / "run", folder / "out"


@pytest.fixture
def places_for(small, tmp_path: Path) -> tuple[Path, Path, Path]:
    """Copies of them that a test may damage."""
    return tuple(shutil.copytree(path, tmp_path / path.name) for path in small)  # type: ignore[return-value]


def open_checkpoint(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    for file in checkpoint.files:
        assert (folder / file).parent.resolve() == folder.resolve()
    for name in sorted(checkpoint.names):
        checkpoint.shape_of(name)
        checkpoint.tensor(name)


def test_safetensors_headers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(4, 4), "b.weight": torch.ones(8, dtype=torch.bfloat16)}, weights)
    data = weights.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])

    @mutations("header")
    @given(st.one_of(CHANGES, BYTES), st.one_of(st.none(), st.none(), st.integers(0, 2**64 - 1)))
    def run(changes: Any, declared: int | None) -> None:
        if changes[0][1] in ("flip", "insert", "cut", "end"):
            weights.write_bytes(garbled(data, changes))
        else:
            text = json.dumps(changed(header, changes)).encode()
            weights.write_bytes(
                struct.pack("<Q", len(text) if declared is None else declared) + text + data[8 + length :]
            )
        clean(lambda: open_checkpoint(tmp_path))

    run()


def test_indexes(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for folder in (tmp_path, tmp_path / "in"):
        save_file({"a": torch.ones(2)}, folder / "model.safetensors")
        save_file({"b": torch.ones(2)}, folder / "other.safetensors")
    folder = tmp_path / "in"
    (folder / "config.json").write_text("{}")
    index = {"metadata": {"total_size": 16}, "weight_map": {"a": "model.safetensors", "b": "other.safetensors"}}

    def check(data: bytes) -> None:
        (folder / "model.safetensors.index.json").write_bytes(data)
        clean(lambda: open_checkpoint(folder))

    both("index", index, check)


@pytest.mark.parametrize(
    "entry", ["../model.safetensors", "/abs/model.safetensors", "sub/x.safetensors", "..", ".", ""]
)
def test_index_entries_cannot_leave_the_folder(entry: str, tmp_path: Path) -> None:
    (tmp_path / "in" / "sub").mkdir(parents=True)
    for place in (tmp_path, tmp_path / "in" / "sub"):
        save_file({"a": torch.ones(2)}, place / "model.safetensors")
    (tmp_path / "in" / "config.json").write_text("{}")
    (tmp_path / "in" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": entry}}))
    with pytest.raises(CheckpointError, match=r"a is in .*expected a file name in this folder"):
        Checkpoint(tmp_path / "in")


def test_a_link_to_a_secret_is_not_taken_along(tmp_path: Path, tiny) -> None:
    """Links into the hub's cache are followed; one that leads elsewhere would publish what it points to."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    shutil.copytree(tiny("llama"), blobs)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(path)
    (tmp_path / "secret").write_text("key")
    (snapshot / "notes.txt").symlink_to(tmp_path / "secret")
    names = Checkpoint(snapshot).sidecars()
    assert "tokenizer.json" in names
    assert "notes.txt" not in names


def read_model(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    family, shape = find_family(checkpoint.config), attention_shape(checkpoint.config)
    for layer in range(min(shape.num_layers, 2)):
        read_attention(family, layer, checkpoint.names, checkpoint.tensor, shape)
    check_fit(checkpoint)


def test_configs(places_for) -> None:
    model, _, _ = places_for

    def check(data: bytes) -> None:
        (model / "config.json").write_bytes(data)
        clean(lambda: read_model(model))

    both("config", json.loads((model / "config.json").read_text()), check)


def test_quantization_configs(small) -> None:
    _, _, out = small
    config = json.loads((out / "config.json").read_text())
    shape = attention_shape(Checkpoint(out).config)
    base = config["quantization_config"]
    base["profiles"] = {"0.9": [[[4, 4]] * 2] * 2, "0.99": [[[8, 8]] * 2] * 2}

    def check(data: bytes) -> None:
        with suppress(ValueError, RecursionError):  # not JSON: read_json's work
            found = json.loads(data)
            if isinstance(found, dict):
                clean(lambda: use(found))

    def use(found: dict[str, Any]) -> None:
        read = RotorConfig(**found)
        read.layouts(shape)
        read.profile_ranks("0.9")

    both("quantization", base, check)


def test_recipes() -> None:
    text = load_recipe("zdc").to_yaml()
    base = {
        k: v for k, v in load_recipe("rotor").to_dict().items() if k in ("name", "summary", "tokens", "ranks", "search")
    }

    @mutations("recipe")
    @given(st.one_of(CHANGES, CHANGES, BYTES))
    def run(changes: Any) -> None:
        if changes[0][1] in ("flip", "insert", "cut", "end"):
            mutated = garbled(text.encode(), changes).decode("utf-8", "replace")
        else:
            mutated = json.dumps(changed(base, changes))
        recipe = clean(lambda: parse_recipe(mutated, "x.yaml"))
        if recipe is not None:
            assert parse_recipe(recipe.to_yaml(), "x.yaml") == recipe

    run()


def test_overrides() -> None:
    recipe = load_recipe("fdc")
    names = [
        "tokens.count",
        "tokens.seed",
        "ranks.multiple_of",
        "search.targets",
        "objective.kind",
        "groups.size",
        "x.y",
    ]
    values = st.one_of(VALUES.map(lambda v: json.dumps(v)), st.text(max_size=20))

    @mutations("override")
    @given(st.sampled_from(names), values)
    def run(name: str, value: str) -> None:
        clean(lambda: override(recipe, [f"{name}={value}"]))

    run()


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]",
        "name: x\nsummary: y\ntokens: {<<: &t {count: 1}, seed: 0}\nprune: *t",
        "name: " + "[" * 5000,
        "name: !!python/object/apply:os.system [echo]",
        "name: x\nsummary: y\ntokens: {count: " + "9" * 5000 + "}",
        "name: x\nsummary: y\ntokens: {count: 0x" + "f" * 5000 + "}",
        "name: x\nsummary: y\nranks: {probe_share: 0x" + "f" * 5000 + "}",
        "name: x\nsummary: " + "y" * (1 << 19),
        "? [1, 2]\n: 3",
        "name: 2001-13-45",
        "",
    ],
)
def test_yaml_that_asks_for_too_much(text: str) -> None:
    for read in (parse_recipe, parse_devices):
        with pytest.raises(RecipeError):
            read(text, "x.yaml")


def test_run_files(places_for) -> None:
    _, run, _ = places_for

    def check(data: bytes) -> None:
        (run / "run.json").write_bytes(data)
        reseal(run)
        clean(lambda: use(Run.open(run)))

    def use(opened: Run) -> None:
        assert opened.shape.num_layers > 0
        assert opened.model_folder
        collect(opened.folder)

    (run / "recipe.yaml").write_text("{name: x, summary: y, bases: {qk: kq, vo: kq}, groups: {domain: pre, size: 2}}")
    shutil.rmtree(run / "tables")
    shutil.rmtree(run / "probes", ignore_errors=True)
    shutil.rmtree(run / "bases")
    both("run", json.loads((run / "run.json").read_text()), check)


def write_sealed(path: Path, data: bytes) -> None:
    """Write what may be a JSON object, with the SHA-256 that fits: what lies behind that check is to be reached."""
    try:
        content = json.loads(data)
        if isinstance(content, dict):
            content.pop(CHECKSUM, None)
            sealed = {CHECKSUM: hashlib.sha256(json_bytes(content)).hexdigest(), **content}
            data = json.dumps(sealed).encode()  # with NaN, if there is one
    except (ValueError, RecursionError):
        pass
    path.write_bytes(data)


def test_rank_tables(places_for) -> None:
    _, folder, _ = places_for
    run = Run.open(folder)
    bases = run.bases()
    latest = RankTable.latest(run)
    assert latest is not None
    path = folder / "tables" / f"{latest.context.key}.json"

    def check(data: bytes) -> None:
        write_sealed(path, data)
        clean(use)

    def use() -> None:
        table = RankTable.open(run, latest.context)
        table.find(rank_path(bases, run, override(run.recipe, ["ranks.method=uniform"])).full())
        for point in table.points:
            point.to_json()

    both("table", json.loads(path.read_text()), check)


def test_probes(places_for) -> None:
    _, folder, _ = places_for
    run = Run.open(folder)
    path = folder / "probes" / "some.json"
    path.parent.mkdir(exist_ok=True)
    layers = [{key: ([(16, 1e-9)], [(16, 1e-9)]) for key in layer} for layer in run.bases()]

    def check(data: bytes) -> None:
        write_sealed(path, data)
        clean(lambda: read_probes(run, "some"))

    both("table", json.loads(json.dumps(probes_json(layers))), check)
    path.unlink()


def test_checkpoint_files(places_for) -> None:
    _, _, out = places_for

    def check(data: bytes) -> None:
        (out / "rotor.json").write_bytes(data)
        clean(lambda: check_integrity(Validation(out), Progress()))
        clean(lambda: collect(out, run="not looked for"))

    both("checkpoint", json.loads((out / "rotor.json").read_text()), check)


def test_kernel_configs(places_for) -> None:
    _, _, out = places_for
    written = (out / "kernel_config.json").read_bytes()
    original = json.loads(written)

    def check(data: bytes) -> None:
        (out / "kernel_config.json").write_bytes(data)
        result = Validation(out)
        clean(lambda: check_integrity(result, Progress()))
        with suppress(ValueError, RecursionError):
            assert result.damaged == (data != written)
            json.loads(data)

    both("kernels", original, check)


def test_bases_and_statistics(places_for) -> None:
    _, folder, _ = places_for
    run = Run.open(folder)
    files = [folder / "bases" / "layer-0000.safetensors", folder / "statistics" / "layer-0000.safetensors"]
    originals = {path: path.read_bytes() for path in files}

    @mutations("bases")
    @given(st.sampled_from(files), st.one_of(CHANGES, BYTES))
    def mutate(path: Path, changes: Any) -> None:
        data = originals[path]
        length = struct.unpack("<Q", data[:8])[0]
        if changes[0][1] in ("flip", "insert", "cut", "end"):
            head = garbled(data[: 8 + length], changes)
        else:
            text = json.dumps(changed(json.loads(data[8 : 8 + length]), changes)).encode()
            head = struct.pack("<Q", len(text)) + text
        path.write_bytes(head + data[8 + length :])
        clean(lambda: rank_path(run.bases(), run, run.recipe).full())
        clean(lambda: run.bases()[0])
        clean(lambda: read_statistics(folder, 0, run.shape).moment("value", 1))
        path.write_bytes(data)

    mutate()


def test_no_pickle_is_loaded_and_no_code_of_the_model_runs(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shutil.copytree(tiny("llama"), tmp_path / "model")
    program = f"open({str(tmp_path / 'ran')!r}, 'w').close()\n"
    (model / "modeling_evil.py").write_text(program + "class Evil: pass\n")
    for file in ("config.json", "tokenizer_config.json"):
        data = json.loads((model / file).read_text())
        data["auto_map"] = {
            name: "modeling_evil.Evil" for name in ("AutoConfig", "AutoModelForCausalLM", "AutoModel", "AutoTokenizer")
        }
        data["trust_remote_code"] = True
        (model / file).write_text(json.dumps(data))

    class Bomb:
        def __reduce__(self) -> Any:
            return exec, (program,)

    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "state.pkl"):
        (model / name).write_bytes(pickle.dumps(Bomb()))

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a pickle was loaded")

    monkeypatch.setattr(pickle, "load", refuse)
    monkeypatch.setattr(pickle, "loads", refuse)
    monkeypatch.setattr(torch, "load", refuse)
    small_run = ["tokens.count=512", "tokens.seq_len=64", "ranks.multiple_of=4"]
    run = calibrate(model, tmp_path / "run", "fdc", [*small_run, *FAST_EVALUATION])
    export(run.folder, tmp_path / "out", compression=0.3)
    assert not (tmp_path / "ran").exists()
    assert not [path for path in (tmp_path / "out").iterdir() if path.suffix in (".bin", ".pt", ".pkl")]


def test_a_config_that_asks_for_too_much_is_refused_before_anything_is_allocated(tmp_path: Path, tiny) -> None:
    model = shutil.copytree(tiny("llama"), tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    for change, text in (
        ({"vocab_size": 1 << 24}, "describes a model of"),
        ({"intermediate_size": 65}, r"tensor model.layers.0.mlp.gate_proj.weight has shape \[64, 48\]"),
        ({"num_hidden_layers": 1 << 40}, "num_hidden_layers is 1099511627776, expected 0 to 16384"),
        ({"num_labels": 1 << 40}, "num_labels is 1099511627776, expected 0 to 16384"),
        ({"num_hidden_layers": 0}, "expected numbers from 1"),
        ({"num_attention_heads": 0}, "expected numbers from 1|cannot read it"),
    ):
        (model / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(CheckpointError, match=text):
            read_model(model)
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 1 << 24}))
    with pytest.raises(CheckpointError, match="describes a model of"):
        calibrate(model, tmp_path / "run", "fdc")


def test_weights_that_are_not_numbers_of_the_right_kind(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.tensor([1.0, math.nan]).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(NumericsError, match="tensor a has 1 elements"):
        Checkpoint(tmp_path).tensor("a")


def test_json_larger_than_any_sensible_file(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(CheckpointError, match="1073741824 bytes, more than"):
        Checkpoint(tmp_path)


def test_the_demo_model_is_not_refused() -> None:
    read_model(DEMO_MODEL)
