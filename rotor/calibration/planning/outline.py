"""Sizes of a model from its configuration and the headers of its shards, and estimates of the memory that work takes.

The estimate of a command is that of its largest stage, not their sum. Tensors that safetensors maps from a file are not
counted, because the system drops their pages when memory is short.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ...checkpoint.families import Family, attention_shape, find_family
from ...checkpoint.layout import AttentionShape, HeadSizes, LayerForm, ModelForm
from ...checkpoint.sizes import uncompressed_kv_bytes_per_token
from ...models.device_plan import DevicePlan
from ...models.hardware import fit_threads
from ...models.lengths import bounded_seq_len
from ...models.memory import HEAD_POSITIONS, LOGIT_BYTES, SAMPLING_TOKENS, Estimate, Estimates
from ...models.source import Checkpoint
from ...options import MemoryOptions
from ...progress import Progress
from ...recipe.metric_registry import primitive_metrics, report_metrics
from ...recipe.recipe import Recipe
from ...recipe.sections import Evaluation
from ..bases.layer import bases_bytes, needed_statistics
from ..codes.quantiser import SAMPLED_TOKENS
from ..codes.side import codes_bytes
from ..information import stored_bytes
from ..moments import CHUNK_BYTES, moment_shape, packed_bytes
from ..pruning import kmeans_bytes
from .form import model_form, wanted_gradients

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

LIBRARIES_BYTES = 600 << 20
"""Resident memory of Python with torch and transformers imported and used (measured: 0.45 to 0.6 GB)."""

LOGIT_COPIES = 6
"""Tensors of the size of a batch's logits that scoring has at once (logits, float copy, log-softmax, reference)."""


