"""Loss against bits in one layer where one row in a thousand is 30 to 100 times as long; synthetic, float64.

    python artifacts/studies/outliers.py

Keys and values of two KV heads of 64, four query heads each, sequences of 512. Spectra are like those published for
Llama-3.1-8B: 99 % of a head's energy in 36 of 64 key and 24 of 64 value channels; values tell 0.86 of the keys'
variance. Queries hardly see what makes a key long. Long rows:

- none: there are none.
- first: the first row of each sequence, always the same, as the first token's is.
- shared, P %: drawn, in one direction but for P % of their energy, as sinks at other tokens are; that part is spread
  over all channels alike, also those that ordinary rows hardly use.
- apart: drawn, each in a direction of its own.

The joint latent gets rotor's basis, codes and bits, from the layer's own gradients on 16 K tokens, shortened and
sampled as calibration does. Printed is the squared error of what attention puts out over its variance, on other
sequences with other long rows, by bits a channel in the mean. `alike` gives each channel as many static bits; `a token`
has a scale and a zero point for each token and 64 numbers (0.5 bits a number more). Two mends: `rotor, a scale a row`
widens all channels of a row by the power of two, of 16, that suits it best; `rotor, long rows exact` stores these as
they are.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rotor.calibration.allocation.channel_bits import bit_curve
from rotor.calibration.bases.layer import layer_bases
from rotor.calibration.codes.layer import coded_bases, layer_codes
from rotor.calibration.gradient_sums import SAMPLED_TOKENS, GradientClip, SampleKeeper
from rotor.calibration.information import LayerFisher
from rotor.calibration.moments import LayerStatistics, stored_name
from rotor.checkpoint.layout import AttentionShape, KeyForm, LayerForm
from rotor.checkpoint.rows import UNIT_NIBBLES, CodedRow

HEADS, SHARED, DIM, LENGTH = 2, 4, 64, 512
SHAPE = AttentionShape(1, HEADS * SHARED, HEADS, DIM, 512)
FORM = LayerForm(KeyForm(64), HEADS, joint=True)
NAME = stored_name(FORM.keys, joint=True)
WIDTHS = (0, 4, 8, 12, 16)
BITS = (0.5, 1.0, 2.0, 4.0, 6.0, 8.0)
ALIKE = {4.0: CodedRow(n4=2 * HEADS * DIM), 8.0: CodedRow(n8=2 * HEADS * DIM)}
KINDS = {"none": None, "first": 0.0, "shared, 0.1 %": 0.001, "shared, 1 %": 0.01, "shared, 10 %": 0.1, "apart": 1.0}
"""By name, the share of a long row's energy that is its own."""

LONGEST, CALIBRATED, TESTED = (30.0, 100.0), 32, 16


class Drawn:
    """Queries, keys, values [sequences, heads, LENGTH, DIM] of a layer, and which rows are long."""

    def __init__(self, kind: str, sequences: int, seed: int) -> None:
        layer, draw = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)

        def normal(*size: int, of: torch.Generator = draw) -> Tensor:
            return torch.randn(*size, dtype=torch.float64, generator=of)

        def rotation(size: int) -> Tensor:
            return torch.linalg.qr(normal(size, size, of=layer))[0]

        def mixture(channels: int) -> Tensor:
            energy = 0.01 ** (torch.arange(DIM, dtype=torch.float64) / channels)
            return (energy / energy.mean()).sqrt()[:, None] * rotation(DIM)

        of_values = normal(sequences, LENGTH, HEADS * DIM)
        of_keys = 0.86**0.5 * of_values @ rotation(HEADS * DIM) + 0.14**0.5 * normal(*of_values.shape)
        lengths = LONGEST[0] + (LONGEST[1] - LONGEST[0]) * torch.rand(sequences, LENGTH, 1, generator=draw).double()
        self.long = torch.rand(sequences, LENGTH, generator=draw) < (1e-3 if kind != "none" else 0)
        if kind == "first":
            self.long = torch.arange(LENGTH).expand(sequences, -1) == 0
            lengths = torch.full_like(lengths, 65.0)
        own = KINDS[kind] or 0.0
        sides: list[list[Tensor]] = [[], [], []]
        for head in range(HEADS):
            query, key, value = mixture(36), mixture(36), mixture(24)
            sides[0].append(0.7 * normal(sequences, SHARED, LENGTH, DIM) @ query)
            for side, (latents, mix) in enumerate(((of_keys, key), (of_values, value)), 1):
                rows = latents[..., head * DIM : (head + 1) * DIM] @ mix
                far = (1 - own) ** 0.5 * normal(DIM, of=layer) + own**0.5 * normal(*rows.shape)
                if side == 1:
                    values, vectors = torch.linalg.eigh(query.mT @ query)
                    far = far @ (vectors / (1 + 65**2 * values).sqrt()) @ vectors.mT
                far = far / far.norm(dim=-1, keepdim=True) * lengths * DIM**0.5
                sides[side].append(torch.where(self.long[..., None], far, rows))
        self.queries, self.keys, self.values = (
            torch.cat(sides[0], 1),
            torch.stack(sides[1], 1),
            torch.stack(sides[2], 1),
        )
        self.rows = rows_of(self.keys, self.values)

    def attend(self, keys: Tensor, values: Tensor) -> Tensor:
        """Output of attention, [sequences, query heads, LENGTH, DIM]."""
        keys, values = (side.repeat_interleave(SHARED, 1) for side in (keys, values))
        return torch.nn.functional.scaled_dot_product_attention(self.queries, keys, values, is_causal=True)

    def error(self, rows: Tensor, exact: bool = False) -> float:
        """Of what is read in place of `rows`, as a share of the variance."""
        read = torch.where(self.long.flatten()[:, None, None], self.rows, rows) if exact else rows
        truth = self.attend(self.keys, self.values)
        found = self.attend(*read.unflatten(0, (-1, LENGTH)).transpose(1, 2).split(DIM, -1))
        return float((found - truth).square().sum() / (truth - truth.mean(2, True)).square().sum())


