"""The attention module of a compressed layer in a vLLM model. It imports nothing of vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.projections import CompressedProjections
from ..errors import CheckpointError
from ..kernels.rotary import Rotation, rotate, within_blocks
from .shards import Shard


class RotorSelfAttention(CompressedProjections):
    """Replaces a native attention module; its parameters have the names of the checkpoint.

    Args:
        index: of the layer. shard: this rank's part of it.
        norms: the native module's norms of queries and keys, by name.
        rotation: RoPE's cos and sin by position; None in a model without RoPE.
        reduce: sums outputs over the ranks. returns_tuple: the family's attention returns (output, None).
        query_scale: factor of queries by their positions, [tokens]; None for 1.

    attn: the layer that keeps the rows and attends; `adapter` builds it around these parameters and sets it.
    """

    attn: nn.Module
    cos: Tensor
    sin: Tensor
    key_cos: Tensor
    key_sin: Tensor

    def __init__(
        self,
        index: int,
        shard: Shard,
        norms: dict[str, nn.Module],
        rotation: Rotation | None,
        reduce: Callable[[Tensor], Tensor],
        returns_tuple: bool,
        query_scale: Callable[[Tensor], Tensor | None] | None = None,
    ) -> None:
        layout, shape = shard.layout, shard.shape
        super().__init__(shard.shapes(), shape.head_dim, norms, shape.wide_norms)
        self.requires_grad_(False)
        self.index, self.shard, self.reduce, self.returns_tuple = index, shard, reduce, returns_tuple
        self.query_scale, self.block = query_scale, layout.rope_block
        if rotation is not None:
            cos, sin = rotation
            if layout.rope_block is not None:
                first = torch.arange(min(layout.rope_block, len(cos)), device=cos.device)
                rotation = within_blocks((cos, sin), first, layout.form)
            for name, table in zip(("cos", "sin", "key_cos", "key_sin"), (cos, sin, *rotation), strict=True):
                self.register_buffer(name, table, persistent=False)
        self.rotates = rotation is not None
        self.rotates_keys = rotation is not None and not layout.pre_rope

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take this rank's part of a layer's tensors, by their names in the checkpoint.

        Raises:
            CheckpointError: one is missing, of another shape, or not known.
        """
        where, hint = f"layer {self.index}", "Run `rotor validate`; export it again."
        parameters = dict(self.named_parameters())
        for name, tensor in tensors.items():
            target = parameters.pop(name, None)
            if target is None:
                raise CheckpointError(f"{where}, {name}: not a tensor of this layer.", hint)
            spec = self.shard.tensors.get(name)
            expected = target.shape if spec is None else torch.Size(spec.shape)
            if tensor.shape != expected:
                raise CheckpointError(
                    f"{where}, {name}: {list(tensor.shape)} in the checkpoint, expected {list(expected)}.", hint
                )
            target.data.copy_(self.shard.part(name, tensor))
        if parameters:
            raise CheckpointError(f"{where}: {', '.join(sorted(parameters))} is not in the checkpoint.", hint)

    def forward(self, hidden_states: Tensor, positions: Tensor | None = None, **kwargs: object) -> Any:
        """`attended`, as the family's layers expect it."""
        output = self.attended(hidden_states, positions)
        return (output, None) if self.returns_tuple else output

    def attended(self, hidden_states: Tensor, positions: Tensor | None) -> Tensor:
        """Project, rotate keys as they are stored, and attend; the key basis is applied where rows are written.

        Args:
            hidden_states: [tokens, hidden_size]. positions: [tokens], where the model has RoPE.
        """
        query, key, value = self.projected(hidden_states)
        query_weight, key_weight = self.weights_behind_rope(self.shard.layout.form)
        exact: list[Tensor] = []
        scale = None if self.query_scale is None or positions is None else self.query_scale(positions)
        if scale is not None:
            query = query * scale.to(query.dtype).unflatten(0, (-1, *[1] * (query.dim() - 1)))
        if self.query_basis is not None:
            query = self._as_attended(query, positions, query_weight).flatten(1)
        if self.shard.layout.exact is not None:
            exact.append(self._as_attended(key, positions, key_weight).flatten(1))
            value = value.flatten(1)
        if self.key_basis is not None:
            if self.rotates_keys:
                assert positions is not None
                places = positions if self.block is None else positions % self.block
                key = self._rotated(key, (self.key_cos, self.key_sin), places, key_weight)
            key = key.flatten(1)
        output: Tensor = self.attn(query, key, value, *exact)
        if self.gate_proj is not None:
            output = output * self.gate_proj(hidden_states).sigmoid()
        summed: Tensor = self.reduce(self.o_proj(output))
        return summed

    def _as_attended(self, heads: Tensor, positions: Tensor | None, weight: Tensor | None) -> Tensor:
        """Rotate heads by their positions, where the model has RoPE."""
        if not self.rotates:
            return heads
        assert positions is not None
        return self._rotated(heads, (self.cos, self.sin), positions, weight)

    @staticmethod
    def _rotated(heads: Tensor, rotation: Rotation, places: Tensor, weight: Tensor | None) -> Tensor:
        """Rotate heads, then multiply by the weight of a norm behind RoPE, if there is one."""
        turned = rotate(heads, *(table[places].unsqueeze(1) for table in rotation)).to(heads.dtype)
        return turned if weight is None else turned * weight.to(turned.dtype)


class OneSequence(RotorSelfAttention):
    """The module within transformers' own layers, as vLLM runs those that it has no model for: all tokens of a step are
    one sequence, [1, tokens, hidden_size].
    """

    def forward(self, hidden_states: Tensor, positions: Tensor | None = None, **kwargs: object) -> tuple[Tensor, None]:
        """`attended` for the one sequence; position_ids, [1, tokens], are among `kwargs`."""
        position_ids = kwargs["position_ids"]
        assert isinstance(position_ids, Tensor)
        return self.attended(hidden_states[0], position_ids[0])[None], None
