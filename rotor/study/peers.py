"""rotor against quantisers of the KV cache, at equal bytes: every cache is really used, and all its bytes counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, QuantizedCache

from ..errors import DataError, UnsupportedModelError
from ..evaluation.cached import (
    LONGEST_CHUNK,
    CachedScores,
    greedy_through_cache,
    prefill_of,
    same_beginning,
    score_through_cache,
)
from ..evaluation.metrics.distance import Prompts, check_base
from ..evaluation.scoring import AnswerScores
from ..policies import FP8, GEAR, KCVT, KIVI, LONG_TOKENS, PerToken, Policy, make_cache, stored_bytes
from ..progress import Progress
from .cache_bench import PolicyModel

GROUP = 64
"""Numbers in a group, and tokens in the exact residual, of every method that has them (GEAR section 4)."""


KL_STEPS = 8
"""Blocks of scored tokens whose KL is kept apart."""

GREEDY_TOKENS = 32
"""Tokens that are written greedily behind each prompt."""


@dataclass(frozen=True)
class Peer:
    """A way to store the cache of an uncompressed model.

    make_cache: makes an empty cache from the model's config. chunk: tokens of a step, as many as see what they would
    see in steps of one.
    """

    name: str
    make_cache: Callable[[Any], Cache]
    chunk: int = 1


@dataclass(frozen=True)
class PeerRecord:
    """What was measured of one cache; `skipped` says why nothing was.

    kl_div: nats a token against the uncompressed model. token_accuracy, ppl_ratio: ratios to it. top1_agreement: share.
    kl_by_step: the mean of KL over rows, in KL_STEPS blocks of scored tokens one behind the other (GEAR figure 1b).
    greedy_agreement: of GREEDY_TOKENS that are written greedily, the share before the first that differs from the
    uncompressed model's; None where it was not measured.
    answers: by task, the mean probability of the answers over the uncompressed model's. hits: the same of the answer
    tokens predicted right.
    kv_bytes_per_token: of a complete row, everything counted; mean_: its mean over the scored lengths; long_: of
    LONG_TOKENS tokens. compression: the share of the uncompressed cache's bytes removed, of a complete row.
    """

    name: str
    skipped: str = ""
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


@dataclass(frozen=True)
class PeerData:
    """What peers are measured on.

    text: [rows, seq_len] held-out text, of which `prefill` tokens are the prompt.
    tasks: look-up and copy prompts by the metric's name.
    """

    text: Tensor
    prefill: int
    tasks: Mapping[str, Prompts] = field(default_factory=dict)


def peers() -> list[Peer]:
    """The caches of uncompressed models that rotor is compared with, the exact one first."""
    found = [Peer("uncompressed", lambda config: DynamicCache(config=config), LONGEST_CHUNK)]
    for backend, options in (
        # The axes along which each groups neighbouring numbers of a token.
        ("quanto", {"axis_key": 0, "axis_value": 0}),
        ("hqq", {"axis_key": 1, "axis_value": 1}),
    ):
        found += [_transformers_peer(backend, bits, options) for bits in (8, 4, 2)]
    policies: dict[str, Policy] = {
        **{f"KIVI-{bits}": KIVI(bits, GROUP, GROUP) for bits in (4, 3, 2)},
        "KCVT-4": KCVT(4),
        **{f"GEAR-{bits}": GEAR(bits) for bits in (4, 2)},
        **{f"per token, {bits} bits": PerToken(bits, GROUP) for bits in (4, 2)},
        **{f"per token, {bits} bits, Hadamard": PerToken(bits, GROUP, hadamard=True) for bits in (4, 2)},
        "fp8, scale a token": FP8("token"),
        "fp8, one scale": FP8("tensor"),
    }
    return found + [_policy_peer(name, policy) for name, policy in policies.items()]


def _policy_peer(name: str, policy: Policy) -> Peer:
    return Peer(name, lambda config: make_cache(policy, config), policy.longest_step or LONGEST_CHUNK)


def _transformers_peer(backend: str, bits: int, options: dict[str, int]) -> Peer:
    def make(config: Any) -> Cache:
        return QuantizedCache(backend, config, nbits=bits, q_group_size=GROUP, residual_length=GROUP, **options)

    # The prompt leaves no residual, and GROUP tokens later all is coded again.
    return Peer(f"transformers {backend}, {bits} bits", make, GROUP)


class PeerBench:
    """The uncompressed model and the data, shared by all that is measured.

    Args:
        model: a causal model of transformers, in the dtype whose cache is the measure of compression; or what runs one
            when it is called, with its config and device. It runs as the reference beside every other.
        batch_size: rows at a time.
    """

    def __init__(self, model: Any, data: PeerData, batch_size: int = 16, progress: Progress | None = None) -> None:
        self.model, self.data, self.batch_size = model, data, batch_size
        self.progress = progress or Progress()

    @cached_property
    def _base(self) -> tuple[CachedScores, dict[str, AnswerScores]]:
        """Of the text, and of the tasks that the uncompressed model can do."""
        cache = self._plain_cache(self.model)
        text, tasks = self._scores("uncompressed", self.model, cache, LONGEST_CHUNK, None, self.data.tasks)
        found = {}
        for name, answers in tasks.items():
            try:
                check_base(name, answers, "through the cache")
            except DataError as error:
                self.progress.message(f"peers leave out `{name}`: {error.message}")
                continue
            found[name] = answers
        return text, found

    @cached_property
    def _base_greedy(self) -> Tensor:
        return self._greedy(self.model, self._plain_cache(self.model))

    def _greedy(self, model: Any, make: Callable[[], Cache]) -> Tensor:
        return greedy_through_cache(model, self.data.text, make, self.data.prefill, GREEDY_TOKENS, self.batch_size)

    def peer(self, peer: Peer) -> PeerRecord:
        """Measure a cache of the uncompressed model, unless it is not installed or cannot serve the model."""
        try:
            peer.make_cache(self.model.config)
        except (ImportError, ValueError, UnsupportedModelError) as error:  # the first two are transformers' own
            return PeerRecord(peer.name, skipped=" ".join(str(error).split()))
        return self._record(peer.name, self.model, lambda: peer.make_cache(self.model.config), peer.chunk)

    def policy(self, name: str, model: PolicyModel) -> PeerRecord:
        """Measure a model whose cache follows its policy."""
        assert model.policy is not None
        prompt, tokens = self.data.prefill, self.data.text.shape[1]
        sizes = model.mean_kv_bytes_per_token(prompt, tokens), model.long_kv_bytes_per_token()
        return self._record(name, model, self._plain_cache(model), model.policy.longest_step or LONGEST_CHUNK, sizes)

    def divergence(self, name: str, model: PolicyModel) -> float:
        """KL of the text alone, nats a token."""
        assert model.policy is not None
        chunk = model.policy.longest_step or LONGEST_CHUNK
        text, _ = self._scores(name, model, self._plain_cache(model), chunk, self.model, {})
        assert text.kl_div is not None
        return float(text.kl_div.mean())

    def checkpoint(self, name: str, model: Any, policy: Policy | None = None) -> PeerRecord:
        """Measure a compressed checkpoint of the model, as transformers loads it, in its plain cache or a policy."""
        if policy is None:
            return self._record(name, model, self._plain_cache(model), LONGEST_CHUNK)
        step = policy.longest_step or LONGEST_CHUNK
        return self._record(name, model, lambda: make_cache(policy, model.config), step)

    def _record(
        self,
        name: str,
        model: Any,
        make: Callable[[], Cache],
        chunk: int,
        sizes: tuple[float, float] | None = None,
    ) -> PeerRecord:
        """sizes: mean and long bytes a token, where storing random keys and values does not tell."""
        base, base_tasks = self._base
        done = {task: self.data.tasks[task] for task in base_tasks}
        text, tasks = self._scores(name, model, make, chunk, self.model, done)
        assert text.kl_div is not None
        mean, long = sizes or (
            mean_kv_bytes_per_token(model, make, self.data.prefill, self.data.text.shape[1]),
            long_kv_bytes_per_token(model, make),
        )
        return PeerRecord(
            name,
            kl_div=float(text.kl_div.mean()),
            token_accuracy=_ratio(text.correct, base.correct),
            ppl_ratio=float((base.nll - text.nll).mean().exp()),
            top1_agreement=float((base.top1 == text.top1).double().mean()),
            answers={t: after.mean_probability / base_tasks[t].mean_probability for t, after in tasks.items()},
            hits={t: _ratio(after.hits, base_tasks[t].hits) for t, after in tasks.items()},
            kv_bytes_per_token=text.kv_bytes_per_token,
            mean_kv_bytes_per_token=mean,
            long_kv_bytes_per_token=long,
            kl_by_step=[float(block.mean()) for block in text.kl_div.tensor_split(KL_STEPS, dim=1) if block.numel()],
            greedy_agreement=same_beginning(self._greedy(model, make), self._base_greedy),
            compression=1 - text.kv_bytes_per_token / base.kv_bytes_per_token,
        )

    def _scores(
        self,
        name: str,
        model: Any,
        make: Callable[[], Cache],
        chunk: int,
        reference: Any,
        tasks: Mapping[str, Prompts],
    ) -> tuple[CachedScores, dict[str, AnswerScores]]:
        """Of the text, and of each task, which needs no reference."""
        data = self.data
        total = data.text.numel() + sum(prompts.rows.numel() for prompts in tasks.values())

        def score(rows: Tensor, prefill: int, reference: Any) -> CachedScores:
            options: Any = {"reference": reference, "batch_size": self.batch_size, "advance": advance}
            return score_through_cache(model, rows, make, prefill, chunk, **options)

        with self.progress.task(name, total, "tokens") as advance:
            text = score(data.text, data.prefill, reference)
            found = {
                task: score(prompts.rows, prefill_of(prompts.answers), None).of_answers(prompts.answers)
                for task, prompts in tasks.items()
            }
        return text, found

    @staticmethod
    def _plain_cache(model: Any) -> Callable[[], Cache]:
        return lambda: DynamicCache(config=model.config)


def long_kv_bytes_per_token(model: Any, make: Callable[[], Cache], tokens: int = LONG_TOKENS) -> float:
    """Bytes of the cache for each token of a prompt of `tokens`, by storing random ones of the model's shapes."""
    return _layer_bytes(model, make, tokens, tokens)[-1] / tokens


