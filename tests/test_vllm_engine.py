"""Compressed checkpoints in vLLM's engine: greedy tokens in float32 are transformers', whatever the engine does.

`make test-vllm` runs this in an environment with vLLM; elsewhere it is skipped.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from coded_models import Pair, write_pair
from conftest import CONFIGS, DEMO_MODEL, LLAMA3_ROPE, MOE, SHORT_TEXT, SIZES, build_tiny, calibrated
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, LlamaConfig, Qwen3MoeConfig
from vllm_engine import (
    CACHE_BYTES,
    PROMPTS,
    cache_tokens,
    engine,
    expected_tokens,
    make_prompts,
    metric,
    refused,
    served_elsewhere,
    served_tokens,
)

from rotor.bench.serving import ServingSettings, bench_serving
from rotor.calibration.calibrate import calibrate
from rotor.export.export import export
from rotor.format.layout import kv_bytes_per_token, uncompressed_kv_bytes_per_token
from rotor.models.compressed import CompressedCheckpoint
from rotor.runtime.cache import find_policy

pytestmark = pytest.mark.vllm

BOTH = ["plain", "coded"]
IN_BLOCKS = ("llama", "pre", 2, "joint", 4)
"""Latents `joint` or `apart`, of keys that are turned within blocks of so many positions."""
MADE_BY_HAND = [
    *((kind, "llama", domain, size) for kind in BOTH for domain in ("post", "pre") for size in (1, 2)),
    *((kind, "gpt2", "none", size) for kind in BOTH for size in (1, 2)),
    ("coded", "llama", "pre", 2, "joint"),
    ("coded", "gpt2", "none", 4, "joint"),
    ("coded", *IN_BLOCKS),
    ("coded", "qwen3", "pre", 2, "joint", 4),
    ("plain", "mistral", "pre", 1, "apart", 32),
    ("coded", "mistral", "pre", 1),
    ("plain", "mistral", "post", 2),
    ("plain", "qwen2", "post", 1),
    ("coded", "qwen2", "pre", 2),
    ("coded", "qwen2_moe", "pre", 2),
    ("plain", "qwen2_moe", "post", 1),
    ("coded", "qwen3", "pre", 2),
    ("plain", "qwen3", "post", 1),
    ("plain", "qwen3_moe", "post", 1),
    ("coded", "qwen3_moe", "pre", 2),
    ("coded", "gemma2", "post", 2),
    ("plain", "gemma2", "pre", 1),
    ("coded", "gemma3_text", "pre", 2),
    ("plain", "gemma3_text", "post", 1),
]
"""Numbers and codes in each domain and group size; and scaled RoPE, sliding windows shorter than the prompts, norms,
experts, a soft cap, two RoPEs, biases: every family in both domains, both group sizes, and both kinds of rows. Keys
turned within blocks: behind biases, behind a norm, and in blocks of two pages behind a sliding window.
"""

EXPORTED = [("phi3", "pre"), ("mixtral", "post"), ("opt", "post"), ("falcon", "pre"), ("falcon-40b", "post")]
"""Fused projections, partial and long RoPE, one KV head; bases and ranks of rotor's own, ragged rows."""


def build_wide(folder: Path) -> Path:
    """qwen3_moe with a hidden size that vLLM's experts on a CPU take: a multiple of 32."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CONFIGS, "qwen3_moe", lambda: Qwen3MoeConfig(**SIZES | {"hidden_size": 64}, **MOE))
        return build_tiny("qwen3_moe", folder)


@pytest.fixture(scope="module")
def pair(tiny, tmp_path_factory: pytest.TempPathFactory):
    """pair(family, domain, group_size) -> a Pair of checkpoints, of numbers and of codes, made once."""
    made: dict[tuple, Pair] = {}

    def get(*case) -> Pair:
        if case not in made:
            folder = tmp_path_factory.mktemp("pair")
            source = tiny(case[0]) if case[0] != "qwen3_moe" else build_wide(folder / "source")
            rope_block = case[4] if len(case) > 4 else 1
            joint = case[3:4] == ("joint",)
            made[case] = write_pair(source, folder, *case[1:3], joint=joint, rope_block=rope_block)
        return made[case]

    return get


def build_long(family: str, folder: Path, head_dim: int = 16) -> Path:
    """A model of more positions than the tiny ones have, with heads as wide as asked for."""
    hidden = 4 * head_dim
    configs = {
        "llama": lambda: LlamaConfig(
            **SIZES | {"max_position_embeddings": 1100, "head_dim": head_dim, "hidden_size": hidden},
            attention_bias=True,
            rope_parameters=LLAMA3_ROPE,
        ),
        "gpt2": lambda: GPT2Config(
            vocab_size=4096, bos_token_id=0, eos_token_id=0, n_embd=hidden, n_layer=2, n_head=4, n_positions=1100
        ),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CONFIGS, family, configs[family])
        return build_tiny(family, folder)


@pytest.fixture(scope="module")
def long_pair(tmp_path_factory: pytest.TempPathFactory):
    """long_pair(family, domain) -> a Pair of checkpoints with room for 1100 tokens, made once."""
    made: dict[tuple, Pair] = {}

    def get(family: str, domain) -> Pair:
        if (family, domain) not in made:
            folder = tmp_path_factory.mktemp("long")
            made[family, domain] = write_pair(build_long(family, folder / "source"), folder, domain, 1)
        return made[family, domain]

    return get


@pytest.fixture(scope="module")
def expected():
    """expected(folder, ...) -> transformers' tokens, made once."""
    known: dict[str, list[list[int]]] = {}

    def get(folder: Path, **options) -> list[list[int]]:
        key = f"{folder} {options}"
        if key not in known:
            known[key] = expected_tokens(folder, **options)
        return known[key]

    return get


