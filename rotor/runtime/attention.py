"""The attention module of a compressed model, for every family.

It holds the rewritten projections under their usual names and puts rows, of numbers or of codes, into the cache;
transformers' own cache classes store them unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UsageError
from ..format.kernel_config import LayerKernels
from ..format.layout import AttentionShape, LayerLayout
from ..format.tensors import FLOAT32, TensorSpec, layer_tensors
from ..kernels.parameters import AttentionParameters, seq_len_of
from ..kernels.reference import attention, project_keys
from ..kernels.rotary import Rotation, rotate
from ..kernels.rows import pack_layer
from . import kernel_calls
from .cache_hook import CachePolicy, attending_layer
from .code_rows import check_cache
from .families import Family
from .rope import Place, Rotations, rope_of
from .rotary_table import RotaryTable
from .spread import Spread

NO_GRADIENTS = "this checkpoint caches codes, which have no gradients: it cannot be trained."
NO_GRADIENTS_HINT = "Export a run of rows of numbers (recipe rotor-16), and train that."


class RotorAttention(nn.Module):
    """Compressed attention: the same inputs and outputs as the family's own module.

    Its tensors are those of `format.tensors.layer_tensors`.

    Args:
        base: the module that it takes the place of; its scaling, norms and layer index are taken over.
        family, shape, layout: the model's family, its sizes, and what this layer stores.
        biases: which of q, k, v, o have a bias in the source.
        rotary: table shared by the layers, or None for a model without RoPE.

    kernels: how the Triton kernels run it: by rule (None), or as a loaded checkpoint's kernel_config.json says.
    cache_policy: how the cache is kept, where not as transformers keeps it; see rotor.policies.
    spread: set while the sequence lies on several processes (`rotor.parallel`); the cache, the mask and the attention
        are then its business.
    """

    spread: Spread | None = None
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear | None
    o_proj: nn.Linear
    key_basis: nn.Parameter | None
    query_basis: nn.Parameter | None
    key_shift: nn.Parameter | None
    key_constant: nn.Parameter | None

    def __init__(
        self,
        base: nn.Module,
        family: Family,
        shape: AttentionShape,
        layout: LayerLayout,
        biases: frozenset[str],
        rotary: RotaryTable | None,
    ) -> None:
        super().__init__()
        self.config: Any = base.config
        self.layer_idx: int = int(base.layer_idx)  # type: ignore[arg-type]
        # Falcon's attention has no such attribute, and the default.
        self.scaling: float = float(getattr(base, "scaling", shape.head_dim**-0.5))
        self.softcap: float | None = getattr(self.config, family.softcap) if family.softcap else None
        self.shape, self.layout = shape, layout
        self.is_causal = True
        self.kernels: LayerKernels | None = None
        self.cache_policy: CachePolicy | None = None
        self.rotary = rotary
        self._rope = rope_of(layout, shape, rotary)
        tensors = layer_tensors(layout, shape, biases)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            weight, bias = tensors.get(f"{name}.weight"), f"{name}.bias" in tensors
            linear = None if weight is None else nn.Linear(weight.shape[1], weight.shape[0], bias=bias)
            self.register_module(name, linear)
        for name in ("key_basis", "query_basis", *FLOAT32):
            spec = tensors.get(name)
            self.register_parameter(name, None if spec is None else _frozen(spec))
        for name in family.norms:
            self.add_module(name, base.get_submodule(name))

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Rotation | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        layer_past: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """`layer_past` is what GPT-NeoX and Falcon call `past_key_values`."""
        cache, dropout = layer_past if past_key_values is None else past_key_values, kwargs.get("dropout", 0.0)
        self._check(kwargs, attention_mask, dropout, cache)
        held = attending_layer(cache, self.layer_idx, self.cache_policy, self.config) if self.spread is None else None
        place = self._place(cache, hidden_states.shape[1])
        kernels = not (held and held.in_pytorch) and kernel_calls.serve(self, hidden_states, attention_mask, dropout)
        rotations = self._rope(place, position_embeddings, hidden_states, kernels)
        if self.rotary is not None and self.layout.in_blocks and self.spread is None:
            positions = kwargs.get("position_ids")
            where = self.layer_idx, len(hidden_states), place.query_offset, place.kv_offset
            self.rotary.check_positions(positions, attention_mask, cache, *where)

        query, key, value = self._projected(hidden_states)
        with torch.autocast(hidden_states.device.type, enabled=False):
            rows = kernel_calls.append if kernels else plain_rows
            query, key, value = rows(self, query, key, value, rotations)
            if self.spread is not None:
                output = self.spread.attend(self, query, key, value, cache, rotations.read)
            elif held is not None:
                step = attention_mask, rotations, dropout, kernels
                output = held.attend(self, query, key, value, cache, *step)
            else:
                if cache is not None:
                    key, value = cache.update(key, value, self.layer_idx)
                output = self.attend(query, key, value, attention_mask, rotations, dropout, kernels)
        return self.o_proj(output), None

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        rotations: Rotations,
        dropout: float = 0.0,
        kernels: bool = False,
    ) -> Tensor:
        """Attention over rows, [batch_size, 1, kv_len, *]: see `kernels.reference.attention`."""
        self._check_mask(mask, value.shape[0], seq_len_of(query), key.shape[2])
        if kernels:
            return kernel_calls.attend(self, query, key, value, mask, rotations)
        output = attention(query, key, value, self.parameters_of_attention(), rotations.read, mask, dropout)
        if self.layout.coded and output.requires_grad and not torch.compiler.is_compiling():
            output.register_hook(_refuse_gradients)
        return output

    def parameters_of_attention(self) -> AttentionParameters:
        """What attention goes by beside queries and rows."""
        return AttentionParameters(
            self.layout, self.shape, self.scaling, self.query_basis, self.key_constant, self.softcap
        )

    @property
    def rotation_fits_kernels(self) -> bool:
        return self._rope.fits_kernels

    def _projected(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys by heads, [batch_size, seq_len, heads, head_dim], normed; what is folded as latents,
        [batch_size, seq_len, *], as values are: those of a joint latent are their part of it, or nothing.
        """
        query, key = self.q_proj(hidden_states), self.k_proj(hidden_states)
        value = key[..., :0] if self.v_proj is None else self.v_proj(hidden_states)
        if self.query_basis is not None:
            query = self._heads(query, "q_norm")
        if self.key_basis is not None:
            key = self._heads(key, "k_norm")
        return query, key, value

    def _heads(self, x: Tensor, norm: str) -> Tensor:
        """[batch_size, seq_len, n * head_dim] -> [batch_size, seq_len, n, head_dim], normed where the family does."""
        heads = x.unflatten(-1, (-1, self.shape.head_dim))
        return self.get_submodule(norm)(heads) if norm in self._modules else heads

    def _place(self, cache: Any, seq_len: int) -> Place:
        if self.spread is not None:
            return Place(0, self.spread.length, 0, self.spread.length, self.spread.indices)
        if cache is None:
            return Place(0, seq_len, 0, seq_len)
        kv_len, kv_offset = cache.get_mask_sizes(seq_len, self.layer_idx)
        return Place(cache.get_seq_length(self.layer_idx), seq_len, kv_offset, kv_len)

    def _check(self, kwargs: dict[str, Any], mask: Tensor | None, dropout: float, cache: Any) -> None:
        """Raises UsageError for what compressed attention does not do."""
        if kwargs.get("output_attentions"):
            raise UsageError(
                "output_attentions: compressed layers keep no attention weights.", "Load the source model to see them."
            )
        if kwargs.get("cache") is not None:
            raise UsageError(
                "transformers' continuous batching (paged attention) cannot serve a compressed cache.",
                "Use generate().",
            )
        if mask is not None and mask.dim() != 4:
            raise UsageError(
                f"the attention mask has {mask.dim()} dimensions, expected 4.",
                "Leave attn_implementation unset; compressed layers always run rotor's own attention.",
            )
        if self.layout.coded and dropout:
            raise UsageError(
                f"layer {self.layer_idx}: dropout of {dropout} in attention over rows of codes, which has none.",
                "Call model.eval(); a checkpoint with codes is for inference.",
            )
        check_cache(cache, self.layer_idx, self.layout)

    def _check_mask(self, mask: Tensor | None, batch_size: int, seq_len: int, kv_len: int) -> None:
        """Raises UsageError where a mask does not broadcast to the logits: the kernels read it unchecked."""
        if mask is None:
            return
        expected = (batch_size, self.shape.num_heads, seq_len, kv_len)
        if any(got not in (1, size) for got, size in zip(mask.shape, expected, strict=True)):
            raise UsageError(
                f"layer {self.layer_idx}: an attention mask of {list(mask.shape)}, expected {list(expected)} or 1 in "
                "place of any of these (batch_size, num_heads, seq_len, kv_len).",
                "Give a mask over all cached keys and the new ones.",
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotorAttention:
        """What `.to()` and its kin go through: they move key_shift and key_constant, and leave them in float32."""
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


def _frozen(spec: TensorSpec) -> nn.Parameter:
    dtype = torch.float32 if spec.float32 else None
    return nn.Parameter(torch.empty(spec.shape, dtype=dtype), requires_grad=False)


def plain_rows(
    module: RotorAttention, query: Tensor, key: Tensor, value: Tensor, rotations: Rotations
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries as `kernels.reference.attention` takes them, and the rows of keys and values as the cache keeps them.

    Args:
        query, key, value: as `_projected` gives them.
    """
    layout = module.layout
    if rotations.query is not None:
        query = rotated(query.transpose(1, 2), rotations.query)
    latents, value = key.unsqueeze(1), value.unsqueeze(1)
    if module.key_basis is not None:
        of_values = value if layout.joint else None
        heads = rotated(key.transpose(1, 2), rotations.stored)
        latents = project_keys(heads, module.key_basis, layout, module.key_shift, of_values)
    if layout.joint:
        value = latents[..., :0]
    return query, pack_layer(latents, layout, keys=True), pack_layer(value, layout, keys=False)


def rotated(x: Tensor, rotation: Rotation | None) -> Tensor:
    return x if rotation is None else rotate(x, rotation[0].to(x.dtype), rotation[1].to(x.dtype))


def refuse_others(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """The attention function that transformers knows as `rotor`: RotorAttention has its own."""
    raise UsageError(
        f"attn_implementation='rotor' was requested for {type(module).__name__}, which is not compressed.",
        "Load a checkpoint written by `rotor export`; `import rotor` is all that it needs.",
    )


def _refuse_gradients(gradient: Tensor) -> None:
    """Keys and values get no gradient through their codes: what is left of it would train something else."""
    raise UsageError(NO_GRADIENTS, NO_GRADIENTS_HINT)