def mean_kv_bytes_per_token(model: Any, make: Callable[[], Cache], prompt: int, tokens: int) -> float:
    """Bytes of the cache for each token, the mean over lengths from prompt + 1 to `tokens`, reached one by one: what is
    not yet coded comes and goes with the length."""
    sizes = _layer_bytes(model, make, prompt, tokens)[1:]
    return sum(size / (prompt + 1 + step) for step, size in enumerate(sizes)) / len(sizes)


@torch.no_grad()
def _layer_bytes(model: Any, make: Callable[[], Cache], prompt: int, tokens: int) -> list[int]:
    """Bytes of all layers after a prompt of random keys and values, and after each token that follows it.

    Layers of equal shapes are measured once.
    """
    plain = DynamicCache(config=model.config)
    model(input_ids=torch.zeros(1, 2, dtype=torch.int64, device=model.device), past_key_values=plain)
    found: dict[tuple[torch.Size, torch.Size], list[int]] = {}
    layers: list[Any] = list(plain.layers)
    for layer in layers:
        shapes = layer.keys.shape, layer.values.shape
        if shapes not in found:
            generator = torch.Generator().manual_seed(0)
            states = [torch.randn(*s[:2], tokens, s[3], generator=generator).to(layer.keys) for s in shapes]
            cache = Cache(layers=make().layers[:1])
            found[shapes] = []
            for start, end in zip([0, *range(prompt, tokens)], range(prompt, tokens + 1), strict=True):
                cache.update(states[0][:, :, start:end], states[1][:, :, start:end], 0)
                found[shapes].append(stored_bytes(cache))
    every = [found[layer.keys.shape, layer.values.shape] for layer in layers]
    return [sum(sizes) for sizes in zip(*every, strict=True)]


def _ratio(hits: Tensor | np.ndarray, base: Tensor | np.ndarray) -> float:
    """Of sums; of a base without a hit, the hits."""
    return float(hits.sum()) / max(float(base.sum()), 1.0)
