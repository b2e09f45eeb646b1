"""Estimates of the memory and disk that calibration and evaluation take, from sizes alone: nothing is read.

Parts are named, so that a user sees what to change. Each formula follows what the code holds at its peak; the largest
of the stages counts, not their sum. Tensors that safetensors maps from a file are not counted: the system drops their
pages when memory is short.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class WeightSizes:
    """Elements of a model's weights by the parts in which they are loaded.

    layers: of each decoder layer. vocabulary: of each matrix over the vocabulary (embedding; head unless tied).
    rest: of everything else. largest_tensor: of the largest single tensor. stored_bytes: all of it in the checkpoint.
    """

    layers: tuple[int, ...]
    vocabulary: tuple[int, ...]
    rest: int
    largest_tensor: int
    stored_bytes: int

    @property
    def total(self) -> int:
        return sum(self.layers) + sum(self.vocabulary) + self.rest

    @property
    def largest_part(self) -> int:
        return max(*self.layers, *self.vocabulary, 0)


def weight_sizes(
    shapes: Mapping[str, Sequence[int]], stored_bytes: int, family: Family, shape: AttentionShape, vocab_size: int
) -> WeightSizes:
    """Sizes from the shapes of a checkpoint's tensors, as the headers of its shards give them."""
    layers, vocabulary, rest, largest = [0] * shape.num_layers, [], 0, 0
    prefix = f"{family.decoder}.{family.layers}."
    for name, dims in shapes.items():
        count = _product(dims)
        largest = max(largest, count)
        index = name[len(prefix) :].partition(".")[0] if name.startswith(prefix) else ""
        if index.isdigit() and int(index) < shape.num_layers:
            layers[int(index)] += count
        elif len(dims) == 2 and vocab_size in dims:
            vocabulary.append(count)
        else:
            rest += count
    return WeightSizes(tuple(layers), tuple(vocabulary), rest, largest, stored_bytes)


def _product(dims: Sequence[int]) -> int:
    count = 1
    for dim in dims:
        count *= int(dim)
    return count


def feed_forward_width(config: Any) -> int:
    """Numbers that a token has inside a layer's feed-forward part: its width, or that of the experts it goes to."""
    hidden = int(config.hidden_size)
    dense = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None)
    dense = dense or getattr(config, "ffn_dim", None) or 4 * hidden
    experts = getattr(config, "num_experts_per_tok", None)
    expert_width = getattr(config, "moe_intermediate_size", None) or dense
    shared = getattr(config, "shared_expert_intermediate_size", None) or 0
    return max(int(dense), int(experts) * int(expert_width) + int(shared) if experts else 0)


@dataclass(frozen=True)
class Estimate:
    """Bytes by what they are for.

    host: memory of each process on the machine. device: memory of the GPU, empty on a CPU. disk: in the run folder
    while it is written; `kept` names those parts that stay.
    """

    host: dict[str, int]
    device: dict[str, int]
    disk: dict[str, int]
    kept: tuple[str, ...] = ()

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())

    @property
    def disk_bytes(self) -> int:
        return sum(self.disk.values())

    @property
    def kept_disk_bytes(self) -> int:
        return sum(self.disk[name] for name in self.kept)


