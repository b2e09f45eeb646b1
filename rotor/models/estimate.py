"""Estimates of the memory and disk that calibration and evaluation take, from sizes alone: nothing is read.

Of several stages the largest counts, not their sum. Tensors that safetensors maps from a file are not counted: the
system drops their pages when memory is short.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..bases.moments import CHUNK_BYTES, JOINT
from ..codes.quantiser import SAMPLES
from ..format.layout import AttentionShape, Candidate
from ..recipe import Evaluation, Recipe
from ..recipe.metric_registry import primitive_metrics
from ..runtime.families import Family

LIBRARIES_BYTES = 600 << 20
"""Resident memory of Python with torch and transformers imported and used (measured: 0.45 to 0.6 GB)."""

LOGIT_BYTES = {"cpu": 1 << 24, "cuda": 1 << 29}
"""Memory that the float32 logits of one evaluation batch may take; on a CPU what its caches hold runs twice as fast."""

HEAD_POSITIONS = 128
"""Least positions that go through the head together, so that reading its weights is worth it."""

LOGIT_COPIES = 6
"""Tensors of the size of a batch's logits that scoring holds at once (logits, float copy, log-softmax, reference)."""

SAMPLING_TOKENS = 32768
"""Tokens in the cache at once while the model writes text; a constant, so that the text depends on no flag."""


@dataclass(frozen=True)
class WeightSizes:
    """Elements of a model's weights by the parts in which they are loaded.

    layers: of each decoder layer. vocabulary: of each matrix over the vocabulary (embedding; head unless tied).
    rest: of everything else. stored_bytes: all of it in the checkpoint.
    """

    layers: tuple[int, ...]
    vocabulary: tuple[int, ...]
    rest: int
    stored_bytes: int

    @property
    def total(self) -> int:
        return sum(self.layers) + sum(self.vocabulary) + self.rest


def weight_sizes(
    shapes: Mapping[str, Sequence[int]], stored_bytes: int, family: Family, shape: AttentionShape, vocab_size: int
) -> WeightSizes:
    """Sizes from the shapes of a checkpoint's tensors, as the headers of its shards give them."""
    layers, vocabulary, rest = [0] * shape.num_layers, [], 0
    prefix = f"{family.decoder}.{family.layers}."
    for name, dims in shapes.items():
        index = name[len(prefix) :].partition(".")[0] if name.startswith(prefix) else ""
        if index.isdigit() and int(index) < shape.num_layers:
            layers[int(index)] += math.prod(dims)
        elif len(dims) == 2 and vocab_size in dims:
            vocabulary.append(math.prod(dims))
        else:
            rest += math.prod(dims)
    return WeightSizes(tuple(layers), tuple(vocabulary), rest, stored_bytes)


def feed_forward_width(config: Any) -> int:
    """Numbers that a token has inside a layer's feed-forward part: its width, or that of the experts it goes to."""
    widths = (getattr(config, name, None) for name in ("intermediate_size", "n_inner", "ffn_dim"))
    dense = next((int(width) for width in widths if width), 4 * int(config.hidden_size))
    experts = getattr(config, "num_experts_per_tok", None) or 0
    expert_width = getattr(config, "moe_intermediate_size", None) or dense
    shared = getattr(config, "shared_expert_intermediate_size", None) or 0
    return max(dense, experts * expert_width + shared if experts else 0)


@dataclass(frozen=True)
class Estimate:
    """Bytes by what they are for.

    host: memory of each process on the machine. device: memory of the GPU, empty on a CPU. disk_bytes: in the run
    folder while it is written, of which kept_disk_bytes stay.
    """

    host: dict[str, int]
    device: dict[str, int]
    disk_bytes: int = 0
    kept_disk_bytes: int = 0

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())


class Estimates(NamedTuple):
    """Estimates of a command with all weights in memory, and with one part of them at a time."""

    resident: Estimate
    streamed: Estimate


