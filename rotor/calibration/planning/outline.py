"""Sizes of a model from its configuration and the headers of its shards, and estimates of the memory that work takes.

The estimate of a command is that of its largest stage, not their sum. Tensors that safetensors maps from a file are not
counted, because the system drops their pages when memory is short.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ...checkpoint.families import Family, attention_shape, family_of, find_family
from ...checkpoint.layout import AttentionShape, LayerForm, ModelForm
from ...models.memory import HEAD_POSITIONS, LOGIT_BYTES, SAMPLING_TOKENS, Estimate, Estimates
from ...models.projections import LONG_SEQ_LEN, bounded_seq_len, long_sequence_count
from ...models.source import Checkpoint, stored_dtype
from ...recipe import Evaluation, Recipe
from ...recipe.metric_registry import primitive_metrics, report_metrics
from ..bases.information import stored_bytes
from ..bases.layer import bases_bytes, needed_statistics
from ..bases.moments import CHUNK_BYTES, moment_shape, packed_bytes
from ..codes.quantiser import SAMPLED_TOKENS
from ..codes.side import codes_bytes
from ..codes.training import TRAINED_ELEMENT_BYTES
from ..pruning import kmeans_bytes
from .form import Frequencies, model_form, wanted_gradients

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

LIBRARIES_BYTES = 600 << 20
"""Resident memory of Python with torch and transformers imported and used (measured: 0.45 to 0.6 GB)."""

LOGIT_COPIES = 6
"""Tensors of the size of a batch's logits that scoring has at once (logits, float copy, log-softmax, reference)."""

FIXED_FREQUENCY_KINDS = ("linear", "yarn", "llama3")
"""Kinds of scaled RoPE whose frequencies do not depend on the length of a sequence."""


