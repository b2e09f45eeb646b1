"""A whole model of an 8B's sizes decoding, with random weights and a cache of random rows: tokens a second.

Nothing that it says means anything, and all takes the time that it takes. A step is replayed from a CUDA graph, or
compiled by `torch.compile`. The uncompressed model attends as fast as PyTorch lets it: query heads that share keys are
rows of one query to SDPA, over a cache without an empty rest, so that no mask is needed and no key is copied.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    LlamaConfig,
    StaticCache,
)

from rotor.checked import JsonObject
from rotor.checkpoint.families import attention_shape, find_family
from rotor.tools.bench.records import quartiles

from .loads import LOADS
from .plan import Record
from .subjects import gpu_subjects

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LLAMA3_8B = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
}  # fmt: skip

UNCOMPRESSED = "uncompressed"

DTYPE = torch.bfloat16

LARGEST_TOKENS = 32768
"""Cached tokens of each sequence of the largest batch."""

SPARE = 0.04
"""Share of the GPU's memory left for what a step takes besides weights and cache."""

STEPS = 10

GROUPED = "rotor_bench_grouped"
"""Name of `grouped_heads` among transformers' attention functions."""


def grouped_heads(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, **named: Any
) -> tuple[Tensor, None]:
    """SDPA of one new token over a full cache, the query heads of a KV head as rows of one query."""
    batch_size, num_heads, _, head_dim = query.shape
    rows = query.reshape(batch_size, key.shape[1], -1, head_dim)
    output = functional.scaled_dot_product_attention(rows, key, value, scale=named.get("scaling"))
    return output.reshape(batch_size, 1, num_heads, head_dim), None


def _no_mask(*_: object, **__: object) -> None:
    return None


