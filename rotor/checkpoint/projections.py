"""The projections of an attention layer as a checkpoint has them, whatever the family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UnsupportedModelError
from .families import Family, attention_shape
from .layout import AttentionShape, KeyForm
from .tensors import BASES, FLOAT32

GetTensor = Callable[[str], Tensor]
"""Reads a tensor by its name."""


@dataclass
class AttentionWeights:
    """The projections of one attention layer in nn.Linear's orientation, [out_features, in_features]; biases or None.

    q_weight: [num_heads * head_dim, hidden_size]; k_weight, v_weight: [num_kv_heads * head_dim, hidden_size];
    o_weight: [hidden_size, num_heads * head_dim]. prefix: how their names in the checkpoint begin, for errors.
    gate_weight, gate_bias: of the gate that the output of attention is multiplied by, shaped as of queries.
    sinks: [num_heads], learned logits.
    norms: weights of norms over all heads together, by their names.
    """

    q_weight: Tensor
    k_weight: Tensor
    v_weight: Tensor
    o_weight: Tensor
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    o_bias: Tensor | None = None
    gate_weight: Tensor | None = None
    gate_bias: Tensor | None = None
    sinks: Tensor | None = None
    prefix: str = ""
    norms: dict[str, Tensor] = field(default_factory=dict)

    @property
    def bias_names(self) -> frozenset[str]:
        """The projections, of q, k, v, o, that have a bias."""
        return frozenset(p for p in "qkvo" if getattr(self, f"{p}_bias") is not None)


def read_attention(
    family: Family, layer: int, names: frozenset[str], get: GetTensor, shape: AttentionShape
) -> AttentionWeights:
    """Read the projections of one layer, checking that they have the shapes that the config promises.

    Args:
        names: all tensor names of the checkpoint.
        get: reads one of them.
    Raises:
        UnsupportedModelError: a projection has another shape than config.json says.
    """
    prefix, shape = family.stored_prefix(layer, names), shape.layer(layer)
    local = frozenset(name[len(prefix) :] for name in names if name.startswith(prefix))
    weights = split_projections(family, lambda name: get(prefix + name), local, shape)
    weights.prefix = prefix
    query, kv = shape.query_width, shape.kv_width
    expected = {
        "q_weight": (query, shape.hidden_size),
        "k_weight": (kv, shape.hidden_size),
        "v_weight": (kv, shape.hidden_size),
        "o_weight": (shape.hidden_size, query),
    }
    for name, want in expected.items():
        got = tuple(getattr(weights, name).shape)
        weight = getattr(weights, name)
        if not weight.is_floating_point() or weight.element_size() < 2:
            raise UnsupportedModelError(
                f"layer {layer}: {name} is {weight.dtype}, expected float16, bfloat16, float32 or float64.",
                "Give rotor the checkpoint before it was quantised.",
            )
        if got != want:
            raise UnsupportedModelError(
                f"layer {layer}: {name} is {list(got)}, config.json implies {list(want)}.",
                "Check that config.json belongs to these weights.",
            )
    return weights


def split_projections(family: Family, get: GetTensor, names: frozenset[str], shape: AttentionShape) -> AttentionWeights:
    """Split what a family stores into the four projections of a layer, heads as `Family.in_halves` has them.

    Args:
        get: reads a tensor by its name under the attention module. names: all names there.
    """
    parts: dict[str, Any] = {}
    for kind in ("weight", "bias"):
        if family.fused is None:
            of_values = "k" if family.keys_as_values and "v_proj.weight" not in names else "v"
            stored = {
                p: f"{stored_name}_proj.{kind}" for p, stored_name in zip("qkv", ("q", "k", of_values), strict=True)
            }
            stored = {p: name for p, name in stored.items() if kind == "weight" or name in names}
            parts.update({f"{p}_{kind}": get(name) for p, name in stored.items()})
        elif kind == "weight" or f"{family.fused}.{kind}" in names:
            split = family.split(oriented(family, get(f"{family.fused}.{kind}")), shape)
            parts.update({f"{p}_{kind}": part for p, part in zip("qkv", split, strict=True)})
        if kind == "weight" or f"{family.output}.{kind}" in names:
            parts[f"o_{kind}"] = oriented(family, get(f"{family.output}.{kind}"))
    if family.key_factor != 1.0:
        parts.update({name: parts[name] * family.key_factor for name in ("k_weight", "k_bias") if name in parts})
    for kind in ("weight", "bias") if family.gate else ():
        if family.gate == "q_proj" and f"q_{kind}" in parts:  # each head's query and gate side by side
            both = parts[f"q_{kind}"].unflatten(0, (-1, 2, shape.head_dim))
            parts[f"q_{kind}"], parts[f"gate_{kind}"] = both[:, 0].flatten(0, 1), both[:, 1].flatten(0, 1)
        elif family.gate != "q_proj" and f"{family.gate}.{kind}" in names:
            parts[f"gate_{kind}"] = get(f"{family.gate}.{kind}")
    for name in (f"{p}_{kind}" for p in "qk" for kind in ("weight", "bias")):
        if family.interleaved and name in parts:
            heads = parts[name].unflatten(0, (-1, shape.head_dim)).movedim(1, -1)
            parts[name] = family.in_halves(heads, shape).movedim(-1, 1).flatten(0, 1)
    if family.sinks:
        parts["sinks"] = get("sinks")
    if family.wide_norms:
        parts["norms"] = {name: get(f"{name}.weight") for name in family.norms}
    return AttentionWeights(**parts)


def oriented(family: Family, tensor: Tensor) -> Tensor:
    """A weight as nn.Linear has it, [out_features, in_features]; a bias as it is."""
    return tensor.mT if family.transposed and tensor.dim() == 2 else tensor


class UnweightedNorm(nn.Module):
    """RMS norm of heads, [..., head_dim], whose weight is for others to apply, see Family.norms_behind_rope.

    Args:
        weight: [head_dim], if there is one. eps: added to the mean square.
    """

    weight: nn.Parameter | None

    def __init__(self, weight: nn.Parameter | None, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.register_parameter("weight", weight)

    def forward(self, heads: Tensor) -> Tensor:
        return nn.functional.rms_norm(heads.float(), heads.shape[-1:], eps=self.eps).type_as(heads)


def attention_norms(native: nn.Module, family: Family, shape: AttentionShape, config: Any) -> dict[str, nn.Module]:
    """The norms that a compressed layer takes over from the module that it replaces, by name.

    Args:
        native: of the source model. shape: of this layer. config: the language model's or the whole one's.
    """
    if family.norms_behind_rope is None:
        return {name: native.get_submodule(name) for name in family.norms}
    eps, weighted = config.get_text_config().rms_norm_eps, family.norms_behind_rope == "weighted"
    norms = {name: native.get_submodule(name) for name in (family.norms if shape.rotary_dim else ())}
    return {name: UnweightedNorm(norm.weight if weighted else None, eps) for name, norm in norms.items()}  # type: ignore[arg-type]


class CompressedProjections(nn.Module):
    """The tensors of a compressed layer, as `tensors.layer_tensors` lists them, and its norms.

    Args:
        shapes: by name of the tensors that the layer has. norms: of queries and keys, by name.
        wide_norms: these are of all heads together. value_norm: of each head's values.
    """

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear | None
    o_proj: nn.Linear
    gate_proj: nn.Linear | None
    key_basis: nn.Parameter | None
    query_basis: nn.Parameter | None
    key_shift: nn.Parameter | None
    key_constant: nn.Parameter | None
    code_shift: nn.Parameter | None
    length_weight: nn.Parameter | None
    value_basis: nn.Parameter | None
    output_basis: nn.Parameter | None
    value_shift: nn.Parameter | None
    value_constant: nn.Parameter | None
    sinks: nn.Parameter | None

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        head_dim: int,
        norms: Mapping[str, nn.Module],
        wide_norms: bool = False,
        value_norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.head_dim, self.wide_norms, self.norm_names = head_dim, wide_norms, tuple(norms)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj"):
            weight, bias = shapes.get(f"{name}.weight"), f"{name}.bias" in shapes
            self.register_module(name, None if weight is None else nn.Linear(weight[1], weight[0], bias=bias))
        for name in (*BASES, *FLOAT32):
            dtype = torch.float32 if name in FLOAT32 else None
            tensor = torch.empty(shapes[name], dtype=dtype) if name in shapes else None
            self.register_parameter(name, None if tensor is None else nn.Parameter(tensor, requires_grad=False))
        for name, norm in norms.items():
            self.add_module(name, norm)
        self.value_norm = value_norm

    def projected(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project hidden states to queries, keys and values.

        Queries and keys are normed heads, [..., heads, head_dim], or where a basis is folded latents, [..., *]. Values
        are latents, their part of a joint latent, or nothing; heads, normed where the family does, in a layer with
        exact tokens.
        """
        query, key = self.q_proj(hidden_states), self.k_proj(hidden_states)
        value = key[..., :0] if self.v_proj is None else self.v_proj(hidden_states)
        if self.query_basis is not None:
            query = self._heads(query, 0)
        if self.key_basis is not None:
            key = self._heads(key, 1)
        if self.value_basis is not None:
            value = value.unflatten(-1, (-1, self.head_dim))
            value = value if self.value_norm is None else self.value_norm(value)
        return query, key, value

    def weights_behind_rope(self, form: KeyForm) -> tuple[Tensor | None, Tensor | None]:
        """Factors of rotated queries and keys, [head_dim] each, where norms leave their weights out.

        Stored keys in blocks are rotated further when they are read, before their weights: queries take these, too.
        """
        norms = [self._modules[name] for name in self.norm_names]
        weights = [norm.weight for norm in norms if isinstance(norm, UnweightedNorm) and norm.weight is not None]
        if not weights:
            return None, None
        return (weights[0], weights[-1]) if form.rope_block is None else (weights[0] * weights[-1], None)

    def _heads(self, x: Tensor, side: int) -> Tensor:
        """[..., n * head_dim] -> [..., n, head_dim], normed where the family does; of queries (0) or keys (1)."""
        # the first name is that of queries, the last that of keys, which may be the same
        norm = self._modules[self.norm_names[-side]] if self.norm_names else None
        if norm is not None and self.wide_norms:
            x = norm(x)
        heads = x.unflatten(-1, (-1, self.head_dim))
        return heads if norm is None or self.wide_norms else norm(heads)


