# mypy: disable-error-code="no-untyped-def, assignment, var-annotated"
"""Logits of the rotary planes that hardly turn within a block of keys, without rebuilding them: domain `pre`.

Within a block of keys the turn of a slow plane is interpolated from its turns at a few nodes. Queries turned back to
each node are taken into the latent's basis once a block (`absorb_queries`), and meet the latents themselves
(`slow_scores`): a logit is the sum over nodes of such a product times the node's weight at the key's place.
`slow_planes` chooses planes, nodes and blocks. Where keys are stored turned within blocks, `stepped` takes queries of
all planes into the basis by the same function.

A program keeps the absorbed queries of its block in memory of its own, which stays in the L2 cache.
"""

import triton
import triton.language as tl

from ..tiles import elements_of, load_piece, load_rotation, numbers_of, rotate_back


@triton.jit
def absorb_queries(
    absorbed, absorbed_constant, heads, query, head_stride, start, cos, sin, rotation_len, rotation_stride, basis,
    basis_stride, basis_row, width, constant,
    DTYPE: tl.constexpr, CONSTANT: tl.constexpr, NODES: tl.constexpr, HEADS_PER_KV: tl.constexpr, HALF: tl.constexpr,
    FAST: tl.constexpr, STRIDE: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, PLANES: tl.constexpr,
    NODE_ROWS: tl.constexpr, STAGES: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Queries of all heads of a part at each node of the block from `start` on, in the basis of the latent's `width`
    columns: [nodes, STRIDE, WIDTH] into `absorbed`, and their products with the constant key into another.

    One product serves the query rows of a head at all nodes: NODE_ROWS of them, padded. With STEP nodes are that far
    apart. Turns are those of the block's start and, by rows of the table that stay in the L1 cache, of a node's place
    in it: of a stepped table too, as blocks begin and nodes lie at multiples of STEP. A table that is shorter than a
    block has no keys at the nodes behind its end. STAGES are those of loading the basis.
    """
    row = tl.arange(0, NODE_ROWS)
    node_index = row // HEADS_PER_KV
    of_node = node_index < len(NODES)
    node = node_index * STEP
    if STEP == 0:
        for m in tl.static_range(len(NODES)):
            node = tl.where(node_index == m, NODES[m], node)
    turned = of_node & (node < rotation_len)
    row_of_start = start + tl.zeros((1,), tl.int64)
    column_steps = tl.cdiv(width, COLUMNS)
    tl.debug_barrier()  # the block before may still be read
    for step in range(heads * column_steps):
        head = step // column_steps
        column = (step % column_steps) * COLUMNS + tl.arange(0, COLUMNS)
        own = head * HEADS_PER_KV + row % HEADS_PER_KV
        sums = tl.zeros((NODE_ROWS, COLUMNS), tl.float32)
        of_constant = tl.zeros((NODE_ROWS,), tl.float32)
        for plane in tl.range(FAST, HALF, PLANES, num_stages=STAGES):
            planes = plane + tl.arange(0, PLANES)
            some = of_node[:, None] & (planes < HALF)[None, :]
            places = query + own[:, None] * head_stride + planes[None, :]
            query_0 = tl.load(places, mask=some, other=0.0).to(tl.float32)
            query_1 = tl.load(places + HALF, mask=some, other=0.0).to(tl.float32)
            turn_0, turn_1 = load_rotation(
                cos, sin, row_of_start, row_of_start < rotation_len, rotation_stride, plane, HALF, PLANES
            )
            query_0, query_1 = rotate_back(query_0, query_1, turn_0, turn_1)
            turn_0, turn_1 = load_rotation(cos, sin, node, turned, rotation_stride, plane, HALF, PLANES)
            # Back by the node too, but as the keys turn: an attention factor of the table is theirs.
            turned_0 = query_0 * turn_0 + query_1 * turn_1
            turned_1 = query_1 * turn_0 - query_0 * turn_1
            rows = basis + (basis_row + head * (2 * HALF) + planes[:, None]) * basis_stride + column[None, :]
            inside = (planes < HALF)[:, None] & (column < width)[None, :]
            basis_0 = tl.load(rows, mask=inside, other=0.0)
            basis_1 = tl.load(rows + HALF * basis_stride, mask=inside, other=0.0)
            sums = tl.dot(turned_0.to(DTYPE), basis_0, sums, input_precision=PRECISION)
            sums = tl.dot(turned_1.to(DTYPE), basis_1, sums, input_precision=PRECISION)
            if CONSTANT:
                constants = constant + head * (2 * HALF) + planes
                constant_0 = tl.load(constants, mask=planes < HALF, other=0.0).to(tl.float32)
                constant_1 = tl.load(constants + HALF, mask=planes < HALF, other=0.0).to(tl.float32)
                of_constant += tl.sum(turned_0 * constant_0[None, :] + turned_1 * constant_1[None, :], 1)
        place = node_index * STRIDE + own
        inside = of_node[:, None] & (column < width)[None, :]
        tl.store(absorbed + place[:, None] * WIDTH + column[None, :], sums.to(DTYPE), mask=inside)
        if CONSTANT:
            tl.store(absorbed_constant + place, of_constant, mask=of_node)
    tl.debug_barrier()


@triton.jit
def slow_scores(
    absorbed, absorbed_constant, places, latents, base, block, block_row, key_block, key_row, valid, place_in_block,
    KEYS: tl.constexpr, CONSTANT: tl.constexpr, NODES: tl.constexpr, ROWS: tl.constexpr, TILE_ROWS: tl.constexpr,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, ALIGN: tl.constexpr, ROW_ALIGN: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What the slow planes of all heads contribute, [keys, query rows], by what `absorb_queries` stored.

    The latents are in registers, or with COLUMNS loaded again, so many columns at a time.
    """
    query_row = tl.arange(0, TILE_ROWS)
    sums = ()
    for _ in tl.static_range(len(NODES)):
        sums += (tl.zeros((TILE, TILE_ROWS), tl.float32),)
    for p in tl.static_range(len(KEYS)):
        if COLUMNS > 0:
            for column in range(0, places[p][1], COLUMNS):
                place = tl.multiple_of(elements_of(column, KEYS[p][0], DTYPE), ROW_ALIGN)
                piece = load_piece(
                    base + places[p][2] + place, block, block_row, key_block, key_row, places[p][3] - place, valid,
                    KEYS[p][0], COLUMNS, DTYPE,
                )  # fmt: skip
                numbers = numbers_of(piece, KEYS[p][0], COLUMNS, TILE, DTYPE)
                first = tl.multiple_of(places[p][0] + column, ALIGN)
                sums = _met(
                    sums, numbers, absorbed + first, places[p][1] - column, query_row, NODES, ROWS, TILE_ROWS, WIDTH,
                    COLUMNS, PRECISION,
                )  # fmt: skip
        else:
            sums = _met(
                sums, latents[p], absorbed + places[p][0], places[p][1], query_row, NODES, ROWS, TILE_ROWS, WIDTH,
                KEYS[p][2], PRECISION,
            )  # fmt: skip
    scores = tl.zeros((TILE, TILE_ROWS), tl.float32)
    where = place_in_block.to(tl.float32)
    for m in tl.static_range(len(NODES)):
        weight = tl.full((TILE,), 1.0, tl.float32)
        for other in tl.static_range(len(NODES)):
            if other != m:
                weight *= (where - NODES[other]) * (1.0 / (NODES[m] - NODES[other]))
        of_node = sums[m]
        if CONSTANT:
            constants = absorbed_constant + m * TILE_ROWS + query_row
            of_node += tl.load(constants, mask=query_row < ROWS, other=0.0)[None, :]
        scores += weight[:, None] * of_node
    return scores


@triton.jit
def _met(
    sums, latents, absorbed, count, query_row, NODES: tl.constexpr, ROWS: tl.constexpr, TILE_ROWS: tl.constexpr,
    WIDTH: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """sums, a tile [keys, query rows] for each node, with the products of `count` columns of latents added."""
    column = tl.arange(0, SIZE)
    inside = (query_row < ROWS)[:, None] & (column < count)[None, :]
    added = ()
    for m in tl.static_range(len(NODES)):
        rows = absorbed + (m * TILE_ROWS + query_row[:, None]) * WIDTH + column[None, :]
        queries = tl.trans(tl.load(rows, mask=inside, other=0.0))
        added += (tl.dot(latents, queries, sums[m], input_precision=PRECISION),)
    return added