@dataclass(frozen=True)
class ModelOutline:
    """A model without its weights: everything that config and headers tell.

    config: the transformers config of the whole model; text_config: that of its language model.
    layers: elements of the decoder layers that run at the turn of each, see `Family.turns`.
    vocabulary: elements of each matrix over the vocabulary (the embedding, and the head unless tied); what else layers
        read of tokens is in `rest`.
    rest: elements of everything else.
    stored_bytes: bytes of all shards.
    dtype: that the model is served in.
    """

    config: PreTrainedConfig
    family: Family
    shape: AttentionShape
    layers: tuple[int, ...]
    vocabulary: tuple[int, ...]
    rest: int
    stored_bytes: int
    dtype: torch.dtype

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> ModelOutline:
        """Outline a checkpoint; raises UnsupportedModelError if rotor cannot compress it."""
        shapes = {name: checkpoint.shape_of(name) for name in checkpoint.names}
        return cls.of_headers(checkpoint.config, shapes, checkpoint.total_bytes(), checkpoint.dtype)

    @classmethod
    def of_headers(
        cls, config: PreTrainedConfig, shapes: dict[str, list[int]], stored_bytes: int, dtype: torch.dtype
    ) -> ModelOutline:
        """Outline a model from the shapes of its tensors by name and the bytes of their files; raises like `of`."""
        family, shape, text = find_family(config), attention_shape(config), config.get_text_config()
        turns = family.turns(text.num_hidden_layers)
        layers = [0] * shape.num_layers
        vocabulary: list[int] = []
        rest = 0
        prefix = f"{family.decoder}.{family.layers}."
        for stored_name, dims in shapes.items():
            name = family.module_name(stored_name)
            index = name[len(prefix) :].partition(".")[0] if name.startswith(prefix) else ""
            if index.isdigit() and int(index) < text.num_hidden_layers:
                layers[next(layer for layer, turn in enumerate(turns) if int(index) in turn)] += math.prod(dims)
            elif len(dims) == 2 and text.vocab_size in dims and (text.hidden_size in dims or not family.reads_tokens):
                vocabulary.append(math.prod(dims))
            else:
                rest += math.prod(dims)
        return cls(config, family, shape, tuple(layers), tuple(vocabulary), rest, stored_bytes, dtype)

    @property
    def text_config(self) -> PreTrainedConfig:
        return self.config.get_text_config()

    @property
    def parameters(self) -> int:
        return sum(self.layers) + sum(self.vocabulary) + self.rest

    def form(self, recipe: Recipe) -> ModelForm:
        """Form that the recipe compresses the layers to; see `model_form`."""
        return model_form(recipe, self.shape)

    def calibration(self, recipe: Recipe, device: torch.device, dtype: torch.dtype, batch_tokens: int) -> Estimates:
        """Estimate the memory and disk of `rotor calibrate`."""
        shape = self.shape
        number = dtype.itemsize
        seq_len = bounded_seq_len(recipe.tokens.seq_len, self.config)
        num_sequences = -(-recipe.tokens.count // seq_len)
        count = num_sequences * seq_len
        samples = min(count, recipe.codes.tokens, SAMPLED_TOKENS) if recipe.needs_gradients else 0
        sizes = self._sizes(recipe)
        layers = {own: _LayerBytes.of(own, form, recipe, samples) for own, _, form in sizes}
        solving = max(layer.solving for layer in layers.values())
        batch = max(1, batch_tokens // seq_len) * seq_len
        running = max(
            layers[own].statistics + self._activations(own, batch, form.group_size, number, layers[own].moments)
            for own, _, form in sizes
        )
        passed = 0
        if recipe.needs_gradients:  # backward keeps activations
            passed = (shape.num_layers + 2) * min(count, recipe.codes.tokens)  # tokens whose states are kept
            running *= 3 * (1 + len(self.family.readers))
        kept_bytes = sum(layers[own].kept * n for own, n, _ in sizes)
        gradients = sum(layers[own].gradients * n for own, n, _ in sizes)
        disk_bytes = kept_bytes + gradients + max(2 * count, passed) * shape.hidden_size * number  # hidden states
        on_gpu = device.type == "cuda"
        stages = {"activations and statistics of one layer": running if on_gpu else max(running, solving)}
        if recipe.tokens.source == "synthetic":  # cache and logits of the sequences that are written together
            sequence = (
                uncompressed_kv_bytes_per_token(shape, number) * seq_len
                + 4 * LOGIT_COPIES * self.text_config.vocab_size
            )
            written = min(num_sequences, max(1, SAMPLING_TOKENS // seq_len))
            stages["cache of the text that the model writes"] = written * sequence
        largest = max(stages, key=lambda name: stages[name])
        host = {"tokens": 2 * count * 8, "bases of one layer": max(layer.bases for layer in layers.values())}
        if on_gpu:
            host["statistics of one layer"] = solving
        return self._estimates(device, dtype, host, {largest: stages[largest]}, (disk_bytes, kept_bytes))

    def _sizes(self, recipe: Recipe) -> list[tuple[AttentionShape, int, LayerForm]]:
        """The sizes of layers with heads of each size, how many there are, and the form of the first of them."""
        form, found = self.form(recipe), []
        for own, count in self.shape.sizes.items():
            heads = (own.num_kv_heads, own.head_dim, own.rotary_dim)
            first = self.shape.heads.index(HeadSizes(*heads)) if self.shape.heads else 0
            found.append((own, count, form.layer(first)))
        return found

    def evaluation(self, recipe: Recipe, device: torch.device, dtype: torch.dtype) -> Estimates:
        """Estimate the memory of measuring accuracy (`rotor export --accuracy`), with one rewritten layer at a time."""
        spec = recipe.evaluation
        shape = self.shape
        sizes = [(own, form._replace(joint=False)) for own, _, form in self._sizes(recipe)]
        outputs = [
            own.num_heads * (form.group_size * own.head_dim) ** 2 * 8 if recipe.bases.refit else 0
            for own, form in sizes
        ]
        rewriting = max(
            3 * of_heads + 3 * bases_bytes(own, form) + own.projection_elements * 2 * 8
            for of_heads, (own, form) in zip(outputs, sizes, strict=True)
        )
        scoring = LOGIT_COPIES * max(LOGIT_BYTES[device.type], HEAD_POSITIONS * 4 * self.text_config.vocab_size)
        activations = [self._activations(own, 2048, form.group_size, dtype.itemsize) for own, form in sizes]
        work = {"activations": max(*activations, scoring)}
        searched = spec.search_tokens + _prompt_tokens(spec, primitive_metrics(spec.metric))
        reported = spec.report_tokens + _prompt_tokens(spec, report_metrics(spec.metric))
        tokens = max(searched, reported)
        disk_bytes = 3 * tokens * shape.hidden_size * dtype.itemsize  # hidden states
        host = {"rewriting one layer": rewriting}
        copied = sum(count * own.projection_elements for own, count in shape.sizes.items())
        return self._estimates(device, dtype, host, work, (disk_bytes, 0), copied)

    def calibration_flops(self, recipe: Recipe) -> dict[str, float]:
        """Count FLOPs of the large matrix products of `rotor calibrate` by stage; `statistics` are in float64.

        All experts of a mixture are counted as active.
        """
        tokens = recipe.tokens.count
        layers = 2.0 * sum(self.layers)
        whole = layers + 2.0 * max(self.vocabulary, default=0)
        per_token = 0
        for own, number, form in self._sizes(recipe):
            elements = _moment_elements(own, form.group_size, wanted_moments(recipe, form))
            for name, count in elements.items():
                per_token += number * count * (own.heads_per_kv if name == "query" else 1)
        flops = {"text": whole * tokens} if recipe.tokens.source == "synthetic" else {}
        if recipe.needs_gradients:  # forward once, then each layer again and twice as much backward
            flops["gradients"] = 4 * whole * min(tokens, recipe.codes.tokens)
        return {**flops, "passes": layers * tokens, "statistics": 2.0 * tokens * per_token}

    def evaluation_flops(self, recipe: Recipe) -> dict[str, float]:
        """Count FLOPs of the large matrix products of `rotor export --accuracy`: `search` and `report`.

        Both run the uncompressed model once and a compressed one, whose layers count like the uncompressed ones: the
        search at each of the usual number of points. `rotor validate` takes the report's.
        """
        spec = recipe.evaluation
        report_prompts = _prompt_tokens(spec, report_metrics(spec.metric))
        search = self._pass_flops(spec.search_tokens, _prompt_tokens(spec, primitive_metrics(spec.metric)))
        report = self._pass_flops(spec.report_tokens, report_prompts)
        divergence = self._pass_flops(spec.report_tokens, 0) - self._pass_flops(0, spec.report_tokens)
        return {"search": (1 + recipe.search.points(recipe.coded)) * search, "report": 2 * report + divergence}

    def _pass_flops(self, text: int, prompts: int) -> float:
        """FLOPs of the layers for all tokens, and of the head for those of the text."""
        return 2.0 * (sum(self.layers) * (text + prompts) + max(self.vocabulary, default=0) * text)

    def _estimates(
        self,
        device: torch.device,
        dtype: torch.dtype,
        host: dict[str, int],
        work: dict[str, int],
        disk: tuple[int, int],
        copied: int = 0,
    ) -> Estimates:
        """Make both estimates of a command: `work` and the weights take memory on the device, `host` on the machine.

        Args:
            disk: bytes while the command runs, and bytes that stay.
            copied: elements of weights that exist twice when all weights are in memory.
        """
        host = {"libraries": LIBRARIES_BYTES, **host}

        def estimate(elements: int) -> Estimate:
            placed = {"weights": elements * dtype.itemsize, **work}
            if device.type == "cuda":
                return Estimate(host, placed, *disk)
            return Estimate({**host, **placed}, {}, *disk)

        part = max(*self.layers, *self.vocabulary, 0)
        if self.family.reads_tokens:  # beside the embedding
            part = max(self.layers) + max(self.vocabulary, default=0)
        return Estimates(estimate(self.parameters + copied), estimate(part + self.rest))

    def _activations(
        self,
        shape: AttentionShape,
        tokens: int,
        group_size: int,
        number_bytes: int,
        moments: frozenset[str] = frozenset(),
    ) -> int:
        """Bytes of one layer's forward pass over `tokens` tokens, including those of capture.

        Args:
            shape: of the layer.
        """
        attention = 2 * (shape.query_width + 2 * shape.kv_width) + shape.query_width
        if "output" in moments and group_size > 1:
            attention += 2 * shape.query_width * group_size
        numbers = 4 * shape.hidden_size + max(attention, 3 * _feed_forward_width(self.text_config))
        copies = min(CHUNK_BYTES, tokens * shape.query_width * group_size * 8) if moments else 0
        head = tokens * shape.heads_per_kv * shape.head_dim * 8 if moments else 0
        return tokens * numbers * number_bytes + 2 * max(copies, head)


def wanted_moments(recipe: Recipe, form: LayerForm) -> frozenset[str]:
    """Names of the moments that the recipe's methods read."""
    return needed_statistics(recipe.bases.qk, recipe.bases.vo, form, recipe.bases.refit)


def needs_whole_model(recipe: Recipe) -> tuple[str, str] | None:
    """The setting that needs all weights in memory and a hint what to set instead, or None."""
    if "gradients" not in recipe.rank_needs:
        return None
    request = f"ranks.method {recipe.ranks.method} (gradients)"
    return request, "Choose another method, e.g. --set ranks.method=global."


def _feed_forward_width(config: PreTrainedConfig) -> int:
    """Width of a layer's feed-forward part for one token, or the widths of its experts together."""
    widths = (getattr(config, name, None) for name in ("intermediate_size", "n_inner", "ffn_dim"))
    dense = next((int(width) for width in widths if width), 4 * int(config.hidden_size))
    experts = getattr(config, "num_experts_per_tok", None) or 0
    expert_width = getattr(config, "moe_intermediate_size", None) or dense
    shared = getattr(config, "shared_expert_intermediate_size", None) or 0
    return max(dense, experts * expert_width + shared if experts else 0)


KEY_TOKENS = 19
"""Tokens that state a key of a look-up and ask for it, about."""


def _prompt_tokens(spec: Evaluation, names: Sequence[str]) -> int:
    """About the tokens of the prompts that metrics generate."""
    sizes = {
        "lookup": (spec.lookup_prompts, KEY_TOKENS * spec.lookup_keys),
        "copy": (spec.copy_prompts, 3 * spec.copy_tokens),  # stated twice, and asked for
    }
    asked = [sizes[name] for name in sizes if name in names]
    return sum(count * min(spec.seq_len, spec.filler_tokens + own) for count, own in asked)


def _moment_elements(shape: AttentionShape, group_size: int, moments: frozenset[str]) -> dict[str, int]:
    """Elements of each moment of a layer, by its name."""
    return {name: math.prod(moment_shape(shape, group_size, name)) for name in moments}


@dataclass(frozen=True)
class _LayerBytes:
    """Bytes that calibration takes for one layer.

    moments: names of what is summed. statistics, solving: memory of the sums, and while bases are computed. bases,
    kept, gradients: files of bases, of all that stays, and of Fisher information until the layer's codes are computed.
    """

    moments: frozenset[str]
    statistics: int
    solving: int
    bases: int
    kept: int
    gradients: int

    @classmethod
    def of(cls, shape: AttentionShape, form: LayerForm, recipe: Recipe, samples: int) -> _LayerBytes:
        """Estimate those of a layer.

        Args:
            samples: most tokens whose keys and values are kept; see SampleKeeper. 0 without gradients.
        """
        moments, group_size = wanted_moments(recipe, form), form.group_size
        elements = _moment_elements(shape, group_size, moments)
        bases = bases_bytes(shape, form)
        statistics = 8 * sum(elements.values())
        if recipe.prune.kmeans is not None:
            statistics += kmeans_bytes(recipe.prune.kmeans, shape.kv_width)
        # While bases are computed: the moments, a copy of the largest, the closed form's matrices, projections.
        groups, width = shape.num_kv_heads // group_size, group_size * shape.head_dim
        solving = statistics + 8 * max(elements.values()) + 96 * groups * width**2
        solving += 8 * (shape.query_width + shape.kv_width) * shape.hidden_size
        gradients = codes = 0
        if recipe.needs_gradients:
            # In memory Fisher information is unpacked to float64 and copied: about nine times the stored bytes of one
            # latent.
            stored = [stored_bytes(shape, group_size, name, samples) for name in wanted_gradients(form)]
            gradients = sum(stored)
            solving += 9 * max(stored)
            codes = codes_bytes(form, shape)
        outputs = packed_bytes(moment_shape(shape, group_size, "output")) if recipe.bases.refit else 0
        return cls(moments, statistics, solving, bases, outputs + bases + codes, gradients)


def evaluation_plan(checkpoint: Checkpoint, recipe: Recipe, options: MemoryOptions, progress: Progress) -> DevicePlan:
    """Decide where a model runs while accuracy is measured, by an estimate of its memory, which `progress` shows."""
    outline = ModelOutline.of(checkpoint)
    plan = DevicePlan.choose(options, outline.dtype)
    fit_threads(outline.stored_bytes)
    estimates = outline.evaluation(recipe, plan.device, plan.dtype)
    plan, line = plan.within_memory(options.offload, estimates)
    progress.message(line)
    return plan
