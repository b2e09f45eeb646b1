"""Caches measured at equal bytes: each is really used, step by step, and all its bytes are counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from ..allocation.plan import RankPath
from ..errors import DataError, UnsupportedModelError
from ..evaluation.cached import (
    LONGEST_CHUNK,
    greedy_through_cache,
    prefill_of,
    same_beginning,
    score_through_cache,
)
from ..evaluation.fitting import fit_cache_policy
from ..evaluation.metrics.distance import Prompts, check_base
from ..evaluation.scoring import AnswerScores, Scores
from ..policies import LONG_TOKENS, EvictingLayer, Eviction, Policy, cache_policy, random_rows, stored_bytes
from ..progress import Progress
from ..rewriting.compressible import CompressibleModel
from ..runtime.attention import RotorAttention
from ..search.measurer import Measurer

KL_STEPS = 8
"""Blocks of scored tokens whose KL is kept apart."""

GREEDY_TOKENS = 32
"""Tokens that are written greedily behind each prompt."""


@dataclass(frozen=True)
class CacheRecord:
    """What was measured of one cache; `skipped` says why nothing was.

    family: what has one colour in plots.
    kl_div: nats a token against the uncompressed model. token_accuracy, ppl_ratio: ratios to it. top1_agreement: share.
    kl_by_step: the mean of KL over rows, in KL_STEPS blocks of scored tokens one behind the other (GEAR figure 1b).
    greedy_agreement: of GREEDY_TOKENS that are written greedily, the share before the first that differs from the
    uncompressed model's; None where it was not measured.
    answers: by task, the mean probability of the answers over the uncompressed model's. hits: the same of the answer
    tokens predicted right.
    kv_bytes_per_token: of a complete row, everything counted; mean_: its mean over the scored lengths; long_: of
    LONG_TOKENS tokens. time_share: predicted time of attention in a decode step over the uncompressed model's.
    compression: the share of the uncompressed cache's bytes removed, of a complete row.
    """

    name: str
    skipped: str = ""
    family: str = ""
    kl_div: float = 0.0
    token_accuracy: float = 0.0
    ppl_ratio: float = 0.0
    top1_agreement: float = 0.0
    answers: dict[str, float] = field(default_factory=dict)
    hits: dict[str, float] = field(default_factory=dict)
    kv_bytes_per_token: float = 0.0
    mean_kv_bytes_per_token: float = 0.0
    long_kv_bytes_per_token: float = 0.0
    compression: float = 0.0
    kl_by_step: list[float] = field(default_factory=list)
    greedy_agreement: float | None = None
    time_share: float | None = None

    @property
    def accuracy(self) -> float:
        """The smallest ratio to the uncompressed model: next tokens, perplexity, and each task's answers."""
        return min(self.token_accuracy, self.ppl_ratio, *self.answers.values())


