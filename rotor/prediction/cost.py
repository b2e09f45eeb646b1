"""Costs of attention in a decode step: bytes, FLOPs, predicted seconds.

Pure arithmetic on numbers. The work of a group of KV heads has a key side, which depends on `qk_rank`, and a value
side, which depends on `v_rank`; both are affine in their rank. A multiply-add counts two FLOPs.

Predicted seconds are those of `rotor.prediction.roofline`. Two stages run one after the other: the projections (q, k,
v, o and the bases), whose weights are read once for the whole batch, and attention over the cache, which is read once.
Each takes the longest of what it reads and what it computes. In the compressed model attention counts what the decode
kernel does beyond the least (`tiling.Tiling`):

- rows: matrix products are of 16 query rows at least, powers of two, and keys that are rebuilt meet the rows of all
  heads of their part.
- keys that RoPE turned within blocks of positions: none is rebuilt, but the query rows of each block fill a tile by
  themselves; what is absorbed of them goes through L2, written and read.
- parts: where all query rows of a group do not fit into registers, each part reads and unpacks the latents again.
- bases: keys before RoPE are rebuilt tile by tile, and a basis that does not fit into an SM's L1 cache, with the table
  of rotations, comes out of L2 for each tile: wide groups have few keys a tile and bases of half a megabyte.
- unpacking of codes, rotating of rebuilt keys, and of the queries back to each tile's start.
- bytes in flight, where the device's SMs are known: of the tiles that a program asks for ahead, or waits for.

The uncompressed model is counted by its least work. Left out in both alike: softmax, RoPE of new queries and keys,
norms, biases, writing the new token, columns masked in tiles, launches, and everything outside attention.

Source: the roofline model (Williams, Waterman and Patterson, 2009), on the sizes of docs/design.md, Mathematics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..format.columns import Columns
from ..format.kernel_config import SlowPlanes
from ..format.layout import AttentionShape, Domain, GroupLayout, LayerLayout
from ..kernels.decode.tile_sizes import decode_config
from ..kernels.defaults import default_layer, with_slow_planes
from ..kernels.layer_table import layer_parts
from ..kernels.slow_planes import ABSORBED_COLUMNS
from .devices import Device
from .roofline import Residency, Work
from .tiling import ELEMENT_BYTES, Latent, Tiling

L1_BYTES = 64 << 10
"""What an SM's L1 cache holds of bases, beside the shared memory of the programs on it."""

UNPACK_FLOPS = 4
"""Of a column taken out of a word: two instructions (shift, mask, subtract of two columns, and handing it on), each
in the time of a multiply-add."""

ROTATE_FLOPS = 5
"""Of a number rotated (two products and a sum) and rounded."""


def rank_of(latent: Latent) -> float:
    """Columns of any width."""
    return latent.rank if isinstance(latent, Columns) else latent


def latent_bytes(latent: Latent, element_bytes: int) -> float:
    """Bytes that one side of a group stores for a token, and reads of it in each decode step."""
    return latent.row_bytes(element_bytes) if isinstance(latent, Columns) else latent * element_bytes


def group_bytes_per_token(qk: Latent, v: Latent | None, element_bytes: int) -> float:
    """Bytes that a group stores for one token, and reads of it in each decode step; see `latents_of`."""
    return latent_bytes(qk, element_bytes) + (0 if v is None else latent_bytes(v, element_bytes))


def latents_of(group: GroupLayout) -> tuple[Latent, Latent | None]:
    """The key side and the value side of a group; None for values that are read from the key latent."""
    return group.qk_columns or group.qk_rank, None if group.joint else group.v_columns or group.v_rank


