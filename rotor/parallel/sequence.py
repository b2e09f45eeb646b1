"""`sequence_parallel`: run a compressed model over a prompt that lies on several processes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import UsageError
from ..runtime.attention import RotorAttention
from ..runtime.families import FAMILIES
from .attention import attend_by_heads, attend_to_spread_rows, visible
from .cache import SpreadLayer, windows_of
from .forward import Pass, begin_pass
from .plan import bounds, plan_layer
from .rotary import whole_positions
from .wire import Wire


class SequenceParallel:
    """What `sequence_parallel` gives: this process's view of the others. Not to be made by hand.

    wire: the processes, with the bytes that were sent to them (`wire.sent`, by kind).
    """

    def __init__(self, model: Any, wire: Wire) -> None:
        self.wire = wire
        self.layers = [module for module in model.modules() if isinstance(module, RotorAttention)]
        self.windows = windows_of(model.config, len(self.layers))
        self.before_rope = any(layer.layout.domain == "pre" for layer in self.layers)
        self._pass: Pass | None = None
        self._masks: dict[int | None, Tensor | None] = {}

    @property
    def rank(self) -> int:
        """Of this process; the tokens of process 0 come first."""
        return self.wire.rank

    @property
    def now(self) -> Pass:
        """The current forward pass.

        Raises:
            UsageError: there is none: a part of the model was called instead of all of it.
        """
        if self._pass is None:
            raise UsageError(
                "a layer was called outside of a forward pass of the model that was given to sequence_parallel().",
                "Call that model itself, or its generate().",
            )
        return self._pass

    @property
    def first(self) -> int:
        """Index in the whole sequence of this process's first token in the current pass."""
        return self.now.own_first

    @property
    def length(self) -> int:
        """Tokens of the whole sequence in the current pass."""
        return self.now.length

    def own(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """This process's tokens of a tensor over the whole prompt, such as its labels; a view."""
        edges = bounds(tensor.shape[dim], self.wire.count)
        return tensor.narrow(dim, edges[self.rank], edges[self.rank + 1] - edges[self.rank])

    def gather(self, tensor: Tensor, tokens: int) -> Tensor:
        """All tokens of a prompt of so many, in every process, from each one's [batch_size, own tokens, ...]."""
        edges = bounds(tokens, self.wire.count)
        counts = [b - a for a, b in pairwise(edges)]
        return self._gather(tensor, counts)

    def of_each(self, number: int) -> list[int]:
        """A number of this process's, such as the bytes of its part of a cache, and the others', in every process."""
        own = torch.tensor([number], device=self.wire.device)
        return [int(found) for found in self.wire.gather("comparing", "agreement", own, [(1,)] * self.wire.count)]

    def attend(
        self,
        module: RotorAttention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        past_key_values: Any,
        key_rotation: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """See `rotor.runtime.attention.Spread`."""
        now, wire, window = self.now, self.wire, self.windows[module.layer_idx]
        if past_key_values is None:
            rows = now.share.of(key, value)
        else:
            layer: SpreadLayer = past_key_values.layers[module.layer_idx]
            rows = layer.store(key, value, now.share, now.length - 1)
        if now.edges is not None:
            plan = plan_layer(module.layout, module.heads_per_kv, module.head_dim, query.element_size(), wire.count)
            mask = None
            if now.attended is not None or window is not None:
                mask = self._mask(now, torch.arange(now.length, device=key.device), window)
            return attend_by_heads(module, query, key, value, key_rotation, plan, wire, now.edges, mask)
        if key_rotation is not None:
            key_rotation = key_rotation[0][rows.indices], key_rotation[1][rows.indices]
        mask = self._mask(now, rows.indices, window)
        return attend_to_spread_rows(module, query, rows.key, rows.value, key_rotation, wire, mask)

    def _mask(self, now: Pass, keys: Tensor, window: int | None) -> Tensor | None:
        """Of a pass, made once for all layers with the same window: they keep the same tokens."""
        if window not in self._masks:
            queries = torch.arange(now.first, now.length, device=keys.device)
            attended = None if now.attended is None else now.attended.to(keys.device)
            self._masks[window] = visible(queries, keys, attended, window, causal=len(queries) > 1)
        return self._masks[window]

    def before_forward(self, model: Any, args: Any, kwargs: Any) -> tuple[tuple[()], dict[str, Any]]:
        """Give the model this process's tokens in place of all of them."""
        names = list(inspect.signature(model.forward).parameters)
        arguments = dict(zip(names, args, strict=False)) | kwargs
        self._pass, changed = begin_pass(arguments, model.config, self.wire, self.windows, self.before_rope)
        self._masks = {}
        return (), changed

    def after_decoder(self, decoder: Any, args: Any, output: Any) -> Any:
        """Bring together the hidden states that logits are wanted of, and count what was stored."""
        now, self._pass, self._masks = self.now, None, {}
        hidden = output[0]
        if now.edges is None:
            hidden = self.wire.from_first("hidden states", "hidden", hidden)
        elif now.tokens_to_keep:
            begin = max(now.length - now.tokens_to_keep, 0)
            counts = [b - max(a, begin) for a, b in pairwise(now.edges)]
            counts = [max(count, 0) for count in counts]
            hidden = self._gather(hidden[:, hidden.shape[1] - counts[self.rank] :], counts)
        now.count_stored()
        if isinstance(output, tuple):
            return hidden, *output[1:]
        output.last_hidden_state = hidden
        return output

    def _gather(self, tensor: Tensor, counts: list[int]) -> Tensor:
        shapes = [(tensor.shape[0], count, *tensor.shape[2:]) for count in counts]
        return torch.cat(self.wire.gather("hidden states", "hidden", tensor, shapes), dim=1)


@contextmanager
def sequence_parallel(model: Any, group: Any = None) -> Iterator[SequenceParallel]:
    """Spread the tokens of a compressed model's prompts over the processes of a group, and their cache with them.

    Every process holds the whole model and calls it with the same arguments: token ids [batch_size, seq_len], a mask
    [batch_size, seq_len] for padding. The pass that fills an empty cache spreads its tokens: outside of attention each
    process computes its share of them, inside of it some groups of KV heads of all of them; what travels are compressed
    queries (in domain `pre` whole ones), packed rows (codes as codes) and compressed outputs. Rows stay in the process
    of their tokens, so that each holds its share of the cache. Passes over a filled cache (decoding) are computed by
    all processes alike, attention by each over the rows that it has, joined by log-sum-exp; the new rows go to the
    process with the fewest.

        with sequence_parallel(model, group):
            model.generate(**inputs, max_new_tokens=64)     # the same tokens in every process

        with sequence_parallel(model) as parallel:
            own_logits = model(input_ids).logits            # of parallel.own(input_ids)
            last = model(input_ids, logits_to_keep=1).logits  # of the last token, in every process

    Logits of a spread prompt are this process's own tokens'; with `logits_to_keep=n`, which generate() gives, they are
    those of the last n tokens in every process. Gradients are off inside. Sampling needs the same seed in every
    process. Attention runs in plain PyTorch, on a GPU too. A prompt of fewer tokens than processes is not spread.

    Args:
        model: a causal model that `rotor export` wrote, loaded with from_pretrained, on one device.
        group: process group or one-dimensional device mesh; by default all processes. Its backend must serve the
            device (gloo a CPU, nccl GPUs), and its timeout says how long a process waits for one that hangs.
    Raises:
        UsageError: torch.distributed is not initialised, the model is not compressed, is spread already or lies on
            several devices. In passes: the processes were given different inputs, a cache of a kind that cannot be
            spread or that was filled elsewhere, a mask that is not two-dimensional, labels.
        RotorError: in passes: another process ended, or did not answer within the group's timeout.
    Source: ZDC section 5.3; PyTorch's `context_parallel` for the shape of the call.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise UsageError(
            "sequence_parallel() needs torch.distributed, which is not initialised.",
            "Start with `torchrun --nproc-per-node N`, and call torch.distributed.init_process_group() first.",
        )
    layers = [module for module in model.modules() if isinstance(module, RotorAttention)]
    family = FAMILIES.get(getattr(model.config, "model_type", ""))
    if not layers or family is None or model.get_output_embeddings() is None:
        raise UsageError(
            f"{type(model).__name__} is not a compressed causal model.",
            "Load a checkpoint that `rotor export` wrote with AutoModelForCausalLM.",
        )
    if any(layer.spread is not None for layer in layers):
        raise UsageError("the model is inside of another sequence_parallel().", "Leave that one first.")
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        raise UsageError(
            f"the model lies on {', '.join(sorted(map(str, devices)))}: expected one device a process.",
            "Load it without a device map.",
        )
    group = group.get_group() if hasattr(group, "get_group") else group
    state = SequenceParallel(model, Wire(group, devices.pop()))
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(whole_positions(state, model, family))
        for handle in (
            model.register_forward_pre_hook(state.before_forward, with_kwargs=True),
            model.get_submodule(family.decoder).register_forward_hook(state.after_decoder),
        ):
            stack.callback(handle.remove)
        for layer in layers:
            layer.spread = state
            stack.callback(setattr, layer, "spread", None)
        yield state
