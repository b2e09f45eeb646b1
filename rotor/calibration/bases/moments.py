"""Second moments of queries, keys, values and attention outputs: streamed sums, per layer and group of KV heads.

Everything that rotor computes from data needs only these sums, so no activation is kept. They are float64.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...checkpoint.layout import AttentionShape, KeyForm
from ...errors import NumericsError

CHUNK_BYTES = 64 << 20
"""float64 copies of activations are made at most this many bytes at a time (or one head)."""

UNCENTRED = ("query", "output")
"""Moments without a mean. query: after RoPE, per KV head, summed over its query heads. output: per query head, the
group's stacked values averaged with that head's attention weights; its own block is what o_proj receives. The others
are `value`, stacked over the heads of a group, and what `stored_name` names."""

JOINT, KEY = "joint", "key"


def stored_name(form: KeyForm, joint: bool = False) -> str:
    """Name of the moments of keys in a form, stacked over the heads of a group; `key_post`, or `key_64_13` of blocks.

    joint: of each head its key and then its value, `joint_64_13`.
    """
    kind = JOINT if joint else KEY
    return f"{kind}_post" if form.rope_block is None else f"{kind}_{form.rope_block}_{form.fast_planes}"


def latent_names(form: KeyForm, joint: bool) -> tuple[str, ...]:
    """Names of the moments of what each latent of a layer is made of."""
    return (stored_name(form, joint),) if joint else (stored_name(form), "value")


def named_form(name: str) -> KeyForm | None:
    """The form of keys that a moment is of, or None of one without keys."""
    kind, _, form = name.partition("_")
    if kind not in (JOINT, KEY):
        return None
    return KeyForm() if form == "post" else KeyForm(*map(int, form.split("_")))


@dataclass
class LayerStatistics:
    """Second moments of one layer, float64.

    sums: `query` is [num_kv_heads, head_dim, head_dim]; `output` [num_heads, g * head_dim, g * head_dim] for groups of
        g KV heads; means, `NAME_mean`, [num_groups, g * head_dim]; the others [num_groups, g * head_dim, g * head_dim];
        of joint ones 2 g * head_dim in place of g * head_dim.
    tokens: tokens that went into each sum.
    """

    shape: AttentionShape
    group_size: int
    sums: dict[str, Tensor] = field(default_factory=dict)
    tokens: int = 0

    def add(self, activations: dict[str, Tensor]) -> None:
        """Add one batch.

        Args:
            activations: `query` [tokens, num_heads, head_dim]; `output` [tokens, num_heads, g * head_dim]; joint ones
                [tokens, num_kv_heads, 2 head_dim]; the others [tokens, num_kv_heads, head_dim]; any dtype.
        """
        for name, tensor in activations.items():
            blocks = self._blocks(name, tensor)
            count, rows, width = blocks.shape
            total = self._sum(name, (count, width, width), blocks)
            step = max(1, CHUNK_BYTES // (8 * rows * width))
            for start in range(0, count, step):
                part = blocks[start : start + step].to(torch.float64)
                total[start : start + step].baddbmm_(part.mT, part)
                if name not in UNCENTRED:
                    self._sum(f"{name}_mean", (count, width), blocks)[start : start + step] += part.sum(1)
        self.tokens += next((tensor.shape[0] for tensor in activations.values()), 0)

    def finish(self) -> LayerStatistics:
        """The sums of all batches, on the CPU."""
        self.sums = {name: total.cpu() for name, total in self.sums.items()}
        return self

    def _blocks(self, name: str, tensor: Tensor) -> Tensor:
        """Rows to multiply, [blocks, rows, width]: a KV head's query rows together, a group's KV heads side by side."""
        tokens, _, dim = tensor.shape
        if name == "query":
            heads = self.shape.num_kv_heads
            rows = tensor.reshape(tokens, heads, -1, dim).transpose(0, 1)
            return rows.reshape(heads, -1, dim)
        width = dim if name == "output" else self.group_size * dim
        return tensor.reshape(tokens, -1, width).transpose(0, 1)

    def _sum(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        if name not in self.sums:
            self.sums[name] = torch.zeros(shape, dtype=torch.float64, device=like.device)
        return self.sums[name]

    def moment(self, name: str) -> Tensor:
        """A second moment as in `sums`, symmetrised."""
        total = self.sums[name]
        return (total + total.mT).div_(2)

    def check_finite(self, where: str) -> None:
        """Raises NumericsError that names `where` (a layer) and the first moment with a NaN or Inf."""
        for name, total in self.sums.items():
            if not torch.isfinite(total).all():
                raise NumericsError(
                    f"{where}: the second moment of {name} is not finite after {self.tokens} tokens.",
                    "The model overflows on the calibration tokens; calibrate with --dtype float32.",
                )


def pack_symmetric(moments: Tensor) -> Tensor:
    """Pack one triangle of symmetric matrices in float32: a quarter of the bytes.

    The moments of attention outputs are stored so. They serve only the refit of W_o, whose ridge (1e-6 of the mean
    latent energy) is far above float32's rounding.

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
    """The [..., n, n] float64 matrices of which `pack_symmetric` kept a triangle."""
    n = int(((8 * packed.shape[-1] + 1) ** 0.5 - 1) / 2)
    rows, columns = torch.triu_indices(n, n)
    full = torch.empty(*packed.shape[:-1], n, n, dtype=torch.float64)
    full[..., rows, columns] = packed.double()
    full[..., columns, rows] = packed.double()
    return full
