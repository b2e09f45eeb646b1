"""Run a causal model layer by layer over many sequences: all sequences through one layer, then all through the next.

Only one layer has to be in memory at a time, and the hidden states that enter a layer can be kept and used again. The
arguments that a family calls its layers with are recorded once for each batch size, or where layers read the tokens for
each batch. Layers that read the cache of others run together with these, see `Family.turns`. Embedding and head run as
the model's forward pass without the layers. Sequences have equal lengths and no padding, and nothing is cached. A pass
of a model that keeps tokens exactly is one prompt, in which no row is read; within `decoding` it reads what decoding
token by token does.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..checkpoint.families import Family, attention_shape, family_of
from ..checkpoint.layout import AttentionShape
from ..checkpoint.publishing import check_space
from ..errors import CheckpointError, DataError, NumericsError
from ..numerics import first_not_finite, is_finite
from ..progress import Advance
from .hardware import fast_products
from .memory import HEAD_POSITIONS, LOGIT_BYTES

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from .weights import Weights

STATES_IN_MEMORY_BYTES = 256 << 20
"""Hidden states up to this size are kept in memory, larger ones in a memory-mapped file."""

LayerCall = tuple[tuple[object, ...], dict[str, object]]
"""Positional and keyword arguments of a decoder layer, without the hidden states."""


class LayerwiseModel:
    """A causal model that runs layer by layer.

    Args:
        source: the model and the residence of its weights.
        batch_tokens: tokens that go through a layer together.
        workspace: folder for hidden states that are too large for memory; by default the system's temporary folder.
    """

    def __init__(self, source: Weights, batch_tokens: int = 2048, workspace: Path | None = None) -> None:
        self.source, self.batch_tokens, self.workspace = source, batch_tokens, workspace
        self.model = source.model
        self.config: PreTrainedConfig = self.model.config.get_text_config()
        self.family: Family = family_of(self.model.config)
        self.shape = attention_shape(self.model.config)
        self.decoder = self.model.get_submodule(self.family.decoder)
        layers = list(self.decoder.get_submodule(self.family.layers))[: self.config.num_hidden_layers]
        self.layers: list[nn.Module] = layers
        self._turns = self.family.turns(len(layers))
        self._calls: dict[tuple[object, ...], list[LayerCall]] = {}
        self._prompt: int | None = None
        self.device, self.dtype = source.device, source.dtype

    @classmethod
    def of(cls, model: PreTrainedModel, batch_tokens: int = 2048) -> LayerwiseModel:
        """Wrap a model whose weights are all in memory."""
        from .weights import Weights  # imports the models of transformers

        return cls(Weights(model), batch_tokens)

    def states_like(self, sequences: Tensor) -> Tensor:
        """Allocate hidden states for sequences [n, seq_len]: [n, seq_len, hidden_size] on the CPU."""
        return new_states((*sequences.shape, self.shape.hidden_size), self.dtype, folder=self.workspace)

    def batches(self, sequences: Tensor) -> Iterator[slice]:
        """Slices of the sequences (of tokens or of hidden states) that go through a layer together."""
        size = max(1, self.batch_tokens // sequences.shape[1])
        return (slice(start, min(start + size, len(sequences))) for start in range(0, len(sequences), size))

    def turn_of(self, layer: int) -> int:
        """The layer at whose turn a layer runs: itself, unless others read its cache; see `Family.turns`."""
        position = self.family.placed[layer]
        return next(index for index, turn in enumerate(self._turns) if position in turn)

    def layers_at(self, index: int) -> list[int]:
        """The layers that run at the turn of one; none where that runs at the turn of another."""
        return [layer for layer, position in enumerate(self.family.placed) if position in self._turns[index]]

    @contextmanager
    def layer(self, index: int) -> Iterator[nn.Module]:
        """The layers that run at the turn of one, with their weights loaded inside the `with`."""
        with ExitStack() as loaded:
            loaded.enter_context(fast_products(self.device))
            if self.family.reads_tokens:
                loaded.enter_context(self.source.loaded("embedding"))
            for number in self._turns[index]:
                loaded.enter_context(self.source.loaded(number))
            yield nn.ModuleList([self.layers[number] for number in self._turns[index]])

    @torch.inference_mode()
    def embed(self, sequences: Tensor, out: Tensor | None = None) -> Tensor:
        """Compute the hidden states that enter the first layer, [n, seq_len, hidden_size]."""
        states = self.states_like(sequences) if out is None else out
        kept: list[Tensor] = []

        def keep(hidden: Tensor, call: LayerCall) -> Tensor:
            kept.append(hidden)
            return hidden

        with self.source.loaded("embedding"), self._without_layers(keep):
            for part in self.batches(sequences):
                kept.clear()
                self.decoder(input_ids=sequences[part].to(self.device), use_cache=False)
                states[part] = kept[0].cpu()
        return states

    @torch.inference_mode()
    def run(
        self, index: int, sequences: Tensor, states: Tensor, out: Tensor, advance: Advance = lambda done: None
    ) -> None:
        """Put hidden states of sequences through a layer, which must be loaded; `out` may be `states` itself."""
        for part in self.batches(states):
            hidden, tokens = states[part].to(self.device), sequences[part]
            result = self.through(index, tokens, hidden)
            if not is_finite(result):
                where = first_not_finite(self.model, lambda: self.through(index, tokens, hidden))  # noqa: B023 (at once)
                raise NumericsError(f"layer {index}: its output is not finite{where}.", "Compute in float32.")
            out[part] = result.to(out.device)
            advance(hidden.shape[0] * hidden.shape[1])

    def through(self, index: int, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Put one batch of hidden states [batch_size, seq_len, hidden_size] through a layer, which must be loaded.

        Gradients flow through it where autograd is enabled.
        """
        shared: dict[str, object] = {"shared_kv_states": {}} if self.family.readers else {}
        modules = [self.family.attention_module(self.model, layer) for layer in self.layers_at(index)]
        with self._as_decoded(modules):
            for number in self._turns[index]:
                args, kwargs = self._call(number, tokens)
                result = self.layers[number](hidden, *args, **kwargs | shared)
                hidden = result[0] if isinstance(result, tuple) else result
        return hidden

    @contextmanager
    def decoding(self, prompt: int = 1) -> Iterator[None]:
        """Let layers with exact tokens attend as if the tokens behind the first `prompt` came one by one.

        Prompts of look-ups and copies are read so too: an answer far behind its statement is decoded in a long text as
        much as it is asked for in a prompt.
        """
        before, self._prompt = self._prompt, prompt
        try:
            yield
        finally:
            self._prompt = before

    def _as_decoded(self, modules: list[nn.Module]) -> AbstractContextManager[None]:
        """Context in which attention modules see what `decoding` says, if this pass is within it."""
        if self._prompt is None:
            return nullcontext()
        from ..runtime.decoded import decoding  # calibration needs no compressed attention

        return decoding(modules, self._prompt)

    def final_states(self, sequences: Tensor, advance: Advance = lambda done: None) -> Tensor:
        """Compute the hidden states that leave the last layer, [n, seq_len, hidden_size]."""
        return self.final_states_of([sequences], advance)[0]

    def final_states_of(self, parts: Sequence[Tensor], advance: Advance = lambda done: None) -> list[Tensor]:
        """Compute `final_states` for several [n, seq_len] of different seq_len; every layer is loaded once.

        Args:
            advance: is called with tokens divided by the number of layers, after each layer.
        """
        all_states = [self.embed(sequences) for sequences in parts]
        for index in range(self.shape.num_layers):
            with self.layer(index):
                for sequences, states in zip(parts, all_states, strict=True):
                    self.run(index, sequences, states, states, lambda tokens: advance(tokens / self.shape.num_layers))
        return all_states

    @contextmanager
    def head(self, differentiable: bool = False) -> Iterator[Callable[[Tensor], Tensor]]:
        """A function from final hidden states [batch_size, n, hidden_size] to logits [batch_size, n, vocab_size].

        Args:
            differentiable: let gradients flow through the function where autograd is enabled.
        """
        width = self.model.get_input_embeddings().embedding_dim
        current: list[Tensor] = []

        @torch.inference_mode(not differentiable)
        def logits(states: Tensor) -> Tensor:
            current[:] = [states.to(self.device)]
            # Embeddings are given as zeros, since the embedding of an untied model may not be in memory.
            nothing = torch.zeros(1, 1, 1, dtype=self.dtype, device=self.device).expand(*states.shape[:2], width)
            inputs = {"inputs_embeds": nothing}
            if self.family.reads_tokens:
                inputs = {"input_ids": torch.zeros(states.shape[:2], dtype=torch.int64, device=self.device)}
            with self._without_layers(lambda hidden, call: current[0]):
                return self.model(**inputs, use_cache=False).logits

        with ExitStack() as loaded:
            loaded.enter_context(fast_products(self.device))
            if self.family.reads_tokens:
                loaded.enter_context(self.source.loaded("embedding"))
            loaded.enter_context(self.source.loaded("head"))
            yield logits

    def _call(self, number: int, tokens: Tensor) -> LayerCall:
        """Arguments that the decoder calls its layer `number` with, recorded once for each batch size, or batch."""
        key: tuple[object, ...] = self.config._attn_implementation, torch.is_inference_mode_enabled(), *tokens.shape
        if self.family.reads_tokens:
            key = *key, tokens.cpu().numpy().tobytes()
        if key not in self._calls:
            calls: list[LayerCall] = []

            def record(hidden: Tensor, call: LayerCall) -> Tensor:
                calls.append(call)
                return hidden

            width = self.model.get_input_embeddings().embedding_dim
            inputs = {"inputs_embeds": torch.zeros(*tokens.shape, width, dtype=self.dtype, device=self.device)}
            if self.family.reads_tokens:
                inputs = {"input_ids": tokens.to(self.device)}
            with torch.no_grad(), self._without_layers(record):
                self.decoder(**inputs, use_cache=False)
            assert len(calls) == len(self.layers)
            # they hold masks of sizes that are no longer used, or what layers read of tokens
            if len(self._calls) > (0 if self.family.reads_tokens else 8):
                self._calls.clear()
            self._calls[key] = calls
        return self._calls[key][number]

    @contextmanager
    def _without_layers(self, instead: Callable[[Tensor, LayerCall], Tensor]) -> Iterator[None]:
        """Replace the forward of every layer by `instead(hidden_states, other_arguments)`."""
        before = [vars(layer).pop("forward", None) for layer in self.layers]

        def forward(*args: Any, **kwargs: Any) -> Any:
            hidden, args = (args[0], args[1:]) if args else (kwargs.pop("hidden_states"), ())
            result = instead(hidden, (args, kwargs))
            return (result, None) if self.family.layer_returns_tuple else result

        try:
            for layer in self.layers:
                layer.forward = forward  # type: ignore[method-assign]
            yield
        finally:
            for layer, previous in zip(self.layers, before, strict=True):
                del layer.forward
                if previous is not None:
                    layer.forward = previous  # type: ignore[method-assign]


