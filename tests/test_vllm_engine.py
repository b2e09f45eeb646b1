"""Compressed checkpoints in vLLM's engine: greedy tokens in float32 are transformers', whatever the engine does.

`make test-vllm` runs this in an environment with vLLM; elsewhere it is skipped. An engine is made once a checkpoint,
and asked everything: building it takes most of the time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.random_layers import NARROW, NARROW_BOTH, WIDE, WIDE_BOTH, Form, LayoutOf, groups_of, write_random
from support.runs import SHORT_TEXT
from support.tiny_models import CONFIGS, LLAMA3_ROPE, SIZES, build_tiny
from support.vllm_engine import (
    CACHE_BYTES,
    PROMPTS,
    cache_tokens,
    engine,
    expected_tokens,
    make_prompts,
    refused,
    served_elsewhere,
    served_tokens,
    tokens_in_passes,
)
from transformers import LlamaConfig

from rotor import calibrate, export
from rotor.checkpoint.families import attention_shape
from rotor.checkpoint.layout import POST_ROPE, ExactTokens, KeyForm, pre_rope
from rotor.checkpoint.rows import NumberRow
from rotor.models.compressed import CompressedCheckpoint
from rotor.models.source import Checkpoint
from rotor.policies import find_policy
from rotor.vllm.shards import padded_rows

pytestmark = pytest.mark.vllm


def joint(size: int, form: Form) -> LayoutOf:
    """Joint groups of `size` KV heads (0: all of them)."""
    return groups_of(size, form, (WIDE_BOTH, None), (NARROW_BOTH, None))


def numbers(size: int, form: Form) -> LayoutOf:
    return groups_of(size, form, (NumberRow(16), NumberRow(12)), (NumberRow(12), NumberRow(8)))


ROTOR = joint(2, KeyForm(64))
CASES: dict[str, tuple[str, LayoutOf | list[LayoutOf], str]] = {
    "llama, joint, T 64": ("llama", ROTOR, "qkvo"),
    "llama, joint, T 8": ("llama", joint(2, KeyForm(8)), ""),
    "llama, joint, pre": ("llama", joint(1, pre_rope), "qo"),
    "llama, apart, post": ("llama", groups_of(1, POST_ROPE, (WIDE, NARROW), (NARROW, NARROW)), "qkvo"),
    "llama, numbers, post": ("llama", numbers(1, POST_ROPE), "qkvo"),
    "llama, numbers beside codes": ("llama", [numbers(2, pre_rope), joint(4, KeyForm(16))], "qkvo"),
    "gpt2, joint": ("gpt2", joint(2, POST_ROPE), "qkvo"),
    "opt, numbers": ("opt", numbers(1, POST_ROPE), "qkvo"),
    "mistral, joint, T 64": ("mistral", joint(0, KeyForm(64)), ""),
    "mixtral, numbers, post": ("mixtral", numbers(1, POST_ROPE), ""),
    "qwen2, apart, T 32": ("qwen2", groups_of(2, KeyForm(32), (WIDE, NARROW)), "qkv"),
    "qwen2_moe, joint, pre": ("qwen2_moe", joint(2, pre_rope), "qkv"),
    "qwen3, joint, T 64": ("qwen3", joint(2, KeyForm(64)), ""),
    "qwen3, numbers, pre": ("qwen3", numbers(1, pre_rope), ""),
    "qwen3_moe, joint, post": ("qwen3_moe", joint(4, POST_ROPE), ""),
    "gemma2, apart, post": ("gemma2", groups_of(2, POST_ROPE, (WIDE, NARROW)), ""),
    "gemma2, joint, T 16": ("gemma2", joint(1, KeyForm(16)), ""),
    "gemma3, joint, rows of two widths": ("gemma3_text", [ROTOR, joint(4, KeyForm(64))], ""),
    "phi3, apart, T 16": ("phi3", groups_of(1, KeyForm(16), (WIDE, NARROW)), ""),
    "falcon, joint, T 64": ("falcon", joint(1, KeyForm(64)), ""),
    "falcon-40b, numbers, pre": ("falcon-40b", numbers(1, pre_rope), ""),
}
"""Every family that is served; scaled RoPE, partial and long RoPE, sliding windows shorter than the prompts and than
blocks, norms, experts, soft caps, two RoPEs, one KV head; rows of both kinds, ragged too."""


@pytest.fixture(scope="module")
def folder_of(tiny, tmp_path_factory: pytest.TempPathFactory):
    """folder_of(case) -> a checkpoint, made once."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp("random")
            family, layouts, biases = CASES[name]
            made[name] = write_random(tiny(family), folder / "out", layouts, biases)
        return made[name]

    return get


