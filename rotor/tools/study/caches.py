"""Caches measured at equal bytes: each is really used, step by step, and all its bytes are counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from ...calibration.allocation.plan import RankPath
from ...checkpoint.layout import AttentionShape
from ...checkpoint.sizes import exact_bytes_of_sequence, uncompressed_kv_bytes_of_sequence
from ...errors import UnsupportedModelError
from ...models.compressible import CompressibleModel
from ...models.splits import SPLITS
from ...policies import LONG_TOKENS, EvictingLayer, Eviction, Policy, random_rows, stored_bytes
from ...policies.fitting import fit_cache_policy
from ...policies.quantiser import Quantiser
from ...progress import Advance, Progress
from ...runtime.attention import RotorAttention
from ...search.evaluation.cached import final_states_through_cache
from ...search.evaluation.fidelity import FidelityMeter
from ...search.evaluation.prompts import EvaluationContext
from ...search.plan_evaluator import PlanEvaluator

PROMPT_SHARE = 0.75
"""Share of a sequence of text that is the prompt: three quarters, as in GEAR's tasks (900 tokens of 1156 in GSM8k)."""

TEXT = ("token_accuracy", "ppl_ratio", "top1_agreement", "kl_div")
"""Metrics of text."""


@dataclass(frozen=True)
class CacheRecord:
    """A measured cache; `skipped` says why nothing was measured.

    family: name of what has one colour in plots.
    kl_div: nats a token against the uncompressed model. token_accuracy, ppl_ratio: ratios to it. top1_agreement: share.
    answers: by task, the mean probability of the answers over the uncompressed model's.
    kv_bytes_per_token: of a complete row, everything counted; mean_: its mean over the scored lengths; long_: of
    LONG_TOKENS tokens. compression: the share of the uncompressed cache's bytes removed, of a complete row.
    """

    name: str
    skipped: str = ""
    family: str = ""
    kl_div: float = 0.0
    token_accuracy: float = 0.0
    ppl_ratio: float = 0.0
    top1_agreement: float = 0.0
    answers: dict[str, float] = field(default_factory=dict)
    kv_bytes_per_token: float = 0.0
    mean_kv_bytes_per_token: float = 0.0
    long_kv_bytes_per_token: float = 0.0
    compression: float = 0.0

    @property
    def accuracy(self) -> float:
        """The smallest ratio to the uncompressed model: next tokens, perplexity, and each task's answers."""
        return min(self.token_accuracy, self.ppl_ratio, *self.answers.values())


class CacheBench:
    """A network and its text, shared by all caches that are measured on it.

    Args:
        network: in the dtype whose cache is the measure of compression.
        context: whose report split is read; its search split, if there is one, says which prompts the uncompressed
            model can answer. prompts: names of the metrics whose prompts are read, too.
        whole: bytes of a token in the uncompressed cache.
        samples: gives the text that policies are fitted to, [rows, seq_len].
    """

    def __init__(
        self,
        network: CompressibleModel,
        context: EvaluationContext,
        prompts: Sequence[str],
        whole: int,
        samples: Callable[[], Tensor],
        progress: Progress,
    ) -> None:
        context = replace(context, spec=replace(context.spec, metric="default"))
        self.network = network
        self.prompts = prompts
        self.whole = whole
        self.samples = samples
        self.splits = [name for name in SPLITS if name in context.rows]
        self.length = context.rows["report"].shape[1]
        self.meter = FidelityMeter(context, progress, prompt_share=PROMPT_SHARE, report=(*TEXT, *prompts))

    def measure(self, policy: Policy | None = None) -> dict[str, float | None]:
        """Values of the network as it is, compressed or not, with a cache; a policy that needs samples is fitted."""
        network = self.network
        if not self.meter.base:
            with network.uncompressed():
                for split in self.splits:
                    self.meter.measure_base(network, split)
        return self.meter.measure(network, "report", partial(_read, network, policy)).values

    def fitted(self, policy: Policy | None) -> Policy | None:
        """A policy, fitted to samples where it needs any."""
        if policy is None or not policy.needs_samples:
            return policy
        return fit_cache_policy(self.network.model, policy, self.samples())

    def record(self, name: str, policy: Policy | None = None) -> CacheRecord:
        """Measure the network as it is, compressed or not, with a cache; skipped where the policy cannot serve it."""
        network = self.network
        prompt = self.length - self.meter.text("report").shape[1]
        try:
            policy = self.fitted(policy)
            sizes = cache_bytes(network, prompt, self.length, policy)
            (long,) = cache_bytes(network, LONG_TOKENS, LONG_TOKENS, policy)
            values = self.measure(policy)
        except UnsupportedModelError as error:
            return CacheRecord(name, skipped=error.message)
        size = sizes[-1] / self.length
        after_prompt = list(enumerate(sizes[1:], prompt + 1))
        text: Any = {key: values[key] for key in TEXT}
        return CacheRecord(
            name,
            **text,
            answers={key: value for key in self.prompts if (value := values.get(key)) is not None},
            kv_bytes_per_token=size,
            mean_kv_bytes_per_token=sum(size / tokens for tokens, size in after_prompt) / len(after_prompt),
            long_kv_bytes_per_token=long / LONG_TOKENS,
            compression=1 - size / self.whole,
        )

    def of_policy(self, name: str, policy: Policy | None) -> CacheRecord:
        """A record of the uncompressed model."""
        with self.network.uncompressed():
            return self.record(name, policy)

    def of_plan(
        self, name: str, evaluator: PlanEvaluator, path: RankPath, removed: float, policy: Policy | None = None
    ) -> CacheRecord:
        """A record of the mildest plan that removes a share of the cache, with a policy on top or in a plain cache."""
        plan = path.at_compression(removed)
        if plan is None:
            least = (1 - path.plans()[-1].stored) * self.whole
            return CacheRecord(name, skipped=f"out of reach: the least is {least:.0f} bytes")
        evaluator.compress(plan, self.network)
        return self.record(name, policy)


