"""Costs of attention in a decode step: bytes, FLOPs, predicted seconds, and the objective that ranks are chosen by.

Pure arithmetic on numbers. The work of a group of KV heads has a key side, which depends on `qk_rank`, and a value
side, which depends on `v_rank`; both are affine in their rank. A multiply-add counts two FLOPs.

Predicted seconds are a roofline, a lower bound. Two stages run one after the other: the projections (q, k, v, o and the
bases), whose weights are read once for the whole batch, and attention over the cache, which is read once. Each takes
the longer of its bytes over the bandwidth and its FLOPs over the matrix rate: reading and multiplying overlap fully.
Left out, in the compressed model and the uncompressed one alike: softmax, RoPE (also of rebuilt keys), norms, biases,
writing the new token, padding to the tiles of the tensor cores, launches, and everything outside attention.

Source: the roofline model (Williams, Waterman and Patterson, 2009), on the sizes of docs/design.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..format.layout import AttentionShape, Domain, LayerLayout
from ..recipe import ObjectiveSettings
from .devices import Device


def group_bytes_per_token(qk_rank: float, v_rank: float, element_bytes: int) -> float:
    """Bytes that a group stores for one token, and reads of it in each decode step."""
    return (qk_rank + v_rank) * element_bytes


def key_flops_per_token(domain: Domain, group_size: int, heads_per_kv: int, head_dim: int, qk_rank: float) -> float:
    """FLOPs of a group's scores for one cached token in one decode step of one sequence.

    post, none: each query head meets the latent, 2 qk_rank. pre: the key of each KV head is rebuilt,
    2 qk_rank head_dim, and each query head meets one of them, 2 head_dim.
    """
    query_heads = group_size * heads_per_kv
    if domain == "pre":
        return 2 * head_dim * (group_size * qk_rank + query_heads)
    return 2 * query_heads * qk_rank


def value_flops_per_token(group_size: int, heads_per_kv: int, v_rank: float) -> float:
    """FLOPs of a group's weighted sum of values for one cached token in one decode step of one sequence."""
    return 2 * group_size * heads_per_kv * v_rank


def decode_flops_per_token(
    domain: Domain, group_size: int, heads_per_kv: int, head_dim: int, qk_rank: float, v_rank: float
) -> float:
    """FLOPs of a group for one cached token in one decode step of one sequence: scores and values."""
    return key_flops_per_token(domain, group_size, heads_per_kv, head_dim, qk_rank) + value_flops_per_token(
        group_size, heads_per_kv, v_rank
    )


@dataclass(frozen=True)
class DecodeStep:
    """The load of one decode step: sequences in the batch, tokens that each attends to, bytes of a stored number.

    In a layer with a sliding window, context_tokens is at most the window. Weights and cache have the same dtype.
    """

    context_tokens: int
    batch_size: int
    element_bytes: int = 2


@dataclass(frozen=True)
class Work:
    """Bytes and FLOPs of a decode step in its two stages: attention over the cache, and the projections' weights."""

    cache_bytes: float = 0.0
    cache_flops: float = 0.0
    weight_bytes: float = 0.0
    weight_flops: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.cache_bytes + other.cache_bytes,
            self.cache_flops + other.cache_flops,
            self.weight_bytes + other.weight_bytes,
            self.weight_flops + other.weight_flops,
        )

    def cache_seconds(self, device: Device) -> float:
        """Roofline of attention over the cache."""
        return max(self.cache_bytes / device.bandwidth_bytes_per_s, self.cache_flops / device.matmul_flops_per_s)

    def seconds(self, device: Device) -> float:
        """Roofline of both stages, one after the other."""
        weights = max(self.weight_bytes / device.bandwidth_bytes_per_s, self.weight_flops / device.matmul_flops_per_s)
        return self.cache_seconds(device) + weights

    def serial_seconds(self, device: Device) -> float:
        """Seconds if reading and multiplying never overlapped: linear in the work, from 1 to 2 times `seconds`."""
        return (self.cache_bytes + self.weight_bytes) / device.bandwidth_bytes_per_s + (
            self.cache_flops + self.weight_flops
        ) / device.matmul_flops_per_s


def key_work(
    domain: Domain, folded_keys: bool, group_size: int, qk_rank: float, shape: AttentionShape, step: DecodeStep
) -> Work:
    """The key side of one group: q_proj, k_proj, the bases that are applied at run time, and the scores.

    Args:
        folded_keys: the key basis is inside k_proj (LayerLayout.folded_keys).
    """
    head_dim, hidden_size = shape.head_dim, shape.hidden_size
    query_heads = group_size * shape.heads_per_kv
    basis = group_size * head_dim * qk_rank
    weights = query_heads * (qk_rank if domain == "none" else head_dim) * hidden_size
    weights += (qk_rank if folded_keys else group_size * head_dim) * hidden_size
    products = weights
    if not folded_keys:
        weights, products = weights + basis, products + basis
    if domain != "none":
        weights += basis
    if domain == "post":
        products += shape.heads_per_kv * basis
    flops = key_flops_per_token(domain, group_size, shape.heads_per_kv, head_dim, qk_rank)
    return _work(step, qk_rank, flops, weights, products)


def value_work(group_size: int, v_rank: float, shape: AttentionShape, step: DecodeStep) -> Work:
    """The value side of one group: v_proj, o_proj (v_rank columns per query head: it grows with the group), values."""
    weights = v_rank * shape.hidden_size * (1 + group_size * shape.heads_per_kv)
    return _work(step, v_rank, value_flops_per_token(group_size, shape.heads_per_kv, v_rank), weights, weights)


