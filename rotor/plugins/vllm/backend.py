"""The attention backend `ROTOR` of vLLM: packed rows in pages, by the Triton kernels or in plain PyTorch."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionType
from vllm.v1.kv_cache_layout import KVCacheLayout

from ...format.kernel_config import LayerKernels, Schedule
from ...kernels.dispatch import layer_served
from ...kernels.paged_reference import paged_attention
from ...kernels.parameters import AttentionParameters
from ...kernels.prefill.tile_sizes import REBUILT_BYTES
from .metadata import ReferenceMetadataBuilder, RotorMetadata, RotorMetadataBuilder
from .pages import LayerPages


class RotorBackend(AttentionBackend):
    """Layers that the Triton kernels serve."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar = ["auto"]
    builder: ClassVar[type[RotorMetadataBuilder]] = RotorMetadataBuilder
    layouts: ClassVar[tuple[KVCacheLayout, ...] | None] = None

    @staticmethod
    def get_name() -> str:
        return "ROTOR"

    @staticmethod
    def get_impl_cls() -> type[RotorImpl]:
        return RotorImpl

    @classmethod
    def get_builder_cls(cls) -> type[RotorMetadataBuilder]:
        return cls.builder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...] | None:
        return cls.layouts

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [16, 32, 64, 128, 256]  # powers of two, for the kernels

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # batches are planned by the host's lengths of queries: how many row blocks there may be


@lru_cache(maxsize=4)
def backend_for(use_kernels: bool, mixed: bool) -> type[RotorBackend]:
    """The backend of a layer.

    Args:
        mixed: the model mixes sliding windows and full attention. Pages of both sizes then lie side by side in blocks,
            which only block-outermost layouts can have.
    """
    members = {
        "builder": RotorMetadataBuilder if use_kernels else ReferenceMetadataBuilder,
        "layouts": (KVCacheLayout.BLHNC, KVCacheLayout.BLNHC) if mixed else None,
    }
    name = f"Rotor{'' if use_kernels else 'Reference'}{'Mixed' if mixed else ''}Backend"
    return type(name, (RotorBackend,), {"__module__": __name__, **members})