@dataclass
class CachedModel:
    """A network's model, compressed as it is or uncompressed, with a cache of a policy, of another kind, or plain.

    Called like a model. The policy is in force for the length of the call: the reference beside it has none.

    make: an empty cache of another kind. step: of its tokens, as many as see what they would see one by one.
    """

    network: CompressibleModel
    policy: Policy | None = None
    compressed: bool = False
    make: Callable[[], Cache] | None = None
    step: int = LONGEST_CHUNK

    def __post_init__(self) -> None:
        self.config, self.device = self.network.config, self.network.device
        self.step = (self.policy and self.policy.longest_step) or self.step

    def __call__(self, **arguments: Any) -> Any:
        with ExitStack() as held:
            model = self.network.model if self.compressed else held.enter_context(self.network.uncompressed())
            held.enter_context(cache_policy(model, self.policy))
            return model(**arguments)

    def for_rows(self, tokens: int) -> CachedModel:
        """With the share of a policy that evicts taken of a whole row of so many tokens, in place of its prompt."""
        if not isinstance(self.policy, Eviction) or self.policy.tokens is not None:
            return self
        return replace(self, policy=replace(self.policy, tokens=max(1, round(self.policy.share * tokens))))

    def empty_cache(self) -> Cache:
        return self.make() if self.make else DynamicCache(config=self.config)

    @torch.no_grad()
    def layer_bytes(self, prompt: int, tokens: int) -> list[int]:
        """Bytes of all layers after a prompt of random keys and values, and after each token that follows it, in a row
        of so many.

        Budgets that depend on the prompt (`squeeze`) are taken as equal, which they are in the mean.
        """
        policy, plain = self.for_rows(tokens).policy, DynamicCache(config=self.config)
        CachedModel(self.network, None, self.compressed)(
            input_ids=torch.zeros(1, 2, dtype=torch.int64, device=self.device), past_key_values=plain
        )
        likes: list[Any] = list(plain.layers)
        shapes = [(like.keys.shape, like.values.shape) for like in likes]
        layers: list[Any] = policy.layers(len(likes)) if policy else list(self.empty_cache().layers)
        # Of layers that store alike, one of each shape is counted.
        apart = policy is not None and (policy.evicts or policy.rows_only)
        counted = list(range(len(likes))) if apart else [shapes.index(shape) for shape in shapes]
        totals = [0] * (tokens - prompt + 1)
        rows = {
            i: [random_rows(s[1], tokens, s[3], likes[i].keys.dtype).to(self.device) for s in shapes[i]]
            for i in set(counted)
        }
        if apart and self.compressed:
            for index, layer in enumerate(layers):
                module = self.network.family.attention_module(self.network.model, index)
                if isinstance(module, RotorAttention):
                    layer.follow(module.layout, self.network.dtype)
        for place, (start, end) in enumerate(zip([0, *range(prompt, tokens)], range(prompt, tokens + 1), strict=True)):
            for index, (keys, values) in rows.items():
                layer, states = layers[index], (keys[:, :, start:end], values[:, :, start:end])
                if self.policy is None:
                    Cache(layers=[layer]).update(*states, 0)
                elif start == 0 or not isinstance(layer, EvictingLayer):  # which keeps as many with each that comes
                    layer.fill(*states)
            sizes = {index: stored_bytes(Cache(layers=[layers[index]])) for index in rows}
            totals[place] = sum(sizes[index] for index in counted)
        return totals


