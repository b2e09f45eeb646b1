"""Prefixes stored outside of an engine, by vLLM's own example of a connector, which runs on a CPU."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from support.random_layers import WIDE_BOTH, groups_of, write_random
from support.vllm_engine import expected_tokens, make_prompts, refused, served_elsewhere

from rotor.checkpoint.layout import ExactTokens, KeyForm
from rotor.checkpoint.manifest import write_manifest

pytestmark = pytest.mark.vllm

PROMPTS = make_prompts((40, 100, 200))
FOUND = [32, 96, 192]
"""Tokens of each that the connector has: the whole pages of 16 before the last token."""

PROGRAM = """
import json, sys
from support import vllm_engine as v
from vllm.v1.core import kv_cache_utils

if __name__ == "__main__":
    with v.engine(sys.argv[1], **json.loads(sys.argv[2])) as llm:
        outputs = v.generated(llm, json.loads(sys.argv[3]))
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        found = [output.num_cached_tokens for output in outputs]
        print("TOKENS" + json.dumps([tokens, found, kv_cache_utils.NONE_HASH.hex()]))
"""


def with_store(store: Path, connector: str = "ExampleConnector", **options) -> dict:
    transfer = {
        "kv_connector": connector,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(store)},
    }
    return {"kv_transfer_config": transfer, "enable_prefix_caching": False, **options}


def served(folder: Path, options: dict, **environment: str) -> list:
    """Tokens, how many of each prompt were found in the store, and vLLM's first hash, of a process of its own."""
    return served_elsewhere(folder, PROGRAM, json.dumps(options), json.dumps(PROMPTS), **environment)[0]


@pytest.fixture(scope="module")
def checkpoints(tiny, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two of the same layouts; the second's rows of the second layer are others."""
    rotor = groups_of(2, KeyForm(64), (WIDE_BOTH, None))
    first = write_random(tiny("llama"), tmp_path_factory.mktemp("stores") / "first", rotor)
    second = Path(shutil.copytree(first, first.parent / "other"))
    tensors = load_file(second / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"] *= 1.5
    save_file(tensors, second / "model.safetensors", {"format": "pt"})
    for folder in (first, second):
        write_manifest(folder, "checkpoint")
    return [first, second]


def test_a_stored_prefix_is_found_after_a_restart_and_by_its_own_checkpoint_alone(
    checkpoints: list[Path], tmp_path: Path
) -> None:
    """Rows of each layer are copied by its name; with them the same tokens follow."""
    first, second = checkpoints
    expected, other = expected_tokens(first, PROMPTS), expected_tokens(second, PROMPTS)
    assert expected != other
    options = with_store(tmp_path / "store")
    tokens, found, seed = served(first, options)
    assert (tokens, found) == (expected, [0, 0, 0])
    files = sorted(path.name for path in (tmp_path / "store").rglob("*.safetensors"))
    assert files == sorted([f"model.layers.{i}.self_attn.attn.safetensors" for i in range(2)] * len(PROMPTS))
    moved = Path(shutil.copytree(first, tmp_path / "moved"))
    assert served(moved, options) == [expected, FOUND, seed]
    tokens, found, its_seed = served(second, options)
    assert (tokens, found) == (other, [0, 0, 0])
    assert its_seed != seed


TWICE = """
import json, sys
from support import vllm_engine as v

if __name__ == "__main__":
    with v.engine(sys.argv[1], disable_hybrid_kv_cache_manager=True) as llm:
        for _ in range(2):
            outputs = v.generated(llm, json.loads(sys.argv[2]))
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        print("TOKENS" + json.dumps([tokens, [output.num_cached_tokens for output in outputs]]))
"""


def test_pages_of_a_checkpoint_with_exact_tokens_come_back_as_they_were(tiny, tmp_path: Path) -> None:
    """For this connector vLLM keeps one group of pages, rows alone: what it finds after a restart is what the engine's
    own prefix cache would have found."""
    layout = groups_of(2, KeyForm(64), (WIDE_BOTH, None))
    folder = write_random(
        tiny("llama"), tmp_path / "out", lambda shape: replace(layout(shape), exact=ExactTokens(4, 24)), ""
    )
    write_manifest(folder, "checkpoint")
    options = with_store(tmp_path / "store")
    assert served(folder, options)[1] == [0, 0, 0]
    tokens, found, _ = served(folder, options)
    assert found == FOUND
    others = PROMPTS[:-1]  # the last prompt begins as another does, behind which it may have passed the first time
    assert [tokens[:-1], found[:-1]] == served_elsewhere(folder, TWICE, json.dumps(others))[0]


def test_stores_that_cannot_be_kept_apart_are_refused(checkpoints: list[Path], tmp_path: Path) -> None:
    refused(checkpoints[0], "FlexKVConnectorV1: stores prefixes by hashes", **with_store(tmp_path, "FlexKVConnectorV1"))
    bare = Path(shutil.copytree(checkpoints[0], tmp_path / "bare"))
    (bare / "manifest.json").unlink()
    refused(bare, "has no manifest.json, by whose digest prefixes are kept apart", **with_store(tmp_path))
