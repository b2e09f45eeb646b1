"""Train bases and codes by distillation: gradient descent on the KL divergence from the uncompressed model.

What a closed form cannot know is how the errors of all layers, channels and tokens come together. So all latents of a
model are trained at once, in the place of its keys and values, on calibration tokens: each step draws a plan from the
path of plans, so that one training serves every number of bytes. The model's own weights stay as they are, and what
is trained folds into them like any basis.

A step goes forward once, keeping what enters each layer, then backward one layer at a time, each computed again with
gradients: memory is that of one layer. The whole model has to be in memory, as every layer is read twice a step.

Source: rotor's own; the loss is that of knowledge distillation (Hinton et al., arXiv 1503.02531).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..checkpoint.bases import LayerBases
from ..checkpoint.layout import ModelForm
from ..errors import NumericsError
from ..models.layerwise import LayerwiseModel
from ..progress import Advance
from .allocation.bits import BitsPath
from .bases.moments import latent_names
from .capture import StoredKeys, observed_attention
from .codes.layer import GroupChannels, LayerCodes
from .codes.training import TrainedCode
from .gradients import all_states, head_gradient

COMPRESSION = (0.78, 0.92)
"""Plans are drawn that remove a share of the cache between these."""

RATE = 4.0
"""Adam's learning rate of bases, in units of what would cost each of their numbers an equal part of the loss before."""

CODE_RATE = 2e-3
"""That of means, in steps of 4 bits, and of logarithms of scales. After WARMUP steps rates fall as a cosine to 0."""

WARMUP = 10


class DistilledModel:
    """A model whose attention reads what its codes give back, and whose bases and codes are trained.

    Args:
        network: the uncompressed model, all weights in memory.
        bases, codes: of each layer, by calibration. path: plans to draw from.

    channels: of each layer, of the plan that is computed with.
    """

    def __init__(
        self,
        network: LayerwiseModel,
        form: ModelForm,
        bases: Sequence[LayerBases],
        codes: Sequence[LayerCodes],
        path: BitsPath,
    ) -> None:
        self.network, self.form, self.path = network, form, path
        self._names = [latent_names(keys, form.joint) for keys in form.keys]
        self._layers = [
            [TrainedCode(pair, side, network.device) for pair, side in zip(own.latents, of.sides, strict=True)]
            for own, of in zip(bases, codes, strict=True)
        ]
        self._bases = bases
        self._stored = StoredKeys(network.model, network.family, network.shape)
        self.channels: list[GroupChannels] = []

    def train(self, rows: Tensor, steps: int, tokens: int, seed: int, advance: Advance = lambda done: None) -> None:
        """Take `steps` steps of so many tokens of `rows` [n, seq_len]; `advance` gets the tokens that are done.

        Raises:
            NumericsError: the loss is not finite.
        """
        generator = torch.Generator().manual_seed(seed)
        expected = self.network.final_states(rows)
        sides = [side for layer in self._layers for side in layer]
        mixes, of_codes = ([p for side in sides for p in getattr(side, name)] for name in ("mixes", "steps"))
        count = max(1, min(len(rows), tokens // rows.shape[1]))
        self.channels = self._plan(sum(COMPRESSION) / 2)
        before = self._backward(rows[:count], expected[:count])
        rate = RATE * math.sqrt(before / sum(mix.numel() for mix in mixes))
        optimiser = torch.optim.Adam(
            [{"params": mixes, "rate": rate}, {"params": of_codes, "rate": CODE_RATE}], betas=(0.9, 0.99)
        )
        order = torch.empty(0, dtype=torch.int64)
        for step in range(steps):
            for group in optimiser.param_groups:
                cosine = (1 + math.cos(math.pi * step / steps)) / 2
                group["lr"] = group["rate"] * cosine * min(1, (step + 1) / WARMUP)
            if len(order) < count:
                order = torch.cat([order, torch.randperm(len(rows), generator=generator)])
            drawn, order = order[:count], order[count:]
            low, high = COMPRESSION
            self.channels = self._plan(low + (high - low) * float(torch.rand(1, generator=generator)))
            optimiser.zero_grad(set_to_none=True)
            self._backward(rows[drawn], expected[drawn])
            optimiser.step()
            advance(rows[drawn].numel())

    def trained(self) -> Iterator[tuple[LayerBases, LayerCodes]]:
        """Bases and codes of each layer, in the place of calibration's."""
        for bases, sides in zip(self._bases, self._layers, strict=True):
            pairs, codes = zip(*(side.trained() for side in sides), strict=True)
            yield replace(bases, latents=pairs), LayerCodes(*codes)

    def _plan(self, compression: float) -> list[GroupChannels]:
        plan = self.path.at_compression(compression) or self.path.steps()[-1]
        assert plan.channels is not None
        return plan.channels

    def read(self, layer: int, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values that attention computes with, from those that it would store."""
        seq_len, size, found = tensors["value"].shape[2], self.form.group_size, []
        stored = self._stored.of(self._names[layer], layer, seq_len, tensors)
        for index, name in enumerate(self._names[layer]):
            own = stored[name].float()
            by_group = own.unflatten(1, (-1, size)).flatten(2).transpose(0, 1)
            channels = [group[index] for group in self.channels[layer]]
            read = self._layers[layer][index].through(by_group, channels)  # type: ignore[arg-type]
            found.append(read.transpose(0, 1).unflatten(2, (size, -1)).flatten(1, 2))
        key, value = found if len(found) > 1 else found[0].chunk(2, dim=-1)
        key = self._stored.when_read(layer, key, seq_len, self.form.keys[layer])

        def as_before(tensor: Tensor, name: str) -> Tensor:
            return tensor.unflatten(0, (-1, seq_len)).transpose(1, 2).to(tensors[name].dtype)

        return as_before(key, "key_post"), as_before(value, "value")

    def _backward(self, rows: Tensor, expected: Tensor) -> float:
        """Add the gradients of the mean KL divergence to the parameters'; returns it.

        Args:
            expected: final hidden states of the uncompressed model.
        """
        network, layers = self.network, range(self.network.shape.num_layers)
        count = rows.shape[0] * (rows.shape[1] - 1)

        def kl_div(
            logits: Tensor, labels: Tensor, head: Callable[[Tensor], Tensor], part: tuple[slice, slice]
        ) -> Tensor:
            with torch.no_grad():
                reference = head(expected[part].clone()).float().flatten(0, 1).log_softmax(-1)
            return (reference.exp() * (reference - logits.log_softmax(-1))).sum()

        with observed_attention(network.model, network.family, network.shape, layers, read=self.read):
            states = all_states(network, rows)
            total, gradient = head_gradient(network, rows, states.pop(), kl_div)
            gradient /= count
            for index in reversed(layers):
                entering = states.pop()
                parameters = [p for side in self._layers[index] for p in (*side.mixes, *side.steps)]
                with network.layer(index), torch.enable_grad():
                    for part in network.batches(entering):
                        hidden = entering[part].to(network.device).clone().requires_grad_()
                        output = network.through(index, hidden)
                        by_hidden, *found = torch.autograd.grad(
                            output, [hidden, *parameters], gradient[part].to(output.device)
                        )
                        gradient[part] = by_hidden.to(gradient.device)
                        for parameter, own in zip(parameters, found, strict=True):
                            parameter.grad = own if parameter.grad is None else parameter.grad + own
        if not math.isfinite(total):
            raise NumericsError("the loss of distillation is not finite.", "Calibrate with --dtype float32.")
        return total / count
