"""Shared fixtures: tiny models with random weights, and runs on the bundled model."""

from __future__ import annotations

import math
import resource
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from shortcuts import (
    DEMO_MODEL,
    ROOT,
    figures_as_ever,
    figures_only_where_asked,
    long_texts_encoded_once,
    one_trial_of_the_bundled_tokenizer,
    plots_as_they_fall,
)
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from rotor.calibration.calibrate import calibrate
from rotor.calibration.run import Run
from rotor.cli import console
from rotor.format.manifest import NO_DIGEST, Manifest, write_manifest
from rotor.models.checkpoint import Checkpoint
from rotor.models.layerwise import LayerwiseModel
from rotor.models.loading import load_model
from rotor.rewriting.compressible import CompressibleModel

settings.register_profile("bounded", max_examples=40, derandomize=True)
settings.register_profile("fuzz", max_examples=2000, print_blob=True)
settings.load_profile("bounded")  # unless --hypothesis-profile=fuzz says otherwise

console.SECONDS_BETWEEN_LINES = math.inf  # no test goes by how busy the machine is

COMMON = {
    "vocab_size": 4096,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
}
SIZES = COMMON | {
    "intermediate_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "tie_word_embeddings": True,
}
IMPLIED_HEAD_DIM = {k: v for k, v in SIZES.items() if k != "head_dim"} | {"hidden_size": 128}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(36)],
    "long_factor": [2.0 + 0.3 * i for i in range(36)],
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 128,
}
FALCON = COMMON | {"hidden_size": 64, "num_attention_heads": 4}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES, attention_bias=True, rope_parameters=LLAMA3_ROPE),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=12),
    "mixtral": lambda: MixtralConfig(
        **SIZES | {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 48},
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "qwen2": lambda: Qwen2Config(**IMPLIED_HEAD_DIM),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **IMPLIED_HEAD_DIM | {"tie_word_embeddings": False},
        **MOE,
        shared_expert_intermediate_size=32,
        mlp_only_layers=[1],
    ),
    "qwen3": lambda: Qwen3Config(**SIZES),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SIZES, **MOE),
    "phi3": lambda: Phi3Config(
        **COMMON | {"hidden_size": 192},
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=2,
        original_max_position_embeddings=128,
        rope_parameters=LONGROPE,
    ),
    "gemma2": lambda: Gemma2Config(
        **SIZES, sliding_window=12, attn_logit_softcapping=2.0, final_logit_softcapping=10.0, query_pre_attn_scalar=24
    ),
    "gemma3_text": lambda: Gemma3TextConfig(
        **SIZES,
        sliding_window=12,
        layer_types=["sliding_attention", "full_attention"],
        query_pre_attn_scalar=24,
    ),
    "gpt_neox": lambda: GPTNeoXConfig(
        **COMMON | {"hidden_size": 160}, num_attention_heads=2, intermediate_size=64, rotary_pct=0.25
    ),
    "opt": lambda: OPTConfig(
        **COMMON | {"hidden_size": 160, "pad_token_id": 1}, num_attention_heads=2, ffn_dim=64, word_embed_proj_dim=64
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=4096, bos_token_id=0, eos_token_id=0, n_embd=64, n_layer=2, n_head=4, n_positions=256
    ),
    "falcon": lambda: FalconConfig(**FALCON),
    "falcon-40b": lambda: FalconConfig(**FALCON, new_decoder_architecture=True, num_kv_heads=2),
    "falcon-rw": lambda: FalconConfig(**FALCON, multi_query=False, parallel_attn=False, bias=True),
}
"""One tiny config a family, and one a layout of Falcon's fused projection.

Between them: biases, tied embeddings, scaled RoPE (llama, phi3), partial rotary (phi3, gpt_neox), sliding windows
shorter than the sequences, per-head norms, two RoPEs (gemma3_text), a soft cap, no RoPE, Conv1D, one KV head (falcon),
a dense layer among sparse ones (qwen2_moe), head_dim 48, 80 and 96, and other than hidden_size / num_attention_heads.
"""

NO_ROPE = frozenset({"gpt2", "opt"})


def build_tiny(family: str, folder: Path, dtype: torch.dtype = torch.float32, **save: object) -> Path:
    """A tiny model with random weights large enough that attention is not uniform; biases and norms random too."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family]())
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name or "ln_" in name:
                parameter.add_(0.2 * noise)
            elif parameter.dim() == 1:
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(noise * (1.5 / parameter.shape[-1] ** 0.5))
    model.to(dtype).save_pretrained(folder, **save)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, folder / name)
    return folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes minutes in one process, so that no worker is left with it alone at the end."""
    items.sort(key=lambda item: item.path.name != "test_kernels.py")


