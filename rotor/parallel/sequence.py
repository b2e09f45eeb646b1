"""`sequence_parallel`: run a compressed model over a prompt that lies on several processes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ..checkpoint.families import FAMILIES
from ..errors import UsageError
from ..kernels.passes import TokenSpan
from ..kernels.reference.exact import read_values
from ..logs import log
from ..runtime.attention import RotorAttention
from ..runtime.rope import BlocksAsGiven
from ..runtime.steps import AttentionCall, CacheRows, RowStore
from .attention import attend_by_rows, attend_to_sharded_rows, visible
from .cache import Rows, ShardedLayer
from .forward import Pass, begin_pass
from .heads import attend_by_heads, travel
from .wire import Wire

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

    from ..runtime.steps import Arguments


class SequenceParallel(RowStore):
    """This process's view of a sequence on several processes, made by `sequence_parallel`.

    wire: the processes, with the bytes that were sent to them (`wire.sent`, by kind).
    """

    in_pytorch = True

    def __init__(self, model: PreTrainedModel, wire: Wire) -> None:
        self.wire = wire
        self.layers = [module for module in model.modules() if isinstance(module, RotorAttention)]
        cached = DynamicCache(config=model.config).layers
        states = any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cached)
        if states or any(layer.layer_idx != n or layer.sinks is not None for n, layer in enumerate(self.layers)):
            raise UsageError(
                "a prompt over several processes: this model has layers without attention, states beside it, a cache "
                "that layers share, or sinks in its softmax.",
                "Run it in one process.",
            )
        windows: list[int | None] = [getattr(layer, "sliding_window", None) for layer in cached]
        self.windows = (windows + [None] * len(self.layers))[: len(self.layers)]
        self.travels = [travel(layer.layout, layer.shape, wire.count, _element_bytes(model)) for layer in self.layers]
        self.before_rope = any(layer.layout.in_blocks for layer in self.layers)
        self._pass: Pass | None = None
        self._masks: dict[tuple[object, ...], Tensor | None] = {}

    def say_what_travels(self) -> None:
        """Log how a prompt's tokens travel in each layer, and what all processes send of one."""
        by_heads = [one for one in self.travels if one.by_heads]
        total = sum(one.bytes_per_token for one in self.travels)
        by_rows = sum(one.rows for one in self.travels)
        log.info(
            "a prompt over %d processes: heads travel in %d layers, rows in %d; %.0f bytes a token, %d by rows alone",
            *(self.wire.count, len(by_heads), len(self.travels) - len(by_heads), total, by_rows),
        )

    @property
    def rank(self) -> int:
        """Rank of this process."""
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

    def of_each(self, number: int) -> list[int]:
        """Collect a number from every process, such as the bytes of its part of a cache."""
        given = torch.tensor([number], device=self.wire.device)
        gathered = self.wire.gather("comparing", "agreement", [given], [[(1,)]] * self.wire.count)
        return [int(number) for (number,) in gathered]

    def row_store(self, cache: Cache | None, layer_idx: int) -> SequenceParallel:
        return self

    def token_span(self, cache: Cache | None, layer_idx: int, seq_len: int) -> TokenSpan:
        now = self.now
        return TokenSpan(0, now.length, 0, now.length, now.indices)

    def store_and_attend(self, call: AttentionCall) -> Tensor:
        output = self._attended(call)
        return output if call.exact is None else read_values(output, call.parameters)

    def _attended(self, call: AttentionCall) -> Tensor:
        now, wire, window = self.now, self.wire, self.windows[call.layer_idx]
        kept = now.stored[wire.rank]
        rows = Rows(call.key[:, :, : len(kept)], call.value[:, :, : len(kept)], kept)
        if call.cache is not None:
            layer = call.cache.layers[call.layer_idx]
            assert isinstance(layer, ShardedLayer)
            rows = layer.store(rows, now.length - 1)
        if now.sharded:
            every = torch.arange(now.length, device=call.key.device)
            if self.travels[call.layer_idx].by_heads:
                return attend_by_heads(call, wire, now.stored, self._mask(now, every, every, window))
            return attend_by_rows(
                call,
                wire,
                now.stored,
                lambda run: self._mask(now, every[run.start : run.stop], every[: run.stop], window),
            )
        rotation = call.rotations.read
        if rotation is not None:  # the rows of a process are not neighbours
            rotation = rotation[0][None, None, rows.indices], rotation[1][None, None, rows.indices]
        return attend_to_sharded_rows(call, rows, rotation, wire, self._mask(now, now.indices, rows.indices, window))

    def _mask(self, now: Pass, queries: Tensor, keys: Tensor, window: int | None) -> Tensor | None:
        """The mask of a pass, made once for all layers with the same window, which keep the same tokens."""
        known = window, len(queries), len(keys)
        if known not in self._masks:
            attended = None if now.attended is None else now.attended.to(keys.device)
            causal = now.sharded or len(queries) > 1
            self._masks[known] = visible(queries, keys, attended, window, causal)
        return self._masks[known]

    def before_forward(
        self, model: PreTrainedModel, args: tuple[object, ...], kwargs: Arguments
    ) -> tuple[tuple[()], Arguments]:
        """Give the model this process's tokens in place of all of them."""
        names = list(inspect.signature(model.forward).parameters)
        arguments = dict(zip(names, args, strict=False)) | kwargs
        self._pass, changed = begin_pass(arguments, model.config, self.wire, self.windows, self.before_rope)
        self._masks = {}
        return (), changed

    def after_decoder(self, decoder: Any, args: Any, output: Any) -> Any:
        """Gather the hidden states whose logits are wanted, and count the stored tokens."""
        now, self._pass, self._masks = self.now, None, {}
        hidden = output[0]
        if not now.sharded:
            # All processes take the first one's, so that rounding does not make them differ.
            shapes = [[tuple(hidden.shape)], *[[(0,)]] * (self.wire.count - 1)]
            sent = hidden.new_empty(0) if self.rank else hidden
            hidden = self.wire.gather("hidden states", "hidden", [sent], shapes)[0][0]
        else:
            begin = max(now.length - now.tokens_to_keep, 0) if now.tokens_to_keep else 0
            owned = [kept[kept >= begin] for kept in now.stored]
            hidden = hidden[:, now.indices >= begin]
            shapes = [[(hidden.shape[0], len(indices), hidden.shape[2])] for indices in owned]
            gathered = self.wire.gather("hidden states", "hidden", [hidden], shapes)
            hidden = torch.cat([part for (part,) in gathered], dim=1)[:, torch.argsort(torch.cat(owned))]
        if now.counts is not None:  # what the cache knows of its processes
            now.counts[:] = [count + len(kept) for count, kept in zip(now.counts, now.stored, strict=True)]
        if isinstance(output, tuple):
            return hidden, *output[1:]
        output.last_hidden_state = hidden
        return output


