"""Tiny compressed models in pairs: one with rows of codes, folded by hand, and one whose latents stay numbers and are
rounded as the codes do it. Both read the same bases, so in float64 they are one function.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from coded import coded_layer
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rotor.bases.layer import LayerBases
from rotor.bases.pair import BasisPair, split_pair
from rotor.format.columns import Columns
from rotor.format.layout import Domain, GroupLayout, LayerLayout, folds_keys
from rotor.format.section import MARK
from rotor.kernels.reference import project_keys
from rotor.kernels.rows import key_columns, value_columns
from rotor.models.checkpoint import Checkpoint
from rotor.models.projections import read_attention
from rotor.rewriting.rewrite import rewrite_layer
from rotor.runtime.families import FAMILIES, attention_shape

COLUMNS = {
    1: [(Columns(n16=2, n8=4, n4=8), Columns(n4=8)), (Columns(n8=12), Columns(n16=2, n8=8)),
        (Columns(n2=16), Columns(n4=16)), (Columns(n4=16), Columns(n8=4))],
    4: [(Columns(n16=8, n8=8, n4=16), Columns(n8=16, n4=24))],
    2: [(Columns(n16=4, n8=4, n4=8, n2=16), Columns(n8=8, n4=16)), (Columns(n8=4, n4=16), Columns(n16=2, n2=16))],
}  # fmt: skip
"""Of each group, by group size, for four KV heads of 16 dimensions: two groups of equal rank differ in their bits."""


@dataclass
class Code:
    """Of the columns of one side of a layer, [width] each: bits, mean, and step."""

    bits: Tensor
    mean: Tensor
    step: Tensor

    @classmethod
    def of(cls, latents: Tensor, columns: list[Columns], means: bool) -> Code:
        """Steps that reach three standard deviations; `means` are -step/2 where a soft cap asks for it."""
        bits = torch.tensor([s.bits for c in columns for s in c.segments() for _ in range(s.count)])
        flat = latents.double().flatten(0, -2)
        step = torch.where(bits == 16, 1.0, 3 * flat.std(0) / 2.0 ** (bits - 1))
        mean = torch.where(bits == 16, 0.0, flat.mean(0) if means else -step / 2)
        return cls(bits, mean, step)

    @property
    def rest(self) -> Tensor:
        """What is left of each column besides step times code."""
        return torch.where(self.bits == 16, 0.0, self.mean + self.step / 2)

    def rounded(self, latents: Tensor) -> Tensor:
        """z -> m + s (n + 1/2)."""
        most = 2.0 ** (self.bits - 1)
        codes = torch.minimum(torch.maximum(((latents - self.mean) / self.step).floor(), -most), most - 1)
        return torch.where(self.bits == 16, latents, self.mean + self.step * (codes + 0.5)).to(latents.dtype)


@dataclass
class Pair:
    """Folders of the plain and of the coded checkpoint, and the codes (keys, values) of each layer."""

    plain: Path
    coded: Path
    codes: list[tuple[Code, Code]]
    layouts: list[LayerLayout]

    def load(self, dtype: torch.dtype = torch.float32) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.coded, dtype=dtype).eval()

    @contextmanager
    def reference(self, dtype: torch.dtype = torch.float64) -> Iterator[Any]:
        """The plain model, its latents rounded on their way into the cache."""
        model = AutoModelForCausalLM.from_pretrained(self.plain, dtype=dtype).eval()

        def rounded(layer: int, side: int, latents: Tensor) -> Tensor:
            return self.codes[layer][side].rounded(latents) if self.layouts[layer].coded else latents

        with on_latents(model, rounded):
            yield model


@contextmanager
def on_latents(model: Any, change: Callable[[int, int, Tensor], Tensor]) -> Iterator[None]:
    """Change what goes into the cache of a plain compressed model: change(layer, 0 keys or 1 values, latents)."""
    family = FAMILIES[model.config.model_type]
    by_basis: dict[int, int] = {}

    def hook(layer: int, side: int) -> Callable[..., Tensor]:
        return lambda module, inputs, output: change(layer, side, output)

    def project(key: Tensor, key_basis: Tensor, *others: Any) -> Tensor:
        return change(by_basis[id(key_basis)], 0, project_keys(key, key_basis, *others))

    handles = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rotor.runtime.attention.project_keys", project)
        for layer in range(attention_shape(model.config).num_layers):
            module: Any = family.attention_module(model, layer)
            if not module.layout.joint:
                handles.append(module.v_proj.register_forward_hook(hook(layer, 1)))
            if module.key_basis is None:
                handles.append(module.k_proj.register_forward_hook(hook(layer, 0)))
            else:
                by_basis[id(module.key_basis)] = layer
        yield
    for handle in handles:
        handle.remove()


def write_pair(
    source: Path,
    out: Path,
    domain: Domain,
    group_size: int,
    *,
    coded_layers: int = 99,
    columns: Sequence[tuple[Columns, Columns]] | None = None,
    joint: bool = False,
    rope_block: int = 1,
) -> Pair:
    """Compress a tiny model with random orthogonal bases, by numbers and by codes.

    Args:
        joint: keys and values share a latent, of the columns of the keys.
        rope_block: positions of the blocks within which keys are turned, in domain `pre`.
        coded_layers: how many of the first layers keep rows of codes; the others rows of numbers.
        columns: of the keys and values of each group, for another number of KV heads than four.
    """
    checkpoint = Checkpoint(source)
    config = checkpoint.config
    family, shape = FAMILIES[config.model_type], attention_shape(config)
    folded = folds_keys(domain, family.has_key_norm, rope_block)
    chosen = [(qk, None if joint else v) for qk, v in columns or COLUMNS[group_size]]
    layout = replace(coded_layer(domain, group_size, *chosen), folded_keys=folded, rope_block=rope_block)
    assert len(layout.groups) * group_size == shape.num_kv_heads
    plain_layout = replace(
        layout,
        groups=tuple(GroupLayout(g.kv_heads, g.qk_rank, g.v_rank, joint=joint) for g in layout.groups),
    )
    generator = torch.Generator().manual_seed(7)
    tensors = {name: checkpoint.tensor(name).clone() for name in checkpoint.names}
    rewritten: list[dict[str, Tensor]] = []
    prefixes = []
    for layer in range(shape.num_layers):
        weights = read_attention(family, layer, checkpoint.names, checkpoint.tensor, shape)
        if joint:
            pairs = split_pair(
                _rotation(shape, 2 * group_size, generator, shape.num_kv_heads // group_size), group_size
            )
        else:
            pairs = _rotation(shape, group_size, generator), _rotation(shape, group_size, generator)
        bases = LayerBases(domain, group_size, *pairs, joint=joint, rope_block=rope_block)
        prefixes.append(family.stored_prefix(layer, checkpoint.names))
        rewritten.append(rewrite_layer(weights, bases, plain_layout, tuple(range(len(layout.groups))), shape))
        for name in family.consumed:
            tensors.pop(prefixes[-1] + name, None)
    plain = _write(source, out / "plain", tensors, prefixes, rewritten, [plain_layout] * shape.num_layers)

    seen: dict[tuple[int, int], Tensor] = {}
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float64).eval()
    with on_latents(model, lambda layer, side, latents: seen.setdefault((layer, side), latents)), torch.no_grad():
        model(torch.randint(1, 4096, (2, 64), generator=generator))
    codes = []
    for layer in range(shape.num_layers):
        keys = Code.of(seen[layer, 0], key_columns(layout), joint or not family.softcap)
        codes.append((keys, keys if joint else Code.of(seen[layer, 1], value_columns(layout), True)))
    layouts = [layout if layer < coded_layers else plain_layout for layer in range(shape.num_layers)]
    folded_tensors = [
        fold(tensors, layout, *layer_codes, shape.heads_per_kv) if layout.coded else _with_biases(tensors, layout)
        for tensors, layer_codes, layout in zip(rewritten, codes, layouts, strict=True)
    ]
    coded = _write(source, out / "coded", tensors, prefixes, folded_tensors, layouts)
    return Pair(plain, coded, codes, layouts)


def fold(
    tensors: dict[str, Tensor], layout: LayerLayout, keys: Code, values: Code, heads_per_kv: int
) -> dict[str, Tensor]:
    """What RotorAttention reads where it keeps rows of codes, from what it reads where it keeps numbers."""
    found = {name: tensor.double() for name, tensor in tensors.items()}
    heads = layout.group_size * heads_per_kv

    def divided(name: str, code: Code) -> None:
        bias = found.get(f"{name}.bias", torch.zeros(len(code.step), dtype=torch.float64))
        found[f"{name}.weight"] = found[f"{name}.weight"] / code.step[:, None]
        found[f"{name}.bias"] = (bias - code.mean) / code.step

    def of_query_heads(numbers: Tensor, side: int) -> Tensor:
        widths = [(group.qk_rank, group.v_rank)[side] for group in layout.groups]
        return torch.cat([part.repeat(heads) for part in numbers.split(widths)])

    if not layout.joint:
        divided("v_proj", values)
    elif not layout.folded_keys:  # a part of the latents, whose mean is in key_shift
        for name in {"v_proj.weight", "v_proj.bias"} & set(found):
            found[name] = found[name] / (keys.step[:, None] if found[name].dim() == 2 else keys.step)
    weight = found["o_proj.weight"]
    bias = found.get("o_proj.bias", torch.zeros(len(weight), dtype=torch.float64))
    found["o_proj.bias"] = bias + weight @ of_query_heads(values.rest, 1)
    found["o_proj.weight"] = weight * of_query_heads(values.step, 1)
    if layout.folded_keys:
        divided("k_proj", keys)
    else:
        found["key_basis"] = found["key_basis"] / keys.step
        found["key_shift"] = -keys.mean / keys.step
    if layout.domain == "none":
        for name in {"q_proj.weight", "q_proj.bias"} & set(found):
            step = of_query_heads(keys.step, 0)
            found[name] = found[name] * (step[:, None] if found[name].dim() == 2 else step)
    else:
        basis = found["query_basis"]
        if layout.domain == "pre":
            parts = (basis * keys.rest).split([group.qk_rank for group in layout.groups], dim=-1)
            found["key_constant"] = torch.cat([p.sum(-1).unflatten(0, (layout.group_size, -1)) for p in parts])
        found["query_basis"] = basis * keys.step
    return {name: tensor.to(torch.float32).contiguous() for name, tensor in found.items()}


def _with_biases(tensors: dict[str, Tensor], layout: LayerLayout) -> dict[str, Tensor]:
    """A layer of numbers beside layers of codes has their biases too."""
    names = [f"{p}_proj" for p in ("kvo" if layout.folded_keys else "vo") if f"{p}_proj.weight" in tensors]
    return {f"{name}.bias": torch.zeros(len(tensors[f"{name}.weight"])) for name in names} | tensors


def _rotation(shape: Any, heads: int, generator: torch.Generator, groups: int = 0) -> BasisPair:
    """Of the width of `heads` heads, for so many groups (0: as many as there are of that size)."""
    width, groups = heads * shape.head_dim, groups or shape.num_kv_heads // heads
    basis = torch.linalg.qr(torch.randn(groups, width, width, generator=generator, dtype=torch.float64)).Q
    return BasisPair(basis, basis, torch.ones(groups, width, dtype=torch.float64))


def _write(
    source: Path,
    out: Path,
    others: dict[str, Tensor],
    prefixes: list[str],
    rewritten: list[dict[str, Tensor]],
    layouts: list[LayerLayout],
) -> Path:
    shutil.copytree(source, out)
    for file in out.glob("*.safetensors*"):
        file.unlink()
    mine = {p + name: t for p, tensors in zip(prefixes, rewritten, strict=True) for name, t in tensors.items()}
    save_file(others | mine, out / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["attn_implementation"] = MARK
    config["quantization_config"] = {
        "quant_method": MARK,
        "format_version": 1,
        "biases": sorted({name[0] for name in rewritten[0] if name.endswith("_proj.bias")}),
        "layers": {str(i): layout.to_dict() for i, layout in enumerate(layouts)},
    }
    (out / "config.json").write_text(json.dumps(config))
    return out
