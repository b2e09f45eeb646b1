"""The attention module of a compressed layer in a vLLM model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.linear import ReplicatedLinear, RowParallelLinear

from ...errors import CheckpointError
from ...format.kernel_config import LayerKernels, Schedule
from ...format.layout import AttentionShape, LayerLayout
from ...kernels.reference import project_keys, project_queries, rotate
from ...runtime.families import Family
from ...runtime.rope_blocks import within_blocks
from .backend import RotorImpl, use_kernels
from .cache import RotorCache
from .pages import LayerPages
from .rotary import rotation_table
from .shards import check_tensor, shard_of


@dataclass(frozen=True)
class LayerPlan:
    """What a layer is to become.

    layout: of the whole layer, as loaded. biases: of q, k, v, o. row_bytes: of a token in the cache. mixed: the model
    mixes sliding windows and full attention. kernels: None is by rule.
    """

    index: int
    family: Family
    shape: AttentionShape
    layout: LayerLayout
    biases: frozenset[str]
    row_bytes: int
    mixed: bool
    schedule: Schedule
    kernels: LayerKernels | None


class RotorSelfAttention(nn.Module):
    """Takes the place of a native attention module; its parameters have the names of the checkpoint.

    Args:
        native: the module that vLLM has built: scale, window, soft cap, norms and rotary embedding are taken over.
    """

    cos: Tensor
    sin: Tensor
    query_planes: Tensor
    key_planes: Tensor

    def __init__(self, native: nn.Module, plan: LayerPlan, vllm_config: Any) -> None:
        super().__init__()
        attn: Any = native.attn
        shape, family, full = plan.shape, plan.family, plan.layout
        dtype = vllm_config.model_config.dtype
        self.tp_size = get_tensor_model_parallel_world_size()
        shard = self.shard = shard_of(full, shape, get_tensor_model_parallel_rank(), self.tp_size)
        layout = self.layout = shard.layout
        self.index, self.head_dim, self.heads_per_kv = plan.index, shape.head_dim, shape.heads_per_kv
        self.returns_tuple = family.layer_returns_tuple
        # Falcon sums the outputs of attention and MLP over the ranks together.
        self.reduces = all(m.reduce_results for m in native.modules() if isinstance(m, RowParallelLinear))
        self.norms = family.norms
        for norm in family.norms:
            self.add_module(norm, native.get_submodule(norm))

        name = attn.layer_name
        prefix = name.rsplit(".", 1)[0]
        # The means of codes are biases where the model has none.
        shifted = {"o"} | ({"k"} if full.folded_keys else set()) | (set() if full.joint else {"v"})
        biases = plan.biases | shifted if full.coded else plan.biases

        def linear(columns: int, rows: int, which: str) -> ReplicatedLinear:
            return ReplicatedLinear(
                columns, rows, bias=which in biases, prefix=f"{prefix}.{which}_proj", return_bias=False
            )

        hidden = shape.hidden_size
        self.q_proj = linear(hidden, shard.width("q_proj"), "q")
        self.k_proj = linear(hidden, shard.width("k_proj"), "k")
        if not (full.joint and full.folded_keys):
            self.v_proj = linear(hidden, shard.width("v_proj"), "v")
        self.o_proj = linear(shard.width("o_proj"), hidden, "o")

        def parameter(wanted: bool, *sizes: int, of: torch.dtype | None = None) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(sizes, dtype=of), requires_grad=False) if wanted else None

        columns = shard.width("key_columns")
        self.key_basis = parameter(not full.folded_keys, full.group_size * shape.head_dim, columns)
        self.query_basis = parameter(full.domain != "none", shard.width("basis_rows"), columns)
        # Added before anything is rounded, and so in float32 whatever the model's dtype.
        float32 = torch.float32
        self.key_shift = parameter(full.coded and not full.folded_keys, columns, of=float32)
        rebuilt = full.coded and full.domain == "pre"
        self.key_constant = parameter(rebuilt, shard.width("kv_heads"), shape.head_dim, of=float32)

        table = key_rotation = None
        rotary = getattr(native, "rotary_emb", None)
        if full.domain != "none" or any(full.planes):
            assert rotary is not None
            positions = vllm_config.model_config.max_model_len
            table = rotation_table(rotary, positions)
            if full.domain == "pre":
                key_rotation = rotation_table(rotary, positions, full.rope_block)
            self.register_buffer("cos", table[0], persistent=False)
            self.register_buffer("sin", table[1], persistent=False)
        if any(full.planes):
            heads = layout.group_size * self.heads_per_kv
            planes = [torch.tensor(g.planes).repeat_interleave(2) for g in layout.groups]
            self.register_buffer("query_planes", torch.cat([c.repeat(heads) for c in planes]), persistent=False)
            self.register_buffer("key_planes", torch.cat(planes), persistent=False)

        pages = LayerPages(layout, dtype)
        device = vllm_config.device_config.device
        kernels = plan.kernels if self.tp_size == 1 else None  # what the file says is of the whole layer
        cos = None if table is None else table[0]
        vllm_config.compilation_config.static_forward_context.pop(name)
        impl = RotorImpl(
            len(layout.groups) * layout.group_size * self.heads_per_kv,
            sum(pages.sizes),
            float(attn.impl.scale),
            sliding_window=attn.sliding_window,
            logits_soft_cap=getattr(attn.impl, "logits_soft_cap", None) or None,  # 0 is none, on some backends
            attn_type=attn.attn_type,
            pages=pages,
            heads_per_kv=self.heads_per_kv,
            head_dim=shape.head_dim,
            key_rotation=key_rotation,
            query_basis=self.query_basis if full.domain == "pre" else None,
            key_constant=self.key_constant,
            schedule=plan.schedule,
            kernels=kernels,
            use_kernels=use_kernels(pages, self.heads_per_kv, shape.head_dim, cos, torch.device(device), kernels),
        )
        width = shard.width("o_proj")
        self.attn = RotorCache(name, attn, impl, plan.row_bytes, shard.parts, width, plan.mixed, vllm_config)

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take this rank's part of a layer's tensors, by their names in the checkpoint.

        Raises:
            CheckpointError: one is missing, of another shape, or not known.
        """
        parameters = dict(self.named_parameters())
        for name, tensor in tensors.items():
            target = parameters.pop(name, None)
            if target is None:
                raise CheckpointError(f"layer {self.index}, {name}: not a tensor of this layer.", "Export it again.")
            part = self.shard.part(name, tensor)
            check_tensor(name, self.index, part, target)
            target.data.copy_(part)
        if parameters:
            names = ", ".join(sorted(parameters))
            raise CheckpointError(f"layer {self.index}: {names} is not in the checkpoint.", "Run `rotor validate`.")

    def forward(self, hidden_states: Tensor, positions: Tensor | None = None, **kwargs: Any) -> Any:
        """hidden_states: [tokens, hidden_size]. positions: [tokens], where the model has RoPE."""
        layout = self.layout
        query, key = self.q_proj(hidden_states), self.k_proj(hidden_states)
        value = key[..., :0] if layout.joint else self.v_proj(hidden_states)
        if any(layout.planes):
            assert positions is not None
            query = self._turn_planes(query, self.query_planes, positions)
            key = self._turn_planes(key, self.key_planes, positions)
        if layout.domain != "none":
            assert positions is not None
            query = self._rotate(self._heads(query, "q_norm"), positions)
            query = query.flatten(1) if layout.domain == "pre" else self._projected(query)
        if not layout.folded_keys:
            heads = self._heads(key, "k_norm")
            if layout.domain == "post":
                assert positions is not None
                heads = self._rotate(heads, positions)
            if layout.turned_in_blocks:
                assert positions is not None
                turns = within_blocks((self.cos, self.sin), positions, layout.rope_block)
                heads = rotate(heads, *(table.unsqueeze(1) for table in turns)).to(heads.dtype)
            of_values = self.v_proj(hidden_states)[None, None] if layout.joint else None
            key = project_keys(
                heads.transpose(0, 1)[None], self.key_basis, self.shard.key_layout, self.key_shift, of_values
            )[0, 0]
        output = self.o_proj(self.attn(query, key, value))
        if self.tp_size > 1 and self.reduces:
            output = tensor_model_parallel_all_reduce(output)
        return (output, None) if self.returns_tuple else output

    def _heads(self, x: Tensor, norm: str) -> Tensor:
        """[tokens, n * head_dim] -> [tokens, n, head_dim], normed where the family does."""
        heads = x.unflatten(-1, (-1, self.head_dim))
        return self.get_submodule(norm)(heads) if norm in self.norms else heads

    def _rotate(self, heads: Tensor, positions: Tensor) -> Tensor:
        return rotate(heads, self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)).to(heads.dtype)

    def _projected(self, query: Tensor) -> Tensor:
        assert self.query_basis is not None
        return project_queries(query, self.query_basis, self.layout, self.heads_per_kv)

    def _turn_planes(self, latents: Tensor, columns: Tensor, positions: Tensor) -> Tensor:
        """RoPE on latents that are whole rotary planes, [tokens, width]: `columns` has the frequency of each."""
        cos, sin = self.cos[positions][:, columns], self.sin[positions][:, columns]
        first, second = latents.unflatten(-1, (-1, 2)).unbind(-1)
        return (latents * cos + torch.stack([-second, first], -1).flatten(-2) * sin).to(latents.dtype)