def keys_before_rope(family: Family, output: Tensor, shape: AttentionShape) -> Tensor:
    """Turn the output of `family.key_source` into keys before RoPE, [batch_size * seq_len, num_kv_heads, head_dim]."""
    if family.has_key_norm:
        output = output.transpose(1, 2) if family.norms_heads_first else output
    elif family.fused is not None:
        output = split_activations(family, output, shape)[1]
    return family.in_halves(output.reshape(-1, shape.num_kv_heads, shape.head_dim), shape)


def split_activations(family: Family, output: Tensor, shape: AttentionShape) -> tuple[Tensor, ...]:
    """Split the output [..., features] of a fused projection into query, key, value, [..., heads * head_dim] each."""
    return tuple(part.movedim(0, -1) for part in family.split(output.movedim(-1, 0), shape))


def kv_parameters(family: Family, model: nn.Module, layer: int) -> list[tuple[Tensor, Callable[[Tensor], Tensor]]]:
    """Parameters of the key and value projections, each with a function that takes its part of the parameter's tensor.

    The part is [num_kv_heads * head_dim, hidden_size].
    """
    module = family.attention_module(model, layer)
    if family.fused is None:
        there = dict(module.named_parameters())
        names = ["k_proj.weight", next(name for name in family.value_weights if name in there)]
        return [(there[name], lambda g: g) for name in names]
    weight = module.get_parameter(f"{family.fused}.weight")
    shape = attention_shape(model.config).layer(layer)
    return [
        (weight, lambda g: family.split(oriented(family, g), shape)[1]),
        (weight, lambda g: family.split(oriented(family, g), shape)[2]),
    ]
