"""Compressed models folded by hand, with random bases: what the runtime is tested with, whatever wrote it.

At full rank and 16 bits such a model equals its source. A model of codes equals one of numbers that are rounded as the
codes do it: in float64 both are one function.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rotor.checkpoint.families import attention_shape, find_family
from rotor.checkpoint.folding import rewrite
from rotor.checkpoint.layout import POST_ROPE, ExactTokens, GroupLayout, KeyForm, LayerLayout
from rotor.checkpoint.projections import split_projections
from rotor.checkpoint.rows import CodedRow, NumberRow, Row
from rotor.runtime import attention
from rotor.runtime.attention import RotorAttention
from rotor.runtime.replacement import replace_attention
from support.random_layers import of_numbers, random_bases, write_checkpoint

Bits = Sequence[tuple[int, ...]]
"""Of each group in turn, of its channels in turn, over and over."""

MIXED: Bits = ((16, 12, 8, 4, 4, 4, 4), (8, 4, 4, 4))


@dataclass
class Folding:
    """Form to which attention layers are compressed.

    bits: None for numbers. rank: of each latent; None: full. exact: tokens that are kept exactly.
    """

    form: KeyForm = POST_ROPE
    group_size: int = 1
    joint: bool = False
    bits: Bits | None = None
    rank: int | None = None
    exact: ExactTokens | None = None


def folded(model: Any, folding: Folding, rounded: bool = False) -> Any:
    """A copy of `model` with every attention layer compressed.

    Args:
        rounded: latents are numbers, which `rounding` rounds to what the codes of `folding` are.
    """
    shape, family = attention_shape(model.config), find_family(model.config)
    copied = copy.deepcopy(model).eval()
    drawn = layout_of(shape, folding)
    layouts = dict.fromkeys(range(shape.num_layers), of_numbers(drawn) if rounded else drawn)
    weights = []
    for index in layouts:
        parameters = dict(family.attention_module(copied, index).named_parameters())
        weights.append(split_projections(family, parameters.__getitem__, frozenset(parameters), shape))
    copied.source_biases = weights[0].bias_names
    modules: list[Any] = replace_attention(copied, family, shape, layouts, copied.source_biases)
    generator = torch.Generator().manual_seed(7)
    for own, module in zip(weights, modules, strict=True):
        module.to(model.dtype)
        bases, module.codes = random_bases(drawn, shape, generator, rounded, mean=0.0)
        with torch.no_grad():
            for name, tensor in rewrite(own, bases, module.layout, shape).items():
                module.get_parameter(name).copy_(tensor)
    return copied.eval()


@contextmanager
def rounding() -> Iterator[None]:
    """Models of `folded(..., rounded=True)` round the latents that go into the cache."""
    rows, parameters_of = attention.plain_rows, RotorAttention._parameters_of_attention
    modules: list[Any] = []

    def of_module(module: Any) -> Any:
        modules[:] = [module]
        return parameters_of(module)

    def rounded_rows(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = rows(*args)
        (module,) = modules
        if module.layout.coded or module.codes is None:
            return query, key, value
        of_key, of_value = module.codes
        return query, of_key(key), value if module.layout.joint else of_value(value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RotorAttention, "_parameters_of_attention", of_module)
        patch.setattr(attention, "plain_rows", rounded_rows)
        yield


@dataclass
class Pair:
    """Folder of a compressed checkpoint, and the same model with numbers in place of codes."""

    coded: Path
    source: Path
    folding: Folding

    def load(self, dtype: torch.dtype = torch.float32) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.coded, dtype=dtype).eval()

    @property
    def layouts(self) -> list[LayerLayout]:
        section = json.loads((self.coded / "config.json").read_text())["quantization_config"]
        return [LayerLayout.from_dict(layer, "test") for layer in section["layers"].values()]

    @contextmanager
    def reference(self, dtype: torch.dtype = torch.float64) -> Iterator[Any]:
        """The model of numbers, rounded on their way into the cache."""
        source = AutoModelForCausalLM.from_pretrained(self.source, dtype=dtype).eval()
        with rounding():
            yield folded(source, self.folding, rounded=True)


def write_pair(source: Path, out: Path, folding: Folding) -> Pair:
    """Compress the checkpoint `source` into the folder `out`."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64)
    write(folded(model, folding), source, out)
    return Pair(out, source, folding)


def write(model: Any, source: Path, out: Path) -> None:
    """A folded model as a checkpoint, which goes by the other files of `source`."""
    tied = set(model._tied_weights_keys or ()) if model.config.tie_word_embeddings else set()
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied}
    family, shape = find_family(model.config), attention_shape(model.config)
    modules: list[Any] = [family.attention_module(model, index) for index in range(shape.num_layers)]
    write_checkpoint(source, out, tensors, [module.layout for module in modules], model.source_biases)


def layout_of(shape: Any, folding: Folding) -> LayerLayout:
    """Groups of neighbouring heads, the last first, so that their order is not the model's."""
    size, joint = folding.group_size, folding.joint

    def row(index: int, width: int) -> Row:
        if folding.bits is None:
            return NumberRow(folding.rank or width)
        own = folding.bits[index % len(folding.bits)]
        bits = [own[channel % len(own)] for channel in range(min(folding.rank or width, width))]
        return CodedRow.of_bits(bits, scaled=joint)

    form, width = folding.form if shape.rotary_dim else POST_ROPE, size * shape.head_dim
    groups = []
    for index, first in enumerate(range(shape.num_kv_heads - size, -1, -size)):
        heads = tuple(range(first, first + size))
        value = None if joint else row(index + 1, width)
        groups.append(GroupLayout(heads, row(index, 2 * width if joint else width), value))
    return LayerLayout(tuple(groups), *form, folding.exact)