def new_states(
    shape: tuple[int, ...], dtype: torch.dtype, path: Path | None = None, folder: Path | None = None
) -> Tensor:
    """Allocate hidden states on the CPU: in memory if they are small, otherwise in a memory-mapped file.

    Args:
        path: file to keep them in, whatever their size; an existing file of the right size keeps its content.
        folder: folder of the unnamed file used without `path`, which disappears with the tensor.
    Raises:
        CheckpointError: the disk is too small.
    """
    size = math.prod(shape) * dtype.itemsize
    if path is None and size <= STATES_IN_MEMORY_BYTES:
        return torch.empty(shape, dtype=dtype)
    if path is None:
        with tempfile.NamedTemporaryFile(prefix="rotor-states-", dir=folder) as file:  # the mapping outlives the name
            return new_states(shape, dtype, Path(file.name))
    if not path.is_file() or path.stat().st_size != size:
        check_space(path, size)
        try:
            with path.open("wb") as file:
                if hasattr(
                    os, "posix_fallocate"
                ):  # a write to a hole of a mapped file on a full disk kills the process
                    os.posix_fallocate(file.fileno(), 0, size)
                else:
                    file.truncate(size)
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}; {size / 1e9:.2f} GB needed.", "Free space.") from error
    return torch.from_file(str(path), shared=True, size=math.prod(shape), dtype=dtype).reshape(shape)