@pytest.fixture(scope="module")
def expected():
    """expected(folder) -> transformers' tokens, made once."""
    known: dict[Path, list[list[int]]] = {}

    def get(folder: Path) -> list[list[int]]:
        if folder not in known:
            known[folder] = expected_tokens(folder)
        return known[folder]

    return get


CHUNKS = {"max_num_batched_tokens": 64, "enable_chunked_prefill": True}


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_transformers(name: str, folder_of, expected) -> None:
    """Prompts of 1 to 200 tokens at once, in chunks beside requests that decode; and again, with what the first time
    left in the prefix cache. The cache holds as many tokens as the bytes of its rows say, without remainder but for the
    last page; where sliding windows and full attention share memory, those of the wider kind.
    """
    folder = folder_of(name)
    limit = 120 if name.startswith("phi3") else 240  # below and above it RoPE has other frequencies: vLLM decides once
    prompts = [prompt for prompt in PROMPTS if len(prompt) < limit - 10]
    tokens = expected(folder)[: len(prompts)]
    checkpoint = CompressedCheckpoint(folder)
    with engine(folder, max_model_len=limit, **CHUNKS) as llm:
        assert served_tokens(llm, prompts) == tokens
        assert served_tokens(llm, prompts) == tokens
        kinds = getattr(checkpoint.config, "layer_types", None)
        rows = padded_rows([sum(layout.row_bytes(4)) for layout in checkpoint.layouts], kinds)
        mixed = len(set(kinds or ())) > 1
        assert cache_tokens(llm) == CACHE_BYTES // (16 * (max(rows) if mixed else sum(rows))) * 16


EXACT = {
    "llama": ("llama", ROTOR, "qkvo", ExactTokens(3, 20)),
    "llama, no first tokens": ("llama", numbers(1, POST_ROPE), "", ExactTokens(0, 33)),
    "gemma2": ("gemma2", joint(1, KeyForm(16)), "", ExactTokens(3, 8)),
    "gpt2": ("gpt2", joint(2, POST_ROPE), "qkvo", ExactTokens(4, 20)),
    "qwen3": ("qwen3", numbers(2, KeyForm(64)), "", ExactTokens(4, 128)),
    "seed_oss": ("seed_oss", ROTOR, "qkvo", ExactTokens(4, 20)),
}
"""Layers with exact tokens: beside a window shorter than a page, without RoPE, more of them than most prompts have, in
transformers' own model.
"""


