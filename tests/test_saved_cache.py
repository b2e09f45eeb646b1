"""Caches that are saved and loaded: what comes back, what is refused, and what an interrupted save leaves."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.command_line import expect_error
from support.command_line import rotor as command
from support.folded_models import MIXED, Folding, folded
from support.paths import DEMO_MODEL
from support.quick import mostly_nightly
from support.tiny_models import tiny_model
from torch import Tensor
from transformers.cache_utils import DynamicCache, StaticCache

import rotor
from rotor.checkpoint.cache_file import CacheFile
from rotor.checkpoint.layout import POST_ROPE, PRE_ROPE, ExactTokens, KeyForm
from rotor.checkpoint.locks import exclusive
from rotor.checkpoint.manifest import write_manifest
from rotor.errors import CheckpointError, MissingError, UsageError
from rotor.policies import H2O, use_cache_policy
from rotor.runtime import saved_cache
from rotor.runtime.saved_layers import layers_of

EXACT = ExactTokens(first=2, newest=6)
WITH_CRUMBS = ((16, 12, 8, 6, 6, 4, 4, 2, 2, 2), (8, 6, 4, 2))
CASES = {
    "joint blocks": ("llama", Folding(KeyForm(8), 2, joint=True, bits=WITH_CRUMBS, exact=EXACT)),
    "keys and values apart": ("llama", Folding(KeyForm(8), 1, bits=MIXED, exact=EXACT)),
    "no exact tokens": ("llama", Folding(PRE_ROPE, 1, bits=MIXED)),
    "numbers": ("llama", Folding(KeyForm(8), 1, rank=8, exact=EXACT)),
    "numbers after RoPE": ("qwen2", Folding(POST_ROPE, 1, rank=8)),
    "no RoPE": ("gpt2", Folding(POST_ROPE, 2, joint=True, bits=MIXED, exact=EXACT)),
    "window": ("mistral", Folding(KeyForm(8), 1, bits=MIXED, exact=EXACT)),
    "both kinds of layers": ("gemma3_text", Folding(KeyForm(8), 1, joint=True, bits=WITH_CRUMBS, exact=EXACT)),
    "rotations as given": ("phi3", Folding(KeyForm(8), 1, bits=MIXED, exact=EXACT)),
}
"""Family, and how it is compressed."""

LEVELS = ("none", "fast", "small")
PROMPT, REST = 70, [1, 1, 5, 1]
BEGIN = [0, 5, 3]
"""Where the sequences of a batch begin behind padding."""

Models = Callable[[str], Any]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """models(case) -> a compressed model in float32, of a folder with a manifest."""
    made: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in made:
            family, folding = CASES[name]
            made[name] = folded(tiny_model(family).eval(), folding)
            folder = tmp_path_factory.mktemp("checkpoint")
            (folder / "config.json").write_text(name)
            write_manifest(folder, "checkpoint")
            made[name].config.name_or_path = str(folder)
        return made[name]

    return get


@pytest.fixture(autouse=True)
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are packed in two chunks."""
    monkeypatch.setattr(saved_cache, "CHUNK_TOKENS", 66)


def needs(level: str) -> None:
    if level != "none":
        pytest.importorskip("zstandard", reason="zstandard is not installed (the extra store)")