def calibration_estimate(
    sizes: WeightSizes,
    shape: AttentionShape,
    recipe: Recipe,
    candidates: Mapping[str, Candidate],
    moments: frozenset[str],
    *,
    feed_forward: int,
    compute_bytes: int,
    streamed: bool,
    batch_tokens: int = 2048,
    tokens: int | None = None,
    seq_len: int | None = None,
    on_gpu: bool = False,
) -> Estimate:
    """Estimate what `rotor calibrate` takes.

    Args:
        candidates, moments: from rotor.calibration.candidates.
        feed_forward: from feed_forward_width.
        compute_bytes: of one number in the dtype of the forward passes.
        streamed: one part of the weights in memory at a time, instead of all.
        tokens: that are calibrated on; by default what the recipe asks for. seq_len: of a row, likewise.
    """
    row = seq_len or recipe.tokens.seq_len
    count = -(-(tokens or recipe.tokens.count) // row) * row
    batch = max(1, batch_tokens // row) * row
    group_size = max(candidate.group_size for candidate in candidates.values())
    statistics = statistics_bytes(shape, group_size, moments, recipe.prune.kmeans)
    running = activation_bytes(shape, group_size, moments, batch, feed_forward, compute_bytes) + statistics
    solving = statistics + solving_bytes(shape, group_size, moments)
    if recipe.needs_gradients:
        # Backward through one layer keeps what it computed; the moments are those of the gradients.
        running = max(running, 3 * running)
        joint = any(candidate.joint for candidate in candidates.values())
        solving += 3 * gradients_bytes(shape, group_size, recipe.codes.tokens, joint)
    weights = _weight_bytes(sizes, compute_bytes, streamed)
    bases = sum(bases_bytes(shape, candidate.group_size, candidate.joint) for candidate in candidates.values())
    gradients, codes = 0, 0
    if recipe.needs_gradients:
        gradients = gradients_bytes(shape, group_size, min(count, recipe.codes.tokens), joint)
        codes = len(candidates) * codes_bytes(shape)
    disk = {
        "codes": shape.num_layers * codes,
        "gradients, removed at the end": shape.num_layers * gradients,
        "statistics": shape.num_layers * stored_statistics_bytes(shape, group_size, moments),
        "bases": shape.num_layers * bases,
        "hidden states, removed at the end": 2 * count * shape.hidden_size * compute_bytes,
    }
    host = {"libraries": LIBRARIES_BYTES, "tokens": 2 * count * 8, "bases of one layer": bases}
    work = {"weights": weights, "activations and statistics of one layer": max(running, solving)}
    if on_gpu:
        host["statistics of one layer"] = solving
        work["activations and statistics of one layer"] = running
    disk = {name: size for name, size in disk.items() if size}
    disk_kept = ("statistics", "bases", "codes") if codes else ("statistics", "bases")
    return Estimate(host if on_gpu else {**host, **work}, work if on_gpu else {}, disk, disk_kept)


def evaluation_estimate(
    sizes: WeightSizes,
    shape: AttentionShape,
    recipe: Recipe,
    candidates: Mapping[str, Candidate],
    *,
    feed_forward: int,
    compute_bytes: int,
    streamed: bool,
    vocab_size: int,
    on_gpu: bool = False,
) -> Estimate:
    """Estimate what measuring rank plans takes (`rotor export --accuracy`): each layer rewritten, run, dropped."""
    spec = recipe.evaluation
    group_size = max(candidate.group_size for candidate in candidates.values())
    outputs = frozenset({"output"} if recipe.bases.refit else set())
    rewriting = 3 * statistics_bytes(shape, group_size, outputs, None) + 3 * bases_bytes(shape, group_size)
    attention = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim * shape.hidden_size
    rewriting += attention * 2 * 8
    running = activation_bytes(shape, group_size, frozenset(), 2048, feed_forward, compute_bytes)
    allowed = LOGIT_BYTES["cuda" if on_gpu else "cpu"]
    scoring = LOGIT_COPIES * max(allowed, HEAD_POSITIONS * 4 * vocab_size)
    weights = _weight_bytes(sizes, compute_bytes, streamed)
    if not streamed:
        weights += attention * compute_bytes * shape.num_layers  # the compressed attention stands beside the original
    rows = max(measured_tokens(spec), spec.report_tokens + prompt_tokens(spec))
    host = {"libraries": LIBRARIES_BYTES, "rewriting one layer": rewriting}
    work = {"weights": weights, "activations": max(running, scoring)}
    disk = {"hidden states, removed at the end": 3 * rows * shape.hidden_size * compute_bytes}
    return Estimate(host if on_gpu else {**host, **work}, work if on_gpu else {}, disk)


def gradients_bytes(shape: AttentionShape, group_size: int, tokens: int, joint: bool) -> int:
    """Bytes of what one layer's gradients and samples take until its codes are there; see LayerFisher.to_tensors."""
    width = group_size * shape.head_dim * (2 if joint else 1)
    moments = 4 * shape.num_kv_heads // group_size * width * (width + 1) // 2
    return 3 * (moments + 2 * 4 * min(tokens, SAMPLES) * shape.num_kv_heads // group_size * width)


def codes_bytes(shape: AttentionShape) -> int:
    """Bytes of one layer's codes, float64: weight and variance, and three numbers at each of five widths."""
    return 2 * 17 * 8 * shape.num_kv_heads * shape.head_dim


def measured_tokens(spec: Evaluation) -> int:
    """Of the search split, with the rows that the metric draws: what one point of a search takes."""
    return spec.search_tokens + prompt_tokens(spec, primitive_metrics(spec.metric))


def prompt_tokens(spec: Evaluation, names: Collection[str] = ("lookup", "copy")) -> int:
    """Of the rows that metrics draw for themselves, at most."""
    row = min(spec.seq_len, spec.filler_tokens + 2 * spec.seq_len // 3)  # what states and what asks: a third each
    counts = {"lookup": spec.lookup_prompts, "copy": spec.copy_prompts}
    return row * sum(count for name, count in counts.items() if name in names)


def forward_flops(sizes: WeightSizes, tokens: int, *, head: bool) -> float:
    """Count FLOPs of the products with weights in a forward pass; of a mixture of experts, as if all of them worked."""
    weights = sum(sizes.layers) + (max(sizes.vocabulary, default=0) if head else 0)
    return 2.0 * weights * tokens


def calibration_flops(
    sizes: WeightSizes, shape: AttentionShape, recipe: Recipe, group_size: int, moments: frozenset[str]
) -> dict[str, float]:
    """Count FLOPs of the large products of `rotor calibrate`, by stage; the statistics in float64."""
    tokens = recipe.tokens.count
    elements = _moment_elements(shape, group_size, moments)
    per_token = sum(count * (shape.heads_per_kv if name == "query" else 1) for name, count in elements.items())
    flops = {} if recipe.tokens.source != "synthetic" else {"text": forward_flops(sizes, tokens, head=True)}
    passes = forward_flops(sizes, tokens, head=False)
    if recipe.needs_gradients:
        # Forward once, then each layer again and twice as much backward.
        flops["gradients"] = 4 * forward_flops(sizes, min(tokens, recipe.codes.tokens), head=True)
    return {**flops, "passes": passes, "statistics": 2.0 * tokens * per_token * shape.num_layers}


def _weight_bytes(sizes: WeightSizes, compute_bytes: int, streamed: bool) -> int:
    if not streamed:
        return sizes.total * compute_bytes
    return (sizes.largest_part + sizes.rest) * compute_bytes


def statistics_bytes(shape: AttentionShape, group_size: int, moments: frozenset[str], kmeans: int | None) -> int:
    """float64 second moments of one layer in memory; with K-means the vectors and centroids behind them too."""
    total = sum(8 * elements for elements in _moment_elements(shape, group_size, moments).values())
    if kmeans is not None:
        vectors = max(1024, 3 * kmeans) + kmeans
        widths = sum(shape.num_kv_heads * shape.head_dim for name in moments if name != "output")
        total += 3 * 8 * vectors * widths
    return total


def stored_statistics_bytes(shape: AttentionShape, group_size: int, moments: frozenset[str]) -> int:
    """Bytes of one layer's file: float64, but `output` in float32 and only one triangle of it."""
    elements = _moment_elements(shape, group_size, moments)
    width = group_size * shape.head_dim
    output = 4 * shape.num_heads * width * (width + 1) // 2 if "output" in elements else 0
    return output + sum(8 * count for name, count in elements.items() if name != "output")


def _moment_elements(shape: AttentionShape, group_size: int, moments: frozenset[str]) -> dict[str, int]:
    width = group_size * shape.head_dim
    groups = shape.num_kv_heads // group_size
    blocks = {
        "query": shape.num_kv_heads * shape.head_dim**2,
        "output": shape.num_heads * width**2,
    }
    joint = groups * (2 * width) ** 2
    return {name: joint if name.startswith(JOINT) else blocks.get(name, groups * width**2) for name in moments}


def bases_bytes(shape: AttentionShape, group_size: int, joint: bool = False) -> int:
    """Both sides of one candidate of one layer, encode and decode, float64."""
    return (8 if joint else 4) * 8 * shape.num_kv_heads * shape.head_dim * group_size * shape.head_dim


def solving_bytes(shape: AttentionShape, group_size: int, moments: frozenset[str]) -> int:
    """Bytes beside the moments while bases are computed: a symmetric copy of the largest, the closed form's own."""
    elements = _moment_elements(shape, group_size, moments)
    width = group_size * shape.head_dim
    projections = 8 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim * shape.hidden_size
    return 8 * max(elements.values()) + 12 * 8 * shape.num_kv_heads // group_size * width**2 + projections


def activation_bytes(
    shape: AttentionShape,
    group_size: int,
    moments: frozenset[str],
    tokens: int,
    feed_forward: int,
    compute_bytes: int,
) -> int:
    """Bytes of one forward pass of one layer over `tokens` tokens, with what capture adds."""
    residual = 4 * shape.hidden_size
    projected = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    attention = 2 * projected + shape.num_heads * shape.head_dim
    if "output" in moments and group_size > 1:
        attention += 2 * shape.num_heads * group_size * shape.head_dim
    numbers = residual + max(attention, 3 * feed_forward)
    copies = min(CHUNK_BYTES, tokens * shape.num_heads * group_size * shape.head_dim * 8) if moments else 0
    head = tokens * shape.heads_per_kv * shape.head_dim * 8 if moments else 0
    return tokens * numbers * compute_bytes + 2 * max(copies, head)