class RotorImpl(AttentionImpl[RotorMetadata]):
    """Attention of one layer. For vLLM it has one KV head, whose keys and values are the packed rows.

    Args:
        pages: how they are read. heads_per_kv, head_dim: of the uncompressed model.
        key_rotation, query_basis, key_constant: domain `pre`.
        kernels: the launches of the layer; None by rule.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: Any = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        *,
        pages: LayerPages,
        heads_per_kv: int,
        head_dim: int,
        key_rotation: tuple[Tensor, Tensor] | None,
        query_basis: nn.Parameter | None,
        key_constant: nn.Parameter | None,
        schedule: Schedule,
        kernels: LayerKernels | None,
        use_kernels: bool,
    ) -> None:
        self.num_heads, self.head_size, self.scale, self.num_kv_heads = num_heads, head_size, scale, 1
        self.sliding_window, self.softcap, self.kv_cache_dtype = sliding_window, logits_soft_cap, kv_cache_dtype
        self.pages, self.layout = pages, pages.layout
        self.heads_per_kv, self.head_dim = heads_per_kv, head_dim
        self.key_rotation = key_rotation
        self.query_basis, self.key_constant = query_basis, key_constant
        self.schedule, self.kernels, self.use_kernels = schedule, kernels, use_kernels

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        self.pages.write(key, value, kv_cache[:, 0], slot_mapping, self.use_kernels)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: RotorMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if attn_metadata is None:  # vLLM finds out what memory a step takes
            if self.use_kernels and self.layout.domain == "pre":
                torch.empty(REBUILT_BYTES, dtype=torch.uint8, device=output.device)
            return output.fill_(0)
        if self.layout.domain == "pre":
            query = query.unflatten(-1, (self.num_heads, self.head_dim))
        attend = self._by_kernels if self.use_kernels else self._in_pytorch
        attend(query, kv_cache[:, 0], attn_metadata, output)
        return output

    def _by_kernels(self, query: Tensor, rows: Tensor, batch: RotorMetadata, output: Tensor) -> None:
        from ...kernels.decode.launch import decode_attention  # imports Triton
        from ...kernels.layer_table import layer_parts
        from ...kernels.prefill.launch import prefill_attention
        from ...kernels.workspace import workspace_on

        keys, values = self.pages.numbers(rows)
        pre, decodes = self.layout.domain == "pre", batch.num_decodes
        common: dict[str, Any] = {
            "query_basis": self.query_basis if pre else None,
            "key_rotation": self.key_rotation if pre else None,
            "constant_key": self.key_constant,
            "softcap": self.softcap,
            # Attention runs between the pieces that vLLM compiles; under capture there is no workspace.
            "workspace": workspace_on(output.device),
        }
        if decodes:
            parts = layer_parts(self.layout, self.heads_per_kv, self.head_dim, self.kernels, query.element_size())
            output[:decodes] = decode_attention(
                query[:decodes],
                keys,
                values,
                parts,
                batch.decode_keys(self.sliding_window),
                self.heads_per_kv,
                self.scale,
                block_table=batch.block_table[:decodes],
                schedule=self.schedule,
                **common,
            )[0]
        if decodes < len(batch.starts) - 1:
            prefill_attention(
                query,
                keys,
                values,
                self.layout,
                batch.prefill_keys(self.sliding_window),
                self.heads_per_kv,
                self.scale,
                block_table=batch.prompt_tables,
                kernels=self.kernels,
                output=output,
                **common,
            )

    def _in_pytorch(self, query: Tensor, rows: Tensor, batch: RotorMetadata, output: Tensor) -> None:
        """Decoding requests of similar lengths at once, prompts one by one."""
        for own in _alike(batch.lengths[: batch.num_decodes]):
            index: Any = slice(0, len(own)) if len(own) == batch.num_decodes else own
            longest = max(batch.lengths[i] for i in own)
            output[index] = self._paged(query[index].unsqueeze(1), rows, batch, index, longest).squeeze(1)
        starts = batch.starts
        for i in range(batch.num_decodes, len(starts) - 1):
            tokens = slice(starts[i], starts[i + 1])
            if tokens.start < tokens.stop:
                output[tokens] = self._paged(query[None, tokens], rows, batch, slice(i, i + 1), batch.lengths[i])[0]

    def _paged(self, query: Tensor, rows: Tensor, batch: RotorMetadata, sequences: Any, longest: int) -> Tensor:
        keys, values = self.pages.split(rows)
        return paged_attention(
            query,
            keys,
            values,
            AttentionParameters(
                self.layout, self.heads_per_kv, self.scale, self.query_basis, self.key_constant, self.softcap
            ),
            batch.block_table[sequences],
            batch.seq_lens[sequences],
            longest,
            key_rotation=self.key_rotation if self.layout.domain == "pre" else None,
            window=self.sliding_window,
        )


def use_kernels(
    pages: LayerPages, heads_per_kv: int, head_dim: int, table: Tensor | None, device: torch.device, kernels: Any
) -> bool:
    """Whether the kernels serve a layer, by the rule that transformers' path goes by.

    Args:
        table: cosines by position, where the layer has them: frequencies are one set for all lengths here.
    """
    fits = pages.layout.domain != "pre" or (table is not None and table.shape[-1] == head_dim)
    return layer_served(pages.layout, heads_per_kv, head_dim, pages.dtype, device, fits, kernels)


def _alike(lengths: list[int]) -> list[list[int]]:
    """Indices in groups, so that the longest of each is at most twice the shortest (or one block)."""
    groups: list[list[int]] = []
    shortest = 0
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if not groups or lengths[index] > max(2 * shortest, 64):
            groups.append([])
            shortest = lengths[index]
        groups[-1].append(index)
    return groups if len(groups) != 1 else [list(range(len(lengths)))]