def key_flops_per_token(
    domain: Domain, group_size: int, heads_per_kv: int, head_dim: int, qk_rank: float, rope_block: int = 1
) -> float:
    """FLOPs of a group's scores for one cached token in one decode step of one sequence.

    post, none: each query head meets the latent, 2 qk_rank. pre: the key of each KV head is rebuilt,
    2 qk_rank head_dim, and each query head meets one of them, 2 head_dim. Where keys are turned within blocks of more
    positions than a KV head has query heads, each query head meets the latent, and is taken into its basis once a
    block, 2 qk_rank (1 + head_dim / rope_block).
    """
    query_heads = group_size * heads_per_kv
    if domain == "pre" and rope_block > heads_per_kv:
        return 2 * query_heads * qk_rank * (1 + head_dim / rope_block)
    if domain == "pre":
        return 2 * head_dim * (group_size * qk_rank + query_heads)
    return 2 * query_heads * qk_rank


def value_flops_per_token(group_size: int, heads_per_kv: int, v_rank: float) -> float:
    """FLOPs of a group's weighted sum of values for one cached token in one decode step of one sequence."""
    return 2 * group_size * heads_per_kv * v_rank


def decode_flops_per_token(
    domain: Domain,
    group_size: int,
    heads_per_kv: int,
    head_dim: int,
    qk_rank: float,
    v_rank: float,
    rope_block: int = 1,
) -> float:
    """FLOPs of a group for one cached token in one decode step of one sequence: scores and values."""
    scores = key_flops_per_token(domain, group_size, heads_per_kv, head_dim, qk_rank, rope_block)
    return scores + value_flops_per_token(group_size, heads_per_kv, v_rank)


@dataclass(frozen=True)
class DecodeStep:
    """The load of one decode step: sequences in the batch, tokens that each attends to, bytes of a stored number.

    In a layer with a sliding window, context_tokens is at most the window. Weights and cache have the same dtype.
    """

    context_tokens: int
    batch_size: int
    element_bytes: int = 2


def key_work(
    domain: Domain,
    folded_keys: bool,
    group_size: int,
    qk: Latent,
    shape: AttentionShape,
    step: DecodeStep,
    tiling: Tiling | None = None,
    rope_block: int = 1,
) -> Work:
    """The key side of one group: q_proj, k_proj, the bases that are applied at run time, and the scores.

    Args:
        folded_keys: the key basis is inside k_proj (LayerLayout.folded_keys).
        tiling: what the kernel does; None counts the least, of keys turned within blocks of `rope_block` positions.
    """
    head_dim, hidden_size, qk_rank = shape.head_dim, shape.hidden_size, rank_of(qk)
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
    rebuilt = head_dim if tiling is None or tiling.slow is None else 2 * tiling.slow.rebuilt
    step_of_turns = rope_block if tiling is None else tiling.step
    flops = key_flops_per_token(domain, group_size, shape.heads_per_kv, rebuilt, qk_rank, step_of_turns)
    work = _work(step, qk, flops, weights, products, tiling)
    if tiling is None:
        return work
    tokens = step.batch_size * step.context_tokens
    if domain != "pre":
        return work + Work(tile_flops=tokens * (2 * tiling.parts * tiling.rows * qk_rank - flops))
    if tiling.step:
        return work + _stepped_work(tokens, group_size, qk, shape, step.element_bytes, flops, tiling)
    # Each of the part's heads meets all of its rows, and turns them back to the start of each tile.
    met = group_size * rebuilt * tiling.rows
    duplicated = 2 * met - 2 * query_heads * rebuilt
    rotated = ROTATE_FLOPS * (group_size * rebuilt + met / tiling.keys)
    part_bytes = rebuilt / head_dim * basis / tiling.parts * step.element_bytes + 4 * rebuilt * tiling.keys
    from_l2 = tiling.parts * part_bytes / tiling.keys if part_bytes > L1_BYTES else 0.0
    from_l2 += tiling.heads * latent_bytes(qk, step.element_bytes)
    rebuilding = Work(tile_flops=tokens * duplicated, l2_bytes=tokens * from_l2, vector_flops=tokens * rotated)
    return work + rebuilding + _slow_work(tokens, group_size, qk, head_dim, query_heads, step.element_bytes, tiling)


