"""Fisher information of keys and values: how much an error in each of them costs the model.

Let g be the gradient of the model's loss by the keys (or values) of one token in one layer. An error e in them raises
the loss, and the KL divergence from the uncompressed model, by e^T E[g g^T] e / 2 to second order. The expectation is
over text that the model wrote itself, because there the Fisher information is the curvature of the loss. The longest
gradients are clipped (`GradientClip`), otherwise few tokens would dominate. The sum is taken for keys and values as
they are, G = [n, n] for the n numbers of a group. For keys = B latent, the information of the latent is B^T G B. So
one pass over the uncompressed model serves every basis and rank.

Where a cache keeps the newest and the first tokens exactly, codes are read by queries that come later. So attention
meets a key and a value twice, as exact ones and, once they are old, in copies; g is the gradient by the copies, with
EXACT_SHARE of that by the exact ones.

The pass runs forward once and keeps the hidden states that enter each layer. Then it runs backward one layer at a time,
computing each layer again with gradients, so that a model whose weights are read layer by layer needs no more memory.
What is done is kept batch by batch (`GradientFiles`), because this is the longest part of a calibration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ..checkpoint.families import Family
from ..checkpoint.layout import AttentionShape, ExactTokens
from ..checkpoint.projections import kv_parameters
from ..errors import NumericsError
from ..models.layerwise import LayerwiseModel, logit_batches
from ..models.outline import ModelOutline
from ..numerics import is_finite
from ..progress import Advance, Progress
from .capture import StoredKeys, observed_attention
from .gradient_files import GradientFiles
from .gradient_sums import SAMPLED_TOKENS, GradientSums
from .information import LayerFisher

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LEAST_SEEN = 4
"""Least ratio of the tokens that a query sees in rows of calibration to those that count as the newest."""


def fisher_information(
    network: LayerwiseModel,
    sequences: Tensor,
    group_size: int,
    wanted: Sequence[frozenset[str]],
    samples: int = SAMPLED_TOKENS,
    advance: Advance = lambda done: None,
    files: GradientFiles | None = None,
    exact: ExactTokens | None = None,
) -> Iterator[tuple[int, LayerFisher]]:
    """Fisher information of every layer, the last layer first.

    Args:
        sequences: [n, seq_len] tokens, written by the model itself.
        group_size: KV heads whose products are summed.
        wanted: for each layer, names of the stored keys and values (`value`, or from `stored_name`).
        samples: most tokens whose keys and values are kept; see SampleKeeper.
        advance: is called with tokens times passes through a layer.
        files: what an interrupted pass over the same sequences has done; its layers are not yielded again.
        exact: tokens that decoding reads exactly, see the module.
    Yields:
        (layer, its information). A layer counts as done when the next one is asked for. The states that enter each
        layer are kept, on disk if they are large, until all are done.
    Raises:
        NumericsError: a gradient is not finite; names the layer.
    """
    files = files or GradientFiles()
    layers = network.shape.num_layers
    if files.backward is None:
        leaving = all_states(network, sequences, advance, files)[-1]
        _, gradient = head_gradient(
            network, sequences, leaving, lambda logits, labels, *_: cross_entropy(logits, labels, reduction="sum")
        )
        files.gradient(layers, network, sequences).copy_(gradient)
        files.has_gradient(layers)
        del leaving, gradient
    for index in reversed(range(files.backward or 0)):
        sums = GradientSums(
            network.shape.layer(index), group_size, wanted[index], sequences.numel(), sequences.shape[1], samples, index
        )
        files.load(index, sums, network)
        _layer_backward(network, index, sequences, sums, files, advance, exact)
        yield index, sums.result()
        files.has_gradient(index)


def backward_bytes(forward: int, family: Family) -> int:
    """Memory of a backward pass of the layers that run at a turn, of which a forward pass of one takes `forward`.

    Autograd keeps the activations and makes as many gradients and temporary copies, of all layers that read a cache.
    """
    return 3 * forward * (1 + len(family.readers))


def gradient_flops(outline: ModelOutline, tokens: int) -> float:
    """FLOPs of `fisher_information`: forward once, then each layer again and twice as much backward."""
    return 4 * outline.pass_flops(tokens)


def exact_in_rows(shape: AttentionShape, exact: ExactTokens | None, seq_len: int) -> list[ExactTokens] | None:
    """The tokens of each layer that count as exact in rows of calibration, which are shorter than what is served."""
    if exact is None:
        return None
    return [ExactTokens(exact.first, min(exact.newest, seen // LEAST_SEEN)) for seen in shape.held_tokens(seq_len)]


def all_states(
    network: LayerwiseModel,
    sequences: Tensor,
    advance: Advance = lambda done: None,
    files: GradientFiles | None = None,
) -> list[Tensor]:
    """Compute the hidden states that enter each layer and leave the last, each [n, seq_len, hidden_size].

    Args:
        files: states that an interrupted pass has computed, and where new ones are kept.
    """
    files = files or GradientFiles()
    states = [files.states(index, network, sequences) for index in range(files.entered)]
    for index in range(files.entered, network.shape.num_layers + 1):
        out = files.states(index, network, sequences)
        if not index:
            network.embed(sequences, out)
        else:
            with network.layer(index - 1):
                network.run(index - 1, sequences, states[-1], out, advance)
        files.has_entered(index)
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
    sequences: Tensor,
    sums: GradientSums,
    files: GradientFiles,
    advance: Advance,
    exact: ExactTokens | None,
) -> None:
    """Add the gradients of one layer to its sums, and compute the gradient by the states that enter the layer.

    Args:
        sums: may have the first batches already; `files` has the gradient by those.
    """
    states, leaving, entering = (
        files.states(index, network, sequences),
        files.gradient(index + 1, network, sequences),
        files.gradient(index, network, sequences),
    )
    stored = StoredKeys(network.model, network.family, network.shape)
    reported: dict[str, Tensor] = {}

    def observe(layer: int, tensors: dict[str, Tensor], output: Tensor) -> None:
        if layer == index:
            reported.update({name: tensor for name, tensor in tensors.items() if name != "query"})

    turn = network.turn_of(index)
    is_first = index == network.layers_at(turn)[0]
    in_rows = exact_in_rows(network.shape, exact, sequences.shape[1])
    layers = range(index, index + 1)
    observed = observed_attention(network.model, network.family, network.shape, layers, observe, exact=in_rows)
    try:
        with network.layer(turn), observed, torch.enable_grad():
            for part in list(network.batches(states))[sums.batches :]:
                hidden = states[part].to(network.device).clone().requires_grad_()
                output = network.through(turn, sequences[part], hidden)
                names = sorted(reported)
                by_all = torch.autograd.grad(
                    output, [hidden, *(reported[name] for name in names)], leaving[part].to(output.device)
                )
                # states pass the turns of the other layers that run together as they are
                entering[part] = by_all[0].to(entering.device) if is_first else leaving[part]
                if not all(is_finite(gradient) for gradient in by_all[1:]):
                    raise NumericsError(
                        f"layer {index}: a gradient of the loss by its keys or values is not finite.",
                        "Calibrate with --dtype float32.",
                    )
                by_name = dict(zip(names, by_all[1:], strict=True))
                by_keys, by_values = (by_name[name].double().square().sum((1, 3)) for name in ("key_post", "value"))
                gradients = stored.of(sums.keepers, index, sequences.shape[1], by_name, gradients=True)
                detached = {name: tensor.detach() for name, tensor in reported.items()}
                vectors = stored.of(sums.keepers, index, sequences.shape[1], detached)
                sums.add(vectors, gradients, (by_keys + by_values).flatten())
                advance(2 * hidden.shape[0] * hidden.shape[1])
                files.keep(index, sums)
    except KeyboardInterrupt:
        if sums.whole:
            files.keep(index, sums, now=True)
        raise


def weight_fisher(
    model: PreTrainedModel, family: Family, shape: AttentionShape, tokens: Tensor, count: int, progress: Progress
) -> Tensor:
    """Sum the squared gradients of the next-token loss with respect to W_k and W_v of each KV head.

    Gradients are taken sequence by sequence and squared before they are summed.

    Returns:
        [num_layers, 2, num_kv_heads], float64: for keys and for values; 0 behind the heads of a layer with fewer.
    Source: Palu, arXiv 2407.21118, section 3.2.
    """
    sequences = tokens[: max(1, count // tokens.shape[1])]
    heads = [layer_shape.num_kv_heads for layer_shape in shape.layers]
    totals = torch.zeros(shape.num_layers, 2, max(heads), dtype=torch.float64)
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
                    totals[layer, side, : heads[layer]] += squared.reshape(heads[layer], -1).sum(-1).cpu()
            advance(sequence.numel())
    return totals