def prompts(batch_size: int = 3) -> tuple[Tensor, Tensor]:
    rows = torch.randint(1, 4000, (batch_size, PROMPT + sum(REST)), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(rows)
    for row, start in enumerate(BEGIN[:batch_size]):
        mask[row, :start] = 0
    return rows, mask


def passed(model: Any, cache: Any, rows: Tensor, mask: Tensor, start: int, count: int) -> Tensor:
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    stop = start + count
    with torch.no_grad():
        logits: Tensor = model(
            rows[:, start:stop],
            attention_mask=mask[:, :stop],
            position_ids=positions[:, start:stop],
            past_key_values=cache,
        ).logits
    return logits


def filled(model: Any, rows: Tensor, mask: Tensor, cache: Any = None) -> Any:
    cache = DynamicCache(config=model.config) if cache is None else cache
    passed(model, cache, rows, mask, 0, PROMPT)
    return cache


def rest(model: Any, cache: Any, rows: Tensor, mask: Tensor, start: int = PROMPT) -> Tensor:
    found = []
    for count in REST:
        found.append(passed(model, cache, rows, mask, start, count))
        start += count
    return torch.cat(found, 1)


EVERY = [(name, level) for name in CASES for level in LEVELS]
QUICK = {(name, LEVELS[(index + 2) % 3]) for index, name in enumerate(CASES)}


@pytest.mark.parametrize(("name", "level"), mostly_nightly(EVERY, lambda case: case in QUICK))
def test_a_loaded_cache_goes_on_as_the_saved_one(name: str, level: Any, models: Models, tmp_path: Path) -> None:
    """To the last bit, behind padding; so does one that was saved a second time, in the middle of a text."""
    needs(level)
    model, (rows, mask) = models(name), prompts()
    cache = filled(model, rows, mask)
    rotor.save_cache(cache, tmp_path / "a", model, input_ids=rows, attention_mask=mask, level=level)
    loaded = rotor.load_cache(tmp_path / "a", model)
    assert torch.equal(rest(model, loaded, rows, mask), rest(model, cache, rows, mask))
    rotor.save_cache(loaded, tmp_path / "a", model, level=level)
    again = rotor.load_cache(tmp_path / "a", model)
    stop = PROMPT + sum(REST)
    more = torch.cat([rows, rows], 1), torch.cat([mask, torch.ones_like(mask)], 1)
    assert torch.equal(rest(model, again, *more, stop), rest(model, cache, *more, stop))
    assert [*tmp_path.iterdir()] == [tmp_path / "a"]
    rows, mask = prompts(1)
    cache = filled(model, rows, mask)
    rotor.save_cache(cache, tmp_path / "a", model, level=level)
    assert torch.equal(rest(model, rotor.load_cache(tmp_path / "a", model), rows, mask), rest(model, cache, rows, mask))


@pytest.mark.parametrize("name", ["joint blocks", "both kinds of layers"])
def test_a_static_cache_is_saved_and_goes_on_as_a_dynamic_one(name: str, models: Models, tmp_path: Path) -> None:
    model, (rows, mask) = models(name), prompts()
    static = filled(model, rows, mask, StaticCache(config=model.config, max_cache_len=120))
    rotor.save_cache(static, tmp_path / "a", model)
    expected = rest(model, filled(model, rows, mask), rows, mask)
    assert torch.equal(rest(model, rotor.load_cache(tmp_path / "a", model), rows, mask), expected)


@pytest.mark.parametrize("kind", ["dynamic", "static", "cropped"])
def test_a_sequence_that_is_shorter_than_the_ring_is_saved_with_the_slots_that_it_takes(
    kind: str, models: Models, tmp_path: Path
) -> None:
    """Also a static cache, and one that was longer, which hold more; what is loaded grows again."""
    family, folding = CASES["joint blocks"]
    model = folded(tiny_model(family).eval(), replace(folding, exact=ExactTokens(2, 100)))
    model.config.name_or_path = models("joint blocks").config.name_or_path
    rows, mask = prompts()
    rows, mask = torch.cat([rows, rows], 1), torch.cat([mask, torch.ones_like(mask)], 1)
    cache = filled(model, rows, mask, StaticCache(config=model.config, max_cache_len=120) if kind == "static" else None)
    if kind == "cropped":
        passed(model, cache, rows, mask, PROMPT, 30)
        cache.crop(-30)
    held = 2 + (80 if kind == "dynamic" else 100)
    assert {layer.exact_rows.keys.shape[2] for layer in cache.layers} == {held}
    rotor.save_cache(cache, tmp_path / "a", model)
    loaded, alone = rotor.load_cache(tmp_path / "a", model), filled(model, rows, mask)
    assert {layer.exact_rows.keys.shape[2] for layer in loaded.layers} == {2 + 80}
    for start in (PROMPT, PROMPT + sum(REST)):
        assert torch.equal(rest(model, loaded, rows, mask, start), rest(model, alone, rows, mask, start))
    assert {layer.exact_rows.keys.shape[2] for layer in loaded.layers} == {2 + 96}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["joint blocks", "numbers", "rotations as given"])