def _slow_work(
    tokens: int, group_size: int, qk: Latent, head_dim: int, query_heads: int, element_bytes: int, tiling: Tiling
) -> Work:
    """Of planes that are interpolated: latents meet the queries of each node; these are absorbed once a block, by the
    rest of the basis, and read for each tile.
    """
    slow = tiling.slow
    if slow is None:
        return Work()
    planes, qk_rank = head_dim - 2 * slow.rebuilt, rank_of(qk)
    least = 2 * slow.nodes * query_heads * qk_rank * (1 + planes / slow.block)
    met = 2 * slow.nodes * tiling.parts * tiling.rows * qk_rank
    absorbed = 2 * group_size * tiling.node_rows * planes * qk_rank / slow.block
    from_l2 = group_size * planes * qk_rank * element_bytes / slow.block
    from_l2 += slow.nodes * tiling.parts * tiling.rows * qk_rank * element_bytes / tiling.keys
    if tiling.columns:
        from_l2 += tiling.parts * latent_bytes(qk, element_bytes)
    turned = 2 * ROTATE_FLOPS * group_size * tiling.node_rows * planes / slow.block
    joined = 2 * slow.nodes * tiling.parts * tiling.rows
    return Work(
        cache_flops=tokens * least,
        tile_flops=tokens * (met + absorbed - least),
        l2_bytes=tokens * from_l2,
        vector_flops=tokens * (turned * -(-qk_rank // ABSORBED_COLUMNS) + joined),
    )


def _stepped_work(
    tokens: int, group_size: int, qk: Latent, shape: AttentionShape, element_bytes: int, least: float, tiling: Tiling
) -> Work:
    """Of keys that are not rebuilt, beyond the least: query rows that tiles are padded with, those of other blocks
    among them; the basis, where it does not stay in the L1 cache, and what is absorbed, written and read for each tile.
    """
    head_dim, qk_rank = shape.head_dim, rank_of(qk)
    basis_bytes = group_size * head_dim * qk_rank * element_bytes
    met = 2 * tiling.parts * tiling.rows * qk_rank
    absorbed = 2 * group_size * tiling.node_rows * head_dim * qk_rank / tiling.block
    from_l2 = basis_bytes / tiling.block if basis_bytes / tiling.parts > L1_BYTES else 0.0
    queries = group_size * shape.heads_per_kv * qk_rank * element_bytes
    from_l2 += queries / tiling.step + queries / min(tiling.step, tiling.keys)
    turned = 2 * ROTATE_FLOPS * group_size * tiling.node_rows * head_dim / tiling.block
    return Work(
        tile_flops=tokens * (met + absorbed - least),
        l2_bytes=tokens * from_l2,
        vector_flops=tokens * turned * -(-qk_rank // ABSORBED_COLUMNS),
    )


def value_work(
    group_size: int,
    v: Latent,
    shape: AttentionShape,
    step: DecodeStep,
    tiling: Tiling | None = None,
    joint: bool = False,
) -> Work:
    """The value side of one group: v_proj, o_proj (v_rank columns per query head: it grows with the group), values.

    Args:
        joint: v is the key latent: its row has been read, and comes from the cache of the GPU, and k_proj made it.
    """
    v_rank = rank_of(v)
    weights = v_rank * shape.hidden_size * (group_size * shape.heads_per_kv + (0 if joint else 1))
    flops = value_flops_per_token(group_size, shape.heads_per_kv, v_rank)
    work = _work(step, v, flops, weights, weights, tiling)
    if joint and tiling is not None and tiling.joint:
        work = replace(work, cache_bytes=0, l2_bytes=0, vector_flops=0)  # still in registers
    elif joint:
        work = replace(work, cache_bytes=0, l2_bytes=work.l2_bytes + work.cache_bytes)
    if tiling is None:
        return work
    tokens = step.batch_size * step.context_tokens
    return work + Work(tile_flops=tokens * (2 * tiling.parts * tiling.rows * v_rank - flops))


def group_work(
    domain: Domain,
    folded_keys: bool,
    group_size: int,
    qk: Latent,
    v: Latent | None,
    shape: AttentionShape,
    step: DecodeStep,
    slow: SlowPlanes | None = None,
    rope_block: int = 1,
) -> Work:
    """The work of one compressed group, as the kernels do it, with slow planes interpolated or none; v is None where
    values are in the key latent.
    """
    values, joint = qk if v is None else v, v is None
    tiling = Tiling.of(domain, group_size, shape.heads_per_kv, qk, values, shape.head_dim, slow, rope_block, joint)
    keys = key_work(domain, folded_keys, group_size, qk, shape, step, tiling)
    return keys + value_work(group_size, values, shape, step, tiling, joint)


def layer_work(layout: LayerLayout, shape: AttentionShape, step: DecodeStep, slow: SlowPlanes | None = None) -> Work:
    """The work of all groups of a compressed layer."""
    sizes = layout.domain, layout.folded_keys, layout.group_size
    works = (group_work(*sizes, *latents_of(g), shape, step, slow, layout.rope_block) for g in layout.groups)
    return sum(works, Work())


def layer_residency(
    layout: LayerLayout, shape: AttentionShape, element_bytes: int, slow: SlowPlanes | None = None
) -> Residency:
    """What of a layer's decode kernel is on an SM, before it is compiled; of unlike groups, on the average."""
    kernels = with_slow_planes(default_layer(layout, shape.head_dim), slow)
    parts = layer_parts(layout, shape.heads_per_kv, shape.head_dim, kernels)
    head_dim = shape.head_dim if layout.domain == "pre" else 0
    config = decode_config(parts, shape.heads_per_kv, ELEMENT_BYTES, head_dim)
    tiling = Tiling.of_kernel(parts, config, len(layout.groups))
    qk_bytes, v_bytes = (size / len(layout.groups) for size in layout.read_bytes(element_bytes))
    return tiling.residency(qk_bytes, v_bytes)


def prefill_work(
    layout: LayerLayout, shape: AttentionShape, seq_len: int, batch_size: int, element_bytes: int = 2, past: int = 0
) -> Work:
    """Attention of a layer over new tokens: the least that has to be read and multiplied; no projections.

    Each query meets the keys up to its own. Keys of domain `pre` are counted as rebuilt once, whatever a kernel does;
    bytes are the cache's, read once.

    Args:
        seq_len: new tokens of a sequence. past: cached ones before them.
    """
    pairs = batch_size * (seq_len * (seq_len + 1) / 2 + seq_len * past)
    tokens = batch_size * (seq_len + past)
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
    """Predicted time of attention in all layers in one decode step; the module says what is left out."""
    return sum(
        layer_work(layout, shape, step).seconds(device, layer_residency(layout, shape, step.element_bytes))
        for layout in layouts
    )


def uncompressed_decode_seconds(shape: AttentionShape, device: Device, step: DecodeStep) -> float:
    """Predict `decode_seconds` of the uncompressed model."""
    return shape.num_layers * shape.num_kv_heads * uncompressed_group_work(shape, step).seconds(device)


def _work(
    step: DecodeStep, latent: Latent, flops_per_token: float, weights: float, products: float, tiling: Tiling | None
) -> Work:
    """Work from what one side stores and multiplies per cached token, and its weights and products per sequence."""
    tokens = step.batch_size * step.context_tokens
    stored = tokens * latent_bytes(latent, step.element_bytes)
    coded = latent.rank if isinstance(latent, Columns) else 0
    parts = 1 if tiling is None else tiling.parts
    return Work(
        cache_bytes=stored,
        cache_flops=tokens * flops_per_token,
        weight_bytes=weights * step.element_bytes,
        weight_flops=2 * step.batch_size * products,
        l2_bytes=(parts - 1) * stored,
        vector_flops=tokens * parts * UNPACK_FLOPS * coded,
    )