@pytest.fixture(scope="session", autouse=True)
def shortcuts() -> Iterator[None]:
    with (
        figures_only_where_asked(),
        plots_as_they_fall(),
        one_trial_of_the_bundled_tokenizer(),
        long_texts_encoded_once(),
    ):
        yield


@pytest.fixture(scope="module")
def figures(shortcuts: None) -> Iterator[None]:
    """Reports with figures, for the rest of a module."""
    with figures_as_ever():
        yield


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory):
    """tiny(family) -> folder of a tiny float32 model, built once a session."""
    built: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in built:
            built[family] = build_tiny(family, tmp_path_factory.mktemp("models") / family)
        return built[family]

    return get


EXTRA_BYTES = 3 << 30
"""Address space that the mutations may take beyond what the process has."""


@pytest.fixture
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


FAST_EVALUATION = [
    "evaluation.seq_len=128",
    "evaluation.search_tokens=1024",
    "evaluation.report_tokens=1024",
    "evaluation.lookup_prompts=8",
    "evaluation.copy_prompts=8",
    "search.resolution=0.1",
]
"""Overrides for tests that need a measured table but not a precise one."""

SHORT_TEXT = [
    "evaluation.source=text",
    f"evaluation.path={ROOT / 'LICENSE'}",
    "evaluation.search_tokens=512",
    "evaluation.report_tokens=512",
    "evaluation.lookup_prompts=8",
    "evaluation.copy_prompts=8",
]
"""And for those that need some measurement: a text that is tokenised in no time, and few prompts."""


@pytest.fixture(scope="session")
def demo_run(tmp_path_factory: pytest.TempPathFactory):
    """demo_run(recipe) -> a run of the bundled model with few tokens, calibrated once a session; do not write to it."""
    runs: dict[str, Run] = {}

    def get(recipe: str) -> Run:
        if recipe not in runs:
            out = tmp_path_factory.mktemp("runs") / recipe
            runs[recipe] = calibrate(DEMO_MODEL, out, recipe, ["tokens.count=2048", *FAST_EVALUATION])
        return runs[recipe]

    return get


@pytest.fixture
def run_copy(demo_run, tmp_path: Path):
    """run_copy(recipe) -> a copy of the shared run that a test may write to."""

    def get(recipe: str) -> Run:
        shutil.copytree(demo_run(recipe).folder, tmp_path / "run", dirs_exist_ok=True)
        return Run.open(tmp_path / "run")

    return get


@pytest.fixture(scope="session")
def policy_models(tiny, tmp_path_factory: pytest.TempPathFactory):
    from policy_models import PolicyModels  # which imports from here

    return PolicyModels(tiny, tmp_path_factory)


@pytest.fixture(scope="session")
def demo() -> tuple[Checkpoint, LayerwiseModel]:
    """The bundled model's checkpoint and the model itself, in float32; do not change it."""
    checkpoint = Checkpoint(DEMO_MODEL)
    return checkpoint, LayerwiseModel.of(load_model(DEMO_MODEL, torch.device("cpu"), torch.float32))


def calibrated(model: Path, out: Path, domain: str, size: int | str, **bases: str) -> Run:
    """A run of a tiny model in a domain and group size; closed-form bases unless said otherwise."""
    overrides = [
        f"groups.domain={domain}",
        f"groups.size={size}",
        f"bases.qk={bases.get('qk', 'kq')}",
        f"bases.vo={bases.get('vo', 'kq')}",
        "tokens.count=1024",
        "tokens.seq_len=64",
        "ranks.multiple_of=4",
        *FAST_EVALUATION,
        *SHORT_TEXT,
    ]
    return calibrate(model, out, "fdc", overrides)


def reseal(folder: Path) -> str:
    """Give an edited run or checkpoint a manifest that fits, as somebody might who means harm; its new digest."""
    manifest = Manifest.read(folder)
    card = folder / "README.md"
    if card.is_file():
        card.write_text(card.read_text().replace(manifest.digest, NO_DIGEST))
    return write_manifest(folder, manifest.kind)


def in_memory(run: Run, rewrite_dtype: torch.dtype | None = None) -> CompressibleModel:
    """The run's model in float32 on the CPU, ready to be compressed."""
    return CompressibleModel(Checkpoint(run.model_folder), torch.device("cpu"), torch.float32, rewrite_dtype)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((got - expected).norm() / expected.norm()).detach())


def close(got: object, expected: object) -> bool:
    """Whether two values are equal but for rounding: where weights lie in memory decides how products are summed."""
    if isinstance(got, dict) and isinstance(expected, dict):
        return got.keys() == expected.keys() and all(close(got[key], expected[key]) for key in got)
    if isinstance(got, (list, tuple)) and isinstance(expected, (list, tuple)):
        return len(got) == len(expected) and all(map(close, got, expected))
    if isinstance(got, float) and isinstance(expected, float):
        return got == pytest.approx(expected, rel=1e-4, abs=1e-5)
    return got == expected