def random_model(name: str, device: torch.device, sizes: JsonObject) -> Any:
    """A Llama of these sizes, all of whose layers have a layout's latents; or UNCOMPRESSED."""
    from rotor.runtime.replacement import replace_attention

    AttentionInterface.register(GROUPED, grouped_heads)
    AttentionMaskInterface.register(GROUPED, _no_mask)
    config = LlamaConfig(**sizes)
    with device, _default_dtype(DTYPE):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=DTYPE, attn_implementation=GROUPED)
        if name != UNCOMPRESSED:
            shape, layout = attention_shape(config), gpu_subjects()[name].layout
            layouts = dict.fromkeys(range(shape.num_layers), layout)
            replace_attention(model, find_family(config), shape, layouts, frozenset())
    generator = torch.Generator(device).manual_seed(0)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("norm.weight"):
            parameter.data.fill_(1.0)
        else:
            parameter.data.normal_(std=0.02, generator=generator)
    return model.eval()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Decoding:
    """Steps of a model over a cache that is full but for the new token of each sequence.

    The first step makes the cache, empty; then its rows are drawn at random. finite: whether its logits were.
    """

    finite = False

    def __init__(self, model: PreTrainedModel, batch_size: int, tokens: int) -> None:
        self.model, self.device, self.tokens = model, model.device, tokens
        self.cache: Any = StaticCache(config=model.config, max_cache_len=tokens)
        self.ids = torch.zeros(batch_size, 1, dtype=torch.long, device=self.device)
        self.positions = torch.zeros(batch_size, 1, dtype=torch.long, device=self.device)
        self.forward: Callable[..., Any] = model
        self.step()
        generator = torch.Generator(self.device).manual_seed(0)
        for rows in self._rows():
            if rows.dtype == torch.uint8:
                rows.random_(0, 256, generator=generator)
            else:
                rows.normal_(generator=generator)
        self.positions.fill_(tokens - 1)
        self.rewind()

    def _rows(self) -> list[Tensor]:
        return [rows for layer in self.cache.layers for rows in (layer.keys, layer.values)]

    @property
    def cache_bytes(self) -> int:
        return sum(rows.nbytes for rows in self._rows())

    def step(self) -> Tensor:
        """Logits, [batch_size, 1, vocabulary]."""
        logits: Tensor = self.forward(
            input_ids=self.ids, position_ids=self.positions, past_key_values=self.cache, use_cache=True
        ).logits
        return logits

    def rewind(self) -> None:
        """Make room for the last token again."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.tokens - 1)

    def seconds(self, call: Callable[[], object], steps: int | None = None) -> dict[str, float]:
        found = []
        for _ in range(steps or STEPS):
            self.rewind()
            self._wait()
            start = time.perf_counter()
            call()
            self._wait()
            found.append(time.perf_counter() - start)
        return quartiles(found)

    def captured(self) -> Callable[[], object]:
        """A step as a CUDA graph; where there is no GPU as it is."""
        self.rewind()
        self.finite = bool(self.step().isfinite().all())
        self.rewind()
        if self.device.type != "cuda":
            return self.step
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        replay: Callable[[], object] = graph.replay
        return replay

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def decoding(
    name: str,
    loads: list[str],
    largest: bool = True,
    device: str = "cuda",
    sizes: JsonObject | None = None,
    lengths: dict[str, list[int]] | None = None,
) -> Iterator[Record]:
    """Steps of a model at some loads, then of the largest batch that fits."""
    with torch.inference_mode():
        start = time.perf_counter()
        model = random_model(name, torch.device(device), sizes or LLAMA3_8B)
        yield {"layout": name, "row": "made", "made_s": round(time.perf_counter() - start, 1)}
        row_bytes = 0.0
        for load in loads:
            own = (lengths or LOADS)[load]
            run = Decoding(model, len(own), own[0])
            row_bytes = run.cache_bytes / sum(own)
            yield {"load": load, **_about(name, run), "row": "as it is", **_rates(run, run.seconds(run.step, 3))}
            graph = run.captured()
            rates = {**_rates(run, run.seconds(graph)), "finite": run.finite}
            yield {"load": load, **_about(name, run), "row": "CUDA graph", **rates}
            del run, graph
            _release()
        if largest and device == "cuda":
            yield from _largest(name, model, row_bytes)


def _largest(name: str, model: PreTrainedModel, row_bytes: float) -> Iterator[Record]:
    """The batch that memory holds, by bytes; a twentieth less where a step does not fit beside it."""
    free, total = torch.cuda.mem_get_info()
    batch_size = int((free - SPARE * total) / (row_bytes * LARGEST_TOKENS))
    for _ in range(4):
        load = f"{batch_size} x 32K"
        try:
            run = Decoding(model, batch_size, LARGEST_TOKENS)
            yield {"load": load, **_about(name, run), "row": "largest batch", **_rates(run, run.seconds(run.step, 3))}
            return
        except torch.OutOfMemoryError:
            run = None  # type: ignore[assignment]
            _release()
            batch_size = min(batch_size - 1, int(0.95 * batch_size))
    yield {"layout": name, "row": "largest batch", "left_out": f"out of memory with {load}, too"}


def compiled(
    name: str, load: str, layers: int, device: str = "cuda", sizes: JsonObject | None = None
) -> Iterator[Record]:
    """Steps of a model of fewer layers, as a CUDA graph and by `torch.compile`, which makes graphs of its own."""
    with torch.inference_mode():
        sizes = {**(sizes or LLAMA3_8B), "num_hidden_layers": layers}
        model = random_model(name, torch.device(device), sizes)
        run = Decoding(model, len(LOADS[load]), LOADS[load][0])
        about = {"load": load, **_about(name, run), "layers": layers}
        yield {**about, "row": "CUDA graph", **_rates(run, run.seconds(run.captured()))}
        start = time.perf_counter()
        run.forward = torch.compile(model.forward, mode="reduce-overhead")
        for _ in range(3):
            run.rewind()
            run.step()
        took = time.perf_counter() - start
        yield {**about, "row": "torch.compile", "compile_s": took, **_rates(run, run.seconds(run.step))}


def _about(name: str, run: Decoding) -> Record:
    return {"layout": name, "model": "llama3-8b, random weights", "cache_bytes": run.cache_bytes}


def _rates(run: Decoding, seconds: dict[str, float]) -> Record:
    return {"seconds": seconds, "tokens_per_s": len(run.ids) / seconds["median"]}


def _release() -> None:
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def compile_model(name: str, device: str = "cuda", sizes: JsonObject | None = None) -> Iterator[Record]:
    """Every kernel of a model's step, launched once in a model of one layer: Triton's cache keeps what it compiles."""
    start = time.perf_counter()
    with torch.inference_mode():
        sizes = {**(sizes or LLAMA3_8B), "num_hidden_layers": 1, "vocab_size": 64}
        run = Decoding(random_model(name, torch.device(device), sizes), 8, 1024)
        run.step()
        run.seconds(run.step, 1)
    yield {"layout": name, "row": "model", "compile_s": time.perf_counter() - start}
