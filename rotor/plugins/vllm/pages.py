"""Rows of a layer in pages of bytes: a token's keys and values side by side. Plain tensors, nothing of vLLM."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...format.columns import Columns
from ...format.layout import LayerLayout
from ...kernels.rows import LayerColumns, pack_layer


@dataclass(frozen=True)
class LayerPages:
    """How the pages of a layer [num_pages, page_size, bytes], uint8, are read and written.

    layout: of what this process keeps. dtype: the model's. Behind keys and values a row may have bytes of no meaning.
    """

    layout: LayerLayout
    dtype: torch.dtype

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of keys and of values."""
        return self.layout.row_bytes(self.dtype.itemsize)

    def split(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Views of keys and of values, [num_pages, page_size, bytes of each]; of joint latents twice the same."""
        qk_bytes, v_bytes = self.sizes
        keys = pages[..., :qk_bytes]
        return keys, keys if self.layout.joint else pages[..., qk_bytes : qk_bytes + v_bytes]

    def numbers(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """As `split`, as the kernels want them: numbers of the model's dtype, or bytes of codes."""
        keys, values = self.split(pages)
        return (keys, values) if self.layout.coded else (keys.view(self.dtype), values.view(self.dtype))

    def write(self, key: Tensor, value: Tensor, pages: Tensor, slots: Tensor, use_kernels: bool) -> None:
        """Put new rows into their slots.

        Args:
            key, value: [at least tokens, qk_width] and [.., v_width], as the projections put them out.
            slots: [tokens]: page times page_size plus the row in it. Nothing is kept of a token where it is negative:
                kernels skip it, and PyTorch, without asking the host, puts it into page 0, which vLLM gives to nobody.
        """
        tokens, page_size = slots.shape[0], pages.shape[1]
        columns, latents = self._columns, (key[:tokens], value[:tokens])
        if use_kernels and self._in_words:
            from ...kernels.projection.append import pack_rows  # imports Triton

            pack_rows(latents[0].contiguous(), latents[1].contiguous(), columns, self.split(pages), slots.long())
            return
        slots = slots.clamp(min=0).long()
        page, row = slots // page_size, slots % page_size
        sides = list(zip(self.split(pages), latents, (columns.key, columns.value), strict=True))
        for rows, side, of_side in sides[: 1 if self.layout.joint else 2]:
            coded = self.layout.coded
            rows[page, row] = pack_layer(side, of_side) if coded else side.contiguous().view(torch.uint8)

    @property
    def _columns(self) -> LayerColumns:
        if self.layout.coded or not self._in_words:
            return LayerColumns.of(self.layout)
        return LayerColumns((Columns(n16=self.layout.qk_width),), (Columns(n16=self.layout.v_width),))

    @property
    def _in_words(self) -> bool:
        """Whether rows of numbers are whole words: then they are columns of 16 bits, which the kernel knows."""
        return self.layout.coded or (self.layout.qk_width % 2 == 0 and self.layout.v_width % 2 == 0)