def activation_bytes(
    shape: AttentionShape, config: PreTrainedConfig, tokens: int, element_bytes: int, copied: int = 0
) -> int:
    """Memory of one layer's forward pass over `tokens` tokens.

    Args:
        shape: of the layer. config: of the language model.
        copied: numbers of each token that attention has beside queries, keys, values, their copies, and outputs.
    """
    attention = 2 * (shape.query_width + 2 * shape.kv_width) + shape.query_width + copied
    numbers = 4 * shape.hidden_size + max(attention, 3 * _feed_forward_width(config))
    return tokens * numbers * element_bytes


def _feed_forward_width(config: PreTrainedConfig) -> int:
    """Width of a layer's feed-forward part for one token, or the widths of its experts together."""
    widths = (getattr(config, name, None) for name in ("intermediate_size", "n_inner", "ffn_dim"))
    dense = next((int(width) for width in widths if width), 4 * int(config.hidden_size))
    experts = getattr(config, "num_experts_per_tok", None) or 0
    expert_width = getattr(config, "moe_intermediate_size", None) or dense
    shared = getattr(config, "shared_expert_intermediate_size", None) or 0
    return max(dense, experts * expert_width + shared if experts else 0)


def logit_batches(network: LayerwiseModel, sequences: Tensor) -> Iterator[tuple[slice, slice]]:
    """Batches of sequences and positions whose logits fit in LOGIT_BYTES: several sequences, or parts of one.

    The last position is left out, as nothing follows it.

    Raises:
        DataError: there are no sequences.
    """
    if sequences.numel() == 0:
        raise DataError("the evaluation set is empty.", "Ask for more tokens with --set evaluation.report_tokens=N.")
    allowed = LOGIT_BYTES[network.device.type] // (4 * network.config.vocab_size)
    length = sequences.shape[1] - 1
    count = max(1, allowed // sequences.shape[1])
    size = length if count > 1 else max(HEAD_POSITIONS, allowed)
    for first in range(0, len(sequences), count):
        for position in range(0, length, size):
            yield slice(first, first + count), slice(position, min(position + size, length))
