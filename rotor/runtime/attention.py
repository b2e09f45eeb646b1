"""The attention module of a compressed model, for every family and both domains.

It holds the rewritten projections under their usual names, puts latents into the cache as packed rows, of numbers or of
codes, and calls the `rotor` attention function. transformers' own cache classes store the rows unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UsageError
from ..format.kernel_config import LayerKernels, Schedule
from ..format.layout import AttentionShape, LayerLayout
from ..kernels.code_reference import coded_attention
from ..kernels.defaults import SCHEDULE, default_layer
from ..kernels.dispatch import kernels_serve
from ..kernels.parameters import AttentionParameters, seq_len_of
from ..kernels.reference import grouped_attention, project_keys, rotate
from ..kernels.rows import LayerColumns, pack_layer
from . import kernel_projection
from .cache.adoption import policy_layer
from .cache.policy import Policy
from .code_rows import check_cache
from .families import Family
from .policy_attention import attend_by_policy, in_pytorch
from .rope_blocks import within_blocks
from .rotary_table import RotaryTable
from .spread import Spread

NO_GRADIENTS = "this checkpoint caches codes, which have no gradients: it cannot be trained."
FLOAT32 = ("key_shift", "key_constant")
"""Parameters that keep their dtype: they are added before anything is rounded."""


class RotorAttention(nn.Module):
    """Compressed attention: the same inputs and outputs as the family's own module.

    Args:
        base: the module that it takes the place of; its scaling, norms and layer index are taken over.
        family, shape, layout: the model's family, its sizes, and what this layer stores.
        biases: which of q, k, v, o have a bias.
        rotary: table shared by the layers, or None for a model without RoPE.

    schedule, kernels: how the Triton kernels run it: by rule, or as a loaded checkpoint's kernel_config.json says.
    cache_policy: how the cache is kept, where not as transformers keeps it; see rotor.runtime.cache.
    key_shift: with codes, where the key basis is not folded: what is added to keys behind it, [qk_width].
    key_constant: with codes, in domain `pre`: what is added to rebuilt keys, [num_kv_heads, head_dim], in the layout's
        order. Both stay in float32 whatever the model's dtype.
    spread: set while the sequence lies on several processes (`rotor.parallel`); the cache, the mask and the attention
        are then its business.
    """

    spread: Spread | None = None

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
        self.head_dim = shape.head_dim
        self.heads_per_kv = self.num_key_value_groups = shape.heads_per_kv
        self.is_causal = True
        self.layout = layout
        self.schedule: Schedule = SCHEDULE
        self.kernels: LayerKernels = default_layer(layout, shape.head_dim)
        self.cache_policy: Policy | None = None
        self._rotary = rotary
        self._planes: tuple[Tensor, Tensor] | None = None
        q_width = shape.num_heads * shape.head_dim
        if layout.domain == "none":
            q_width = layout.group_size * shape.heads_per_kv * layout.qk_width
        k_width = layout.qk_width if layout.folded_keys else shape.num_kv_heads * shape.head_dim
        o_width = layout.group_size * shape.heads_per_kv * layout.v_width
        hidden_size = shape.hidden_size
        self.q_proj = nn.Linear(hidden_size, q_width, bias="q" in biases)
        # The means of codes are biases where the model has none.
        if layout.coded:
            shifted = "o k" if layout.folded_keys else "o"
            biases = biases | set(shifted.split()) | (set() if layout.joint else {"v"})
        self.k_proj = nn.Linear(hidden_size, k_width, bias="k" in biases)
        if not (layout.joint and layout.folded_keys):
            self.v_proj = nn.Linear(hidden_size, layout.v_width, bias="v" in biases)
        self.o_proj = nn.Linear(o_width, hidden_size, bias="o" in biases)
        for name in family.norms:
            self.add_module(name, base.get_submodule(name))
        basis_shape = (layout.group_size * shape.head_dim, layout.qk_width)
        self.key_basis = None if layout.folded_keys else nn.Parameter(torch.empty(basis_shape), requires_grad=False)
        self.query_basis = (
            None if layout.domain == "none" else nn.Parameter(torch.empty(basis_shape), requires_grad=False)
        )
        self.row_columns = LayerColumns.of(layout) if layout.coded else None
        self.key_shift = self.key_constant = None
        if layout.coded and not layout.folded_keys:
            self.key_shift = _in_float32(layout.qk_width)
        if layout.coded and layout.domain == "pre":
            self.key_constant = _in_float32(shape.num_kv_heads, shape.head_dim)

    @property
    def rotary(self) -> RotaryTable | None:
        """The table that the layers of a type share; None for a model without RoPE."""
        return self._rotary

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

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        layer_past: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """`layer_past` is what GPT-NeoX and Falcon call `past_key_values`."""
        past_key_values = layer_past if past_key_values is None else past_key_values
        if kwargs.get("output_attentions"):
            raise UsageError(
                "output_attentions: compressed layers keep no attention weights.", "Load the source model to see them."
            )
        layout, seq_len = self.layout, hidden_states.shape[1]
        # Positions are indices in the cache: what the mask goes by, and only differences matter to RoPE. Where they are
        # not, the table's check of positions refuses.
        query_offset, kv_len, kv_offset, cache_layer = 0, seq_len, 0, None
        if self.spread is not None:
            kv_len = self.spread.length
        elif past_key_values is not None:
            cache_layer = policy_layer(past_key_values, self.layer_idx, self.cache_policy, self.config)
            query_offset = past_key_values.get_seq_length(self.layer_idx)
            kv_len, kv_offset = past_key_values.get_mask_sizes(seq_len, self.layer_idx)

        # Where a window has let go of the first keys, rows may begin within a block: kernels want whole ones.
        first = kv_offset % layout.rope_block if layout.turned_in_blocks else 0
        use_kernels = (
            self.spread is None
            and first == 0
            and not in_pytorch(cache_layer, self, hidden_states)
            and kernels_serve(
                hidden_states,
                layout,
                self.heads_per_kv,
                self.head_dim,
                attention_mask,
                kwargs.get("dropout", 0.0),
                self._rotation_fits_kernels(position_embeddings),
                self.kernels,
            )
        )
        key_rotation = rotation_rows = index = None
        if layout.domain == "pre":
            assert self._rotary is not None
            if self.spread is None:
                self._rotary.check_positions(
                    kwargs.get("position_ids"), attention_mask, past_key_values, query_offset, kv_offset
                )
            # The kernels compose rotations, and so want them exact.
            dtype = torch.float32 if use_kernels else hidden_states.dtype
            end = query_offset + seq_len if self.spread is None else kv_len
            rotation_rows = key_rotation = self._rotary(kv_offset, first + kv_len, end, hidden_states.device, dtype)
            if layout.turned_in_blocks:
                key_rotation = self._rotary.block_starts(layout.rope_block, first, kv_len)
            index = torch.arange(seq_len, device=hidden_states.device) + query_offset - kv_offset + first
            if self.spread is not None:
                index = self.spread.indices
        check_cache(past_key_values, self.layer_idx, layout)
        rotation, turns = position_embeddings, None
        if rotation_rows is not None:
            assert index is not None
            rotation = rotation_rows[0][index], rotation_rows[1][index]
            if layout.turned_in_blocks:
                turns = within_blocks(rotation_rows, index, layout.rope_block)
        query, key, value = self._projected(hidden_states, rotation, use_kernels, turns)

        def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, turns: Any) -> Tensor:
            options = {"scaling": self.scaling, "key_rotation": turns, "use_kernels": use_kernels, **kwargs}
            return rotor_attention_forward(self, query, key, value, mask, **options)[0]

        if self.spread is not None:
            output = self.spread.attend(self, query, key, value, past_key_values, key_rotation)
        elif cache_layer is not None:
            output = attend_by_policy(
                self, cache_layer, query, key, value, past_key_values, attention_mask, key_rotation, attend,
                kwargs.get("dropout", 0.0), use_kernels,
            )  # fmt: skip
        else:
            if past_key_values is not None:
                key, value = past_key_values.update(key, value, self.layer_idx)
            output = attend(query, key, value, attention_mask, key_rotation)
        return self.o_proj(output), None

    def _projected(
        self,
        hidden_states: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        use_kernels: bool,
        turns: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, and the rows of keys and values as the cache keeps them, as `grouped_attention` takes all three.

        Args:
            rotation: cos and sin of these tokens: [batch_size, seq_len, rotary_dim], or in domain `pre` [seq_len,
                rotary_dim] by which queries alone are rotated.
            turns: likewise, by which keys are turned before they are projected.
        """
        layout = self.layout
        query, key = self.q_proj(hidden_states), self.k_proj(hidden_states)
        value = key[..., :0] if layout.joint else self.v_proj(hidden_states)
        if layout.domain != "none":
            query = self._heads(query, "q_norm")
        if any(layout.planes):
            assert rotation is not None
            query, key = self._turn_planes(query, key, *rotation)
        if not layout.folded_keys:
            key = self._heads(key, "k_norm")
        if layout.domain == "post":
            assert rotation is not None
            if use_kernels and layout.coded:
                query, key, value = kernel_projection.rotate_and_pack(self, query, key, value, rotation)
                return query, key.unsqueeze(1), value.unsqueeze(1)
            if use_kernels:
                query, key = kernel_projection.rotate_and_project(self, query, key, rotation)
            else:
                cos, sin = (table.unsqueeze(1) for table in rotation)
                query, key = rotate(query.transpose(1, 2), cos, sin), rotate(key.transpose(1, 2), cos, sin)
        elif layout.domain == "pre":
            assert rotation is not None
            query = rotate(query.transpose(1, 2), *(table.to(query.dtype) for table in rotation))
        if layout.folded_keys or key.dim() == 3:
            key = key.unsqueeze(1)
        else:
            heads = key if layout.domain == "post" else key.transpose(1, 2)
            if turns is not None:
                heads = rotate(heads, *(table.to(heads.dtype) for table in turns))
            of_values = self.v_proj(hidden_states).unsqueeze(1) if layout.joint else None
            key = project_keys(heads, self.key_basis, layout, self.key_shift, of_values)

        value = value.unsqueeze(1)
        if layout.coded and use_kernels:
            key, value = kernel_projection.pack_rows(self, key, value)
        elif self.row_columns is not None:
            key, value = pack_layer(key, self.row_columns.key), pack_layer(value, self.row_columns.value)
        return query, key, value

    @property
    def described(self) -> str:
        """The layer as the kernels' operators take it."""
        from ..kernels.operators import describe  # imports Triton

        return describe(self.layout, self.schedule, self.kernels, self.heads_per_kv, self.head_dim)

    def parameters_of_attention(self, scaling: float | None = None) -> AttentionParameters:
        """What attention goes by beside queries and rows; `scaling` in place of the layer's own."""
        return AttentionParameters(
            self.layout,
            self.heads_per_kv,
            self.scaling if scaling is None else scaling,
            self.query_basis,
            self.key_constant,
            self.softcap,
        )

    def _turn_planes(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """RoPE on latents that are whole rotary planes: two neighbouring columns of each, of its own frequency.

        Args:
            query, key: [batch_size, seq_len, width], packed as the projections put them out.
            cos, sin: [batch_size, seq_len, head_dim].
        """
        if self._planes is None or self._planes[0].device != query.device:
            heads = self.layout.group_size * self.heads_per_kv
            frequencies = [torch.tensor(planes).repeat_interleave(2) for planes in self.layout.planes]
            both = torch.cat([c.repeat(heads) for c in frequencies]), torch.cat(frequencies)
            self._planes = both[0].to(query.device), both[1].to(query.device)
        turned = []
        for latents, columns in ((query, self._planes[0]), (key, self._planes[1])):
            first, second = latents.unflatten(-1, (-1, 2)).unbind(-1)
            partners = torch.stack([-second, first], dim=-1).flatten(-2)
            turned.append(latents * cos[..., columns] + partners * sin[..., columns])
        return turned[0], turned[1]

    def _rotation_fits_kernels(self, position_embeddings: tuple[Tensor, Tensor] | None) -> bool:
        if self.layout.domain == "none" or position_embeddings is None:
            return self.layout.domain == "none"
        changes = self.layout.domain == "pre" and self._rotary is not None and self._rotary.depends_on_length
        return position_embeddings[0].shape[-1] == self.head_dim and not changes

    def _heads(self, x: Tensor, norm: str) -> Tensor:
        """[batch_size, seq_len, n * head_dim] -> [batch_size, seq_len, n, head_dim], normed where the family does."""
        heads = x.unflatten(-1, (-1, self.head_dim))
        return self.get_submodule(norm)(heads) if norm in self._modules else heads

    def extra_repr(self) -> str:
        ranks = ", ".join(group.ranks_in_words for group in self.layout.groups)
        text = f"domain={self.layout.domain}, group_size={self.layout.group_size}, ranks=[{ranks}]"
        return f"{text}, row_bytes={sum(self.layout.row_bytes(2))}" if self.layout.coded else text


def _in_float32(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=torch.float32), requires_grad=False)