@pytest.mark.parametrize("name", EXACT)
def test_exact_tokens_are_kept_in_pages_of_their_own(name: str, tiny, tmp_path: Path) -> None:
    """Prompts attend exactly to what passes with them, and to the first and the newest tokens before. So tokens are
    those of transformers in the same passes: whole, in chunks, and behind a prefix that the cache holds."""
    family, layout_of, biases, exact = EXACT[name]
    folder = write_random(tiny(family), tmp_path / "out", lambda shape: replace(layout_of(shape), exact=exact), biases)

    def serve(times: int, **options) -> list[list[int]]:
        with engine(folder, kv_cache_memory_bytes=8 << 20, **options) as llm:
            return [served_tokens(llm) for _ in range(times)][-1]

    # Before vLLM changes transformers' class, where it has no model of its own.
    ends = iter([[(len(prompt) - 1) // 16 * 16] if len(prompt) > 16 else [] for prompt in PROMPTS])
    others = PROMPTS[:-1]  # the last prompt begins as another does, behind which it may have passed the first time
    expected = tokens_in_passes(folder, PROMPTS, lambda length: [])
    expected_in_chunks = tokens_in_passes(folder, PROMPTS, lambda length: list(range(64, length, 64)))
    expected_behind = tokens_in_passes(folder, others, lambda length: next(ends))

    whole = serve(1, enable_prefix_caching=False, max_num_batched_tokens=4096)
    assert whole == expected
    assert serve(1, enable_prefix_caching=False, max_num_batched_tokens=64, max_num_seqs=1) == expected_in_chunks
    if name == "llama":  # no place for exact tokens: prompts at once are exact all the same
        alone = {"disable_hybrid_kv_cache_manager": True, "enable_prefix_caching": False}
        assert [row[0] for row in serve(1, **alone, max_num_batched_tokens=4096)] == [row[0] for row in whole]
    assert serve(2, max_num_batched_tokens=4096)[:-1] == expected_behind


AT_ONCE = {"enable_prefix_caching": False, "max_num_batched_tokens": 4096, "kv_cache_memory_bytes": 8 << 20}
"""Whole prompts, which layers with exact tokens attend to exactly."""


@pytest.mark.parametrize("limit", [120, 240])
def test_longrope_is_of_one_length_as_vllm_chooses_it(limit: int, tiny, tmp_path: Path) -> None:
    """Of long sequences where max_model_len is beyond the switch at 128: what transformers has of such prompts."""
    folder = write_random(
        tiny("phi3"), tmp_path / "out", lambda shape: replace(ROTOR(shape), exact=ExactTokens(3, 20)), ""
    )
    prompts = make_prompts((130, 141, 200, 222) if limit == 240 else (1, 16, 63, 100))
    with engine(folder, max_model_len=limit, **AT_ONCE) as llm:
        assert served_tokens(llm, prompts) == expected_tokens(folder, prompts)


def test_prompts_of_1_to_1000_tokens_in_mixed_batches(tmp_path: Path) -> None:
    """Twelve requests whose prompts pass in chunks of at most 300 tokens a step, beside those that decode already, with
    no prefix cache and pages of a block of positions."""
    sizes = SIZES | {"max_position_embeddings": 1100}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CONFIGS, "llama", lambda: LlamaConfig(**sizes, rope_parameters=LLAMA3_ROPE))
        folder = write_random(build_tiny("llama", tmp_path / "source"), tmp_path / "out", ROTOR)
    prompts = make_prompts((1, 1000, 2, 15, 16, 63, 999, 17, 256, 257, 500, 777))
    limits = {"max_num_batched_tokens": 300, "enable_chunked_prefill": True}
    alone = {"enable_prefix_caching": False, "block_size": 64}
    with engine(folder, max_model_len=1024, kv_cache_memory_bytes=16 << 20, **limits, **alone) as llm:
        assert served_tokens(llm, prompts) == expected_tokens(folder, prompts)


CALIBRATED = [
    ("llama", "rotor"),
    ("llama", "fdc"),
    ("qwen3", "rotor"),
    ("gpt2", "rotor"),
    ("gemma", "rotor"),
    ("granite", "rotor"),
    ("granitemoe", "rotor"),
    ("apertus", "rotor"),
    ("nemotron", "rotor"),
    ("hyperclovax", "rotor"),
    ("stablelm", "rotor"),
    ("glm4", "rotor"),
    ("smollm3", "rotor"),
    ("jais2", "rotor"),
    ("starcoder2", "rotor"),
    ("phi", "rotor"),
    ("olmo2", "rotor"),
    ("olmo", "rotor"),
    ("glm", "rotor"),
    ("granitemoeshared", "rotor"),
    ("cwm", "rotor"),
    ("vaultgemma", "rotor"),
    ("gpt_oss", "rotor"),
    ("glm4_moe", "rotor"),
    ("ernie4_5", "rotor"),
    ("olmo3", "rotor"),
    ("cohere2", "rotor"),
    ("exaone4", "rotor"),
    ("olmoe", "rotor"),
    ("phimoe", "rotor"),
    ("hunyuan_v1_dense", "rotor"),
    ("ministral3", "rotor"),
    ("nanochat", "rotor"),
    ("cohere", "rotor"),
    ("dots1", "rotor"),
    ("hunyuan_v1_moe", "rotor"),
    ("exaone_moe", "rotor"),
    ("ministral", "rotor"),
    ("helium", "rotor"),
    ("solar_open", "rotor"),
    ("flex_olmo", "rotor"),
    ("mellum", "rotor"),
    ("ernie4_5_moe", "rotor"),
    ("afmoe", "rotor"),
]
"""Bases, codes and ranks of rotor's own, ragged rows; with exact tokens where the family needs them."""

SHORT = ["tokens.count=1024", "tokens.seq_len=64", "evaluation.seq_len=128", *SHORT_TEXT]
ROWS_ALONE = ["exact.first=0", "exact.newest=0"]


@pytest.mark.parametrize(("family", "recipe"), CALIBRATED)
def test_tokens_of_exported_checkpoints_are_those_of_transformers(
    family: str, recipe: str, tiny, tmp_path: Path
) -> None:
    source = tiny(family)
    rows = [] if attention_shape(Checkpoint(source).config).needs_exact else ROWS_ALONE
    overrides = [*SHORT, "ranks.multiple_of=4" if recipe == "fdc" else "codes.tokens=512", *rows]
    run = calibrate(source, tmp_path / "run", recipe, overrides)
    folder = export(run.folder, tmp_path / "out", compression=0.4, measure=False).folder
    expected = expected_tokens(folder)  # before vLLM changes transformers' class, where it has no model of its own
    with engine(folder, **AT_ONCE) as llm:
        assert served_tokens(llm) == expected


@pytest.mark.parametrize("name", ["llama, joint, T 64", "llama, numbers, post"])
def test_logits_in_bfloat16_are_as_close_to_float32_as_those_of_transformers(name: str, folder_of) -> None:
    """Log-probabilities of a prompt's tokens, in nats; twice transformers' own deviation is allowed."""
    from transformers import AutoModelForCausalLM
    from vllm import SamplingParams

    prompt = make_prompts((120, 120))[0]
    rows = torch.tensor([prompt])
    folder = folder_of(name)
    with torch.no_grad():
        exact, own = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)(rows).logits.float().log_softmax(-1)
            for dtype in (torch.float32, torch.bfloat16)
        )
    index = rows[0, 1:, None]
    exact, own = (x[0, :-1].gather(-1, index)[:, 0] for x in (exact, own))
    with engine(folder, dtype="bfloat16") as llm:
        parameters = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        output = llm.generate([{"prompt_token_ids": prompt}], parameters, use_tqdm=False)[0]
    got = torch.tensor([entry[t].logprob for entry, t in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)])
    assert (got - exact).norm() <= 2 * (own - exact).norm()


