"""Train bases and codes by distillation: gradient descent on the KL divergence from the uncompressed model.

A closed form does not know how the errors of all layers, channels and tokens add up. So all latents of a model are
trained together, in place of its keys and values, on calibration tokens. Each training step draws a plan from the path
of plans, so that one training serves every number of bytes. The model's weights stay as they are, and the trained bases
fold into them like any basis.

A training step runs forward once and keeps the hidden states that enter each layer. Then it runs backward one layer at
a time, computing each layer again with gradients, so that activations take the memory of one layer. The weights of the
whole model have to be in memory, because a step reads every layer twice.

Source: rotor; the loss is that of knowledge distillation (Hinton et al., arXiv 1503.02531).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..checkpoint.bases import LayerBases, fast_numbers, other_numbers
from ..checkpoint.layout import ExactTokens, ModelForm
from ..errors import NumericsError
from ..kernels.rows import chosen_nibble, scale_of
from ..models.layerwise import LayerwiseModel
from ..progress import Advance
from .allocation.bits import BitsPath
from .bases.moments import vector_names
from .capture import StoredKeys, observed_attention
from .codes.layer import GroupChannels, LayerCodes, by_latent
from .codes.parted import by_head, from_heads
from .codes.training import TrainedCode
from .gradients import all_states, exact_in_rows, head_gradient

COMPRESSION_RANGE = (0.78, 0.92)
"""Range of the compression of the plans that training draws."""

BASIS_RATE = {True: 0.1, False: 4.0}
"""Adam's learning rate for bases, of joint latents (True) and of others, relative to the change of each number that
costs an equal part of the first loss. In joint groups what fast latents are read as moves the rest too."""

CODE_RATE = 2e-3
"""Adam's learning rate for means (in units of the 4-bit scale) and for logarithms of scales."""

WARMUP_STEPS = 10
"""Training steps over which learning rates rise; a cosine then lets them fall to 0."""


