"""Second moments of queries, keys, values and attention outputs, summed over a stream of batches, in float64.

They are kept per layer and group of KV heads. Methods without Fisher information need only these sums, so no activation
is kept for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..checkpoint.layout import AttentionShape, KeyForm, LayerForm
from ..errors import NumericsError

CHUNK_BYTES = 64 << 20
"""Most bytes of a float64 copy of activations (but at least one head is copied)."""

UNCENTRED = ("query", "output")
"""Names of moments without a mean. `query` is taken after RoPE, per KV head, summed over its query heads. `output` is
per query head: the group's stacked values averaged with that head's attention weights, of which o_proj receives the
block of the head's KV head. Other names are `value`, stacked over the heads of a group, and those from
`stored_name`."""

JOINT, KEY = "joint", "key"


def stored_name(form: KeyForm, joint: bool = False) -> str:
    """Name of the moments of stored keys, stacked over the heads of a group: `key_post`, or `key_64` for blocks.

    joint: keys are stacked with values, each head's key before its value: `joint_64`.
    """
    return f"{JOINT if joint else KEY}_{form.rope_block or 'post'}"


def vector_names(form: LayerForm) -> tuple[str, ...]:
    """Names of the moments of the vectors that a layer codes: of keys and of values, or of both together."""
    return (stored_name(form.keys, joint=True),) if form.joint else (stored_name(form.keys), "value")


def named_form(name: str) -> KeyForm | None:
    """Form of the keys in a moment of this name, or None for a moment without keys."""
    kind, _, form = name.partition("_")
    if kind not in (JOINT, KEY):
        return None
    return KeyForm() if form == "post" else KeyForm(int(form))


def moment_shape(shape: AttentionShape, group_size: int, name: str) -> tuple[int, int, int]:
    """Shape of a second moment of a layer: number of blocks, and their width twice.

    A block belongs to a KV head (`query`), to a query head (`output`), or to a group (the others).
    """
    width = group_size * shape.head_dim
    if name == "query":
        return shape.num_kv_heads, shape.head_dim, shape.head_dim
    if name == "output":
        return shape.num_heads, width, width
    if name.startswith(JOINT):
        width *= 2
    return shape.num_kv_heads // group_size, width, width


def moments_bytes(shape: AttentionShape, group_size: int, names: Iterable[str]) -> int:
    """Bytes of the sums of these moments in memory."""
    return 8 * sum(math.prod(moment_shape(shape, group_size, name)) for name in names)


def adding_flops(shape: AttentionShape, group_size: int, names: Iterable[str], tokens: int) -> float:
    """FLOPs of adding tokens to these moments; a KV head's sum of queries takes those of all its query heads."""
    elements = 0
    for name in names:
        elements += math.prod(moment_shape(shape, group_size, name)) * (shape.heads_per_kv if name == "query" else 1)
    return 2.0 * tokens * elements


def packed_bytes(moment: tuple[int, int, int]) -> int:
    """Bytes of a moment of this shape after `pack_symmetric`."""
    blocks, width, _ = moment
    return blocks * 4 * (width * (width + 1) // 2)


def counted_tokens(activations: dict[str, Tensor]) -> int:
    """Tokens of a batch; none where it has queries or outputs alone, which layers have that read another's cache."""
    return next((len(tensor) for name, tensor in activations.items() if name not in UNCENTRED), 0)


@dataclass
class LayerStatistics:
    """Second moments of one layer, float64.

    sums: for groups of g KV heads, `query` is [num_kv_heads, head_dim, head_dim], `output` [num_heads, g * head_dim,
        g * head_dim], sums of vectors (`NAME_mean`) [num_groups, g * head_dim], and others [num_groups, g * head_dim,
        g * head_dim]. Joint moments have 2 g * head_dim in place of g * head_dim.
    tokens: tokens in each sum of vectors.
    """

    shape: AttentionShape
    group_size: int
    sums: dict[str, Tensor] = field(default_factory=dict)
    tokens: int = 0

    def add(self, activations: dict[str, Tensor]) -> None:
        """Add one batch.

        Args:
            activations: `query` [tokens, num_heads, head_dim]; `output` [tokens, num_heads, g * head_dim]; joint keys
                and values [tokens, num_kv_heads, 2 head_dim]; others [tokens, num_kv_heads, head_dim]; any dtype.
        """
        for name, tensor in activations.items():
            blocks = self._blocks(name, tensor)
            count, vectors, width = blocks.shape
            total = self._sum(name, moment_shape(self.shape, self.group_size, name), blocks)
            chunk = max(1, CHUNK_BYTES // (8 * vectors * width))
            for start in range(0, count, chunk):
                part = blocks[start : start + chunk].to(torch.float64)
                total[start : start + chunk].baddbmm_(part.mT, part)
                if name not in UNCENTRED:
                    self._sum(f"{name}_mean", (count, width), blocks)[start : start + chunk] += part.sum(1)
        self.tokens += counted_tokens(activations)

    def finish(self) -> LayerStatistics:
        """Move the sums to the CPU, after the last batch."""
        self.sums = {name: total.cpu() for name, total in self.sums.items()}
        return self

    def _blocks(self, name: str, tensor: Tensor) -> Tensor:
        """Arrange vectors as [blocks, vectors, width], one block for each moment.

        A block has all queries of a KV head, or the stacked heads of a group.
        """
        tokens, _, dim = tensor.shape
        if name == "query":
            heads = self.shape.num_kv_heads
            by_head = tensor.reshape(tokens, heads, -1, dim).transpose(0, 1)
            return by_head.reshape(heads, -1, dim)
        width = dim if name == "output" else self.group_size * dim
        return tensor.reshape(tokens, -1, width).transpose(0, 1)

    def _sum(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        if name not in self.sums:
            self.sums[name] = torch.zeros(shape, dtype=torch.float64, device=like.device)
        return self.sums[name]

    def moment(self, name: str) -> Tensor:
        """A second moment from `sums`, symmetrised."""
        total = self.sums[name]
        return (total + total.mT).div_(2)

    def check_finite(self, where: str) -> None:
        """Raise NumericsError that names `where` (a layer) and the first moment with a NaN or Inf."""
        for name, total in self.sums.items():
            if not torch.isfinite(total).all():
                raise NumericsError(
                    f"{where}: the second moment of {name} is not finite after {self.tokens} tokens.",
                    "The model overflows on the calibration tokens; calibrate with --dtype float32.",
                )


def pack_symmetric(moments: Tensor) -> Tensor:
    """Pack one triangle of symmetric matrices in float32: a quarter of the bytes.

    Moments of attention outputs and of gradients are stored in this form. The refit of W_o, which reads the former, has
    a ridge (1e-6 of the mean latent energy) far above float32's rounding.

    Args:
        moments: [..., n, n]; the mean of each pair of mirrored elements is kept.
    Returns:
        [..., n (n + 1) / 2].
    """
    rows, columns = torch.triu_indices(*moments.shape[-2:])
    return torch.stack([((block + block.mT) / 2)[rows, columns].float() for block in moments.flatten(0, -3)]).unflatten(
        0, moments.shape[:-2]
    )


def unpack_symmetric(packed: Tensor) -> Tensor:
    """Rebuild the [..., n, n] float64 matrices that `pack_symmetric` packed."""
    n = int(((8 * packed.shape[-1] + 1) ** 0.5 - 1) / 2)
    rows, columns = torch.triu_indices(n, n)
    full = torch.empty(*packed.shape[:-1], n, n, dtype=torch.float64)
    full[..., rows, columns] = packed.double()
    full[..., columns, rows] = packed.double()
    return full