def changed(folder: Path, out: Path, change: Callable[[dict], None]) -> Path:
    """A copy with another config.json."""
    shutil.copytree(folder, out)
    config = json.loads((out / "config.json").read_text())
    change(config)
    (out / "config.json").write_text(json.dumps(config))
    return out


def test_what_cannot_be_served_is_refused_in_one_line(
    folder_of, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of("llama, joint, T 64")
    refused(folder, "--kv-cache-dtype fp8", kv_cache_dtype="fp8")
    refused(folder, "LoRA: adapters are trained on", enable_lora=True)
    refused(folder, "tensor parallel size 8: layer 0 has 2 group", tensor_parallel_size=8)
    of_olmo2 = {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"]}
    wide = changed(folder, tmp_path / "wide", lambda c: c.update(of_olmo2))
    refused(wide, "tensor parallel size 2: norms of this model are of all heads together", tensor_parallel_size=2)
    other = changed(folder, tmp_path / "other", lambda c: c.update(architectures=["InternLM2ForCausalLM"]))
    refused(other, "InternLM2ForCausalLM: not served compressed by vLLM")
    of_neox = {"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"]}
    neox = changed(folder, tmp_path / "neox", lambda c: c.update(of_neox))
    refused(neox, "GPTNeoXForCausalLM: not served compressed by vLLM: vLLM runs transformers' model without")
    policy = find_policy("gear-2").as_dict()
    evicting = changed(folder, tmp_path / "evicting", lambda c: c["quantization_config"].update(cache=policy))
    refused(evicting, "exported with a cache policy .gear., which vLLM's cache cannot keep")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.self_attn.v_proj.weight"]
    lacking = changed(folder, tmp_path / "lacking", lambda config: None)
    save_file(tensors, lacking / "model.safetensors", {"format": "pt"})
    refused(lacking, "layer 1: v_proj.weight is not in the checkpoint")

    from rotor.vllm.quantization import RotorQuantization
    from rotor.vllm.served import refusal

    monkeypatch.setattr(RotorQuantization, "refusal", refusal("0.1.0"))
    refused(folder, "vLLM 0.1.0 does not serve compressed checkpoints")
    assert RotorQuantization.override_quantization_method({"quant_method": "awq"}, None) is None


TWO = {"distributed_executor_backend": "mp"}
ALONE = {
    "tensor parallel": {"tensor_parallel_size": 2, **TWO},
    "pipeline parallel": {
        "pipeline_parallel_size": 2,
        **TWO,
        "enforce_eager": False,
        "compilation_config": {"mode": 2, "backend": "eager"},
    },
    "compiled, n-grams": {
        "enforce_eager": False,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3},
    },
}
"""Engines of several processes cannot share this one; after torch.compile, or numba, vLLM fails to make a second
engine in a process (it looks through all modules that are imported). With enforce_eager and a given size of the cache
its stages on a CPU have no place for what passes between them, whatever the model.
"""