def rotor_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    key_rotation: tuple[Tensor, Tensor] | None = None,
    use_kernels: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers knows as `rotor`; serves packed rows of RotorAttention only.

    With use_kernels the Triton kernels run, and queries of domain `post` come projected.
    """
    if not isinstance(module, RotorAttention):
        raise UsageError(
            f"attn_implementation='rotor' was requested for {type(module).__name__}, which is not compressed.",
            "Load a checkpoint written by `rotor export`; `import rotor` is all that it needs.",
        )
    if kwargs.get("cache") is not None:
        raise UsageError(
            "transformers' continuous batching (paged attention) cannot serve a compressed cache.", "Use generate()."
        )
    if attention_mask is not None and attention_mask.dim() != 4:
        raise UsageError(
            f"the attention mask has {attention_mask.dim()} dimensions, expected 4.",
            "Leave attn_implementation unset; compressed layers always run rotor's own attention.",
        )
    if attention_mask is not None:
        _check_mask(attention_mask, module, value.shape[0], seq_len_of(query), value.shape[2])
    if module.layout.coded and dropout:
        raise UsageError(
            f"layer {module.layer_idx}: dropout of {dropout} in attention over rows of codes, which has none.",
            "Call model.eval(); a checkpoint with codes is for inference.",
        )
    parameters = module.parameters_of_attention(scaling)
    if use_kernels and torch.compiler.is_compiling():
        from ..kernels import operators  # imports Triton

        output = operators.attention(
            query,
            key,
            value,
            attention_mask,
            parameters.query_basis,
            *(key_rotation or (None, None)),
            parameters.constant_key,
            parameters.scaling,
            parameters.softcap,
            module.described,
        )
    elif use_kernels:
        from ..kernels.attention import packed_attention  # imports Triton

        output = packed_attention(
            query,
            key,
            value,
            parameters,
            module.head_dim,
            key_rotation,
            attention_mask,
            schedule=module.schedule,
            kernels=module.kernels,
            layer_idx=module.layer_idx,
        )
    elif module.layout.coded:
        output = coded_attention(query, key, value, parameters, key_rotation, attention_mask)
        if output.requires_grad and not torch.compiler.is_compiling():
            output.register_hook(_refuse_gradients)
    else:
        output = grouped_attention(query, key, value, parameters, key_rotation, attention_mask, dropout)
    return output, None


def _refuse_gradients(gradient: Tensor) -> None:
    """Keys and values get no gradient through their codes: what is left of it would train something else."""
    raise UsageError(NO_GRADIENTS, "Export a run of columns of 16 bits (recipe rotor-16), and train that.")


def _check_mask(mask: Tensor, module: RotorAttention, batch_size: int, seq_len: int, kv_len: int) -> None:
    """Raises UsageError where a 4-dimensional mask does not broadcast to the logits: the kernels read it unchecked."""
    num_heads = module.layout.group_size * len(module.layout.groups) * module.heads_per_kv
    expected = (batch_size, num_heads, seq_len, kv_len)
    if any(got not in (1, size) for got, size in zip(mask.shape, expected, strict=True)):
        raise UsageError(
            f"layer {module.layer_idx}: an attention mask of {list(mask.shape)}, expected {list(expected)} or 1 in "
            "place of any of these (batch_size, num_heads, seq_len, kv_len).",
            "Give a mask over all cached keys and the new ones.",
        )