def test_the_first_tokens_are_what_a_crop_leaves(name: str, level: Any, models: Models, tmp_path: Path) -> None:
    """Within a block, at its end, and within padding; another text may follow."""
    needs(level)
    model, (rows, mask) = models(name), prompts()
    cache = filled(model, rows, mask)
    rotor.save_cache(cache, tmp_path / "a", model, level=level)
    rows = rows.flip(1)
    for tokens in (4, 64, 67, PROMPT):
        cropped = copy.deepcopy(cache)
        cropped.crop(tokens - PROMPT)
        loaded = rotor.load_cache(tmp_path / "a", model, tokens=tokens)
        assert loaded.get_seq_length() == tokens
        assert torch.equal(rest(model, loaded, rows, mask, tokens), rest(model, cropped, rows, mask, tokens))


def test_ids_and_mask_come_back(models: Models, tmp_path: Path) -> None:
    model, (rows, mask) = models("joint blocks"), prompts()
    cache = filled(model, rows, mask)
    rotor.save_cache(cache, tmp_path / "a", model, input_ids=rows, attention_mask=mask)
    found = rotor.saved_inputs(tmp_path / "a")
    assert torch.equal(found["input_ids"], rows[:, :PROMPT])
    assert torch.equal(found["attention_mask"], mask[:, :PROMPT])
    rotor.save_cache(cache, tmp_path / "a", model)
    assert rotor.saved_inputs(tmp_path / "a") == {}
    with pytest.raises(UsageError, match=r"input_ids of \[3, 10\], and the cache has 70 tokens of 3 sequences"):
        rotor.save_cache(cache, tmp_path / "a", model, input_ids=rows[:, :10])


def test_beams_go_on_from_a_loaded_cache(models: Models, tmp_path: Path) -> None:
    """Code that reorders and repeats sequences finds everything there."""
    model, (rows, mask) = models("joint blocks"), prompts()
    cache = filled(model, rows, mask)
    rotor.save_cache(cache, tmp_path / "a", model)
    loaded = rotor.load_cache(tmp_path / "a", model)
    for own in (loaded, cache):
        own.batch_repeat_interleave(3)
    found = [
        model.generate(
            rows[:, : PROMPT + 1],
            attention_mask=mask[:, : PROMPT + 1],
            past_key_values=own,
            max_new_tokens=6,
            num_beams=3,
            do_sample=False,
            pad_token_id=0,
        )
        for own in (loaded, cache)
    ]
    assert torch.equal(*found)


def test_what_cannot_be_saved_or_loaded(models: Models, tmp_path: Path) -> None:
    model, (rows, mask) = models("joint blocks"), prompts()
    file, cache = tmp_path / "a", filled(model, rows, mask)
    with pytest.raises(MissingError, match="a: no such file"):
        rotor.load_cache(file, model)
    with pytest.raises(UsageError, match="layer 0: the cache is empty"):
        rotor.save_cache(DynamicCache(config=model.config), file, model)
    with pytest.raises(UsageError, match="the model is no compressed checkpoint"):
        rotor.save_cache(cache, file, tiny_model("llama"))
    with pytest.raises(UsageError, match="another model filled it"):
        rotor.save_cache(cache, file, models("keys and values apart"))
    uneven = copy.deepcopy(cache)
    uneven.layers[1].crop(-3)
    with pytest.raises(UsageError, match="layers of the cache hold different numbers of tokens"):
        rotor.save_cache(uneven, file, model)
    rotor.save_cache(cache, file, model)
    for tokens in (0, -1, PROMPT + 1):
        with pytest.raises(UsageError, match=f"tokens={tokens}: it has 1 to {PROMPT}"):
            rotor.load_cache(file, model, tokens=tokens)
    with pytest.raises(CheckpointError, match=r"a: of the checkpoint [0-9a-f]{16}, and this one is [0-9a-f]{16}"):
        rotor.load_cache(file, models("keys and values apart"))
    with pytest.raises(UsageError, match="of the model in float32, and this one is in float64"):
        rotor.load_cache(file, copy.deepcopy(model).to(torch.float64))
    moved = copy.deepcopy(model)
    moved.config.name_or_path = str(tmp_path)
    with pytest.raises(UsageError, match=r"no manifest\.json is found there"):
        rotor.load_cache(file, moved)
    with_policy = copy.deepcopy(models("no exact tokens"))
    use_cache_policy(with_policy, H2O(share=0.5))
    with pytest.raises(UsageError, match="layer 0: the cache follows a policy"):
        rotor.save_cache(cache, file, with_policy)
    other = tmp_path / "precious"
    other.write_text("text")
    save_file({"a": torch.ones(1)}, tmp_path / "weights")
    for path in (other, tmp_path / "weights", tmp_path):
        with pytest.raises(UsageError, match="is no saved cache, and is not replaced"):
            rotor.save_cache(cache, path, model)
    assert other.read_text() == "text"


