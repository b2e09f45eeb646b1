"""The cache group of exact tokens in vLLM: a sliding window that keeps the first page of a sequence too.

Contact with vLLM's manager of cache blocks, beside `adapter`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager, resolve_block_hashes
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry


@dataclass(frozen=True, kw_only=True)
class FirstAndNewestSpec(SlidingWindowSpec):
    """A sliding window, and the page with the first tokens of a sequence."""

    @property
    def num_retained_tokens(self) -> int:
        """Tokens before a step's first that must stay readable: all, since the first page is among them.

        vLLM 0.33 reads it, as an int32, and takes the pages of earlier tokens out of a step's block table.
        """
        return 2**31 - 1

    def max_admission_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        return 1 + int(super().max_admission_blocks_per_request(max_in_flight_tokens, max_model_len))


class FirstAndNewestManager(SlidingWindowManager):
    """Keeps a request's first page where a sliding window gives it back.

    A prefix that is found must have its first page. Where rows come from elsewhere (connectors) the first page may be
    missing, and is then vLLM's empty page 0.
    """

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        skipped = self.get_num_skipped_tokens(processed_computed_tokens) // self.block_size
        self._remove_blocks_in_range(request_id, 1, min(skipped, len(self.req_to_blocks[request_id])))

    @classmethod
    def find_longest_cache_hit(
        cls, block_hashes: Any, max_length: int, kv_cache_group_ids: list[int], block_pool: Any, kv_cache_spec: Any,
        drop_eagle_block: bool, alignment_tokens: int, dcp_world_size: int = 1, pcp_world_size: int = 1,
    ) -> tuple[tuple[list[Any], ...], int]:  # fmt: skip
        given = kv_cache_group_ids, block_pool, kv_cache_spec, drop_eagle_block, alignment_tokens
        blocks, length = super().find_longest_cache_hit(
            block_hashes, max_length, *given, dcp_world_size, pcp_world_size
        )
        if length and blocks[0][0].is_null:
            hashes = resolve_block_hashes(
                block_hashes, block_pool.hash_block_size, kv_cache_spec.block_size,
                supports_fine_grained_hash_lookup=cls.supports_fine_grained_hash_lookup,
                alignment_tokens=alignment_tokens,
            )  # fmt: skip
            first = block_pool.get_cached_block(hashes[0], kv_cache_group_ids)
            if not first:
                return tuple([] for _ in kv_cache_group_ids), 0
            for group_blocks, block in zip(blocks, first, strict=True):
                group_blocks[0] = block
        return blocks, length

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, new_computed_blocks: Sequence[Any], total_computed_tokens: int,
        *rest: object, **named: object,
    ) -> int:  # fmt: skip
        given = request_id, num_tokens, new_computed_blocks, total_computed_tokens
        count = int(super().get_num_blocks_to_allocate(*given, *rest, **named))
        skips = self.get_num_skipped_tokens(total_computed_tokens) >= self.block_size
        if request_id not in self.num_cached_block and skips and new_computed_blocks:
            count += self._get_num_evictable_blocks(new_computed_blocks[:1])
        return count

    def add_local_computed_blocks(
        self, request_id: str, new_computed_blocks: Sequence[Any], num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:  # fmt: skip
        counts = num_local_computed_tokens, num_external_computed_tokens
        super().add_local_computed_blocks(request_id, new_computed_blocks, *counts)
        blocks_of_request = self.req_to_blocks[request_id]
        if (
            new_computed_blocks
            and blocks_of_request
            and blocks_of_request[0].is_null
            and not new_computed_blocks[0].is_null
        ):
            self.block_pool.touch(new_computed_blocks[:1])
            blocks_of_request[0] = new_computed_blocks[0]

    @classmethod
    def reachable_block_mask(cls, start_block: int, *rest: object, **named: object) -> list[bool] | None:
        mask: list[bool] | None = super().reachable_block_mask(start_block, *rest, **named)
        if mask and start_block == 0:
            mask[0] = True
        return mask


KVCacheSpecRegistry._ensure_registered()
KVCacheSpecRegistry.register(FirstAndNewestSpec, FirstAndNewestManager)