def _element_bytes(model: PreTrainedModel) -> int:
    """Bytes of a number of the model's activations."""
    dtype: torch.dtype = model.dtype
    return dtype.itemsize


@contextmanager
def sequence_parallel(model: PreTrainedModel, group: Any = None) -> Iterator[SequenceParallel]:
    """Split the tokens of a compressed model's prompts over the processes of a group, and their cache with them.

    Every process holds the whole model and calls it with the same arguments: token ids [batch_size, seq_len], a mask
    [batch_size, seq_len] for padding. The pass that fills an empty cache splits its tokens: outside of attention each
    process computes its share of them; inside of it packed rows travel to all (codes as codes), or latents, compressed
    queries and outputs travel by heads, layer by layer what sends less, which is logged. Rows are kept by the process
    of their tokens, so that each holds its share of the cache. Passes over a filled cache
    (decoding) are computed by all processes alike, attention by each over the rows that it has, joined by log-sum-exp;
    the new rows go to the process with the fewest.

        with sequence_parallel(model, group):
            model.generate(**inputs, max_new_tokens=64)  # the same tokens in every process
            last = model(input_ids, logits_to_keep=1).logits  # the same in every process

    Logits are of all tokens in every process, or of the last n by `logits_to_keep=n`, which generate() gives. Gradients
    are off inside. Sampling needs the same seed in every process. Attention runs in plain PyTorch, on a GPU too. A
    prompt of fewer than two tokens a process is not split. No token is kept exactly: attention reads all of them from
    rows, in a prompt too.

    Args:
        model: a causal model that `rotor export` wrote, loaded with from_pretrained, on one device.
        group: process group or one-dimensional device mesh; by default all processes. Its backend must serve the
            device (gloo a CPU, nccl GPUs), and its timeout says how long a process waits for one that hangs.
    Raises:
        UsageError: torch.distributed is not initialised, the model is not compressed, is split already, keeps its
            cache by a policy, lies on several devices, attends within chunks, or has a RoPE whose frequencies depend
            on the length. In passes: the processes were given different inputs, a cache of a kind that cannot be split
            or that was filled elsewhere, a mask that is not two-dimensional.
        RotorError: in passes: another process ended, or did not answer within the group's timeout.
    Source: ZDC section 5.3; PyTorch's `context_parallel` for the shape of the call.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise UsageError(
            "sequence_parallel() needs torch.distributed, which is not initialised.",
            "Start with `torchrun --nproc-per-node N`, and call torch.distributed.init_process_group() first.",
        )
    layers = [module for module in model.modules() if isinstance(module, RotorAttention)]
    if layers and model.config.get_text_config() is not model.config:
        raise UsageError(
            "a prompt over several processes: this model reads more than text, which has no place in the division.",
            "Run it in one process.",
        )
    family = FAMILIES.get(getattr(model.config, "model_type", ""))
    if not layers or family is None or model.get_output_embeddings() is None:
        raise UsageError(
            f"{type(model).__name__} is not a compressed causal model.",
            "Load a checkpoint that `rotor export` wrote with AutoModelForCausalLM.",
        )
    devices = {parameter.device for parameter in model.parameters()}
    chunked = "chunked_attention" in (getattr(model.config, "layer_types", None) or ())
    for wrong, message, hint in (
        (
            chunked,
            "layers of this model attend within chunks, which has no place in the division.",
            "Run it in one process.",
        ),
        (
            any(isinstance(layer.store, SequenceParallel) for layer in layers),
            "the model is inside of another sequence_parallel().",
            "Leave that one first.",
        ),
        (
            any(layer.store != CacheRows() for layer in layers),
            "the model keeps its cache by a policy, which looks at tokens that other processes have.",
            "Turn it off: rotor.use_cache_policy(model, None), or --cache none.",
        ),
        (
            any(isinstance(layer.rope, BlocksAsGiven) for layer in layers)
            or any(layer.rotary is not None and layer.rotary.depends_on_length for layer in layers),
            "RoPE's frequencies depend on the length (dynamic, longrope), or weights stand behind it, and a process "
            "has only some positions.",
            "Run this model in one process.",
        ),
        (
            len(devices) > 1,
            f"the model lies on {', '.join(sorted(map(str, devices)))}: expected one device a process.",
            "Load it without a device map.",
        ),
    ):
        if wrong:
            raise UsageError(message, hint)
    group = group.get_group() if hasattr(group, "get_group") else group
    state = SequenceParallel(model, Wire(group, devices.pop()))
    state.say_what_travels()
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for handle in (
            model.register_forward_pre_hook(state.before_forward, with_kwargs=True),
            model.get_submodule(family.decoder).register_forward_hook(state.after_decoder),
        ):
            stack.callback(handle.remove)
        for layer in layers:
            layer.store = state
            stack.callback(setattr, layer, "store", CacheRows())
        yield state