@dataclass(frozen=True)
class ModelOutline:
    """A model without its weights: everything that config and headers tell.

    config: the transformers config of the whole model; text_config: that of its language model.
    layers: elements of each decoder layer with attention, and of those before it; the last with those behind it.
    vocabulary: elements of each matrix over the vocabulary (the embedding, and the head unless tied).
    rest: elements of everything else.
    stored_bytes: bytes of all shards.
    """

    config: PreTrainedConfig
    family: Family
    shape: AttentionShape
    layers: tuple[int, ...]
    vocabulary: tuple[int, ...]
    rest: int
    stored_bytes: int

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> ModelOutline:
        """Outline a checkpoint; raises UnsupportedModelError if rotor cannot compress it."""
        shapes = {name: checkpoint.shape_of(name) for name in checkpoint.names}
        return cls.of_headers(checkpoint.config, shapes, checkpoint.total_bytes())

    @classmethod
    def of_headers(cls, config: PreTrainedConfig, shapes: dict[str, list[int]], stored_bytes: int) -> ModelOutline:
        """Outline a model from the shapes of its tensors by name and the bytes of their files; raises like `of`."""
        family, shape, text = find_family(config), attention_shape(config), config.get_text_config()
        layers, ends = [0] * shape.num_layers, family.placed
        vocabulary: list[int] = []
        rest = 0
        prefix = f"{family.decoder}.{family.layers}."
        for stored_name, dims in shapes.items():
            name = family.module_name(stored_name)
            index = name[len(prefix) :].partition(".")[0] if name.startswith(prefix) else ""
            if index.isdigit() and int(index) < text.num_hidden_layers:
                layers[min(bisect_left(ends, int(index)), len(ends) - 1)] += math.prod(dims)
            elif len(dims) == 2 and text.vocab_size in dims:
                vocabulary.append(math.prod(dims))
            else:
                rest += math.prod(dims)
        return cls(config, family, shape, tuple(layers), tuple(vocabulary), rest, stored_bytes)

    @property
    def text_config(self) -> PreTrainedConfig:
        return self.config.get_text_config()

    @property
    def parameters(self) -> int:
        return sum(self.layers) + sum(self.vocabulary) + self.rest

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the stored weights."""
        return stored_dtype(self.config)

    @property
    def frequencies(self) -> Frequencies | None:
        """Frequencies of each layer's RoPE, or None if they depend on the length of a sequence."""
        by_layer = [rotary_frequencies(self.config, layer) for layer in range(self.shape.num_layers)]
        known = [frequencies for frequencies in by_layer if frequencies is not None]
        return known if len(known) == len(by_layer) else None

    def form(self, recipe: Recipe) -> ModelForm:
        """Form that the recipe compresses the layers to; see `model_form`."""
        return model_form(recipe, self.shape, self.frequencies)

    def calibration(self, recipe: Recipe, device: torch.device, dtype: torch.dtype, batch_tokens: int) -> Estimates:
        """Estimate the memory and disk of `rotor calibrate`."""
        shape = self.shape
        form = self.form(recipe).layer(0)
        number = dtype.itemsize
        moments = wanted_moments(recipe, form)
        seq_len = bounded_seq_len(recipe.tokens.seq_len, self.config)
        num_sequences = -(-recipe.tokens.count // seq_len)
        count, group_size = num_sequences * seq_len, form.group_size
        groups = shape.num_kv_heads // group_size
        width = group_size * shape.head_dim
        kv_width = _kv_width(shape)
        elements = _moment_elements(shape, group_size, moments)
        bases = bases_bytes(shape, form)
        statistics = 8 * sum(elements.values())
        if recipe.prune.kmeans is not None:
            statistics += kmeans_bytes(recipe.prune.kmeans, kv_width)
        # While bases are computed: the moments, a copy of the largest, the closed form's matrices, projections.
        solving = statistics + 8 * max(elements.values()) + 96 * groups * width**2
        solving += 8 * (shape.num_heads * shape.head_dim + kv_width) * shape.hidden_size
        running = statistics + self._activations(max(1, batch_tokens // seq_len) * seq_len, group_size, number, moments)
        gradients = codes = passed = 0
        outputs = packed_bytes(moment_shape(shape, group_size, "output")) if recipe.bases.refit else 0
        if recipe.needs_gradients:
            # Fisher information is stored until the codes of its layer are computed. In memory it is unpacked to
            # float64 and copied: about nine times the stored bytes of one latent. Backward keeps activations.
            samples = min(count, recipe.codes.tokens, SAMPLED_TOKENS)
            stored = [stored_bytes(shape, group_size, name, samples) for name in wanted_gradients(form)]
            gradients = sum(stored)
            passed = (shape.num_layers + 2) * min(count, recipe.codes.tokens)  # tokens whose states are kept
            running, solving = 3 * running, solving + 9 * max(stored)
            codes = codes_bytes(form, shape)
            if recipe.distil.steps:  # the trained bases and codes
                codes += codes + bases
        kept_bytes = shape.num_layers * (outputs + bases + codes)
        disk_bytes = (
            kept_bytes + shape.num_layers * gradients + max(2 * count, passed) * shape.hidden_size * number
        )  # hidden states
        on_gpu = device.type == "cuda"
        stages = {"activations and statistics of one layer": running if on_gpu else max(running, solving)}
        if recipe.tokens.source == "synthetic":  # cache and logits of the sequences that are written together
            sequence = (
                2 * kv_width * number * seq_len * shape.num_layers + 4 * LOGIT_COPIES * self.text_config.vocab_size
            )
            written = min(num_sequences, max(1, SAMPLING_TOKENS // seq_len))
            stages["cache of the text that the model writes"] = written * sequence
        if recipe.distil.steps:
            elements_of_layer = groups * form.latents_per_group * form.columns(shape.head_dim) ** 2
            trained = TRAINED_ELEMENT_BYTES * shape.num_layers * elements_of_layer
            states = (shape.num_layers + 2) * max(seq_len, recipe.distil.tokens) * shape.hidden_size * number
            stages["bases and codes while they are trained"] = trained + states + running
        largest = max(stages, key=lambda name: stages[name])
        host = {"tokens": 2 * count * 8, "bases of one layer": bases}
        if on_gpu:
            host["statistics of one layer"] = solving
        return self._estimates(device, dtype, host, {largest: stages[largest]}, (disk_bytes, kept_bytes))

    def evaluation(self, recipe: Recipe, device: torch.device, dtype: torch.dtype) -> Estimates:
        """Estimate the memory of measuring accuracy (`rotor export --accuracy`), with one rewritten layer at a time."""
        spec = recipe.evaluation
        shape = self.shape
        form = self.form(recipe).layer(0)._replace(joint=False)
        attention = 2 * (shape.num_heads * shape.head_dim + _kv_width(shape)) * shape.hidden_size
        outputs = shape.num_heads * (form.group_size * shape.head_dim) ** 2 * 8 if recipe.bases.refit else 0
        rewriting = 3 * outputs + 3 * bases_bytes(shape, form) + attention * 2 * 8
        scoring = LOGIT_COPIES * max(LOGIT_BYTES[device.type], HEAD_POSITIONS * 4 * self.text_config.vocab_size)
        work = {"activations": max(self._activations(2048, form.group_size, dtype.itemsize), scoring)}
        searched = spec.search_tokens + _prompt_tokens(spec, primitive_metrics(spec.metric))
        reported = spec.report_tokens + _prompt_tokens(spec, report_metrics(spec.metric))
        long = long_sequence_count(spec.report_tokens, spec.seq_len, self.config) * LONG_SEQ_LEN
        tokens = max(searched, reported, long)
        disk_bytes = 3 * tokens * shape.hidden_size * dtype.itemsize  # hidden states
        host = {"rewriting one layer": rewriting}
        copied = attention * shape.num_layers
        return self._estimates(device, dtype, host, work, (disk_bytes, 0), copied)

    def calibration_flops(self, recipe: Recipe) -> dict[str, float]:
        """Count FLOPs of the large matrix products of `rotor calibrate` by stage; `statistics` are in float64.

        All experts of a mixture are counted as active.
        """
        tokens = recipe.tokens.count
        shape = self.shape
        form = self.form(recipe).layer(0)
        layers = 2.0 * sum(self.layers)
        whole = layers + 2.0 * max(self.vocabulary, default=0)
        elements = _moment_elements(shape, form.group_size, wanted_moments(recipe, form))
        per_token = sum(count * (shape.heads_per_kv if name == "query" else 1) for name, count in elements.items())
        flops = {"text": whole * tokens} if recipe.tokens.source == "synthetic" else {}
        if recipe.needs_gradients:  # forward once, then each layer again and twice as much backward
            flops["gradients"] = 4 * whole * min(tokens, recipe.codes.tokens)
        if recipe.distil.steps:  # the same, and the head of the uncompressed model
            flops["distillation"] = (
                4 * whole * recipe.distil.steps * min(tokens, recipe.distil.tokens) + layers * tokens
            )
        return {**flops, "passes": layers * tokens, "statistics": 2.0 * tokens * per_token * shape.num_layers}

    def evaluation_flops(self, recipe: Recipe) -> dict[str, float]:
        """Count FLOPs of the large matrix products of `rotor export --accuracy`: `search` and `report`.

        Both run the uncompressed model once and a compressed one, whose layers count like the uncompressed ones: the
        search at each of the usual number of points. `rotor validate` takes the report's.
        """
        spec = recipe.evaluation
        long = long_sequence_count(spec.report_tokens, spec.seq_len, self.config) * LONG_SEQ_LEN
        report_prompts = _prompt_tokens(spec, report_metrics(spec.metric))
        search = self._pass_flops(spec.search_tokens, _prompt_tokens(spec, primitive_metrics(spec.metric)))
        report = self._pass_flops(spec.report_tokens + long, report_prompts)
        divergence = self._pass_flops(spec.report_tokens + long, 0) - self._pass_flops(0, spec.report_tokens + long)
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
        return Estimates(estimate(self.parameters + copied), estimate(part + self.rest))

    def _activations(
        self, tokens: int, group_size: int, number_bytes: int, moments: frozenset[str] = frozenset()
    ) -> int:
        """Bytes of one layer's forward pass over `tokens` tokens, including those of capture."""
        shape = self.shape
        projected = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        attention = 2 * projected + shape.num_heads * shape.head_dim
        if "output" in moments and group_size > 1:
            attention += 2 * shape.num_heads * group_size * shape.head_dim
        numbers = 4 * shape.hidden_size + max(attention, 3 * _feed_forward_width(self.text_config))
        copies = min(CHUNK_BYTES, tokens * shape.num_heads * group_size * shape.head_dim * 8) if moments else 0
        head = tokens * shape.heads_per_kv * shape.head_dim * 8 if moments else 0
        return tokens * numbers * number_bytes + 2 * max(copies, head)


def wanted_moments(recipe: Recipe, form: LayerForm) -> frozenset[str]:
    """Names of the moments that the recipe's methods read."""
    return needed_statistics(recipe.bases.qk, recipe.bases.vo, form, recipe.bases.refit)


def rotary_frequencies(config: PreTrainedConfig, layer: int) -> tuple[float, ...] | None:
    """Radians by which each plane of a head rotates from one position to the next; empty in a model without RoPE.

    Returns:
        None if frequencies depend on the length of a sequence.
    """
    family, shape = family_of(config), attention_shape(config).layer(layer)
    if not shape.rotary_dim:
        return ()
    kind = family.rotary_type(config, layer)
    config = config.get_text_config()
    rope = config.rope_parameters if kind is None else config.rope_parameters[kind]
    if rope["rope_type"] == "default":
        exponents = torch.arange(0, shape.rotary_dim, 2, dtype=torch.float64) / shape.rotary_dim
        return tuple((float(rope["rope_theta"]) ** -exponents).tolist())
    if rope["rope_type"] not in FIXED_FREQUENCY_KINDS:
        return None
    inverse, _ = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, layer_type=kind)
    return tuple(inverse.double().tolist())


def needs_whole_model(recipe: Recipe) -> tuple[str, str] | None:
    """The setting that needs all weights in memory and a hint what to set instead, or None."""
    if recipe.distil.steps:
        return f"distil.steps {recipe.distil.steps}", "Give --set distil.steps=0."
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


def _prompt_tokens(spec: Evaluation, names: Sequence[str]) -> int:
    """Most tokens of the prompts that metrics generate."""
    prompt = min(spec.seq_len, spec.filler_tokens + 2 * spec.seq_len // 3)  # statement and question: a third each
    counts = {"lookup": spec.lookup_prompts, "copy": spec.copy_prompts}
    return prompt * sum(count for name, count in counts.items() if name in names)


def _moment_elements(shape: AttentionShape, group_size: int, moments: frozenset[str]) -> dict[str, int]:
    """Elements of each moment of a layer, by its name."""
    return {name: math.prod(moment_shape(shape, group_size, name)) for name in moments}


def _kv_width(shape: AttentionShape) -> int:
    return shape.num_kv_heads * shape.head_dim