def test_a_window_has_lost_its_first_tokens(models: Models, tmp_path: Path) -> None:
    model, (rows, mask) = models("window"), prompts()
    rotor.save_cache(filled(model, rows, mask), tmp_path / "a", model)
    with pytest.raises(UsageError, match=r"tokens=40: layer 0 has a sliding window, and holds the newest \d+ of 70"):
        rotor.load_cache(tmp_path / "a", model, tokens=40)


def test_a_state_beside_rows_is_refused(models: Models, tmp_path: Path) -> None:
    model = copy.deepcopy(models("joint blocks"))
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(UsageError, match="layer 1 keeps a state in a LinearAttentionLayer"):
        rotor.load_cache(tmp_path / "a", model)


@pytest.mark.parametrize("level", LEVELS)
def test_a_file_that_was_cut_or_changed_is_one_line(level: Any, models: Models, tmp_path: Path) -> None:
    """Each byte of the file counts: whichever is changed, nothing is loaded."""
    needs(level)
    model, (rows, mask) = models("joint blocks"), prompts()
    file, broken = tmp_path / "a", tmp_path / "b"
    rotor.save_cache(filled(model, rows, mask), file, model, input_ids=rows, level=level)
    data = file.read_bytes()
    for length in (0, 7, 200, len(data) // 2, len(data) - 1):
        broken.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match="is no saved cache, or was cut") as caught:
            rotor.load_cache(broken, model)
        assert "\n" not in caught.value.message
    step = len(data) // 60
    for place in range(8, len(data), step):
        changed = bytearray(data)
        changed[place] ^= 16
        broken.write_bytes(changed)
        with pytest.raises(CheckpointError):
            load_everything(broken, model)


def load_everything(file: Path, model: Any) -> None:
    """Also the ids, which are not needed to load."""
    rotor.load_cache(file, model)
    rotor.saved_inputs(file)


def forge(file: Path, out: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], None]) -> None:
    """Write a changed file whose hashes fit."""
    with safe_open(file, "pt") as opened:
        info = json.loads(opened.metadata()["rotor_cache"])
    tensors = load_file(file)
    change(info, tensors)
    info["sha256"] = {
        name: hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in tensors.items()
    }
    text = json.dumps(info)
    save_file(tensors, out, {"rotor_cache": text, "sha256": hashlib.sha256(text.encode()).hexdigest()})


