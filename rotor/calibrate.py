"""From a model folder to a run folder: tokens, capture, statistics, bases."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import safetensors
import torch
import transformers

from .bases import LayerBases, layer_bases, needed_statistics
from .capture import capture
from .checkpoint import Checkpoint, check_writable, file_sha256, staged_folder, write_json
from .compress import load_model, pick_device, pick_dtype
from .errors import DataError, RecipeError
from .families import Family, attention_shape, find_family, read_attention
from .layout import AttentionShape, Domain, folds_keys
from .progress import Progress, StageTimes
from .pruning import ClusteredStatistics, check_clusters, prune_rows
from .recipe import Prune, Recipe, load_recipe
from .run import INFO, LOG, RECIPE, Run, write_bases, write_statistics
from .statistics import LayerStatistics
from .tokens import calibration_tokens

log = logging.getLogger("rotor")


def calibrate(
    model: str | Path,
    out: str | Path,
    recipe: str | Recipe = "rotor",
    overrides: Iterable[str] = (),
    *,
    device: str = "auto",
    dtype: str = "auto",
    batch_tokens: int = 2048,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Run:
    """Find the bases of a model's KV heads and write them, with their statistics, to a run folder.

    Args:
        model: folder of a transformers checkpoint with safetensors weights; only read.
        out: the run folder to write; it appears when everything is done.
        recipe: name of a bundled recipe, path of one, or a Recipe.
        overrides: `section.field=value` for the recipe.
        device, dtype: where and in what the forward passes run; `auto` is the GPU if there is one, and float32 on a
            CPU. Statistics are float64 in any case.
        batch_tokens: tokens in one forward pass.
    Raises:
        RotorError: see rotor.errors; nothing is written then.
    """
    progress = progress or Progress()
    spec = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, overrides)
    times = StageTimes()
    out = Path(out)
    check_writable(out, overwrite, [Path(model)])

    checkpoint = Checkpoint(model)
    family, shape = find_family(checkpoint.config), attention_shape(checkpoint.config)
    domains, sizes = _domains(spec, family), _group_sizes(spec, shape)
    candidates = {candidate_key(domain, size): (domain, size) for domain in domains for size in sizes}
    group_size = max(sizes)
    with times.stage("check model"), progress.task("check model", checkpoint.total_bytes(), "B") as advance:
        shards = {}
        for file in checkpoint.files:
            shards[file] = file_sha256(checkpoint.folder / file)
            for name in checkpoint.names_in(file):
                checkpoint.tensor(name)  # raises on NaN or Inf
            advance((checkpoint.folder / file).stat().st_size)
        for layer in range(shape.num_layers):
            read_attention(family, layer, checkpoint.names, checkpoint.tensor, shape)  # raises on other shapes
    target = pick_device(device)
    compute_dtype = pick_dtype(dtype, checkpoint.config.dtype or torch.float32, target)
    network = None
    if spec.tokens.source == "synthetic":  # other tokens come first: their errors need not wait for the model
        with times.stage("load model"):
            network = load_model(checkpoint.folder, target, compute_dtype)
    with times.stage("tokens"):
        sample = calibration_tokens(spec.tokens, checkpoint.config, checkpoint.tokenizer, network, progress)
        kept = prune_rows(sample, spec.prune)
    tokens = kept.rows
    if tokens.numel() < group_size * shape.head_dim:
        raise DataError(
            f"{tokens.numel()} calibration tokens, fewer than the {group_size * shape.head_dim} dimensions of a group.",
            "Raise it with --set tokens.count=N; the papers use at least 8192.",
        )
    check_clusters(spec.prune, tokens.numel())
    if network is None:
        with times.stage("load model"):
            network = load_model(checkpoint.folder, target, compute_dtype)
    wanted = frozenset().union(
        *(needed_statistics(spec.bases.qk, spec.bases.vo, domain, spec.bases.refit) for domain in domains)
    )
    with times.stage("capture"):
        statistics = collect(network, family, shape, group_size, wanted, tokens, batch_tokens, progress, spec.prune)
    information = []
    if spec.ranks.method == "fisher":
        with times.stage("gradients"):
            information = fisher_information(network, family, shape, tokens, spec.ranks.fisher_tokens, progress)
    del network
    with times.stage("bases"), progress.task("bases", shape.num_layers, "layers") as advance:
        bases: list[dict[str, LayerBases]] = []
        for layer, moments in enumerate(statistics):
            moments.check_finite(f"layer {layer}")
            weights = read_attention(family, layer, checkpoint.names, checkpoint.tensor, shape)
            methods = spec.bases.qk, spec.bases.vo
            bases.append(
                {
                    key: layer_bases(moments, weights, shape, domain, size, *methods, where=f"layer {layer}, {key}")
                    for key, (domain, size) in candidates.items()
                }
            )
            advance(1)

    info = {
        "model": {
            "path": str(checkpoint.folder.resolve()),
            "name": checkpoint.folder.resolve().name,
            "model_type": checkpoint.config.model_type,
            "shards": shards,
        },
        "candidates": {key: {"domain": d, "group_size": size} for key, (d, size) in candidates.items()},
        "folded_keys": {key: folds_keys(d, family.has_key_norm) for key, (d, _) in candidates.items()},
        "element_bytes": (checkpoint.config.dtype or torch.float32).itemsize,
        "shape": dataclasses.asdict(shape),
        "tokens": {
            "source": spec.tokens.source,
            "count": tokens.numel(),
            "rows": tokens.shape[0],
            "seq_len": tokens.shape[1],
            "topics": kept.topic_counts(),
            "pruned_rows": sample.rows.shape[0] - tokens.shape[0],
            "kmeans": spec.prune.kmeans,
        },
        "device": str(target),
        "dtype": str(compute_dtype).removeprefix("torch."),
        "versions": versions(),
    }
    needed = sum(t.numel() * 8 for s in statistics for t in s.sums.values()) * 4
    with staged_folder(out, overwrite, [checkpoint.folder], needed) as staging:
        with times.stage("write"):
            (staging / RECIPE).write_text(spec.to_yaml(), "utf-8")
            for layer, moments in enumerate(statistics):
                write_statistics(staging, layer, moments, information[layer] if information else None)
            write_bases(staging, bases)
        write_json(staging / INFO, {**info, "stages": times.stages})
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        (staging / LOG).write_text(
            "".join(f"{stamp} calibrate: {name}: {s:.2f} s\n" for name, s in times.seconds.items()), "utf-8"
        )
    return Run.open(out)


@torch.inference_mode()
def collect(
    model: Any,
    family: Family,
    shape: AttentionShape,
    group_size: int,
    wanted: frozenset[str],
    tokens: torch.Tensor,
    batch_tokens: int,
    progress: Progress,
    prune: Prune | None = None,
) -> list[LayerStatistics]:
    """Stream the second moments of every layer over `tokens` [rows, seq_len]; no activations are kept.

    Where `prune` asks for K-means, the moments are those of the centroids.
    """
    statistics: list[LayerStatistics]
    if prune is None or prune.kmeans is None:
        statistics = [LayerStatistics(shape, group_size) for _ in range(shape.num_layers)]
    else:
        statistics = [ClusteredStatistics(shape, group_size, prune=prune, layer=i) for i in range(shape.num_layers)]
    decoder = model.get_submodule(family.decoder)  # the language-model head is not needed
    rows = max(1, batch_tokens // tokens.shape[1])
    with (
        progress.task("calibrate", tokens.numel(), "tokens") as advance,
        capture(
            model, family, shape, group_size, wanted, lambda layer, activations: statistics[layer].add(activations)
        ),
    ):
        for batch in tokens.split(rows):
            decoder(batch.to(model.device), use_cache=False)
            advance(batch.numel())
    statistics = [layer.finish() if isinstance(layer, ClusteredStatistics) else layer for layer in statistics]
    for layer in statistics:
        layer.sums = {name: total.cpu() for name, total in layer.sums.items()}
    return statistics


def candidate_key(domain: Domain, group_size: int) -> str:
    return f"{domain}-{group_size}"


def _domains(recipe: Recipe, family: Family) -> list[Domain]:
    """Domains among which the ranks choose; raises RecipeError where the method needs RoPE and the model has none."""
    if family.rotary is None:
        if recipe.bases.qk == "rope-pairs":
            raise RecipeError("bases.qk: rope-pairs needs RoPE, which this model does not have.", "Choose svd or kq.")
        return ["none"]
    return ["pre", "post"] if recipe.groups.domain == "any" else [recipe.groups.domain]


def _group_sizes(recipe: Recipe, shape: AttentionShape) -> list[int]:
    """Group sizes among which the ranks choose; raises RecipeError if one does not divide the number of KV heads."""
    heads = shape.num_kv_heads
    if recipe.groups.size == "any":
        return [size for size in range(heads, 0, -1) if heads % size == 0]
    size = heads if recipe.groups.size == "all" else int(recipe.groups.size)
    if heads % size:
        raise RecipeError(
            f"groups.size {size} does not divide the model's {heads} KV heads.", "Choose a divisor, all, or any."
        )
    return [size]


def fisher_information(
    model: Any, family: Family, shape: AttentionShape, tokens: torch.Tensor, count: int, progress: Progress
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Sum of squared gradients of the next-token loss with respect to W_k and W_v of each KV head.

    The gradient is taken row by row of tokens and squared before it is summed.

    Returns:
        Per layer two tensors [num_kv_heads], float64: for keys and for values.
    Source: Palu, arXiv 2407.21118, section 3.2.
    """
    rows = tokens[: max(1, count // tokens.shape[1])]
    zeros = torch.zeros(shape.num_kv_heads, dtype=torch.float64)
    totals = [(zeros.clone(), zeros.clone()) for _ in range(shape.num_layers)]
    parameters = [family.kv_parameters(model, layer) for layer in range(shape.num_layers)]
    with progress.task("gradients", rows.numel(), "tokens") as advance:
        for row in rows.split(1):
            ids = row.to(model.device)
            loss = model(ids, labels=ids, use_cache=False).loss
            distinct = {id(parameter): parameter for pair in parameters for parameter, _ in pair}
            gradients = dict(zip(distinct, torch.autograd.grad(loss, list(distinct.values())), strict=True))
            for layer, pair in enumerate(parameters):
                for side, (parameter, part) in enumerate(pair):
                    squared = part(gradients[id(parameter)]).double().square()
                    totals[layer][side].add_(squared.reshape(shape.num_kv_heads, -1).sum(-1).cpu())
            advance(row.numel())
    return totals


def versions() -> dict[str, str]:
    from . import __version__

    return {
        "rotor": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "safetensors": safetensors.__version__,
    }