class DistilledModel:
    """A model whose attention reads decoded keys and values, and whose bases and codes are trained.

    channels: channels of each layer in the current plan.

    Args:
        network: the uncompressed model, all weights in memory.
        bases, codes: calibration's bases and codes of each layer.
        path: plans to draw from. exact: tokens that queries read exactly, as far as rows have more.
    """

    def __init__(
        self,
        network: LayerwiseModel,
        form: ModelForm,
        bases: Sequence[LayerBases],
        codes: Sequence[LayerCodes],
        path: BitsPath,
        exact: ExactTokens | None = None,
    ) -> None:
        self.network, self.form, self.path, self.exact = network, form, path, exact
        self._names = [vector_names(form.layer(index)) for index in range(len(bases))]
        self._layers = [
            [
                TrainedCode(pair, side, network.device, form.joint)
                for pair, side in zip(layer.latents, code.sides, strict=True)
            ]
            for layer, code in zip(bases, codes, strict=True)
        ]
        self._bases, self._codes = bases, codes
        self._stored = StoredKeys(network.model, network.family, network.shape)
        self.channels: list[GroupChannels] = []

    def train(
        self, sequences: Tensor, steps: int, tokens: int, seed: int, advance: Advance = lambda done: None
    ) -> None:
        """Train for `steps` steps of `tokens` tokens each, drawn from `sequences` [n, seq_len].

        Args:
            advance: is called with the tokens of each step.
        Raises:
            NumericsError: the loss is not finite.
        """
        generator = torch.Generator().manual_seed(seed)
        expected = self.network.final_states(sequences)
        sides = [side for layer in self._layers for side in layer]
        mixes = [mix for side in sides for mix in side.mixes]
        code_parameters = [parameter for side in sides for parameter in side.code_parameters]
        count = max(1, min(len(sequences), tokens // sequences.shape[1]))
        self.channels = self._plan(sum(COMPRESSION_RANGE) / 2)
        before = self._backward(sequences[:count], expected[:count])
        rate = BASIS_RATE[self.form.joint] * math.sqrt(before / sum(mix.numel() for mix in mixes))
        optimiser = torch.optim.Adam(
            [{"params": mixes, "rate": rate}, {"params": code_parameters, "rate": CODE_RATE}], betas=(0.9, 0.99)
        )
        order = torch.empty(0, dtype=torch.int64)
        for step in range(steps):
            for group in optimiser.param_groups:
                cosine = (1 + math.cos(math.pi * step / steps)) / 2
                group["lr"] = group["rate"] * cosine * min(1, (step + 1) / WARMUP_STEPS)
            if len(order) < count:
                order = torch.cat([order, torch.randperm(len(sequences), generator=generator)])
            drawn, order = order[:count], order[count:]
            low, high = COMPRESSION_RANGE
            self.channels = self._plan(low + (high - low) * float(torch.rand(1, generator=generator)))
            optimiser.zero_grad(set_to_none=True)
            self._backward(sequences[drawn], expected[drawn])
            optimiser.step()
            advance(sequences[drawn].numel())

    def trained(self) -> Iterator[tuple[LayerBases, LayerCodes]]:
        """The trained bases and codes of each layer."""
        for bases, before, sides in zip(self._bases, self._codes, self._layers, strict=True):
            pairs, codes = zip(*(side.trained() for side in sides), strict=True)
            yield replace(bases, latents=pairs), replace(before, sides=codes)

    def _plan(self, compression: float) -> list[GroupChannels]:
        plan = self.path.at_compression(compression) or self.path.plans()[-1]
        assert plan.channels is not None
        return plan.channels

    def read(self, layer: int, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Encode and decode the keys and values of a layer; attention computes with the result."""
        seq_len, size = tensors["value"].shape[2], self.form.group_size
        stored = self._stored.of(self._names[layer], layer, seq_len, tensors)
        vectors = [
            stored[name].float().unflatten(1, (-1, size)).flatten(2).transpose(0, 1) for name in self._names[layer]
        ]
        if self.form.joint:
            read = [self._through_joint(layer, vectors[0])]
        else:
            sides = zip(self._layers[layer], vectors, by_latent(self.channels[layer]), strict=True)
            read = [side.through(own, channels) for side, own, channels in sides]
        decoded = [own.transpose(0, 1).unflatten(2, (size, -1)).flatten(1, 2) for own in read]
        key, value = decoded if len(decoded) > 1 else decoded[0].chunk(2, dim=-1)
        key = self._stored.when_read(layer, key, seq_len, self.form.keys[layer])

        def as_before(tensor: Tensor, name: str) -> Tensor:
            return tensor.unflatten(0, (-1, seq_len)).transpose(1, 2).to(tensors[name].dtype)

        return as_before(key, "key_post"), as_before(value, "value")

    def _through_joint(self, layer: int, numbers: Tensor) -> Tensor:
        """Code the numbers of joint groups, [num_groups, tokens, n], as `checkpoint.bases.Parting` says."""
        *fast, rest = self._layers[layer]
        *of_fast, of_rest = by_latent(self.channels[layer])
        form, size, shape = self.form.keys[layer], self.form.group_size, self.network.shape.layer(layer)
        parting, ratio = self._bases[layer].parting, None
        assert parting is not None
        if fast:
            ratio = self._codes[layer].ratio(of_fast[0])
            parting = parting.predicted_from(*fast[0].distortions(of_fast[0]))
        mean, feedback, prediction = (
            tensor.to(numbers) for tensor in (parting.mean, parting.feedback, parting.prediction)
        )
        at = fast_numbers(form, size, shape).flatten().to(numbers.device)
        others = other_numbers(form, size, shape).to(numbers.device)
        centred = numbers - mean.unsqueeze(1)
        own, left = centred[..., at], centred[..., others]
        known = own
        if fast:
            known = from_heads(fast[0].unrounded(by_head(own, size), of_fast[0]), size)
        energy, count = rest.energy(left + (known - own) @ feedback - known @ prediction, of_rest, ratio)
        if fast:
            of_heads, counts = fast[0].energy(by_head(own, size), of_fast[0])
            energy = energy + of_heads.unflatten(0, (-1, size)).sum(1)
            count = count + counts.unflatten(0, (-1, size)).sum(1)

        def lost(scale: Tensor) -> Tensor:
            """What `chosen_nibble` asks for; the rest counts as it is before errors of fast codes move it."""
            stored, total = own, torch.zeros_like(energy)
            each = scale.unsqueeze(-1)
            if fast:
                scaled = by_head(own / each, size)
                total = fast[0].lost(scaled, of_fast[0]).unflatten(0, (-1, size)).sum(1)
                stored = each * from_heads(fast[0].unrounded(scaled, of_fast[0], means=True), size)
            target = left + (stored - own) @ feedback - stored @ prediction
            return total + rest.lost(target / each, of_rest, ratio)

        scale = scale_of(chosen_nibble(energy / count.unsqueeze(1), lost)).unsqueeze(-1)
        read = own
        if fast:
            scaled = fast[0].through(by_head(own / scale, size), of_fast[0])
            read = scale * from_heads(scaled, size)
        target = left + (read - own) @ feedback - read @ prediction
        rest_read = scale * rest.through(target / scale, of_rest, ratio) + read @ prediction
        found = torch.empty_like(centred).index_copy(-1, at, read).index_copy(-1, others, rest_read)
        return found + mean.unsqueeze(1)

    def _backward(self, sequences: Tensor, expected: Tensor) -> float:
        """Add the gradients of the mean KL divergence to those of the parameters; returns the divergence.

        Args:
            expected: final hidden states of the uncompressed model.
        """
        network, layers = self.network, range(self.network.shape.num_layers)
        count = sequences.shape[0] * (sequences.shape[1] - 1)

        def kl_div(
            logits: Tensor, labels: Tensor, head: Callable[[Tensor], Tensor], part: tuple[slice, slice]
        ) -> Tensor:
            with torch.no_grad():
                reference = head(expected[part].clone()).float().flatten(0, 1).log_softmax(-1)
            return (reference.exp() * (reference - logits.log_softmax(-1))).sum()

        exact = exact_in_rows(network.shape, self.exact, sequences.shape[1])
        with observed_attention(network.model, network.family, network.shape, layers, read=self.read, exact=exact):
            states = all_states(network, sequences)
            total, gradient = head_gradient(network, sequences, states.pop(), kl_div)
            gradient /= count
            for index in reversed(layers):
                entering = states.pop()
                sides = [side for layer in network.layers_at(index) for side in self._layers[layer]]
                if not sides:
                    continue
                parameters = [p for side in sides for p in (*side.mixes, *side.code_parameters)]
                with network.layer(index), torch.enable_grad():
                    for part in network.batches(entering):
                        hidden = entering[part].to(network.device).clone().requires_grad_()
                        output = network.through(index, sequences[part], hidden)
                        by_hidden, *by_parameters = torch.autograd.grad(
                            output, [hidden, *parameters], gradient[part].to(output.device)
                        )
                        gradient[part] = by_hidden.to(gradient.device)
                        for parameter, added in zip(parameters, by_parameters, strict=True):
                            parameter.grad = added if parameter.grad is None else parameter.grad + added
        if not math.isfinite(total):
            raise NumericsError("the loss of distillation is not finite.", "Calibrate with --dtype float32.")
        return total / count
