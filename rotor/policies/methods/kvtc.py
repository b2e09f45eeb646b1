"""KVTC: principal components of a layer, bits by dynamic programming, the first and the newest tokens exact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field, NonNegativeInt
from torch import Tensor

from ...errors import UsageError
from ..affine import pack, unpack
from ..policy import LayerSample
from ..quantiser import FittedQuantiser
from ..store import Codec, Parts, Stream, heads_apart, heads_together

WIDTHS = (0, 1, 2, 3, 4, 8)
"""Bits of a component."""

CLIPS = torch.linspace(0.5, 6, 45, dtype=torch.float64)
"""Half ranges that are tried, in standard deviations."""


@dataclass(frozen=True)
class KVTC(FittedQuantiser):
    """x ~ mean + V c(z), z = V^T (x - mean), over all KV heads of a layer. V: principal components of keys, or of
    values, on calibration text. c: uniform codes of fixed ranges, whose bits give the least squared error on that text.

    Args:
        bits: of a number, on average. first, window: first and newest tokens of a sequence that stay uncoded.

    Bytes of a number: bits / 8, in whole bytes for the components of equal bits.
    Limits: the paper's components reach over all layers, and its codes are DEFLATEd. For uncompressed models; not
    stored in checkpoints, but fitted when measured.
    Source: Staniszewski and Lancucki, KVTC (arXiv 2511.01815), section 3.
    """

    method: ClassVar[str] = "kvtc"
    bits: Annotated[float, Field(gt=0, le=8)] = 2.0
    first: NonNegativeInt = 4
    window: NonNegativeInt = 128

    def check_rows(self, coded: bool, post_rope: bool) -> None:
        hint = "Use it on the source model, or kvquant on rows of 16-bit numbers (recipe rotor-16)."
        raise UsageError("cache policy kvtc: is for uncompressed models, and finds components of its own.", hint)

    def fit_layer(self, sample: LayerSample) -> tuple[TransformCode, TransformCode]:
        return self._code(sample.keys), self._code(sample.values)

    def streams_of(self, fit: tuple[Codec, Codec]) -> tuple[Stream, Stream]:
        key, value = (Stream(code, window=self.window, first=self.first) for code in fit)
        return key, value

    def _code(self, side: Tensor) -> TransformCode:
        numbers = side[:, self.first :].flatten(0, 1).double()
        mean = numbers.mean(0)
        energy, basis = torch.linalg.eigh((numbers - mean).mT @ (numbers - mean) / len(numbers))
        latents, deviation = (numbers - mean) @ basis, energy.clamp(min=1e-30).sqrt()
        steps, losses = [torch.ones_like(deviation)], [latents.square().mean(0)]
        for bits in WIDTHS[1:]:
            tried = CLIPS[:, None] * deviation * 2 / 2**bits  # [clips, components]
            errors = [(decoded(encoded(latents, s, bits), s, bits) - latents).square().mean(0) for s in tried]
            least = torch.stack(errors).min(0)
            steps.append(tried.gather(0, least.indices[None])[0])
            losses.append(least.values)
        allocated = allocate(torch.stack(losses, 1), int(self.bits * len(mean)))
        order = allocated.argsort(descending=True, stable=True)
        step = torch.stack(steps, 1).gather(1, torch.searchsorted(torch.tensor(WIDTHS), allocated)[:, None])[:, 0]
        return TransformCode(mean.float(), basis[:, order].float(), step[order].float(), allocated[order])


def allocate(losses: Tensor, budget: int) -> Tensor:
    """Bits of each component, [n] of WIDTHS, at most `budget` together, with the least sum of losses [n, widths]."""
    best, choices = torch.zeros(budget + 1, dtype=torch.float64), []
    for loss in losses:
        options = torch.full((len(WIDTHS), budget + 1), torch.inf, dtype=torch.float64)
        for row, bits in enumerate(WIDTHS):
            if bits <= budget:
                options[row, bits:] = best[: budget + 1 - bits] + loss[row]
        best, choice = options.min(0)
        choices.append(choice)
    bits_of: list[int] = []
    for choice in reversed(choices):
        bits_of.insert(0, WIDTHS[int(choice[budget - sum(bits_of)])])
    return torch.tensor(bits_of)


def encoded(latents: Tensor, step: Tensor, bits: int) -> Tensor:
    return (latents / step + 2 ** (bits - 1)).floor().clamp(0, 2**bits - 1)


def decoded(codes: Tensor, step: Tensor, bits: int) -> Tensor:
    return (codes + 0.5 - 2 ** (bits - 1)) * step


@dataclass(frozen=True, eq=False)
class TransformCode(Codec):
    """mean [width over all heads]; basis [width, width], components of most bits first; step, bits [width].

    Parts: codes [batch_size, 1, tokens, bytes] uint8.
    """

    mean: Tensor
    basis: Tensor
    step: Tensor
    bits: Tensor

    def encode(self, states: Tensor) -> Parts:
        rows = heads_together(states.float())
        mean, basis, step = (part.to(rows.device) for part in (self.mean, self.basis, self.step))
        latents = (rows - mean) @ basis
        codes = [pack(encoded(latents[..., at], step[at], bits), bits) for at, bits, _ in self._runs()]
        return (torch.cat([rows[..., :0].to(torch.uint8), *codes], -1),)

    def decode(self, parts: Parts, num_heads: int, width: int) -> Tensor:
        (stored,) = parts
        mean, basis, step = (part.to(stored.device) for part in (self.mean, self.basis, self.step))
        rows = mean.expand(*stored.shape[:3], -1)
        for at, bits, place_in_code in self._runs():
            codes = unpack(stored[..., place_in_code], bits, at.stop - at.start).float()
            rows = rows + decoded(codes, step[at], bits) @ basis[:, at].mT
        return heads_apart(rows, num_heads)

    def _runs(self) -> list[tuple[slice, int, slice]]:
        """The components of each number of bits, but none; the bits; and their bytes."""
        runs, start, byte = [], 0, 0
        for bits in reversed(WIDTHS[1:]):
            count = int((self.bits == bits).sum())
            size = -(-count * bits // 8)
            runs += [(slice(start, start + count), bits, slice(byte, byte + size))] if count else []
            start, byte = start + count, byte + size
        return runs
