"""Model families: one row of data each says where a family keeps its attention and what is special about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..checked import nearest_name
from ..errors import UnsupportedModelError
from .layout import AttentionShape, HeadSizes

Split = Callable[[Tensor, AttentionShape], tuple[Tensor, Tensor, Tensor]]
"""Splits a fused projection along dimension 0 into queries, keys and values, heads in order: [num_heads * head_dim,
...] and twice [num_kv_heads * head_dim, ...]."""


def split_blocks(fused: Tensor, shape: AttentionShape) -> tuple[Tensor, Tensor, Tensor]:
    """`[Q; K; V]`, one after the other."""
    kv_width = shape.num_kv_heads * shape.head_dim
    query, key, value = fused.split([shape.num_heads * shape.head_dim, kv_width, kv_width])
    return query, key, value


def split_by_kv_head(fused: Tensor, shape: AttentionShape) -> tuple[Tensor, Tensor, Tensor]:
    """Each KV head's query heads, key and value side by side: GPT-NeoX's layout, and all three of Falcon's."""
    heads = fused.unflatten(0, (shape.num_kv_heads, shape.heads_per_kv + 2, shape.head_dim))
    return heads[:, :-2].flatten(0, 2), heads[:, -2].flatten(0, 1), heads[:, -1].flatten(0, 1)


def _kv_heads(config: Any) -> int:
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def _falcon_kv_heads(config: Any) -> int:
    """Falcon reads `num_kv_heads` in the new decoder architecture alone; else one KV head, or one a query head."""
    if config.new_decoder_architecture:
        return config.num_kv_heads
    return 1 if config.multi_query else config.num_attention_heads


def _no_layer(config: Any) -> tuple[int, ...]:
    return ()


def _by_no_rope_layers(config: Any) -> tuple[int, ...]:
    return tuple(layer for layer, rotates in enumerate(config.no_rope_layers) if not rotates)


