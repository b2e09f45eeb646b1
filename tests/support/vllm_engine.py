"""Engines of vLLM for the tests, in this process, with tiny models and tiny caches; and what transformers makes of the
same prompts. Imported before vLLM is.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
pytest.importorskip("vllm", reason="needs vLLM in an environment of its own: make test-vllm")

import torch
from transformers import AutoModelForCausalLM, DynamicCache
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.model_executor.models import registry

from rotor import RotorError
from support.paths import ROOT

# What vLLM looks up of a model's class it looks up in a process that imports all of vLLM, so that CUDA is not asked.
registry._run_in_subprocess = lambda look_up: look_up()

CACHE_BYTES = 2 << 20
NEW_TOKENS = 8


def make_prompts(lengths: tuple[int, ...], vocabulary: int = 4096) -> list[list[int]]:
    """Random tokens; the last two prompts share the first half of one."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randint(2, vocabulary, (n,), generator=generator).tolist() for n in lengths]
    made[-1][: len(made[-2]) // 2] = made[-2][: len(made[-2]) // 2]
    return made


PROMPTS = make_prompts((1, 15, 16, 17, 40, 100, 129, 200))


@contextmanager
def engine(folder: Path, **options: Any) -> Iterator[LLM]:
    """An engine with pages of 16 tokens, which goes when the block ends."""
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 240,
        "block_size": 16,
        "kv_cache_memory_bytes": CACHE_BYTES,
        "max_num_seqs": 16,
    }
    made = LLM(model=str(folder), **(defaults | options))
    try:
        yield made
    finally:
        del made
        gc.collect()
        cleanup_dist_env_and_memory()


def generated(llm: LLM, prompts: list[list[int]], new_tokens: int = NEW_TOKENS) -> list[Any]:
    """vLLM's outputs, greedy, of all prompts at once."""
    parameters = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    return llm.generate([{"prompt_token_ids": p} for p in prompts], parameters, use_tqdm=False)


def served_tokens(llm: LLM, prompts: list[list[int]] = PROMPTS, new_tokens: int = NEW_TOKENS) -> list[list[int]]:
    """Greedy tokens after each prompt, all prompts at once."""
    return [list(output.outputs[0].token_ids) for output in generated(llm, prompts, new_tokens)]


def expected_tokens(
    folder: Path, prompts: list[list[int]] = PROMPTS, new_tokens: int = NEW_TOKENS, **options: Any
) -> list[list[int]]:
    """transformers' greedy tokens in float32, prompt by prompt."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
    found = []
    for prompt in prompts:
        row = torch.tensor([prompt])
        output = model.generate(
            row,
            attention_mask=torch.ones_like(row),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        found.append(output[0, len(prompt) :].tolist())
    return found


def tokens_in_passes(
    folder: Path, prompts: list[list[int]], passes: Callable[[int], list[int]], new_tokens: int = NEW_TOKENS
) -> list[list[int]]:
    """transformers' greedy tokens in float32 where prompts are given in several passes.

    Args:
        passes: length of a prompt -> where its passes end but for the last.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for prompt in prompts:
        row, cache, own = torch.tensor([prompt]), DynamicCache(config=model.config), []
        with torch.no_grad():
            for start, end in pairwise([0, *passes(len(prompt)), len(prompt)]):
                logits = model(row[:, start:end], past_key_values=cache).logits
            for _ in range(new_tokens):
                own.append(int(logits[0, -1].argmax()))
                logits = model(torch.tensor([own[-1:]]), past_key_values=cache).logits
        found.append(own)
    return found


def cache_tokens(llm: LLM) -> int:
    """Tokens of cache that the engine has room for."""
    cache = llm.llm_engine.vllm_config.cache_config
    return cache.num_gpu_blocks * cache.block_size


def metric(llm: LLM, name: str) -> Any:
    return {m.name: getattr(m, "value", None) for m in llm.get_metrics()}[name]


def refused(folder: Path, match: str, **options: Any) -> None:
    with pytest.raises(Exception, match=match) as found, engine(folder, **options):
        pass
    assert isinstance(found.value, RotorError) or match in str(found.value)


def served_elsewhere(folder: Path, program: str, *arguments: str, **environment: str) -> list:
    """Output that a program prints as JSON behind TOKENS, in a process of its own."""
    file = folder.parent / "program.py"
    file.write_text(program)
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, str(file), str(folder), *arguments],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=1800,  # of what hangs: the interpreter is slow on a busy machine
    )
    lines = [line.partition("TOKENS")[2] for line in done.stdout.splitlines() if "TOKENS" in line]
    assert lines, done.stdout[-3000:] + done.stderr[-3000:]
    return [json.loads(line) for line in lines]