def layer_work(layout: LayerLayout, shape: AttentionShape, step: DecodeStep) -> Work:
    """The work of all groups of a compressed layer; of the cache it counts the bytes of its rows."""
    work = sum(
        (
            key_work(layout.domain, layout.folded_keys, layout.group_size, group.qk_rank, shape, step)
            + value_work(layout.group_size, group.v_rank, shape, step)
            for group in layout.groups
        ),
        Work(),
    )
    tokens = step.batch_size * step.context_tokens
    return replace(work, cache_bytes=tokens * sum(layout.row_bytes(step.element_bytes)))


def prefill_work(
    layout: LayerLayout, shape: AttentionShape, seq_len: int, batch_size: int, element_bytes: int = 2
) -> Work:
    """Attention of a layer over a causal prompt: the least that has to be read and multiplied; no projections.

    Each query meets the keys up to its own. Keys of domain `pre` are counted as rebuilt once, whatever a kernel does;
    bytes are the cache's, read once.
    """
    pairs = batch_size * seq_len * (seq_len + 1) / 2
    tokens = batch_size * seq_len
    flops = 0.0
    for group in layout.groups:
        query_heads = len(group.kv_heads) * shape.heads_per_kv
        width = shape.head_dim if layout.domain == "pre" else group.qk_rank
        flops += 2 * query_heads * (width + group.v_rank) * pairs
        if layout.domain == "pre":
            flops += 2 * len(group.kv_heads) * group.qk_rank * shape.head_dim * tokens
    return Work(cache_bytes=tokens * sum(layout.row_bytes(element_bytes)), cache_flops=flops)


def uncompressed_group_work(shape: AttentionShape, step: DecodeStep) -> Work:
    """The work of one KV head of an uncompressed layer: latents of full rank that need no basis."""
    return key_work("none", True, 1, shape.head_dim, shape, step) + value_work(1, shape.head_dim, shape, step)


def decode_seconds(layouts: Sequence[LayerLayout], shape: AttentionShape, device: Device, step: DecodeStep) -> float:
    """Predicted time of attention in all layers in one decode step: a lower bound; the module says what is left out."""
    return sum(layer_work(layout, shape, step).seconds(device) for layout in layouts)


def uncompressed_decode_seconds(shape: AttentionShape, device: Device, step: DecodeStep) -> float:
    """Predict `decode_seconds` of the uncompressed model."""
    return shape.num_layers * shape.num_kv_heads * uncompressed_group_work(shape, step).seconds(device)


@dataclass(frozen=True)
class Objective:
    """Cost of a group of KV heads, by which ranks, domains and group sizes are compared.

    The cost of a group is a share of the uncompressed layer's: the KV heads of an uncompressed layer cost 1 together.
    It adds up over groups and layers and rises with both ranks.

    - memory: bytes of cache.
    - latency: predicted seconds of a decode step, with each group's roofline by itself, so that costs add up. The
      layer's own roofline (`decode_seconds`) is at most their sum, and the same where all groups have the same limit.

    latency_weight: from 0 (memory alone) to 1 (latency alone).
    """

    latency_weight: float
    device: Device
    shape: AttentionShape
    step: DecodeStep

    @classmethod
    def from_settings(
        cls, settings: ObjectiveSettings, device: Device, shape: AttentionShape, element_bytes: int
    ) -> Objective:
        """The objective that a recipe asks for; `device` is what `find_device` gives for its names."""
        weight = {"memory": 0.0, "latency": 1.0}[settings.kind] if isinstance(settings.kind, str) else settings.kind
        return cls(weight, device, shape, DecodeStep(settings.context_tokens, settings.batch_size, element_bytes))

    def group_cost(self, domain: Domain, folded_keys: bool, group_size: int, qk_rank: float, v_rank: float) -> float:
        """The cost of one group; for comparing domains and group sizes."""
        work = key_work(domain, folded_keys, group_size, qk_rank, self.shape, self.step)
        work += value_work(group_size, v_rank, self.shape, self.step)
        return self._mixed(qk_rank + v_rank, work.seconds(self.device))

    def key_cost(self, domain: Domain, folded_keys: bool, group_size: int, qk_rank: float) -> float:
        """The key side of a group's cost, affine in qk_rank; for allocating ranks side by side.

        For memory, key_cost + value_cost is group_cost exactly. A roofline does not split into sides, so latency takes
        reading and multiplying one after the other instead: key_cost + value_cost is then at least group_cost and at
        most twice as much, nearest where one of the two dominates. The real overlap lies between.
        """
        work = key_work(domain, folded_keys, group_size, qk_rank, self.shape, self.step)
        return self._mixed(qk_rank, work.serial_seconds(self.device))

    def value_cost(self, group_size: int, v_rank: float) -> float:
        """The value side of a group's cost, linear in v_rank; see `key_cost`."""
        work = value_work(group_size, v_rank, self.shape, self.step)
        return self._mixed(v_rank, work.serial_seconds(self.device))

    def _mixed(self, rank: float, seconds: float) -> float:
        heads = self.shape.num_kv_heads
        memory = rank / (heads * 2 * self.shape.head_dim)
        latency = seconds / (heads * uncompressed_group_work(self.shape, self.step).seconds(self.device))
        return (1 - self.latency_weight) * memory + self.latency_weight * latency


def _work(step: DecodeStep, rank: float, flops_per_token: float, weights: float, products: float) -> Work:
    """Work from what one side stores and multiplies per cached token, and its weights and products per sequence."""
    tokens = step.batch_size * step.context_tokens
    return Work(
        cache_bytes=tokens * rank * step.element_bytes,
        cache_flops=tokens * flops_per_token,
        weight_bytes=weights * step.element_bytes,
        weight_flops=2 * step.batch_size * products,
    )
