"""Memory, disk and products of `rotor calibrate`, summed over what its stages say of themselves.

The memory of a command is that of its largest stage, not the sum of all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..checkpoint.bases import bases_bytes
from ..checkpoint.layout import AttentionShape, HeadSizes, LayerForm, ModelForm
from ..models.memory import Estimates
from ..models.outline import ModelOutline
from ..models.sequences import bounded_seq_len
from ..models.tokens import writing_bytes
from ..recipe.recipe import Recipe
from .bases.layer import needed_statistics, solving_bytes
from .capture import capture_bytes
from .codes.side import codes_bytes
from .form import model_form, wanted_gradients
from .gradient_sums import SAMPLED_TOKENS
from .gradients import backward_bytes, gradient_flops
from .information import stored_bytes
from .moments import adding_flops, moment_shape, moments_bytes, packed_bytes
from .pruning import kmeans_bytes


@dataclass(frozen=True)
class _LayerBytes:
    """Bytes that calibration takes for one layer.

    running, solving: memory while a batch runs through it, and while its bases are computed.
    bases, kept, gradients: files of bases, of all that stays, and of Fisher information until codes are computed.
    """

    running: int
    solving: int
    bases: int
    kept: int
    gradients: int

    @classmethod
    def of(
        cls, outline: ModelOutline, shape: AttentionShape, form: LayerForm, recipe: Recipe, batch: int, number: int
    ) -> _LayerBytes:
        """Estimate those of a layer; `batch`: tokens of a batch, `number`: bytes of one."""
        moments, group_size = wanted_moments(recipe, form), form.group_size
        sums = moments_bytes(shape, group_size, moments)
        if recipe.prune.kmeans is not None:
            sums += kmeans_bytes(recipe.prune.kmeans, shape.kv_width)
        vectors: list[int] = []
        if recipe.needs_gradients:
            samples = min(_tokens(outline, recipe), recipe.codes.tokens, SAMPLED_TOKENS)
            vectors = [stored_bytes(shape, group_size, name, samples) for name in wanted_gradients(form)]
        bases = bases_bytes(form, shape)
        codes = codes_bytes(form, shape) if recipe.needs_gradients else 0
        outputs = packed_bytes(moment_shape(shape, group_size, "output")) if recipe.bases.refit else 0
        return cls(
            sums + capture_bytes(shape, outline.text_config, batch, group_size, number, moments),
            sums + solving_bytes(shape, form, moments, vectors),
            bases,
            outputs + bases + codes,
            sum(vectors),
        )


def calibration_estimates(
    outline: ModelOutline, recipe: Recipe, device: torch.device, dtype: torch.dtype, batch_tokens: int
) -> Estimates:
    """Estimate the memory and disk of `rotor calibrate`."""
    shape, number = outline.shape, dtype.itemsize
    seq_len = bounded_seq_len(recipe.tokens.seq_len, outline.config)
    count = _tokens(outline, recipe)
    batch = max(1, batch_tokens // seq_len) * seq_len
    layers = [
        (_LayerBytes.of(outline, sizes, form, recipe, batch, number), alike)
        for sizes, alike, form in layer_sizes(shape, model_form(recipe, shape))
    ]
    running, solving = (max(getattr(layer, part) for layer, _ in layers) for part in ("running", "solving"))
    kept, gradients = (sum(getattr(layer, part) * alike for layer, alike in layers) for part in ("kept", "gradients"))
    states = 2 * count  # tokens whose hidden states are on disk: those that enter a layer and those that leave it
    if recipe.needs_gradients:
        running = backward_bytes(running, outline.family)
        states = max(states, (shape.num_layers + 2) * min(count, recipe.codes.tokens))
    on_gpu = device.type == "cuda"
    stages = {"activations and statistics of one layer": running if on_gpu else max(running, solving)}
    if recipe.tokens.source == "synthetic":
        written = writing_bytes(shape, outline.text_config.vocab_size, count // seq_len, seq_len, number)
        stages["cache of the text that the model writes"] = written
    largest = max(stages, key=lambda name: stages[name])
    host = {"tokens": 2 * count * 8, "bases of one layer": max(layer.bases for layer, _ in layers)}
    if on_gpu:
        host["statistics of one layer"] = solving
    disk = kept + gradients + states * shape.hidden_size * number
    return outline.estimates(device, dtype, host, {largest: stages[largest]}, (disk, kept))


def calibration_flops(outline: ModelOutline, recipe: Recipe) -> dict[str, float]:
    """Count FLOPs of the large matrix products of `rotor calibrate` by stage; `statistics` are in float64."""
    tokens, shape = recipe.tokens.count, outline.shape
    flops = {"text": outline.pass_flops(tokens)} if recipe.tokens.source == "synthetic" else {}
    if recipe.needs_gradients:
        flops["gradients"] = gradient_flops(outline, min(tokens, recipe.codes.tokens))
    sums = sum(
        alike * adding_flops(sizes, form.group_size, wanted_moments(recipe, form), tokens)
        for sizes, alike, form in layer_sizes(shape, model_form(recipe, shape))
    )
    return {**flops, "passes": outline.pass_flops(0, tokens), "statistics": sums}


def layer_sizes(shape: AttentionShape, form: ModelForm) -> list[tuple[AttentionShape, int, LayerForm]]:
    """The sizes of layers with heads of each size, how many there are, and the form of the first of them."""
    sizes = []
    for sizes_of_layers, count in shape.sizes.items():
        heads = HeadSizes(sizes_of_layers.num_kv_heads, sizes_of_layers.head_dim, sizes_of_layers.rotary_dim)
        sizes.append((sizes_of_layers, count, form.layer(shape.heads.index(heads) if shape.heads else 0)))
    return sizes


def wanted_moments(recipe: Recipe, form: LayerForm) -> frozenset[str]:
    """Names of the moments that the recipe's methods read."""
    return needed_statistics(recipe.bases.qk, recipe.bases.vo, form, recipe.bases.refit)


def needs_whole_model(recipe: Recipe) -> tuple[str, str] | None:
    """The setting that needs all weights in memory and a hint what to set instead, or None."""
    if "gradients" not in recipe.rank_needs:
        return None
    request = f"ranks.method {recipe.ranks.method} (gradients)"
    return request, "Choose another method, e.g. --set ranks.method=global."


def _tokens(outline: ModelOutline, recipe: Recipe) -> int:
    """Tokens of whole sequences, at least as many as are asked for."""
    seq_len = bounded_seq_len(recipe.tokens.seq_len, outline.config)
    return -(-recipe.tokens.count // seq_len) * seq_len
