"""The layer that owns the cache of a compressed layer in a vLLM model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.utils.torch_utils import _encode_layer_name
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec

from .backend import RotorBackend, RotorImpl, backend_for


class RotorCache(nn.Module, AttentionLayerBase):
    """For vLLM one KV head whose content is a token's row in bytes, keys and values side by side.

    Goes through vLLM's own attention ops, so that graphs are split, captured and rows transferred as elsewhere.

    Args:
        name: of the native layer, whose place this takes. native: that layer.
        impl: attends. row_bytes: of a token in the cache. max_tp_shards: ranks that keep different rows.
        output_width: numbers of a token's output. mixed: the model mixes sliding windows and full attention.
    """

    supports_dcp = False

    def __init__(
        self,
        name: str,
        native: Any,
        impl: RotorImpl,
        row_bytes: int,
        max_tp_shards: int,
        output_width: int,
        mixed: bool,
        vllm_config: Any,
    ) -> None:
        super().__init__()
        self.layer_name = name
        self.impl = impl
        self.num_heads, self.num_kv_heads = impl.num_heads, 1
        self.head_size = self.row_bytes = row_bytes
        self.head_size_v = 0
        self.max_tp_shards, self.output_width = max_tp_shards, output_width
        self.sliding_window = impl.sliding_window
        self.kv_cache_dtype = "auto"
        self.kv_cache_torch_dtype = torch.uint8
        self.attn_type = native.attn_type
        self.kv_sharing_target_layer_name = None
        self.kv_cache = torch.tensor([])
        self._backend = backend_for(impl.use_kernels, mixed)
        vllm_config.compilation_config.static_forward_context[name] = self

    def get_attn_backend(self) -> type[RotorBackend]:
        return self._backend

    def get_kv_cache_spec(self, vllm_config: Any) -> KVCacheSpec:
        fields: dict[str, Any] = {
            "block_size": vllm_config.cache_config.block_size,
            "num_kv_heads": 1,
            # Bytes, however they are divided: layers of equal rows share a spec (and a metadata builder).
            "head_size": self.row_bytes,
            "head_size_v": 0,
            "dtype": self.kv_cache_torch_dtype,
            "dcp_sharded": False,
            "max_tp_shards": self.max_tp_shards,
        }
        if self.sliding_window is not None:
            return SlidingWindowSpec(sliding_window=self.sliding_window, **fields)
        return FullAttentionSpec(**fields)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Latents of keys and values in, as the projections put them out; packed outputs of all query heads out."""
        output = torch.empty(query.shape[0], self.output_width, dtype=query.dtype, device=query.device)
        name = _encode_layer_name(self.layer_name)
        written = torch.ops.vllm.unified_kv_cache_update(key, value, name)
        torch.ops.vllm.unified_attention_with_output(query, key, value, output, name, kv_cache_dummy_dep=written)
        return output

    def extra_repr(self) -> str:
        layout = self.impl.layout
        ranks = ", ".join(group.ranks_in_words for group in layout.groups)
        return f"domain={layout.domain}, ranks=[{ranks}], row_bytes={self.row_bytes}, kernels={self.impl.use_kernels}"