class CacheBench:
    """A network and the data, shared by all that is measured; the uncompressed model runs as the reference.

    Args:
        network: in the dtype whose cache is the measure of compression.
        text: [rows, seq_len] held-out text, of which `prefill` tokens are the prompt.
        tasks: look-up and copy prompts by the metric's name. whole: bytes of a token in the uncompressed cache.
        samples: gives the text that policies are fitted to, [rows, seq_len]. batch_size: rows at a time.
    """

    def __init__(
        self,
        network: CompressibleModel,
        text: Tensor,
        prefill: int,
        tasks: Mapping[str, Prompts],
        whole: int,
        samples: Callable[[], Tensor],
        batch_size: int = 16,
        progress: Progress | None = None,
    ) -> None:
        self.network, self.text, self.prefill, self.tasks = network, text, prefill, tasks
        self.whole, self.samples = whole, samples
        self.batch_size, self.progress = batch_size, progress or Progress()
        self.reference = CachedModel(network)

    @cached_property
    def _base(self) -> tuple[Scores, dict[str, AnswerScores]]:
        """Of the text, and of the tasks that the uncompressed model can do."""
        text, tasks = self._scores("uncompressed", self.reference, None, self.tasks)
        for name in list(tasks):
            try:
                check_base(name, tasks[name], "through the cache")
            except DataError as error:
                self.progress.message(f"caches are not measured by `{name}`: {error.message}")
                del tasks[name]
        return text, tasks

    @cached_property
    def _base_greedy(self) -> Tensor:
        return self._greedy(self.reference)

    def _greedy(self, model: CachedModel) -> Tensor:
        model = model.for_rows(self.text.shape[1])
        return greedy_through_cache(model, self.text, model.empty_cache, self.prefill, GREEDY_TOKENS, self.batch_size)

    def record(self, name: str, model: CachedModel) -> CacheRecord:
        """Measure a model with its cache; skipped where the policy cannot serve it."""
        base, base_tasks = self._base
        prompt, length = self.prefill, self.text.shape[1]
        try:
            sizes, (long,) = model.layer_bytes(prompt, length)[1:], model.layer_bytes(LONG_TOKENS, LONG_TOKENS)
            tasks = {task: self.tasks[task] for task in base_tasks}
            text, found = self._scores(name, model, self.reference, tasks)
        except UnsupportedModelError as error:
            return CacheRecord(name, skipped=error.message)
        assert text.kl_div is not None
        return CacheRecord(
            name,
            kl_div=float(text.kl_div.mean()),
            token_accuracy=_ratio(text.correct, base.correct),
            ppl_ratio=float((base.nll - text.nll).mean().exp()),
            top1_agreement=float((base.top1 == text.top1).double().mean()),
            answers={t: after.mean_probability / base_tasks[t].mean_probability for t, after in found.items()},
            hits={t: _ratio(after.hits, base_tasks[t].hits) for t, after in found.items()},
            kv_bytes_per_token=text.kv_bytes_per_token,
            mean_kv_bytes_per_token=sum(size / (prompt + 1 + i) for i, size in enumerate(sizes)) / len(sizes),
            long_kv_bytes_per_token=long / LONG_TOKENS,
            kl_by_step=[float(block.mean()) for block in text.kl_div.tensor_split(KL_STEPS, dim=1) if block.numel()],
            greedy_agreement=same_beginning(self._greedy(model), self._base_greedy),
            compression=1 - text.kv_bytes_per_token / base.kv_bytes_per_token,
        )

    def of_policy(self, name: str, policy: Policy | None) -> CacheRecord:
        """A record of the uncompressed model with a policy, fitted where it needs that."""
        with self.network.uncompressed() as model:
            policy = self._fitted(policy, model)
        return self.record(name, CachedModel(self.network, policy))

    def of_plan(
        self, name: str, measurer: Measurer, path: RankPath, removed: float, policy: Policy | None = None
    ) -> CacheRecord:
        """A record of the mildest plan that removes a share of the cache, with a policy on top or in a plain cache."""
        plan = path.at_compression(removed)
        if plan is None:
            least = (1 - path.steps()[-1].stored) * self.whole
            return CacheRecord(name, skipped=f"out of reach: the least is {least:.0f} bytes")
        model = self.network.compress(measurer.run.bases(plan.channels), plan.rounded)
        return self.record(name, CachedModel(self.network, self._fitted(policy, model), compressed=True))

    def _fitted(self, policy: Policy | None, model: Any) -> Policy | None:
        return fit_cache_policy(model, policy, self.samples()) if policy and policy.needs_samples else policy

    def _scores(
        self, name: str, model: CachedModel, reference: CachedModel | None, tasks: Mapping[str, Prompts]
    ) -> tuple[Scores, dict[str, AnswerScores]]:
        """Of the text, and of each task, which needs no reference."""
        total = self.text.numel() + sum(prompts.rows.numel() for prompts in tasks.values())

        def score(rows: Tensor, prefill: int, reference: Any) -> Scores:
            own, size = model.for_rows(rows.shape[1]), self.batch_size
            options: Any = {"reference": reference, "batch_size": size, "advance": advance}
            return score_through_cache(own, rows, own.empty_cache, prefill, own.step, **options)

        with self.progress.task(name, total, "tokens") as advance:
            text = score(self.text, self.prefill, reference)
            found = {
                task: score(prompts.rows, prefill_of(prompts.answers), None).of_answers(prompts.answers)
                for task, prompts in tasks.items()
            }
        return text, found


def _ratio(hits: Tensor | np.ndarray, base: Tensor | np.ndarray) -> float:
    """Of sums; of a base without a hit, the hits."""
    return float(hits.sum()) / max(float(base.sum()), 1.0)