FORGED: dict[str, tuple[Callable[[dict[str, Any], dict[str, Tensor]], Any], str]] = {
    "version": (lambda i, t: i.update(version=1), "version 1 of saved caches, this rotor reads 2"),
    "level": (lambda i, t: i.update(level="best"), "level: got 'best', expected one of none, fast, small"),
    "tokens": (lambda i, t: i.update(tokens=71), r"layer 0 holds 70 tokens, expected 71"),
    "no tokens": (lambda i, t: i.update(tokens=0), "tokens: got 0, expected a whole number from 1"),
    "many tokens": (lambda i, t: i.update(tokens=1 << 40), "tokens: got 1099511627776"),
    "sequences": (lambda i, t: i.update(sequences=1 << 30), r"rows.0.0: .* expected"),
    "layers": (lambda i, t: i.update(held=[70]), r"\(1, 2\) layers, expected 2"),
    "until": (lambda i, t: i.update(until=[80, 80]), "exact.0 is of tokens beyond 70"),
    "begin": (lambda i, t: t["exact.1.begin"].fill_(-3), "exact.1 is of tokens beyond 70"),
    "type of begin": (
        lambda i, t: t.update({"exact.1.begin": torch.zeros(3)}),
        r"exact.1.begin is float32 \[3\], expected int64 \[3\]",
    ),
    "rows": (lambda i, t: t.update({"rows.1.0": t["rows.1.0"][:-3].clone()}), "rows.1.0: "),
    "no rows": (lambda i, t: t.update({"rows.1.0": t["rows.1.0"][:0].clone()}), "rows.1.0: packed rows of kind -1"),
    "kind": (lambda i, t: t["rows.1.0"][:1].fill_(9), "rows.1.0: packed rows of kind 9"),
    "missing": (lambda i, t: t.pop("exact.0.keys"), "exact.0.keys is missing"),
    "exact": (lambda i, t: t.update({"exact.0.keys": t["exact.0.keys"][:-1].clone()}), "exact.0.keys"),
    "shifts": (lambda i, t: t.update(shifts=torch.zeros(3, 0, dtype=torch.int64)), r"shifts of \[3, 0\]"),
}


@pytest.mark.parametrize("level", ["none", "small"])
@pytest.mark.parametrize("name", FORGED)
def test_a_forged_file_is_one_line(name: str, level: Any, models: Models, tmp_path: Path) -> None:
    needs(level)
    change, message = FORGED[name]
    model, (rows, mask) = models("joint blocks"), prompts()
    rotor.save_cache(filled(model, rows, mask), tmp_path / "a", model, level=level)
    forge(tmp_path / "a", tmp_path / "b", lambda info, tensors: None)
    rotor.load_cache(tmp_path / "b", model)
    forge(tmp_path / "a", tmp_path / "b", change)
    with pytest.raises(CheckpointError, match=message):
        rotor.load_cache(tmp_path / "b", model)


def test_the_file_says_what_it_is(models: Models, tmp_path: Path) -> None:
    model, (rows, mask) = models("both kinds of layers"), prompts()
    rotor.save_cache(filled(model, rows, mask), tmp_path / "a", model)
    info = CacheFile(tmp_path / "a").info
    assert (info["tokens"], info["sequences"], info["level"], info["dtype"]) == (70, 3, "none", "float32")
    windows = [layer.window for layer in layers_of(model)]
    assert info["held"] == [70 if window is None else window - 1 for window in windows]


@pytest.fixture
def to_replace(models: Models, tmp_path: Path) -> tuple[Any, Any, Path, Tensor]:
    """A model, a longer cache, the file of a shorter one, and the ids of that."""
    model, (rows, mask) = models("joint blocks"), prompts(1)
    cache = filled(model, rows, mask)
    rotor.save_cache(cache, tmp_path / "a", model, input_ids=rows)
    rest(model, cache, rows, mask)
    return model, cache, tmp_path / "a", rows[:, :PROMPT]