def _scale_far_queries(config: Any, layer: int, positions: Tensor) -> Tensor:
    rope = config.rope_parameters
    return 1 + rope["llama_4_scaling_beta"] * (1 + positions // rope["original_max_position_embeddings"]).log()


def _scale_far_queries_without_rope(config: Any, layer: int, positions: Tensor) -> Tensor | None:
    if config.no_rope_layers[layer] or not config.attn_temperature_tuning:
        return None
    return 1 + config.attn_scale * (1 + (positions + 1) // config.floor_scale).log()


def _all_layers(config: Any) -> tuple[int, ...]:
    return tuple(range(config.num_hidden_layers))


def _attention_layers(config: Any) -> tuple[int, ...]:
    """Layers with attention among others, by the types that the config gives."""
    return tuple(
        layer for layer, kind in enumerate(config.layer_types) if kind.endswith("attention") and "linear" not in kind
    )


def _layers_with_cache(config: Any) -> tuple[int, ...]:
    return _all_layers(config)[: config.num_hidden_layers - config.num_kv_shared_layers]


def _no_reader(config: Any) -> tuple[tuple[int, int], ...]:
    return ()


def _readers_of_last(config: Any) -> tuple[tuple[int, int], ...]:
    """The last layers read the cache of the last layer of their type that has one."""
    last_of = {config.layer_types[layer]: layer for layer in _layers_with_cache(config)}
    readers = _all_layers(config)[config.num_hidden_layers - config.num_kv_shared_layers :]
    return tuple((layer, last_of[config.layer_types[layer]]) for layer in readers)


def _all_unless_rope(config: Any) -> tuple[int, ...]:
    return () if config.position_embedding_type == "rope" else _all_layers(config)


def _full_layers(config: Any) -> tuple[int, ...]:
    windows = _windows(config) or [None] * config.num_hidden_layers
    return tuple(layer for layer, window in enumerate(windows) if window is None)


def _full_layers_beside_windows(config: Any) -> tuple[int, ...]:
    return _full_layers(config) if _windows(config) else ()


@dataclass(frozen=True)
class Family:
    """A model family: where rotor finds what it needs, and what its attention does that others do not.

    decoder: path of the module that holds the layers, under the causal model; `layers` and `attention` below it.
    stored: how checkpoints name `decoder`, where they may have another name than the model.
    auto_class: the class of transformers that loads its checkpoints.
    mrope: positions of images and videos have three axes, so that they do not follow from a token's place in the cache.
    layer_returns_tuple: a decoder layer returns (hidden states, ...) instead of the hidden states.
    output: the output projection, under the attention module.
    sinks: the softmax has a learned logit for each query head, the attention's parameter `sinks`.
    gate: the projection of what gates the output of attention: one of its own, or q_proj, which puts out each head's
        query and gate side by side.
    fused, split: the projection of queries, keys and values together, and how it is split; None where they are
        q_proj, k_proj and v_proj.
    transposed: weights are [in_features, out_features] (transformers' Conv1D).
    norms: submodules of the attention that stay as they are: norms of queries and of keys, per head and before RoPE.
        The two may be one.
    norms_if: config field that says whether a model has the norms, where not all do.
    wide_norms: the norms are of all heads together, called on [batch_size, seq_len, num_heads * head_dim].
    norms_behind_rope: the norms stand behind RoPE, in layers with RoPE: `plain`, or `weighted` with a weight. Without
        the weight that is the same as before RoPE, where rotor puts them, as a rotation changes no length; the weight
        stays behind it.
    norms_heads_first: the norms are called on [batch_size, num_heads, seq_len, head_dim] instead of heads third.
    value_norm: the submodule of the attention that norms values, each head alone; it has no weight.
    keys_as_values: layers may lack v_proj; their values are then what k_proj puts out, before its norm.
    rotary: path of the rotary embedding under the causal model, or None for a model without RoPE.
    rotary_by_layer_type: the rotary embedding takes the layer's type as a third argument.
    attention_layers: reads from the config which layers have attention and a cache of their own; others stay as they
        are. Everywhere else layers are counted among these, in `placed`, which `family_of` fills in.
    cache_readers: reads from the config which layers have queries alone and read the cache of an earlier one: pairs of
        such a layer and the one that it reads, both among all layers. `family_of` fills them in as `readers`.
    token_inputs: config field that says whether layers read the tokens too, not hidden states alone; `reads_tokens` is
        whether they do, as `family_of` finds it.
    without_rope: reads from the config which layers do not rotate, where others do.
    key_multiplier: config field of a factor of keys; `key_factor` is what it says, as `family_of` finds it.
    query_scale: factor of queries by the config, the layer among all, and their positions, or their indices in the
        cache where the attention is given no positions, both [batch_size or 1, seq_len]; None for 1.
    interleaved: RoPE rotates neighbouring dimensions together; rotor puts the first of each plane before the second.
    rotates_back: RoPE rotates planes by the negative angle.
    tables: how cos and sin of the rotary embedding list planes: both halves alike, each plane twice in a row, or once;
        `complex`: once, as one tensor of complex numbers.
    partial_rotary: RoPE may rotate only the first dimensions of a head (`partial_rotary_factor`).
    softcap: config field of the bound c of attention logits (c tanh(x / c)), where there is one.
    bypasses_interface: the attention does not call transformers' attention interface.
    num_kv_heads: reads the number of KV heads from the config.
    refused: config fields, besides those that no family may set, that must not be set.
    not_in_vllm: why vLLM does not serve it compressed; None where it does, as a test says.
    vllm_name: the name of vLLM's class that serves it, where that is not transformers' name.
    """

    decoder: str
    layers: str
    attention: str
    stored: str | None = None
    auto_class: str = "AutoModelForCausalLM"
    mrope: bool = False
    output: str = "o_proj"
    sinks: bool = False
    gate: str | None = None
    fused: str | None = None
    split: Split = split_blocks
    transposed: bool = False
    norms: tuple[str, ...] = ()
    norms_if: str | None = None
    attention_layers: Callable[[Any], tuple[int, ...]] = _all_layers
    placed: tuple[int, ...] = ()
    cache_readers: Callable[[Any], tuple[tuple[int, int], ...]] = _no_reader
    readers: tuple[tuple[int, int], ...] = ()
    token_inputs: str | None = None
    reads_tokens: bool = False
    key_multiplier: str | None = None
    key_factor: float = 1.0
    query_scale: Callable[[Any, int, Tensor], Tensor | None] | None = None
    wide_norms: bool = False
    norms_behind_rope: Literal["plain", "weighted"] | None = None
    norms_heads_first: bool = False
    value_norm: str | None = None
    keys_as_values: bool = False
    rotary: str | None = "model.rotary_emb"
    rotary_by_layer_type: bool = False
    without_rope: Callable[[Any], tuple[int, ...]] = _no_layer
    interleaved: bool = False
    rotates_back: bool = False
    tables: Literal["halves", "neighbours", "once", "complex"] = "halves"
    partial_rotary: bool = False
    softcap: str | None = None
    layer_returns_tuple: bool = False
    bypasses_interface: bool = False
    num_kv_heads: Callable[[Any], int] = _kv_heads
    refused: tuple[str, ...] = ()
    not_in_vllm: str | None = None
    vllm_name: str | None = None

    @property
    def has_key_norm(self) -> bool:
        return bool(self.norms)

    @property
    def key_source(self) -> str:
        """The submodule of the attention whose output holds the keys before RoPE, unless norms stand behind it."""
        return self.norms[1] if self.has_key_norm else self.fused or "k_proj"

    @property
    def projections(self) -> tuple[str, ...]:
        """The projections under the attention module, the one that holds the values last but one."""
        return (self.fused, self.output) if self.fused else ("q_proj", "k_proj", "v_proj", self.output)

    @property
    def consumed(self) -> tuple[str, ...]:
        """Names (under the attention module) that the rewritten checkpoint drops."""
        norms = self.norms if self.wide_norms else ()
        gate = () if self.gate in (None, *self.projections) else (self.gate,)
        names = (*self.projections, *norms, *gate)
        sinks = ("sinks",) if self.sinks else ()
        return (*(f"{name}.{kind}" for name in names for kind in ("weight", "bias")), *sinks)

    @property
    def value_weights(self) -> tuple[str, ...]:
        """Names (under the attention module) of the weight that holds the value projection: the first that is there."""
        first = f"{self.projections[-2]}.weight"
        return (first, "k_proj.weight") if self.keys_as_values else (first,)

    @property
    def read_by_others(self) -> frozenset[int]:
        """The layers, among all, whose cache others read."""
        return frozenset(layer for _, layer in self.readers)

    def turns(self, num_hidden_layers: int) -> list[range]:
        """The decoder's layers that run together, at the turn of each layer of `placed`, where one runs after another.

        Layers without attention run with the next one that has it, and those behind the last one with that. Layers
        that hand their cache to others run with these, at the turn of the last one; at those of others nothing runs.
        """
        ends = [*(layer + 1 for layer in self.placed[:-1]), num_hidden_layers]
        turns = [range(start, end) for start, end in pairwise([0, *ends])]
        if self.readers:
            first = self.placed.index(min(self.read_by_others))
            start = turns[first].start
            turns[first:] = [*[range(start, start)] * (len(turns) - first - 1), range(start, num_hidden_layers)]
        return turns

    def attention_prefix(self, layer: int) -> str:
        return f"{self.decoder}.{self.layers}.{self.placed[layer]}.{self.attention}."

    def stored_prefix(self, layer: int, names: frozenset[str]) -> str:
        """`attention_prefix` as a checkpoint has it: a bare model (the original GPT-2) lacks its first part."""
        full = self.attention_prefix(layer)
        other = full if self.stored is None else self.stored + full.removeprefix(self.decoder)
        forms = (other, full, full.partition(".")[2])
        return next((form for form in forms if {f"{form}{self.output}.weight", f"{form}o_proj.weight"} & names), other)

    def module_name(self, name: str) -> str:
        """The name in the model of a checkpoint's tensor."""
        if self.stored is None or name.startswith(f"{self.decoder}."):
            return name
        if name.startswith(f"{self.stored}."):
            return self.decoder + name.removeprefix(self.stored)
        causal = self.stored.rpartition(".")[0]  # the module that has the decoder and its head
        return name.removeprefix(f"{causal}.") if causal else name

    def attention_module(self, model: nn.Module, layer: int) -> nn.Module:
        return model.get_submodule(self.attention_prefix(layer)[:-1])

    def replace_attention(self, model: nn.Module, layer: int, module: nn.Module) -> None:
        parent = model.get_submodule(f"{self.decoder}.{self.layers}.{self.placed[layer]}")
        setattr(parent, self.attention, module)

    def rotary_below(self, decoder: str) -> str | None:
        """The path of the rotary embedding where the decoder has another."""
        return None if self.rotary is None else decoder + self.rotary.removeprefix(self.decoder)

    def rotary_type(self, config: Any, layer: int) -> str | None:
        """The third argument of the rotary embedding for a layer, if it takes one."""
        return config.get_text_config().layer_types[self.placed[layer]] if self.rotary_by_layer_type else None

    @property
    def rotates_in_halves(self) -> bool:
        """Tell whether `rotation` returns the tables of the rotary embedding as they are."""
        return self.tables == "halves" and not self.norms_behind_rope and not self.rotates_back

    def rotation(self, given: tuple[Tensor, Tensor] | Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of the rotary embedding, [..., rotary_dim], with both halves of the dimensions equal."""
        cos, sin = (given.real, given.imag) if isinstance(given, Tensor) else given
        if self.tables != "halves":
            step = 2 if self.tables == "neighbours" else 1
            cos, sin = (torch.cat([table[..., ::step]] * 2, dim=-1) for table in (cos, sin))
        if self.norms_behind_rope:  # which take YaRN's factor away
            length = torch.hypot(cos.float(), sin.float())
            cos, sin = (cos / length).to(cos.dtype), (sin / length).to(sin.dtype)
        return cos, -sin if self.rotates_back else sin

    def in_halves(self, heads: Tensor, shape: AttentionShape) -> Tensor:
        """Reorder the dimensions of interleaved heads, [..., head_dim]: plane p becomes p and p + rotary_dim / 2."""
        if not self.interleaved or not shape.rotary_dim:
            return heads
        rotated, rest = heads[..., : shape.rotary_dim], heads[..., shape.rotary_dim :]
        return torch.cat([rotated[..., ::2], rotated[..., 1::2], rest], dim=-1)


_STATES = "layers without attention keep states, in pages of a size that vLLM derives from uncompressed attention"
_LLAMA = Family("model", "layers", "self_attn")
_QWEN3 = replace(_LLAMA, norms=("q_norm", "k_norm"))
_WIDE_NORMS = replace(_QWEN3, wide_norms=True)
_HUNYUAN = replace(_LLAMA, norms=("query_layernorm", "key_layernorm"), norms_behind_rope="weighted")
_HYBRID = replace(_LLAMA, attention_layers=_attention_layers, not_in_vllm=_STATES)
_LFM2 = replace(_HYBRID, output="out_proj", norms=("q_layernorm", "k_layernorm"))
_GATED = replace(_HYBRID, norms=("q_norm", "k_norm"), gate="q_proj", partial_rotary=True)
_GEMMA4 = replace(
    _QWEN3,
    rotary_by_layer_type=True,
    value_norm="v_norm",
    keys_as_values=True,
    attention_layers=_layers_with_cache,
    cache_readers=_readers_of_last,
    token_inputs="hidden_size_per_layer_input",
    not_in_vllm="its heads have two sizes, and its values a norm",
)
_INTERLEAVED = replace(_LLAMA, interleaved=True)
_BY_KV_HEAD = Family(
    "transformer",
    "layers",
    "self_attention",
    output="dense",
    fused="query_key_value",
    split=split_by_kv_head,
    rotary="transformer.rotary_emb",
)

FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen2_moe": _LLAMA,
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3,
    "arcee": _LLAMA,
    "gemma": _LLAMA,
    "granite": _LLAMA,
    "granitemoe": _LLAMA,
    "hyperclovax": _LLAMA,
    "jais2": _LLAMA,
    "ministral": _LLAMA,
    "phimoe": replace(_LLAMA, vllm_name="PhiMoEForCausalLM"),
    "seed_oss": _LLAMA,
    "starcoder2": _LLAMA,
    "apertus": replace(_QWEN3, norms_heads_first=True),
    "dots1": _QWEN3,
    "afmoe": replace(_QWEN3, gate="gate_proj", without_rope=_full_layers),
    "cohere": replace(_INTERLEAVED, tables="neighbours", refused=("use_qk_norm",)),
    "cohere2": replace(_INTERLEAVED, tables="neighbours", without_rope=_full_layers),
    "cwm": _LLAMA,
    # vLLM's own leaves out biases
    "ernie4_5": replace(_INTERLEAVED, vllm_name="TransformersForCausalLM"),
    "ernie4_5_moe": replace(_INTERLEAVED, vllm_name="TransformersMoEForCausalLM"),
    "exaone4": replace(_QWEN3, norms_heads_first=True, without_rope=_full_layers_beside_windows),
    "exaone_moe": replace(_QWEN3, norms_heads_first=True, without_rope=_full_layers_beside_windows),
    "flex_olmo": _WIDE_NORMS,
    "falcon_h1": replace(_LLAMA, key_multiplier="key_multiplier", layer_returns_tuple=True, not_in_vllm=_STATES),
    "nemotron_h": replace(_HYBRID, attention="mixer", rotary=None, stored="backbone"),
    "glm": replace(_INTERLEAVED, partial_rotary=True),
    "glm4": replace(_INTERLEAVED, partial_rotary=True),
    "glm4_moe": replace(_QWEN3, norms_if="use_qk_norm", partial_rotary=True),
    "gpt_oss": replace(_LLAMA, sinks=True, tables="once"),
    "granitemoeshared": _LLAMA,
    "granitemoehybrid": replace(_HYBRID, without_rope=_all_unless_rope),
    "jamba": replace(_HYBRID, rotary=None),
    "bamba": replace(_HYBRID, partial_rotary=True, layer_returns_tuple=True),
    "lfm2": _LFM2,
    "lfm2_moe": replace(_LFM2, rotary="model.pos_emb"),
    "helium": _INTERLEAVED,
    "hunyuan_v1_dense": _HUNYUAN,
    "hunyuan_v1_moe": _HUNYUAN,
    "hy_v3": replace(
        _QWEN3, norms_heads_first=True, not_in_vllm="vLLM's model wants another config than transformers'"
    ),
    "mellum": replace(_QWEN3, rotary_by_layer_type=True),
    "llama4_text": replace(
        _INTERLEAVED,
        tables="complex",
        norms=("qk_norm", "qk_norm"),
        norms_if="use_qk_norm",
        norms_behind_rope="plain",
        without_rope=_by_no_rope_layers,
        query_scale=_scale_far_queries_without_rope,
        not_in_vllm="it attends within chunks",
    ),
    "ministral3": replace(_LLAMA, query_scale=_scale_far_queries),
    "minimax_m2": replace(
        _WIDE_NORMS, partial_rotary=True, not_in_vllm="vLLM's router of experts on a CPU refuses it: not tested"
    ),
    "nanochat": replace(_QWEN3, norms_behind_rope="plain", rotates_back=True),
    "qwen3_5_text": _GATED,
    "qwen3_5_moe_text": _GATED,
    "qwen3_next": _GATED,
    "olmo": replace(_LLAMA, refused=("clip_qkv",)),
    "olmo2": _WIDE_NORMS,
    "olmo3": replace(_WIDE_NORMS, rotary_by_layer_type=True),
    "olmoe": replace(_WIDE_NORMS, refused=("clip_qkv",)),
    "smollm3": replace(_LLAMA, without_rope=_by_no_rope_layers),
    "solar_open": replace(_LLAMA, partial_rotary=True),
    "nemotron": replace(_LLAMA, partial_rotary=True),
    "phi": replace(_LLAMA, output="dense", partial_rotary=True),
    "stablelm": replace(_LLAMA, partial_rotary=True),
    "vaultgemma": replace(_LLAMA, softcap="attn_logit_softcapping"),
    "phi3": replace(_LLAMA, fused="qkv_proj", partial_rotary=True),
    "gemma2": replace(_LLAMA, softcap="attn_logit_softcapping"),
    "gemma3_text": replace(_QWEN3, norms_heads_first=True, rotary_by_layer_type=True),
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "gpt_neox": replace(
        _BY_KV_HEAD,
        decoder="gpt_neox",
        attention="attention",
        rotary="gpt_neox.rotary_emb",
        partial_rotary=True,
        not_in_vllm="vLLM runs transformers' model without its output embeddings",
    ),
    "opt": Family("model.decoder", "layers", "self_attn", output="out_proj", rotary=None),
    "gpt2": Family("transformer", "h", "attn", output="c_proj", fused="c_attn", transposed=True, rotary=None),
    "falcon": replace(
        _BY_KV_HEAD,
        layers="h",
        layer_returns_tuple=True,
        bypasses_interface=True,
        num_kv_heads=_falcon_kv_heads,
    ),
}
"""Supported `config.model_type`s of language models."""

LANGUAGE_MODELS = FAMILIES | {
    "qwen2_5_vl_text": _LLAMA,
    "qwen3_vl_text": _QWEN3,
    "qwen3_vl_moe_text": _QWEN3,
}
"""The families by `model_type`, with the language models that come within another model alone."""


class Multimodal(NamedTuple):
    """A kind of models that read more than text by one of LANGUAGE_MODELS; fields: see Family."""

    stored: str | None = None
    mrope: bool = False
    decoder: str = "model.language_model"

    def around(self, family: Family) -> Family:
        """The family of the language model as it is in the whole model."""
        return replace(
            family,
            decoder=self.decoder,
            rotary=family.rotary_below(self.decoder),
            stored=self.stored,
            mrope=self.mrope,
            auto_class="AutoModelForImageTextToText",
            not_in_vllm="it reads more than text",
        )


MULTIMODAL = {
    "gemma3": Multimodal("language_model.model"),
    "gemma4": Multimodal(),
    "gemma4_unified": Multimodal(),
    "llama4": Multimodal(decoder="language_model.model"),
    "mistral3": Multimodal("language_model.model"),
    "qwen2_5_vl": Multimodal("model", mrope=True),
    "qwen3_vl": Multimodal(mrope=True),
    "qwen3_vl_moe": Multimodal(mrope=True),
    "qwen3_5": Multimodal(mrope=True),
    "qwen3_5_moe": Multimodal(mrope=True),
}
"""Supported `config.model_type`s of models that read more than text."""


def architectures() -> set[str]:
    """Names of the causal models of the families that vLLM serves, as in `architectures` of config.json: transformers'
    and vLLM's.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    served = {name: family.vllm_name for name, family in FAMILIES.items() if not family.not_in_vllm}
    return {MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name] for name in served} | {name for name in served.values() if name}


_ENCODERS = frozenset(
    {"albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "modernbert", "mpnet", "roberta"}
    | {"clip", "convbert", "esm", "longformer", "siglip", "vit", "xlm", "xlm-roberta", "wav2vec2"}
)
"""Models that read and do not generate."""

_RECURRENT = frozenset({"falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"})
"""Models that are linear attention or state spaces alone."""

_UNLIKE = {"gemma3n_text": "several streams of hidden states run through its layers"}
"""Language models whose attention differs from that of all families: what of it is in the way."""

_REFUSED = ("reorder_and_upcast_attn", "add_cross_attention", "alibi", "use_bidirectional_attention", "qk_layernorm")
"""Config fields that change attention in ways that rotor does not support."""

_HARMLESS = {"use_bidirectional_attention": "vision"}
"""Values of fields that are refused otherwise: images attend within themselves, as the mask says, and text does not."""


def family_of(config: Any) -> Family:
    """The family of the config of a supported model, with the norms that this model has and where its layers are.

    Args:
        config: the whole model's, or that of a language model.
    """
    whole, config = config, config.get_text_config()
    family = LANGUAGE_MODELS[config.model_type]
    if whole is not config:
        family = MULTIMODAL[whole.model_type].around(family)
    norms = () if family.norms_if and not getattr(config, family.norms_if) else family.norms
    factor = float(getattr(config, family.key_multiplier)) if family.key_multiplier else 1.0
    behind = family.norms_behind_rope if norms else None
    return replace(
        family,
        norms=norms,
        norms_behind_rope=behind,
        placed=family.attention_layers(config),
        readers=family.cache_readers(config),
        reads_tokens=bool(family.token_inputs and getattr(config, family.token_inputs)),
        key_factor=factor,
    )


def is_supported(config: Any) -> bool:
    """Tell whether a model is of a supported family, whatever its variant."""
    if getattr(config, "is_encoder_decoder", False):
        return False
    multimodal = config.model_type in MULTIMODAL and config.get_text_config().model_type in LANGUAGE_MODELS
    return multimodal or config.model_type in FAMILIES


def language_model_setting(config: Any, value: str) -> str | dict[str, str]:
    """A setting as config.json has it (`attn_implementation`) that `value` is of the language model alone."""
    return value if config.get_text_config() is config else {"text_config": value}


def _why_not(config: Any) -> tuple[str, str]:
    """Why a model that is in no family is not compressed, and what to do instead."""
    model_type = getattr(config, "model_type", None)
    refusal = f"model_type {model_type!r} is not supported"
    language_model: Any = getattr(config, "text_config", None)
    if getattr(config, "is_encoder_decoder", False):
        return f"{refusal}: it is an encoder and a decoder.", "rotor compresses models that are decoders alone."
    if getattr(config, "kv_lora_rank", None) or getattr(language_model, "kv_lora_rank", None):
        return f"{refusal}: its cache is a latent already (multi-head latent attention).", "Serve it as it is."
    if model_type in MULTIMODAL:
        return (
            f"a {model_type} with a language model {language_model.model_type!r} is not supported.",
            f"Supported language models: {', '.join(sorted(LANGUAGE_MODELS))}.",
        )
    names = (model_type, getattr(language_model, "model_type", None))
    unlike = next((_UNLIKE[name] for name in names if name in _UNLIKE), None)
    if unlike is not None:
        return f"{refusal}: {unlike}.", "Serve it as it is, or with a cache that transformers quantises."
    if model_type in _ENCODERS:
        return f"{refusal}: it is an encoder, which keeps no cache.", "rotor compresses models that generate text."
    if model_type in _RECURRENT:
        return f"{refusal}: it keeps a state of fixed size, not keys and values.", "Serve it as it is."
    if getattr(language_model, "model_type", None) is not None:
        return (
            f"{refusal}: it reads more than text, by a language model {language_model.model_type!r}.",
            "Save its language model as a model of its own, and give that folder."
            if language_model.model_type in FAMILIES
            else "docs/families.md lists what is supported.",
        )
    known = sorted({*FAMILIES, *MULTIMODAL})
    return f"{refusal}{nearest_name(model_type, known)}", f"docs/families.md lists the {len(known)} that are."


def find_family(config: Any) -> Family:
    """Find the family of a model's config by its `model_type`, and that of its language model.

    Raises:
        UnsupportedModelError: not supported (the message lists them), or an unsupported variant of a family.
    """
    model_type = getattr(config, "model_type", None)
    if not is_supported(config):
        raise UnsupportedModelError(*_why_not(config))
    if getattr(config, "quantization_config", None):
        raise UnsupportedModelError(
            f"this {model_type} checkpoint is already quantised or compressed (config.json has a quantization_config).",
            "Give the checkpoint that it was made from; its README.md usually names it as base_model.",
        )
    family, config = family_of(config), config.get_text_config()
    for flag in (*_REFUSED, *family.refused):
        value = getattr(config, flag, False)
        if value and value != _HARMLESS.get(flag):
            raise UnsupportedModelError(f"config.json: {flag} is set, which rotor does not support.")
    factor = _partial_rotary_factor(config)
    if factor != 1.0 and not family.partial_rotary:
        raise UnsupportedModelError(
            f"config.json: partial_rotary_factor is {factor}; for {model_type} rotor supports only 1."
        )
    if family.rotary is not None and not 0.0 < factor <= 1.0:
        raise UnsupportedModelError(f"config.json: partial_rotary_factor is {factor}, expected above 0 and at most 1.")
    return family


def attention_shape(config: Any) -> AttentionShape:
    """Sizes of the attention layers from the transformers config of a supported family, see `family_of`."""
    family, config = family_of(config), config.get_text_config()
    layers, unrotated, windows = family.placed, family.without_rope(config), _windows(config)
    without_rope = tuple(index for index, layer in enumerate(layers) if layer in unrotated)
    rotates = family.rotary is not None and len(without_rope) < len(layers)
    differ = getattr(config, "is_heterogeneous", False)
    configs = [config.per_layer_config[layer] for layer in layers] if differ else [config]
    heads = tuple(_head_sizes(family, layer_config, rotates) for layer_config in configs)
    return AttentionShape(
        num_layers=len(layers),
        num_heads=config.num_attention_heads,
        **heads[0]._asdict(),
        hidden_size=config.hidden_size,
        key_norm=family.has_key_norm,
        windows=tuple(windows[layer] for layer in layers) if windows else (),
        wide_norms=family.wide_norms,
        gated=family.gate is not None,
        sinks=family.sinks,
        without_rope=without_rope if rotates else (),
        mrope=family.mrope,
        weighted_behind_rope=family.norms_behind_rope == "weighted",
        value_norm=family.value_norm is not None,
        heads=heads if len(set(heads)) > 1 else (),
    )


def _head_sizes(family: Family, config: Any, rotates: bool) -> HeadSizes:
    """Sizes of heads by the config, which may be that of one layer."""
    num_heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or (config.hidden_size // num_heads if num_heads else 0)
    # transformers makes one frequency of each started pair
    rotary_dim = 2 * -(-int(head_dim * _partial_rotary_factor(config)) // 2) if rotates else 0
    return HeadSizes(family.num_kv_heads(config), head_dim, rotary_dim)


def _windows(config: Any) -> tuple[int | None, ...]:
    """Tokens that each layer holds at most, see AttentionShape; a window without types of layers is all layers'.

    A layer that attends within chunks holds as many tokens as a chunk has, as caches of transformers do.
    """
    fields = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
    sizes = {kind: getattr(config, field, None) or None for kind, field in fields.items()}
    count = config.num_hidden_layers
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * count
    windows = tuple(sizes.get(kind) for kind in types[:count])
    return windows if any(windows) else ()


def _partial_rotary_factor(config: Any) -> float:
    """Share of a head's dimensions that RoPE rotates; 1 unless the config says otherwise.

    Proportional RoPE rotates all dimensions, the planes behind the given share by 0.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    parts = [part for part in rope.values() if isinstance(part, dict)] or [rope]
    factors = [part.get("partial_rotary_factor") for part in parts if part.get("rope_type") != "proportional"]
    return float(min((factor for factor in factors if factor is not None), default=1.0))
