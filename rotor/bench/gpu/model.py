"""A step of decoding of a whole model of random weights: eager, compiled, and replayed from a CUDA graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, StaticCache

from ...format.layout import GroupLayout, LayerLayout
from ...runtime.cache import stored_bytes
from ...runtime.families import FAMILIES, attention_shape
from ...runtime.integration import replace_attention
from ..clock import Seconds
from ..graphs import WARM_UPS, capture
from .case import Case

MODES = ("eager", "graph", "compiled")
"""graph: a step with a static cache, captured and replayed. compiled: the same by torch.compile."""


NAMES = ("full", "after RoPE", "one latent")


@dataclass(frozen=True)
class ModelSizes:
    """The model, its layouts and their ranks, tokens in the cache by batch size; steps are timed one by one."""

    config: dict[str, Any]
    names: tuple[str, ...]
    rank: int
    wide: int
    tokens: dict[int, int]
    steps: int
    dtype: torch.dtype
    device: torch.device
    compiler: str

    @classmethod
    def of(cls, dry: bool) -> ModelSizes:
        if dry:
            toy = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 64, "num_hidden_layers": 1}
            heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
            return cls(toy | heads, NAMES[:2], 16, 16, {1: 8}, 1, torch.float32, torch.device("cpu"), "eager")
        llama = {"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256, "num_hidden_layers": 32}
        heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
        positions = {"max_position_embeddings": 131072}
        device = torch.device("cuda")
        return cls(
            llama | heads | positions, NAMES, 48, 256, {1: 32768, 8: 8192}, 16, torch.bfloat16, device, "inductor"
        )


def model_cases(sizes: ModelSizes) -> Iterator[Case]:
    """The cheapest to measure first: what has to be compiled comes last."""
    models = Models(sizes)
    for mode in MODES:
        for name in sizes.names:
            for batch_size, tokens in sizes.tokens.items():
                about = {"layout": name, "mode": mode, "batch_size": batch_size, "tokens": tokens}
                run = partial(_measured, models, name, mode, batch_size, tokens)
                yield Case(f"8B, {name}, {mode}, {batch_size} x {tokens}", run, about)


class Models:
    """Models of random weights by name; the last one is kept."""

    def __init__(self, sizes: ModelSizes) -> None:
        self.sizes = sizes
        self._name: str | None = None
        self._model: Any = None

    def __call__(self, name: str) -> Any:
        if name != self._name:
            self._name = self._model = None  # its memory
            self._name, self._model = name, random_model(self.sizes, name)
        return self._model


def random_model(sizes: ModelSizes, name: str) -> Any:
    """A Llama of random weights on the device; `full` as it is, else with compressed attention in every layer."""
    config = LlamaConfig(**sizes.config, tie_word_embeddings=False)
    torch.manual_seed(0)
    with torch.device(sizes.device):
        model = AutoModelForCausalLM.from_config(config, dtype=sizes.dtype).eval()
        if name != "full":
            shape, family = attention_shape(config), FAMILIES["llama"]
            layout = model_layout(sizes, name, shape.num_kv_heads)
            layouts = dict.fromkeys(range(shape.num_layers), layout)
            for module in replace_attention(model, family, shape, layouts, frozenset()):
                module.to(sizes.dtype)
                for parameter in module.parameters():
                    torch.nn.init.normal_(parameter, std=0.02)
    return model


def model_layout(sizes: ModelSizes, name: str, kv_heads: int) -> LayerLayout:
    """After RoPE, a group a head; or one latent of all heads before RoPE."""
    if name == "after RoPE":
        return LayerLayout("post", False, tuple(GroupLayout((h,), sizes.rank, sizes.rank) for h in range(kv_heads)))
    return LayerLayout("pre", True, (GroupLayout(tuple(range(kv_heads)), sizes.wide, sizes.wide),))


def _measured(models: Models, name: str, mode: str, batch_size: int, tokens: int) -> dict[str, Any]:
    """Time to the first token, and of every step after it, by the host's clock."""
    sizes, model = models.sizes, models(name)
    room = tokens + sizes.steps + WARM_UPS + 8
    cache: Any = DynamicCache(config=model.config)
    if mode != "eager":
        cache = StaticCache(config=model.config, max_cache_len=room)
    generator = torch.Generator(sizes.device).manual_seed(0)
    prompt = torch.randint(model.config.vocab_size, (batch_size, tokens), generator=generator, device=sizes.device)
    with torch.inference_mode():
        first = _timed(sizes.device, lambda: model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1))
        step = _stepper(model, prompt[:, :1].clone(), cache, mode, sizes)
        for _ in range(WARM_UPS):
            step()
        steps = [_timed(sizes.device, step) for _ in range(sizes.steps)]
    times = Seconds.of(steps)
    return {
        "seconds": vars(times),
        "time_to_first_token_s": first,
        "tokens_per_s": batch_size / times.median,
        "kv_cache_bytes": stored_bytes(cache),
        "weight_bytes": sum(p.nbytes for p in model.parameters()),
    }


def _stepper(model: Any, token: torch.Tensor, cache: Any, mode: str, sizes: ModelSizes) -> Callable[[], object]:
    """What makes one step of decoding; the cache grows by it."""

    def forward(token: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = model(token, past_key_values=cache, use_cache=True).logits
        return logits

    if mode == "compiled":
        return partial(torch.compile(forward, backend=sizes.compiler, dynamic=False), token)
    step = partial(forward, token)
    if mode == "graph" and sizes.device.type == "cuda":
        return capture([step]).replay
    return step


def _timed(device: torch.device, call: Callable[[], object]) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start
