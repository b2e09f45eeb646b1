"""Fisher information of keys and values: how much an error in each of them costs the model.

With g the gradient of the model's own loss by the keys (or values) of one token in one layer, an error e in them raises
the loss, and the KL divergence from the uncompressed model, by e^T E[g g^T] e / 2 to second order. The expectation is
over text that the model wrote itself, where the Fisher information is the loss's curvature; the longest gradients are
shortened (`GradientClip`), or few tokens would be all of it. It is summed for the keys and values as they are, [n, n]
for the n numbers of a group; any basis has its own: for keys = B latent, B^T G B. So one pass over the uncompressed
model serves every form of keys, group size and basis.

The pass goes forward once, keeping what enters each layer, then backward one layer at a time, each computed again with
gradients: a model whose weights are read layer by layer needs no more memory for it.
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
from .codes.quantiser import SAMPLES
from .samples import GradientClip, SampleKeeper

TOP = 0.001
"""Of the tokens, whose share of the information is reported."""


def fisher_information(
    network: LayerwiseModel,
    rows: Tensor,
    group_size: int,
    wanted: Sequence[frozenset[str]],
    samples: int = SAMPLES,
    advance: Advance = lambda done: None,
) -> Iterator[tuple[int, LayerFisher]]:
    """Fisher information of every layer, the last layer first.

    Args:
        rows: [n, seq_len] tokens, written by the model itself.
        group_size: KV heads whose products are summed.
        wanted: of each layer: `value`, and what `stored_name` gives.
        samples: tokens of which keys and values are kept, at most; see SampleKeeper.
        advance: is called with tokens times passes through a layer.
    Yields:
        (layer, its information). What enters each layer is kept, on disk where it is large, until all are done.
    Raises:
        NumericsError: a gradient is not finite; names the layer.
    """
    states = all_states(network, rows, advance)
    _, gradient = head_gradient(
        network, rows, states.pop(), lambda logits, labels, *_: cross_entropy(logits, labels, reduction="sum")
    )
    for index in reversed(range(network.shape.num_layers)):
        yield (
            index,
            _layer_backward(network, index, states.pop(), gradient, group_size, wanted[index], samples, advance),
        )


def all_states(network: LayerwiseModel, rows: Tensor, advance: Advance = lambda done: None) -> list[Tensor]:
    """Hidden states that enter each layer, and those that leave the last, each [n, seq_len, hidden_size]."""
    states = [network.embed(rows)]
    for index in range(network.shape.num_layers):
        out = network.states_like(rows)
        with network.layer(index):
            network.run(index, states[-1], out, advance)
        states.append(out)
    return states


Loss = Callable[[Tensor, Tensor, Callable[[Tensor], Tensor], tuple[slice, slice]], Tensor]
"""Sum over some positions of a loss: of float32 logits and the tokens that come next, [positions, vocab_size] and
[positions]; the head, and which rows and positions these are of, are given too."""


def head_gradient(network: LayerwiseModel, rows: Tensor, states: Tensor, loss: Loss) -> tuple[float, Tensor]:
    """A loss summed over all positions but the last, and its gradient by the final hidden states, of their shape."""
    gradient, total = network.states_like(rows).zero_(), 0.0
    with network.head(differentiable=True) as head, torch.enable_grad():
        for part in logit_batches(network, rows):
            hidden = states[part].clone().requires_grad_()
            labels = rows[part[0], part[1].start + 1 : part[1].stop + 1].flatten()
            logits = head(hidden).float().flatten(0, 1)
            found = loss(logits, labels.to(logits.device), head, part)
            (gradient[part],) = torch.autograd.grad(found, hidden)
            total += float(found.detach())
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
    """Information of one layer; `gradient`, by what leaves it, becomes that by what enters it.

    Args:
        states: what enters the layer, [n, seq_len, hidden_size].
    """
    information, excess = (LayerStatistics(network.shape, group_size) for _ in range(2))
    tokens, seq_len = states.shape[0] * states.shape[1], states.shape[1]
    kept = {name: SampleKeeper(tokens, seq_len, samples, index) for name in sorted(wanted)}
    clips = {name: GradientClip(tokens) for name in kept}
    stored = StoredKeys(network.model, network.family, network.shape)
    reported: dict[str, Tensor] = {}
    squares: list[Tensor] = []  # of the gradients by the keys and values of each token

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
    found = {}
    for name, keeper in kept.items():
        own = keeper.samples()
        found[name] = replace(own, gradients=clips[name].shortened(own.gradients))
    by_token = torch.cat(squares)
    longest = by_token.topk(max(1, round(TOP * tokens))).values
    return LayerFisher(information, found, float(longest.sum() / by_token.sum()))


def weight_information(
    model: Any, family: Family, shape: AttentionShape, tokens: Tensor, count: int, progress: Progress
) -> Tensor:
    """Sum of squared gradients of the next-token loss with respect to W_k and W_v of each KV head.

    The gradient is taken row by row of tokens and squared before it is summed.

    Returns:
        [num_layers, 2, num_kv_heads], float64: for keys and for values.
    Source: Palu, arXiv 2407.21118, section 3.2.
    """
    rows = tokens[: max(1, count // tokens.shape[1])]
    totals = torch.zeros(shape.num_layers, 2, shape.num_kv_heads, dtype=torch.float64)
    parameters = [kv_parameters(family, model, layer) for layer in range(shape.num_layers)]
    distinct = {id(parameter): parameter for pair in parameters for parameter, _ in pair}
    with progress.task("gradients", rows.numel(), "tokens") as advance:
        for row in rows.split(1):
            ids = row.to(model.device)
            loss = model(ids, labels=ids, use_cache=False).loss
            gradients = dict(zip(distinct, torch.autograd.grad(loss, list(distinct.values())), strict=True))
            for layer, pair in enumerate(parameters):
                for side, (parameter, part) in enumerate(pair):
                    squared = part(gradients[id(parameter)]).double().square()
                    totals[layer, side] += squared.reshape(shape.num_kv_heads, -1).sum(-1).cpu()
            advance(row.numel())
    return totals