@pytest.fixture(scope="module")
def exported(tiny, tmp_path_factory: pytest.TempPathFactory):
    """exported(family, domain) -> a checkpoint by way of calibration, made once."""
    made: dict[tuple, Path] = {}

    def get(family: str, domain: str) -> Path:
        if (family, domain) not in made:
            folder = tmp_path_factory.mktemp("exported")
            run = calibrated(tiny(family), folder / "run", domain, 1)
            made[family, domain] = export(run.folder, folder / "out", compression=0.4).folder
        return made[family, domain]

    return get


def folder_of(pair, kind: str, *case) -> Path:
    return getattr(pair(*case), kind)


@pytest.mark.parametrize("case", MADE_BY_HAND, ids=str)
def test_tokens_are_those_of_transformers(case, pair, expected) -> None:
    """Prompts of 1 to 200 tokens at once; and again, with what the first time left in the prefix cache.

    The cache holds as many tokens as the bytes of its rows say, without remainder but for the last page.
    """
    folder = folder_of(pair, *case)
    checkpoint = CompressedCheckpoint(folder)
    with engine(folder) as llm:
        assert served_tokens(llm) == expected(folder)
        assert served_tokens(llm) == expected(folder)
        if len(set(getattr(checkpoint.config, "layer_types", None) or [None])) == 1:
            size = kv_bytes_per_token(checkpoint.layouts, 4)
            assert cache_tokens(llm) == CACHE_BYTES // (16 * size) * 16


@pytest.mark.parametrize("case", EXPORTED, ids=str)
def test_tokens_of_exported_checkpoints_are_those_of_transformers(case, exported, expected) -> None:
    folder = exported(*case)
    limit = 120 if case[0] == "phi3" else 240  # below and above it RoPE has other frequencies, which vLLM decides once
    prompts = [p for p in PROMPTS if len(p) < limit - 10]
    with engine(folder, max_model_len=limit) as llm:
        assert served_tokens(llm, prompts) == expected_tokens(folder, prompts)


LONG = tuple(
    (kind, family, domain)
    for family, domain in (("llama", "post"), ("llama", "pre"), ("gpt2", "none"))
    for kind in BOTH
)


@pytest.mark.parametrize("case", LONG, ids=str)
def test_prompts_of_1_to_1000_tokens_in_mixed_batches(case, long_pair) -> None:
    """Twelve requests whose prompts pass in chunks of at most 300 tokens a step, beside those that decode already."""
    kind, family, domain = case
    folder = getattr(long_pair(family, domain), kind)
    prompts = make_prompts((1, 1000, 2, 15, 16, 63, 999, 17, 256, 257, 500, 777))
    limits = {"max_num_batched_tokens": 300, "enable_chunked_prefill": True}
    with engine(folder, max_model_len=1024, kv_cache_memory_bytes=16 << 20, **limits) as llm:
        assert served_tokens(llm, prompts) == expected_tokens(folder, prompts)


FEATURES = {
    "no prefix cache, pages of 64": {"enable_prefix_caching": False, "block_size": 64},
    "chunked prefill": {"max_num_batched_tokens": 32, "enable_chunked_prefill": True},
}
SOME = ("llama", "pre", 2)