@dataclass(frozen=True)
class ForwardPass:
    """Where and with what a model runs.

    feed_forward: from feed_forward_width. compute_bytes: of one number. on_gpu: weights and activations are there.
    """

    sizes: WeightSizes
    shape: AttentionShape
    feed_forward: int
    vocab_size: int
    compute_bytes: int
    on_gpu: bool

    def estimates(
        self, host: dict[str, int], work: dict[str, int], disk_bytes: int, kept_bytes: int = 0, copied: int = 0
    ) -> Estimates:
        """Both estimates of a command: `work` and the weights take memory where the model runs.

        Args:
            copied: elements of weights that are there twice where all of them are in memory.
        """
        host = {"libraries": LIBRARIES_BYTES, **host}
        sizes, largest = self.sizes, max(*self.sizes.layers, *self.sizes.vocabulary, 0)

        def estimate(elements: int) -> Estimate:
            placed = {"weights": elements * self.compute_bytes, **work}
            of_host, of_device = (host, placed) if self.on_gpu else ({**host, **placed}, {})
            return Estimate(of_host, of_device, disk_bytes, kept_bytes)

        return Estimates(estimate(sizes.total + copied), estimate(largest + sizes.rest))

    def activation_bytes(self, tokens: int, group_size: int, moments: frozenset[str] = frozenset()) -> int:
        """Bytes of one layer's forward pass over `tokens` tokens, with what capture adds."""
        shape = self.shape
        projected = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        attention = 2 * projected + shape.num_heads * shape.head_dim
        if "output" in moments and group_size > 1:
            attention += 2 * shape.num_heads * group_size * shape.head_dim
        numbers = 4 * shape.hidden_size + max(attention, 3 * self.feed_forward)
        copies = min(CHUNK_BYTES, tokens * shape.num_heads * group_size * shape.head_dim * 8) if moments else 0
        head = tokens * shape.heads_per_kv * shape.head_dim * 8 if moments else 0
        return tokens * numbers * self.compute_bytes + 2 * max(copies, head)

    def writing_bytes(self, seq_len: int, count: int) -> int:
        """Bytes of the cache and the logits while the model writes `count` rows of text."""
        rows = min(count, max(1, SAMPLING_TOKENS // seq_len))
        row = 2 * self.shape.num_kv_heads * self.shape.head_dim * self.compute_bytes
        return rows * (seq_len * self.shape.num_layers * row + 4 * LOGIT_COPIES * self.vocab_size)


def calibration_estimates(
    model: ForwardPass,
    recipe: Recipe,
    candidates: Mapping[str, Candidate],
    moments: frozenset[str],
    batch_tokens: int,
    seq_len: int,
) -> Estimates:
    """Estimate what `rotor calibrate` takes.

    Args:
        candidates, moments: from rotor.calibration.candidates. seq_len: of a row of calibration tokens.
    """
    shape, fisher, layers = model.shape, recipe.needs_gradients, model.shape.num_layers
    num_rows = -(-recipe.tokens.count // seq_len)
    count = num_rows * seq_len
    group_size = max(candidate.group_size for candidate in candidates.values())
    groups, width, kv_width = shape.num_kv_heads // group_size, group_size * shape.head_dim, _kv_width(shape)
    elements = _moment_elements(shape, group_size, moments)
    bases = sum(_bases_bytes(shape, candidate) for candidate in candidates.values())
    statistics = 8 * sum(elements.values())
    if recipe.prune.kmeans is not None:  # vectors and centroids of queries, keys and values, a few times
        statistics += 24 * (max(1024, 3 * recipe.prune.kmeans) + recipe.prune.kmeans) * 3 * kv_width
    # Beside the moments, while bases are computed: a symmetric copy of the largest, the closed form's own, projections.
    solving = statistics + 8 * max(elements.values()) + 96 * groups * width**2
    solving += 8 * (shape.num_heads * shape.head_dim + kv_width) * shape.hidden_size
    running = statistics + model.activation_bytes(max(1, batch_tokens // seq_len) * seq_len, group_size, moments)
    stored, gradients, codes = 8 * sum(elements.values()), 0, 0
    if "output" in elements:  # float32, and only one triangle of it
        stored += 2 * shape.num_heads * width * (width + 1) - 8 * elements["output"]
    if fisher:
        # Moments of the gradients, one triangle in float32, and samples, until a layer's codes are there; backward
        # through one layer keeps what it computed.
        latent = width * (2 if any(candidate.joint for candidate in candidates.values()) else 1)
        tokens = min(count, recipe.codes.tokens)
        gradients = 3 * groups * (2 * latent * (latent + 1) + 8 * min(tokens, SAMPLES) * latent)
        running, solving = 3 * running, solving + 3 * gradients
        codes = len(candidates) * 2 * 17 * 8 * kv_width  # weight, variance, and three numbers at each of five widths
    kept_bytes = layers * (stored + bases + codes)
    disk_bytes = kept_bytes + layers * gradients + 2 * count * shape.hidden_size * model.compute_bytes  # hidden states
    stages = {"activations and statistics of one layer": running if model.on_gpu else max(running, solving)}
    if recipe.tokens.source == "synthetic":
        stages["cache of the text that the model writes"] = model.writing_bytes(seq_len, num_rows)
    largest = max(stages, key=lambda name: stages[name])
    host = {"tokens": 2 * count * 8, "bases of one layer": bases}
    if model.on_gpu:
        host["statistics of one layer"] = solving
    return model.estimates(host, {largest: stages[largest]}, disk_bytes, kept_bytes)


def evaluation_estimates(model: ForwardPass, recipe: Recipe, candidates: Mapping[str, Candidate]) -> Estimates:
    """Estimate what measuring rank plans takes (`rotor export --accuracy`): each layer rewritten, run, dropped."""
    spec, shape = recipe.evaluation, model.shape
    widest = max(candidates.values(), key=lambda candidate: candidate.group_size)._replace(joint=False)
    attention = 2 * (shape.num_heads * shape.head_dim + _kv_width(shape)) * shape.hidden_size
    outputs = shape.num_heads * (widest.group_size * shape.head_dim) ** 2 * 8 if recipe.bases.refit else 0
    rewriting = 3 * outputs + 3 * _bases_bytes(shape, widest) + attention * 2 * 8
    allowed = LOGIT_BYTES["cuda" if model.on_gpu else "cpu"]
    scoring = LOGIT_COPIES * max(allowed, HEAD_POSITIONS * 4 * model.vocab_size)
    searched = spec.search_tokens + prompt_tokens(spec, primitive_metrics(spec.metric))
    rows = max(searched, spec.report_tokens + prompt_tokens(spec))
    disk_bytes = 3 * rows * shape.hidden_size * model.compute_bytes  # of hidden states
    work = {"activations": max(model.activation_bytes(2048, widest.group_size), scoring)}
    return model.estimates({"rewriting one layer": rewriting}, work, disk_bytes, copied=attention * shape.num_layers)


def prompt_tokens(spec: Evaluation, names: Collection[str] = ("lookup", "copy")) -> int:
    """Most tokens of the rows that metrics draw for themselves."""
    row = min(spec.seq_len, spec.filler_tokens + 2 * spec.seq_len // 3)  # what states and what asks: a third each
    counts = {"lookup": spec.lookup_prompts, "copy": spec.copy_prompts}
    return row * sum(count for name, count in counts.items() if name in names)


def calibration_flops(
    sizes: WeightSizes, shape: AttentionShape, recipe: Recipe, group_size: int, moments: frozenset[str]
) -> dict[str, float]:
    """Count FLOPs of the large products of `rotor calibrate`, by stage; the statistics in float64.

    Of a mixture of experts, as if all of them worked.
    """
    tokens, layers = recipe.tokens.count, 2.0 * sum(sizes.layers)
    whole = layers + 2.0 * max(sizes.vocabulary, default=0)
    elements = _moment_elements(shape, group_size, moments)
    per_token = sum(count * (shape.heads_per_kv if name == "query" else 1) for name, count in elements.items())
    flops = {"text": whole * tokens} if recipe.tokens.source == "synthetic" else {}
    if recipe.needs_gradients:  # forward once, then each layer again and twice as much backward
        flops["gradients"] = 4 * whole * min(tokens, recipe.codes.tokens)
    return {**flops, "passes": layers * tokens, "statistics": 2.0 * tokens * per_token * shape.num_layers}


def _moment_elements(shape: AttentionShape, group_size: int, moments: frozenset[str]) -> dict[str, int]:
    width = group_size * shape.head_dim
    groups = shape.num_kv_heads // group_size
    blocks = {"query": shape.num_kv_heads * shape.head_dim**2, "output": shape.num_heads * width**2}
    joint = groups * (2 * width) ** 2
    return {name: joint if name.startswith(JOINT) else blocks.get(name, groups * width**2) for name in moments}


def _bases_bytes(shape: AttentionShape, candidate: Candidate) -> int:
    """Both sides of one candidate of one layer, encode and decode, float64."""
    return (8 if candidate.joint else 4) * 8 * _kv_width(shape) * candidate.group_size * shape.head_dim


def _kv_width(shape: AttentionShape) -> int:
    return shape.num_kv_heads * shape.head_dim
