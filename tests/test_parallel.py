"""Sequence parallelism: several processes equal one, in every form of keys, group size and code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.folded_models import MIXED, Folding, folded, write_pair
from support.parallel_jobs import answers, different_inputs, load, sharded_answers, traffic, without_last
from support.parallel_processes import Processes
from support.paths import ROOT
from support.tiny_models import tiny_config
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText, DynamicCache, StaticCache

from rotor import RotorError
from rotor.checkpoint.layout import POST_ROPE, AttentionShape, GroupLayout, KeyForm, LayerLayout
from rotor.checkpoint.rows import NumberRow
from rotor.checkpoint.sizes import kv_bytes_per_token
from rotor.errors import UsageError
from rotor.models.compressed import CompressedCheckpoint
from rotor.parallel import sequence_parallel
from rotor.parallel.heads import group_parts, travel
from rotor.policies import cache_policy, stored_bytes
from rotor.runtime.steps import CacheRows
from rotor.tools.generation import continue_prompt

PRE = KeyForm(64)
CASES = {
    "post-1": ("llama", Folding(POST_ROPE, 1)),
    "post-2": ("qwen3", Folding(POST_ROPE, 2)),
    "pre-1": ("llama", Folding(PRE, 1)),
    "pre-2": ("gemma3_text", Folding(PRE, 2)),
    "none-1": ("gpt2", Folding()),
    "post-softcap": ("gemma2", Folding(POST_ROPE, 2)),
    "pre-mqa": ("falcon", Folding(PRE, 1)),
    "fast-joint": ("llama", Folding(KeyForm(4), 2, joint=True)),
}
"""Family, and how it is compressed; between them sliding windows, norms, biases, one head, a soft
cap, keys rotated within blocks."""


INDEX_BYTES = 8
"""Of a row that lies apart from its neighbours: its place in the sequence, in each layer."""

FLOAT32 = {"pre-2", "post-softcap"}
"""In these one process computes in float32: cosines by index within the window, logits under the soft cap."""


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    started = Processes(3, tmp_path_factory.mktemp("processes"))
    yield started
    started.close()


@pytest.fixture(scope="module")
def checkpoint(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """checkpoint(case, coded) -> its folder, of rows of codes or of numbers; made once."""
    made: dict[tuple[str, bool], Path] = {}

    def get(name: str, coded: bool = False) -> Path:
        if (name, coded) not in made:
            family, folding = CASES[name]
            rank = None if coded else 8
            folding = replace(folding, bits=MIXED if coded else None, rank=rank)
            made[name, coded] = write_pair(tiny(family), tmp_path_factory.mktemp(name) / "out", folding).coded
        return made[name, coded]

    return get


def prompt(batch_size: int, tokens: int) -> Tensor:
    return torch.randint(2, 4096, (batch_size, tokens), generator=torch.Generator().manual_seed(tokens))


def padded(tokens: int) -> Tensor:
    mask = torch.ones(2, tokens, dtype=torch.long)
    mask[0, : tokens // 3 + 1] = 0
    return mask


def check(got: dict[str, Any], expected: dict[str, Any], mask: Tensor | None, exact: bool = True) -> None:
    assert torch.equal(got["tokens"], expected["tokens"])
    real = torch.ones_like(got["logits"][..., 0], dtype=torch.bool) if mask is None else mask.bool()
    for name in ("logits", "steps", "chunk"):
        one, other = (found[name][real] if name == "logits" else found[name] for found in (got, expected))
        assert torch.isfinite(one).all()
        tolerance = 1e-9 if exact and name != "steps" else 5e-5  # generate() keeps logits in float32
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


ROWS = [(case, coded) for case in CASES for coded in (False, True)]


@pytest.mark.nightly
@pytest.mark.parametrize(("case", "coded"), ROWS, ids=lambda x: {False: "numbers", True: "codes"}.get(x, x))
def test_processes_equal_one(case: str, coded: bool, checkpoint: Any, processes: Processes) -> None:
    folder = str(checkpoint(case, coded))
    model = load(folder)
    for tokens, mask, count in [(23, padded(23), 3), (5, None, 3), (24, padded(24), 2)]:
        ids = prompt(1 if mask is None else 2, tokens)
        expected = answers(model, ids, mask, 5)
        for found in processes.run(sharded_answers, folder, ids, mask, 5, count=count):
            check(found, expected, mask, case not in FLOAT32)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "processes", "by_heads"),
    [(8, 8, 2, False), (8, 8, 3, True), (8, 8, 4, True), (32, 8, 4, False), (32, 8, 8, True)],
)
def test_heads_travel_where_that_is_less(heads: int, kv_heads: int, processes: int, by_heads: bool) -> None:
    """ZDC section 5.3: of four parts (Q, K, V and the outputs) a process sends all but its own, of rows all to all."""
    shape = AttentionShape(1, heads, kv_heads, 64, 64, 64)
    layout = LayerLayout(tuple(GroupLayout((i,), NumberRow(16), NumberRow(16)) for i in range(kv_heads)))
    found = travel(layout, shape, processes, 2)
    assert found.rows == (processes - 1) * kv_heads * 32 * 2
    assert found.heads == (processes - 1) / processes * (heads + kv_heads) * 32 * 2
    assert found.by_heads == by_heads
    assert travel(replace(layout, rope_block=16), shape, processes, 2).heads is None


def test_a_group_has_one_process() -> None:
    assert group_parts(8, 3) == [range(0, 2), range(2, 5), range(5, 8)]
    assert [len(part) for part in group_parts(2, 3)] == [0, 1, 1]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "case, coded",
    [("post-1", True), ("pre-mqa", False), ("none-1", False)],
)
def test_bytes_on_the_wire_are_those_of_the_layouts(
    case: str, coded: bool, checkpoint: Any, processes: Processes
) -> None:
    folder = checkpoint(case, coded)
    compressed = CompressedCheckpoint(folder)
    layouts, shape, tokens = compressed.layouts, compressed.shape, 17
    whole = load(str(folder))(prompt(1, tokens + 1), use_cache=True).past_key_values
    for count in (1, 2, 3):
        found = processes.run(traffic, str(folder), prompt(1, tokens), count=count)
        ways = [travel(layout, shape, count, 8) for layout in layouts]
        for kind, by_heads in (("rows", False), ("heads", True)):
            expected = tokens * sum(way.bytes_per_token for way in ways if way.by_heads == by_heads)
            assert sum(one["sent"].get(kind, 0) for one in found) == pytest.approx(expected, rel=0.06)
        if case == "none-1" and count == 3:
            assert expected > 0
        if coded or case == "pre-mqa":
            assert expected == 0
            assert sum(one["sent"].get("rows", 0) for one in found) == (count - 1) * tokens * kv_bytes_per_token(
                layouts, 8
            )
        each = shape.heads_per_kv * sum(  # an output and its log-sum-exp of every query head
            layout.group_size * sum(group.values.width + 1 for group in layout.groups) for layout in layouts
        )
        assert sum(one["sent"].get("partial", 0) for one in found) == count * (count - 1) * each * 8
        assert sum(found[0]["sizes"]) == stored_bytes(whole) + shape.num_layers * INDEX_BYTES * (tokens + 1)
        kept = [one["tokens"][0] for one in found]
        assert sum(kept) == tokens + 1
        assert max(kept) - min(kept) <= 2


@pytest.mark.nightly
def test_different_inputs_end_all(checkpoint: Any, processes: Processes) -> None:
    for found in processes.outcomes(different_inputs, str(checkpoint("post-1")), prompt(1, 9)):
        assert isinstance(found, UsageError)
        assert "process 1 was given 1 x 9 tokens from index 0" in found.message
        assert "expected the same token ids and the same mask in every process" in found.message


@pytest.mark.nightly
def test_a_process_that_hangs_or_dies_ends_the_others(checkpoint: Any, tmp_path: Path) -> None:
    folder, ids = str(checkpoint("post-1")), prompt(1, 9)
    some = Processes(2, tmp_path, timeout_s=5.0)
    try:
        waited, absent = some.outcomes(without_last, folder, ids, False)
        assert absent == "absent"
        bereaved, gone = some.outcomes(without_last, folder, ids, True)
        assert isinstance(gone, BrokenProcessPool)
        for found in (waited, bereaved):
            assert isinstance(found, RotorError)
            assert (
                "process 0 of 2, comparing the inputs: another process ended or did not answer in time" in found.message
            )
    finally:
        some.close()


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_what_cannot_be_spread_is_refused(checkpoint: Any, alone: None) -> None:
    model, ids = load(str(checkpoint("pre-1"))), prompt(2, 8)
    filled = model(ids, use_cache=True).past_key_values
    holes = torch.tensor([[0, 1, 2, 3, 7, 8, 9, 10]] * 2)
    cases = [
        ({"attention_mask": torch.ones(1, 1, 8, 8)}, r"attention_mask: got \[1, 1, 8, 8\], expected \[2, 8\]"),
        ({"attention_mask": torch.ones(2, 7)}, r"attention_mask: got \[2, 7\], expected \[2, 8\]"),
        ({"position_ids": holes}, "sequence 0: the tokens at .* but not by position_ids"),
        ({"logits_to_keep": torch.tensor([1])}, "logits_to_keep: expected a number of tokens"),
        ({"past_key_values": filled}, "was filled outside of sequence_parallel"),
        ({"past_key_values": StaticCache(model.config, max_cache_len=16)}, "a StaticCache cannot be split"),
    ]
    refused = pytest.raises(UsageError, match="keeps its cache by a policy")
    with cache_policy(model, "gear-4"), refused, sequence_parallel(model):
        pass
    model.model.layers[1].self_attn.rotary.depends_on_length = True
    with pytest.raises(UsageError, match="frequencies depend on the length"), sequence_parallel(model):
        pass
    model.model.layers[1].self_attn.rotary.depends_on_length = False
    with sequence_parallel(model) as parallel:
        for more, message in cases:
            with pytest.raises(UsageError, match=message):
                model(ids, **more)
        with pytest.raises(UsageError, match="is inside of another sequence_parallel"), sequence_parallel(model):
            pass
        with pytest.raises(UsageError, match="a layer was called outside of a forward pass"):
            model.model(ids)
        cache = model(ids, past_key_values=DynamicCache()).past_key_values
        assert cache.get_seq_length() == 8
        with pytest.raises(UsageError, match="assisted decoding"):
            cache.crop(-1)
        again = model(ids, use_cache=False).logits
    assert all(layer.store == CacheRows() for layer in parallel.layers)
    torch.testing.assert_close(model(ids).logits, again)
    with pytest.raises(UsageError, match=r"outside of sequence_parallel\(\)|whose positions are unknown"):
        model(ids[:, :1], past_key_values=cache)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bamba", "layers without attention, states beside it"),
        ("falcon_h1", "layers without attention, states beside it"),
        ("jamba", "layers without attention, states beside it"),
        ("llama4_text", "attend within chunks"),
        ("qwen3_vl", "reads more than text"),
    ],
)
def test_models_with_states_chunks_or_images_are_not_spread(name: str, message: str, alone: None) -> None:
    auto_class = AutoModelForImageTextToText if name == "qwen3_vl" else AutoModelForCausalLM
    model = folded(auto_class.from_config(tiny_config(name)), Folding(POST_ROPE, 2))
    with pytest.raises(UsageError, match=message) as error, sequence_parallel(model):
        pass
    assert error.value.hint == "Run it in one process."


def test_needs_processes_and_a_compressed_causal_model(checkpoint: Any, tiny: Any, tmp_path: Path) -> None:
    folder = str(checkpoint("pre-1"))
    with (
        pytest.raises(UsageError, match="which is not initialised"),
        sequence_parallel(load(folder)),
    ):
        pass
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for model in (load(str(tiny("llama"))), AutoModel.from_pretrained(folder)):
            with pytest.raises(UsageError, match="is not a compressed causal model"), sequence_parallel(model):
                pass
    finally:
        dist.destroy_process_group()


@pytest.mark.nightly
def test_the_command_says_what_one_process_says(checkpoint: Any) -> None:
    folder, text = checkpoint("pre-1", True), "def main(arguments):\n    return [argument for argument in arguments]\n"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    command = ["rotor", "generate", str(folder), text, "--parallel", "sequence", "--max-new-tokens", "8", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launcher, *command], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    expected, found = continue_prompt(folder, text, max_new_tokens=8), json.loads(done.stdout)
    assert found["text"] == expected["text"]
    indices = INDEX_BYTES * CompressedCheckpoint(folder).shape.num_layers * (found["prompt_tokens"] + 8 - 1)
    assert found["kv_cache_bytes"] == expected["kv_cache_bytes"] + indices == sum(found["kv_cache_bytes_by_process"])
    assert len(found["kv_cache_bytes_by_process"]) == 2
    assert found["sent_bytes"]["rows"] > 0