@pytest.mark.parametrize("options", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("case", [("plain", *SOME), ("coded", *SOME), ("coded", *IN_BLOCKS)], ids=str)
def test_features_change_no_token(case, options, pair, expected) -> None:
    folder = folder_of(pair, *case)
    with engine(folder, **options) as llm:
        assert served_tokens(llm) == expected(folder)


def test_preempted_requests_begin_anew_and_end_alike(pair) -> None:
    """Room for one request and a half: the others wait, and lose their pages while they decode."""
    folder = folder_of(pair, "coded", *SOME)
    size = kv_bytes_per_token(pair(*SOME).layouts, 4)
    with engine(folder, kv_cache_memory_bytes=size * 352, disable_log_stats=False) as llm:
        long = make_prompts((90, 90, 95, 95))
        assert served_tokens(llm, long, 60) == expected_tokens(folder, long, 60)
        assert metric(llm, "vllm:num_preemptions") > 0


def test_windows_and_full_attention_of_other_widths_share_memory(exported, expected) -> None:
    """gemma3_text: a layer of each kind. A block is as wide as the wider kind, and serves either."""
    folder = exported("gemma3_text", "pre")
    checkpoint = CompressedCheckpoint(folder)
    assert checkpoint.config.layer_types == ["sliding_attention", "full_attention"]
    sizes = [sum(layout.row_bytes(4)) for layout in checkpoint.layouts]
    assert sizes[0] != sizes[1]
    with engine(folder) as llm:
        assert served_tokens(llm) == expected(folder)
        assert cache_tokens(llm) == CACHE_BYTES // (16 * max(sizes)) * 16


def test_rows_of_one_width_fill_the_blocks_of_both_kinds(tiny, tmp_path: Path) -> None:
    """gemma3_text, exported with ranks.rows=uniform: windows and full attention share blocks, and nothing is padded."""
    overrides = ["tokens.count=1024", "tokens.seq_len=64", "codes.tokens=512", "evaluation.seq_len=128", *SHORT_TEXT]
    run = calibrate(tiny("gemma3_text"), tmp_path / "run", "rotor", overrides)
    uniform = ["ranks.rows=uniform"]
    folder = export(run.folder, tmp_path / "out", compression=0.8, overrides=uniform, measure=False).folder
    (size,) = {sum(layout.row_bytes(4)) for layout in CompressedCheckpoint(folder).layouts}
    with engine(folder) as llm:
        assert served_tokens(llm) == expected_tokens(folder)
        assert cache_tokens(llm) == CACHE_BYTES // (16 * size) * 16


def test_keys_in_blocks_by_way_of_calibration(tiny, tmp_path: Path) -> None:
    """qwen3, by the recipe that does it; without the values' part of a latent the checkpoint is refused by its name."""
    overrides = ["tokens.count=1024", "tokens.seq_len=64", "codes.tokens=512", "evaluation.seq_len=128", *SHORT_TEXT]
    run = calibrate(tiny("qwen3"), tmp_path / "run", "rotor-post", [*overrides, "groups.rope_block=8"])
    folder = export(run.folder, tmp_path / "out", compression=0.6, measure=False).folder
    assert {layout.rope_block for layout in CompressedCheckpoint(folder).layouts} == {8}
    with engine(folder) as llm:
        assert served_tokens(llm) == expected_tokens(folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.self_attn.v_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    refused(folder, "layer 1: v_proj.weight is not in the checkpoint")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the bundled model, whose heads are such as vLLM's own attention takes."""
    folder = tmp_path_factory.mktemp("demo")
    run = calibrated(DEMO_MODEL, folder / "run", "pre", "all")
    return export(run.folder, folder / "out", compression=0.6).folder


@pytest.mark.parametrize(("family", "domain"), [("llama", "post"), ("llama", "pre"), ("gpt2", "none")])
def test_tokens_in_equal_memory_are_in_the_ratio_of_bytes(family: str, domain, tmp_path: Path) -> None:
    """By the engines' own counts of blocks, for numbers and for codes: the source beside them, whose heads are such as
    vLLM's own attention on a CPU takes.
    """
    source = build_long(family, tmp_path / "source", head_dim=32)
    made = write_pair(source, tmp_path, domain, 1)
    checkpoint = CompressedCheckpoint(made.coded)
    row_bytes = {
        source: uncompressed_kv_bytes_per_token(checkpoint.shape, 4),
        made.plain: kv_bytes_per_token(CompressedCheckpoint(made.plain).layouts, 4),
        made.coded: kv_bytes_per_token(checkpoint.layouts, 4),
    }
    tokens = {}
    for folder in row_bytes:  # one engine is gone before the next is made
        with engine(folder, block_size=32, kv_cache_memory_bytes=16 << 20) as llm:
            tokens[folder] = cache_tokens(llm)
    for folder, size in row_bytes.items():
        assert tokens[folder] / tokens[source] == pytest.approx(row_bytes[source] / size, rel=0.02)
    assert tokens[made.coded] > tokens[made.plain] > tokens[source]


@pytest.fixture(scope="module")
def elastic(pair) -> Path:
    """A checkpoint with all columns and two profiles, of which the smaller is the default."""
    made = pair("llama", "pre", 2)
    folder = Path(shutil.copytree(made.plain, made.plain.parent / "elastic"))
    config = json.loads((folder / "config.json").read_text())
    section = config["quantization_config"]
    stored = [[[g["qk_rank"], g["v_rank"]] for g in layer["groups"]] for layer in section["layers"].values()]
    smaller = [[[qk // 2, v // 2] for qk, v in layer] for layer in stored]
    section["profiles"], config["rank_profile"] = {"0.9": smaller, "0.97": stored}, "0.9"
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("chosen", [None, 0.97])
def test_profiles_are_chosen_as_in_transformers(chosen: float | None, elastic: Path, expected) -> None:
    options = {} if chosen is None else {"rank_profile": chosen}
    with engine(elastic, **({"hf_overrides": options} if options else {})) as llm:
        assert served_tokens(llm) == expected(elastic, **options)
        tokens = cache_tokens(llm)
    size = kv_bytes_per_token(CompressedCheckpoint(elastic).layouts, 4)
    assert tokens == CACHE_BYTES // (16 * size // (2 if chosen is None else 1)) * 16


@pytest.mark.parametrize("case", [("plain", *SOME), ("coded", *SOME), ("coded", *IN_BLOCKS)], ids=str)
def test_logits_in_bfloat16_are_as_close_to_float32_as_those_of_transformers(case, pair) -> None:
    """Log-probabilities of a prompt's tokens, in nats; twice transformers' own deviation is allowed."""
    from transformers import AutoModelForCausalLM
    from vllm import SamplingParams

    prompt = make_prompts((120, 120))[0]
    rows = torch.tensor([prompt])
    folder = folder_of(pair, *case)
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


def test_what_cannot_be_served_is_refused_in_one_line(pair, tmp_path: Path) -> None:
    folder = folder_of(pair, "coded", "llama", "pre", 2)
    refused(folder, "--kv-cache-dtype fp8", kv_cache_dtype="fp8")
    refused(folder, "LoRA: adapters are trained on", enable_lora=True)
    refused(folder, "rank_profile 0.9: this checkpoint stores one set of ranks", hf_overrides={"rank_profile": 0.9})
    refused(folder, "tensor parallel size 8: layer 0 has 2 group", tensor_parallel_size=8)
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"architectures": ["GraniteForCausalLM"]}))
    refused(other, "GraniteForCausalLM: not served compressed by vLLM")
    config["quantization_config"]["cache"] = find_policy("gear-2").as_dict()
    (other / "config.json").write_text(json.dumps(config))
    refused(other, "exported with a cache policy .gear., which vLLM's cache cannot keep")


def test_another_vllm_refuses_compressed_checkpoints_and_serves_all_others(
    pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rotor.plugins.vllm.quantization import RotorQuantization
    from rotor.plugins.vllm.versions import refusal

    monkeypatch.setattr(RotorQuantization, "refusal", refusal("0.1.0"))
    refused(folder_of(pair, "coded", "llama", "pre", 2), "vLLM 0.1.0 does not serve compressed checkpoints")
    assert RotorQuantization.override_quantization_method({"quant_method": "awq"}, None) is None


ALONE = {
    "tensor parallel": {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
    "pipeline parallel": {
        "pipeline_parallel_size": 2,
        "distributed_executor_backend": "mp",
        "enforce_eager": False,
        "compilation_config": {"mode": 2, "backend": "eager"},
    },
    "compiled": {"enforce_eager": False},
    "n-grams": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}},
}
"""Engines of several processes cannot share this one; after torch.compile, or numba, vLLM 0.32 fails to make a second
engine in a process (it looks through all modules that are imported). With enforce_eager and a given size of the cache
its stages on a CPU have no place for what passes between them, whatever the model.
"""


PROJECTED = [("tensor parallel", IN_BLOCKS), ("compiled", IN_BLOCKS), ("compiled", ("llama", "post", 1))]
"""Keys, and queries too, that go through a basis at run time: that is within what vLLM compiles."""


@pytest.mark.parametrize(("name", "case"), [*((name, SOME) for name in ALONE), *PROJECTED], ids=str)
def test_engines_in_processes_of_their_own_give_the_same_tokens(name: str, case, pair, expected) -> None:
    options, folder = ALONE[name], folder_of(pair, "coded", *case)
    program = (
        "import json, sys, vllm_engine as v\n"
        "if __name__ == '__main__':\n"
        "    with v.engine(sys.argv[1], **json.loads(sys.argv[2])) as llm:\n"
        "        print('TOKENS' + json.dumps(v.served_tokens(llm)))\n"
    )
    assert served_elsewhere(folder, program, json.dumps(options)) == [expected(folder)]


INTERPRETED = """
import json, sys, vllm_engine as v
from rotor.kernels import dispatch
from rotor.kernels.decode import launch
from rotor.kernels.prefill import launch as prefill
from rotor.kernels.projection import append

called = set()
dispatch.MAX_WIDTH = int(sys.argv[2])
for module, name in ((launch, "decode_attention"), (prefill, "prefill_attention"), (append, "pack_rows")):
    def spy(*a, inner=getattr(module, name), name=name, **k):
        called.add(name)
        return inner(*a, **k)
    setattr(module, name, spy)


def serve(folder):
    limits = {"max_num_batched_tokens": 32, "enable_chunked_prefill": True}
    with v.engine(folder, max_model_len=120, **limits) as llm:
        print("TOKENS" + json.dumps([v.served_tokens(llm, v.PROMPTS[1:5], 3), sorted(called)]))


for folder in (sys.argv[1], *sys.argv[3:]):
    serve(folder)
"""


def interpreted(folders: list[Path], widest: int = 512) -> list:
    """Tokens after the second to fifth prompt, in steps of at most 32 tokens in which some decode and parts of several
    prompts follow them, and the kernels called so far, for each checkpoint in turn.

    TRITON_INTERPRET must be set from the start: a process of its own.
    """
    interpreter = {"TRITON_INTERPRET": "1", "ROTOR_ATTENTION": "triton"}
    return served_elsewhere(folders[0], INTERPRETED, str(widest), *map(str, folders[1:]), **interpreter)


def test_kernels_in_the_interpreter_give_the_tokens_of_transformers(pair, expected) -> None:
    folders = [folder_of(pair, kind, *SOME) for kind in ("plain", "coded")]
    folders += [folder_of(pair, "coded", "llama", "post", 1), folder_of(pair, "coded", "gemma2", "post", 2)]
    folders.append(folder_of(pair, "coded", *IN_BLOCKS))
    for folder, (tokens, called) in zip(folders, interpreted(folders), strict=True):
        assert tokens == [row[:3] for row in expected(folder)[1:5]]
        assert called == ["decode_attention", "pack_rows", "prefill_attention"]


def test_what_the_kernels_do_not_serve_is_plain_pytorch(pair, exported, expected) -> None:
    """Latents above the widest, and keys before a RoPE that turns part of a head (phi3)."""
    wide, partial = folder_of(pair, "plain", "llama", "post", 1), exported("phi3", "pre")
    for folder, widest in ((wide, 8), (partial, 512)):
        ((tokens, called),) = interpreted([folder], widest)
        assert tokens == [row[:3] for row in expected(folder)[1:5]]
        assert called == []


def test_a_benchmark_serves_source_and_compressed_side_by_side(demo: Path) -> None:
    settings = ServingSettings((1, 3), prompt_tokens=40, new_tokens=4, cache_bytes=64 << 20, repetitions=1, seed=0)
    report = bench_serving(demo, settings, model=DEMO_MODEL, command="rotor bench")
    cache = report["cache"]
    assert cache["ratio_of_tokens"] == pytest.approx(cache["ratio_of_bytes"], rel=0.02)  # pages of 128 tokens
    assert [(r["row"], r["concurrency"]) for r in report["serving"]] == [
        (f"vllm, {row}", n) for n in (1, 3) for row in ("source", "compressed")
    ]
    assert all(check["error"] <= check["limit"] for check in report["checks"])
    assert all(r["tokens_per_s"] > 0 and r["time_to_first_token_s"]["median"] > 0 for r in report["serving"])
    assert report["serving"][0]["throughput_over_source"] == 1.0
    json.dumps(report, default=list)