CASES["llama, one group beside two"] = ("llama", [joint(4, KeyForm(8)), ROTOR], "qkvo")
"""Of which two ranks share the first layer's group, and have one each of the second's."""
CASES["arcee, one group beside two"] = ("arcee", [joint(4, KeyForm(8)), ROTOR], "qkvo")
"""In transformers' own model."""

PROGRAM = """
import json, sys
from support import vllm_engine as v
if __name__ == '__main__':
    with v.engine(sys.argv[1], **json.loads(sys.argv[2])) as llm:
        print('TOKENS' + json.dumps(v.served_tokens(llm)))
"""


@pytest.mark.parametrize("family", ["llama", "arcee"])
@pytest.mark.parametrize("name", ALONE)
def test_engines_in_processes_of_their_own_give_the_same_tokens(name: str, family: str, folder_of, expected) -> None:
    folder = folder_of(f"{family}, one group beside two")
    assert served_elsewhere(folder, PROGRAM, json.dumps(ALONE[name])) == [expected(folder)]


INTERPRETED = """
import json, sys
from support import vllm_engine as v
from rotor.kernels import append, attention

called = set()
for module, name in ((append, "append"), (attention, "attend_pages")):
    def spy(*a, inner=getattr(module, name), name=name, **k):
        called.add(name)
        return inner(*a, **k)
    setattr(module, name, spy)


def serve(folder):
    limits = {"max_num_batched_tokens": 32, "enable_chunked_prefill": True}
    with v.engine(folder, max_model_len=120, **limits) as llm:
        print("TOKENS" + json.dumps([v.served_tokens(llm, v.PROMPTS[1:5], 3), sorted(called)]))
    called.clear()


for folder in sys.argv[1:]:
    serve(folder)
"""


def test_kernels_in_the_interpreter_give_the_tokens_of_transformers(folder_of, expected) -> None:
    """Tokens after the second to fifth prompt, in steps of at most 32 tokens in which some decode and parts of several
    prompts follow them. TRITON_INTERPRET must be set from the start: a process of its own.
    """
    names = (
        "llama, joint, T 64",
        "llama, numbers, post",
        "gpt2, joint",
        "gemma2, joint, T 16",
        "qwen3, joint, T 64",
    )
    folders = [folder_of(name) for name in names]
    interpreter = {"TRITON_INTERPRET": "1", "ROTOR_ATTENTION": "triton"}
    found = served_elsewhere(folders[0], INTERPRETED, *map(str, folders[1:]), **interpreter)
    for folder, (tokens, called) in zip(folders, found, strict=True):
        assert tokens == [row[:3] for row in expected(folder)[1:5]]
        assert called == ["append", "attend_pages"]


def test_a_checkpoint_without_weights_is_served_as_with_them(tmp_path: Path) -> None:
    model = build_tiny("llama", tmp_path / "model")
    settings = ["tokens.count=512", "tokens.seq_len=64", "tokens.source=random", "codes.tokens=256"]
    run = calibrate(model, tmp_path / "run", "rotor", [*settings, *ROWS_ALONE])
    whole, apart = (
        export(run.folder, tmp_path / name, compression=0.4, measure=False, without_weights=name == "apart").folder
        for name in ("whole", "apart")
    )
    with engine(apart, **AT_ONCE) as llm:
        assert served_tokens(llm) == expected_tokens(whole)