def _read(network: CompressibleModel, policy: Policy | None, rows: Tensor, prefill: int, advance: Advance) -> Tensor:
    """Final hidden states of rows: behind a prompt, which is exact where the cache has exact tokens, one by one.

    Without a policy one pass over whole rows has the same result as steps through a cache.
    """
    if policy is None:
        with network.decoding(prefill):
            return network.final_states(rows, advance)
    return final_states_through_cache(network, rows, prefill, of_row(policy, rows.shape[1]), advance)


def of_row(policy: Policy | None, tokens: int) -> Policy | None:
    """Let a policy that evicts keep its share of a sequence of `tokens`, not of the prompt; others stay as they are."""
    if not isinstance(policy, Eviction) or policy.tokens is not None:
        return policy
    return replace(policy, tokens=max(1, round(policy.share * tokens)))


@torch.no_grad()
def sequence_bytes(shape: AttentionShape, dtype: torch.dtype, tokens: int, policy: Policy | None) -> int:
    """Bytes of the cache of an uncompressed model for a sequence: of each layer of the tokens that it holds.

    Args:
        dtype: of keys and values, as they are served. policy: that codes every token; fitted, where it needs samples.
    """
    held = shape.held_tokens(tokens)
    if policy is None:
        return uncompressed_kv_bytes_of_sequence(shape, dtype.itemsize, tokens)
    total, known = 0, dict[tuple[int, int, int, Any], int]()
    for layer, (stored_layer, kept) in enumerate(zip(policy.layers(shape.num_layers), held, strict=True)):
        levels = getattr(policy, "levels", ())  # layers that are fitted may store differently
        layer_shape = shape.layer(layer)
        key = kept, layer_shape.num_kv_heads, layer_shape.head_dim, layer if levels else None
        if key not in known:
            stored_layer.fill(
                *(random_rows(layer_shape.num_kv_heads, kept, layer_shape.head_dim, dtype) for _ in range(2))
            )
            known[key] = stored_bytes(Cache(layers=[stored_layer]))
        total += known[key]
    return total


def mean_sequence_bytes(shape: AttentionShape, dtype: torch.dtype, tokens: int, policy: Quantiser) -> float:
    """Bytes for each token of a sequence that is decoded to about `tokens`, as in `sequence_bytes`.

    Where tokens are coded in blocks, from none to nearly a block of them wait uncoded: the mean of both.
    """
    whole = tokens - tokens % policy.block or tokens
    lengths = (whole, whole - 1) if policy.block > 1 else (tokens,)
    return sum(sequence_bytes(shape, dtype, n, policy) / n for n in lengths) / len(lengths)


@torch.no_grad()
def cache_bytes(network: CompressibleModel, prompt: int, tokens: int, policy: Policy | None = None) -> list[int]:
    """Bytes of all layers after a prompt of random keys and values, and after each token that follows it, in a row
    of so many.

    Budgets that depend on the prompt (`squeeze`) are taken as equal, which they are in the mean.
    """
    policy = of_row(policy, tokens)
    plain = DynamicCache(config=network.config)
    network.model(input_ids=torch.zeros(1, 2, dtype=torch.int64, device=network.device), past_key_values=plain)
    likes: list[Any] = list(plain.layers)
    shapes = [(like.keys.shape, like.values.shape) for like in likes]
    empty = DynamicCache(config=network.config)
    layers: list[Any] = policy.layers(len(likes)) if policy else list(empty.layers)
    # Of layers that store alike, one of each shape is counted.
    apart = policy is not None and (isinstance(policy, Eviction) or policy.rows_only)
    counted = list(range(len(likes))) if apart else [shapes.index(shape) for shape in shapes]
    totals = [0] * (tokens - prompt + 1)
    rows = {
        i: [random_rows(s[1], tokens, s[3], likes[i].keys.dtype).to(network.device) for s in shapes[i]]
        for i in set(counted)
    }
    for index in rows if policy else ():
        module = network.family.attention_module(network.model, index)
        if isinstance(module, RotorAttention):
            layers[index].follow(module.layout, network.dtype)
    for place, (start, end) in enumerate(zip([0, *range(prompt, tokens)], range(prompt, tokens + 1), strict=True)):
        for index, (keys, values) in rows.items():
            layer = layers[index]
            states = (keys[:, :, start:end], values[:, :, start:end])
            if policy is None:
                Cache(layers=[layer]).update(*states, 0)
            elif start == 0 or not isinstance(layer, EvictingLayer):  # which keeps as many with each that comes
                layer.fill(*states)
        sizes = {index: stored_bytes(Cache(layers=[layers[index]])) for index in rows}
        totals[place] = sum(sizes[index] for index in counted)
    modules = [network.family.attention_module(network.model, index) for index in range(len(layers))]
    exact = [module.layout.exact if isinstance(module, RotorAttention) else None for module in modules]
    shape, itemsize = network.shape, network.dtype.itemsize
    kept = [exact_bytes_of_sequence(exact, shape, itemsize, end) for end in range(prompt, tokens + 1)]
    return [sum(both) for both in zip(totals, kept, strict=True)]
