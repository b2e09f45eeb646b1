"""WUSH-like codes: the transform in closed form for a scale a token, with which all channels count alike.

rotor validate MODEL --cache artifacts/studies/wush.py:WUSH
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from scipy.linalg import hadamard
from torch import Tensor

from rotor.errors import UnsupportedModelError
from rotor.policies import LayerSample
from rotor.policies.affine import AffineCode
from rotor.policies.policy import Bits
from rotor.policies.quantiser import FittedQuantiser
from rotor.policies.store import Codec, Parts, Stream, heads_apart, heads_together


@dataclass(frozen=True)
class WUSH(FittedQuantiser):
    """x ~ mean + T^-1 c(T (x - mean)) over all KV heads of a layer, T = H S^-1/2 U^T W^T with U S V^T = W^T X.

    C = X X^T are second moments of keys (before RoPE) or of values, G = W W^T those of the gradients of the loss by
    them, H is Hadamard's matrix, and c codes a token with one scale and zero.

    Args:
        bits: of a number.

    Limits: WUSH transforms weights and activations; G is here what takes the weights' place. Gradients longer than
    those of 99 tokens in a hundred are shortened to that length, as rotor does. For widths that are powers of two.
    Source: Chen et al., WUSH (arXiv 2512.00956), the closed form for integers.
    """

    method: ClassVar[str] = "wush"
    needs_gradients: ClassVar[bool] = True
    bits: Bits = 4

    def check_rows(self, coded: bool, post_rope: bool) -> None:
        raise UnsupportedModelError("cache policy wush: is for uncompressed models.")

    def fit_layer(self, sample: LayerSample) -> tuple[Transformed, Transformed]:
        keys = _transformed(sample.keys, sample.key_gradients, self.bits)
        return keys, _transformed(sample.values, sample.value_gradients, self.bits)

    def streams_of(self, found: tuple[Transformed, Transformed]) -> tuple[Stream, Stream]:
        return Stream(found[0]), Stream(found[1])


@dataclass(frozen=True, eq=False)
class Transformed(Codec):
    """mean [width over all heads]; to_code, from_code [width, width], from the right. Parts: those of `code`."""

    mean: Tensor
    to_code: Tensor
    from_code: Tensor
    code: AffineCode

    def encode(self, states: Tensor) -> Parts:
        return self.code.encode((heads_together(states.float()) - self.mean) @ self.to_code)

    def decode(self, parts: Parts, num_heads: int, width: int) -> Tensor:
        return heads_apart(self.code.decode(parts, 1, num_heads * width) @ self.from_code + self.mean, num_heads)


def _transformed(states: Tensor, gradients: Tensor, bits: int) -> Transformed:
    """Of [rows, seq_len, width]."""
    numbers, weights = states.flatten(0, 1).double(), gradients.flatten(0, 1).double()
    width, mean = numbers.shape[1], numbers.mean(0)
    if width & width - 1:
        raise UnsupportedModelError(f"cache policy wush: {width} numbers a token, expected a power of two.")
    lengths = weights.norm(dim=1, keepdim=True)
    weights = weights * (lengths.quantile(0.99) / lengths.clamp(min=1e-30)).clamp(max=1)
    centred, weight = _root(numbers - mean), _root(weights)
    left, values, right = torch.linalg.svd(weight.mT @ centred)
    rotation, scale = torch.from_numpy(hadamard(width)).double() / width**0.5, values.clamp(min=1e-30).rsqrt()
    forth = rotation @ (scale[:, None] * left.mT) @ weight.mT
    back = centred @ (right.mT * scale) @ rotation.mT
    return Transformed(mean.float(), forth.mT.float(), back.mT.float(), AffineCode(bits, 1, width))


def _root(vectors: Tensor) -> Tensor:
    """X with X X^T the second moment of `vectors` [n, width], and a millionth of its mean on the diagonal."""
    moment = vectors.mT @ vectors / len(vectors)
    return torch.linalg.cholesky(moment + 1e-6 * moment.diagonal().mean() * torch.eye(len(moment), dtype=torch.float64))
