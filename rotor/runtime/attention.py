"""The attention module of a compressed model, for every family.

It holds the rewritten projections under their usual names and puts rows of numbers or of codes into the cache, which
transformers' cache classes store as they are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import cache_utils

from ..checkpoint.families import Family
from ..checkpoint.kernel_config import LayerKernels
from ..checkpoint.layout import AttentionShape, LayerLayout
from ..checkpoint.projections import CompressedProjections, attention_norms
from ..checkpoint.tensors import FLOAT32, layer_tensors
from ..errors import UsageError
from ..kernels.dispatch import call_served, default_layer, layer_served
from ..kernels.parameters import AttentionParameters, pack_layer, row_scale
from ..kernels.passes import TokenSpan
from ..kernels.reference.attention import project_keys
from ..kernels.reference.exact import project_rows
from ..kernels.rotary import Rotation, rotate
from ..logs import log
from ..numerics import is_finite
from .exact_rows import NewTokens
from .rope import RopeCall, RotaryTable, Rotations, rope_of
from .steps import AttentionCall, CacheRows, RowStore, SharedRows, without_gradients

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedConfig

    from ..kernels.append import Appended
    from .steps import Ahead, Arguments

WIDER_DTYPE = "Load it in bfloat16 or float32: from_pretrained(FOLDER, dtype=torch.bfloat16), or --dtype bfloat16."

# Older versions of transformers have a single class of quantised layers.
QUANTISING = getattr(cache_utils, "BaseQuantizedLayer", cache_utils.QuantizedLayer)


class RotorAttention(CompressedProjections):
    """Compressed attention with the inputs and outputs of the family's own module.

    Its tensors are those of `checkpoint.tensors.layer_tensors`.

    Args:
        base: the module that it replaces; its scaling, norms and layer index are taken over.
        family, shape, layout: the model's family, its sizes, and what this layer stores.
        biases: which of q, k, v, o have a bias in the source.
        rotary: table shared by the layers; None in a model without RoPE.
        store: keeps the rows of the layers, see `RowStore`; by default of this one alone.

    kernels: how the Triton kernels run the layer: by rule, or as kernel_config.json of a loaded checkpoint says.
    """

    def __init__(
        self,
        base: nn.Module,
        family: Family,
        shape: AttentionShape,
        layout: LayerLayout,
        biases: frozenset[str],
        rotary: RotaryTable | None,
        store: RowStore | None = None,
    ) -> None:
        shapes = {name: spec.shape for name, spec in layer_tensors(layout, shape, biases).items()}
        config: Any = base.config
        norms = attention_norms(base, family, shape, config)
        if family.wide_norms:  # their weights are in the order of the layout, those of `base` stay as they are
            norms = copy.deepcopy(norms)
        value_norm = None if family.value_norm is None else base.get_submodule(family.value_norm)
        super().__init__(shapes, shape.head_dim, norms, family.wide_norms, value_norm)
        self.config: PreTrainedConfig = config
        self.layer_idx: int = int(base.layer_idx)  # type: ignore[arg-type]
        # Falcon's attention lacks the attribute; it uses the default.
        self.scaling: float = float(getattr(base, "scaling", shape.head_dim**-0.5))
        self.softcap: float | None = getattr(self.config, family.softcap) if family.softcap else None
        self.family, self.shape, self.layout = family, shape, layout
        self.is_read_by_others = self.layer_idx in family.read_by_others
        self.rotates_in_halves = family.rotates_in_halves
        self.is_causal = True
        self.dropout = attention_dropout(self.config)
        self.kernels: LayerKernels = default_layer(layout)
        self.store: Any = store or CacheRows()
        self.rotary = rotary
        self.rope = rope_of(layout, shape, rotary)

    @torch.compiler.disable(reason="attention of a compressed layer is left out of the graph")
    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Rotation | Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        layer_past: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attend to the new tokens; GPT-NeoX and Falcon call `past_key_values` `layer_past`."""
        batch_size, seq_len, _ = hidden_states.shape
        given: Any = position_embeddings
        if given is not None and not self.rotates_in_halves:
            given = self.family.rotation(given)
        cache = layer_past if past_key_values is None else past_key_values
        _check_pass(self.layout, self.layer_idx, kwargs, attention_mask, cache)
        store = self.store.row_store(cache, self.layer_idx)
        now = self.store.passes.find(
            cache,
            mask=attention_mask,
            rotation=position_embeddings[0] if isinstance(position_embeddings, tuple) else position_embeddings,
            span=self.store.token_span(cache, self.layer_idx, seq_len),
            layer=self.layer_idx,
            device=hidden_states.device,
        )
        # What is given no cache stores no rows, and in a layer with exact tokens reads none.
        reads_rows = self.layout.exact is None or store.reads_rows(cache)
        served = reads_rows and not store.in_pytorch and self._served(hidden_states.dtype, hidden_states.device)
        served = served and call_served(hidden_states, attention_mask)
        kernels = self.kernels if served else None
        asked = RopeCall(now, given, hidden_states, served, cache)
        if reads_rows:
            self.rope.check(asked, kwargs.get("position_ids"), attention_mask, batch_size)
        rotations = self.rope(asked)
        rotations = rotations._replace(weights=self.weights_behind_rope(self.layout.form))

        query, new_key, new_value = self.projected(hidden_states)
        if self.family.query_scale is not None:
            query = self._scaled(query, kwargs.get("position_ids"), now.span)
        projected = in_autocast(query), in_autocast(new_key), in_autocast(new_value)
        with torch.autocast(hidden_states.device.type, enabled=False):
            parameters = self._parameters_of_attention()
            call = AttentionCall(parameters, self.layer_idx, *projected, cache, attention_mask, rotations, now, kernels)
            if kernels is not None:
                ahead = store.ahead(call) if rotations.query is None else None
                made = appended(parameters, *projected, rotations, ahead)
                rows, exact = (made.query, made.key, made.value), None
                if made.exact_key is not None and made.exact_value is not None:
                    exact = NewTokens(made.query, made.exact_key, made.exact_value)
                call = call._replace(ahead=ahead, exact=exact)
            elif self.layout.exact is not None:
                exact = new_tokens(*projected, rotations)
                rows = exact.query, exact.key[:, :1, :, :0], exact.value[:, :1, :, :0]
                if reads_rows:
                    rows = exact_rows(parameters, exact, projected[1], rotations)
                call = call._replace(exact=exact)
            else:
                rows = plain_rows(parameters, *projected, rotations)
            call = call._replace(query=rows[0], key=rows[1], value=rows[2])
            if self.is_read_by_others:
                shared = SharedRows(call, store.stored(call))
                kwargs["shared_kv_states"][self.config.layer_types[self.layer_idx]] = shared, shared
                output = shared.attend(call)
            else:
                output = store.store_and_attend(call)
        output = without_gradients(output, self.layout)
        if self.gate_proj is not None:
            output = output * self.gate_proj(hidden_states).sigmoid()
        return self.o_proj(output), None

    def _scaled(self, query: Tensor, positions: Tensor | None, span: TokenSpan) -> Tensor:
        """Scale queries, [batch_size, seq_len, ...], by their positions, or by their indices in the cache."""
        assert self.family.query_scale is not None
        if positions is None:
            index = span.query_offset + torch.arange(span.seq_len, device=query.device)
            positions = (index if span.indices is None else span.indices)[None]
        scale = self.family.query_scale(self.config, self.layer_idx, positions)
        if scale is None:
            return query
        return query * scale.to(query.dtype).unflatten(-1, (-1, *[1] * (query.dim() - 2)))

    def _served(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Tell whether the kernels serve the layer at all."""
        by_keys = self.shape.weighted_behind_rope and self.layout.rope_block is None  # keys have weights
        fits = self.sinks is None and not by_keys and not self.is_read_by_others
        return fits and layer_served(self.layout, self.shape, dtype, device)

    def _parameters_of_attention(self) -> AttentionParameters:
        return AttentionParameters(
            layout=self.layout,
            shape=self.shape,
            scaling=self.scaling,
            softcap=self.softcap,
            sinks=self.sinks,
            query_basis=self.query_basis,
            key_constant=self.key_constant,
            key_basis=self.key_basis,
            key_shift=self.key_shift,
            value_basis=self.value_basis,
            value_shift=self.value_shift,
            output_basis=self.output_basis,
            value_constant=self.value_constant,
            scale=row_scale(self),
        )

    def train(self, mode: bool = True) -> RotorAttention:
        """Say once for the model that attention_dropout is not applied, where training begins."""
        if mode and not self.training and self.dropout and self.layer_idx == 0:
            log.warning(
                "attention_dropout=%g is not applied: compressed attention has no dropout. The rest is trained as it "
                "is configured.",
                self.dropout,
            )
        super().train(mode)
        return self

    def check_range(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Check that what `.to()` and the like do to tensors leaves the layer's numbers finite.

        Raises:
            UsageError: a number is beyond the new dtype, which is float16 in practice; names the tensor.
        """
        for name, parameter in self.named_parameters():
            if name in FLOAT32 or parameter.is_meta or not parameter.is_floating_point():
                continue
            wanted = fn(parameter.new_empty(0)).dtype
            if not wanted.is_floating_point or torch.finfo(wanted).max >= torch.finfo(parameter.dtype).max:
                continue
            largest = float(parameter.detach().abs().amax())
            if largest > torch.finfo(wanted).max:
                raise UsageError(
                    f"layer {self.layer_idx}: {name} has numbers up to {largest:.3g}, and {wanted} reaches "
                    f"{torch.finfo(wanted).max:.3g}.",
                    WIDER_DTYPE,
                )

    def check_finite(self) -> None:
        """Check float16 weights after they were loaded, which may have been cast.

        Raises:
            UsageError: a tensor has a number that is not finite; names it.
        """
        for name, parameter in self.named_parameters():
            if parameter.dtype == torch.float16 and not parameter.is_meta and not is_finite(parameter):
                raise UsageError(
                    f"layer {self.layer_idx}: {name} is not finite in {parameter.dtype}: it has numbers beyond "
                    f"{torch.finfo(parameter.dtype).max:.3g}.",
                    WIDER_DTYPE,
                )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotorAttention:
        """Apply `.to()` and the like: shifts and constants move with the module, and stay float32."""
        self.check_range(fn)
        kept = {name: p.detach() for name, p in self._parameters.items() if p is not None and name in FLOAT32}
        super()._apply(fn, recurse)
        for name, before in kept.items():
            after = self._parameters[name]
            assert after is not None
            if after.dtype != before.dtype:
                self._parameters[name] = nn.Parameter(before.to(after.device), requires_grad=False)
        return self

    def extra_repr(self) -> str:
        ranks = ", ".join(group.ranks_in_words for group in self.layout.groups)
        text = f"{self.layout.form.in_words(self.shape)}, group_size={self.layout.group_size}, ranks=[{ranks}]"
        return f"{text}, row_bytes={sum(self.layout.row_bytes(2))}" if self.layout.coded else text


def in_autocast(x: Tensor) -> Tensor:
    """Cast queries, keys or values to autocast's dtype where that is on: there norms give float32, and heads without
    one do not."""
    device = x.device.type
    if x.dtype != torch.float32 or not torch.is_autocast_enabled(device):
        return x
    return x.to(torch.get_autocast_dtype(device))


def attention_dropout(config: PreTrainedConfig) -> float:
    """Share of the attention weights that the source drops in training; GPT-2 has its own name for it."""
    return float(getattr(config, "attention_dropout", None) or getattr(config, "attn_pdrop", None) or 0.0)


def plain_rows(
    parameters: AttentionParameters, query: Tensor, key: Tensor, value: Tensor, rotations: Rotations
) -> tuple[Tensor, Tensor, Tensor]:
    """Make queries as `kernels.reference.attention` takes them, and rows, in plain PyTorch.

    Args:
        query, key, value: as projections and norms put them out.
    """
    layout = parameters.layout
    if parameters.query_basis is not None:
        query = rotated(query.transpose(1, 2), rotations.query, rotations.weights[0])
    latents, value = key.unsqueeze(1), value.unsqueeze(1)
    if parameters.key_basis is not None:
        heads = rotated(key.transpose(1, 2), rotations.stored, rotations.weights[1])
        latents = project_keys(heads, parameters.key_basis, layout, parameters.key_shift, value)
    return query, pack_layer(latents, layout, True, parameters.scale), pack_layer(value, layout, keys=False)


def appended(
    parameters: AttentionParameters,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotations: Rotations,
    ahead: Ahead | None = None,
) -> Appended:
    """Make queries and rows, and exact keys and values where the layer has them, by the kernels.

    Args:
        query, key, value: as projections and norms put them out. ahead: where kernels rotate, what else they do.
    """
    from ..kernels.append import append  # imports Triton

    p = parameters
    layer = {
        "layout": p.layout,
        "shape": p.shape,
        "key_basis": p.key_basis,
        "key_shift": p.key_shift,
        "value_basis": p.value_basis,
        "value_shift": p.value_shift,
        "scale": p.scale,
    }
    if rotations.query is None:
        asked = None if p.query_basis is None or rotations.table is None else query
        fill = ahead and ahead.fill
        absorb = ahead.step.absorbing if ahead and ahead.step else None
        made = append(
            key, value, query=asked, rotation=rotations.table, index=rotations.places, fill=fill, absorb=absorb, **layer
        )  # fmt: skip
        if made.query is not None:
            return made
        return made._replace(query=query.transpose(1, 2) if query.dim() == 4 else query)
    of_queries, of_keys = rotations.weights
    queries = rotated(query.transpose(1, 2), rotations.query, of_queries)
    stored = key
    if parameters.key_basis is not None:
        stored = rotated(key.transpose(1, 2), rotations.stored, of_keys).transpose(1, 2)
    made = append(stored, value, **layer)._replace(query=queries)
    if parameters.layout.exact is None:
        return made
    return made._replace(exact_key=rotated(key.transpose(1, 2), rotations.query, of_keys))


def new_tokens(query: Tensor, key: Tensor, value: Tensor, rotations: Rotations) -> NewTokens:
    """The new tokens of a layer with exact tokens as the uncompressed model makes them.

    Args:
        query, key, value: heads as projections and norms put them out, [batch_size, seq_len, heads, head_dim].
    """
    sides = zip((query, key), rotations.weights, strict=True)
    query, key = (rotated(side.transpose(1, 2), rotations.query, weight) for side, weight in sides)
    return NewTokens(query, key, value.transpose(1, 2))


def exact_rows(
    parameters: AttentionParameters, exact: NewTokens, key: Tensor, rotations: Rotations
) -> tuple[Tensor, Tensor, Tensor]:
    """Make queries and rows of a layer with exact tokens, as `plain_rows` does of others.

    Args:
        key: heads as projections and norms put them out.
    """
    layout, keys = parameters.layout, exact.key
    if rotations.stored is not rotations.query:
        keys = rotated(key.transpose(1, 2), rotations.stored, rotations.weights[1])
    latents, values = project_rows(keys, exact.value, parameters)
    return exact.query, pack_layer(latents, layout, True, parameters.scale), pack_layer(values, layout, keys=False)


def rotated(x: Tensor, rotation: Rotation | None, weight: Tensor | None) -> Tensor:
    """Rotate heads, [batch_size, heads, seq_len, head_dim], then multiply by the weight of a norm behind RoPE."""
    x = x if rotation is None else rotate(x, rotation[0].to(x.dtype), rotation[1].to(x.dtype))
    return x if weight is None else x * weight.to(x.dtype)


def _check_pass(
    layout: LayerLayout, layer_idx: int, asked: Arguments, mask: Tensor | None, cache: Cache | None
) -> None:
    """Check that a layer can do what is asked of it; raises UsageError if not.

    Args:
        asked: further keyword arguments of the forward pass.
    """
    if asked.get("output_attentions"):
        raise UsageError(
            "output_attentions: compressed layers keep no attention weights.", "Load the source model to see them."
        )
    if asked.get("cache") is not None:
        raise UsageError(
            "transformers' continuous batching (paged attention) cannot serve a compressed cache.", "Use generate()."
        )
    if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 4):
        got = f"has {mask.dim()} dimensions" if isinstance(mask, Tensor) else f"is of the type {type(mask).__name__}"
        raise UsageError(
            f"the attention mask {got}, expected a tensor of 4 dimensions.",
            "Leave attn_implementation unset; compressed layers always run rotor's own attention.",
        )
    layers = getattr(cache, "layers", ())
    layer = layers[layer_idx] if layer_idx < len(layers) else None
    if layout.coded and isinstance(layer, QUANTISING):
        raise UsageError(
            f"layer {layer_idx}: a quantised cache ({type(layer).__name__}) was given rows of codes: this checkpoint's "
            "cache is coded already.",
            "Leave cache_implementation out, or use 'static' or 'offloaded'.",
        )


def attend_to_shared(
    module: nn.Module, query: Tensor, key: Tensor | SharedRows, *args: object, **kwargs: object
) -> tuple[Tensor, None]:
    """The attention function registered as `rotor`, which layers call that read the cache of a compressed one.

    Compressed layers do not call it.

    Args:
        query: [batch_size, num_heads, seq_len, head_dim]. key: what the layer that is read handed over.
    Raises:
        UsageError: there is no such layer.
    """
    if isinstance(key, SharedRows):
        return key.attended(query), None
    raise UsageError(
        f"attn_implementation='rotor' was requested for {type(module).__name__}, which is not compressed.",
        "Load a checkpoint written by `rotor export`; `import rotor` is all that it needs.",
    )
