"""Derive the form that a recipe compresses the layers of a model to."""

from __future__ import annotations

from ..checkpoint.layout import POST_ROPE, PRE_ROPE, AttentionShape, ExactTokens, KeyForm, LayerForm, ModelForm
from ..errors import RecipeError
from ..recipe.recipe import Recipe
from .moments import vector_names

LONGEST_BLOCK_READ_NEAR = 16
"""Positions of a block from whose codes near keys may be read: planes that turn far within a block have the most to say
of near keys, and lose rank by it."""

SHARED_NUMBERS = 256
"""Most numbers of the keys that share a latent: four heads of 64, two of 128, one of 256. At 7/8 removed their row has
256 nibbles; on an H100 an 8B's attention takes less time with it than with one head a latent (docs/speed.md)."""


def model_form(recipe: Recipe, shape: AttentionShape) -> ModelForm:
    """Derive the form of every layer of a model.

    Raises:
        RecipeError: the group size does not divide the KV heads; nothing is kept exactly where that is needed.
    """
    if shape.needs_exact and recipe.exact.tokens is None:
        raise RecipeError(
            f"exact.newest 0: this model needs exact tokens: {shape.needs_exact}.", "Give --set exact.newest=128."
        )
    keys = tuple(_key_form(recipe, layer_shape) for layer_shape in shape.layers)
    rotated = next(form for layer, form in enumerate(keys) if layer not in shape.without_rope)
    # Keys hardly rotate within a block, so they are about as linear in the hidden state as values.
    joint = recipe.joins_latents and (rotated.rope_block is not None or not shape.rotates)
    return ModelForm(keys, _group_size(recipe, shape), joint)


def length_warning(form: ModelForm, shape: AttentionShape, recipe: Recipe, context: int) -> str:
    """Warn before a calibration whose codes fit shorter rows than are served, as keys stay after RoPE; else empty."""
    rows = recipe.tokens.seq_len
    if not recipe.coded or not stays_after_rope(form, shape) or context <= rows:
        return ""
    return (
        f"keys stay after RoPE in this model, and tokens.seq_len {rows} fits their codes to rows of {rows} tokens: for "
        f"longer sequences export promises no accuracy. Give --set tokens.seq_len={context} --set "
        f"evaluation.seq_len={context}, or as many tokens as you serve."
    )


def stays_after_rope(form: ModelForm, shape: AttentionShape) -> bool:
    """Tell whether some layer stores keys as its RoPE rotates them, so that they turn on with each position."""
    return any(
        keys.rope_block is None and layer_shape.rotary_dim
        for keys, layer_shape in zip(form.keys, shape.layers, strict=True)
    )


def block_warning(form: ModelForm, exact: ExactTokens | None) -> str:
    """Warn where the newest keys are read from codes of long blocks; empty where all is well."""
    longest = max(keys.rope_block or 0 for keys in form.keys)
    if exact is not None or longest <= LONGEST_BLOCK_READ_NEAR:
        return ""
    return (
        f"groups.rope_block {longest} and no exact tokens: near keys, which are read from their codes, lose accuracy "
        f"in blocks so long. Keep tokens exactly, or calibrate with --set groups.rope_block={LONGEST_BLOCK_READ_NEAR}."
    )


def wanted_gradients(form: LayerForm) -> frozenset[str]:
    """Names of the keys and values whose gradients are needed, if a recipe needs gradients."""
    return frozenset(vector_names(form))


def _key_form(recipe: Recipe, shape: AttentionShape) -> KeyForm:
    """Derive how a layer's keys are stored."""
    groups = recipe.groups
    if not shape.rotary_dim or groups.domain == "post":
        return POST_ROPE
    return PRE_ROPE if groups.domain == "pre" else KeyForm(groups.rope_block)


def _group_size(recipe: Recipe, shape: AttentionShape) -> int:
    heads = shape.shared_kv_heads
    if recipe.groups.size == "auto":
        return best_group_size(shape)
    size = heads if recipe.groups.size == "all" else recipe.groups.size
    if heads % size:
        raise RecipeError(
            f"groups.size {size} does not divide the model's {heads} KV heads"
            f"{', all that divide those of every layer' if shape.heads else ''}.",
            "Choose a divisor, all or auto.",
        )
    return size


def group_sizes(shape: AttentionShape) -> list[int]:
    """KV heads that can share a latent in all layers: every divisor of their number, ascending."""
    return [size for size in range(1, shape.shared_kv_heads + 1) if shape.shared_kv_heads % size == 0]


def best_group_size(shape: AttentionShape) -> int:
    """The most KV heads that share a latent: the largest divisor of their number within SHARED_NUMBERS, or one."""
    dim = max(sizes.head_dim for sizes in shape.sizes)
    return max((size for size in group_sizes(shape) if size * dim <= SHARED_NUMBERS), default=1)
