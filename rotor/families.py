"""Model families: where each keeps its attention, and how its projections are read.

A family is a row of data. Fused projections are split on reading, so that everything behind this module sees the same
four matrices and the rewritten checkpoint has the same four names whatever the family.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .errors import UnsupportedModelError
from .layout import AttentionShape

GetTensor = Callable[[str], Tensor]
"""Reads a checkpoint tensor by its full name."""


@dataclass
class AttentionWeights:
    """The projections of one attention layer in nn.Linear's orientation, [out_features, in_features]; biases or None.

    q_weight: [num_heads * head_dim, hidden_size]; k_weight, v_weight: [num_kv_heads * head_dim, hidden_size];
    o_weight: [hidden_size, num_heads * head_dim]. prefix: of their names in the checkpoint, for errors.
    """

    q_weight: Tensor
    k_weight: Tensor
    v_weight: Tensor
    o_weight: Tensor
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    o_bias: Tensor | None = None
    prefix: str = ""


@dataclass(frozen=True)
class Family:
    """Where a model family keeps what rotor needs.

    decoder: path of the module that holds the layers, under the causal model; `layers` and `attention` below it.
    consumed: names (under the attention module) that `read` uses and the rewritten checkpoint drops.
    read: (get tensor by name under the attention module, names that exist, shape) -> AttentionWeights.
    key_source: the submodule whose output is the key before RoPE ([..., num_kv_heads * head_dim] once flattened).
    norms: submodules of the attention that stay as they are (per-head norms of queries and keys, before RoPE).
    rotary: path of the rotary embedding under the causal model, or None for a model without RoPE.
    """

    decoder: str
    layers: str
    attention: str
    consumed: tuple[str, ...]
    read: Callable[[GetTensor, frozenset[str], AttentionShape], AttentionWeights]
    key_source: str = "k_proj"
    norms: tuple[str, ...] = ()
    rotary: str | None = "model.rotary_emb"

    @property
    def has_key_norm(self) -> bool:
        return "k_norm" in self.norms

    def attention_prefix(self, layer: int) -> str:
        return f"{self.decoder}.{self.layers}.{layer}.{self.attention}."

    def attention_module(self, model: nn.Module, layer: int) -> nn.Module:
        return model.get_submodule(self.attention_prefix(layer)[:-1])

    def kv_parameters(self, model: nn.Module, layer: int) -> list[tuple[Tensor, Callable[[Tensor], Tensor]]]:
        """The parameters of the key and of the value projection, and for each how to get [num_kv_heads * d, hidden]."""
        module = self.attention_module(model, layer)
        if "c_attn.weight" in self.consumed:
            fused = module.get_parameter("c_attn.weight")
            return [(fused, lambda g: g.T.chunk(3)[1]), (fused, lambda g: g.T.chunk(3)[2])]
        return [(module.get_parameter(f"{p}_proj.weight"), lambda g: g) for p in "kv"]

    def replace_attention(self, model: nn.Module, layer: int, module: nn.Module) -> None:
        parent = model.get_submodule(f"{self.decoder}.{self.layers}.{layer}")
        setattr(parent, self.attention, module)


def _read_split(get: GetTensor, names: frozenset[str], shape: AttentionShape) -> AttentionWeights:
    """Four nn.Linear projections with or without biases."""
    del shape
    parts: dict[str, Any] = {f"{p}_weight": get(f"{p}_proj.weight") for p in "qkvo"}
    biases: dict[str, Any] = {f"{p}_bias": get(f"{p}_proj.bias") for p in "qkvo" if f"{p}_proj.bias" in names}
    return AttentionWeights(**parts, **biases)


def _read_conv1d(get: GetTensor, names: frozenset[str], shape: AttentionShape) -> AttentionWeights:
    """GPT-2: one Conv1D [in, 3 * hidden] for [Q | K | V] and one for the output, both transposed against nn.Linear."""
    del names
    width = shape.num_heads * shape.head_dim
    q_weight, k_weight, v_weight = get("c_attn.weight").T.split(width)
    q_bias, k_bias, v_bias = get("c_attn.bias").split(width)
    return AttentionWeights(
        q_weight, k_weight, v_weight, get("c_proj.weight").T, q_bias, k_bias, v_bias, get("c_proj.bias")
    )


_SPLIT = tuple(f"{p}_proj.{kind}" for p in "qkvo" for kind in ("weight", "bias"))
_LLAMA = Family("model", "layers", "self_attn", _SPLIT, _read_split)

FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": Family(
        "model", "layers", "self_attn", _SPLIT, _read_split, key_source="k_norm", norms=("q_norm", "k_norm")
    ),
    "gpt2": Family(
        "transformer",
        "h",
        "attn",
        ("c_attn.weight", "c_attn.bias", "c_proj.weight", "c_proj.bias"),
        _read_conv1d,
        key_source="c_attn",
        rotary=None,
    ),
}
"""Supported `config.model_type`s."""


def find_family(config: Any) -> Family:
    """Dispatch on `config.model_type`.

    Raises:
        UnsupportedModelError: not in FAMILIES (names those that are), or a variant of a family that is not supported.
    """
    model_type = getattr(config, "model_type", None)
    if model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"model_type {model_type!r} is not supported.", f"Supported: {', '.join(sorted(FAMILIES))}."
        )
    if getattr(config, "quantization_config", None):
        raise UnsupportedModelError(
            f"this {model_type} checkpoint is already quantised or compressed (config.json has a quantization_config).",
            "Give rotor the original checkpoint.",
        )
    for flag in ("reorder_and_upcast_attn", "add_cross_attention"):
        if getattr(config, flag, False):
            raise UnsupportedModelError(f"config.json: {flag} is set, which rotor does not support.")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("partial_rotary_factor", 1.0) not in (None, 1.0):
        raise UnsupportedModelError(
            f"config.json: partial_rotary_factor is {rope['partial_rotary_factor']}; rotor supports only 1."
        )
    return FAMILIES[model_type]


def attention_shape(config: Any) -> AttentionShape:
    """Sizes of the attention layers from a transformers config."""
    num_heads, hidden_size = config.num_attention_heads, config.hidden_size
    return AttentionShape(
        num_layers=config.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(config, "head_dim", None) or (hidden_size // num_heads if num_heads else 0),
        hidden_size=hidden_size,
    )


def keys_before_rope(family: Family, output: Tensor, shape: AttentionShape) -> Tensor:
    """The output of `family.key_source` as keys before RoPE, [batch_size * seq_len, num_kv_heads * head_dim]."""
    width = shape.num_kv_heads * shape.head_dim
    if family.key_source == "c_attn":
        output = output.split(width, dim=-1)[1]
    return output.reshape(-1, width)


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
    prefix = family.attention_prefix(layer)
    local = frozenset(name[len(prefix) :] for name in names if name.startswith(prefix))
    weights = family.read(lambda name: get(prefix + name), local, shape)
    weights.prefix = prefix
    query, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
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
            raise UnsupportedModelError(f"layer {layer}: {name} is {list(got)}, config.json implies {list(want)}.")
    return weights