def rows_of(keys: Tensor, values: Tensor) -> Tensor:
    """Of each token its heads' keys and values, [tokens, HEADS, 2 DIM]."""
    return torch.cat([keys, values], -1).transpose(1, 2).flatten(0, 1)


def calibrate(kind: str) -> tuple[LayerStatistics, LayerFisher]:
    tokens = CALIBRATED * LENGTH
    statistics, information, excess = (LayerStatistics(SHAPE, HEADS) for _ in range(3))
    keeper, clip = SampleKeeper(tokens, LENGTH, SAMPLED_TOKENS, 0), GradientClip(tokens)
    for seed in range(CALIBRATED // 8):
        drawn = Drawn(kind, 8, 1000 + seed)
        inputs = drawn.keys.requires_grad_(), drawn.values.requires_grad_()
        noise = torch.randn(drawn.queries.shape, generator=torch.Generator().manual_seed(seed)).double()
        gradients = rows_of(*torch.autograd.grad(drawn.attend(*inputs), inputs, noise))
        statistics.add({NAME: drawn.rows})
        information.add({NAME: gradients})
        keeper.add(drawn.rows, gradients)
        clip.add(gradients)
    excess.add({NAME: clip.excess()})
    information.sums[NAME] -= excess.sums[NAME]
    found = keeper.samples()
    samples = replace(found, gradients=clip.shortened(found.gradients))
    return statistics, LayerFisher(information, {NAME: samples}, 0.0)


def per_token(rows: Tensor, bits: float) -> Tensor:
    parts = rows.unflatten(-1, (2, DIM))
    low, high = parts.amin(-1, keepdim=True), parts.amax(-1, keepdim=True)
    step = (high - low) / (2**bits - 1)
    return (low + step * ((parts - low) / step).round()).flatten(-2)


def table(kind: str) -> None:
    statistics, fisher = calibrate(kind)
    bases = layer_bases(statistics, None, FORM, "fisher", "fisher", fisher)  # type: ignore[arg-type]
    codes, drawn = layer_codes(bases, fisher), Drawn(kind, TESTED, 1)
    curve = bit_curve(codes.qk.losses(0, WIDTHS), WIDTHS)
    weight = codes.qk.weight[0, codes.qk.order(0)]

    def coded(channels: CodedRow, scales: int = 1) -> Tensor:
        plan = coded_bases(bases, codes, [(channels, None)])
        pair, code = plan.latents[0], plan.latents[0].codes[0]
        latents = drawn.rows.flatten(1) @ pair.encode[0]
        best, least = latents, torch.full_like(latents[:, :1], torch.inf)
        for wider in 2.0 ** torch.arange(scales):
            read = (code.decode(code.encode((latents - code.mean) / wider + code.mean)) - code.mean) * wider + code.mean
            error = ((read - latents).square() * weight).sum(-1, keepdim=True)
            best, least = torch.where(error < least, read, best), torch.minimum(error, least)
        return (best @ pair.decode[0].mT).reshape(drawn.rows.shape)

    by_bits = [curve.channels(round(bits * 2 * HEADS * DIM / 4 / UNIT_NIBBLES)) for bits in BITS]
    plans = [coded(channels) for channels in by_bits]
    found = {
        "rotor": [drawn.error(plan) for plan in plans],
        "rotor, a scale a row": [drawn.error(coded(channels, 16)) for channels in by_bits],
        "rotor, long rows exact": [drawn.error(plan, exact=True) for plan in plans],
        "alike": [drawn.error(coded(ALIKE[bits])) if bits in ALIKE else None for bits in BITS],
        "a token": [drawn.error(per_token(drawn.rows, bits)) if bits in ALIKE else None for bits in BITS],
    }
    for code, errors in found.items():
        print(f"| {kind} | {code} |", " | ".join("" if e is None else f"{e:.1e}" for e in errors), "|", flush=True)


if __name__ == "__main__":
    print("| long rows | code |", *(f"{bits:g} |" for bits in BITS))
    for name in KINDS:
        table(name)
