"""Fisher information of keys and values: how much an error in each of them costs the model.

Let g be the gradient of the model's loss by the keys (or values) of one token in one layer. An error e in them raises
the loss, and the KL divergence from the uncompressed model, by e^T E[g g^T] e / 2 to second order. The expectation is
over text that the model wrote itself, because there the Fisher information is the curvature of the loss. The longest
gradients are clipped (`GradientClip`), otherwise few tokens would dominate. The sum is taken for keys and values as
they are, G = [n, n] for the n numbers of a group. For keys = B latent, the information of the latent is B^T G B. So
one pass over the uncompressed model serves every basis and rank.

The pass runs forward once and keeps the hidden states that enter each layer. Then it runs backward one layer at a time,
computing each layer again with gradients, so that a model whose weights are read layer by layer needs no more memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ..checkpoint.families import Family
from ..checkpoint.layout import AttentionShape
from ..errors import NumericsError
from ..models.layerwise import LayerwiseModel, logit_batches
from ..models.projections import kv_parameters
from ..progress import Advance, Progress
from .bases.information import LayerFisher
from .bases.moments import LayerStatistics
from .capture import StoredKeys, observed_attention
from .codes.quantiser import SAMPLED_TOKENS
from .samples import GradientClip, SampleKeeper

TOP_TOKEN_SHARE = 0.001
"""Share of the tokens, those with the longest gradients, whose part of the information is reported."""


def fisher_information(
    network: LayerwiseModel,
    sequences: Tensor,
    group_size: int,
    wanted: Sequence[frozenset[str]],
    samples: int = SAMPLED_TOKENS,
    advance: Advance = lambda done: None,
) -> Iterator[tuple[int, LayerFisher]]:
    """Fisher information of every layer, the last layer first.

    Args:
        sequences: [n, seq_len] tokens, written by the model itself.
        group_size: KV heads whose products are summed.
        wanted: for each layer, names of the stored keys and values (`value`, or from `stored_name`).
        samples: most tokens whose keys and values are kept; see SampleKeeper.
        advance: is called with tokens times passes through a layer.
    Yields:
        (layer, its information). The states that enter each layer are kept, on disk if they are large, until all are
        done.
    Raises:
        NumericsError: a gradient is not finite; names the layer.
    """
    states = all_states(network, sequences, advance)
    _, gradient = head_gradient(
        network, sequences, states.pop(), lambda logits, labels, *_: cross_entropy(logits, labels, reduction="sum")
    )
    for index in reversed(range(network.shape.num_layers)):
        yield (
            index,
            _layer_backward(network, index, states.pop(), gradient, group_size, wanted[index], samples, advance),
        )


def all_states(network: LayerwiseModel, sequences: Tensor, advance: Advance = lambda done: None) -> list[Tensor]:
    """Compute the hidden states that enter each layer and leave the last, each [n, seq_len, hidden_size]."""
    states = [network.embed(sequences)]
    for index in range(network.shape.num_layers):
        out = network.states_like(sequences)
        with network.layer(index):
            network.run(index, states[-1], out, advance)
        states.append(out)
    return states


Loss = Callable[[Tensor, Tensor, Callable[[Tensor], Tensor], tuple[slice, slice]], Tensor]
"""Function that sums a loss over some positions. Its arguments: float32 logits [positions, vocab_size]; the next tokens
[positions]; the head; and the slices of sequences and positions that these are."""


def head_gradient(network: LayerwiseModel, sequences: Tensor, states: Tensor, loss: Loss) -> tuple[float, Tensor]:
    """Sum a loss over all positions but the last; returns it with its gradient by the final hidden states."""
    gradient, total = network.states_like(sequences).zero_(), 0.0
    with network.head(differentiable=True) as head, torch.enable_grad():
        for part in logit_batches(network, sequences):
            hidden = states[part].clone().requires_grad_()
            labels = sequences[part[0], part[1].start + 1 : part[1].stop + 1].flatten()
            logits = head(hidden).float().flatten(0, 1)
            part_loss = loss(logits, labels.to(logits.device), head, part)
            (gradient[part],) = torch.autograd.grad(part_loss, hidden)
            total += float(part_loss.detach())
    return total, gradient


def _layer_backward(
    network: LayerwiseModel,
    index: int,
    states: Tensor,
    gradient: Tensor,
    group_size: int,
    wanted: frozenset[str],
    samples: int,
    advance: Advance,
) -> LayerFisher:
    """Compute the information of one layer.

    Args:
        states: hidden states that enter the layer, [n, seq_len, hidden_size].
        gradient: gradient by the states that leave the layer; overwritten with the gradient by those that enter it.
    """
    information, excess = (LayerStatistics(network.shape, group_size) for _ in range(2))
    tokens, seq_len = states.shape[0] * states.shape[1], states.shape[1]
    kept = {name: SampleKeeper(tokens, seq_len, samples, index) for name in sorted(wanted)}
    clips = {name: GradientClip(tokens) for name in kept}
    stored = StoredKeys(network.model, network.family, network.shape)
    reported: dict[str, Tensor] = {}
    squares: list[Tensor] = []  # squared gradients by the keys and values of each token

    def observe(layer: int, tensors: dict[str, Tensor], output: Tensor) -> None:
        reported.update({name: tensor for name, tensor in tensors.items() if name != "query"})

    observed = observed_attention(network.model, network.family, network.shape, range(index, index + 1), observe)
    with network.layer(index), observed, torch.enable_grad():
        for part in network.batches(states):
            hidden = states[part].to(network.device).clone().requires_grad_()
            output = network.through(index, hidden)
            names = sorted(reported)
            by_all = torch.autograd.grad(
                output, [hidden, *(reported[name] for name in names)], gradient[part].to(output.device)
            )
            gradient[part] = by_all[0].to(gradient.device)
            if not all(torch.isfinite(g).all() for g in by_all[1:]):
                raise NumericsError(
                    f"layer {index}: a gradient of the loss by its keys or values is not finite.",
                    "Calibrate with --dtype float32.",
                )
            by_name = dict(zip(names, by_all[1:], strict=True))
            by_keys, by_values = (by_name[name].double().square().sum((1, 3)) for name in ("key_post", "value"))
            squares.append((by_keys + by_values).flatten())
            gradients = stored.of(kept, index, seq_len, by_name)
            vectors = stored.of(kept, index, seq_len, {name: tensor.detach() for name, tensor in reported.items()})
            information.add(gradients)
            for name, by_them in gradients.items():
                kept[name].add(vectors[name], by_them)
                clips[name].add(by_them)
            advance(2 * hidden.shape[0] * hidden.shape[1])
    excess.add({name: clip.excess() for name, clip in clips.items()})
    information.sums = {name: (information.sums[name] - excess.sums[name]).cpu() for name in kept}
    clipped = {}
    for name, keeper in kept.items():
        kept_samples = keeper.samples()
        clipped[name] = replace(kept_samples, gradients=clips[name].shortened(kept_samples.gradients))
    by_token = torch.cat(squares)
    longest = by_token.topk(max(1, round(TOP_TOKEN_SHARE * tokens))).values
    return LayerFisher(information, clipped, float(longest.sum() / by_token.sum()))


def weight_fisher(
    model: Any, family: Family, shape: AttentionShape, tokens: Tensor, count: int, progress: Progress
) -> Tensor:
    """Sum the squared gradients of the next-token loss with respect to W_k and W_v of each KV head.

    Gradients are taken sequence by sequence and squared before they are summed.

    Returns:
        [num_layers, 2, num_kv_heads], float64: for keys and for values.
    Source: Palu, arXiv 2407.21118, section 3.2.
    """
    sequences = tokens[: max(1, count // tokens.shape[1])]
    totals = torch.zeros(shape.num_layers, 2, shape.num_kv_heads, dtype=torch.float64)
    parameters = [kv_parameters(family, model, layer) for layer in range(shape.num_layers)]
    distinct = {id(parameter): parameter for pair in parameters for parameter, _ in pair}
    with progress.task("gradients", sequences.numel(), "tokens") as advance:
        for sequence in sequences.split(1):
            ids = sequence.to(model.device)
            loss = model(ids, labels=ids, use_cache=False).loss
            gradients = dict(zip(distinct, torch.autograd.grad(loss, list(distinct.values())), strict=True))
            for layer, pair in enumerate(parameters):
                for side, (parameter, part) in enumerate(pair):
                    squared = part(gradients[id(parameter)]).double().square()
                    totals[layer, side] += squared.reshape(shape.num_kv_heads, -1).sum(-1).cpu()
            advance(sequence.numel())
    return totals