def test_a_full_disk_leaves_the_old_file(to_replace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is known before, and as it shows while the file is written."""
    model, cache, file, ids = to_replace
    usage = shutil.disk_usage(file.parent)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
        with pytest.raises(CheckpointError, match=r"0\.0 MB free"):
            rotor.save_cache(cache, file, model)

    def full(*given: object, **named: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rotor.checkpoint.cache_file.save_file", full)
    with pytest.raises(CheckpointError, match=r"a: writing failed: .*No space left on device") as caught:
        rotor.save_cache(cache, file, model)
    assert caught.value.hint == "Nothing was changed there."
    assert torch.equal(rotor.saved_inputs(file)["input_ids"], ids)
    assert [*file.parent.iterdir()] == [file]


def test_of_two_writers_one_is_refused(to_replace: Any) -> None:
    model, cache, file, ids = to_replace
    with exclusive(file), pytest.raises(UsageError, match="a: in use by another process"):
        rotor.save_cache(cache, file, model)
    assert torch.equal(rotor.saved_inputs(file)["input_ids"], ids)


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.parametrize("where", ["save_file", "os.replace"])
def test_a_killed_writer_leaves_the_old_file(where: str, to_replace: Any) -> None:
    """While it writes, and just before the new file takes its name; the next writer goes on."""
    model, cache, file, ids = to_replace
    child = os.fork()
    if not child:
        place = "rotor.checkpoint.cache_file.save_file" if where == "save_file" else where
        pytest.MonkeyPatch().setattr(place, lambda *given, **named: os.kill(os.getpid(), signal.SIGKILL))
        rotor.save_cache(cache, file, model)
        os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert torch.equal(rotor.saved_inputs(file)["input_ids"], ids)
    rotor.save_cache(cache, file, model)
    assert rotor.load_cache(file, model).get_seq_length() == PROMPT + sum(REST)
    assert [*file.parent.iterdir()] == [file]


def test_a_missing_zstandard_is_one_line(to_replace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache, file, _ = to_replace
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UsageError, match="levels fast and small need the Python package zstandard") as caught:
        rotor.save_cache(cache, file, model, level="fast")
    assert "rotor[store]" in caught.value.hint
    rotor.save_cache(cache, file, model)


@pytest.fixture(scope="module")
def out(demo_run: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model, compressed."""
    folder = tmp_path_factory.mktemp("out") / "out"
    rotor.export(demo_run("rotor").folder, folder, compression=0.8, measure=False)
    return folder


TEXT = "import argparse\nimport json\n\n\ndef main() -> None:\n" + "".join(
    f"    parser.add_argument('--option{n}', type=int, default={n % 7})\n" for n in range(12)
)


@pytest.mark.parametrize("level", mostly_nightly(LEVELS, lambda level: level == "small"))
def test_generate_goes_on_from_a_file(level: str, out: Path, tmp_path: Path, capsys: Any) -> None:
    """The tokens are those of the prompt read anew; so are those of a prompt that has a part of the file alone."""
    needs(level)
    file = tmp_path / "session"
    options = ["--max-new-tokens", "12", "--json", "--dtype", "float32"]
    saving = [*options, "--save-cache", file, "--cache-level", level]
    first = json.loads(command(capsys, "generate", out, TEXT, *saving)[1])
    assert "cached_tokens" not in first
    saved = rotor.saved_inputs(file)["input_ids"].shape[1]
    assert saved == first["prompt_tokens"] + first["new_tokens"] - 1
    longer, other = first["text"] + "\n    given = parser.parse_args()\n", TEXT + "    return None\n"
    for prompt, least in ((TEXT, first["prompt_tokens"] - 1), (longer, saved - 2), (other, first["prompt_tokens"] - 3)):
        code, printed, error = command(capsys, "generate", out, prompt, *options, "--cache-file", file)
        assert code == 0, error
        found, expected = json.loads(printed), json.loads(command(capsys, "generate", out, prompt, *options)[1])
        assert least <= found.pop("cached_tokens") < found["prompt_tokens"]
        assert found == expected
    assert command(capsys, "generate", out, longer, *saving, "--cache-file", file)[0] == 0
    assert rotor.saved_inputs(file)["input_ids"].shape[1] > saved


def test_what_generate_refuses(out: Path, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "session"
    assert command(capsys, "generate", out, TEXT, "--max-new-tokens", "1", "--save-cache", file)[0] == 0
    for code, text, *options in (
        (2, "its first token is not that of the prompt", "zebra zebra", "--cache-file", file),
        (2, "no such file", TEXT, "--cache-file", tmp_path / "none"),
        (2, "nothing is saved", TEXT, "--cache-level", "fast"),
        (2, "is no saved cache, and is not replaced", TEXT, "--save-cache", out / "config.json"),
        (2, "the cache of several processes is not in one file", TEXT, "--save-cache", file, "--parallel", "sequence"),
        (2, "the model is no compressed checkpoint", TEXT, "--save-cache", file, "--model"),
    ):
        source = options[-1] == "--model"
        expect_error(capsys, code, text, "generate", DEMO_MODEL if source else out, *options[: len(options) - source])
    data = file.read_bytes()
    file.write_bytes(data[:-9])
    expect_error(capsys, 1, "is no saved cache, or was cut", "generate", out, TEXT, "--cache-file", file)
