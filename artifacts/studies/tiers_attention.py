"""ZDC's two ratios in attention: each kind of rows at its own width, beside all rows filled up to one width.

python artifacts/studies/tiers_attention.py

One layer of an 8B's heads (32 query, 8 KV) on random numbers in float32, one thread: rows of RANK numbers of keys and
of values a head, of which important tokens keep 0.6 and others 0.3 (recipes/cache/zdc.yaml). Products are
multiplications of queries with keys and of weights with values. Times are medians of alternating passes, of attention
alone and with storing and choosing.
"""

from __future__ import annotations

import time
from statistics import median

import torch
from torch import Tensor

from rotor.checkpoint.layout import AttentionShape, GroupLayout, LayerLayout
from rotor.checkpoint.rows import NumberRow
from rotor.kernels.parameters import AttentionParameters
from rotor.kernels.reference.attention import partial_attention
from rotor.kernels.rotary import Rotation
from rotor.policies import Tiers
from rotor.policies.layer import right_aligned
from rotor.policies.methods.tiers import TieredLayer

KV_HEADS, HEADS_PER_KV, HEAD_DIM, RANK = 8, 4, 128, 96
SHAPE = AttentionShape(1, KV_HEADS * HEADS_PER_KV, KV_HEADS, HEAD_DIM, HEAD_DIM * KV_HEADS * HEADS_PER_KV)
LAYOUT = LayerLayout(tuple(GroupLayout((head,), NumberRow(RANK), NumberRow(RANK)) for head in range(KV_HEADS)))
POLICY = Tiers(0.4, (), 0.4, 0.7, 0.4, 0.7)
PROMPTS, BEHIND, STEPS, REPEATS = (1024, 2048), 4096, 8, 5


class Together(TieredLayer):
    """All rows filled up to all channels and attended to together."""

    def attend(
        self, query: Tensor, parameters: AttentionParameters, rotation: Rotation | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        found = [self._whole(sequence) for sequence in self.sequences]
        keys, values = (right_aligned(side, 0.0) for side in zip(*found, strict=True))
        return partial_attention(query, keys, values, parameters, rotation, mask)


def passes(
    kind: type[TieredLayer], lengths: list[int], seed: int
) -> tuple[list[float], list[float], list[int], Tensor]:
    """Seconds of each pass and of its attention, products, and the last output."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.randn(HEAD_DIM, KV_HEADS * RANK, generator=generator) / HEAD_DIM**0.5
    parameters = AttentionParameters(LAYOUT, SHAPE, HEAD_DIM**-0.5, query_basis=basis)
    layer = kind(POLICY, POLICY.important)
    layer.follow(LAYOUT, torch.float32)
    whole, attention, products = [], [], []
    output = torch.empty(0)
    for length in lengths:
        query = torch.randn(1, SHAPE.num_heads, length, HEAD_DIM, generator=generator)
        key, value = (torch.randn(1, 1, length, KV_HEADS * RANK, generator=generator) for _ in range(2))
        start = time.perf_counter()
        layer.begin(None, 1, length, query.device)
        layer.update(key, value)
        begin = time.perf_counter()
        output, log_sums = layer.attend(query, parameters, None, None)
        end = time.perf_counter()
        products.append(products_of(layer, kind, length))
        again = time.perf_counter()
        layer.choose(log_sums)
        attention.append(end - begin)
        whole.append(end - start + time.perf_counter() - again)
    return whole, attention, products, output


def products_of(layer: TieredLayer, kind: type[TieredLayer], length: int) -> int:
    """Multiplications of a pass, over all pairs of a query and a key."""
    (sequence,) = layer.sequences
    total = 0
    for rows, layout in zip((sequence.high, sequence.low), layer.layouts, strict=True):
        group = (LAYOUT if kind is Together else layout).groups[0]
        total += rows[0].shape[2] * length * SHAPE.num_heads * (group.key.width + group.values.width)
    return total


def main() -> None:
    torch.set_num_threads(1)
    cases = {f"a prompt of {length}": ([length], 0) for length in PROMPTS}
    cases[f"a step behind {BEHIND}"] = ([BEHIND, *[1] * STEPS], 1)
    print("| | products, together | apart | apart over together | attention's time | whole pass |")
    print("|---" * 6 + "|")
    for name, (lengths, first) in cases.items():
        shares: list[list[float]] = [[], []]
        for seed in range(REPEATS):
            together, apart = passes(Together, lengths, seed), passes(TieredLayer, lengths, seed)
            torch.testing.assert_close(apart[3], together[3], rtol=1e-3, atol=1e-4)
            for share, of in zip(shares, (1, 0), strict=True):
                share.append(median(apart[of][first:]) / median(together[of][first:]))
        counts = together[2][-1], apart[2][-1]
        print(f"| {name} | {counts[0]:,} | {counts[1]:,} | {counts[1] / counts[0]:.2f} | ", end="")
        print(" | ".join(f"{median(share):.2f} ({min(share):.2f} to {max(share):.2f})" for share in shares) + " |")


if __name__ == "__main__":
    main()
